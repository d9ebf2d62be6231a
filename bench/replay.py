"""Replay: inserts, samples and memory of Rollstream's table beside cpprb and TorchRL.

Each library fills a buffer with the same steps, in its own process and interpreter (`peers/replay_*.py`).
Then all of them insert, sample, and sample and update priorities in turn, briefly and over several passes.
Figures are medians of CPU time, so other load on the machine affects all alike. Each library has one thread.
Samples are copies: NumPy arrays or tensors. Ours of frames are two overlapping views of one copy, 5 frames
per item; cpprb and TorchRL write two arrays, 8 frames per item, and cpprb into the same arrays each time.

- `cartpole`: observations of 4 floats, 8 environments; `cheetah`: 17 floats and 6 for actions; 1M items.
- `frames`: 84 x 84 bytes, stacks of 4, 50,000 items. cpprb also stores each frame once; TorchRL does not.

Inserts are of 1, 8 and 64 steps per environment. cpprb and TorchRL need next observations, and stacked
frames; both are prepared before the clock starts.

    python3 -m venv ~/.cache/peers
    ~/.cache/peers/bin/pip install cpprb torchrl
    python bench/replay.py --peer-python ~/.cache/peers/bin/python
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import support

PEERS = Path(__file__).parent / "peers"
WORKLOADS = {"cartpole": 8, "cheetah": 8, "frames": 1}
"""Number of environments per workload."""
SCRIPTS = {"rollstream": "replay_rollstream.py", "cpprb": "replay_cpprb.py", "torchrl": "replay_torchrl.py"}
QUICK_ITEMS = {"cartpole": 100_000, "cheetah": 100_000, "frames": 5_000}
BATCHES = (32, 256, 1024)
INSERTS = (1, 8, 64)
"""Steps per environment."""
TARGET = 1.0
"""Speed relative to the fastest peer, in every case."""


class Running:
    """A running competitor."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def read(self) -> dict[str, float]:
        """The next answer; skips what libraries print themselves."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError((self._process.stderr.read() if self._process.stderr else "")[-2000:])

    def measure(self, kind: str, count: int, seconds: float) -> float:
        """Microseconds per call."""
        assert self._process.stdin is not None
        print(
            json.dumps({"kind": kind, "count": count, "seconds": seconds}),
            file=self._process.stdin,
            flush=True,
        )
        return self.read()["microseconds"]


@contextmanager
def started(python: str, script: str, arguments: Sequence[str]) -> Iterator[Running]:
    process = subprocess.Popen(
        [python, "-W", "ignore", str(PEERS / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.communicate()


def pythons(peer_python: str | None) -> dict[str, str]:
    """The interpreter of each library that is installed."""
    found = {"rollstream": sys.executable}
    for name, package in (("cpprb", "cpprb"), ("torchrl", "torchrl")):
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
        if peer_python and not subprocess.run([peer_python, "-c", code, package], check=False).returncode:
            found[name] = peer_python
        else:
            reason = f"not installed in {peer_python}" if peer_python else "needs --peer-python"
            print(f"skipped {name}: {reason}")
    return found


def compare(workload: str, prioritized: bool, found: dict[str, str], options: Any) -> list[dict[str, Any]]:
    """All figures of one workload."""
    arguments = [workload, *(["--prioritized"] if prioritized else [])]
    if options.quick:
        arguments += ["--items", str(QUICK_ITEMS[workload])]
    kinds = [("insert", steps) for steps in INSERTS]
    kinds += [("update" if prioritized else "sample", count) for count in options.batches]
    with ExitStack() as stack:
        running: dict[str, Running] = {}
        filled: dict[str, dict[str, float]] = {}
        for name, python in found.items():  # sequentially: filling is not measured
            one = stack.enter_context(started(python, SCRIPTS[name], arguments))
            try:
                filled[name] = one.read()
                running[name] = one
            except RuntimeError as problem:
                print(f"skipped {name}: {str(problem).strip().splitlines()[-1]}")
        taken: dict[Any, dict[str, list[float]]] = {kind: {name: [] for name in running} for kind in kinds}
        for _ in range(options.passes):
            for kind, count in kinds:
                for name, one in running.items():
                    taken[kind, count][name].append(one.measure(kind, count, options.seconds))
    title = f"{workload}, {'prioritized' if prioritized else 'uniform'}"
    environments = WORKLOADS[workload]
    figures = [
        {
            "case": title,
            "kind": kind,
            "count": count,
            "items": count * (environments if kind == "insert" else 1),
            **{name: statistics.median(times) for name, times in rows.items()},
        }
        for (kind, count), rows in taken.items()
    ]
    show(title, figures, list(running), filled)
    return [*figures, {"case": title, "kind": "memory", **filled}]


def show(title: str, figures: Sequence[dict[str, Any]], names: Sequence[str], filled: dict[str, Any]) -> None:
    words = {"insert": "insert {} per environment", "sample": "sample {}", "update": "sample and update {}"}
    rows = []
    for figure in figures:
        peers = [figure[name] for name in names if name != "rollstream"]
        ratio = min(peers) / figure["rollstream"] if peers else None
        row = [words[figure["kind"]].format(figure["count"])]
        row += [f"{figure[name]:,.1f}" for name in names]
        row += [f"{figure['items'] / figure['rollstream'] * 1e6:,.0f}", f"{ratio:.2f}" if ratio else "-"]
        row.append("-" if ratio is None else "met" if ratio >= TARGET else f"MISSED {TARGET:g}")
        rows.append(row)
    print(f"\n{title}: microseconds per call")
    head = ["", *names, "ours, items/s", "speed relative to the fastest peer", "target"]
    support.print_table(head, rows)
    own = filled["rollstream"]
    grown = [f"{name} {filled[name]['resident_bytes'] / 2**20:,.0f} MiB" for name in names]
    print(
        f"memory per byte of distinct data: {own['row_bytes']:.3f} for steps, {own['index_bytes']:.3f} for "
        f"the index; resident memory grew by {', '.join(grown)}"
    )


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter with cpprb and torchrl")
    parser.add_argument("--workloads", type=support.names, default=list(WORKLOADS), help="comma separated")
    parser.add_argument("--batches", type=support.numbers, default=list(BATCHES), help="comma separated")
    parser.add_argument("--passes", type=int, default=9, help="number of passes")
    parser.add_argument("--seconds", type=float, default=0.1, help="duration of each measurement")
    parser.add_argument("--quick", action="store_true", help="a tenth of the items, two passes")
    options = parser.parse_args()
    if options.quick:
        options.passes, options.seconds = 2, 0.05
    found = pythons(options.peer_python)
    results: list[dict[str, Any]] = []
    for workload in options.workloads:
        for prioritized in (False, True):
            results += compare(workload, prioritized, found, options)
    support.write_json(options.json, "replay", results)


if __name__ == "__main__":
    main()
