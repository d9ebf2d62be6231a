r"""Returns of trainings against wall-clock time, drawn from their run folders.

The trainings of `docs/images/pong.svg`, on one H200 with 16 cores:

    rollstream train appo --env ALE/Pong-v5 --env-kwargs repeat_action_probability=0.0 --steps 2700000 \
        --workers 2 --engine threads --evaluate-every 2690000 --evaluate-episodes 30 --out runs/appo
    python bench/training_curves.py runs/appo --plot docs/images/pong.svg --title "Pong, one H200, 16 cores"
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

from rollstream.training.metrics import MetricsRow, read_metrics

COLORS = ("#3f6fb5", "#c2527f", "#667085", "#b5803f")
TIME, STEPS = "time/time_elapsed", "time/total_timesteps"
TRAINING, EVALUATION = "rollout/ep_rew_mean", "eval/mean_reward"


def points(rows: Sequence[MetricsRow], name: str) -> list[tuple[float, float]]:
    """Seconds and values of a metric, where it was reported."""
    pairs = [(float(row[TIME]), float(row[name])) for row in rows if name in row]
    return [(seconds, value) for seconds, value in pairs if not math.isnan(value)]


def draw(path: Path, title: str, folders: Sequence[Path]) -> None:
    """Lines for episodes of the training, and a diamond for each evaluation."""
    importlib.import_module("matplotlib").use("svg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.rcParams.update({"svg.hashsalt": "rollstream", "font.size": 11})
    canvas, axes = pyplot.subplots(figsize=(7.2, 4.0), layout="constrained")
    for folder, color in zip(folders, COLORS, strict=False):
        rows = read_metrics(folder)
        label = json.loads((folder / "config.json").read_text())["algorithm"].upper()
        training, evaluations = points(rows, TRAINING), points(rows, EVALUATION)
        axes.plot(*zip(*training, strict=True), color=color, label=f"{label}, episodes of the training")
        if evaluations:
            name = f"{label}, evaluation"
            axes.plot(*zip(*evaluations, strict=True), "D", color=color, label=name, clip_on=False)
        print(f"{folder}: {float(rows[-1][STEPS]):,.0f} steps in {float(rows[-1][TIME]):.0f} s")
    axes.set(title=title, xlabel="seconds of training", ylabel="mean return")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    canvas.savefig(path, metadata={"Date": None})
    print(f"drawn: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="of runs")
    parser.add_argument("--plot", type=Path, metavar="FILE", required=True, help="the SVG file")
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    draw(options.plot, options.title, options.folders)


if __name__ == "__main__":
    main()
