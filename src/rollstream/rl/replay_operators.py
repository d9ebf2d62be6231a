"""Operators over replay, under the names of the RLlib Flow paper (arXiv:2011.12719)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from rollstream import flow
from rollstream.flow import Context, Iter, ParIter
from rollstream.replay.buffer import Chunk, ReplayBatch, ReplayBuffer
from rollstream.replay.service import ReplayShards
from rollstream.rl.operators import Report, episodes
from rollstream.rl.worker import Rollout
from rollstream.rl.worker_set import WorkerSet

LEAST = 1e-6
"""Added to how surprising something is, so that what was no surprise at all comes up again."""


class StoreToBuffer:
    """Remembers rollouts; their episodes are what is reported of them. A local buffer's state is its own."""

    def __init__(self, buffer: ReplayBuffer | ReplayShards):
        self.buffer = buffer
        self.steps = 0
        """Environment steps of all that was stored."""

    def __call__(self, given: Rollout | Sequence[Rollout]) -> Report:
        """The episodes that ended."""
        rollouts = [given] if isinstance(given, Rollout) else given
        for rollout in rollouts:
            chunk = chunk_of(rollout, self.steps)
            self.steps = chunk.env_steps
            if isinstance(self.buffer, ReplayBuffer):
                self.buffer.insert(chunk)
            else:
                self.buffer.shard(rollout.worker).send("insert", chunk)
        ended = [episodes(rollout.columns)["episodes"] for rollout in rollouts]
        return {"episodes": ended[0] if len(ended) == 1 else np.concatenate(ended)} | self._about()

    def _about(self) -> Report:
        if not isinstance(self.buffer, ReplayBuffer):
            return {}
        table = self.buffer.table
        warm = table.rate_limiter.inserts - table.rate_limiter.min_size
        about = {"replay/size": table.size}
        return about | ({"replay/samples_per_insert": table.rate_limiter.samples / warm} if warm > 0 else {})

    def state_dict(self) -> dict[str, Any]:
        """The buffer's, if it is here; shards have their own. A flow copies it, so this does not."""
        local = self.buffer.state_dict(copy=False) if isinstance(self.buffer, ReplayBuffer) else None
        return {"steps": self.steps, "buffer": local}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.steps = state["steps"]
        if isinstance(self.buffer, ReplayBuffer):
            self.buffer.load_state_dict(state["buffer"])


def chunk_of(rollout: Rollout, before: int) -> Chunk:
    """What is remembered of a rollout, so many steps after the first."""
    columns = rollout.columns
    width, real = columns["reward"].shape[1], columns.get("real")
    return Chunk(
        columns={name: columns[name] for name in _REMEMBERED} | {"action": _narrow(columns["action"])},
        last_observation=rollout.last,
        final_observations=rollout.final,
        streams=np.arange(width) + rollout.worker * width,
        mask=real,
        priorities=columns.get("priority"),
        after_reset=rollout.begins,
        env_steps=before + (columns["reward"].size if real is None else int(real.sum())),
    )


_REMEMBERED = ("observation", "reward", "terminated", "truncated")


def _narrow(action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Whole numbers as compiled policies give them; numpy gives twice as many bits."""
    return action.astype(np.int32) if action.dtype == np.int64 else action


def Replay(buffer: ReplayBuffer) -> Iter[ReplayBatch]:  # noqa: N802
    """Batches of what a buffer here remembers, once there is enough."""
    return flow.from_poll(buffer.sample, name="Replay")


def ParallelReplay(shards: ReplayShards) -> ParIter[ReplayBatch | None]:  # noqa: N802
    """Batches of what shards remember, each as soon as it has enough; `None` of one that came back empty."""
    return flow.from_actors(shards.actors, "sample", name="ParallelReplay")


def is_given(samples: ReplayBatch | None) -> TypeGuard[ReplayBatch]:
    """Whether there are any: not of a shard that came back empty."""
    return samples is not None


class WeighShards:
    """Makes likelihoods comparable between shards: relative to the least likely of the newest from each.

    Shards are asked alike, so an item's probability is that within its shard, divided by their number; as far
    as one answers faster than others, its items come up more often than that.
    """

    def __init__(self) -> None:
        self._least: dict[str, float] = {}

    def __call__(self, samples: ReplayBatch, context: Context) -> ReplayBatch:
        """The same items, weighed."""
        self._least[next(iter(context.provenance.sources))] = samples.min_probability
        scale = np.float32(samples.min_probability / min(self._least.values()))
        return replace(
            samples,
            columns=samples.columns
            | {"relative_probability": samples.columns["relative_probability"] * scale},
        )

    def state_dict(self) -> dict[str, Any]:
        """The least likely of each shard."""
        return dict(self._least)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._least = dict(state)


class UpdatePriorities:
    """Tells a buffer how surprising what it gave has been; the report goes on without that."""

    def __init__(self, buffer: ReplayBuffer | ReplayShards):
        self.buffer = buffer
        self._first: dict[str, float] = {}
        """Of each shard: what it had been given before its first sample."""
        self._shards: dict[str, list[float]] = {}
        """Of each: which of its lives it is in, its size, what it was given since then and has given."""
        self._past = [0.0, 0.0, 0.0]
        """What was lost with shards that died, and what those had been given and had given."""

    def __call__(self, report: Report, context: Context) -> Report:
        """The report, and of shards how much they remember, have lost, and give for what they are given."""
        if "surprise" in report:  # else all are alike
            keys, surprise = report.pop("surprise")
            self._update(keys, surprise + LEAST, context)
        return report if isinstance(self.buffer, ReplayBuffer) else report | self._about(context)

    def _update(self, keys: Any, surprise: Any, context: Context) -> None:
        if isinstance(self.buffer, ReplayBuffer):
            self.buffer.update_priorities(keys, surprise)
            return
        incarnation = context.provenance.total("incarnation")
        for actor in context.actors:
            actor.send("update_priorities", keys, surprise, incarnation)

    def _about(self, context: Context) -> Report:
        shard, total = next(iter(context.provenance.sources)), context.provenance.total
        incarnation, size, inserts, samples = (
            total(own) for own in ("incarnation", "size", "inserts", "samples")
        )
        before = self._shards.get(shard)
        if before is not None and incarnation != before[0]:
            self._past = [had + more for had, more in zip(self._past, before[1:], strict=True)]
            self._first[shard] = 0.0  # samples go on as before
        first = self._first.setdefault(shard, inserts)
        self._shards[shard] = [incarnation, size, inserts - first, samples]
        _, size, given, taken = (sum(counts) for counts in zip(*self._shards.values(), strict=True))
        given, taken = given + self._past[1], taken + self._past[2]
        about = {"replay/size": size, "replay/lost": self._past[0]}
        return about | ({"replay/samples_per_insert": taken / given} if given > 0 else {})

    def state_dict(self) -> dict[str, Any]:
        """What is known of shards; their content is theirs."""
        return {"first": self._first, "shards": self._shards, "past": self._past}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._shards = {name: list(counts) for name, counts in state["shards"].items()}
        self._first, self._past = dict(state["first"]), list(state["past"])


class UpdateTarget:
    """Makes the learner's weights its target's, every so many updates."""

    def __init__(self, workers: WorkerSet, every: int):
        self.workers = workers
        self.every = every

    def __call__(self, item: Any) -> Any:
        """The item itself."""
        if self.workers.learner.version % self.every == 0:
            self.workers.learner.update_target()
        return item
