"""Acting on the device: what acting on the host gives, rollouts that stay there, and the rule."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from small_envs import Scripted, sampled, worker_of

import rollstream as rs
from rollstream.algos import apex, dqn
from rollstream.rl import env_spec
from rollstream.rl.acting import choose_acting, step_flops
from rollstream.rl.algorithm import Task
from rollstream.rl.batch import FIRST_STATE, Batch
from rollstream.rl.env_checks import BadEnvironment
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.frame_history import NewestFrames
from rollstream.rl.frame_stack import FrameStack
from rollstream.rl.gae import add_gae
from rollstream.rl.operators import StandardizeFields
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.recurrent_networks import recurrent_actor_critic
from rollstream.rl.recurrent_policy import RecurrentPolicy
from rollstream.rl.replay_operators import rollout_chunk
from rollstream.rl.rollout import newest_frames, replace_reset_steps, rollout_for_replay
from rollstream.rl.worker import RolloutWorker, WorkerSpec

FRAMES = 3
ON_DEVICE = ("observation", "log_prob", "value", "advantage", "value_target")


class Blinking(gymnasium.Env[Any, Any]):
    """Images that tell episode, step and last action; episodes of 1 to 4 steps are truncated or terminate."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (6, 6, 1), np.uint8)
        self.action_space = spaces.Discrete(3)
        self._episode = self._step = self._action = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode = self._episode + 1 if seed is None else seed % 50
        self._step = self._action = 0
        return self._image(), {}

    def step(self, action: Any) -> Any:
        self._step, self._action = self._step + 1, int(action)
        over, truncates = self._step > self._episode % 4, self._episode % 3 == 0
        reward = float(self._action == self._episode % 3)
        return self._image(), reward, over and not truncates, over and truncates, {}

    def _image(self) -> Any:
        image = np.zeros((6, 6, 1), np.uint8)
        image[self._episode % 6, self._step % 6], image[-1, self._action] = 1 + self._episode, 1
        return image


def blinking_vector(num_envs: int, mode: str) -> SyncVectorEnv:
    return SyncVectorEnv([Blinking] * num_envs, autoreset_mode=AutoresetMode(mode))


_entry_points: Any = {"entry_point": Blinking, "vector_entry_point": blinking_vector}
gymnasium.register("Blinking-v0", **_entry_points)
MODES = ["sync", *(mode.value for mode in AutoresetMode)]


def blinking(mode: str = "sync", frame_stack: int = FRAMES) -> EnvSpec:
    if mode == "sync":
        return EnvSpec(Blinking, frame_stack=frame_stack)
    return EnvSpec("Blinking-v0", {"mode": mode}, frame_stack=frame_stack, vectorization="native")


def on_policy_worker(acting: Any, environment: EnvSpec, **options: Any) -> RolloutWorker:
    postprocess = partial(add_gae, gamma=0.9, gae_lambda=0.9)
    spec = WorkerSpec(environment, 4, 7, ActorCriticPolicy, postprocess, evaluates_steps=True, acting=acting)
    return worker_of(replace(spec, **options))


def require_equal(found: Batch, expected: Batch) -> None:
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        exact = name not in (*ON_DEVICE[1:], FIRST_STATE)
        check: Any = (
            np.testing.assert_array_equal if exact else partial(np.testing.assert_allclose, rtol=1e-5)
        )
        jax.tree.map(check, found[name], column)


# Rollouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_device_samples_what_the_host_samples(mode: str) -> None:
    """With stacks, truncation, termination and, in one mode, steps that are resets."""
    host, device = (on_policy_worker(acting, blinking(mode)) for acting in ("host", "device"))
    for _ in range(3):
        require_equal(sampled(device), sampled(host))
    host.close()
    device.close()


def test_rollouts_stay_on_the_device() -> None:
    worker = on_policy_worker("device", blinking(AutoresetMode.NEXT_STEP.value))
    batch = sampled(worker)
    assert {name for name, column in batch.items() if isinstance(column, jax.Array)} == set(ON_DEVICE)
    joined = StandardizeFields(["advantage"])(Batch.concatenate([batch, batch]))
    there = {name for name, own in joined.items() if isinstance(own, jax.Array)}
    assert there == set(ON_DEVICE) - {"advantage"}
    worker.close()


