"""The paper's Listings 1 to 5 as plans, with stand-ins that count instead of learn.

Liang et al., "Distributed Reinforcement Learning is a Dataflow Problem" (RLlib Flow).
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rollstream as rs
from rollstream import flow
from rollstream.engine import Actor, ActorContext
from rollstream.flow import Context, Iter, ParIter, limit_ratio, union_async
from rollstream.testing import chaos_engine

Rollout = dict[str, Any]
Gradient = dict[str, Any]
Metrics = dict[str, Any]
STEPS = 8


@pytest.fixture(params=["inline", "threads", "chaos", "processes", "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[rs.Engine]:
    with chaos_engine(3) if request.param == "chaos" else rs.engine(request.param) as opened:
        yield opened


# The stand-ins ------------------------------------------------------------------------------------


class RolloutActor:
    """Has an environment that counts and a policy that is a version number."""

    def __init__(self, *, context: ActorContext):
        self.index = context.index
        self.version = 0
        self.adapted = 0

    def sample(self, context: Context) -> Rollout:
        context.note(steps=STEPS, version=self.version)
        return {"worker": self.index, "steps": STEPS, "version": self.version, "adapted": self.adapted}

    def set_weights(self, version: int) -> None:
        self.version, self.adapted = version, 0

    def adapt(self, rollout: Rollout) -> None:
        self.adapted += 1


class ReplayActor:
    """Holds rollouts; counts how often it was asked and how often priorities came."""

    def __init__(self) -> None:
        self.stored: list[Rollout] = []
        self.samples = 0
        self.updates = 0

    def insert(self, rollout: Rollout) -> None:
        self.stored.append(rollout)

    def replay(self) -> Rollout:
        rollout = self.stored[self.samples % len(self.stored)]
        self.samples += 1
        return rollout

    def update_priorities(self, rollout: Rollout) -> None:
        self.updates += 1

    def counts(self) -> tuple[int, int, int]:
        return len(self.stored), self.samples, self.updates


def ParallelRollouts(workers: list[Actor[Any]]) -> ParIter[Rollout]:  # noqa: N802
    return flow.from_actors(workers, "sample", name="ParallelRollouts")


def ParallelReplay(replay: list[Actor[Any]]) -> ParIter[Rollout]:  # noqa: N802
    return flow.from_actors(replay, "replay", name="ParallelReplay")


def ReportMetrics(stream: Iter[Any], workers: list[Actor[Any]]) -> Iter[Metrics]:  # noqa: N802
    return stream.for_each(Report(), name="ReportMetrics")


class Report:
    """Counts iterations and the environment steps that reached the output."""

    def __init__(self) -> None:
        self.iterations = 0
        self.steps = 0.0

    def __call__(self, result: Any, context: Context) -> Metrics:
        self.iterations += 1
        self.steps += context.provenance.total("steps")
        return {"iteration": self.iterations, "steps": self.steps, "result": result}


class ComputeGradients:
    """On the worker: reaches its policy through the context."""

    def __call__(self, rollout: Rollout, context: Context) -> Gradient:
        assert context.instance.version == rollout["version"]
        return {"of": rollout["worker"], "version": rollout["version"]}


class ApplyGradients:
    """On the driver: a new version, sent to the worker the gradient came from."""

    def __init__(self, workers: list[Actor[Any]]):
        self.workers = workers
        self.version = 0

    def __call__(self, gradient: Gradient, context: Context) -> Gradient:
        self.version += 1
        for worker in context.actors:
            worker.send("set_weights", self.version, sticky=True)
        return gradient


class ConcatBatches:
    """Rollouts until there are enough steps."""

    def __init__(self, min_steps: int):
        self.min_steps = min_steps
        self.kept: list[Rollout] = []

    def __call__(self, rollout: Rollout) -> list[list[Rollout]]:
        self.kept.append(rollout)
        if sum(kept["steps"] for kept in self.kept) < self.min_steps:
            return []
        batch, self.kept = self.kept, []
        return [batch]


class TrainOneStep:
    """Trains in place and broadcasts the weights."""

    def __init__(self, workers: list[Actor[Any]]):
        self.workers = workers
        self.version = 0

    def __call__(self, batch: Any) -> Any:
        self.version += 1
        for worker in self.workers:
            worker.send("set_weights", self.version, sticky=True)
        return batch


class StoreToBuffer:
    """Rollouts to the replay actors in turn."""

    def __init__(self, replay: list[Actor[Any]]):
        self.replay = replay
        self.stored = 0

    def __call__(self, rollout: Rollout) -> Rollout:
        self.replay[self.stored % len(self.replay)].send("insert", rollout)
        self.stored += 1
        return rollout


class UpdateWeights:
    """The newest version to the worker an item came from."""

    def __init__(self, workers: list[Actor[Any]], trainer: TrainOneStep):
        self.workers = workers
        self.trainer = trainer

    def __call__(self, rollout: Rollout, context: Context) -> Rollout:
        for worker in context.actors:
            worker.send("set_weights", self.trainer.version, sticky=True)
        return rollout


class UpdatePriorities:
    """New priorities to the replay actor an item came from."""

    def __init__(self, replay: list[Actor[Any]]):
        self.replay = replay

    def __call__(self, rollout: Rollout, context: Context) -> Rollout:
        for actor in context.actors:
            actor.send("update_priorities", rollout)
        return rollout


class InnerAdapt:
    """Adapts every worker to its own rollouts, `steps` times, then hands on all the data."""

    def __init__(self, workers: list[Actor[Any]], steps: int):
        self.workers = workers
        self.steps = steps
        self.collected: list[list[Rollout]] = []

    def __call__(self, row: list[Rollout]) -> list[list[list[Rollout]]]:
        self.collected.append(row)
        if len(self.collected) > self.steps:
            data, self.collected = self.collected, []
            return [data]
        for worker, rollout in zip(self.workers, row, strict=True):
            worker.send("adapt", rollout)
        return []


MetaUpdate = TrainOneStep


# The listings -------------------------------------------------------------------------------------


def a3c(workers: list[Actor[Any]]) -> Iter[Metrics]:
    # Iter[Gradients]
    grads = ParallelRollouts(workers).for_each(ComputeGradients()).gather_async()
    # Iter[TrainStats]
    apply_op = grads.for_each(ApplyGradients(workers))
    # Iter[Metrics]
    return ReportMetrics(apply_op, workers)


def a2c(workers: list[Actor[Any]]) -> Iter[Metrics]:
    # Iter[Rollout]
    rollouts = ParallelRollouts(workers).gather_sync().flatten()
    # Iter[TrainStats]
    train_op = rollouts.combine(ConcatBatches(4 * STEPS)).for_each(TrainOneStep(workers))
    # Iter[Metrics]
    return ReportMetrics(train_op, workers)


def apex(workers: list[Actor[Any]], replay: list[Actor[Any]], ratio: float) -> Iter[Metrics]:
    train = TrainOneStep(workers)
    # Iter[Rollout], Iter[Rollout]
    rollouts = ParallelRollouts(workers).gather_async(num_async=2)
    replayed = ParallelReplay(replay).gather_async(num_async=4)
    rollouts, replayed = limit_ratio(rollouts, replayed, ratio, min_size=10)
    # Iter[_]
    store_op = rollouts.for_each(StoreToBuffer(replay)).for_each(UpdateWeights(workers, train))
    # Iter[TrainStats]
    replay_op = replayed.for_each(UpdatePriorities(replay)).for_each(train)
    # Iter[Metrics]
    return ReportMetrics(union_async([store_op, replay_op], output=[1]), workers)


def twin(workers: list[Actor[Any]]) -> Iter[Metrics]:
    # Iter[Rollout], Iter[Rollout]
    r1, r2 = ParallelRollouts(workers).gather_async().split(2, buffer=4)
    # Iter[TrainStats], Iter[TrainStats]
    ppo_op = r1.combine(ConcatBatches(16 * STEPS)).for_each(lambda batch: ("PPO", len(batch)))
    dqn_op = r2.for_each(lambda rollout: ("DQN", 1))
    # Iter[Metrics]
    return ReportMetrics(union_async([ppo_op, dqn_op]), workers)


def maml(workers: list[Actor[Any]]) -> Iter[Metrics]:
    # Iter[List[Rollouts]]
    rollouts = ParallelRollouts(workers).gather_sync()
    # Loop until inner adaptation is done, then the meta-update step
    adapt_op = rollouts.combine(InnerAdapt(workers, steps=5))
    train_op = adapt_op.for_each(MetaUpdate(workers))
    # Iter[Metrics]
    return ReportMetrics(train_op, workers)


# What they do -------------------------------------------------------------------------------------


def test_listing_1_a3c(engine: rs.Engine) -> None:
    """Each gradient is of the weights its worker got for the one before."""
    plan = a3c(engine.spawn(RolloutActor, count=4, name="worker"))
    latest: dict[int, int] = dict.fromkeys(range(4), 0)
    for metrics in plan.take(200):
        gradient = metrics["result"]
        assert gradient["version"] == latest[gradient["of"]]
        latest[gradient["of"]] = metrics["iteration"]
        assert metrics["steps"] == metrics["iteration"] * STEPS


def test_listing_2_a2c(engine: rs.Engine) -> None:
    """Every batch is of the newest weights, from all workers alike."""
    plan = a2c(engine.spawn(RolloutActor, count=2, name="worker"))
    for metrics in plan.take(20):
        batch = metrics["result"]
        assert [rollout["worker"] for rollout in batch] == [0, 1, 0, 1]
        assert {rollout["version"] for rollout in batch} == {metrics["iteration"] - 1}
        assert metrics["steps"] == metrics["iteration"] * 4 * STEPS


@pytest.mark.parametrize("ratio", [1, 4])
def test_listing_3_apex(engine: rs.Engine, ratio: float) -> None:
    """From empty replay, at the ratio asked for; every sample's priorities come back."""
    workers = engine.spawn(RolloutActor, count=3, name="worker")
    replay = engine.spawn(ReplayActor, count=2, name="replay")
    metrics: Metrics = {}
    for metrics in apex(workers, replay, ratio).take(200):
        counts = [actor.call("counts").result() for actor in replay]
        inserts, samples, updates = (sum(column) for column in zip(*counts, strict=True))
        assert abs(samples - ratio * (inserts - 10)) <= 2 * max(1, ratio)
        assert updates == metrics["iteration"]
    assert metrics["result"]["version"] > 0, "weights went back to the workers"


