"""Where workers should act: the time of a step of all environments, on the host and on the device.

Workers of PPO sample environments that return at once, with networks of several sizes. `auto` is to choose
the faster place; it goes by the FLOPs of a step (`rollstream.rl.acting`). Run it on a machine with an
accelerator:

    python bench/acting.py
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import gymnasium
import jax
import numpy as np
import support
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

import rollstream as rs
from rollstream.algos.ppo import PPO, Config
from rollstream.rl.acting import choose_acting, step_flops
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.operators import ParallelRollouts
from rollstream.rl.worker_set import WorkerSet

LENGTH = 32
VECTOR = spaces.Box(-1, 1, (16,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
NETWORKS: dict[str, tuple[spaces.Box, tuple[int, ...] | None]] = {
    "MLP 64 x 64": (VECTOR, (64, 64)),
    "MLP 256 x 256": (VECTOR, (256, 256)),
    "MLP 1024 x 1024": (VECTOR, (1024, 1024)),
    "CNN": (IMAGE, None),
}


class Instant(VectorEnv[Any, Any, Any]):
    """Environments whose steps take no time, and whose episodes never end."""

    def __init__(self, num_envs: int, observation_space: spaces.Box):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = observation_space
        self.single_action_space = spaces.Discrete(6)
        shape = (num_envs, *observation_space.shape)
        self._observation = np.random.default_rng(0).uniform(0, 1, shape).astype(observation_space.dtype)
        self._no = np.zeros(num_envs, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:  # noqa: ARG002
        return self._observation, {}

    def step(self, actions: Any) -> Any:  # noqa: ARG002
        return self._observation, np.zeros(self.num_envs), self._no, self._no, {}


class One(gymnasium.Env[Any, Any]):
    """One of them; few are stepped one by one."""

    def __init__(self, observation_space: spaces.Box):
        self.observation_space, self.action_space = observation_space, spaces.Discrete(6)
        self._observation = np.zeros(observation_space.shape, observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # noqa: ARG002
        return self._observation, {}

    def step(self, action: Any) -> Any:  # noqa: ARG002
        return self._observation, 0.0, False, False, {}


for _name, (_space, _) in NETWORKS.items():
    _one: Any = partial(One, _space)
    _many: Any = partial(Instant, observation_space=_space)
    gymnasium.register(f"{_name.replace(' ', '')}-v0", _one, vector_entry_point=_many)


@dataclass(frozen=True)
class Figure:
    """Milliseconds per step of all environments, in either place, and what `auto` chooses."""

    network: str
    environments: int
    mflop: float
    host: float
    device: float
    auto: str


def workers_of(engine: rs.Engine, network: str, environments: int, acting: Any) -> WorkerSet:
    config = Config(
        num_envs=environments,
        rollout_length=LENGTH,
        minibatch_size=environments * LENGTH,
        hidden=NETWORKS[network][1],
    )
    env_spec = EnvSpec(f"{network.replace(' ', '')}-v0")
    return PPO.workers(engine, config, Task(env_spec, steps=1 << 40, acting=acting))


def step_time(network: str, environments: int, acting: str, passes: int) -> float:
    """Milliseconds per step of all environments; the median of so many rollouts."""
    times = []
    with rs.engine("inline") as engine:
        workers = workers_of(engine, network, environments, acting)
        for number in range(passes + 1):
            start = time.perf_counter()
            [[batch]] = list(ParallelRollouts(workers).gather_sync().take(1))
            jax.block_until_ready(dict(batch))
            if number:  # the first compiles
                times.append((time.perf_counter() - start) / LENGTH)
    return 1e3 * statistics.median(times)


def measure(network: str, environments: int, passes: int) -> Figure:
    with rs.engine("inline") as engine:
        learner = workers_of(engine, network, environments, "host").local_learner
        flops = step_flops(learner.policy, learner.weights, environments)
        auto = choose_acting("auto", learner.policy, learner.weights, environments, own_process=False)
    host, device = (step_time(network, environments, place, passes) for place in ("host", "device"))
    return Figure(network, environments, flops / 1e6, host, device, auto)


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument(
        "--environments", type=support.numbers, default=[1, 8, 32, 128], help="comma separated"
    )
    parser.add_argument("--passes", type=int, default=7, help="rollouts of each, after the first")
    options = parser.parse_args()
    figures = [
        measure(network, environments, options.passes)
        for network in NETWORKS
        for environments in options.environments
    ]
    print(f"\nmilliseconds per step of all environments; the device is {jax.devices()[0].device_kind}")
    rows = [
        [
            f"{own.network}, {own.environments} environments",
            f"{own.mflop:,.2f}",
            f"{own.host:.2f}",
            f"{own.device:.2f}",
            own.auto,
        ]
        for own in figures
    ]
    support.print_table(["", "MFLOP", "host", "device", "auto"], rows)
    support.write_json(options.json, "acting", [asdict(own) for own in figures])


if __name__ == "__main__":
    main()
