"""Lines of code of distributed execution, counted as Table 1 of the RLlib Flow paper counts them.

The paper (arXiv:2011.12719, section 6.1) counts "all lines of code directly related to distributed execution,
including comments and instrumentation code, but not including utility functions shared across all
algorithms", in two ways; so do we:

- minimal: the algorithm's plan alone, here the function `plan` of its file;
- conservative (`+shared`): also the operators, and what they call on workers, that "are arguably specific to
  the algorithm". Here that is all the plan uses, except what every algorithm counted here uses, and functions
  of its file that give workers more to do. Operators are whole classes, with what they save for checkpoints.

One more column has everything the plan uses, also what all algorithms share: operators, the worker's methods
that they call, sending weights. Empty lines never count. Comments and docstrings count as in the paper; the
figures in parentheses are without them. What Ape-X has beyond the paper's is mostly in what operators save,
and in telling what was lost with a shard and how often things were learned from. Settings, losses and
optimizers do not count, as in the paper; nor do flows and engines, which are its iterator library and Ray.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import support

from rollstream.replay.service import ReplayShard
from rollstream.rl import (
    adapting_operators,
    episode_statistics,
    operators,
    replay_operators,
    reporting,
    training_step,
)
from rollstream.rl.learner_actor import LearnerActor, RemoteLearner
from rollstream.rl.task_worker import TaskWorker
from rollstream.rl.worker import RolloutWorker
from rollstream.rl.worker_set import WorkerSet

PAPER = {
    "a3c": (87, 9, 52),
    "a2c": (154, 25, 50),
    "ppo": (386, 79, 225),
    "dqn": (239, 87, 139),
    "apex": (250, 126, 216),
    "impala": (694, 89, 362),
    "maml": (370, 136, 136),
}
"""Table 1: the original, RLlib Flow minimal, and conservative."""
REMOTE: dict[Any, tuple[Callable[..., Any], ...]] = {
    operators.ParallelRollouts: (RolloutWorker.sample,),
    operators.ComputeGradients: (RolloutWorker.compute_gradients,),
    operators.TrainOneStep: (WorkerSet.send_weights, RolloutWorker.set_weights),
    operators.ApplyGradients: (WorkerSet.send_weights, RolloutWorker.set_weights),
    operators.UpdateWeights: (WorkerSet.send_weights, RolloutWorker.set_weights),
    operators.ReceiveWeights: (LearnerActor, RemoteLearner, training_step.train_on),
    adapting_operators.InnerAdapt: (TaskWorker,),
    adapting_operators.next_tasks: (WorkerSet.send_weights,),
    replay_operators.ParallelReplay: (ReplayShard.sample, ReplayShard.insert, ReplayShard.update_priorities),
}
"""What operators call on workers, by name, so that it cannot be seen in their code."""

ON_ACTORS = {
    "a3c": ("worker", "worker_gradients"),
    "apex": ("worker", "make_worker", "set_epsilon", "add_estimates", "td_errors", "replay"),
}
"""Functions of an algorithm's own file that give actors more to do than to sample."""


@dataclass(frozen=True)
class Lines:
    """How long some code is."""

    written: int
    """With comments and docstrings."""
    code: int

    def __add__(self, other: Lines) -> Lines:
        return Lines(self.written + other.written, self.code + other.code)

    def __str__(self) -> str:
        return f"{self.written} ({self.code})"


def lines(thing: Any) -> Lines:
    """How long a function or class is."""
    source = textwrap.dedent(inspect.getsource(thing))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    docstrings = {line for node in ast.walk(ast.parse(source)) for line in _docstring(node)}
    return Lines(sum(1 for line in source.splitlines() if line.strip()), len(code - docstrings))


_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def _docstring(node: ast.AST) -> Iterator[int]:
    """The lines of a string that stands for itself: a docstring, or what is said of an attribute."""
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def used(thing: Any) -> set[Any]:
    """The operators that some code uses, and what those use on workers."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    found: set[Any] = set()
    for name in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
        for module in (operators, adapting_operators, replay_operators, reporting, episode_statistics):
            other = getattr(module, name, None)
            is_code = inspect.isfunction(other) or inspect.isclass(other)
            if is_code and other is not thing and other.__module__ == module.__name__:
                found |= {other, *REMOTE.get(other, ()), *used(other)}
    return found


def total(things: set[Any]) -> Lines:
    return sum((lines(thing) for thing in things), Lines(0, 0))


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--list", action="store_true", help="also show what was counted")
    options = parser.parse_args()
    modules = {name: importlib.import_module(f"rollstream.algos.{name}") for name in PAPER}
    plans = {name: module.plan for name, module in modules.items()}
    needs = {name: used(plan) for name, plan in plans.items()}
    for name, module in modules.items():
        needs[name] |= {getattr(module, own) for own in ON_ACTORS.get(name, ())}
    everybodys = set.intersection(*needs.values())
    results: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for name, plan in plans.items():
        minimal, everything = lines(plan), lines(plan) + total(needs[name])
        conservative = minimal + total(needs[name] - everybodys)
        original, paper_minimal, paper_conservative = PAPER[name]
        lower = minimal.written < paper_minimal and conservative.written < paper_conservative
        rows.append(
            [
                name,
                str(minimal),
                str(paper_minimal),
                str(conservative),
                str(paper_conservative),
                str(everything),
                str(original),
                "lower" if lower else "NOT LOWER",
            ]
        )
        counted = {"minimal": minimal, "conservative": conservative, "everything": everything}
        results.append({"algorithm": name} | {key: vars(value) for key, value in counted.items()})
    head = [
        "lines (without comments)",
        "plan",
        "paper",
        "+shared",
        "paper",
        "everything used",
        "paper, original",
        "ours",
    ]
    support.print_table(head, rows)
    if options.list:
        for title, things in {"used by all": everybodys, **{n: needs[n] - everybodys for n in needs}}.items():
            print(f"\n{title}: " + ", ".join(sorted(f"{t.__qualname__} {lines(t)}" for t in things)))
    support.write_json(options.json, "lines_of_code", results)


if __name__ == "__main__":
    main()
