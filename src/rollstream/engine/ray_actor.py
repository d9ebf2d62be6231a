"""The class that Ray runs for every actor.

This module imports nothing that could import a numeric library, since the number of their threads is fixed
when they are imported: the rest comes once the environment is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ray

SIDE = "side"
"""The concurrency group of methods that run beside the instance, in threads of their own."""


class RayActor:
    """A Ray actor in which an instance lives; `RayHost` does the work.

    Messages are handled one by one, in the order sent. Their record, which is small, and their value, which
    may not be, are two objects, so that the driver can wait for the one and leave the other where it is.
    """

    def __init__(self, name: str, variables: Mapping[str, str], path: Sequence[str]):
        self._name = name
        os.environ.update(variables)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        from rollstream.engine.launch import continue_when_orphaned
        from rollstream.engine.ray_host import RayHost

        continue_when_orphaned()
        self._host = RayHost(name)

    def __repr__(self) -> str:
        return self._name  # Ray shows it beside what the actor prints

    def build(self, context: tuple[str, int, int, int], body: Any, *items: Any) -> Any:
        """Build the instance."""
        return self._host.build_instance(context, body, items)

    @ray.method(num_returns=2)
    def handle(self, body: Any, *items: Any) -> tuple[Any, Any]:
        """Handle a message: its record and its value."""
        return self._host.handle_message(body, items)

    def end(self) -> list[Any]:
        """End the instance; returns its errors."""
        return self._host.end_instance()

    @ray.method(concurrency_group=SIDE)
    def take(self) -> list[Any]:
        """Wait for what the actor says besides its replies."""
        return self._host.take()

    @ray.method(concurrency_group=SIDE)
    def stop(self) -> None:
        """Handle no more messages."""
        self._host.closed = True
