"""The ray engine: actors anywhere in a Ray cluster.

The driver is the hub, as on one machine: messages between actors pass through it, but what is large in them
lies in Ray's object store and only its reference does. So the books are exact, and a restarted actor is
simply another Ray actor behind the same name.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from rollstream.engine.errors import ActorDied, EngineError

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change to come
try:
    import ray
except ImportError as missing:
    raise EngineError("the ray engine needs Ray: pip install 'rollstream[ray]'") from missing

from rollstream.engine.actor import Actor, Cell, Message, rebuild
from rollstream.engine.base import EngineStatistics
from rollstream.engine.future import Future, Sink
from rollstream.engine.launch import thread_variables
from rollstream.engine.ray_cell import POST, RayCell, run_task
from rollstream.engine.ray_connection import connect, disconnect, ends_with_engines
from rollstream.engine.ray_hub import RayHub, first_line, read, value_of
from rollstream.engine.ray_link import BUILDING, Link, Sent
from rollstream.engine.ray_outpost import ERROR
from rollstream.engine.ray_store import Buffers, RayRef, body_of, items_of, opened_once, stowed
from rollstream.engine.supervision import EventCallback, Terms
from rollstream.engine.threads import QueueSink
from rollstream.engine.wire import Parcel, futures_in, pack, packed_message

GRACE = 1.0
"""Seconds an actor has for the message in hand when the engine is closed in a hurry."""
SHORT_GRACE = 0.1
"""The same where the cluster ends with the engine, which takes Ray more than a second."""
KNOWABLE = 1024
"""Bytes up to which a message may be known by number."""
CELLS: Any = ray.remote(num_cpus=0, concurrency_groups={POST: 2})(RayCell)  # pyright: ignore[reportCallIssue]
TASKS: Any = ray.remote(num_returns=2, max_retries=0)(run_task)
_OPTIONS = ("num_cpus", "num_gpus", "memory")


class RayEngine(RayHub):
    """For a cluster, or for one machine as if it were one.

    If Ray is initialised in this process already, as it is inside a Ray actor, the engine joins it and leaves
    it running; else it connects to a cluster, or starts one on this machine that ends with the engine.

    `spawn(..., resources={"num_cpus": 1, "num_gpus": 0.5, "memory": 2**30, "arm": 1})` passes what an actor
    needs to Ray; names other than the first three are custom resources. Without them an actor counts for
    nothing, so that many fit on few cores. Ray spreads actors over the machines; those that count for nothing
    it spreads at random.

    Args:
        address: of a cluster, or `auto` for the one this machine belongs to.
        threads: threads that numeric libraries (BLAS, OpenMP, XLA) may use in each actor. Left out, it is
            one, unless the environment says otherwise.
        on_event: called with an `ActorEvent` when an actor dies, in a thread of the engine.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        threads: int | None = None,
        on_event: EventCallback | None = None,
    ):
        super().__init__(on_event=on_event)
        if threads is not None and threads < 1:
            raise EngineError(f"threads={threads}: an actor needs at least one")
        self.variables = thread_variables(threads)
        self._tasks: dict[int, Sent] = {}
        self._hurried = False
        self._path = [os.path.abspath(entry) for entry in sys.path]
        connect(address, self.variables)
        self._errands.start()

    # Verbs -------------------------------------------------------------------------------------

    def put(self, value: Any) -> RayRef:
        """Store a value once: a large one is one object of Ray's, however many read it."""
        self.require_open()
        return RayRef(self, stowed(pack(value, self, Buffers)))

    def restart(self, actor: Actor[Any]) -> Future[None]:
        """Replace an actor's instance by a fresh one, in the same process."""
        sticky = [RayRef(self, message.parcel) for message in actor.sticky.values()]
        return actor.ask(rebuild, sticky, name="restart")

    def statistics(self) -> EngineStatistics:
        """Also the environment of the actors."""
        return replace(super().statistics(), environment=dict(self.variables))

    def sink(self) -> Sink:
        """A sink that threads of Ray fill."""
        self._have_all_told()  # somebody is going to wait
        return QueueSink()

    def wait(self, futures: Any, count: int = 1, timeout: float | None = None) -> Any:
        """As the base; for a single reply, this thread first asks Ray itself."""
        if len(futures) == count == 1 and (fresh := self._fresh.pop(futures[0], None)) is not None:
            self._get(*fresh, timeout)
            if futures[0].done and not self.ledger.failures:
                futures[0].read = True
                return list(futures), []
        return super().wait(futures, count, timeout)

    def close(self, *, drain: bool = True) -> None:
        """End every actor. One that is in the middle of a message when it has to be quick is killed."""
        self._hurried = not drain
        super().close(drain=drain)

    # What travels ------------------------------------------------------------------------------

    def prepare(self, message: Message) -> None:
        """Pack a message, unless it comes packed."""
        if message.parcel is None:
            message.parcel = stowed(packed_message(self, message, Buffers))

    def opened(self, future: Future[Any]) -> Any:
        """Unpack a reply."""
        return opened_once(self, future)

    # Sending -----------------------------------------------------------------------------------

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        link: Link = actor.mailbox
        futures = futures_in(message.parcel) if message.parcel.parts else []
        with link.lock:
            if actor.gone is None:
                late = bool(futures) and self.ledger.follow(
                    futures, _Release(self, actor, partial(self._send_waiting, actor))
                )
                if not late and not link.waiting and not link.down:
                    self._transmit(link, message, futures)
                    return
                link.waiting.append(message)
        if actor.gone is not None:
            self._refuse_lost(actor, message, actor.gone)
        else:
            self._errands.later(partial(self._send_waiting, actor))

    def _transmit(self, link: Link, message: Message, futures: Iterable[Future[Any]] = ()) -> None:
        """Have Ray carry a message; the lock is held. One that carries a failed reply fails itself."""
        if (error := _failure_in(futures)) is not None:
            self._errands.later(partial(self.ledger.settle, message, None, error))
            return
        record, value = self._submit(link, message.parcel)
        number = link.sent
        link.sent += 1
        if not link.pending:
            link.since = time.monotonic()
            if link.actor.terms.deadline is not None:
                self._errands.look()
        link.pending[number] = Sent(message, record, value)
        self._expect(link, number, record, message.future)

    def _submit(self, link: Link, parcel: Parcel) -> Any:
        """Call the cell. A message that comes again and again is sent by number, which spares an argument."""
        body = body_of(parcel)
        if type(body) is not bytes or len(body) > KNOWABLE or parcel.parts:
            return link.cell.handle.remote(body, *items_of(parcel))
        if (method := link.known.get(body)) is not None:
            return method.remote()
        if body in link.recent:
            return link.cell.learn.remote(link.know(body), body)
        link.recent.append(body)
        return link.cell.handle.remote(body)

    def _send_waiting(self, actor: Actor[Any]) -> None:
        """Send what is no longer held back; what is does not run."""
        link: Link = actor.mailbox
        with link.lock:
            if link.down:
                return
            while link.waiting:
                futures = futures_in(link.waiting[0].parcel)
                if not all(future.done for future in futures):
                    break
                self._transmit(link, link.waiting.popleft(), futures)
            self.ledger.hold(actor, len(link.waiting))

    # Starting ----------------------------------------------------------------------------------

    def _start(self, cells: list[Cell], terms: Terms) -> list[Actor[Any]]:
        _warn_if_nowhere(terms)
        recipe = self._recipe(cells[0])  # the same for all
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        actors = [self._actor(cell, terms) for cell in cells]
        links: list[Link] = []
        try:
            for actor in actors:
                link = actor.mailbox = Link(actor, recipe, _Answers(self, actor), started)
                self._links.append(link)
                try:
                    self._launch(link)
                except BaseException:
                    self._links.remove(link)
                    raise
                links.append(link)
            errors = [error for error in [started.get() for _ in actors] if error is not None]
            if errors:
                raise errors[0]
        except BaseException as error:
            self._end_links(links, GRACE if isinstance(error, Exception) else 0.0)
            raise
        return actors

    def _recipe(self, cell: Cell) -> Parcel:
        """What an instance is built from."""
        named = Message(
            "", (cell.cls, *cell.args, *cell.kwargs.values()), None, f"{cell.context.name}.__init__"
        )
        packed_message(self, named, Buffers)  # says what cannot travel
        parcel = stowed(pack((cell.cls, cell.args, cell.kwargs), self, Buffers))
        for future in futures_in(parcel):
            future.result()
        return parcel

    def _launch(self, link: Link, first: Iterable[Message] = ()) -> bool:
        """Start a cell and have it build the instance; what is sent comes after that.

        False if the engine is being closed meanwhile.
        """
        actor, context = link.actor, link.actor.cell.context
        with link.lock:
            if link.stopping:
                return False
            options = _options(actor.terms)
            cell = CELLS.options(**options).remote(context.name, self.variables, self._path)
            link.restarted(cell)
            about = (context.name, context.index, context.count, actor.restarts)
            built = cell.build.remote(about, body_of(link.recipe), *items_of(link.recipe))
            link.pending[BUILDING] = Sent(Message("", (), None, ""), built, None)
            built._on_completed(lambda record: self._errands.later(partial(self._take_built, link, record)))
            self._listen(link)
            for message in first:
                self._transmit(link, message, futures_in(message.parcel))
            link.down = False
        return True

    # Tasks -------------------------------------------------------------------------------------

    def _run_task(self, message: Message) -> None:
        try:
            self.prepare(message)
        except BaseException:
            self.ledger.settle(message)
            raise
        self._submit_task(next(self._numbers), message)

    def _submit_task(self, number: int, message: Message) -> None:
        """Have Ray run a task, once the replies it depends on are there."""
        futures = futures_in(message.parcel)
        holder: Any = _Holder(f"task {number}")
        if futures and self.ledger.follow(
            futures, _Release(self, holder, partial(self._submit_task, number, message))
        ):
            self.ledger.hold(holder, 1)
        elif (error := _failure_in(futures)) is not None:
            self.ledger.settle(message, None, error)
        elif message.counted and number not in self._tasks:
            body, items = body_of(message.parcel), items_of(message.parcel)
            record, value = TASKS.remote(self.variables, self._path, body, *items)
            self._tasks[number] = Sent(message, record, value)
            record._on_completed(lambda came: self._errands.later(partial(self._take_task, number, came)))

    def _take_task(self, number: int, record: Any) -> None:
        if (sent := self._tasks.pop(number, None)) is None:
            return
        if isinstance(record, BaseException):
            died = ActorDied("task", f"{sent.message.label} was lost: {first_line(record)}", "restarted")
            self.ledger.settle(sent.message, None, died)
            return
        status, _, _, _, item = read(record)
        if status == ERROR:
            self.ledger.settle(sent.message, None, self._error_from(item))
        else:
            self.ledger.settle(sent.message, value_of(status, item, sent))

    # Ending ------------------------------------------------------------------------------------

    def _stop(self) -> None:
        try:
            hurried = self._hurried or not self.ledger.idle()
            grace = SHORT_GRACE if ends_with_engines() else GRACE
            self._end_links(list(self._links), grace if hurried else None)
            self._cancel_tasks()
        finally:
            self._errands.close()
            disconnect()

    def _end_links(self, links: list[Link], grace: float | None) -> None:
        """Let actors end by themselves; after so many seconds, kill them."""
        try:
            for link in links:
                self._end_link(link)
            end = None if grace is None else time.monotonic() + grace
            for link in links:
                if not link.ended.wait(None if end is None else max(0.0, end - time.monotonic())):
                    link.kill()
        except BaseException:
            for link in links:
                link.kill()
            raise
        finally:
            for link in links:
                link.ended.wait(GRACE)

    def _end_link(self, link: Link) -> None:
        with link.lock:
            link.stopping = True
            if link.down:
                link.kill()
                return
            if link.pending:
                link.cell.stop.remote()
            ended = link.cell.end.remote()
        ended._on_completed(lambda errors: self._errands.later(partial(self._take_end, link, ended, errors)))

    def _take_end(self, link: Link, _: Any, errors: Any) -> None:
        for item in errors if isinstance(errors, list) else ():
            self.ledger.fail(self._error_from(item))
        link.kill()

    def _cancel_tasks(self) -> None:
        for number in list(self._tasks):
            if (sent := self._tasks.pop(number, None)) is not None:
                with suppress(Exception):
                    ray.cancel(sent.record, force=True)
                self._refuse([sent.message])


