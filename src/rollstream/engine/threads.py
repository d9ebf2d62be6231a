"""The threads engine: each actor has a thread and a mailbox."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from rollstream.engine.actor import Actor, ActorSlot, Message
from rollstream.engine.base import DRIVER, Engine
from rollstream.engine.errors import EngineClosed, ReentryError
from rollstream.engine.future import Future, Sink
from rollstream.engine.supervision import EventCallback, SpawnOptions


class QueueSink:
    """A sink that any thread may fill and one thread waits on."""

    __slots__ = ("_queue", "_woken", "put")

    def __init__(self) -> None:
        self._queue: SimpleQueue[Future[Any] | None] = SimpleQueue()
        self._woken = False
        self.put = self._queue.put

    def wake(self) -> None:
        """Put one wake-up into the queue, however often it is asked for."""
        if not self._woken:
            self._woken = True
            self._queue.put(None)

    def poll(self) -> Future[Any] | None:
        """Take the next future, if there is one."""
        while not self._queue.empty():
            if (future := self._take(None)) is not None:
                return future
        return None

    def wait(self, timeout: float | None = None) -> Future[Any] | None:
        """Block on the queue; the thread uses no processor meanwhile."""
        try:
            return self._take(timeout)
        except Empty:
            return None

    def _take(self, timeout: float | None) -> Future[Any] | None:
        future = self._queue.get(timeout=timeout)
        if future is None:
            self._woken = False  # before its owner looks at the engine: a later wake-up is not lost
        return future


class ThreadsEngine(Engine):
    """For work that releases the interpreter lock: environments in C++, numerics, waiting.

    Python cannot end a thread from outside: leaving the scope waits for the message in hand.
    """

    name = "threads"
    catches = BaseException

    def __init__(self, *, on_event: EventCallback | None = None) -> None:
        super().__init__(on_event=on_event)
        self._threads: dict[str, threading.Thread] = {}
        self._tasks: ThreadPoolExecutor | None = None

    def sink(self) -> Sink:
        """A sink on a queue."""
        return QueueSink()

    def sender(self) -> str:
        """The actor whose thread this is."""
        name = threading.current_thread().name
        return name if self._threads.get(name) is threading.current_thread() else DRIVER

    def wait(self, futures: Any, count: int = 1, timeout: float | None = None) -> Any:
        """As the base; an actor that waits for its own mailbox is told so."""
        me = self.sender()
        for future in futures:
            if not future.done and future.receiver == me:
                raise ReentryError(f"{me} waits for {future.label}, which only {me} itself could handle")
        return super().wait(futures, count, timeout)

    def _start(self, cells: list[ActorSlot], terms: SpawnOptions) -> list[Actor[Any]]:
        actors = [self._actor(cell, terms, SimpleQueue()) for cell in cells]
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        for actor in actors:
            thread = threading.Thread(target=self._live, args=(actor, started), name=actor.name, daemon=True)
            self._threads[actor.name] = thread
            thread.start()
        try:
            errors = [error for error in [started.get() for _ in actors] if error is not None]
        except BaseException:
            self._join(actors)
            raise
        if errors:
            self._join(actors)
            raise errors[0]
        return actors

    def _live(self, actor: Actor[Any], started: SimpleQueue[BaseException | None]) -> None:
        try:
            actor.cell.build()
        except BaseException as error:
            started.put(error)
            return
        started.put(None)
        while (message := actor.mailbox.get()) is not None:
            if self.closed:
                self._refuse(message)
            else:
                self._handle(actor, message)
        self._end(actor)

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        actor.mailbox.put(message)

    def _run_task(self, message: Message) -> None:
        if self._tasks is None:
            self._tasks = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="task")
        task = self._tasks.submit(self._handle_task, message)
        task.add_done_callback(lambda done: self._refuse(message) if done.cancelled() else None)

    def _refuse(self, message: Message) -> None:
        if message.future is not None:
            self.in_flight.settle(
                message, None, EngineClosed(f"{message.label}: the engine was closed before it ran")
            )

    def _stop(self) -> None:
        if self._tasks is not None:
            self._tasks.shutdown(cancel_futures=True)
        self._join(list(self.actors.values()))

    def _join(self, actors: list[Actor[Any]]) -> None:
        for actor in actors:
            actor.mailbox.put(None)
        for actor in actors:
            self._threads[actor.name].join()
            while not actor.mailbox.empty():  # sent while the engine was being closed
                if (message := actor.mailbox.get()) is not None:
                    self._refuse(message)
