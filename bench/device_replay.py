"""SAC with replay on the device against its compiled update alone, with the data on the device, in one run.

64 Pendulums, vectorised in NumPy, with one update per step: each round stores 64 steps, and samples and
trains 64 times in one compiled program. `bare` is that program again and again, on the same storage and with
inputs that are on the device already: nobody who learns with it can be faster. The ratio of the two is to be
at least 0.8 on an accelerator. Also steps a second with one environment, where a round is a step and an
update. Networks are of 256 x 256 units, batches of 256.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import support
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

import rollstream as rs
from rollstream.algos import sac
from rollstream.rl.algorithm import Task
from rollstream.rl.device_replay import DeviceDraw
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.learner import Learner

MANY, LENGTH = 64, 200
TARGET = 0.8
"""Of the bare program's updates a second, on an accelerator."""


class Pendulums(VectorEnv[Any, Any, Any]):
    """Gymnasium's Pendulum-v1, many at once; all episodes are truncated together."""

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        high = np.array([1, 1, 8], np.float32)
        self.single_observation_space = spaces.Box(-high, high)
        self.single_action_space = spaces.Box(-2, 2, (1,))
        self._random = np.random.default_rng(0)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:  # noqa: ARG002
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._angle, self._speed = self._random.uniform([[-np.pi], [-1]], [[np.pi], [1]], (2, self.num_envs))
        self._step = 0
        return self._observed(), {}

    def step(self, actions: Any) -> Any:
        torque = np.clip(actions[:, 0], -2, 2)
        angle = (self._angle + np.pi) % (2 * np.pi) - np.pi
        reward = -(angle**2 + 0.1 * self._speed**2 + 0.001 * torque**2)
        self._speed = np.clip(self._speed + 0.75 * np.sin(self._angle) + 0.15 * torque, -8, 8)
        self._angle = self._angle + 0.05 * self._speed
        self._step += 1
        observation, info = self._observed(), {}
        truncated = np.full(self.num_envs, self._step == LENGTH)
        if truncated[0]:
            info = {"final_obs": observation, "_final_obs": truncated}
            observation, _ = self.reset()
        return observation, reward, np.zeros(self.num_envs, bool), truncated, info

    def _observed(self) -> Any:
        return np.stack([np.cos(self._angle), np.sin(self._angle), self._speed], axis=1).astype(np.float32)


gymnasium.register(
    "Pendulums-v0",
    "gymnasium.envs.classic_control:PendulumEnv",
    vector_entry_point=lambda **options: Pendulums(**options),
)


@dataclass(frozen=True)
class Figure:
    """Environment steps a second; there is one update per step."""

    case: str
    steps_per_second: float
    passes: tuple[float, ...]


@contextmanager
def training(num_envs: int, rounds: int, place: Any) -> Iterator[tuple[Callable[[], Any], Learner]]:
    """A function that trains for some rounds, and the learner."""
    steps = num_envs * rounds
    config = sac.Config(num_envs=num_envs, report_every=steps, hidden=(256, 256), replay=place)
    task = Task(EnvSpec("Pendulums-v0"), 100 * steps)
    with rs.engine("inline") as engine:
        workers = sac.SAC.workers(engine, config, task)
        plan = sac.plan(workers, config)
        yield lambda: next(plan), workers.local_learner
        plan.close()


def captured(learner: Learner) -> list[DeviceDraw]:
    """A list that always has the newest draw the learner was given."""
    draws: list[DeviceDraw] = []
    train = learner.train_on_draw

    def kept(draw: DeviceDraw, **options: Any) -> Any:
        draws[:] = [draw]
        return train(draw, **options)

    learner.train_on_draw = kept
    return draws


def bare(learner: Learner, draw: DeviceDraw, rounds: int) -> None:
    """The compiled program by itself, on one draw."""
    program = learner._program(MANY, draw.storage.layout)
    schedules = {name: np.float32(value) for name, value in learner._schedules(0.0).items()}
    inputs = jax.device_put((draw.draws, learner._draw_inputs(MANY), schedules))
    trained, finite = jax.tree.map(jnp.copy, learner._pack()), np.float32(1)  # may be donated
    for _ in range(rounds):
        trained, *_ = program(trained, finite, None, draw.storage.arrays, *inputs)
    jax.block_until_ready(trained)


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def many(rounds: int, passes: int) -> list[Figure]:
    """64 environments: the training and the bare program take turns."""
    steps = MANY * rounds
    with training(MANY, rounds, "device") as (train, learner):
        draws = captured(learner)
        train()  # compiles
        bare(learner, draws[0], 1)
        rates: dict[str, list[float]] = {"device": [], "bare": []}
        for _ in range(passes):
            rates["device"].append(steps / timed(train))
            rates["bare"].append(steps / timed(lambda: bare(learner, draws[0], rounds)))
    return [
        Figure(f"{MANY} environments, {name}", statistics.median(own), tuple(own))
        for name, own in rates.items()
    ]


def one(rounds: int, passes: int) -> list[Figure]:
    """One environment, with replay in either place."""
    figures = []
    for place in ("device", "host"):
        with training(1, rounds, place) as (train, _):
            train()
            rates = tuple(rounds / timed(train) for _ in range(passes))
        figures.append(Figure(f"1 environment, {place}", statistics.median(rates), rates))
    return figures


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of 64 environments per pass")
    parser.add_argument("--passes", type=int, default=3, help="how often everybody has a turn")
    options = parser.parse_args()
    backend = jax.default_backend()
    figures = many(options.rounds, options.passes) + one(30 * options.rounds, options.passes)
    print(f"\nSAC on {backend}")
    rows = [
        [own.case, f"{own.steps_per_second:,.0f}", f"{min(own.passes):,.0f} to {max(own.passes):,.0f}"]
        for own in figures
    ]
    support.print_table(["", "steps a second", "all passes"], rows)
    ratio = figures[0].steps_per_second / figures[1].steps_per_second
    verdict = "" if backend == "cpu" else f": {'met' if ratio >= TARGET else 'MISSED'}"
    print(f"{MANY} environments, ratio to bare: {ratio:.2f} (target on an accelerator {TARGET}{verdict})")
    support.write_json(options.json, "device_replay", [asdict(own) for own in figures])


if __name__ == "__main__":
    main()
