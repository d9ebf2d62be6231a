"""Buffers of transitions: where they began, what was done, what came of it, where they ended."""

from __future__ import annotations

from rollstream.replay.buffer import Buffer
from rollstream.replay.limiter import MinSize
from rollstream.replay.selectors import Fifo, Prioritized, Uniform
from rollstream.replay.steps import Signature
from rollstream.replay.table import Field, Table
from rollstream.replay.windowing import Transitions


def transition_buffer(
    signature: Signature,
    number: int,
    *,
    size: int,
    min_size: int,
    batch_size: int,
    n_step: int = 1,
    exponent: float = 0.0,
    frames: int = 1,
    frame_axis: int = -1,
    seed: int = 0,
) -> Buffer:
    """One of several buffers; it can be made where it is to live.

    Args:
        signature: the columns of a step: `observation` or parts of it, `action`, `reward`, `terminated`.
        number: which of the buffers; it draws other samples than the others.
        size: transitions remembered; the oldest are forgotten.
        min_size: transitions remembered before any is sampled.
        batch_size: transitions of a sample.
        n_step: steps of a transition.
        exponent: of priorities; 0 draws all alike.
        frames: how many observations are seen at once; each is stored once.
        frame_axis: the axis of an observation that they are joined along.
        seed: of what is random in samples.
    """
    seen = [name for name in signature if name.partition("/")[0] == "observation"]
    fields = {
        **{name: Field(name, "first", frames) for name in seen},
        **{f"next_{name}": Field(name, "last", frames) for name in seen},
        "action": Field("action", "first"),
        "reward": Field("reward", "steps"),
        "terminated": Field("terminated", "steps"),
    }
    table = Table(
        signature,
        fields,
        max_size=size,
        length=n_step,
        sampler=Prioritized(exponent) if exponent else Uniform(),
        remover=Fifo(),
        limiter=MinSize(min_size),
    )
    return Buffer(
        table,
        Transitions(n_step),
        batch_size=batch_size,
        frame_axis=frame_axis if frames > 1 else None,
        seed=[seed, number],
    )
