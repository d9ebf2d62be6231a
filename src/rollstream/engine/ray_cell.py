"""What Ray runs: a class for actors and a function for tasks.

This module imports nothing that could import a numeric library, since the number of their threads is fixed
when they are imported: the rest comes once the environment is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ray

SLOTS = 16
"""How many messages a cell knows by number."""
POST = "post"
"""The group of methods that run beside the instance, in threads of their own."""


class RayCell:
    """A Ray actor in which an instance lives. Everything of substance is in its `RayOutpost`.

    Messages are handled one by one, in the order sent. Their record, which is small, and their value, which
    may not be, are two objects, so that the driver can wait for the one and leave the other where it is.
    """

    def __init__(self, name: str, variables: Mapping[str, str], path: Sequence[str]):
        self._name = name
        _prepare(variables, path)
        from rollstream.engine.ray_outpost import RayOutpost

        self._outpost = RayOutpost(name)
        self._slots: list[bytes] = [b""] * SLOTS

    def __repr__(self) -> str:
        return self._name  # Ray shows it beside what the actor prints

    def build(self, about: tuple[str, int, int, int], body: Any, *items: Any) -> Any:
        """Make the instance."""
        return self._outpost.build(about, body, items)

    @ray.method(num_returns=2)
    def handle(self, body: Any, *items: Any) -> tuple[Any, Any]:
        """Handle a message."""
        return self._outpost.handle_message(body, items)

    @ray.method(num_returns=2)
    def learn(self, slot: int, body: bytes) -> tuple[Any, Any]:
        """Handle a message, and know it by number from now on."""
        self._slots[slot] = body
        return self._outpost.handle_message(body, ())

    def repeat(self, slot: int) -> tuple[Any, Any]:
        """Handle a message known by number. Ray calls it without an argument, by one of the names below."""
        return self._outpost.handle_message(self._slots[slot], ())

    def end(self) -> list[Any]:
        """Let the instance go; what went wrong is returned."""
        return self._outpost.end()

    # Beside the instance -----------------------------------------------------------------------

    @ray.method(concurrency_group=POST)
    def take(self) -> list[Any]:
        """What the actor has to say besides its replies; waits until there is something."""
        return self._outpost.take()

    @ray.method(concurrency_group=POST)
    def reply(self, number: int, failed: bool, body: Any, *items: Any) -> None:
        """The reply to something the actor asked of another."""
        self._outpost.take_reply(number, failed, body, items)

    @ray.method(concurrency_group=POST)
    def stop(self) -> None:
        """Handle no more messages, and wait for nothing."""
        self._outpost.stop()


def _repeating(slot: int) -> Any:
    def repeat(self: RayCell) -> tuple[Any, Any]:
        return self.repeat(slot)

    return ray.method(num_returns=2)(repeat)


for _slot in range(SLOTS):  # an argument costs Ray a tenth of an empty call: bench/call_latency.py
    setattr(RayCell, f"repeat_{_slot}", _repeating(_slot))


def run_task(variables: Mapping[str, str], path: Sequence[str], body: Any, *items: Any) -> tuple[Any, Any]:
    """Run a stateless function: its record and its value, as those of a message."""
    _prepare(variables, path)
    from rollstream.engine.ray_outpost import RayOutpost

    return RayOutpost("task", sends=False).run_task(body, items)


def _prepare(variables: Mapping[str, str], path: Sequence[str]) -> None:
    os.environ.update(variables)
    sys.path.extend(entry for entry in path if entry not in sys.path)
