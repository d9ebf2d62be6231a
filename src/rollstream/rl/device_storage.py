"""The arrays of replay on the device: allocated, written in place, saved and loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollstream.engine import RollstreamError
from rollstream.replay.signature import ArraySpec, Signature
from rollstream.rl.device_sampling import Priorities, RingLayout, Storage, write_finals, write_rollouts
from rollstream.rl.device_sum_tree import create_levels
from rollstream.rl.jit import jit
from rollstream.rl.transfer_buffer import TransferBuffer

Array = np.ndarray[Any, Any]
_BLOCK_BYTES = 64 << 20
"""Bytes of a saved array that are on the device twice while it is loaded."""


class DeviceStorage:
    """Steps in a ring, final observations beside it, and priorities. The first write allocates them.

    Args:
        layout: The layout of the ring.
        signature: The columns of a step.
        num_finals: Number of final observations there is room for; `add_finals` may grow it.
    """

    def __init__(self, layout: RingLayout, signature: Signature, num_finals: int):
        self.layout = layout
        self.specs = _column_specs(layout, signature)
        self.arrays: Storage | None = None
        self.priorities: Priorities | None = None
        self._num_finals = num_finals
        self._packing = _packing(layout, self.specs)
        self._write = jit(partial(write_rollouts, layout, self._packing), donate=(0, 1))
        self._write_finals = jit(write_finals, donate=(0,))

    def write(self, values: Mapping[str, Any]) -> None:
        """Write a round.

        Args:
            values: The columns of its steps, `last_observation` and `position`; also `ended` for n-step
                returns, `age` for stacks of frames, and `items` for priorities.
        """
        if self.arrays is None:
            self.arrays, self.priorities = self._allocate()
        self.arrays, self.priorities = self._write(self.arrays, self.priorities, self._packing.pack(values))

    def add_finals(self, rows: Array, slots: list[int], room: int, values: dict[str, Array]) -> None:
        """Store observations that follow some rows, in slots of `room`; padded to a power of 2."""
        assert self.arrays is not None, "rows come before their final observations"
        if room > self._num_finals:
            self._num_finals = room
            grown = {name: _resized(own, room) for name, own in self.arrays.finals.items()}
            self.arrays = self.arrays._replace(finals=grown)
        padding = (1 << (len(rows) - 1).bit_length()) - len(rows)
        index = np.pad(rows, (0, padding), constant_values=self.layout.num_rows).astype(np.int32)
        chosen = np.pad(slots, (0, padding), constant_values=room).astype(np.int32)
        padded = {
            name: np.pad(own, [(0, padding)] + [(0, 0)] * (own.ndim - 1)) for name, own in values.items()
        }
        self.arrays = self._write_finals(self.arrays, index, chosen, padded)

    def observations(self, rows: Array) -> dict[str, Array]:
        """The observations of some rows, as NumPy arrays by column."""
        assert self.arrays is not None, "there are no rows yet"
        columns = self.arrays.columns
        return {name: np.asarray(columns[name][rows]) for name in self.layout.observations}

    # Memory ------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        rows = self.layout.num_rows
        observations = sum(self.specs[name].nbytes for name in self.layout.observations)
        levels = 4 * rows * 32 // 31 if self.layout.priority_exponent else 0
        columns = rows * sum(spec.nbytes for spec in self.specs.values())
        return columns + self._num_finals * observations + levels

    def _allocate(self) -> tuple[Storage, Priorities | None]:
        """Arrays of zeros; raise if the device has too little memory for them."""
        device = jax.devices()[0]
        memory = _memory(device)
        fix = "reduce buffer_size, or set replay to host"
        needed = f"replay on the device needs {self.nbytes / 1e9:.3g} GB"
        if memory is not None and self.nbytes > memory:
            raise RollstreamError(f"{needed}, and {device} has {memory / 1e9:.3g} GB; {fix}")
        try:
            # Bound to the device, as the results of programs are: others would be compiled anew.
            return jax.block_until_ready(jax.device_put(self._zeros(), device))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise RollstreamError(f"{needed}, which {device} does not have free; {fix}") from error

    def _zeros(self) -> tuple[Storage, Priorities | None]:
        rows, specs = self.layout.num_rows, self.specs
        columns = {name: jnp.zeros((rows, *spec.shape), spec.dtype) for name, spec in specs.items()}
        finals = {
            name: jnp.zeros((self._num_finals, *specs[name].shape), specs[name].dtype)
            for name in self.layout.observations
        }
        priorities = Priorities(create_levels(rows), jnp.ones(())) if self.layout.priority_exponent else None
        return Storage(columns, finals), priorities

    # State -------------------------------------------------------------------------------------

    def state_dict(self, steps: int) -> dict[str, Any] | None:
        """Arrays after so many steps of each environment, without rows never used; views where possible."""
        if self.arrays is None:
            return None
        used = min(steps + 1, self.layout.length) * self.layout.num_envs
        return {
            "columns": {name: np.asarray(own)[:used] for name, own in self.arrays.columns.items()},
            "finals": {name: np.asarray(own) for name, own in self.arrays.finals.items()},
            "priorities": [np.asarray(own) for own in jax.tree.leaves(self.priorities)],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore arrays: allocate them as the first write does, and write the saved ones into them."""
        self.arrays = self.priorities = None
        if state is None:
            return
        self._num_finals = len(next(iter(state["finals"].values())))
        arrays, priorities = self._allocate()
        self.arrays = Storage(
            {name: _filled(own, state["columns"][name]) for name, own in arrays.columns.items()},
            {name: _filled(own, state["finals"][name]) for name, own in arrays.finals.items()},
        )
        if priorities is not None:
            *levels, max_priority = state["priorities"]
            filled = tuple(_filled(own, saved) for own, saved in zip(priorities.levels, levels, strict=True))
            self.priorities = Priorities(filled, jax.device_put(jnp.array(max_priority), jax.devices()[0]))


