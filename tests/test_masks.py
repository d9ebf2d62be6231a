"""Masks of legal actions, however an environment tells them."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from small_envs import sampled, worker_of

from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.gae import add_gae
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.q_policy import QPolicy
from rollstream.rl.spaces import SpaceError
from rollstream.rl.vector import NativeVector, SyncVector, Vector
from rollstream.rl.worker import WorkerSpec
from rollstream.training.inference import TrainedPolicy

LEGAL = np.array([1, 1, 0], np.int8)
MODES = {
    "next step": AutoresetMode.NEXT_STEP,
    "same step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}


class Masked(gymnasium.Env[Any, Any]):
    """Says which actions are legal, but in a chosen step; an episode has three, or four after an odd seed."""

    def __init__(self, silent: int | None = None, mask: Any = LEGAL):
        self.observation_space = spaces.Box(-1, 1, (2,))
        self.action_space = spaces.Discrete(3)
        self.silent = silent
        self.mask = mask

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.length = self.length if seed is None else 3 + seed % 2
        self.time = 0
        return self.shown(), self.told()

    def step(self, action: Any) -> Any:
        self.time += 1
        return self.shown(), 1.0, self.time == self.length, False, self.told()

    def shown(self) -> Any:
        return np.full(2, self.time / 9, np.float32)

    def told(self) -> dict[str, Any]:
        silent = self.length if self.silent == -1 else self.silent
        return {} if self.time == silent else {"action_mask": self.mask}


def vector_of(way: str, make: Any) -> Vector:
    if way == "sync":
        return SyncVector(make, 2)
    return NativeVector(SyncVectorEnv([make] * 2, autoreset_mode=MODES[way]))


@pytest.mark.parametrize("way", ["sync", *MODES])
def test_the_last_observation_needs_no_mask(way: str) -> None:
    vector = vector_of(way, partial(Masked, silent=-1))
    assert vector.reset([4, 5])["action_mask"].tolist() == [[1, 1, 0], [1, 1, 0]]
    finals = []
    for _ in range(12):
        step = vector.step(np.zeros(2, int))
        over = step.ended if way == "next step" else []
        expected = [[1, 1, 1] if index in over else [1, 1, 0] for index in range(2)]
        assert step.observation["action_mask"].tolist() == expected
        finals += [last["action_mask"].tolist() for _, last in step.final_observations]
    assert finals == [[1, 1, 1]] * (0 if way == "next step" else 7)
    vector.close()


@pytest.mark.parametrize("way", ["sync", *MODES])
def test_an_observation_to_act_on_needs_one(way: str) -> None:
    vector = vector_of(way, partial(Masked, silent=1))
    vector.reset([0, 1])
    with pytest.raises(
        SpaceError, match=r"(Masked|VectorEnv) reports info\['action_mask'\] .* not after a step"
    ):
        vector.step(np.zeros(2, int))
    vector.close()


def test_a_worker_bootstraps_from_a_last_observation_without_mask() -> None:
    make = partial(gymnasium.wrappers.TimeLimit, Masked(silent=2), max_episode_steps=2)
    postprocess = partial(add_gae, gamma=0.9, gae_lambda=0.9)
    batch = sampled(worker_of(WorkerSpec(EnvSpec(make), 1, 8, ActorCriticPolicy, postprocess)))
    assert batch["truncated"].sum() == 4
    assert (batch["action"] < 2).all()


@pytest.mark.parametrize("way", ["sync", *MODES])
@pytest.mark.parametrize("mask", [[[1, 0], [1, 1, 0]], ([1, 0], [1, 1, 0]), [1, 0, 1, 1, 0]])
def test_a_mask_may_be_a_list(way: str, mask: Any) -> None:
    class Two(Masked):
        def __init__(self) -> None:
            super().__init__(mask=mask)
            self.action_space = spaces.MultiDiscrete([2, 3])

    vector = vector_of(way, Two)
    assert vector.reset([0, 1])["action_mask"].tolist() == [[1, 0, 1, 1, 0]] * 2
    policy = ActorCriticPolicy(vector.observation_space, vector.action_space)
    actor = TrainedPolicy(policy, policy.init(0), vector.observation_space, vector.action_space)
    for _ in range(5):
        first, second = actor.act(np.zeros(2), deterministic=False, action_mask=mask)
        assert (first == 0, second < 2) == (True, True)
    vector.close()


class ToldTwice(Masked):
    """The mask is in the observation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(
            {"observation": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(3)}
        )

    def shown(self) -> Any:
        return {"observation": super().shown(), "action_mask": LEGAL}


