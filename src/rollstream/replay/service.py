"""Replay as a service: buffers on actors of any engine, for flows and for clients outside of one."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rollstream.background_save import BackgroundSave, read_state
from rollstream.engine import Actor, ActorContext, Deadlock, Deferred, Engine
from rollstream.replay.buffer import Buffer, Chunk, Samples
from rollstream.replay.errors import InsertRefused, ReplayError
from rollstream.replay.table import TableInfo


class Noting(Protocol):
    """What a flow hands to a source."""

    def note(self, **numbers: float) -> None:
        """Add numbers to the provenance of an item."""
        ...


class ReplayShard:
    """A buffer on an actor. Who asks for a sample too early is answered when there is one.

    Args:
        make: makes the buffer, given the number of the shard.
    """

    def __init__(self, make: Callable[[int], Buffer], *, context: ActorContext):
        self.buffer = make(context.index)
        self._again = context.restarts > 0
        self._life = secrets.randbits(48)
        """Tells what was sampled here from what was before a restart; saved with what is remembered."""
        self._writing: BackgroundSave | None = None
        self._waiting: deque[tuple[str, Deferred[Samples]]] = deque()
        self._blocked: deque[tuple[str, Deferred[int] | None, Chunk]] = deque()
        """What waits to be stored, in order; nobody waits for one that was given up."""

    def store(self, chunk: Chunk, ticket: str = "") -> int | Deferred[int]:
        """Remember it; how many items came of it. The reply waits while the limiter allows no insert."""
        stored = None if self._blocked else self._stored(chunk)
        if stored is None:
            late: Deferred[int] = Deferred()
            self._blocked.append((ticket, late, chunk))
            return late
        self._answer()
        return stored

    def _stored(self, chunk: Chunk) -> int | None:
        """How many items came of it; `None` if the limiter does not allow so many."""
        try:
            return self.buffer.store(chunk)
        except InsertRefused:
            return None

    def sample(self, context: Noting | None = None, ticket: str = "") -> Samples | Deferred[Samples] | None:
        """Items drawn at random, or a promise of them.

        A flow is given `None` by a shard that came back empty: it may have to go on before there is more.
        """
        if context is not None:
            table = self.buffer.table
            counts = {"inserts": table.limiter.inserts, "samples": table.limiter.samples}
            context.note(life=self._life, size=table.size, **counts)
            if self._again and not table.size:
                return None
        samples = None if self._waiting else self.buffer.sample()
        if samples is None:
            late: Deferred[Samples] = Deferred()
            self._waiting.append((ticket, late))
            return late
        self._answer()
        return samples

    def _answer(self) -> None:
        """Serve whoever can be served now, in turn."""
        while self._give_next() | self._store_next():
            pass

    def _give_next(self) -> bool:
        """Give a sample to who waits for longest, if there is one; whether there was."""
        if not self._waiting or (samples := self.buffer.sample()) is None:
            return False
        self._waiting.popleft()[1].resolve(samples)
        return True

    def _store_next(self) -> bool:
        """Store what waits for longest, if it may be; whether it waits no more."""
        if not self._blocked:
            return False
        _, late, chunk = self._blocked[0]
        stored = error = None
        if late is not None:
            try:
                stored = self._stored(chunk)
            except Exception as caught:  # for who sent it, and for nobody else
                error = caught
            if stored is None and error is None:
                return False
        self._blocked.popleft()
        if stored is None:
            with suppress(Exception):  # what comes next does not go on from what was before it
                self.buffer.forget(chunk)
        if late is not None and stored is not None:
            late.resolve(stored)
        elif late is not None and error is not None:
            late.reject(error)
        return True

    def cancel(self, ticket: str) -> bool:
        """Whoever waits with this ticket does not any more; whether somebody did."""
        waited = any(own[0] == ticket for own in (*self._waiting, *self._blocked))
        self._waiting = deque(own for own in self._waiting if own[0] != ticket)
        self._blocked = deque((own[0], None, own[2]) if own[0] == ticket else own for own in self._blocked)
        self._answer()  # whoever was behind it
        return waited

    def update(self, keys: Any, priorities: Any, life: float | None = None) -> None:
        """How surprising items were; those of an earlier life, before a restart, are not known here."""
        if life is None or life == self._life:
            self.buffer.update(keys, priorities)

    def info(self) -> TableInfo:
        """How the table stands."""
        return self.buffer.info()

    def why(self) -> str:
        """What decides whether it takes or gives, in words."""
        table = self.buffer.table
        return f"{table.size} items, {table.limiter.counts()}, by {table.limiter!r}"

    def begin_save(self, path: Path) -> None:
        """Begin to write all that is remembered to a file; nobody waits for that."""
        self.finish_save()
        self._writing = BackgroundSave(
            path, lambda: {"life": self._life, **self.buffer.state_dict(copy=False)}
        )

    def finish_save(self) -> str | None:
        """Wait until it is written; what went wrong, if anything did."""
        writing, self._writing = self._writing, None
        return writing.wait() if writing is not None else None

    def load_file(self, path: Path) -> None:
        """Go on from a file."""
        self.load_state_dict(read_state(path))

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered."""
        return {"life": self._life, **self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._life = state["life"]
        self.buffer.load_state_dict(state)


class ReplayShards:
    """Several buffers, each on an actor of its own. One that dies comes back empty.

    The streams of one writer always go to the same shard, so that their steps are stored once and windows
    reach from one chunk into the next.

    Args:
        engine: where they live.
        make: makes the buffer of a shard, given its number; it travels there.
        count: how many.
        terms: further arguments of `Engine.spawn`.
    """

    def __init__(self, engine: Engine, make: Callable[[int], Buffer], count: int = 1, **terms: Any):
        terms = {"on_failure": "restart", **terms}
        self.actors: list[Actor[ReplayShard]] = engine.spawn(
            ReplayShard, (make,), count=count, name="replay", **terms
        )
        self._tickets = itertools.count()

    def shard(self, writer: int) -> Actor[ReplayShard]:
        """Where what a writer sends is remembered."""
        return self.actors[writer % len(self.actors)]

    # For clients outside a flow ----------------------------------------------------------------

    def insert(self, writer: int, chunk: Chunk, timeout: float | None = None) -> int:
        """Remember a chunk as soon as the limiter allows it; how many items came of it.

        Raises `TimeoutError`, and nothing is stored, if that takes too long.
        """
        return self._awaited(self.shard(writer), "store", timeout, chunk)

    def sample(self, shard: int = 0, timeout: float | None = None) -> Samples:
        """Items drawn at random as soon as the limiter allows it; `TimeoutError` if that takes too long."""
        if not 0 <= shard < len(self.actors):
            raise ReplayError(f"there is no shard {shard}: they are 0 to {len(self.actors) - 1}")
        return self._awaited(self.actors[shard], "sample", timeout, None)

    def _awaited(self, actor: Actor[Any], method: str, timeout: float | None, first: Any) -> Any:
        ticket = f"{id(self)}.{next(self._tickets)}"
        reply = actor.call(method, first, ticket)
        try:
            return reply.result(timeout)
        except TimeoutError:
            if not actor.call("cancel", ticket).result():
                return reply.result()  # it came at the last moment
            why = actor.call("why").result()
            raise TimeoutError(
                f"{actor.name} could not {method} within {timeout:g} s: it has {why}"
            ) from None
        except Deadlock:
            actor.send("cancel", ticket)
            raise

    def info(self) -> list[TableInfo]:
        """How the tables stand."""
        return [actor.call("info").result() for actor in self.actors]
