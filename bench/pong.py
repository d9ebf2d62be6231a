"""PPO on ALE/Pong-v5, learning included, against bare stepping of as many environments.

- `bare`: ALE's vector environment with random actions, and nothing else at all;
- `sample`: rollouts of PPO's workers, with the real policy and advantages; nothing is learned;
- `learn`: the plan of PPO.

Workers are 0 (one in the driver's thread) or on `threads`, where one group of environments steps while the
policy acts for another. All take turns on the same machine; figures are medians over the passes, in agent
steps (of 4 frames) per second. Needs the extra `atari`. On a machine with an accelerator:

    python bench/pong.py --environments 128 --workers 0,2,4
    python bench/pong.py --environments 128 --workers 0,2,4 --acting host

Workers that act against workers that an inference actor acts for, in processes:

    python bench/pong.py --environments 32 --workers 2,4,8 --engine processes --acting host,central
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
import support

import rollstream as rs
from rollstream.algos.ppo import PPO, Config
from rollstream.rl.acting import describe_acting, has_accelerator
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.operators import ParallelRollouts

GAME = "ALE/Pong-v5"
SAMPLE_TARGET = 0.8
"""What share of `bare` sampling is to reach, on a machine with an accelerator."""
LEARN_TARGET = 15_000
"""Agent steps per second with learning, there, with 16 cores and 128 environments."""
Turn = Callable[[], int]
"""Takes a number of environment steps, and returns it."""


@dataclass(frozen=True)
class Figure:
    """What one competitor reached."""

    workers: int
    competitor: str
    acting: str
    steps_per_second: float
    passes: tuple[float, ...]


def bare_stepping(environments: int, threads: int, length: int) -> Turn:
    """The vector environment that workers step, without a worker."""
    from ale_py.vector_env import AtariVectorEnv  # pyright: ignore[reportMissingImports]

    vector: Any = AtariVectorEnv(
        "pong", environments, num_threads=threads, stack_num=1, reward_clipping=False
    )
    vector.reset(seed=0)
    count = int(vector.single_action_space.n)
    actions = np.random.default_rng(0).integers(0, count, (length, environments))

    def turn() -> int:
        for row in actions:
            vector.step(row)
        return actions.size

    return turn


@contextmanager
def ppo_turns(count: int, acting: Any, config: Config, options: Any) -> Iterator[dict[str, Turn]]:
    """Sampling, and learning, with the same workers."""
    env_kwargs = {} if options.threads is None else {"num_threads": options.threads}
    central = {"inference_batch": options.inference_batch, "inference_deadline": options.inference_deadline}
    task = Task(
        EnvSpec(GAME, env_kwargs),
        steps=1 << 40,
        workers=count,
        acting=acting,
        **central if acting == "central" else {},
    )
    with rs.engine(options.engine if count else "inline") as engine:
        workers = PPO.workers(engine, config, task)
        print(f"{count} workers act on {describe_acting(workers.spec.acting)}", flush=True)
        plan = PPO.build(workers, config)

        def sample() -> int:
            rows = list(ParallelRollouts(workers).gather_sync().take(1))
            jax.block_until_ready([dict(batch) for row in rows for batch in row])
            return sum(batch.steps for row in rows for batch in row)

        def learn() -> int:
            next(plan)
            jax.block_until_ready(workers.learner.weights)
            return config.batch_size

        yield {"sample": sample} | ({} if options.no_learning else {"learn": learn})
        plan.close()


def rate(turn: Turn, seconds: float) -> float:
    """Steps per second of as many turns as it takes."""
    start, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds or not steps:
        steps += turn()
    return steps / elapsed


def measure(count: int, config: Config, options: Any) -> list[Figure]:
    """Everybody with so many workers, by turns."""
    rates: dict[tuple[str, str], list[float]] = {}
    threads = options.threads or len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        bare = bare_stepping(config.num_envs, threads, config.rollout_length)
        turns: dict[tuple[str, str], Turn] = {("bare", "-"): bare}
        for acting in options.acting:
            own = stack.enter_context(ppo_turns(count, acting, config, options))
            turns |= {(name, acting): turn for name, turn in own.items()}
        for turn in turns.values():
            turn()  # compiles
        for _ in range(options.passes):
            for key, turn in turns.items():
                rates.setdefault(key, []).append(rate(turn, options.seconds))
    return [Figure(count, *key, statistics.median(row), tuple(row)) for key, row in rates.items()]


def show(figures: Sequence[Figure]) -> None:
    bare = {figure.workers: figure.steps_per_second for figure in figures if figure.competitor == "bare"}
    rows: list[list[str]] = []
    for f in figures:
        share = f.steps_per_second / bare[f.workers]
        spread = f"{min(f.passes):,.0f} to {max(f.passes):,.0f}"
        name = f"{f.workers} workers, {f.competitor}"
        if f.competitor != "bare":
            name += f", acting {f.acting}"
        rows.append([name, f"{f.steps_per_second:,.0f}", spread, f"{share:.1%}", _target(f, share)])
    print()
    support.print_table(["", "steps a second", "all passes", "of bare", "target"], rows)


def _target(figure: Figure, share: float) -> str:
    if figure.competitor == "bare" or not has_accelerator():
        return "-"
    if figure.competitor == "sample":
        return f"{SAMPLE_TARGET:.0%} {'met' if share >= SAMPLE_TARGET else 'MISSED'}"
    return f"{LEARN_TARGET:,} {'met' if figure.steps_per_second >= LEARN_TARGET else 'MISSED'}"


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--environments", type=int, default=128, help="in all")
    parser.add_argument("--workers", type=support.numbers, default=[0, 2, 4], help="comma separated")
    parser.add_argument("--threads", type=int, help="of ALE, for each worker and for bare stepping")
    parser.add_argument("--engine", choices=("threads", "processes", "ray"), default="threads")
    parser.add_argument(
        "--acting",
        type=support.names,
        default=["auto"],
        help="of auto, host, device, central",
    )
    parser.add_argument("--inference-batch", type=int, help="of central (default: half of the workers)")
    parser.add_argument("--inference-deadline", type=float, help="of central, in ms (default: 2)")
    parser.add_argument("--length", type=int, default=128, help="steps per environment in a batch")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4, help="per epoch")
    parser.add_argument("--no-learning", action="store_true", help="only sample")
    parser.add_argument("--passes", type=int, default=3, help="how often everybody has a turn")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn, at least")
    options = parser.parse_args()
    batch = options.environments * options.length
    config = Config(
        num_envs=options.environments,
        rollout_length=options.length,
        epochs=options.epochs,
        minibatch_size=batch // options.minibatches,
    )
    figures: list[Figure] = []
    for count in options.workers:
        figures += measure(count, config, options)
    show(figures)
    support.write_json(options.json, "pong", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
