"""Environments go on exactly from a saved state, or say that they cannot be saved."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rollstream.rl.env_state import UnknownState
from rollstream.rl.vector import NativeVector, SyncVector
from rollstream.state_codec import decode_state, encode_state


def through_json(state: Any) -> Any:
    structure, arrays = encode_state(state)
    return decode_state(json.loads(json.dumps(structure)), arrays)


class Little(gymnasium.Env[Any, Any]):
    """Shows what its subclass draws; an episode has seven steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-9, 9, (2,))
        self.action_space = spaces.Discrete(2)
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.begin(seed)
        self.time = 0
        return self.draw(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return self.draw(), 1.0, self.time == 7, False, {}

    def begin(self, seed: int) -> None: ...

    def draw(self) -> Any:
        raise NotImplementedError


class DrawsFromItsSpace(Little):
    def begin(self, seed: int) -> None:
        self.observation_space.seed(seed)

    def draw(self) -> Any:
        return self.observation_space.sample()


class DrawsFromPartsOfASpace(Little):
    def __init__(self) -> None:
        super().__init__()
        self.places = spaces.Dict({"all": spaces.Tuple([spaces.Discrete(9), spaces.Box(-1, 1)])})

    def begin(self, seed: int) -> None:
        self.places.seed(seed)

    def draw(self) -> Any:
        whole, [part] = self.places.sample()["all"]
        return np.array([whole, part], np.float32)


class SharesItsGenerator(Little):
    def begin(self, seed: int) -> None:
        self.dice = self.np_random

    def draw(self) -> Any:
        return np.array([self.dice.uniform(), self.np_random.uniform()], np.float32)


class SharesItsContainers(Little):
    def begin(self, seed: int) -> None:
        self.history = deque([float(seed % 5)], maxlen=3)
        self.place = np.zeros(2)
        self.everything = {"history": self.history, "parts": (self.place, [self.history])}

    def draw(self) -> Any:
        self.everything["history"].append(self.history[-1] + 0.1)
        self.everything["parts"][1][0].append(self.history[-1] + 0.1)
        self.place += 0.3
        self.place %= 1
        return np.array([self.history[0], self.everything["parts"][0][0]], np.float32)


def with_one_generator_for_all() -> Callable[[], Little]:
    dice = np.random.default_rng(3)

    class SharesWithOthers(Little):
        def begin(self, seed: int) -> None:
            self.dice = dice

        def draw(self) -> Any:
            return self.dice.uniform(-1, 1, 2).astype(np.float32)

    return SharesWithOthers


def future(vector: SyncVector) -> Any:
    return [vector.step(np.zeros(2, int)).observation.tolist() for _ in range(20)]


@pytest.mark.parametrize(
    "make",
    [
        DrawsFromItsSpace,
        DrawsFromPartsOfASpace,
        SharesItsGenerator,
        SharesItsContainers,
        with_one_generator_for_all(),
    ],
)
def test_what_is_shared_and_what_is_drawn_go_on_exactly(make: Callable[[], Little]) -> None:
    vector, other = SyncVector(make, 2), SyncVector(make, 2)
    vector.reset([1, 2])
    future(vector)
    state = through_json(vector.state_dict())
    expected = future(vector)
    other.reset([3, 4])
    other.load_state_dict(state)
    assert future(other) == expected


class SeesThroughAWindow(Little):
    def begin(self, seed: int) -> None:
        self.field = np.zeros((4, 4))
        self.window = self.field[1:3, 1]

    def draw(self) -> Any:
        return self.window.astype(np.float32)


class HasTwoGeneratorsOfOneSource(SharesItsGenerator):
    def begin(self, seed: int) -> None:
        self.dice = np.random.Generator(self.np_random.bit_generator)


class HoldsItself(SharesItsGenerator):
    def begin(self, seed: int) -> None:
        self.dice = self.np_random
        self.loop: list[Any] = []
        self.loop.append(self.loop)


class SharesTheSpaceOfItsClass(Little):
    places = spaces.Box(-1, 1, (2,))

    def draw(self) -> Any:
        return self.places.sample()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (SeesThroughAWindow, r"SeesThroughAWindow\.window changes together with SeesThroughAWindow\.field"),
        (HasTwoGeneratorsOfOneSource, r"Source\.dice changes together with .*Source\._np_random"),
        (HoldsItself, r"HoldsItself\.loop contains itself"),
        (SharesTheSpaceOfItsClass, r"SharesTheSpaceOfItsClass\.places is shared by all environments"),
    ],
)
def test_what_would_not_go_on_exactly_is_named(make: Callable[[], Little], reason: str) -> None:
    vector = SyncVector(make, 1)
    vector.reset([1])
    with pytest.raises(UnknownState, match=reason):
        vector.state_dict()


def test_parts_of_one_array_that_do_not_overlap_are_saved() -> None:
    class HasTwoRows(Little):
        def begin(self, seed: int) -> None:
            self.place, self.speed = np.zeros((2, 2), np.float32)

        def draw(self) -> Any:
            self.speed += 0.5
            self.place += self.speed
            return self.place % 9

    vector, other = SyncVector(HasTwoRows, 2), SyncVector(HasTwoRows, 2)
    vector.reset([1, 2])
    future(vector)
    state = through_json(vector.state_dict())
    other.reset([3, 4])
    other.load_state_dict(state)
    assert future(other) == future(vector)


class LateRows(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Episodes of two and of three steps, each begun anew in the step after its end."""

    metadata: ClassVar[Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self) -> None:
        self.num_envs = 2
        self.single_observation_space = spaces.Box(0, 9, (1,))
        self.single_action_space = spaces.Discrete(2)
        self.time = np.zeros(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.time = np.zeros(2)
        return self.time[:, None].copy(), {}

    def step(self, actions: Any) -> Any:
        lengths = np.array([2, 3])
        self.time = np.where(self.time == lengths, 0, self.time + 1)
        return self.time[:, None].copy(), np.ones(2), self.time == lengths, np.zeros(2, bool), {}


def test_a_row_that_begins_an_episode_after_a_saved_end_is_no_step() -> None:
    vector, other = NativeVector(LateRows()), NativeVector(LateRows())
    vector.reset([0, 1])
    vector.step(np.zeros(2, int))
    assert vector.step(np.zeros(2, int)).ended == [0]
    other.reset([0, 1])
    other.load_state_dict(through_json(vector.state_dict()))
    mask = other.step(np.zeros(2, int)).mask
    assert mask is not None
    assert mask.tolist() == [False, True]
