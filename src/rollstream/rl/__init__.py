"""Reinforcement learning on flows: environments, batches, policies, workers, learners and operators.

Importing it sets two options of JAX on CPUs and one of memory. `NPROC`, the size of XLA's thread pool, is 2
unless the environment sets it: the results of long sums depend on it, and a run should be the same on every
engine and machine. Dispatch is synchronous: handing an action to another thread takes as long as computing it
(43 instead of 22 us). Freed arrays stay with the process: glibc would return their memory and fault it in
again, 40 pages per update of SAC, which took a tenth of the time on a virtual machine.
"""

import ctypes
import os
from contextlib import suppress

from rollstream.engine.launch import XLA_THREADS

os.environ.setdefault("NPROC", XLA_THREADS)  # read once, when JAX starts

import jax

jax.config.update("jax_cpu_enable_async_dispatch", False)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
with suppress(AttributeError):  # only glibc has it
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 32 << 20)
    ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, 128 << 20)