@pytest.mark.parametrize("way", ["sync", *MODES])
def test_a_mask_that_is_told_twice_counts_once(way: str) -> None:
    vector = vector_of(way, ToldTwice)
    assert vector.observation_space == ToldTwice().observation_space
    policy = ActorCriticPolicy(vector.observation_space, vector.action_space)
    actor = TrainedPolicy(policy, policy.init(0), vector.observation_space, vector.action_space)
    environment = ToldTwice()
    observation, info = environment.reset(seed=0)
    for _ in range(9):
        assert actor.act(observation, deterministic=False, action_mask=info["action_mask"]) < 2
    vector.close()


def test_acting_needs_no_mask_but_heeds_one() -> None:
    vector = SyncVector(Masked, 1)
    policy = ActorCriticPolicy(vector.observation_space, vector.action_space)
    actor = TrainedPolicy(policy, policy.init(0), vector.observation_space, vector.action_space)
    free = {int(actor.act(np.zeros(2), deterministic=False)) for _ in range(30)}
    bound = {int(actor.act(np.zeros(2), deterministic=False, action_mask=LEGAL)) for _ in range(30)}
    assert (free, bound) == ({0, 1, 2}, {0, 1})


class Late(Masked):
    """Says nothing about legal actions at a reset."""

    def told(self) -> dict[str, Any]:
        return super().told() if self.time else {}


@pytest.mark.parametrize("way", ["sync", *MODES])
def test_a_mask_after_a_step_but_not_after_a_reset_is_refused(way: str) -> None:
    vector = vector_of(way, Late)
    vector.reset([0, 1])
    with pytest.raises(SpaceError, match=r"'action_mask'\] after a step, but not after a reset; report it"):
        vector.step(np.zeros(2, int))
    vector.close()


@pytest.mark.parametrize("way", ["sync", *MODES])
def test_a_mask_without_a_legal_action_is_refused(way: str) -> None:
    vector = vector_of(way, partial(Masked, mask=np.zeros(3, np.int8)))
    with pytest.raises(SpaceError, match=r"(Masked|VectorEnv) reports an action mask that allows no action"):
        vector.reset([0, 1])
    vector.close()


class Stuck(ToldTwice):
    """After the first step, the mask in its observation allows nothing."""

    def shown(self) -> Any:
        return super().shown() | {"action_mask": LEGAL * np.int8(self.time == 0)}


@pytest.mark.parametrize("way", ["sync", *MODES])
def test_a_mask_in_an_observation_has_to_allow_an_action(way: str) -> None:
    vector = vector_of(way, Stuck)
    vector.reset([0, 1])
    with pytest.raises(SpaceError, match="reports an action mask that allows no action"):
        vector.step(np.zeros(2, int))
    vector.close()


class Over(Masked):
    """No action is legal once an episode is over, as in many games."""

    def told(self) -> dict[str, Any]:
        return {"action_mask": self.mask * np.int8(self.time < self.length)}


@pytest.mark.parametrize("way", ["sync", *MODES])
def test_the_mask_of_a_last_observation_may_allow_nothing(way: str) -> None:
    vector = vector_of(way, Over)
    vector.reset([0, 1])
    for _ in range(12):
        vector.step(np.zeros(2, int))
    vector.close()


@pytest.mark.parametrize("way", ["sync", *MODES])
@pytest.mark.parametrize("length", [2, 4])
def test_a_mask_of_the_wrong_length_is_refused(way: str, length: int) -> None:
    vector = vector_of(way, partial(Masked, mask=np.ones(length, np.int8)))
    message = (
        rf"an action mask of shape \({length},\), and its action space is Discrete\(3\); report 3 numbers"
    )
    with pytest.raises(SpaceError, match=message):
        vector.reset([0, 1])
    vector.close()


