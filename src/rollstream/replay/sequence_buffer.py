"""A replay buffer of sequences, for learners of recurrent networks."""

from __future__ import annotations

import math

from rollstream.replay.buffer import ReplayBuffer
from rollstream.replay.fields import Field
from rollstream.replay.rate_limiters import MinSize
from rollstream.replay.selectors import Fifo, Prioritized, Uniform
from rollstream.replay.signature import Signature
from rollstream.replay.table import Table
from rollstream.replay.windowing import Sequences


def sequence_buffer(
    signature: Signature,
    shard: int,
    *,
    num_steps: int,
    batch_size: int,
    length: int,
    period: int,
    burn_in: int = 0,
    priority_exponent: float = 0.0,
    frame_stack: int = 1,
    frame_axis: int = -1,
    seed: int = 0,
) -> ReplayBuffer:
    """A replay buffer of sequences with the steps before them and a recorded state, as R2D2 uses it.

    An item has up to `length` steps of one episode, to train on. A batch has `action`, `reward` and
    `terminated` of these, `[N, length]`, padded with zeros; `observation`, `[N, burn_in + length + 1, ...]`,
    of the steps before them, of these, and of the row after the last; and `state`, recorded at the first of
    all these steps. Where the episode has only `num_before` steps before the item, fewer than `burn_in`, its
    first observation is repeated.

    Args:
        signature: The columns of a step: `observation` (or its parts), `state` (or its parts), `action`,
            `reward`, `terminated`.
        shard: Index of the buffer among several; each shard samples with its own seed.
        num_steps: Number of steps to keep: as many sequences as they make, without those before the first.
            The oldest are removed.
        batch_size: Sequences per batch.
        length: Maximum number of steps of a sequence.
        period: Steps from the start of one sequence to the start of the next.
        burn_in: Maximum number of steps before a sequence.
        priority_exponent: alpha of prioritized replay; 0 for uniform sampling.
        frame_stack: Number of stacked frames in an observation; each frame is stored once.
        frame_axis: Axis along which frames are concatenated.
        seed: Seed of the sampling.
    """

    def fields_of(column: str, field: Field) -> dict[str, Field]:
        """A field for each part of a column."""
        parts = [name for name in signature if name.partition("/")[0] == column]
        return {name: Field(name, field.at, field.stack, field.before) for name in parts}

    max_size = math.ceil(num_steps / period)
    table = Table(
        signature,
        {
            **fields_of("observation", Field("", "steps_and_next", frame_stack, burn_in)),
            **fields_of("state", Field("", "first", before=burn_in)),
            **{name: Field(name, "steps") for name in ("action", "reward", "terminated")},
        },
        max_size=max_size,
        max_length=length,
        sampler=Prioritized(priority_exponent) if priority_exponent else Uniform(),
        remover=Fifo(),
        rate_limiter=MinSize(1),
        initial_rows=max_size * period + max(1024, num_steps // 64),
    )
    return ReplayBuffer(
        table,
        Sequences(length, period),
        batch_size=batch_size,
        frame_axis=frame_axis if frame_stack > 1 else None,
        seed=[seed, shard],
    )
