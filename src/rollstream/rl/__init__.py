"""Reinforcement learning on flows: environments, batches, policies, workers, learners and operators.

Importing this fixes how JAX computes on processors. `NPROC`, the threads of XLA, is two unless the
environment says otherwise, however many cores there are: results depend on it where sums are long, and a run
should give the same on every engine and machine. And what is dispatched is computed at once, in the thread
that asks: for an action, handing it to another takes as long again as computing it (43 instead of 22 us).
"""

import os

from rollstream.engine.launch import XLA_THREADS

os.environ.setdefault("NPROC", XLA_THREADS)  # read once, when JAX starts

import jax

jax.config.update("jax_cpu_enable_async_dispatch", False)