def test_a_step_sends_frames_of_bytes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = on_policy_worker("device", blinking())
    sampled(worker)
    acting: Any = worker._device
    sent: list[Any] = []

    def put(inputs: Any) -> Any:
        from_host = [leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, np.ndarray)]
        if type(inputs) is tuple:
            sent.append([(leaf.shape, leaf.dtype) for leaf in from_host])
        return original(inputs)

    def program(*inputs: Any) -> Any:
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(inputs))
        return own_program(*inputs)

    original, own_program = acting._put, acting._program
    monkeypatch.setattr(acting, "_put", put)
    monkeypatch.setattr(acting, "_program", program)
    sampled(worker)
    frames, started = ((4, 6, 6, 1), np.uint8), ((4,), bool)
    assert len(sent) == 7
    assert all(own in ([frames], [frames, started]) for own in sent[1:])
    assert sent[0] in ([], [started]), "the last frames of a rollout are there already"
    worker.close()


@pytest.mark.parametrize("mode", MODES)
def test_acting_is_compiled_once(mode: str) -> None:
    worker = on_policy_worker("device", blinking(mode))
    for _ in range(3):
        sampled(worker)
    acting: Any = worker._device
    assert (acting._program._cache_size(), acting._push._cache_size()) == (1, 1)
    worker.close()


def test_observations_without_stacks_of_any_structure() -> None:
    class Mixed(Scripted):
        observation_space: Any = spaces.Dict({"at": spaces.Box(-9, 99, (2,)), "choice": spaces.Discrete(5)})

        def _observation(self) -> Any:
            at = np.array([self._episode, self._step], np.float32)
            return {"at": at, "choice": self._step}

    host, device = (on_policy_worker(acting, EnvSpec(Mixed)) for acting in ("host", "device"))
    for _ in range(2):
        require_equal(sampled(device), sampled(host))


class Broken(Scripted):
    """The observation of the third step is not valid."""

    def __init__(self, choice: bool) -> None:
        super().__init__()
        self._choice = choice
        if choice:
            self.observation_space: Any = spaces.Discrete(3)

    def _observation(self) -> Any:
        if self._choice:
            return 7 if self._step == 2 else 1
        return np.full(2, np.nan if self._step == 2 else 1.0)


@pytest.mark.parametrize("choice", [False, True])
def test_invalid_observations_are_reported_as_on_the_host(choice: bool) -> None:
    messages: list[str] = []
    for acting in ("host", "device"):
        worker = on_policy_worker(acting, EnvSpec(Broken, {"choice": choice}), num_envs=1)
        with pytest.raises(BadEnvironment) as caught:
            sampled(worker)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


class Counting(ActorCriticPolicy):
    """The action is the number of steps of the episode so far, modulo 3: a recurrent state."""

    def initial_state(self, size: int) -> Any:
        return np.zeros(size, np.int32)

    def step(self, weights: Any, observation: Any, state: Any, noise: Any) -> Any:
        return state % 3, state + 1


def test_recurrent_state_starts_with_every_episode() -> None:
    host, device = (on_policy_worker(acting, blinking(), policy=Counting) for acting in ("host", "device"))
    for _ in range(2):
        require_equal(sampled(device), sampled(host))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_recurrent_policies_act_alike(mode: str) -> None:
    network = partial(recurrent_actor_critic, memory_size=5)
    policy = partial(RecurrentPolicy, network=network)
    host, device = (on_policy_worker(acting, blinking(mode), policy=policy) for acting in ("host", "device"))
    for _ in range(3):
        require_equal(sampled(device), sampled(host))
    memories = (own.state_dict()["memory"] for own in (host, device))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *memories)


