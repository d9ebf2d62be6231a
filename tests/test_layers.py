"""Imports go down only, between packages and between the modules of each. As a script, it prints them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "rollstream"
LAYERS = (
    {"cli", "arguments", "error_messages", "run_commands", "exit_signals", "__main__"},
    {"training"},
    {"algos"},
    {"rl"},
    {"replay"},
    {"testing"},
    {"background_save", "state_codec", "atomic_files", "user_code"},
    {"flow"},
    {"drawing"},
    {"rate_limiter"},
    {"engine"},
    {"limits", "envs"},
)
"""Packages and modules of the root, from the top down. A layer imports from those below it."""
KNOWN = {
    ("engine.transport", "engine.engine"),
    ("engine.dispatcher", "engine.engine"),
    ("engine.supervision", "engine.engine"),
    ("engine.supervision", "engine.transport"),
}
"""Imports for annotations only, where two classes are halves of one thing."""


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        found[name.removesuffix(".__init__") or "__init__"] = path
    return found


def imports(path: Path, known: dict[str, Path], *, inside: bool = True) -> Iterator[str]:
    """The modules of the package that one imports: at its top, and with `inside` in functions as well."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside else _top(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] != "rollstream":
                continue
            candidates = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
            yield next((candidate for candidate in candidates if candidate in known), "__init__")


def _top(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs, or is checked for types, when a module is imported."""
    for node in tree.body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from node.body


def package_of(module: str) -> str:
    """The package or root module that a module belongs to."""
    return module.split(".")[0]


def import_graph(*, inside: bool) -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = modules()
    return {name: set(imports(path, known, inside=inside)) - {name} for name, path in known.items()}


def test_packages_import_downwards() -> None:
    height = {name: -index for index, layer in enumerate(LAYERS) for name in layer}
    upwards = []
    for module, imported in import_graph(inside=False).items():
        own = package_of(module)
        for other in sorted(imported):
            if own in ("__init__",) or package_of(other) in (own, "__init__"):
                continue
            if height[package_of(other)] > height[own]:
                upwards.append(f"{module} imports {other}")
    assert not upwards


@pytest.mark.parametrize("package", sorted({package_of(name) for name in modules() if "." in name}))
def test_modules_of_a_package_have_no_cycles(package: str) -> None:
    graph = {
        module: {
            other
            for other in imported
            if package_of(other) == package and other != package and (module, other) not in KNOWN
        }
        for module, imported in import_graph(inside=False).items()
        if package_of(module) == package and module != package
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


def test_no_module_is_long() -> None:
    long = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}


def test_ray_is_used_through_its_public_api() -> None:
    """But for the switch without which a local Ray listens on all interfaces: tests/test_listening.py."""
    private = re.compile(r"ray\._private[\w.]*|from ray\._|\._on_completed|global_worker")
    used = {name: private.findall(path.read_text()) for name, path in modules().items()}
    assert {name: found for name, found in used.items() if found} == {
        "engine.ray_cluster": ["ray._private.ray_constants.ENABLE_RAY_CLUSTER"]
    }


def main() -> None:
    """Print every module with its length and what it imports."""
    known = modules()
    for module, imported in import_graph(inside=True).items():
        others = ", ".join(sorted(imported - {"__init__"}))
        print(f"{module:32} {len(known[module].read_text().splitlines()):4}  {others}")


if __name__ == "__main__":
    main()
