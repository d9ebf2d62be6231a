"""Central inference: as local inference samples and learns; batches by size and deadline, deaths, resume."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from learning_runs import SMALL
from small_envs import Samples, Scripted, Signals, Target

import rollstream as rs
from rollstream import flow
from rollstream.algos import ALGORITHMS
from rollstream.engine import ActorContext
from rollstream.flow import Context, OperatorError
from rollstream.rl.algorithm import Task
from rollstream.rl.batch import Batch
from rollstream.rl.central_worker import CentralWorker
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.gae import add_gae
from rollstream.rl.inference_actor import InferenceActor, InferenceResponse
from rollstream.rl.operators import ParallelRollouts
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.rollout import Rollout
from rollstream.rl.worker_set import WorkerSet
from rollstream.rl.worker_spec import WorkerSpec
from rollstream.testing import chaos_engine, kill
from rollstream.training.config_file import read_run_config

SYNCHRONOUS = {"num_async": 1, "batches_in_flight": 1}
CONTINUOUS = ("sac", "td3")


def scripted_vector(num_envs: int, mode: str) -> SyncVectorEnv:
    return SyncVectorEnv([Scripted] * num_envs, autoreset_mode=AutoresetMode(mode))


_entry_points: Any = {"entry_point": Scripted, "vector_entry_point": scripted_vector}
gymnasium.register("CentralScripted-v0", **_entry_points)
RESETS = EnvSpec("CentralScripted-v0", {"mode": AutoresetMode.NEXT_STEP.value}, vectorization="native")


class Images(Samples):
    """Images of which frames can be stacked."""

    def __init__(self) -> None:
        super().__init__(spaces.Box(0, 255, (6, 6, 1), np.uint8))


@contextmanager
def training(
    name: str,
    engine: str | rs.Engine,
    acting: Any,
    environment: EnvSpec | str = "CartPole-v1",
    *,
    workers: int = 1,
    batch: int | None = None,
    spawn: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[tuple[Any, WorkerSet]]:
    """A plan and its workers on a fresh engine."""
    algorithm = ALGORITHMS[name]
    known = SYNCHRONOUS if name in ("impala", "appo") else {}
    config = algorithm.config(**{**SMALL[name], **known, **settings})
    environment = environment if isinstance(environment, EnvSpec) else EnvSpec(environment)
    task = Task(environment, 10_000, 3, workers=workers, acting=acting, inference_batch=batch)
    with rs.engine(engine) if isinstance(engine, str) else engine as opened:
        own = algorithm.workers(opened, config, task, **spawn or {})
        yield algorithm.build(own, config), own


def items(engine: str, acting: Any, environment: EnvSpec, count: int = 4, **options: Any) -> list[Any]:
    """Rollouts of a worker under its first weights, and what it noted."""
    name = options.pop("name", "ppo")
    with training(name, engine, acting, environment, **options) as (_, workers):
        rows = ParallelRollouts(workers).gather_async().zip_with_source().take(count)
        return [(item, provenance.least("version"), provenance.total("steps")) for item, provenance in rows]


def require_equal(found: Any, expected: Any) -> None:
    """Equal up to rounding; floating numbers that actions depend on may differ in the last digits."""
    found, expected = ({**vars(own)} if isinstance(own, Rollout) else own for own in (found, expected))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


# What local inference samples ----------------------------------------------------------------------


ENVIRONMENTS = {
    "vectors": (EnvSpec(Scripted), {}),
    "resets in steps of their own": (RESETS, {}),
    "masks and nested observations": (EnvSpec(Signals), {}),
    "continuous, normalized": (
        EnvSpec(Target),
        {"normalize_observations": True, "normalize_rewards": True},
    ),
    "recurrent": (EnvSpec(Scripted), {"memory": "lstm", "memory_size": 4}),
    "recurrent, resets": (RESETS, {"memory": "gru", "memory_size": 4}),
    "stacked images": (EnvSpec(Images, frame_stack=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "impala"])
@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_rollouts_are_those_of_local_inference(case: str, name: str) -> None:
    environment, settings = ENVIRONMENTS[case]
    both = [items("inline", acting, environment, name=name, **settings) for acting in ("host", "central")]
    for (expected, *notes), (found, *own_notes) in zip(*both, strict=True):
        for own in (found, expected):
            if isinstance(own, Rollout) and own.columns.get("value") is not None:
                del own.columns["value"]  # NumPy acts and evaluates nothing
        require_equal(found, expected)
        assert own_notes == notes


@pytest.mark.parametrize("engine", ["threads", "processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_rollouts_are_the_same_on_every_engine(engine: str) -> None:
    environment = EnvSpec(Signals)
    for (found, *_), (expected, *_) in zip(
        items(engine, "central", environment), items("inline", "central", environment), strict=True
    ):
        require_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "appo", "dqn", "sac", "td3"])
def test_training_is_that_of_local_inference(name: str) -> None:
    environment = EnvSpec(Target if name in CONTINUOUS else "CartPole-v1")
    weights, reports = [], []
    for acting in ("host", "central"):
        with training(name, "inline", acting, environment) as (plan, workers):
            reports.append(list(islice(plan, 4))[-1])
            weights.append(workers.learner.get_weights())
    require_equal(*weights)
    local, central = reports
    new = {"inference/batch_size", "inference/wait_ms"}
    assert central.keys() - local.keys() == new
    assert central["inference/batch_size"] == 1
    assert central["time/total_timesteps"] == local["time/total_timesteps"]
    assert central.get("weights/staleness") == local.get("weights/staleness")


@pytest.mark.parametrize("engine", ["threads", "processes", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_ppo_is_on_policy_and_the_same_on_every_engine(engine: str) -> None:
    """The order of requests may differ with several workers, and with it nothing but rounding."""
    weights = []
    for name in ("inline", engine):
        with training("ppo", name, "central", workers=4) as (plan, workers):
            reports = list(islice(plan, 4))
            assert [report["weights/staleness"] for report in reports] == [0.0] * 4
            assert max(abs(report["train/approx_kl"]) for report in reports) < 0.1
            weights.append(workers.learner.get_weights())
    require_equal(*weights)


# Batches -------------------------------------------------------------------------------------------


class FakeActor:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.later: list[tuple[Any, ...]] = []

    def send(self, *message: Any) -> None:
        self.sent.append(message)

    def send_later(self, seconds: float, *message: Any) -> None:
        self.later.append((seconds, *message))


SPEC = WorkerSpec(
    EnvSpec(Scripted),
    2,
    5,
    ActorCriticPolicy,
    partial(add_gae, gamma=0.9, gae_lambda=0.9),
    evaluates_steps=True,
    bootstrap_values=("last", "final"),
    inference_deadline=100.0,
)


def inference_of(batch_size: int, workers: int = 4, restarts: int = 0) -> tuple[Any, FakeActor, list[Any]]:
    """An inference actor outside of any engine, its own handle, and its workers."""
    actor, others = FakeActor(), [FakeActor() for _ in range(workers)]
    context = ActorContext("inference", 0, 1, restarts, actor=actor)
    inference = InferenceActor(SPEC, batch_size, context=context)
    inference.connect(others)  # pyright: ignore[reportArgumentType]
    inference.set_weights(3, ActorCriticPolicy(Scripted.observation_space, Scripted.action_space).init(0))
    return inference, actor, others


def inputs_of(seed: int) -> Any:
    random = np.random.default_rng(seed)
    policy = ActorCriticPolicy(Scripted.observation_space, Scripted.action_space)
    return random.normal(size=(2, 2)).astype(np.float32), (), policy.noise(random, 2)


def test_a_batch_is_computed_when_it_is_full() -> None:
    inference, actor, workers = inference_of(3)
    for worker in (2, 0):
        inference.act(worker, 10 + worker, inputs_of(worker), False)
    assert not any(worker.sent for worker in workers)
    inference.act(3, 13, inputs_of(3), True)
    assert [len(worker.sent) for worker in workers] == [1, 0, 1, 1]
    assert len(actor.later) == 1, "one timer, set by the first"
    for index in (0, 2, 3):
        (kind, number, response) = workers[index].sent[0]
        assert (kind, number, response.version, response.batch_size) == ("receive_actions", 10 + index, 3, 3)
        alone, _, [other, *_] = inference_of(1)
        alone.act(0, 0, inputs_of(index), False)
        require_equal(response.outputs, other.sent[0][2].outputs)


def test_a_batch_is_computed_at_the_deadline_of_its_oldest_request() -> None:
    inference, actor, workers = inference_of(3)
    inference.act(0, 1, inputs_of(0), False)
    inference.act(1, 1, inputs_of(1), False)
    [(seconds, *timer)] = actor.later
    assert seconds == pytest.approx(0.1)
    getattr(inference, timer[0])(*timer[1:])
    assert [worker.sent[0][2].batch_size for worker in workers[:2]] == [2, 2]
    inference.act(0, 2, inputs_of(0), False)
    assert len(actor.later) == 2
    inference.act(1, 2, inputs_of(1), False)
    inference.act(2, 2, inputs_of(2), False)  # full: the timer has nothing to do any more
    inference.act(3, 2, inputs_of(3), False)
    assert len(actor.later) == 2, "one timer at a time"
    getattr(inference, actor.later[1][1])(*actor.later[1][2:])
    assert not workers[3].sent, "this one has not waited as long as the timer"
    seconds, *timer = actor.later[2]
    assert 0 <= seconds <= 0.1
    getattr(inference, timer[0])(*timer[1:])
    assert workers[3].sent[0][2].batch_size == 1
    getattr(inference, timer[0])(*timer[1:])  # nobody waits


def test_a_request_that_is_repeated_takes_the_place_of_the_first() -> None:
    inference, _, workers = inference_of(2)
    for number in (1, 1, 2):
        inference.act(0, number, inputs_of(0), False)
    inference.act(1, 1, inputs_of(1), False)
    assert [message[1] for message in workers[0].sent] == [2]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inline", "threads", "processes"])
def test_workers_share_batches_and_the_last_ones_do_not_wait_for_more(engine: str) -> None:
    """Of three workers two make a batch. On one thread the first two do so all the time, and then the last
    one is answered at the deadlines only."""
    with training("ppo", engine, "central", workers=3, batch=2, num_envs=6, minibatch_size=48) as (plan, _):
        sizes = [report["inference/batch_size"] for report in islice(plan, 3)]
    assert all(1 <= size <= 2 for size in sizes)
    if engine == "inline":
        assert sizes == [pytest.approx((2 + 2 + 1) / 3)] * 3


def test_inline_is_deterministic() -> None:
    reports = []
    for _ in range(2):
        with training("impala", "inline", "central", workers=4, num_async=2) as (plan, _):
            reports.append([{**report} for report in islice(plan, 5)])
    for report in (*reports[0], *reports[1]):
        assert report.pop("inference/wait_ms") >= 0
    assert reports[0] == reports[1]


# Versions ------------------------------------------------------------------------------------------


def worker_with(inference: Any, **spec: Any) -> CentralWorker:
    return CentralWorker(replace(SPEC, **spec), inference, context=ActorContext("worker", 0, 1))


def answers(worker: CentralWorker, inference: FakeActor, versions: Any) -> None:
    """Answer every request of a worker, with weights of these versions in turn."""
    actor, _, [own, *_] = inference_of(1)
    while inference.sent:
        _, index, number, inputs, wants_statistics = inference.sent.pop(0)
        actor.act(index, number, inputs, wants_statistics)
        response: InferenceResponse = own.sent.pop()[2]
        worker.receive_actions(number, response._replace(version=next(versions)))


def test_a_rollout_is_as_old_as_the_oldest_weights_that_acted() -> None:
    inference = FakeActor()
    worker = worker_with(inference)
    context = Context("sample", ("worker", "sample", 0), None, {})
    found: list[Any] = []
    worker.sample(context).then(lambda *outcome: found.append(outcome))
    answers(worker, inference, iter([5, 4, 6, 7, 8, *range(9, 99)]))
    [(batch, error)] = found
    assert error is None
    assert isinstance(batch, Batch)
    assert context.least("version") == 4
    assert context.total("inference_requests") >= 6


def test_time_in_environments_is_busy_time_of_the_source() -> None:
    """Also what comes after the first request, but not waiting for actions."""

    class Slow(Scripted):
        def step(self, action: Any) -> Any:
            end = time.perf_counter() + 0.002
            while time.perf_counter() < end:
                pass
            return super().step(action)

    with training("ppo", "inline", "central", EnvSpec(Slow)) as (plan, _):
        next(plan)
        rows = {row.name: row for row in plan.statistics().nodes}
    assert rows["ParallelRollouts"].busy >= 0.002 * 64


def test_responses_to_other_requests_are_ignored() -> None:
    inference = FakeActor()
    worker = worker_with(inference)
    worker.sample(Context("sample", ("worker", "sample", 0), None, {}))
    [(_, _, number, *_)] = inference.sent
    worker.receive_actions(number + 1, InferenceResponse((), 0, 1, 0.0, {}))
    worker.receive_actions(number - 1, InferenceResponse((), 0, 1, 0.0, {}))
    assert len(inference.sent) == 1
    worker.resend_request()
    assert [message[2] for message in inference.sent] == [number, number]


def test_weights_are_sent_once_and_to_the_inference_actor_only() -> None:
    with training("impala", "inline", "central", workers=2, num_async=2) as (plan, workers):
        list(islice(plan, 5))
        plan.close()
        assert workers.inference is not None
        messages = [_messages(workers)]
        for version in (workers.learner.version, 100):
            workers.remote_learner.receive(version, workers.remote_learner.published)
            workers.send_weights(workers.actors)
            workers.send_weights(workers.actors)
            assert workers.inference.apply(lambda own: own._version).result() == version
            messages.append(_messages(workers))
    counts = [
        {name: after[name] - count for name, count in before.items()} for before, after in pairwise(messages)
    ]
    asked = {"worker[0]": 1, "worker[1]": 1}
    assert counts == [asked | {"inference": 2}, asked | {"inference": 3}]


def _messages(workers: WorkerSet) -> dict[str, int]:
    """How many each actor has handled, with one that asks it for nothing."""
    for actor in (*workers.actors, workers.inference):
        assert actor is not None
        actor.apply(lambda _: None).result()
    actors = workers.engine.statistics().actors
    return {own.name: own.messages for own in actors if own.name != "learner"}


# Failure -------------------------------------------------------------------------------------------


def test_training_goes_on_after_the_death_of_the_inference_actor() -> None:
    with training("ppo", "processes", "central", workers=2) as (plan, workers):
        next(plan)
        assert workers.inference is not None
        for _ in range(2):
            kill(workers.inference)
            assert list(islice(plan, 3))[-1]["weights/staleness"] == 0
        assert [event.outcome for event in workers.engine.statistics().events] == ["restarted"] * 2
        assert {event.actor for event in workers.engine.statistics().events} == {"inference"}
        version = workers.inference.apply(lambda own: (own._version, own._context.restarts)).result()
        assert version == (workers.learner.version, 2)


@pytest.mark.slow
def test_training_goes_on_after_the_death_of_a_worker() -> None:
    with training("impala", "processes", "central", workers=2) as (plan, workers):
        next(plan)
        kill(workers.actors[1])
        reports = list(islice(plan, 8))
        assert [event.actor for event in workers.engine.statistics().events] == ["worker[1]"]
        assert reports[-1]["time/total_timesteps"] == 9 * 20


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_hangs_under_any_schedule_with_deaths(seed: int, normalize: bool) -> None:
    engine = chaos_engine(seed, deaths=0.003)
    options: dict[str, Any] = {"normalize_observations": normalize, "normalize_rewards": normalize}
    options |= {"workers": 3, "batch": 2, "spawn": {"max_restarts": 1000}}
    options |= {"num_envs": 3, "rollout_length": 8, "minibatch_size": 24, "hidden": (4,)}
    with training("ppo", engine, "central", **options) as (plan, _):
        for report in islice(plan, 3):
            assert report["weights/staleness"] == 0
    assert seed or engine.events, "nobody died"


def test_an_error_of_an_environment_names_the_operator() -> None:
    class Failing(Scripted):
        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps == 20:
                raise ValueError("the simulator broke")
            return super().step(action)

    with (
        training("ppo", "threads", "central", EnvSpec(Failing)) as (plan, _),
        pytest.raises(OperatorError, match="the simulator broke") as caught,
    ):
        list(plan)
    assert "ParallelRollouts" in str(caught.value)
    assert isinstance(caught.value.original, ValueError)


def test_a_flow_may_follow_one_that_was_closed_in_the_middle() -> None:
    with training("ppo", "threads", "central", workers=2) as (_, workers):
        for _ in range(3):
            with ParallelRollouts(workers).gather_async(num_async=2) as plan:
                assert next(plan).steps == 32


# State ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"memory": "lstm", "memory_size": 4}], ids=["", "lstm"])
@pytest.mark.slow
def test_a_resumed_training_ends_with_the_same_weights(settings: dict[str, Any]) -> None:
    with training("ppo", "inline", "central", workers=2, **settings) as (plan, workers):
        list(islice(plan, 2))
        state = pickle.dumps(plan.state_dict())
        list(islice(plan, 3))
        expected = workers.learner.get_weights()
    for acting in ("central", "host"):
        with training("ppo", "inline", acting, workers=2, **settings) as (plan, workers):
            plan.load_state_dict(pickle.loads(state))
            list(islice(plan, 3))
            require_equal(workers.learner.get_weights(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inline", "threads", "processes"])
def test_a_snapshot_completes_the_rollouts_in_flight(engine: str) -> None:
    with training("impala", engine, "central", workers=3, num_envs=3, num_async=2) as (plan, workers):
        list(islice(plan, 3))
        state = pickle.loads(pickle.dumps(plan.state_dict()))
        list(islice(plan, 3))
    assert "inference" not in state["actors"], "all it has are the learner's weights"
    with training("impala", engine, "central", workers=3, num_envs=3, num_async=2) as (plan, workers):
        plan.load_state_dict(state)
        assert [report["time/total_timesteps"] for report in islice(plan, 3)] == [60, 75, 90]
        assert workers.inference is not None
        assert workers.inference.apply(lambda own: own._version).result() > 2


# Graph, settings and errors ------------------------------------------------------------------------


def test_the_graph_shows_the_inference_actor() -> None:
    with training("impala", "inline", "central", workers=2) as (plan, _):
        graph = flow.graph(plan)
    messages = {(edge.source, edge.target) for edge in graph.edges if edge.kind == "message"}
    expected = {("ParallelRollouts", "inference"), ("inference", "ParallelRollouts")}
    assert messages == {*expected, ("UpdateWeights", "inference")}
    assert "⇢ inference · ⇠ inference" in graph.text()
    assert "inference" in graph.svg()
    with training("impala", "inline", "auto", workers=2) as (plan, _):
        assert "inference" not in flow.graph(plan).text()


class Plain(ActorCriticPolicy):
    def outputs(self, weights: Any, observation: Any) -> Any:
        return super().outputs(weights, observation)


@pytest.mark.parametrize(
    ("algorithm", "arguments", "message"),
    [
        ("a3c", {}, "leaves the weights with an inference actor, but the workers .* compute gradients"),
        ("apex", {"workers": 2}, "vary them to explore: set acting='auto'"),
        (
            "ppo",
            {"workers": 2, "inference_batch": 3},
            "2 workers can send 2 requests at a time: set it to at",
        ),
        ("ppo", {"policy": Plain}, "Plain does not .evaluates_steps.*set acting='host'"),
        ("ppo", {"acting": "host", "inference_deadline": 1.0}, "acting is host: set acting='central', or"),
        ("ppo", {"inference_batch": 0}, "inference_batch=0: must be an integer >= 1"),
        ("ppo", {"inference_deadline": -1.0}, "inference_deadline=-1.0: must be a number between 0 and 1000"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(algorithm: str, arguments: Any, message: str) -> None:
    given = {"acting": "central", "engine": "inline", **arguments}
    with pytest.raises(rs.RollstreamError, match=message) as caught:
        rs.train(algorithm, env="CartPole-v1", steps=100, quiet=True, **given)
    assert "\n" not in str(caught.value)


def test_a_run_keeps_its_settings_and_can_be_resumed_with_others(tmp_path: Path) -> None:
    settings = {**SMALL["ppo"], "num_envs": 4}
    common: Any = {"out": tmp_path / "run", "quiet": True, "engine": "inline"}
    given: Any = {"acting": "central", "inference_batch": 1, "inference_deadline": 0.5}
    run = rs.train("ppo", env="CartPole-v1", steps=256, workers=2, config=settings, **given, **common)
    assert run.metrics[-1]["inference/batch_size"] == 1
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    assert {name: content["task"][name] for name in given} == given
    assert content["acts_on"] == "an inference actor"
    task = read_run_config(tmp_path / "run").task
    assert (task.inference_batch, task.inference_deadline) == (1, 0.5)
    run = rs.train("ppo", steps=512, resume=True, inference_batch=2, **common)
    assert float(run.metrics[-1]["inference/batch_size"]) > 1
    run = rs.train("ppo", steps=768, resume=True, acting="host", **common)
    assert "inference/batch_size" not in run.metrics[-1]
    assert read_run_config(tmp_path / "run").task.inference_batch is None