def test_steps_that_were_resets_are_replaced_alike() -> None:
    mask = np.array([[True, True], [False, True]])
    batch = Batch(value=np.arange(4.0).reshape(2, 2), episode_return=np.full((2, 2), np.nan))
    there = Batch(batch | {"value": jnp.asarray(batch["value"])})
    found, expected = (
        replace_reset_steps(own, mask, np.random.default_rng(1))["value"] for own in (there, batch)
    )
    assert isinstance(found, jax.Array)
    np.testing.assert_array_equal(found, expected)


# Replay --------------------------------------------------------------------------------------------


def replay_rollouts(acting: Any, frame_stack: int, prioritized: bool) -> list[Any]:
    postprocess: Any = partial(rollout_for_replay, frame_stack=frame_stack)
    if prioritized:
        postprocess = partial(apex.add_estimates, partial(apex.td_errors, apex.Config()), frame_stack)
    policy = partial(dqn.make_policy, dqn.Config())
    spec = WorkerSpec(blinking(frame_stack=frame_stack), 2, 5, policy, postprocess, acting=acting)
    worker = worker_of(replace(spec, for_replay=True))
    assert worker._postprocess is not None
    return [worker._postprocess(worker.weights, worker._rollout()) for _ in range(3)]


@pytest.mark.parametrize(("frame_stack", "prioritized"), [(1, False), (FRAMES, False), (FRAMES, True)])
def test_replay_gets_the_frames_that_the_host_has(frame_stack: int, prioritized: bool) -> None:
    pairs = zip(
        *(replay_rollouts(acting, frame_stack, prioritized) for acting in ("device", "host")), strict=True
    )
    for found, expected in pairs:
        for own in jax.tree.leaves((dict(found.columns), found.last_observation)):
            assert isinstance(own, np.ndarray)
        priority = found.columns.pop("priority", None), expected.columns.pop("priority", None)
        if prioritized:
            np.testing.assert_allclose(*priority, rtol=1e-4)
        chunks = [rollout_chunk(own, 0) for own in (found, expected)]
        jax.tree.map(np.testing.assert_array_equal, *(own.columns for own in chunks))
        np.testing.assert_array_equal(chunks[0].last_observation, chunks[1].last_observation)
        jax.tree.map(np.testing.assert_array_equal, *(own.final_observations for own in chunks))


def test_rollouts_on_the_device_can_also_be_replayed() -> None:
    """Without `for_replay` they are read from there."""
    host, device = (on_policy_worker(acting, blinking(), postprocess=None) for acting in ("host", "device"))
    space = host.vector.observation_space
    found, expected = (newest_frames(own._rollout(), space, FRAMES) for own in (device, host))
    np.testing.assert_array_equal(found.columns["observation"], expected.columns["observation"])
    np.testing.assert_array_equal(found.last_observation, expected.last_observation)


# Frames --------------------------------------------------------------------------------------------


def test_frames_make_the_stacks_of_a_frame_stack() -> None:
    stacked: Any = blinking().make(3)
    newest, copy = (NewestFrames(stacked_of) for stacked_of in (blinking_stack(), blinking_stack()))
    stacked.reset([1, 2, 3])
    newest.reset([1, 2, 3])
    copy.reset([4, 5, 6])
    for t in range(12):
        actions = np.arange(3) + t
        expected, found = stacked.step(actions % 3), newest.step(actions % 3)
        np.testing.assert_array_equal(newest.stacks(), expected.observation)
        np.testing.assert_array_equal(found.observation, expected.observation[..., -1:])
        jax.tree.map(
            np.testing.assert_array_equal,
            dict(found.final_observations),
            dict(expected.final_observations),
        )
        copy.load_state_dict(stacked.state_dict())
        np.testing.assert_array_equal(copy.stacks(), expected.observation)
        np.testing.assert_array_equal(newest.state_dict()["stack"], stacked.state_dict()["stack"])


def blinking_stack() -> FrameStack:
    vector = blinking().make(3)
    assert isinstance(vector, FrameStack)
    return vector


@pytest.mark.parametrize(("before", "after"), [("device", "device"), ("host", "device"), ("device", "host")])
def test_a_state_can_be_loaded_wherever_workers_act(before: str, after: str) -> None:
    first = on_policy_worker(before, blinking())
    for _ in range(2):
        sampled(first)
    state = first.state_dict()
    second = on_policy_worker(after, blinking(), seed=5)
    sampled(second)
    second.load_state_dict(state)
    for _ in range(2):
        require_equal(sampled(second), sampled(first))


