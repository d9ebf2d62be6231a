"""Deaths of actors, for tests."""

from __future__ import annotations

from typing import Any

from rollstream.engine import Actor, EngineError
from rollstream.engine.transport import RemoteTransport


def kill(actor: Actor[Any]) -> None:
    """Kill an actor's process, as a crash would; its engine notices by itself.

    On the `inline` and `threads` engines actors have no process: use `chaos_engine` for deaths on one thread.
    """
    transport = actor.engine.transport
    if not isinstance(transport, RemoteTransport):
        raise EngineError(f"actors of the {actor.engine.name} engine have no process to kill")
    transport.kill(actor)
