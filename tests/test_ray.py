"""The ray engine: the rules of all engines, and what is particular to a cluster."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollstream as rs
from rollstream import flow
from rollstream.engine import Actor, ActorContext
from rollstream.flow import Context
from rollstream.testing.engines import ENGINE_CHECKS

ray = pytest.importorskip("ray")

CRASHED = "died: its worker process was killed or crashed"
pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize("rule", ENGINE_CHECKS)
def test_rule(rule: str) -> None:
    ENGINE_CHECKS[rule](lambda: rs.engine("ray"))


class Worker:
    """Numbers its items; each says who made it, in which life, and which version it was told."""

    def __init__(self, items: int = 10**9, size: int = 10, *, context: ActorContext):
        self.index, self.life = context.index, context.restarts
        self.left, self.size = items, size
        self.count = self.version = 0

    def sample(self, context: Context) -> dict[str, Any]:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        self.count += 1
        context.note(steps=1)
        return {
            "shard": self.index,
            "life": self.life,
            "count": self.count,
            "version": self.version,
            "pid": os.getpid(),
            "data": np.full(self.size, self.count),
        }

    def set_version(self, version: int) -> None:
        self.version = version

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def make(self, size: int) -> np.ndarray[Any, Any]:
        return np.arange(size)

    def total(self, array: np.ndarray[Any, Any]) -> tuple[int, bool]:
        return int(array.sum()), array.flags.writeable

    def train(self, item: Any) -> Any:
        return self.index, item

    def die(self, item: Any = None) -> None:
        print("these are my last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        time.sleep(600)

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def threads(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NPROC")}


def check_order(items: list[dict[str, Any]]) -> None:
    """Of every shard and life, items come in order, each once, with what belongs to them."""
    last: dict[int, tuple[int, int]] = {}
    for item in items:
        assert last.get(item["shard"], (0, 0)) < (item["life"], item["count"])
        last[item["shard"]] = (item["life"], item["count"])
        assert (item["data"] == item["count"]).all()


# Values and where they lie -----------------------------------------------------------------------


def fetched_here(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything this process asks Ray's store for."""
    got: list[Any] = []
    get = ray.get

    def spy(*args: Any, **kwargs: Any) -> Any:
        got.append(get(*args, **kwargs))
        return got[-1]

    monkeypatch.setattr(ray, "get", spy)
    return got


def test_a_result_given_to_another_actor_does_not_pass_through_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rs.engine("ray") as engine:
        first, second = engine.spawn(Worker, count=2)
        got = fetched_here(monkeypatch)
        array = first.call("make", 1_000_000)
        assert second.call("total", array).result() == (499999500000, False)
        assert all(type(value) is bytes and len(value) < 200 for value in got)
        assert array.result().sum() == 499999500000, "whoever asks for it has it"
        assert any(type(value) is tuple for value in got)


def test_put_is_one_object_however_many_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[Any] = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
    with rs.engine("ray") as engine:
        workers = engine.spawn(Worker, count=3)
        stored = engine.put(np.arange(1_000_000))
        replies = [worker.call("total", stored) for worker in workers]
        assert engine.results(replies) == [(499999500000, False)] * 3
        assert len(puts) == 1


def test_arrays_arrive_read_only_whatever_their_size() -> None:
    with rs.engine("ray") as engine:
        [worker] = engine.spawn(Worker)
        for size in (0, 10, 2_000, 100_000):
            array = worker.call("make", size).result()
            assert (array.shape, array.flags.writeable) == ((size,), False)
            assert worker.call("total", array).result() == (int(array.sum()), False)


def test_a_message_is_what_it_was_when_it_was_sent() -> None:
    with rs.engine("ray") as engine:
        [worker] = engine.spawn(Worker)
        for size in (1_000, 100_000):
            array = np.ones(size, int)
            reply = worker.call("total", array)
            array[:] = 7
            assert reply.result()[0] == size


def test_what_cannot_travel_is_named() -> None:
    with rs.engine("ray") as engine:
        [worker] = engine.spawn(Worker)
        with pytest.raises(rs.EngineError, match=r"argument 1 of Worker.train\['lock'\] is a lock"):
            worker.call("train", {"lock": threading.Lock()})
        assert worker.call("train", 1).result() == (0, 1)


def test_an_error_has_its_remote_traceback_as_cause() -> None:
    with rs.engine("ray") as engine:
        [worker] = engine.spawn(Worker, name="worker")
        with pytest.raises(ValueError, match="no such thing") as caught:
            worker.call("fail", "no such thing").result()
        assert "raise ValueError(text)" in str(caught.value.__cause__)
        assert "on worker, process" in str(caught.value.__cause__)


