"""The ray transport: actors anywhere in a Ray cluster.

The driver is the hub, as on one machine: messages between actors pass through it, but large values in them
lie in Ray's object store, and only their references do. A restarted actor is another Ray actor behind the
same name: Ray's own restarts would not repeat sticky messages before anything else.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from rollstream.engine.errors import ActorDied, EngineError

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change to come
try:
    import ray
except ImportError as missing:
    raise EngineError("the ray engine needs Ray: pip install 'rollstream[ray]'") from missing

from ray.exceptions import ObjectLostError, RayError, RayTaskError

from rollstream.engine.actor import Actor, Message
from rollstream.engine.actor_host import DEFERRED, ERROR, VALUE
from rollstream.engine.delayed import Alarm, earliest
from rollstream.engine.future import Deferred
from rollstream.engine.launch import thread_variables
from rollstream.engine.options import SpawnOptions
from rollstream.engine.ray_actor import SIDE, RayActor
from rollstream.engine.ray_cluster import accelerator, connect, disconnect, ends_with_engines
from rollstream.engine.ray_connection import DEATHS, RayConnection, Sent, first_line
from rollstream.engine.ray_host import LATE, POST, REFUSED, STORED
from rollstream.engine.ray_objects import (
    Buffers,
    StoredPayload,
    body_of,
    items_of,
    payload_from,
    size_of,
    store,
)
from rollstream.engine.serialization import Codec, Payload
from rollstream.engine.sinks import QueueSink
from rollstream.engine.transport import RemoteTransport

_SHORT_GRACE = 0.1
"""Seconds of grace where the cluster ends with the engine, which takes Ray more than a second."""
_ACTORS: Any = ray.remote(num_cpus=0, concurrency_groups={SIDE: 2})(RayActor)  # pyright: ignore[reportCallIssue]
_OPTIONS = ("num_cpus", "num_gpus", "memory")
_OUTCOMES = {"restart": "restarted", "drop": "dropped", "raise": "raised"}


class RayTransport(RemoteTransport):
    """For a cluster, or for one machine as if it were one.

    If Ray is initialised in this process already, as it is inside a Ray actor, the engine joins it and leaves
    it running; else it connects to a cluster, or starts one on this machine that ends with the engine.

    `spawn(..., resources={"num_cpus": 1, "num_gpus": 0.5, "memory": 2**30, "arm": 1})` passes what an actor
    needs to Ray; names other than the first three are custom resources. Without them an actor needs nothing,
    so that many fit on few cores. Ray spreads actors over the machines.

    Ray calls back in threads of its own, which must not wait: they handle the usual record. Everything else
    is left to one thread of this transport, in order.

    Args:
        address: of a cluster, or `auto` for the one this machine belongs to.
        threads: threads that numeric libraries (BLAS, OpenMP, XLA) may use in each actor; by default one, and
            for XLA two, unless the environment says otherwise.
    """

    name = "ray"
    death_notice = 1.0
    accelerator = staticmethod(accelerator)  # pyright: ignore[reportAssignmentType]
    sink = staticmethod(QueueSink)  # pyright: ignore[reportAssignmentType]

    def __init__(self, *, address: str | None = None, threads: int | None = None):
        self.environment = thread_variables(threads)
        self._path = [os.path.abspath(entry) for entry in sys.path]
        connect(address, dict(self.environment))
        self._thread = ThreadPoolExecutor(1, "rollstream ray")
        self._alarm = Alarm(lambda: self.later(self._look_at_clock))

    def open(self, engine: Any) -> None:
        super().open(engine)
        self.codec = Codec(engine, Buffers, "the driver", store)

    # Starting and ending -----------------------------------------------------------------------

    def start(self, actors: list[Actor[Any]]) -> None:
        _warn_if_nowhere(actors[0].options)
        super().start(actors)

    def launch(self, actor: Actor[Any], first: Iterable[Message] = ()) -> bool:
        """Start a Ray actor that builds the instance; what is sent comes after that."""
        with actor.lock:
            if actor.stopping or actor.constructor is None:
                return False
            handle = _ACTORS.options(**_ray_options(actor.options)).remote(
                actor.name, self.environment, self._path
            )
            connection = actor.connection = RayConnection(handle)
            context = (actor.name, actor.index, actor.count, actor.restarts)
            built = handle.build.remote(context, body_of(actor.constructor), *items_of(actor.constructor))
            self._when_done(built, partial(self._on_built, actor, connection))
            self._listen(actor, connection)
            for message in first:
                self.engine.dispatcher.deliver(actor, message)
            actor.up = True
        return True

    def ask_to_end(self, actor: Actor[Any]) -> None:
        handle = actor.connection.handle
        if actor.connection.pending:
            handle.stop.remote()
        self._when_done(handle.end.remote(), partial(self._on_end, actor))

    def _on_end(self, actor: Actor[Any], errors: Any) -> None:
        for item in errors if isinstance(errors, list) else ():
            self.engine.in_flight.fail(self._error_from(item))
        self.kill(actor)

    def kill(self, actor: Actor[Any]) -> None:
        with suppress(Exception):
            ray.kill(actor.connection.handle)

    def stop(self, actors: list[Actor[Any]], *, hurry: bool) -> None:
        """End every actor, and the cluster if it was started for this engine."""
        try:
            grace = _SHORT_GRACE if ends_with_engines() else self.grace
            self.end_all([actor for actor in actors if not actor.ended.is_set()], grace if hurry else None)
        finally:
            self._alarm.set(None)
            self._thread.shutdown()
            disconnect()

    # Sending -----------------------------------------------------------------------------------

    def deliver(self, actor: Actor[Any], message: Message) -> None:
        connection: RayConnection = actor.connection
        self.bytes_moved += size_of(message.payload)
        record, value = connection.handle.handle.remote(body_of(message.payload), *items_of(message.payload))
        number = connection.sent
        connection.sent += 1
        if not connection.pending:
            connection.since = time.monotonic()
        connection.pending[number] = Sent(message, record, value)
        record.future().add_done_callback(partial(self._on_record, actor, connection, number))
        deadline = actor.options.deadline
        if deadline is not None and self._alarm.due > time.monotonic() + deadline:
            self.later(self._look_at_clock)

    def deliver_later(self, actor: Actor[Any], message: Message, seconds: float) -> None:
        super().deliver_later(actor, message, seconds)
        self.later(self._look_at_clock)

    def current(self, actor: Actor[Any]) -> tuple[Message, float] | None:
        sent = next(iter(list(actor.connection.pending.values())), None)
        return None if sent is None else (sent.message, actor.connection.since)

    def later(self, function: Callable[[], None]) -> None:
        """Call a function in this transport's thread, after those before it."""
        with suppress(RuntimeError):  # the engine has been closed
            self._thread.submit(self._guarded, function)

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self.engine.supervisor.broken(error)

    def _when_done(self, reference: Any, function: Callable[[Any], None]) -> None:
        """Call a function with an object's value, or its error, in this transport's thread."""
        reference.future().add_done_callback(lambda done: self.later(partial(function, _outcome(done))))

    def _look_at_clock(self) -> None:
        """Send what is due, kill actors that hang, and look again when there is something to do."""
        self.send_due()
        self.engine.supervisor.kill_hung()
        due = earliest(self.delayed.next_due(), self.engine.supervisor.next_deadline())
        self._alarm.set(None if due is None or self.engine.closed else due - time.monotonic())

    # Records -----------------------------------------------------------------------------------

    def _on_record(self, actor: Actor[Any], connection: RayConnection, number: int, done: Any) -> None:
        """A record has come, in a thread of Ray's. The usual case is handled at once."""
        record = _outcome(done)
        if type(record) is bytes:
            status, said, start, end, item = pickle.loads(record)
            if status == VALUE and said <= connection.heard:
                if (sent := connection.pending.pop(number, None)) is not None:
                    self._complete(actor, connection, sent.message, Payload(item), None, start, end)
                    if connection.is_dying:
                        self.later(partial(self._bury_if_over, actor, connection))
                return
        self.later(partial(self._take_record, actor, connection, number, record))

    def _complete(
        self,
        actor: Actor[Any],
        connection: RayConnection,
        message: Message,
        value: Any,
        error: BaseException | None,
        start: float,
        end: float,
    ) -> None:
        connection.since = time.monotonic()
        offset = connection.clock_offset
        with connection.counting:
            if isinstance(value, Payload):
                self.bytes_moved += size_of(value)
            self.engine.complete(actor, message, value, error, start + offset, end + offset)

    def _on_built(self, actor: Actor[Any], connection: RayConnection, record: Any) -> None:
        connection.is_building = False
        if isinstance(record, BaseException):
            self._note_death(actor, connection, record)
            return
        item, host, logs, clock = record
        connection.note_process(host, logs)
        connection.clock_offset = clock - (time.time() - time.perf_counter())
        connection.since = time.monotonic()
        self.engine.supervisor.built(actor, None if item is None else self._error_from(item))
        self._bury_if_over(actor, connection)

    def _take_record(self, actor: Actor[Any], connection: RayConnection, number: int, record: Any) -> None:
        if number not in connection.pending:
            return
        if isinstance(record, BaseException):
            self._lose(actor, connection, number, record)
            return
        status, said, start, end, item = pickle.loads(record) if type(record) is bytes else record
        if said > connection.heard:
            connection.early_records.append((number, record))
            return
        sent = connection.pending.pop(number)
        complete = partial(self._complete, actor, connection, sent.message)
        if status == REFUSED and actor.stopping:
            self.engine.supervisor.refuse([sent.message])
        elif status == REFUSED:
            connection.unhandled[number] = sent.message
        elif status == DEFERRED:
            deferred = connection.deferred[item] = Deferred()
            complete(deferred, None, start, end)
            if item in connection.early_replies:
                self._on_late(actor, connection, item, *connection.early_replies.pop(item))
        elif status == ERROR:
            complete(None, self._error_from(item), start, end)
        elif status == STORED and sent.message.future is not None and sent.message.future.sink is not None:
            # A flow will want the value: fetch it before the flow is told.
            self._when_done(sent.value, partial(self._on_value, actor, connection, sent, item, start, end))
        elif status == STORED:
            parts = [payload_from(part) for part in item]
            complete(StoredPayload(sent.value, parts), None, start, end)
        else:
            complete(payload_from(item), None, start, end)
        self._bury_if_over(actor, connection)

    def _on_value(
        self,
        actor: Actor[Any],
        connection: RayConnection,
        sent: Sent,
        items: Any,
        start: float,
        end: float,
        body: Any,
    ) -> None:
        value = error = None
        if isinstance(body, BaseException):
            text = f"the reply to {sent.message.label} was lost with the machine it lay on"
            actor.lost += 1
            error = ActorDied(actor.name, text, _OUTCOMES[actor.options.on_failure])
        else:
            value = payload_from(body, items)
        self._complete(actor, connection, sent.message, value, error, start, end)

    def _error_from(self, item: Any) -> BaseException:
        assert self.codec is not None
        return self.codec.unpack_error(payload_from(item))

    # What actors say besides -------------------------------------------------------------------

    def _listen(self, actor: Actor[Any], connection: RayConnection) -> None:
        """Wait for what an actor says next."""
        self._when_done(connection.handle.take.remote(), partial(self._on_frames, actor, connection))

    def _on_frames(self, actor: Actor[Any], connection: RayConnection, frames: Any) -> None:
        if isinstance(frames, BaseException):
            connection.is_listening = False
            self._note_death(actor, connection, frames)
            return
        for kind, *fields in frames:
            try:
                self._frames[kind](self, actor, connection, *fields)
            except Exception as error:
                self.engine.supervisor.broken(error)
            connection.heard += 1
        self._listen(actor, connection)
        self._take_early_records(actor, connection)

    def _take_early_records(self, actor: Actor[Any], connection: RayConnection) -> None:
        records, connection.early_records = connection.early_records, []
        for number, record in records:
            self._take_record(actor, connection, number, record)

    def _on_late(
        self, _: Actor[Any], connection: RayConnection, number: int, failed: bool, item: Any
    ) -> None:
        deferred = connection.deferred.pop(number, None)
        if deferred is None:
            connection.early_replies[number] = (failed, item)
        elif failed:
            deferred.reject(self._error_from(item))
        else:
            deferred.resolve(payload_from(item))

    def _on_post(self, actor: Actor[Any], _: RayConnection, target: str, item: Any, *more: Any) -> None:
        self.engine.dispatcher.forward(actor, target, payload_from(item), *more)

    _frames: ClassVar[Mapping[str, Callable[..., None]]] = {LATE: _on_late, POST: _on_post}

    # Death -------------------------------------------------------------------------------------

    def _lose(self, actor: Actor[Any], connection: RayConnection, number: int, error: BaseException) -> None:
        """Ray could not carry out a message: mostly because the actor is dead."""
        message = connection.pending.pop(number).message
        if isinstance(error, DEATHS) and not isinstance(error, RayTaskError):
            connection.unhandled[number] = message
            self._note_death(actor, connection, error)
            return
        lost = isinstance(error, RayTaskError) and isinstance(error.cause, ObjectLostError)
        if not lost and (not isinstance(error, RayError) or isinstance(error, RayTaskError)):
            error.add_note("raised around the actor's own code: this is a defect of rollstream")
            self._complete(actor, connection, message, None, error, 0.0, 0.0)
        else:  # something in it was lost with the process that held it
            died = ActorDied(actor.name, f"{message.label} was lost: {first_line(error)}", "restarted")
            actor.lost += 1
            self.engine.in_flight.settle(message, None, died if message.future is not None else None)
        self._bury_if_over(actor, connection)

    def _note_death(self, actor: Actor[Any], connection: RayConnection, error: BaseException) -> None:
        """An actor is dead: wait until everything that was sent to it is accounted for."""
        if not connection.is_dying:
            with actor.lock:
                actor.up = False
                connection.is_dying = True
            connection.cause = error
            self.kill(actor)
        self._bury_if_over(actor, connection)

    def _bury_if_over(self, actor: Actor[Any], connection: RayConnection) -> None:
        if connection.is_dying and not connection.is_listening and connection.early_records:
            connection.heard = sys.maxsize  # what it still had to say died with it
            self._take_early_records(actor, connection)
        elif connection.is_over and not actor.ended.is_set():
            connection.is_dying = False
            unhandled = [connection.unhandled[number] for number in sorted(connection.unhandled)]
            self.engine.supervisor.died(actor, unhandled, connection.reason(), connection.last_output())


def _outcome(done: Any) -> Any:
    """The value or the error of a finished object."""
    error = done.exception()
    return done.result() if error is None else error


def _warn_if_nowhere(options: SpawnOptions) -> None:
    """Warn if no machine has what an actor needs: Ray waits until one joins."""
    if not options.resources:
        return
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    needs = {names.get(name, name): amount for name, amount in options.resources.items() if amount > 0}
    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    if not any(all(machine.get(name, 0) >= needs[name] for name in needs) for machine in machines):
        warnings.warn(
            f"resources={dict(options.resources)}: no machine of the cluster has these, so Ray waits until "
            f"one joins",
            stacklevel=4,
        )


def _ray_options(options: SpawnOptions) -> dict[str, Any]:
    own = {name: value for name, value in options.resources.items() if name in _OPTIONS}
    custom = {name: value for name, value in options.resources.items() if name not in _OPTIONS}
    return {"num_cpus": 0, **own, "resources": custom or None, "scheduling_strategy": "SPREAD"}