def test_each_part_of_an_action_needs_a_legal_choice() -> None:
    class Two(Masked):
        def __init__(self) -> None:
            super().__init__(mask=([1, 1], [0, 0, 0]))
            self.action_space = spaces.MultiDiscrete([2, 3])

    with pytest.raises(SpaceError, match="allows no action"):
        SyncVector(Two, 1).reset([0])


class InObservation(gymnasium.Env[Any, Any]):
    """Its mask is a part of its observations."""

    def __init__(self, observation_space: Any, action_space: Any):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}


PART = spaces.Box(-1, 1, (2,))
IN_OBSERVATION = {
    "nested": (
        spaces.Dict({"own": spaces.Dict({"seen": PART, "action_mask": spaces.MultiBinary(3)})}),
        spaces.Discrete(3),
        r"the action mask is the observation space\['own'\]\['action_mask'\], inside another part; move it",
    ),
    "too long": (
        spaces.Dict({"seen": PART, "action_mask": spaces.MultiBinary(4)}),
        spaces.Discrete(3),
        r"an action mask of shape \(4,\), and its action space is Discrete\(3\); report 3 numbers",
    ),
    "of numbers": (
        spaces.Dict({"seen": PART, "action_mask": spaces.MultiBinary(1)}),
        spaces.Box(-1, 1, (1,)),
        "only Discrete and MultiDiscrete actions can have one",
    ),
}


@pytest.mark.parametrize("kind", IN_OBSERVATION)
def test_a_mask_that_does_not_fit_the_spaces_is_refused(kind: str) -> None:
    observations, actions, message = IN_OBSERVATION[kind]
    with pytest.raises(SpaceError, match=message):
        EnvSpec(partial(InObservation, observations, actions)).make(1)


def test_acting_on_a_batch_heeds_the_mask_of_each() -> None:
    vector = SyncVector(Masked, 1)
    policy = ActorCriticPolicy(vector.observation_space, vector.action_space)
    actor = TrainedPolicy(policy, policy.init(0), vector.observation_space, vector.action_space)
    masks = np.eye(3, dtype=np.int8)
    assert actor.act(np.zeros((3, 2)), deterministic=False, action_mask=masks).tolist() == [0, 1, 2]
    assert actor.act(np.zeros((3, 2))).shape == (3,)
    with pytest.raises(SpaceError, match="an action mask that allows no action; allow at least one"):
        actor.act(np.zeros(2), action_mask=np.zeros(3))
    with pytest.raises(SpaceError, match=r"'action_mask' that has shape \(2,\) instead of \(3,\)"):
        actor.act(np.zeros(2), action_mask=np.ones(2))


def test_a_mask_that_allows_nothing_leaves_q_values_as_they_are() -> None:
    """Final observations may have one: an episode that was cut off is bootstrapped from them."""
    space = spaces.Dict({"observation": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(3)})
    policy = QPolicy(space, spaces.Discrete(3))
    masks = np.array([[0, 0, 0], [1, 1, 1], [1, 0, 1]], np.int8)
    found = np.asarray(
        policy.q_values(policy.init(0), {"observation": np.zeros((3, 2)), "action_mask": masks})
    )
    np.testing.assert_array_equal(found[0], found[1])
    assert found[2, 1] < -1e8


class MaskMethod(Masked):
    """As for sb3-contrib: a method says which actions are legal, and `info` does not."""

    def action_masks(self) -> Any:
        return LEGAL.astype(bool)

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], {}

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {}


def test_the_masks_of_a_method_are_used() -> None:
    worker = worker_of(WorkerSpec(EnvSpec(MaskMethod), 2, 50, ActorCriticPolicy))
    batch = sampled(worker)
    assert set(np.unique(batch["action"])) == {0, 1}
    assert (batch["observation"]["action_mask"] == LEGAL).all()
