"""Programs of updates with few arguments and results, which run faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rollstream.rl.jit import host_memory, jit
from rollstream.rl.packed_tree import PackedTrees, copied
from rollstream.rl.transfer_buffer import TransferBuffer

Array = Any
_MAX_PACKED = 1 << 20
"""Bytes of a NumPy array that is packed with others; larger ones are sent as they are."""


def on_packed(program: Callable[..., Any], packing: PackedTrees) -> Callable[..., Any]:
    """A program of updates, see `updates_on_batch`, that takes and returns `trained` packed."""

    def run(trained: Any, finite: Array, priorities: Any, *inputs: Any) -> Any:
        trained, *results = program(packing.unpack(trained), finite, priorities, *inputs)
        return packing.pack(trained), *results

    return run


class AcceleratorProgram:
    """A program of updates, see `updates_on_batch`, as accelerators run it fastest.

    Its trained arrays, weights first, are packed. They are donated, so that they stay in place, and CUDA
    graphs as well: on one H200, an update of SAC after the other takes 117 us instead of 394. The new weights
    are published beside them, as a copy. Small NumPy inputs are sent in one transfer, and metrics are written
    to the host's memory.

    Args:
        program: The program: of `trained`, `finite`, priorities and inputs.
        packing: How `trained` is packed.
        publish_to: The memory that weights are published in; `None` for the device's.
        concurrent: See `jit`.
    """

    def __init__(
        self, program: Callable[..., Any], packing: PackedTrees, publish_to: Any, *, concurrent: bool
    ):
        self._program = on_packed(program, packing)
        self._publish_to = publish_to
        self._concurrent = concurrent
        self._compiled: dict[Any, tuple[TransferBuffer, Any]] = {}
        """By structure, shapes and dtypes of the inputs."""

    def __call__(self, trained: Any, finite: Array, priorities: Any, *inputs: Any) -> Any:
        """Call the program, which donates `trained`, packed, `finite` and the priorities.

        Returns the new `trained`, the published weights, and the other results of the program.
        """
        leaves, structure = jax.tree.flatten(inputs)
        packed: dict[str, Any] = {}
        others: list[Any] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, (np.ndarray, np.generic)) and leaf.nbytes <= _MAX_PACKED:
                packed[str(index)] = leaf
            else:
                others.append(leaf)
        key = structure, tuple((name, leaf.shape, leaf.dtype) for name, leaf in packed.items())
        if key not in self._compiled:
            packing = TransferBuffer({name: _spec(leaf) for name, leaf in packed.items()})
            run = self._packed_program(structure, packing)
            arguments = trained, finite, priorities, others, packing.pack(packed)
            compiled = jit(
                run,
                concurrent=self._concurrent,
                donate=(0, 1, 2),
                out_shardings=self._memory_of(jax.eval_shape(run, *arguments)),
            )
            self._compiled[key] = packing, compiled
        packing, compiled = self._compiled[key]
        return compiled(trained, finite, priorities, others, packing.pack(packed))

    def _packed_program(self, structure: Any, packing: TransferBuffer) -> Callable[..., Any]:
        def run(trained: Any, finite: Array, priorities: Any, others: list[Any], buffer: Array) -> Any:
            packed, rest = packing.unpack(buffer), iter(others)
            leaves = [
                packed[str(index)] if str(index) in packed else next(rest)
                for index in range(structure.num_leaves)
            ]
            inputs = jax.tree.unflatten(structure, leaves)
            trained, *results = self._program(trained, finite, priorities, *inputs)
            return trained, copied(trained[0]), *results

        return run

    def _memory_of(self, results: Any) -> Any:
        """Where results of such shapes go."""
        *others, metrics = results
        places: list[Any] = [None] * len(others)
        places[1] = self._publish_to
        return *places, replace(metrics, scalars=host_memory(), arrays=None)


def _spec(leaf: Array) -> tuple[tuple[int, ...], Any]:
    return leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)
