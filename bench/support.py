"""What the benchmarks share: which engines there are, a Ray cluster to compare with, tables and JSON."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rollstream as rs

ENGINES = ("inline", "threads", "processes", "ray")


def arguments(description: str | None, engines: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A command line with what every benchmark takes; `engines` is its default choice, if it has one."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    if engines:
        parser.add_argument(
            "--engines", type=names, default=list(engines), help="comma separated (default: all available)"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")
    return parser


def names(text: str) -> list[str]:
    """The parts of a comma separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str) -> list[int]:
    """The whole numbers of a comma separated list."""
    return [int(part) for part in names(text)]


def available(engines: Sequence[str]) -> list[str]:
    """Those of the engines that can be opened here; for each other one a line says why not."""
    return [name for name in engines if _can_open(name)]


def _can_open(name: str) -> bool:
    try:
        if name == "ray" and not has_ray():
            raise ImportError("Ray is not installed")
        if name != "ray":  # opening it would start a cluster; its extra is all it may lack
            rs.engine(name).close()
        elif name not in _known_engines():
            raise rs.EngineError("there is no engine 'ray' yet")
    except (rs.EngineError, ImportError) as problem:
        print(f"skipped engine {name!r}: {problem}")
        return False
    return True


def _known_engines() -> str:
    """What the refusal of a name that no engine has says about those there are."""
    try:
        rs.engine("no such engine").close()
    except rs.EngineError as refusal:
        return str(refusal).partition("choose one of")[2]
    return ""


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Ray on two cores of this machine, the same for Ray itself and for the engine on top of it."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a change to come
    ray = importlib.import_module("ray")
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def opened(name: str) -> Iterator[rs.Engine]:
    """An engine; the one on Ray joins a cluster with the settings of `ray_cluster`."""
    if name != "ray":
        with rs.engine(name) as engine:
            yield engine
        return
    with ray_cluster(), rs.engine(name) as engine:
        yield engine


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())


def write_json(path: Path | None, benchmark: str, results: Any) -> None:
    """Write the results beside what is needed to read them again: versions and number of cores."""
    if path is None:
        return
    document = {
        "benchmark": benchmark,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "results": results,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"written to {path}")
