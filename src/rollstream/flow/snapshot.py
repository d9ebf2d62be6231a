"""Snapshots: the state of every node, shard and actor of a flow, as plain data.

An actor with a large state may write it to a file itself, in the background, if it has the methods
`save_to(path)`, which starts writing and returns at once; `wait_saved()`, which waits until the file is
written and returns what went wrong, or `None`; and `load_from(path)`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from rollstream.engine import Actor, ActorDied, Engine, Future
from rollstream.engine.slot import ActorSlot
from rollstream.flow.errors import StateError
from rollstream.flow.node import Node
from rollstream.flow.references import is_lost, with_refs, without_refs
from rollstream.flow.shard import load_shard_state, shard_state

_FORMAT = 2
_FILE: Final = "$file"
"""Marks the state of an actor that is in a file."""
_TRIES = 3
"""How often an actor that dies is asked for its state."""


def save(engine: Engine | None, nodes: Sequence[Node], folder: Path | None) -> dict[str, Any]:
    """The state of a flow with nothing in flight, independent of the flow.

    Actors in local processes may write theirs to files in the folder.
    """
    actors = {} if engine is None else engine.actors
    destination = None
    if folder is not None and engine is not None and engine.local_processes:
        destination = folder.absolute()  # actors may have another working directory
    shards = {
        node.name: ask_all(engine, node.actors(), shard_state, node.shard_key)
        for node in nodes
        if node.shard_key and not node.stopped
    }
    states = ask_all(engine, actors.values(), _actor_state, destination)
    if engine is not None and engine.events:  # what dead actors held may be lost
        for node in nodes:
            node.forget(is_lost)
    state = {
        "format": _FORMAT,
        "operators": _operators(nodes),
        "nodes": {node.name: node.state_dict() for node in nodes},
        "shards": shards,
        "actors": {name: own for name, own in zip(actors, states, strict=True) if own is not None},
    }
    return copy.deepcopy(without_refs(state))


def load(
    engine: Engine | None,
    nodes: Sequence[Node],
    state: Mapping[str, Any],
    folder: Path | None,
    renewed: Iterable[Actor[Any]] = (),
) -> None:
    """Restore a saved state in a flow that has not begun; sources on `renewed` actors begin anew."""
    state, new = copy.deepcopy(state), {actor.name for actor in renewed}
    if state["format"] != _FORMAT:
        raise StateError(f"this state has format {state['format']!r}, not {_FORMAT}")
    actors = {} if engine is None else engine.actors
    if engine is not None:
        restored = {part: with_refs(engine, state[part]) for part in ("nodes", "shards", "actors")}
        state = {**state, **restored}
    _require_same("operators", state["operators"], _operators(nodes))
    _require_same("actors", state["actors"], [name for name in state["actors"] if name in actors])
    read_here = engine is None or not engine.local_processes
    futures = [
        actors[name].ask(_load_actor_state, _located(own, folder, read_here))
        for name, own in state["actors"].items()
    ]
    for node in nodes:
        own = state["nodes"][node.name]
        if own["stopped"]:
            node.stop()
        if node.shard_key and new.issuperset(actor.name for actor in node.actors()):
            continue
        node.load_state_dict(own)
        if node.shard_key and not node.stopped:
            futures += _load_shards(node, state["shards"][node.name])
    if engine is not None:
        engine.results(futures)


def wait_saved(engine: Engine | None) -> list[str]:
    """Wait until actors have written their files; what went wrong."""
    actors = [] if engine is None else engine.actors.values()
    return [reason for reason in ask_all(engine, actors, _wait_saved) if reason]


def actor_files(state: Mapping[str, Any]) -> list[str]:
    """The names of the files that belong to a flow's state."""
    return [own[_FILE] for own in state["actors"].values() if isinstance(own, Mapping) and _FILE in own]


def _operators(nodes: Sequence[Node]) -> list[str]:
    return [operator.name for node in nodes for operator in node.operators()]


def _load_shards(node: Node, states: Sequence[Any]) -> list[Future[Any]]:
    actors = node.actors()
    if len(states) != len(actors):
        raise StateError(f"{node.name} was saved with {len(states)} shards and has {len(actors)} now")
    pairs = zip(actors, states, strict=True)
    return [actor.ask(load_shard_state, node.shard_key, own) for actor, own in pairs if own is not None]


def _require_same(what: str, saved: Sequence[str] | Mapping[str, Any], here: list[str]) -> None:
    if list(saved) != here:
        missing, extra = [n for n in saved if n not in here], [n for n in here if n not in saved]
        parts = [f"saved but not here: {', '.join(missing)}"] if missing else []
        parts += [f"here but not saved: {', '.join(extra)}"] if extra else []
        reason = "; ".join(parts) or f"saved as {', '.join(saved)}; here {', '.join(here)}"
        raise StateError(f"the state belongs to another plan; {what} {reason}")


# Asking actors -----------------------------------------------------------------------------------


def ask_all(engine: Engine | None, actors: Iterable[Actor[Any]], operation: Any, *args: Any) -> list[Any]:
    """One answer per actor; `None` for one that was dropped."""
    asked = [(actor, None if actor.gone else actor.ask(operation, *args)) for actor in actors]
    waited = [future for _, future in asked if future is not None]
    if engine is not None:  # for all of them, so that further errors are noted on the first one
        engine.wait(waited, count=len(waited))
    return [_answer(actor, future, operation, args) for actor, future in asked]


def _answer(actor: Actor[Any], future: Future[Any] | None, operation: Any, args: tuple[Any, ...]) -> Any:
    """An actor's answer; one that died and was restarted is asked again, a few times."""
    for left in reversed(range(_TRIES)):
        if future is None:
            break
        try:
            return actor.engine.results([future])[0]
        except ActorDied as died:
            if died.outcome == "raised" or not left:
                raise
            future = None if actor.gone else actor.ask(operation, *args)
    return None


def _actor_state(slot: ActorSlot, folder: Path | None) -> Any:
    """The state of an actor that has one, or the name of the file it will be in."""
    if folder is not None and hasattr(slot.instance, "save_to"):
        name = f"actor-{quote(slot.context.name, safe='[]')}.safetensors"
        slot.instance.save_to(folder / name)
        return {_FILE: name}
    return slot.instance.state_dict() if hasattr(slot.instance, "state_dict") else None


def _wait_saved(slot: ActorSlot) -> str | None:
    return slot.instance.wait_saved() if hasattr(slot.instance, "wait_saved") else None


def _located(state: Any, folder: Path | None, read_here: bool) -> Any:
    """An actor's state; if that is in a file, the file's path, or its content if it is read here."""
    if not isinstance(state, Mapping) or _FILE not in state:
        return state
    if folder is None:
        raise StateError(f"this state belongs with the file {state[_FILE]}: say in which folder that is")
    path = folder / state[_FILE]
    if path.parent != folder:
        raise StateError(f"this state names {state[_FILE]}, which is not a file of its folder")
    if not read_here:
        return {_FILE: str(path.absolute())}
    from rollstream.background_save import read_state  # flows alone do without safetensors

    return read_state(path)


def _load_actor_state(slot: ActorSlot, state: Any) -> None:
    if isinstance(state, Mapping) and _FILE in state:
        slot.instance.load_from(Path(state[_FILE]))
    elif hasattr(slot.instance, "load_state_dict"):
        slot.instance.load_state_dict(state)
    else:
        raise StateError(
            f"{slot.context.name} has a saved state, but no method load_state_dict to restore it"
        )
