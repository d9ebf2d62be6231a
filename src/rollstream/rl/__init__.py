"""Reinforcement learning on flows: environments, batches, policies, workers, learners and operators.

Importing it sets two options of JAX on CPUs. `NPROC`, the size of XLA's thread pool, is 2 unless the
environment sets it: the results of long sums depend on it, and a run should be the same on every engine and
machine. Dispatch is synchronous: handing an action to another thread takes as long as computing it (43
instead of 22 us).
"""

import os

from rollstream.engine.launch import XLA_THREADS

os.environ.setdefault("NPROC", XLA_THREADS)  # read once, when JAX starts

import jax

jax.config.update("jax_cpu_enable_async_dispatch", False)
