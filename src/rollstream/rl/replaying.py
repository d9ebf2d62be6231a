"""Operators over replay, under the names of the RLlib Flow paper (arXiv:2011.12719)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollstream import flow
from rollstream.flow import Iter
from rollstream.replay import Sample, nested
from rollstream.replay.buffer import Buffer, Chunk
from rollstream.rl.operators import Report, Samples, episodes
from rollstream.rl.worker import Rollout
from rollstream.rl.workers import Workers


class StoreToBuffer:
    """Remembers rollouts; their episodes are what is reported of them. Its state is the buffer's."""

    def __init__(self, buffer: Buffer):
        self.buffer = buffer

    def __call__(self, rollouts: Sequence[Rollout]) -> Report:
        """The episodes that ended."""
        for rollout in rollouts:
            self.buffer.store(chunk_of(rollout, self.buffer.steps))
        ended = [episodes(rollout.columns)["episodes"] for rollout in rollouts]
        return {"episodes": ended[0] if len(ended) == 1 else np.concatenate(ended)}

    def state_dict(self) -> dict[str, Any]:
        """The buffer's."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The buffer's."""
        self.buffer.load_state_dict(state)


def chunk_of(rollout: Rollout, before: int) -> Chunk:
    """What is remembered of a rollout."""
    columns = rollout.columns
    width, real = columns["reward"].shape[1], columns.get("real")
    return Chunk(
        columns={name: columns[name] for name in _REMEMBERED},
        last=rollout.last,
        final=rollout.final,
        streams=np.arange(width) + rollout.worker * width,
        real=real,
        priorities=columns.get("priority"),
        begins=rollout.begins,
        steps=before + (columns["reward"].size if real is None else int(real.sum())),
    )


_REMEMBERED = ("observation", "action", "reward", "terminated", "truncated")


def Replay(buffer: Buffer) -> Iter[Samples]:  # noqa: N802
    """Batches of what a buffer remembers, once there is enough."""

    def sample() -> Samples | None:
        drawn = buffer.sample()
        return None if drawn is None else samples_of(drawn, buffer.steps)

    return flow.from_poll(sample, name="Replay")


def samples_of(drawn: Sample, steps: int) -> Samples:
    """What is learned from, of what was drawn."""
    rows = nested(drawn.columns)
    rows["length"] = drawn.lengths.astype(np.float32)
    rows["probability"] = drawn.probabilities.astype(np.float32)
    rows["size"] = drawn.sizes.astype(np.float32)
    return Samples(rows, drawn.keys, steps)


class UpdatePriorities:
    """Tells a buffer how surprising what it gave has been; the report goes on without that."""

    def __init__(self, buffer: Buffer):
        self.buffer = buffer

    def __call__(self, report: Report) -> Report:
        """The report."""
        keys, surprise = report.pop("surprise")
        self.buffer.update(keys, surprise)
        return report


class UpdateTarget:
    """Makes the learner's weights its target's, every so many updates."""

    def __init__(self, workers: Workers, every: int):
        self.workers = workers
        self.every = every

    def __call__(self, item: Any) -> Any:
        """The item itself."""
        if self.workers.learner.version % self.every == 0:
            self.workers.learner.update_target()
        return item
