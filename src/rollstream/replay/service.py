"""Replay as a service: buffers on actors of any engine, for flows and for other clients."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollstream.background_save import BackgroundSave, read_state
from rollstream.engine import Actor, ActorContext, Deadlock, Deferred, Engine
from rollstream.flow import Context
from rollstream.replay.buffer import Chunk, ReplayBatch, ReplayBuffer
from rollstream.replay.errors import InsertRefused, ReplayError
from rollstream.replay.table_info import TableInfo


@dataclass
class _PendingInsert:
    """A chunk that waits for the rate limiter."""

    chunk: Chunk
    request_id: str
    reply: Deferred[int]
    cancelled: bool = False


class ReplayShard:
    """An actor with a replay buffer. Requests that the rate limiter does not allow yet are answered later.

    Args:
        make: Creates the buffer, given the index of the shard.
    """

    def __init__(self, make: Callable[[int], ReplayBuffer], *, context: ActorContext):
        self.buffer = make(context.index)
        self._incarnation = secrets.randbits(48)
        """Identifies the content: a restarted shard is empty and has another incarnation."""
        self._writing: BackgroundSave | None = None
        self._pending_samples: deque[tuple[str, Deferred[ReplayBatch]]] = deque()
        self._pending_inserts: deque[_PendingInsert] = deque()

    # Insert and sample -------------------------------------------------------------------------

    def insert(self, chunk: Chunk, request_id: str = "", env_steps: int | None = None) -> int | Deferred[int]:
        """Write a chunk as soon as the rate limiter allows it; reply with the number of items completed.

        `env_steps` are those of the training so far, if whoever made the chunk did not know.
        """
        if env_steps is not None:
            chunk = replace(chunk, env_steps=env_steps)
        count = None if self._pending_inserts else self._try_insert(chunk)
        if count is None:
            pending = _PendingInsert(chunk, request_id, Deferred())
            self._pending_inserts.append(pending)
            return pending.reply
        self._serve_pending()
        return count

    def sample(
        self, context: Context | None = None, request_id: str = ""
    ) -> ReplayBatch | Deferred[ReplayBatch]:
        """Sample a batch as soon as the rate limiter allows it."""
        if context is not None:
            table = self.buffer.table
            counts = {"inserts": table.rate_limiter.inserts, "samples": table.rate_limiter.samples}
            context.note(incarnation=self._incarnation, size=table.size, **counts)
        batch = None if self._pending_samples else self.buffer.sample()
        if batch is None:
            reply: Deferred[ReplayBatch] = Deferred()
            self._pending_samples.append((request_id, reply))
            return reply
        self._serve_pending()
        return batch

    def cancel(self, request_id: str) -> bool:
        """Cancel a pending request; return whether it was pending."""
        cancelled = False
        for pending in self._pending_inserts:
            if pending.request_id == request_id and not pending.cancelled:
                pending.cancelled = cancelled = True
        samples = deque(own for own in self._pending_samples if own[0] != request_id)
        cancelled |= len(samples) < len(self._pending_samples)
        self._pending_samples = samples
        self._serve_pending()
        return cancelled

    def _try_insert(self, chunk: Chunk) -> int | None:
        try:
            return self.buffer.insert(chunk)
        except InsertRefused:
            return None

    def _serve_pending(self) -> None:
        """Serve pending samples and inserts in turn, for as long as the rate limiter allows."""
        while self._serve_sample() | self._serve_insert():
            pass

    def _serve_sample(self) -> bool:
        """Answer the oldest pending sample, if possible; return whether it was."""
        if not self._pending_samples or (batch := self.buffer.sample()) is None:
            return False
        self._pending_samples.popleft()[1].resolve(batch)
        return True

    def _serve_insert(self) -> bool:
        """Answer the oldest pending insert, or drop it if cancelled; return whether it is done."""
        if not self._pending_inserts:
            return False
        pending = self._pending_inserts[0]
        if not pending.cancelled:
            try:
                count = self._try_insert(pending.chunk)
            except Exception as error:  # for the sender of this chunk alone
                pending.reply.reject(error)
            else:
                if count is None:
                    return False
                self._pending_inserts.popleft()
                pending.reply.resolve(count)
                return True
        self._pending_inserts.popleft()
        with suppress(Exception):  # the next chunk does not continue the one before this
            self.buffer.reset_streams(pending.chunk.streams)
        return True

    # Priorities and state ----------------------------------------------------------------------

    def update_priorities(self, new: tuple[Any, Any], incarnation: float | None = None) -> None:
        """Set the priorities of items, given as keys and priorities.

        Those of another incarnation are ignored, since its keys mean nothing here.
        """
        if incarnation is None or incarnation == self._incarnation:
            self.buffer.update_priorities(*new)

    def info(self) -> TableInfo:
        """Size, memory and counts of the table."""
        return self.buffer.info()

    def rate_limiter_status(self) -> str:
        """Size, counts and limits of the table, for error messages."""
        table = self.buffer.table
        return f"{table.size} items, {table.rate_limiter.counts()}, {table.rate_limiter!r}"

    def save_to(self, path: Path) -> None:
        """Start writing the state to a file in the background."""
        self.wait_saved()
        self._writing = BackgroundSave(
            path, lambda: {"incarnation": self._incarnation, **self.buffer.state_dict(copy=False)}
        )

    def wait_saved(self) -> str | None:
        """Wait until the file is written; return the error, if any."""
        writing, self._writing = self._writing, None
        return writing.wait() if writing is not None else None

    def load_from(self, path: Path) -> None:
        """Restore the state from a file."""
        self.load_state_dict(read_state(path))

    def state_dict(self) -> dict[str, Any]:
        """The buffer's state, and its incarnation."""
        return {"incarnation": self._incarnation, **self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the buffer and its incarnation."""
        self._incarnation = state["incarnation"]
        self.buffer.load_state_dict(state)


class ReplayShards:
    """Replay buffers sharded over actors. A shard that dies is restarted empty.

    All chunks of a writer go to the same shard, so that windows may span chunks and steps are stored once.

    Args:
        engine: The engine to spawn the actors on.
        make: Creates the buffer of a shard, given its index; it is sent to the actor.
        count: Number of shards.
        spawn_options: Further arguments of `Engine.spawn`.
    """

    def __init__(
        self, engine: Engine, make: Callable[[int], ReplayBuffer], count: int = 1, **spawn_options: Any
    ):
        options = {"on_failure": "restart", **spawn_options}
        self.actors: list[Actor[ReplayShard]] = engine.spawn(
            ReplayShard, (make,), count=count, name="replay", **options
        )
        self.sizes: dict[str, int] = {}
        """Items of each shard, as `UpdatePriorities` last heard."""
        self._request_ids = itertools.count()

    def shard(self, writer: int) -> Actor[ReplayShard]:
        """The shard that stores the chunks of a writer."""
        return self.actors[writer % len(self.actors)]

    # For clients outside a flow ----------------------------------------------------------------

    def insert(self, writer: int, chunk: Chunk, timeout: float | None = None) -> int:
        """Write a chunk as soon as the rate limiter allows it; return the number of items it completes.

        Raises `TimeoutError` after `timeout` seconds; the chunk is not written then.
        """
        return self._request(self.shard(writer), "insert", timeout, chunk)

    def sample(self, shard: int = 0, timeout: float | None = None) -> ReplayBatch:
        """Sample a batch as soon as the rate limiter allows it.

        Raises `TimeoutError` after `timeout` seconds; nothing is sampled then.
        """
        if not 0 <= shard < len(self.actors):
            raise ReplayError(f"shard is {shard}; set it to 0 to {len(self.actors) - 1}")
        return self._request(self.actors[shard], "sample", timeout, None)

    def _request(self, actor: Actor[Any], method: str, timeout: float | None, argument: Any) -> Any:
        request_id = f"{id(self)}.{next(self._request_ids)}"
        reply = actor.call(method, argument, request_id)
        try:
            return reply.result(timeout)
        except TimeoutError:
            if not actor.call("cancel", request_id).result():
                return reply.result()  # it was served at the last moment
            status = actor.call("rate_limiter_status").result()
            raise TimeoutError(f"{actor.name} did not {method} within {timeout:g} s: {status}") from None
        except Deadlock:
            actor.send("cancel", request_id)
            raise

    def info(self) -> list[TableInfo]:
        """Size, memory and counts of every shard's table."""
        return [actor.call("info").result() for actor in self.actors]
