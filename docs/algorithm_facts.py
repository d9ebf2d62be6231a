"""What the pages of algorithms are generated from: algorithms' files, short runs, and docs/results.md."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from gymnasium import spaces

import rollstream as rs
from rollstream import flow
from rollstream.algos import ALGORITHMS
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.spaces import SpaceError

DOCS = Path(__file__).parent
WORKERS = 2
"""Number of workers in pictures and examples."""
MORE_REPORTS = 3
"""Number of reports, after the first with losses and returns, in which further metrics may appear."""
ACTION_SPACES: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(2),
    "MultiDiscrete": spaces.MultiDiscrete([2, 2]),
    "MultiBinary": spaces.MultiBinary(2),
    "Box": spaces.Box(-1, 1, (1,)),
}
STEPS = 5_000_000
"""Steps of the example of an algorithm that names an environment for it."""
EXAMPLES = {"Discrete": ("CartPole-v1", 100_000), "Box": ("Pendulum-v1", 20_000)}
"""Environment and steps of the example, by action space; for algorithms without results."""


@dataclass(frozen=True)
class Results:
    """What docs/results.md has of an algorithm."""

    rows: list[list[str]]
    """Cells of the table, without the first."""
    commands: list[str]

    @property
    def example(self) -> tuple[str, int] | None:
        """Environment and steps of the first result on a registered environment."""
        registered = (row for row in self.rows if re.search(r"-v\d+$", row[0]))
        return next(((row[0], int(row[2].replace(",", ""))) for row in registered), None)


def read_results(name: str) -> tuple[list[str], Results]:
    """The heading of the results' table, and the results of an algorithm."""
    text = (DOCS / "results.md").read_text("utf-8")
    table = [cells(line) for line in text.splitlines() if line.startswith("|")]
    rows = [row[1:] for row in table[2:] if row[0] == name]
    of_name = re.compile(rf"rollstream (train {name} |evaluate runs/{name}-)")
    return table[0][1:], Results(rows, [line for line in text.splitlines() if of_name.match(line)])


def cells(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


# Algorithms --------------------------------------------------------------------------------------


def example(name: str) -> tuple[str, int]:
    """Environment and steps to show an algorithm with."""
    if (environment := ALGORITHMS[name].environment) is not None:
        return environment, STEPS
    supported = supported_actions(ALGORITHMS[name])
    return read_results(name)[1].example or next(EXAMPLES[space] for space in EXAMPLES if space in supported)


def supported_actions(algorithm: Algorithm[Any]) -> list[str]:
    """Names of the action spaces that an algorithm supports."""
    make_policy = algorithm.worker(small_config(algorithm), Task(EnvSpec("CartPole-v1"), steps=1)).policy
    supported: list[str] = []
    for name, space in ACTION_SPACES.items():
        with suppress(SpaceError):
            make_policy(spaces.Box(-1, 1, (1,)), space)
            supported.append(name)
    return supported


def small_config(algorithm: Algorithm[Any], **settings: Any) -> Any:
    """The default Config with these settings, where it has them, and a network that is fast to create."""
    known = {field.name for field in fields(algorithm.config)}
    settings = {"hidden": (8,)} | settings
    return algorithm.config(**{name: value for name, value in settings.items() if name in known})


@contextmanager
def plan_of(name: str, workers: int, **settings: Any) -> Iterator[flow.Iter[Any]]:
    """The plan of an algorithm, in this process."""
    algorithm, (env, steps) = ALGORITHMS[name], example(name)
    config = small_config(algorithm, **settings)
    config = replace(config, num_envs=max(config.num_envs, workers))
    with rs.engine("inline") as engine:
        worker_set = algorithm.workers(engine, config, Task(EnvSpec(env), steps, workers=workers))
        yield algorithm.plan(worker_set, config)


def picture(name: str) -> str:
    """The plan as SVG, without line numbers."""
    with plan_of(name, WORKERS) as plan:
        graph = flow.graph(plan)
        return flow.Graph(tuple(replace(node, location="") for node in graph.nodes), graph.edges).svg()


def reported_metrics(name: str) -> set[str]:
    """Names of the metrics that an algorithm reports, found by training for a short time."""
    found: set[str] = set()
    with plan_of(name, 0, report_every=1) as plan:
        for report in plan:
            found |= set(report)
            if {"rollout/ep_rew_mean", "train/n_updates"} <= found:
                break
        return found.union(*islice(plan, MORE_REPORTS))


def config_classes(config: type) -> list[type]:
    """The Config of an algorithm, then those it derives from."""
    return [kind for kind in config.__mro__ if kind.__module__.startswith("rollstream.algos.")]


def losses(algorithm: Algorithm[Any]) -> tuple[str, list[str]]:
    """The docstrings of losses, with equations, and the module they are in: the first that has any."""
    for kind in config_classes(algorithm.config):
        module = sys.modules[kind.__module__]
        functions = [own for own in vars(module).values() if inspect.isfunction(own)]
        texts = [inspect.getdoc(own) or "" for own in functions if own.__module__ == module.__name__]
        if found := [text for text in texts if "$$" in text]:
            return module.__name__, found
    raise ValueError(f"no function of {algorithm.name} has an equation in its docstring; add one to the loss")


def field_help(config: type) -> dict[str, str]:
    """The docstrings of a Config's fields."""
    found: dict[str, str] = {}
    for kind in reversed(config_classes(config)):
        body: Any = ast.parse(inspect.getsource(kind)).body[0]
        for field, text in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found
