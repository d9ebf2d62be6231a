"""Small images, as of MinAtar and MiniGrid, are learned from."""

from __future__ import annotations

from typing import Any

import pytest
from small_envs import Catch

import rollstream as rs

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {
        "num_envs": 8,
        "rollout_length": 128,
        "minibatch_size": 128,
        "epochs": 8,
        "learning_rate": 1e-3,
        "gamma": 0.95,
    },
    "dqn": {
        "num_envs": 4,
        "rollout_length": 1,
        "utd_ratio": 0.5,
        "learning_rate": 5e-4,
        "learning_starts": 500,
        "exploration_fraction": 0.3,
        "gamma": 0.95,
        "target_update_interval": 200,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "steps", "value"), [("ppo", 30_000, 255), ("dqn", 8_000, 1)])
def test_a_grid_of_bytes_is_learned_from(algorithm: str, steps: int, value: int) -> None:
    config = SETTINGS[algorithm]
    run = rs.train(
        algorithm, env=Catch, env_kwargs={"value": value}, steps=steps, seed=0, config=config, quiet=True
    )
    assert run.evaluate(100).mean_return > 0.9
