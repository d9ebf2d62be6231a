"""Train PPO on CartPole, draw its plan, and evaluate the policy."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import rollstream as rs
from rollstream import flow
from rollstream.algos.ppo import PPO, Config
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec

OUT = Path("runs/demo")


def show_plan() -> None:
    """Draw the plan without running it."""
    with rs.engine("inline") as engine:
        task, config = Task(EnvSpec("CartPole-v1"), steps=1), Config()
        graph = flow.graph(PPO.plan(PPO.workers(engine, config, task), config))
        (OUT / "graph.svg").write_text(graph.svg())
        print(f"The plan (src/rollstream/algos/ppo.py)\n\n{graph}\n")


def main() -> None:
    """Train, draw, evaluate."""
    shutil.rmtree(OUT, ignore_errors=True)
    run = rs.train("ppo", env="CartPole-v1", steps=100_000, seed=1, out=OUT)
    print()
    show_plan()
    result = run.evaluate(episodes=100)
    print(f"Mean return over 100 episodes: {result.mean_return:.1f} (solved: 475, maximum: 500)")
    print(f"Saved in {OUT}: learning curve (curve.png), plan (graph.svg), metrics, checkpoints.")
    print(f"Record a video: .venv/bin/rollstream video {OUT} --out cartpole.mp4")
    if result.mean_return < 475:
        sys.exit("CartPole was not solved")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