# Training ------------------------------------------------------------------------------------------

PPO: dict[str, Any] = {"num_envs": 4, "rollout_length": 8, "minibatch_size": 16, "epochs": 2}
DQN: dict[str, Any] = {"num_envs": 2, "learning_starts": 16, "buffer_size": 100, "batch_size": 8}


def trained(algorithm: str, config: Any, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"env": Blinking, "frame_stack": FRAMES, "steps": 96, "quiet": True}
    return rs.train(algorithm, config=config, **(given | options)).policy.weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "config", "options"),
    [
        ("ppo", PPO, {}),
        ("ppo", PPO, {"engine": "threads", "workers": 2}),
        ("dqn", DQN, {}),
        pytest.param("ppo", PPO | {"normalize_rewards": True}, {}, marks=pytest.mark.slow),
    ],
)
def test_training_is_the_same_on_the_device(algorithm: str, config: Any, options: Any) -> None:
    host, device = (trained(algorithm, config, acting=acting, **options) for acting in ("host", "device"))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), device, host)


@pytest.mark.slow
def test_a3c_computes_gradients_on_the_device() -> None:
    config = {"num_envs": 2, "rollout_length": 4, "report_every": 1}
    host, device = (trained("a3c", config, acting=acting, steps=32) for acting in ("host", "device"))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), device, host)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, overlap: bool) -> None:
    """With `overlap`, a batch is among what is saved."""
    config = PPO | {"overlap": overlap}
    whole = trained("ppo", config, acting="device")
    trained("ppo", config, acting="device", steps=32, out=tmp_path / "run")
    resumed = trained("ppo", None, out=tmp_path / "run", resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


# The choice ----------------------------------------------------------------------------------------


class Notes:
    """A display that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start(self, *_: Any) -> None: ...

    report = heartbeat = start

    def finish(self, completed: bool) -> None: ...


@pytest.mark.slow
def test_the_choice_is_shown_and_recorded(tmp_path: Path) -> None:
    display: Any = Notes()
    trained("ppo", PPO, acting="device", steps=32, out=tmp_path / "run", display=display)
    assert display.notes == ["acting on the device, a CPU"]
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (content["task"]["acting"], content["acts_on"]) == ("device", "the device, a CPU")
    trained("ppo", None, acting="host", steps=64, out=tmp_path / "run", resume=True, display=display)
    assert display.notes[1:] == ["acting on the host"]


@pytest.mark.slow
def test_nothing_is_shown_where_there_is_nothing_to_choose() -> None:
    display: Any = Notes()
    trained("ppo", PPO, steps=32, display=display)
    assert display.notes == []


@pytest.mark.parametrize(
    ("space", "num_envs", "expected"),
    [
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), 1, "device"),
        (spaces.Box(0, 1, (10, 10, 4), np.uint8), 8, "host"),
        (spaces.Box(0, 1, (10, 10, 4), np.uint8), 128, "device"),
        (spaces.Box(-1, 1, (17,)), 128, "host"),
    ],
    ids=["Atari", "few grids", "many grids", "small network"],
)
def test_large_networks_act_on_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, space: Any, num_envs: int, expected: str
) -> None:
    policy = ActorCriticPolicy(space, spaces.Discrete(6))
    weights = policy.init(0)
    assert choose_acting("auto", policy, weights, num_envs, own_process=False) == "host"
    flops = step_flops(policy, weights, num_envs)
    monkeypatch.setattr("rollstream.rl.acting.has_accelerator", lambda: True)
    monkeypatch.setattr("rollstream.rl.acting.step_flops", lambda *_: flops)
    assert choose_acting("auto", policy, weights, num_envs, own_process=False) == expected
    assert choose_acting("auto", policy, weights, num_envs, own_process=True) == "host"
    assert choose_acting("host", policy, weights, num_envs, own_process=False) == "host"


def test_without_a_count_images_are_many_flops_and_else_two_for_each_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unable(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(jax.stages.Lowered, "cost_analysis", unable)
    images = ActorCriticPolicy(spaces.Box(0, 1, (10, 10, 4), np.uint8), spaces.Discrete(6))
    assert step_flops(images, images.init(0), 1) == np.inf
    numbers = ActorCriticPolicy(spaces.Box(-1, 1, (17,)), spaces.Discrete(6))
    weights = numbers.init(0)
    assert step_flops(numbers, weights, 3) == 6 * sum(value.size for value in weights.values())


def test_processes_act_on_the_host() -> None:
    told = r"acting='device' needs workers in the driver's process: .* or acting='auto'"
    with pytest.raises(rs.RollstreamError, match=told):
        trained("ppo", PPO, acting="device", workers=2)


def test_policies_of_other_frameworks_act_on_the_host() -> None:
    policy: Any = ActorCriticPolicy(spaces.Box(-1, 1, (2,)), spaces.Discrete(3))
    policy.jit = False
    with pytest.raises(rs.RollstreamError, match=r"ActorCriticPolicy is not one \(jit=False\)"):
        choose_acting("device", policy, {}, 1, own_process=False)


def test_an_unknown_place_is_an_error() -> None:
    with pytest.raises(rs.RollstreamError, match=r"acting='gpu': must be one of 'auto', 'host', 'device'"):
        trained("ppo", PPO, acting="gpu")


# Threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "workers", "threads"), [("inline", 1, 16), ("threads", 2, 16), ("threads", 4, 8)]
)
def test_workers_in_threads_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, engine: str, workers: int, threads: int
) -> None:
    """About half of them act at any time, so each gets twice its share."""
    made: list[Any] = []

    def made_vector(name: str, spec: Any, count: int, options: Any) -> Any:
        made.append({name: value for name, value in options.items() if name != "mode"})
        return blinking_vector(count, options["mode"])

    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(env_spec, "_made_vector", made_vector)
    monkeypatch.setattr(EnvSpec, "_is_ale", property(lambda self: True))
    config = dqn.Config(num_envs=64)
    with rs.engine(engine) as opened:
        workers_of = dqn.DQN.workers(opened, config, Task(blinking("NextStep"), 1, workers=workers))
        assert workers_of.spec.env_threads == threads
    first, *others = made
    assert "num_threads" not in first, "one that is only asked for its spaces"
    assert {own["num_threads"] for own in others} == {threads}


def test_given_threads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        env_spec, "_envpool", lambda *given: made.append(given) or blinking_vector(2, "NextStep")
    )
    EnvSpec("envpool:Pong-v5", {"num_threads": 3}).make(2, 0, threads=8).close()
    EnvSpec("envpool:Pong-v5").make(2, 0, threads=8).close()
    assert [options["num_threads"] for _, _, options in made] == [3, 2]


def test_two_threads_take_turns() -> None:
    """Each worker has its own stacks and buffers; both use the same weights."""
    workers = [on_policy_worker("device", blinking(), seed=seed) for seed in (1, 2)]
    alone = [on_policy_worker("device", blinking(), seed=seed) for seed in (1, 2)]
    with rs.engine("threads") as engine:
        actors = engine.spawn(Sampler, (workers,), count=2, name="sampler")
        found = [future.result() for future in [actor.call("sample") for actor in actors]]
    for batches, worker in zip(found, alone, strict=True):
        for batch in batches:
            require_equal(batch, sampled(worker))


class Sampler:
    """Samples with one of the workers, in a thread."""

    def __init__(self, workers: list[RolloutWorker], context: Any):
        self._worker = workers[context.index]

    def sample(self) -> list[Batch]:
        return [sampled(self._worker) for _ in range(4)]


def test_the_learners_arrays_are_used_as_they_are() -> None:
    worker = on_policy_worker("device", EnvSpec("CartPole-v1"))
    weights = jax.tree.map(jnp.asarray, worker.policy.init(1))
    worker.set_weights(1, weights)
    for name, own in worker.weights.items():
        assert own.unsafe_buffer_pointer() == weights[name].unsafe_buffer_pointer()
