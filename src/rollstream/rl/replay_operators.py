"""Replay operators, under the names of the RLlib Flow paper (arXiv:2011.12719)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, overload

import numpy as np

from rollstream import flow
from rollstream.engine import RollstreamError
from rollstream.flow import Context, Iter, ParIter, Stored
from rollstream.replay.buffer import Chunk, ReplayBatch, ReplayBuffer
from rollstream.replay.service import ReplayShards
from rollstream.rl.device_replay import DeviceDraw, DeviceReplay
from rollstream.rl.episode_statistics import ended_episodes
from rollstream.rl.report import EPISODES, PRIORITY, WILL_UPDATE, Report
from rollstream.rl.rollout import Rollout
from rollstream.rl.training_step import PROBABILITY_SCALE

Episodes: TypeAlias = np.ndarray[Any, Any]
"""Return, length and success of episodes, `[N, 3]`."""


class StoreToBuffer:
    """Stores rollouts in a local buffer, or on the learner's device; passes on a report of their episodes."""

    def __init__(self, replay: ReplayBuffer | DeviceReplay):
        self.replay = replay
        self.env_steps = 0
        """Environment steps stored so far."""

    def __call__(self, rollouts: Rollout | Sequence[Rollout]) -> Report:
        """A report of the episodes that ended, and of the buffer's size and samples per insert."""
        replay = self.replay
        if isinstance(rollouts, Rollout):
            if isinstance(replay, DeviceReplay):
                _require_round(replay, rollouts)
            rollouts = [rollouts]
        chunks: list[Chunk] = []
        for rollout in rollouts:
            chunks.append(rollout_chunk(rollout, self.env_steps))
            self.env_steps = chunks[-1].env_steps
        episodes = [ended_episodes(rollout) for rollout in rollouts]
        report: Report = {EPISODES: episodes[0] if len(episodes) == 1 else np.concatenate(episodes)}
        if isinstance(replay, DeviceReplay):
            replay.insert(chunks)
            table = replay
        else:
            for chunk in chunks:
                replay.insert(chunk)
            table = replay.table
        limiter = table.rate_limiter
        report[WILL_UPDATE] = table.can_sample(replay.batch_size)
        report["replay/size"] = table.size
        if (inserts := limiter.inserts - limiter.min_size) > 0:
            report["replay/samples_per_insert"] = limiter.samples / inserts
        return report

    def state_dict(self) -> dict[str, Any]:
        """The buffer, without a copy: the flow makes one."""
        if isinstance(self.replay, ReplayBuffer):
            return {"env_steps": self.env_steps, "buffer": self.replay.state_dict(copy=False)}
        return {"env_steps": self.env_steps, "buffer": self.replay.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the buffer."""
        self.env_steps = state["env_steps"]
        _require_same_replay(self.replay, state["buffer"])
        self.replay.load_state_dict(state["buffer"])


class StoreToShards:
    """Stores rollouts, which the workers have `put` as chunks, in the shard of each worker.

    They go there without passing through the driver. Passes on a report of their episodes.
    """

    def __init__(self, shards: ReplayShards):
        self.shards = shards
        self._env_steps = 0

    def __call__(self, rollout: Stored[Chunk, Episodes], context: Context) -> Report:
        """A report of the episodes that ended."""
        self._env_steps += int(context.total("steps"))
        for worker in context.actors:
            self.shards.shard(worker.index).send("insert", rollout.ref, "", self._env_steps)
        return {EPISODES: rollout.metadata}

    def state_dict(self) -> dict[str, Any]:
        """The steps so far; shards are actors with their own state."""
        return {"env_steps": self._env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the steps."""
        self._env_steps = state["env_steps"]


def _require_round(replay: DeviceReplay, rollout: Rollout) -> None:
    width = rollout.columns["reward"].shape[1]
    if width != replay.layout.num_envs:
        raise RollstreamError(
            f"a rollout has {width} of the {replay.layout.num_envs} environments, and replay on the device "
            f"stores those of all workers together: put gather_sync() before StoreToBuffer"
        )


def _require_same_replay(replay: ReplayBuffer | DeviceReplay, state: Mapping[str, Any]) -> None:
    saved = "device" if "device" in state else "host"
    own = "device" if isinstance(replay, DeviceReplay) else "host"
    if saved != own:
        raise RollstreamError(
            f"the checkpoint has its replay buffer on the {saved}, and replay is {own}: resume with replay "
            f"{saved}"
        )


def rollout_chunk(rollout: Rollout, env_steps: int = 0) -> Chunk:
    """What replay stores of a rollout, after so many environment steps before it, if known."""
    columns = rollout.columns
    reward, mask = columns["reward"], columns.get("mask")
    return Chunk(
        columns={
            "observation": columns["observation"],
            "action": _as_int32(columns["action"]),
            "reward": reward,
            "terminated": columns["terminated"],
            "truncated": columns["truncated"],
            **({"state": columns["state"]} if "state" in columns else {}),
        },
        last_observation=rollout.last_observation,
        final_observations=rollout.final_observations,
        streams=_streams(rollout.worker, reward.shape[1]),
        mask=mask,
        priorities=columns.get("priority"),
        after_reset=rollout.after_reset,
        env_steps=env_steps + (reward.size if mask is None else int(mask.sum())),
    )


@lru_cache(maxsize=1024)
def _streams(worker: int, num_envs: int) -> np.ndarray[Any, Any]:
    """The streams of a worker's environments: the same array each time."""
    streams = np.arange(worker * num_envs, (worker + 1) * num_envs)
    streams.flags.writeable = False
    return streams


def _as_int32(action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Discrete actions as JAX returns them; NumPy's are 64 bits wide."""
    return action.astype(np.int32) if action.dtype.type is np.int64 else action


@overload
def Replay(buffer: ReplayBuffer) -> Iter[ReplayBatch]: ...
@overload
def Replay(buffer: DeviceReplay) -> Iter[DeviceDraw]: ...
def Replay(buffer: ReplayBuffer | DeviceReplay) -> Iter[Any]:  # noqa: N802
    """Batches from a local buffer, as soon as it may be sampled; on the device, what chooses them."""
    return flow.from_poll(buffer.sample, name="Replay")


def ParallelReplay(shards: ReplayShards) -> ParIter[ReplayBatch]:  # noqa: N802
    """Batches from replay shards, each as soon as its shard may be sampled."""
    return flow.from_actors(shards.actors, "sample", name="ParallelReplay")


class NormalizeProbabilities:
    """Makes `relative_probability` comparable between shards: relative to the minimum over all of them.

    Notes the factor, with which whoever trains on the batch multiplies them: batches pass by unopened, with
    their `min_probability` as the metadata.

    The minimum is over the newest batch of each shard. Shards are sampled equally often, so the probability
    of an item is that within its shard divided by the number of shards; a shard that replies faster than
    others is sampled more often than that.
    """

    passes_references = True

    def __init__(self) -> None:
        self._min_probability: dict[str, float] = {}

    def __call__(self, batch: Stored[ReplayBatch, float], context: Context) -> Stored[ReplayBatch, float]:
        """The batch, with a note."""
        self._min_probability[next(iter(context.provenance.sources))] = batch.metadata
        context.note(**{PROBABILITY_SCALE: batch.metadata / min(self._min_probability.values())})
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The minimum of each shard."""
        return dict(self._min_probability)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the minimum of each shard."""
        self._min_probability = dict(state)


class UpdatePriorities:
    """Sets the new priorities of the items of a replay batch; passes the report on.

    Of replay on the device, the update itself has set them.
    """

    def __init__(self, replay: ReplayBuffer | DeviceReplay | ReplayShards):
        self.replay = replay
        self._restarts: dict[str, int] = {}
        """Restarts of each shard that are accounted for."""
        self._dead: dict[str, float] = {}
        """The last incarnation of each shard that died."""
        self._first_inserts: dict[str, float] = {}
        """Inserts of each shard before its first sample."""
        self._shards: dict[str, list[float]] = {}
        """Incarnation, size, inserts since the first sample, and samples of each shard."""
        self._lost = [0.0, 0.0, 0.0]
        """Size, inserts and samples of incarnations that died."""

    def __call__(self, report: Report, context: Context) -> Report:
        """The report without priorities; of shards with their size, losses and samples per insert."""
        if PRIORITY in report:  # sampling is uniform otherwise
            self._update(report.pop(PRIORITY), context)
        if not isinstance(self.replay, ReplayShards):
            return report
        return report | self._shard_metrics(self.replay, context)

    def _update(self, new: Any, context: Context) -> None:
        """Set priorities, given as keys and priorities, or as a reference to both if they are a shard's."""
        if isinstance(self.replay, ReplayBuffer):
            self.replay.update_priorities(*new)
            return
        incarnation = context.total("incarnation")
        for actor in context.actors:
            actor.send("update_priorities", new, incarnation)

    def _shard_metrics(self, shards: ReplayShards, context: Context) -> Report:
        self._count_lost(shards)
        shard, total = next(iter(context.provenance.sources)), context.total
        incarnation, inserts = total("incarnation"), total("inserts")
        if incarnation != self._dead.get(shard):  # else it was sampled before the shard died
            first = self._first_inserts.setdefault(shard, inserts)
            self._shards[shard] = [incarnation, total("size"), inserts - first, total("samples")]
            shards.sizes[shard] = int(total("size"))
        _, size, inserts, samples = (sum(counts) for counts in zip(*self._shards.values(), strict=True))
        inserts, samples = inserts + self._lost[1], samples + self._lost[2]
        metrics = {"replay/size": size, "replay/lost_items": self._lost[0]}
        return metrics | ({"replay/samples_per_insert": samples / inserts} if inserts > 0 else {})

    def _count_lost(self, shards: ReplayShards) -> None:
        """What shards had that died since the last call. They may not be sampled again for a while."""
        for actor in shards.actors:
            if actor.restarts > self._restarts.get(actor.name, 0):
                self._restarts[actor.name] = actor.restarts
                incarnation, *counts = self._shards.get(actor.name, [0.0] * 4)
                self._lost = [lost + more for lost, more in zip(self._lost, counts, strict=True)]
                self._dead[actor.name] = incarnation
                self._shards[actor.name] = [incarnation, 0.0, 0.0, 0.0]
                self._first_inserts[actor.name] = 0.0  # sampling goes on at once
                shards.sizes[actor.name] = 0

    def state_dict(self) -> dict[str, Any]:
        """Counts of the shards."""
        return {"first_inserts": self._first_inserts, "shards": self._shards, "lost": self._lost}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self._shards = {name: list(counts) for name, counts in state["shards"].items()}
        self._first_inserts, self._lost = dict(state["first_inserts"]), list(state["lost"])
