"""Replay on the device: transitions in arrays of the learner's device, sampled inside its jitted update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rollstream.engine import RollstreamError
from rollstream.replay.buffer import Chunk
from rollstream.replay.episode_boundaries import FinalObservations
from rollstream.replay.rate_limiters import MinSize
from rollstream.replay.signature import Signature, flatten_columns
from rollstream.rl.device_sampling import RingLayout
from rollstream.rl.device_storage import DeviceStorage
from rollstream.rl.device_sum_tree import num_levels
from rollstream.rl.rollout_rounds import join_chunks
from rollstream.rl.transfer_buffer import rounded_up
from rollstream.rl.transition_ring import FinalSlots, TransitionRing

Array = np.ndarray[Any, Any]
_ROWS_PER_FINAL = 128
"""Rows per slot for a final observation, to begin with. More slots compile the update again."""
_MIN_FINALS = 64


@dataclass(frozen=True)
class DeviceDraw:
    """A batch that stays on the device: where it is, and the random numbers that choose it."""

    storage: DeviceStorage
    draws: Array
    """See `sample_transitions`."""
    env_steps: int
    """Environment steps of the training when the batch was drawn."""


class DeviceReplay:
    """A replay buffer of n-step transitions on the learner's device, as `transition_buffer` is on the host.

    It keeps the newest steps of every environment. A write is one transfer and one jitted call that changes
    the arrays in place. `sample` only draws random numbers: the learner's jitted update gathers the
    transitions and sets their priorities (`Learner.train_on_draw`).

    Args:
        signature: The columns of a step: `observation` (or its parts), `action`, `reward`, `terminated`.
        num_envs: Environments of all workers.
        rollout_length: Steps of each environment per write.
        max_size: Number of transitions, rounded up to whole rollouts of all environments, at least one.
        min_size: Number of transitions before the first batch.
        batch_size: Transitions per batch.
        n_step: Steps per transition.
        priority_exponent: alpha of prioritized replay; 0 for uniform sampling.
        frame_stack: Number of stacked frames in an observation; each frame is stored once.
        frame_axis: Axis along which frames are concatenated.
        seed: Seed of the sampling.
    """

    def __init__(
        self,
        signature: Signature,
        *,
        num_envs: int,
        rollout_length: int,
        max_size: int,
        min_size: int,
        batch_size: int,
        n_step: int = 1,
        priority_exponent: float = 0.0,
        frame_stack: int = 1,
        frame_axis: int = -1,
        seed: int = 0,
    ):
        # A write completes transitions of its T steps and of the n - 1 before them: all of them stay.
        steps = max(math.ceil(max_size / num_envs), rollout_length) + n_step - 1
        capacity = rounded_up(steps, rollout_length)
        self.layout = RingLayout(
            num_envs,
            rollout_length,
            # the newest observation and the frames before the oldest step have rows of their own
            length=rounded_up(capacity + frame_stack, rollout_length),
            capacity=capacity,
            observations=tuple(name for name in signature if name.partition("/")[0] == "observation"),
            n_step=n_step,
            frame_stack=frame_stack,
            frame_axis=frame_axis,
            priority_exponent=priority_exponent,
        )
        self.rate_limiter = MinSize(min_size)
        self.batch_size = batch_size
        self.env_steps = 0
        self._ring = TransitionRing(self.layout)
        self._slots = FinalSlots(max(_MIN_FINALS, self.layout.num_rows // _ROWS_PER_FINAL))
        self.storage = DeviceStorage(self.layout, signature, self._slots.count)
        self._has_next = np.zeros(num_envs, bool)
        """Environments where the newest observation follows the newest step."""
        self._generator = np.random.default_rng([seed, 0, 0, 0, 7])

    @property
    def size(self) -> int:
        """Number of transitions."""
        return self._ring.size

    # Insert ------------------------------------------------------------------------------------

    def insert(self, chunks: Sequence[Chunk]) -> int:
        """Write one rollout of every worker; return the number of transitions they complete.

        The environments of a worker that sent nothing start an episode when it sends again.
        """
        layout, ring = self.layout, self._ring
        new = join_chunks(chunks, layout.rollout_length, layout.num_envs)
        if new.reset.size or new.missing.size:
            self._abandon(np.union1d(new.reset, new.missing))
        start, position = ring.steps, ring.position
        ended = np.logical_or(new.columns["terminated"], new.columns["truncated"])
        appended, removed = ring.append(ended, new.mask, new.finals, new.missing)
        ages = np.minimum(appended.ages, layout.frame_stack)
        values = {"position": position, "items": appended.items, "ended": appended.ended, "age": ages}
        self.storage.write(new.columns | new.last | values)
        self._slots.release(self._write_index(start - layout.capacity))
        self._add_finals(start, new.finals)
        self._has_next[:] = True
        self._has_next[new.missing] = False
        self._has_next[[i for t, i, _ in new.finals if t == layout.rollout_length - 1]] = False
        self.env_steps = max(self.env_steps, new.env_steps)
        count = int(np.count_nonzero(appended.items))
        self.rate_limiter.inserts += count
        self.rate_limiter.deletes += removed
        return count

    def _abandon(self, streams: Array) -> None:
        """End the current episodes of some environments; keep the observations after their last steps."""
        ring = self._ring
        ring.reset(streams)
        kept = streams[self._has_next[streams]]
        if kept.size:
            values = self.storage.observations(ring.rows(ring.steps, kept))
            self._store_finals(ring.steps - 1, ring.rows(ring.steps - 1, kept), values)

    def _add_finals(self, start: int, finals: FinalObservations) -> None:
        """Store the final observations of the round that starts with a step."""
        if finals:
            flat = [flatten_columns({"observation": own}) for _, _, own in finals]
            values = {name: np.stack([own[name] for own in flat]) for name in self.layout.observations}
            times, streams = np.array([(t, i) for t, i, _ in finals]).T
            self._store_finals(start, self._ring.rows(start + times, streams), values)

    def _store_finals(self, step: int, rows: Array, values: dict[str, Array]) -> None:
        """Store observations that follow rows of one write, which a step belongs to."""
        slots = self._slots.take(self._write_index(step), len(rows))
        self.storage.add_finals(rows, slots, self._slots.count, values)

    def _write_index(self, step: int) -> int:
        """The index, among the writes in the ring, of the one that a step belongs to."""
        return step % self.layout.length // self.layout.rollout_length

    # Sample ------------------------------------------------------------------------------------

    def can_sample(self, count: int = 1) -> bool:
        """Whether there are enough transitions, or as many as there can be."""
        return self.rate_limiter.can_sample(count) or (self._ring.is_full and self.size > 0)

    def sample(self) -> DeviceDraw | None:
        """Draw a batch, which stays on the device; `None` while there are too few transitions."""
        if not self.can_sample(self.batch_size):
            return None
        self.rate_limiter.samples += self.batch_size
        if self.layout.priority_exponent:
            shape = self.batch_size, num_levels(self.layout.num_rows)
            draws = self._generator.random(shape, np.float32)
        else:
            draws = self._ring.draw(self.batch_size, self._generator)
        return DeviceDraw(self.storage, draws, self.env_steps)

    # State -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Arrays, counts and random state; arrays may be views of the live ones."""
        return {
            "device": self._settings(),
            "storage": self.storage.state_dict(self._ring.steps),
            "ring": self._ring.state_dict(),
            "slots": self._slots.state_dict(),
            "has_next": self._has_next.copy(),
            "rate_limiter": self.rate_limiter.state_dict(),
            "generator": self._generator.bit_generator.state,
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a buffer with the same arguments."""
        saved = state["device"]
        for name, value in self._settings().items():
            if saved.get(name) != value:
                raise RollstreamError(
                    f"replay on the device was saved with {name} {saved.get(name)}, and has {value} now; "
                    f"resume with the settings and the number of environments of the checkpoint"
                )
        self.storage.load_state_dict(state["storage"])
        self._ring.load_state_dict(state["ring"])
        self._slots.load_state_dict(state["slots"])
        self._has_next = np.array(state["has_next"])
        self.rate_limiter.load_state_dict(state["rate_limiter"])
        self._generator.bit_generator.state = state["generator"]
        self.env_steps = int(state["env_steps"])

    def _settings(self) -> dict[str, Any]:
        """What a saved state has to agree on, as plain data."""
        columns = {name: str(spec) for name, spec in self.storage.specs.items()}
        return asdict(self.layout) | {"observations": list(self.layout.observations), "columns": columns}