class _Release:
    """Follows replies that a message carries: when one is there, what was held back is looked at again."""

    def __init__(self, engine: RayEngine, actor: Any, look: Callable[[], None]):
        self._engine = engine
        self._actor = actor
        self._look = look

    def put(self, _: Future[Any], /) -> None:
        self._engine.ledger.release(self._actor)
        self._engine._errands.later(self._look)


class _Answers:
    """Where the replies to one actor's questions come to, on their way to that actor."""

    def __init__(self, engine: RayEngine, actor: Actor[Any]):
        self._engine = engine
        self._actor = actor

    def put(self, future: Future[Any], /) -> None:
        self._engine._errands.later(partial(self._engine._answer, self._actor, future))


class _Holder:
    """A task that waits, as the books see it."""

    def __init__(self, name: str):
        self.name = name


def _failure_in(futures: Iterable[Future[Any]]) -> BaseException | None:
    for future in futures:
        if future.error is not None:
            future.read = True
            return future.error
    return None


def _warn_if_nowhere(terms: Terms) -> None:
    """Say so if no machine has what an actor needs: Ray waits until one joins."""
    if not terms.resources:
        return
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    needs = {names.get(name, name): amount for name, amount in terms.resources.items() if amount > 0}
    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    if not any(all(machine.get(name, 0) >= needs[name] for name in needs) for machine in machines):
        warnings.warn(
            f"resources={dict(terms.resources)}: no machine of the cluster has these, so Ray waits until one "
            f"joins",
            stacklevel=4,
        )


def _options(terms: Terms) -> dict[str, Any]:
    """What Ray is told of an actor's needs."""
    own = {name: value for name, value in terms.resources.items() if name in _OPTIONS}
    custom = {name: value for name, value in terms.resources.items() if name not in _OPTIONS}
    return {"num_cpus": 0, **own, "resources": custom or None, "scheduling_strategy": "SPREAD"}
