"""IMPALA on CartPole and its sampling on CartPole and Pong, against RLlib and against bare ALE.

Figure 8 and Table 2 of the RLlib Flow paper, for asynchronous training:

- `train`: IMPALA with learning, 64 x 64 networks, updates of 800 steps; the learner is on an actor. RLlib's
  IMPALA has the same settings;
- `train`, `processes, central`: the same with an inference actor that acts for the workers;
- `sample`: a dummy policy with one weight acts; the driver gets references to rollouts; nothing is learned;
- `bare`: ALE's vector environment in a loop, with a thread per core, as workers have together.

A worker has 8 environments. Each competitor runs in a process of its own, warms up and then runs against
the clock; they take turns over several passes, and figures are medians. Compare within one run, on a machine
with nothing else to do. Pong needs the extra `atari`; how to install peers is said in `ppo_cartpole.py`.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

import rivals
import support
from rivals import Competitor

CARTPOLE, PONG = "CartPole-v1", "ALE/Pong-v5"
RLLIB_TARGET, BARE_TARGET = 10.0, 0.85
"""How many times as fast as RLlib training on CartPole is to be; what share of bare ALE sampling Pong is."""


@dataclass(frozen=True)
class Figure:
    """What one competitor reached."""

    what: str
    environment: str
    competitor: str
    workers: int
    steps_per_second: float
    passes: tuple[float, ...]


def competitors(engines: list[str], pong: bool) -> dict[tuple[str, str, str], Competitor]:
    """By what they do, in which environment, and their names."""
    ours = "impala_rollstream.py"
    found = {("train", CARTPOLE, name): Competitor(ours, (CARTPOLE, "--engine", name)) for name in engines}
    if "processes" in engines:
        arguments = (CARTPOLE, "--engine", "processes", "--acting", "central")
        found["train", CARTPOLE, "processes, central"] = Competitor(ours, arguments)
    found["train", CARTPOLE, "RLlib"] = Competitor("impala_rllib.py", (CARTPOLE,), package="ray.rllib")
    for environment in (CARTPOLE, PONG)[: 1 + pong]:
        for name in engines:
            arguments = (environment, "--engine", name, "--what", "sample")
            found["sample", environment, name] = Competitor(ours, arguments)
    if pong:
        found["sample", PONG, "bare"] = Competitor(ours, (PONG, "--what", "bare"))
    return found


def show(figures: list[Figure]) -> None:
    rates = {(f.what, f.environment, f.competitor, f.workers): f.steps_per_second for f in figures}
    rows: list[list[str]] = []
    for f in figures:
        rllib = rates.get(("train", CARTPOLE, "RLlib", f.workers)) if f.what == "train" else None
        bare = rates.get(("sample", PONG, "bare", f.workers)) if f.environment == PONG else None
        ratio, target = "-", "-"
        if rllib is not None and f.competitor != "RLlib":
            ratio, target = (
                f"{f.steps_per_second / rllib:.1f} x RLlib",
                _verdict(f, f.steps_per_second / rllib, RLLIB_TARGET),
            )
        if bare is not None and f.competitor != "bare":
            ratio, target = (
                f"{f.steps_per_second / bare:.0%} of bare",
                _verdict(f, f.steps_per_second / bare, BARE_TARGET),
            )
        name = f"{f.what} {f.environment}, {f.competitor}, {f.workers} workers"
        spread = f"{min(f.passes):,.0f} to {max(f.passes):,.0f}"
        rows.append([name, f"{f.steps_per_second:,.0f}", spread, ratio, target])
    print()
    support.print_table(["", "steps a second", "all passes", "", "target"], rows)


def _verdict(figure: Figure, ratio: float, target: float) -> str:
    """Only `processes` is meant to reach a target: other engines are for other purposes."""
    if figure.competitor != "processes":
        return "-"
    return f"{target:g} {'met' if ratio >= target else 'MISSED'}"


def main() -> None:
    parser = support.arguments(__doc__, engines=support.ENGINES)
    parser.add_argument("--peer-python", metavar="PATH", help="the interpreter that has the peers")
    parser.add_argument("--workers", type=support.numbers, default=[1, 2], help="comma separated")
    parser.add_argument("--no-pong", action="store_true", help="leave Pong out")
    parser.add_argument("--passes", type=int, default=3, help="how often everybody has a turn")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a turn")
    options = parser.parse_args()
    every = competitors(support.available(options.engines), not options.no_pong)
    able = rivals.present({" ".join(key): own for key, own in every.items()}, options.peer_python)
    rates: dict[tuple[str, str, str, int], list[float]] = {}
    for turn in range(options.passes):
        for workers in options.workers:
            for key, competitor in every.items():
                if " ".join(key) not in able:
                    continue
                print(f"pass {turn + 1}: {', '.join(key)}, {workers} workers ...", flush=True)
                more = ["--workers", str(workers), "--seconds", str(options.seconds)]
                rate = competitor.steps_per_second(options.peer_python, more)
                rates.setdefault((*key, workers), []).append(rate)
    figures = [Figure(*key, statistics.median(row), tuple(row)) for key, row in rates.items()]
    show(figures)
    support.write_json(options.json, "impala", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