# The cluster -------------------------------------------------------------------------------------


def test_resources_are_passed_on() -> None:
    with rs.engine("ray") as engine:
        engine.spawn(Worker, count=8)
        assert ray.available_resources()["CPU"] == 4, "actors without resources count for nothing"
        engine.spawn(Worker, count=2, resources={"num_cpus": 1, "arm": 0.5})
        wait_for(lambda: (ray.available_resources()["CPU"], ray.available_resources()["arm"]) == (2, 1))
    wait_for(lambda: ray.available_resources()["CPU"] == 4)


def test_resources_that_no_machine_has_are_warned_of() -> None:
    with rs.engine("ray") as engine, pytest.warns(UserWarning, match=r"no machine .* has these"):  # noqa: PT031
        interrupt = (threading.main_thread().ident, signal.SIGINT)
        timer = threading.Timer(1.0, signal.pthread_kill, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.spawn(Worker, resources={"num_cpus": 400})
        timer.join()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def test_actors_use_one_thread_each() -> None:
    with rs.engine("ray") as engine:
        [worker] = engine.spawn(Worker)
        found = worker.call("threads").result()
        environment = engine.statistics().environment
        assert found == {name: environment[name] for name in found}
    with rs.engine("ray", threads=3) as engine:
        assert engine.spawn(Worker)[0].call("threads").result()["NPROC"] == "3"


def test_the_engine_joins_ray_and_leaves_it_running() -> None:
    for address in (None, "auto", ray.get_runtime_context().gcs_address):
        rs.engine("ray", address=address).close()
    assert ray.is_initialized()
    with pytest.raises(rs.EngineError, match=r"address='10.0.0.1:6379': this process is connected to Ray at"):
        rs.engine("ray", address="10.0.0.1:6379")
    with pytest.raises(rs.EngineError, match=r"Ray's client .* address='auto'"):
        rs.engine("ray", address="ray://10.0.0.1:10001")


OWN_CLUSTER = """
import os, ray
import rollstream as rs

class Worker:
    def __init__(self, context):
        print("hello from", context.name)
    def pid(self):
        return os.getpid()

with rs.engine("ray") as engine:
    with rs.engine("ray") as other:
        assert other.spawn(Worker, name="inner")[0].call("pid").result() > 0
    [worker] = engine.spawn(Worker, name="outer")
    assert worker.call("pid").result() > 0
assert not ray.is_initialized()
"""


def test_an_engine_starts_a_cluster_of_its_own_and_ends_it() -> None:
    script = subprocess.run([sys.executable, "-c", OWN_CLUSTER], capture_output=True, text=True, check=False)
    assert script.returncode == 0, script.stderr
    assert script.stderr == ""
    assert "hello from inner" in script.stdout, "what is printed at the very end may be too late"


def test_without_ray_the_error_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['ray'] = None; import rollstream as rs; rs.engine('ray')"
    script = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "EngineError: the ray engine needs Ray: pip install 'rollstream[ray]'" in script.stderr


# Books -------------------------------------------------------------------------------------------


class Peer:
    """Talks to others, and lets its callers wait."""

    def __init__(self) -> None:
        self.waiting: list[rs.Deferred[Any]] = []

    def meet(self, other: Actor[Any]) -> None:
        self.other = other

    def ask(self) -> Any:
        return self.other.call("ask").result()

    def ask_for(self, other: Actor[Any], method: str) -> Any:
        return other.call(method).result()

    def never(self) -> rs.Deferred[Any]:
        self.waiting.append(rs.Deferred())
        return self.waiting[-1]

    def answer(self, value: Any) -> None:
        while self.waiting:
            self.waiting.pop().resolve(value)

    def one(self) -> int:
        return 1

    def tell(self, other: Actor[Any], method: str) -> None:
        other.send(method)

    def slow(self) -> None:
        threading.Event().wait(0.3)

    def fail(self) -> None:
        raise ValueError("told")

    def large(self) -> np.ndarray[Any, Any]:
        return np.arange(100_000)

    def total_of(self, other: Actor[Any]) -> int:
        return int(other.call("large").result().sum())


def test_actors_that_wait_for_each_other_are_a_deadlock_of_the_flow() -> None:
    with rs.engine("ray") as engine:
        first, second = engine.spawn(Peer, count=2)
        first.send("meet", second)
        second.send("meet", first)
        plan = flow.from_actors([first], "ask").gather_async()
        with pytest.raises(rs.Deadlock, match=r"gather_async waits for .*Peer\[0\]"):
            next(plan)


def test_an_actor_that_waits_in_vain_does_not_keep_the_scope_open() -> None:
    for clean in (True, False):
        with rs.engine("ray") as engine:
            first, second = engine.spawn(Peer, count=2)
            waiting = first.call("ask_for", second, "never")
            assert second.call("one").result() == 1
            engine.close(drain=clean)
        with pytest.raises(rs.EngineClosed):
            waiting.result()


def test_a_deferred_reply_reaches_an_actor_that_waits_for_it() -> None:
    with rs.engine("ray") as engine:
        first, second = engine.spawn(Peer, count=2)
        waiting = first.call("ask_for", second, "never")
        array = np.arange(100_000)
        while not second.apply(lambda peer: len(peer.waiting)).result():
            pass
        second.send("answer", array)
        assert waiting.result().sum() == array.sum()


def test_what_actors_send_is_in_the_books_and_its_failures_surface() -> None:
    with rs.engine("ray") as engine:
        first, second = engine.spawn(Peer, count=2)
        assert first.call("total_of", second).result() == 4999950000
        first.call("tell", second, "slow").result()
        assert not engine.idle()
        engine._drain()
        assert [row.messages for row in engine.statistics().actors] == [2, 2]
    with pytest.raises(ValueError, match="told"), rs.engine("ray") as engine:  # noqa: PT012
        first, second = engine.spawn(Peer, count=2)
        first.call("tell", second, "fail").result()


def test_a_task_that_waits_for_a_deferred_reply_runs_once_it_is_there() -> None:
    with rs.engine("ray") as engine:
        [peer] = engine.spawn(Peer)
        total = engine.submit(sum, peer.call("never"))
        engine.wait([total], timeout=0.1)
        assert engine.idle()
        peer.send("answer", [1, 2])
        assert total.result() == 3


def test_a_task_cannot_use_a_handle() -> None:
    with rs.engine("ray") as engine:
        [peer] = engine.spawn(Peer)
        with pytest.raises(rs.EngineError, match="a task cannot use the handle Peer"):
            engine.submit(str, peer).result()


def test_a_task_that_dies_is_lost() -> None:
    with rs.engine("ray") as engine, pytest.raises(rs.ActorDied, match="_exit was lost"):
        engine.submit(os._exit, 1).result()


def test_calls_nobody_asks_for_are_settled_all_the_same() -> None:
    with rs.engine("ray") as engine:
        [peer] = engine.spawn(Peer)
        reply = peer.call("one")
        wait_for(lambda: reply.done)
        assert engine.idle()


# Deaths ------------------------------------------------------------------------------------------


def test_kills_during_a_flow() -> None:
    told: list[rs.ActorEvent] = []
    with rs.engine("ray", on_event=told.append) as engine:
        workers = engine.spawn(
            Worker, kwargs={"size": 20_000}, count=3, name="worker", on_failure="restart", max_restarts=100
        )
        plan = flow.from_actors(workers, "sample").gather_async(2).take(600)
        items: list[dict[str, Any]] = []
        killed: set[int] = set()
        for item in plan:
            items.append({**item, "data": item["data"].copy()})
            if len(items) % 100 == 50 and item["pid"] not in killed:
                killed.add(item["pid"])
                os.kill(item["pid"], signal.SIGKILL)
        statistics, actors = plan.statistics(), engine.statistics().actors
    check_order(items)
    assert len(items) == 600
    assert [event.outcome for event in told] == ["restarted"] * len(killed)
    assert sum(actor.restarts for actor in actors) == len(killed) >= 4
    assert statistics["gather_async"].lost == sum(event.lost for event in told)


def test_a_restarted_actor_has_its_arguments_and_its_sticky_messages() -> None:
    with rs.engine("ray") as engine:
        [worker] = engine.spawn(Worker, (1000,), name="worker", on_failure="restart")
        plan = flow.from_actors(worker, "sample").gather_async()
        assert next(plan)["life"] == 0
        worker.send("set_version", 1, sticky=True)
        worker.send("set_version", engine.put(2), sticky=True)
        assert worker.apply(lambda own: own.version).result() == 2, "so nothing else is under way"
        worker.send("die")
        items = [next(plan) for _ in range(3)]
        assert [(item["life"], item["version"]) for item in items[-2:]] == [(1, 2), (1, 2)]
        [row] = engine.statistics().actors
        assert (row.restarts, row.lost) == (1, 2 if items[0]["life"] else 1), "`die`, and an item asked for"
        [event] = engine.statistics().events
        assert (event.actor, event.outcome) == ("worker", "restarted")
        assert event.reason == CRASHED


def test_rows_stay_whole_when_an_actor_is_restarted() -> None:
    with rs.engine("ray") as engine:
        workers = engine.spawn(Worker, count=3, on_failure="restart")
        plan = flow.from_actors(workers, "sample").gather_sync()
        for step in range(12):
            row = next(plan)
            assert [item["shard"] for item in row] == [0, 1, 2]
            if step % 5 == 2:
                os.kill(row[step % 3]["pid"], signal.SIGKILL)
        assert sum(actor.restarts for actor in engine.statistics().actors) == 2


def test_a_dropped_shard_leaves_and_the_others_go_on() -> None:
    with rs.engine("ray") as engine:
        workers = engine.spawn(Worker, (30,), count=2, name="worker", on_failure="drop")
        items: list[dict[str, Any]] = []
        for item in flow.from_actors(workers, "sample").gather_async(2):
            items.append(item)
            for worker in workers:
                worker.send("set_version", len(items))  # a broadcast does not mind
            if len(items) == 10:
                os.kill(item["pid"], signal.SIGKILL)
        check_order(items)
        dropped = items[9]["shard"]
        shards = [item["shard"] for item in items]
        assert shards.count(1 - dropped) == 30 > shards.count(dropped)
        [event] = engine.statistics().events
        assert (event.actor, event.outcome) == (f"worker[{dropped}]", "dropped")
        with pytest.raises(rs.ActorDied, match="was killed or crashed"):
            workers[dropped].call("pid").result()


def test_an_actor_whose_death_is_raised_is_named_with_its_last_words() -> None:
    with pytest.raises(rs.ActorDied) as caught, rs.engine("ray") as engine:  # noqa: PT012
        workers = engine.spawn(Worker, count=2, name="worker")
        plan = flow.from_actors(workers, "sample").gather_async()
        next(plan)
        workers[1].send("die")
        for _ in plan:
            pass
    assert "worker[1] died" in str(caught.value)
    assert "these are my last words" in str(caught.value)


def test_the_death_of_an_idle_actor_is_noticed() -> None:
    told = threading.Event()
    with rs.engine("ray", on_event=lambda _: told.set()) as engine:
        [worker] = engine.spawn(Worker, on_failure="restart")
        pid = worker.call("pid").result()
        os.kill(pid, signal.SIGKILL)
        assert told.wait(20)
        assert worker.call("pid").result() != pid


def test_restarts_are_bounded() -> None:
    with rs.engine("ray") as engine:
        [worker] = engine.spawn(Worker, name="worker", on_failure="restart", max_restarts=1)
        with pytest.raises(rs.ActorDied, match=r"worker.die was lost"):
            worker.call("die").result()
        assert worker.call("pid").result() > 0
        with pytest.raises(rs.ActorDied, match=r"crashed, after 1 restarts"):
            worker.call("die").result()
        with pytest.raises(rs.ActorDied):
            worker.send("set_version", 1)
        assert [event.outcome for event in engine.statistics().events] == ["restarted", "raised"]


class Fragile:
    """Can be built once only."""

    def __init__(self, marker: str):
        if Path(marker).exists():
            raise OSError("the port is in use")
        Path(marker).touch()

    def die(self) -> None:
        os._exit(1)

    def sample(self) -> int:
        return 1


def test_an_actor_that_cannot_be_built_again_says_why(tmp_path: Path) -> None:
    with rs.engine("ray") as engine:
        [fragile] = engine.spawn(Fragile, (str(tmp_path / "built"),), on_failure="restart", max_restarts=2)
        plan = flow.from_actors(fragile, "sample").gather_async()
        next(plan)
        fragile.send("die")
        with pytest.raises(rs.ActorDied, match=r"could not be built again \(OSError: the port is in use\)"):
            list(plan)
        assert [event.restarts for event in engine.statistics().events] == [1, 2, 2]


def test_a_hung_actor_has_a_deadline() -> None:
    with rs.engine("ray") as engine:
        [worker] = engine.spawn(Worker, name="worker", on_failure="restart", deadline=0.5)
        plan = flow.from_actors(worker, "sample").gather_async()
        next(plan)
        worker.send("hang")
        while next(plan)["life"] == 0:
            pass
        [event] = engine.statistics().events
        assert event.reason == "hung: worker.hang took longer than 0.5 s"


def test_a_stage_goes_on_without_the_item_it_lost() -> None:
    with rs.engine("ray") as engine:
        learners = engine.spawn(Worker, count=2, on_failure="restart")

        def kill(item: int) -> int:
            if item == 7:
                learners[0].send("die")
            return item

        plan = flow.from_items(range(20)).for_each(kill).via(learners, "train", in_flight=2)
        results = list(plan)
        lost = plan.statistics()["Worker.train"].lost
        assert 0 <= lost <= 2
        assert len(results) == 20 - lost
        assert [index for index, _ in results] == [item % 2 for _, item in results]


# Nesting -----------------------------------------------------------------------------------------


class Source:
    def __init__(self) -> None:
        self.left = 2

    def next(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return 1


def three_levels(inner: str) -> list[Any]:
    def innermost() -> Iterator[int]:
        with rs.engine(inner) as engine:
            yield from flow.from_actors(engine.spawn(Source, count=2), "next").gather_sync().for_each(sum)

    def middle() -> Iterator[int]:
        with rs.engine("ray") as engine:
            yield from flow.from_factories(engine, [innermost]).gather_sync().for_each(sum)

    with rs.engine("ray") as engine:
        return list(flow.from_factories(engine, [middle, middle]).gather_sync())


@pytest.mark.parametrize("inner", ["processes", "ray"])
def test_flows_nest_three_levels_deep(inner: str) -> None:
    assert three_levels(inner) == [[2, 2], [2, 2]]


# The driver's own end ----------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
import numpy as np
import rollstream as rs
from rollstream import flow

class Worker:
    def sample(self):
        return os.getpid(), np.zeros(100_000)
    def pid(self):
        return os.getpid()
    def hang(self):
        time.sleep(600)

try:
    with rs.engine("ray") as engine:
        workers, [hung] = engine.spawn(Worker, count=2), engine.spawn(Worker)
        pids = [worker.call("pid").result() for worker in [*workers, hung]]
        hung.send("hang")
        for _ in flow.from_actors(workers, "sample").gather_async():
            if pids:
                print(*pids, flush=True)
                pids = None
except KeyboardInterrupt:
    sys.exit("interrupted")
"""


def run_script() -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_ctrl_c_ends_everything_within_two_seconds_with_one_line() -> None:
    process, pids = run_script()
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (output, errors) == ("", "interrupted\n")
    assert time.monotonic() - start < 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_killing_the_driver_leaves_no_actor() -> None:
    process, pids = run_script()
    process.kill()
    process.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


# Machines ----------------------------------------------------------------------------------------


def lose_a_node() -> None:
    """Three nodes on one machine; one of them dies in the middle of a flow."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=4) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    with rs.engine("ray", address="auto") as engine:
        workers = engine.spawn(
            Worker, kwargs={"size": 20_000}, count=6, on_failure="restart", resources={"num_cpus": 1}
        )
        homes = [worker.call("node").result() for worker in workers]
        assert len(set(homes)) == 3, "actors are spread over the nodes"
        total = workers[0].call("total", workers[1].call("make", 1_000_000)).result()
        assert total == (499999500000, False), "also from one node to another"
        dead = {index for index, home in enumerate(homes) if home == nodes[1].node_id}
        reborn: set[int] = set()
        plan = flow.from_actors(workers, "sample").gather_async(2)
        items: list[dict[str, Any]] = []
        for item in plan:
            items.append({**item, "data": item["data"].copy()})
            if len(items) == 100:
                cluster.remove_node(nodes[1], allow_graceful=False)
            if item["life"]:
                reborn.add(item["shard"])
            if reborn == dead:  # the others went on meanwhile
                break
        check_order(items)
        events = engine.statistics().events
        assert {event.actor for event in events} == {workers[index].name for index in dead}
        assert {event.reason for event in events} <= {
            "died with its node",
            "died: it can no longer be reached",
            CRASHED,
        }
        assert plan.statistics()["gather_async"].lost >= sum(event.lost for event in events) > 0
        assert nodes[1].node_id not in [worker.call("node").result() for worker in workers]
    ray.shutdown()
    cluster.shutdown()


def test_a_flow_goes_on_when_a_node_dies() -> None:
    code = "from test_ray import lose_a_node; lose_a_node()"
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        script = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env={**os.environ, "RAY_TMPDIR": folder},  # where others look for a cluster to join
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
    assert script.returncode == 0, script.stderr
