"""`jax.jit` with compiler options for small networks on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_SEQUENTIAL: dict[str, str | bool] = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_cpu_multi_thread_eigen": False,
}


def jit(function: Callable[..., Any], *, concurrent: bool = False, donate: tuple[int, ...] = ()) -> Any:
    """Compile a function with `jax.jit`.

    Args:
        function: A pure function of arrays.
        concurrent: Let XLA run independent operations at the same time on a CPU. Two critics of 256 x 256
            then take two thirds of the time; networks of 64 x 64 take longer, because handing work to another
            thread costs more than the work (40 instead of 25 ms for an update of PPO).
        donate: Positions of arguments whose memory the results may take. Only what a jitted function returned
            may be donated: JAX may share the memory of other arrays with NumPy.
    """
    options = {} if concurrent else _SEQUENTIAL
    return jax.jit(function, compiler_options=options, donate_argnums=donate)