def test_listing_4_twin_trainer(engine: rs.Engine) -> None:
    """Two trainers at their own pace on the same rollouts."""
    plan = twin(engine.spawn(RolloutActor, count=2, name="worker"))
    results = [metrics["result"] for metrics in plan.take(170)]
    assert results.count(("PPO", 16)) == pytest.approx(10, abs=1)
    assert results.count(("DQN", 1)) == pytest.approx(160, abs=1)


def test_listing_5_maml(engine: rs.Engine) -> None:
    """Five inner adaptations on each worker, in step, then one meta-update."""
    plan = maml(engine.spawn(RolloutActor, count=3, name="worker"))
    for metrics in plan.take(4):
        data = metrics["result"]
        assert [[rollout["adapted"] for rollout in row] for row in data] == [[step] * 3 for step in range(6)]
        assert {rollout["version"] for row in data for rollout in row} == {metrics["iteration"] - 1}
        assert metrics["steps"] == metrics["iteration"] * 6 * 3 * STEPS


@pytest.mark.parametrize("plan", [a3c, a2c, twin, maml])
def test_a_synchronous_listing_is_the_same_on_every_engine(plan: Callable[..., Iter[Metrics]]) -> None:
    def outputs(engine: rs.Engine) -> list[Metrics]:
        with engine:
            return list(plan(engine.spawn(RolloutActor, count=2)).take(5))

    if plan in (a2c, maml):
        assert outputs(rs.engine("inline")) == outputs(rs.engine("threads")) == outputs(chaos_engine(1))
    else:
        assert len(outputs(rs.engine("threads"))) == 5
