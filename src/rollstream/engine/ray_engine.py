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
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from rollstream.engine.errors import ActorDied, EngineError

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change to come
try:
    import ray
except ImportError as missing:
    raise EngineError("the ray engine needs Ray: pip install 'rollstream[ray]'") from missing

from rollstream.engine.actor import Actor, ActorSlot, Message
from rollstream.engine.future import Sink
from rollstream.engine.hub import GRACE, Release, Started, failure_in
from rollstream.engine.ray_cell import POST, RayCell, run_task
from rollstream.engine.ray_connection import connect, disconnect, ends_with_engines
from rollstream.engine.ray_hub import RayHub, first_line, read, value_of
from rollstream.engine.ray_link import BUILDING, RayLink, Sent
from rollstream.engine.ray_outpost import ERROR
from rollstream.engine.ray_store import Buffers, body_of, items_of, stowed
from rollstream.engine.supervision import EventCallback, SpawnOptions
from rollstream.engine.threads import QueueSink
from rollstream.engine.wire import Parcel, futures_in, pack, packed_error, packed_message

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
        on_event: called with an `ActorEvent` when an actor dies, in a thread of the engine; it must not wait
            for actors.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        threads: int | None = None,
        on_event: EventCallback | None = None,
    ):
        super().__init__(threads=threads, on_event=on_event)
        self._tasks: dict[int, Sent] = {}
        self._path = [os.path.abspath(entry) for entry in sys.path]
        connect(address, self.variables)
        self._errands.start()

    # Verbs -------------------------------------------------------------------------------------

    def sink(self) -> Sink:
        """A sink that threads of Ray fill."""
        self._have_all_told()  # somebody is going to wait
        return QueueSink()

    def wait(self, futures: Any, count: int = 1, timeout: float | None = None) -> Any:
        """As the base; for a single reply, this thread first asks Ray itself."""
        if len(futures) == count == 1 and (fresh := self._fresh.pop(futures[0], None)) is not None:
            self._get(*fresh, timeout)
            if futures[0].done and not self.in_flight.failures:
                futures[0].read = True
                return list(futures), []
        return super().wait(futures, count, timeout)

    # What travels ------------------------------------------------------------------------------

    def _pack(self, value: Any) -> Parcel:
        return stowed(pack(value, self, Buffers))

    def _pack_message(self, message: Message) -> Parcel:
        return stowed(packed_message(self, message, Buffers))

    def _pack_error(self, error: BaseException) -> Parcel:
        return stowed(packed_error(error, self, Buffers, "the driver"))

    # Sending -----------------------------------------------------------------------------------

    def _transmit(self, link: RayLink, message: Message) -> None:
        record, value = self._submit(link, message.parcel)
        number = link.sent
        link.sent += 1
        if not link.pending:
            link.since = time.monotonic()
            if link.actor.terms.deadline is not None:
                self._errands.look()
        link.pending[number] = Sent(message, record, value)
        self._expect(link, number, record, message.future)

    def _submit(self, link: RayLink, parcel: Parcel) -> Any:
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

    # Starting ----------------------------------------------------------------------------------

    def _start(self, cells: list[ActorSlot], terms: SpawnOptions) -> list[Actor[Any]]:
        _warn_if_nowhere(terms)
        return super()._start(cells, terms)

    def _new_link(self, actor: Actor[Any], recipe: Parcel, started: Started) -> RayLink:
        return RayLink(self, actor, recipe, started)

    def _launch(self, link: RayLink, first: Iterable[Message] = ()) -> bool:
        """Start a cell and have it build the instance; what is sent comes after that.

        False if the engine is being closed meanwhile.
        """
        actor, context = link.actor, link.actor.cell.context
        with link.lock:
            if link.stopping or link.recipe is None:
                return False
            options = _options(actor.terms)
            cell = CELLS.options(**options).remote(context.name, self.variables, self._path)
            link.restarted(cell)
            about = (context.name, context.index, context.count, actor.restarts)
            built = cell.build.remote(about, body_of(link.recipe), *items_of(link.recipe))
            link.pending[BUILDING] = Sent(Message("", (), None, ""), built, None)
            built._on_completed(lambda record: self._errands.later(partial(self._record_built, link, record)))
            self._listen(link)
            for message in first:
                self._send(link, message, futures_in(message.parcel))
            link.down = False
        return True

    # Tasks -------------------------------------------------------------------------------------

    def _run_task(self, message: Message) -> None:
        try:
            self.prepare(message)
        except BaseException:
            self.in_flight.settle(message)
            raise
        self._submit_task(next(self._numbers), message)

    def _submit_task(self, number: int, message: Message) -> None:
        """Have Ray run a task, once the replies it depends on are there."""
        futures = futures_in(message.parcel)
        holder: Any = _Holder(f"task {number}")
        if futures and self.in_flight.follow(
            futures, Release(self, holder, partial(self._submit_task, number, message))
        ):
            self.in_flight.hold(holder, 1, futures)
        elif (error := failure_in(futures)) is not None:
            self.in_flight.settle(message, None, error)
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
            self.in_flight.settle(sent.message, None, died)
            return
        status, _, _, _, item = read(record)
        if status == ERROR:
            self.in_flight.settle(sent.message, None, self._error_from(item))
        else:
            self.in_flight.settle(sent.message, value_of(status, item, sent))

    # Ending ------------------------------------------------------------------------------------

    def _stop(self) -> None:
        try:
            hurried = self._hurried or not self.in_flight.idle()
            grace = SHORT_GRACE if ends_with_engines() else GRACE
            self._end_links(list(self._links), grace if hurried else None)
            self._cancel_tasks()
        finally:
            self._errands.close()
            self._forget_all()
            disconnect()

    def _ask_to_end(self, link: RayLink) -> None:
        if link.pending:
            link.cell.stop.remote()
        ended = link.cell.end.remote()
        ended._on_completed(lambda errors: self._errands.later(partial(self._take_end, link, ended, errors)))

    def _take_end(self, link: RayLink, _: Any, errors: Any) -> None:
        for item in errors if isinstance(errors, list) else ():
            self.in_flight.fail(self._error_from(item))
        link.kill()

    def _cancel_tasks(self) -> None:
        for number in list(self._tasks):
            if (sent := self._tasks.pop(number, None)) is not None:
                with suppress(Exception):
                    ray.cancel(sent.record, force=True)
                self._refuse([sent.message])


class _Holder:
    """A task that waits, as the books see it."""

    def __init__(self, name: str):
        self.name = name


def _warn_if_nowhere(terms: SpawnOptions) -> None:
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


def _options(terms: SpawnOptions) -> dict[str, Any]:
    """What Ray is told of an actor's needs."""
    own = {name: value for name, value in terms.resources.items() if name in _OPTIONS}
    custom = {name: value for name, value in terms.resources.items() if name not in _OPTIONS}
    return {"num_cpus": 0, **own, "resources": custom or None, "scheduling_strategy": "SPREAD"}
