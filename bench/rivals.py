"""Competitors: scripts that run in processes, and maybe interpreters, of their own and answer in JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
TIMEOUT = 900.0
"""Seconds after which a competitor has failed."""


@dataclass(frozen=True)
class Competitor:
    """A script, what it is told, and which package it needs; none for our own."""

    script: str
    arguments: tuple[str, ...] = ()
    package: str | None = None
    share: float = 1.0
    """Of the work, for those that would take too long."""

    def steps_per_second(self, peer_python: str | None, more: Sequence[str] = ()) -> float:
        """Run it once."""
        python = sys.executable if self.package is None else str(peer_python)
        command = [python, str(PEERS / self.script), *self.arguments, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        answer = json.loads(done.stdout.splitlines()[-1])
        return answer["steps"] / answer["seconds"]


def present(competitors: dict[str, Competitor], peer_python: str | None) -> dict[str, Competitor]:
    """Those that can run here; for each other one a line says why not."""
    able: dict[str, Competitor] = {}
    for name, competitor in competitors.items():
        package = competitor.package
        if package is None or (peer_python is not None and _is_importable(peer_python, package)):
            able[name] = competitor
        else:
            reason = f"{peer_python} has no {package}" if peer_python else "give --peer-python"
            print(f"skipped {name}: {reason}")
    return able


def _is_importable(python: str, package: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", code, package], capture_output=True, check=False).returncode == 0
