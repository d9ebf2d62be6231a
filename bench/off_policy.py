"""SAC and TD3 on Pendulum-v1 and DQN on CartPole-v1, learning included, against Stable-Baselines3 and SBX.

Everybody has one environment and the same settings (`peers/off_policy_cases.py`): SAC and TD3 networks of
256 x 256, batches of 256 and an update a step, or 8 (`sac-utd8`); DQN networks of 64 x 64, batches of 32 and
an update every 4 steps. Each runs in a process of its own that trains a little to warm up and compile, then
some more against the clock. Competitors take turns over several passes; figures are medians. `bare` is
Rollstream's compiled update alone, on one batch again and again: nobody who learns with it can be faster.
Compare within one run, on a machine with nothing else to do. How to install peers is said in
`ppo_cartpole.py`.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

import rivals
import support
from rivals import Competitor

ALGORITHMS = ("sac", "td3", "dqn", "sac-utd8")
PASSES = 5
COMPETITORS = {
    "rollstream": Competitor("off_policy_rollstream.py"),
    "bare": Competitor("off_policy_rollstream.py", ("--bare",)),
    "Stable-Baselines3": Competitor("off_policy_sb3.py", package="stable_baselines3"),
    "SBX": Competitor("off_policy_sbx.py", package="sbx"),
}
TARGETS = {
    ("sac", "SBX"): 1.15,
    ("td3", "SBX"): 1.15,
    ("dqn", "Stable-Baselines3"): 4.0,
    ("dqn", "SBX"): 4.0,
    ("sac-utd8", "SBX"): 1.3,
}
"""How many times as fast we are to be."""


@dataclass(frozen=True)
class Figure:
    """What one competitor reached."""

    algorithm: str
    competitor: str
    steps_per_second: float
    passes: tuple[float, ...]


def show(figures: list[Figure]) -> None:
    rates = {(f.algorithm, f.competitor): f.steps_per_second for f in figures}
    rows: list[list[str]] = []
    for f in figures:
        ratio, target = rates[f.algorithm, "rollstream"] / f.steps_per_second, "-"
        if (wanted := TARGETS.get((f.algorithm, f.competitor))) is not None:
            target = f"{wanted:g} {'met' if ratio >= wanted else 'MISSED'}"
        spread = f"{min(f.passes):,.0f} to {max(f.passes):,.0f}"
        rows.append(
            [f"{f.algorithm}, {f.competitor}", f"{f.steps_per_second:,.0f}", spread, f"{ratio:.2f}", target]
        )
    print()
    support.print_table(["", "steps a second", "all passes", "we are times as fast", "target"], rows)


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--peer-python", metavar="PATH", help="the interpreter that has the peers")
    parser.add_argument("--algorithms", type=support.names, default=list(ALGORITHMS), help="comma separated")
    parser.add_argument("--passes", type=int, default=PASSES, help="how often everybody has a turn")
    options = parser.parse_args()
    competitors = rivals.present(COMPETITORS, options.peer_python)
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in range(options.passes):
        for algorithm in options.algorithms:
            for name, competitor in competitors.items():
                print(f"pass {turn + 1}: {algorithm}, {name} ...", flush=True)
                rate = competitor.steps_per_second(options.peer_python, [algorithm])
                rates.setdefault((algorithm, name), []).append(rate)
    figures = [Figure(*key, statistics.median(row), tuple(row)) for key, row in rates.items()]
    show(figures)
    support.write_json(options.json, "off_policy", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
