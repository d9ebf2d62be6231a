"""PPO on CartPole-v1, learning included: Rollstream against Stable-Baselines3, SBX and RLlib.

Everybody has 8 environments, 2048 steps a batch, 10 epochs of minibatches of 64, networks of 64 x 64 tanh and
the same other settings (`peers/command_line.py`). Each runs in a process of its own (`peers/ppo_*.py`) that
trains 3 batches to warm up and compile, then some more against the clock. Competitors take turns over several
passes; figures are medians. Compare within one run, on a machine with nothing else to do. `--minibatch 256`
is the harder comparison, which the targets are meant for: small updates cost the peers more.

- `sync`: the plan on inline; workers wait while the learner learns.
- `overlap`: a worker on a process samples the next batch meanwhile, one version behind. One, since the
  learner takes the other of two cores: with two workers, each of 4 environments, it is a fifth slower there.
- `native`: as `sync`, with Gymnasium's numpy vector CartPole of 64 environments; there is nothing to compare
  it with, it is only reported.

Peers have an environment of their own, since they pin versions; those that are not installed are left out:

    python3 -m venv ~/.cache/peers
    ~/.cache/peers/bin/pip install torch        # a build for processors will do
    ~/.cache/peers/bin/pip install stable-baselines3 sbx-rl "ray[rllib]"
    python bench/ppo_cartpole.py --peer-python ~/.cache/peers/bin/python
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import rivals
import support
from rivals import Competitor

PASSES = 3
BATCHES = 30


@dataclass(frozen=True)
class Figure:
    """What one competitor reached."""

    competitor: str
    steps_per_second: float
    passes: tuple[float, ...]


COMPETITORS = {
    "sync": Competitor("ppo_rollstream.py"),
    "overlap": Competitor("ppo_rollstream.py", ("--engine", "processes", "--workers", "1", "--overlap")),
    "native": Competitor("ppo_rollstream.py", ("--environments", "64", "--vectorization", "native")),
    "Stable-Baselines3": Competitor("ppo_sb3.py", package="stable_baselines3", share=0.5),
    "SBX": Competitor("ppo_sbx.py", package="sbx", share=0.5),
    "RLlib": Competitor("ppo_rllib.py", package="ray.rllib", share=0.2),
    "RLlib, 2 runners": Competitor("ppo_rllib.py", ("--workers", "2"), package="ray.rllib", share=0.2),
}
TARGETS = {
    ("sync", "Stable-Baselines3"): 6.0,
    ("sync", "SBX"): 3.5,
    ("sync", "RLlib"): 20.0,
    ("overlap", "Stable-Baselines3"): 9.0,
}
"""How many times as fast the first is to be as the second."""


def show(figures: Sequence[Figure]) -> None:
    rates = {figure.competitor: figure.steps_per_second for figure in figures}
    rows = [
        [f.competitor, f"{f.steps_per_second:,.0f}", f"{min(f.passes):,.0f} to {max(f.passes):,.0f}"]
        for f in figures
    ]
    print()
    support.print_table(["", "steps a second", "all passes"], rows)
    ratios = [
        [f"{ours} / {peer}", f"{rates[ours] / rates[peer]:.2f}", _verdict(ours, peer, rates)]
        for ours in ("sync", "overlap")
        for peer, competitor in COMPETITORS.items()
        if ours in rates and peer in rates and competitor.package is not None
    ]
    if ratios:
        print()
        support.print_table(["times as fast", "", "target"], ratios)


def _verdict(ours: str, peer: str, rates: dict[str, float]) -> str:
    target = TARGETS.get((ours, peer))
    if target is None:
        return "-"
    return f"{target:g} {'met' if rates[ours] / rates[peer] >= target else 'MISSED'}"


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--peer-python", metavar="PATH", help="the interpreter that has the peers")
    parser.add_argument(
        "--competitors", type=lambda text: text.split(";"), default=list(COMPETITORS), help="separated by ;"
    )
    parser.add_argument("--passes", type=int, default=PASSES, help="how often everybody has a turn")
    parser.add_argument("--batches", type=int, default=BATCHES, help="of 2048 steps; peers train fewer")
    parser.add_argument("--minibatch", type=int, default=64)
    options = parser.parse_args()
    chosen = {name: COMPETITORS[name] for name in options.competitors}
    competitors = rivals.present(chosen, options.peer_python)
    rates: dict[str, list[float]] = {name: [] for name in competitors}
    for turn in range(options.passes):
        for name, competitor in competitors.items():
            print(f"pass {turn + 1}: {name} ...", flush=True)
            batches = max(1, round(options.batches * competitor.share))
            told = ["--batches", str(batches), "--minibatch", str(options.minibatch)]
            rates[name].append(competitor.steps_per_second(options.peer_python, told))
    figures = [Figure(name, statistics.median(row), tuple(row)) for name, row in rates.items()]
    show(figures)
    support.write_json(options.json, "ppo_cartpole", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
