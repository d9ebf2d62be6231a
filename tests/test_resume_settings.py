"""What a resumed run remembers of how it was begun, and what a folder says of it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollstream as rs
from rollstream.algos import ALGORITHMS
from rollstream.rl.algorithm import Algorithm
from rollstream.training.film import FilmError, film
from rollstream.training.folder import RunError, read_recipe
from rollstream.training.run import Run

SMALL = {"environments": 2, "rollout_length": 8, "minibatch_size": 16, "epochs": 1, "hidden": (4,)}
"""PPO in batches of 16 steps."""


def begun(out: Path | None, algorithm: str | Algorithm[Any] = "ppo", **more: Any) -> Run:
    options: dict[str, Any] = {"env": "CartPole-v1", "steps": 32, "config": SMALL, "quiet": True}
    return rs.train(algorithm, out=out, **(options | more))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_algorithm_of_ones_own_is_not_taken_for_one_of_the_same_name(tmp_path: Path) -> None:
    mine = dataclasses.replace(ALGORITHMS["ppo"])
    begun(tmp_path / "run", mine)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["algorithm"] is None
    with pytest.raises(RunError, match=r"ppo, which the run in .* was made with, .*: algorithm=\.\.\."):
        rs.load(tmp_path / "run")
    assert rs.load(tmp_path / "run", algorithm=mine).recipe.algorithm is mine


def test_steps_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    begun(tmp_path / "run", steps=np.int64(32), seed=np.int32(3))
    task = read_recipe(tmp_path / "run").task
    assert (task.steps, task.seed) == (32, 3)
    with pytest.raises(rs.RollstreamError, match=r"steps=32\.0: give a whole number"):
        begun(None, steps=32.0)


@pytest.mark.filterwarnings("ignore:checkpoint:UserWarning")
def test_a_run_that_is_over_has_the_rows_up_to_its_checkpoint(tmp_path: Path) -> None:
    begun(tmp_path / "run", steps=48, checkpoint_every=16)
    os.truncate(tmp_path / "run" / "checkpoints" / "step_000000048" / "state.json", 10)
    run = rs.train("ppo", steps=32, out=tmp_path / "run", resume=True, quiet=True)
    assert [row["time/total_timesteps"] for row in run.metrics] == [16, 32]
    assert run.metrics == rs.load(tmp_path / "run").metrics


def test_a_film_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FilmError, match="episodes=0: there is nothing to film; give 1 or more"):
        film(begun(None), tmp_path / "film.mp4", episodes=0)