def _column_specs(layout: RingLayout, signature: Signature) -> dict[str, ArraySpec]:
    """The columns on the device, with JAX's dtypes."""
    specs = {
        name: ArraySpec(spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype))
        for name, spec in signature.items()
    }
    specs["final"] = ArraySpec((), np.int32)
    if layout.n_step > 1:
        specs["ended"] = ArraySpec((), np.bool_)
    if layout.frame_stack > 1:
        specs["age"] = ArraySpec((), np.int32)
    return specs


def _packing(layout: RingLayout, columns: Mapping[str, ArraySpec]) -> TransferBuffer:
    """How a round travels to the device."""
    length, width = layout.rollout_length, layout.num_envs
    specs: dict[str, Any] = {
        name: ((length, width, *spec.shape), spec.dtype) for name, spec in columns.items() if name != "final"
    }
    for name in layout.observations:
        specs[f"last_{name}"] = (width, *columns[name].shape), columns[name].dtype
    specs["position"] = (), np.int32
    if layout.priority_exponent:
        specs["items"] = (layout.n_step - 1 + length, width), np.bool_
    return TransferBuffer(specs)


@partial(jax.jit, static_argnums=1)
def _resized(array: Any, rows: int) -> Any:
    """A copy with zeros after it."""
    return jnp.zeros((rows, *array.shape[1:]), array.dtype).at[: len(array)].set(array)


def _filled(array: Any, saved: Array) -> Any:
    """A device array, which is donated, with saved values in its first rows; copied block by block."""
    block = min(len(saved), max(1, _BLOCK_BYTES // (saved[:1].nbytes or 1)))
    for first in range(0, len(saved), block):
        start = min(first, len(saved) - block)  # all blocks have one shape: the last may overlap
        # One block at a time is on its way to the device.
        array = jax.block_until_ready(_write_rows(array, saved[start : start + block], start))
    return array


def _updated_rows(array: Any, rows: Any, start: Any) -> Any:
    return jax.lax.dynamic_update_slice_in_dim(array, rows, start, 0)


_write_rows = jit(_updated_rows, donate=(0,))


def _memory(device: Any) -> int | None:
    """Bytes of a device's memory, if it tells; of a CPU, the machine's."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (device.memory_stats() or {}).get("bytes_limit")
