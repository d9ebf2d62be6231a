"""A first flow: four workers learn a line from noisy points by asynchronous gradient descent.

The plan has the shape of A3C: gradients are computed where the data is, gathered as they come and applied
in one place, and the new weights go back to the worker whose gradient it was. The workers are processes; give
another engine's name as an argument, `inline`, `threads` or `ray`, and the same plan runs there.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import rollstream as rs
from rollstream import flow
from rollstream.engine import ActorContext
from rollstream.flow import Context, Iter

TRUTH = (2.0, -1.0)
UPDATES = 4000
Point = tuple[float, float]
Weights = tuple[float, float]


class Worker:
    """Draws points near the line, and knows the weights it was last sent."""

    def __init__(self, *, context: ActorContext):
        self.random = random.Random(context.index)
        self.weights: Weights = (0.0, 0.0)
        self.version = 0

    def sample(self, context: Context) -> list[Point]:
        """A batch of points, with the version of the weights it was drawn under."""
        context.note(version=self.version, points=16)
        inputs = [self.random.uniform(-1, 1) for _ in range(16)]
        return [(x, TRUTH[0] * x + TRUTH[1] + self.random.gauss(0, 0.3)) for x in inputs]

    def set_weights(self, version: int, weights: Weights) -> None:
        """Install exactly this version."""
        self.version, self.weights = version, weights


class ComputeGradients:
    """Runs on the workers: the loss and its gradient under the worker's own weights."""

    def __call__(self, points: list[Point], context: Context) -> tuple[float, Weights]:
        slope, offset = context.instance.weights
        errors = [(slope * x + offset - y, x) for x, y in points]
        count = len(points)
        loss = sum(error * error for error, _ in errors) / count
        return loss, (sum(e * x for e, x in errors) / count, sum(e for e, _ in errors) / count)


class ApplyGradients:
    """Runs here: one step down, and the new weights to the worker the gradient came from."""

    def __init__(self, workers: list[rs.Actor[Worker]], rate: float = 0.003):
        self.workers = workers
        self.rate = rate
        self.weights: Weights = (0.0, 0.0)
        self.version = 0

    def __call__(self, item: tuple[float, Weights], context: Context) -> tuple[float, int, Weights]:
        loss, gradient = item
        staleness = self.version - int(context.provenance.least("version") or 0)
        self.version += 1
        self.weights = (
            self.weights[0] - self.rate * gradient[0],
            self.weights[1] - self.rate * gradient[1],
        )
        for worker in context.actors:  # of all the workers, those this item comes from
            worker.send("set_weights", self.version, self.weights, sticky=True)
        return loss, staleness, self.weights


def learn(workers: list[rs.Actor[Worker]]) -> Iter[list[tuple[float, int, Weights]]]:
    """The plan: A3C's, for a line."""
    gradients = flow.from_actors(workers, "sample").for_each(ComputeGradients()).gather_async(num_async=2)
    return gradients.for_each(ApplyGradients(workers)).batch(UPDATES // 40, name="report").take(40)


def main() -> None:
    """Show the plan, run it, and show what it did."""
    out = Path("runs/first_flow")
    out.mkdir(parents=True, exist_ok=True)
    name = sys.argv[1] if len(sys.argv) > 1 else "processes"
    with rs.engine(name) as engine:
        plan = learn(engine.spawn(Worker, count=4, name="worker", on_failure="restart"))
        graph = flow.graph(plan)
        print(f"The plan\n\n{graph}\n")
        (out / "graph.svg").write_text(graph.svg())

        losses: list[float] = []
        staleness: list[int] = []
        weights: Weights = (0.0, 0.0)
        for report in plan.trace(out / "trace.json"):
            losses.append(sum(loss for loss, _, _ in report) / len(report))
            staleness += [stale for _, stale, _ in report]
            weights = report[-1][2]
            show(losses, weights)
        print(f"\n\nWhere the time went\n\n{plan.statistics()}")
    print(f"\nLearned y = {weights[0]:.2f} x {weights[1]:+.2f}; the truth is y = {TRUTH[0]} x {TRUTH[1]:+}.")
    print(
        f"A gradient was {sum(staleness) / len(staleness):.1f} updates old on average, "
        f"{max(staleness)} at most."
    )
    print(f"Saved {out / 'graph.svg'}, and {out / 'trace.json'}, which opens in ui.perfetto.dev.")


def show(losses: list[float], weights: Weights) -> None:
    """One line that is rewritten: progress, the loss as a curve, the weights."""
    bars = "▁▂▃▄▅▆▇█"
    curve = "".join(bars[min(7, int(8 * loss / max(losses)))] for loss in losses)
    line = f"loss {losses[-1]:.3f} {curve:<40} y = {weights[0]:.2f} x {weights[1]:+.2f}"
    if sys.stdout.isatty():
        print(f"\r{line}", end="", flush=True)
    elif len(losses) % 10 == 0:
        print(line)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
    except rs.EngineError as error:
        sys.exit(str(error))
