"""What an engine opens to others: on one machine nothing, and a Ray of its own to this machine alone."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import scripts

SCRIPT = """
import os, sys, tempfile
from pathlib import Path
import rollstream as rs

class Worker:
    def pid(self):
        return os.getpid()

with rs.engine(sys.argv[1]) as engine:
    [worker] = engine.spawn(Worker)
    worker.call("pid").result()
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    folders = [path for path in Path(tempfile.gettempdir()).glob("ray*") if path.stat().st_mode & 0o77]
    print(folders)
print(list(Path(tempfile.gettempdir()).glob("ray*")))
"""
LOOPBACK = ("0100007F", "00000000000000000000000001000000")
"""How Linux writes 127.0.0.1, also as part of an IPv6 address, and ::1."""


def descendants(pid: int) -> set[int]:
    found = {pid}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found |= descendants(int(child))
    return found


def listening(pids: set[int]) -> list[str]:
    """The addresses, in hexadecimal, on which these processes listen."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").glob("*")]
    sockets = {target[8:-1] for link in links if (target := str(link.readlink())).startswith("socket:[")}
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]


@pytest.mark.parametrize("name", ["threads", "processes", "ray"])
def test_nobody_else_reaches_an_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory() as folder, monkeypatch.context() as context:
        context.setenv("TMPDIR", folder)
        check(name)


def check(name: str) -> None:
    with scripts.started("-c", SCRIPT, name, stdin=-1) as driver:
        assert driver.stdout is not None
        addresses = listening(descendants(int(driver.stdout.readline())))
        output, errors = driver.communicate("continue\n")
    assert all(address.endswith(LOOPBACK) for address in addresses), addresses
    assert bool(addresses) == (name == "ray")
    if name == "ray":
        assert (output, errors) == ("[]\n[]\n", "")
