"""Actors that die: what is lost is counted, the rest goes on. Real processes, real signals, and chaos."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollstream as rs
from rollstream import flow
from rollstream.engine import ActorContext, ActorDied
from rollstream.flow import Context
from rollstream.testing import ChaosEngine


class Worker:
    """Numbers its items; each says who made it, in which life, and which version it was told."""

    def __init__(self, items: int = 10**9, size: int = 10, *, context: ActorContext):
        self.index, self.life = context.index, context.restarts
        self.left, self.size = items, size
        self.count = 0
        self.version = 0

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

    def train(self, item: Any) -> Any:
        return self.index, item

    def die(self, item: Any = None) -> None:
        print("these are my last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, code: int) -> None:
        os._exit(code)

    def hang(self) -> None:
        time.sleep(600)


def check_order(items: list[dict[str, Any]]) -> None:
    """Of every shard and life, items come in order, each once, with what belongs to them."""
    last: dict[int, tuple[int, int]] = {}
    for item in items:
        assert last.get(item["shard"], (0, 0)) < (item["life"], item["count"])
        last[item["shard"]] = (item["life"], item["count"])
        assert (item["data"] == item["count"]).all()


# Real processes ----------------------------------------------------------------------------------


def test_fifty_kills_during_ten_thousand_items() -> None:
    dice = random.Random(3)
    moments = set(dice.sample(range(100, 9_900), 50))
    with rs.engine("processes") as engine:
        workers = engine.spawn(
            Worker, kwargs={"size": 2000}, count=4, name="worker", on_failure="restart", max_restarts=100
        )
        plan = flow.from_actors(workers, "sample").gather_async(2).take(10_000)
        items: list[dict[str, Any]] = []
        killed: set[int] = set()
        for item in plan:
            items.append({**item, "data": item["data"].copy()})
            if len(items) in moments:
                alive = {worker.mailbox.process.pid for worker in workers} - killed
                victim = dice.choice(sorted(alive))
                killed.add(victim)
                os.kill(victim, signal.SIGKILL)
        statistics, actors = plan.statistics(), engine.statistics().actors
    check_order(items)
    assert len(items) == 10_000
    deaths = [event for event in statistics.events if event.outcome == "restarted"]
    assert len(deaths) == 50
    assert all(event.reason == "was killed by SIGKILL" for event in deaths)
    assert sum(actor.restarts for actor in actors) == len(deaths)
    assert statistics["gather_async"].lost == sum(event.lost for event in deaths)
    made = statistics["Worker.sample"].items
    assert 10_000 <= made <= 10_000 + 8, "what restarted shards had made before counts, too"


def test_a_restarted_actor_has_its_arguments_and_its_sticky_messages() -> None:
    told: list[rs.ActorEvent] = []
    with rs.engine("processes", on_event=told.append) as engine:
        [worker] = engine.spawn(Worker, (1000,), name="worker", on_failure="restart")
        plan = flow.from_actors(worker, "sample").gather_async()
        assert next(plan)["life"] == 0
        worker.send("set_version", 1, sticky=True)
        worker.send("set_version", engine.put(2), sticky=True)
        worker.send("die")
        items = [next(plan) for _ in range(3)]
        assert [(item["life"], item["version"]) for item in items[-2:]] == [(1, 2), (1, 2)]
        [row] = engine.statistics().actors
        assert (row.restarts, row.lost) == (1, 2 if items[0]["life"] else 1), "`die`, and an item asked for"
    [event] = told
    assert (event.actor, event.outcome, event.reason) == ("worker", "restarted", "was killed by SIGKILL")
    assert "worker was killed by SIGKILL: restarted" in str(event)


def test_rows_stay_whole_when_an_actor_is_restarted() -> None:
    with rs.engine("processes") as engine:
        workers = engine.spawn(Worker, count=3, on_failure="restart")
        plan = flow.from_actors(workers, "sample").gather_sync()
        for step in range(30):
            row = next(plan)
            assert [item["shard"] for item in row] == [0, 1, 2]
            if step % 10 == 5:
                os.kill(row[step % 3]["pid"], signal.SIGKILL)
        assert sum(actor.restarts for actor in engine.statistics().actors) == 3
        assert plan.statistics()["gather_sync"].items == 30


@pytest.mark.parametrize("gather", ["gather_sync", "gather_async"])
def test_a_dropped_shard_leaves_and_the_others_go_on(gather: str) -> None:
    with rs.engine("processes") as engine:
        workers = engine.spawn(Worker, (50,), count=3, name="worker", on_failure="drop")
        parallel = flow.from_actors(workers, "sample")
        rows = parallel.gather_sync() if gather == "gather_sync" else parallel.gather_async(2).batch(1)
        items: list[dict[str, Any]] = []
        dropped = -1
        for row in rows:
            items += row
            for worker in workers:
                worker.send("set_version", len(items))  # a broadcast does not mind
            if len(items) == 30:
                os.kill(items[-1]["pid"], signal.SIGKILL)
                dropped = items[-1]["shard"]
        check_order(items)
        shards = [item["shard"] for item in items]
        assert [shards.count(shard) for shard in range(3) if shard != dropped] == [50, 50]
        assert shards.count(dropped) < 50
        [event] = engine.statistics().events
        assert (event.actor, event.outcome) == (f"worker[{dropped}]", "dropped")
        with pytest.raises(rs.ActorDied, match="was killed by SIGKILL"):
            workers[dropped].call("pid").result()


def test_a_flow_ends_when_every_shard_was_dropped() -> None:
    with rs.engine("processes") as engine:
        workers = engine.spawn(Worker, count=2, on_failure="drop")
        plan = flow.from_actors(workers, "sample").gather_async()
        next(plan)
        for worker in workers:
            worker.send("die")
        assert len(list(plan)) < 10


def test_an_actor_whose_death_is_raised_is_named_with_its_last_words() -> None:
    with pytest.raises(rs.ActorDied) as caught, rs.engine("processes") as engine:  # noqa: PT012
        workers = engine.spawn(Worker, count=2, name="worker")
        plan = flow.from_actors(workers, "sample").gather_async()
        next(plan)
        workers[1].send("die")
        for _ in plan:
            pass
    text = str(caught.value)
    assert "worker[1] was killed by SIGKILL" in text
    assert "these are my last words" in text


def test_a_death_that_nobody_waits_for_is_raised_at_the_end() -> None:
    with pytest.raises(rs.ActorDied, match="ended with exit code 7"), rs.engine("processes") as engine:
        engine.spawn(Worker)[0].send("leave", 7)


def test_restarts_are_bounded() -> None:
    with rs.engine("processes") as engine:
        [worker] = engine.spawn(Worker, name="worker", on_failure="restart", max_restarts=2)
        for _ in range(2):
            with pytest.raises(rs.ActorDied, match=r"worker.die was lost"):
                worker.call("die").result()
            assert worker.call("pid").result() > 0
        with pytest.raises(rs.ActorDied, match=r"SIGKILL, after 2 restarts"):
            worker.call("die").result()
        with pytest.raises(rs.ActorDied):
            worker.send("set_version", 1)
        assert [event.outcome for event in engine.statistics().events] == ["restarted", "restarted", "raised"]


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
    with rs.engine("processes") as engine:
        [fragile] = engine.spawn(Fragile, (str(tmp_path / "built"),), on_failure="restart", max_restarts=2)
        plan = flow.from_actors(fragile, "sample").gather_async()
        next(plan)
        fragile.send("die")
        with pytest.raises(rs.ActorDied, match=r"could not be built again \(OSError: the port is in use\)"):
            list(plan)
        assert [event.restarts for event in engine.statistics().events] == [1, 2, 2]


def test_a_hung_actor_has_a_deadline() -> None:
    with rs.engine("processes") as engine:
        [worker] = engine.spawn(Worker, name="worker", on_failure="restart", deadline=0.5)
        plan = flow.from_actors(worker, "sample").gather_async()
        next(plan)
        worker.send("hang")
        while next(plan)["life"] == 0:
            pass
        [event] = engine.statistics().events
        assert event.reason == "hung: worker.hang took longer than 0.5 s"


class Leisurely:
    def work(self) -> str:
        time.sleep(0.2)  # the slowness under test
        return "done"


def test_a_deadline_is_for_one_message() -> None:
    with rs.engine("processes") as engine:
        [worker] = engine.spawn(Leisurely, on_failure="restart", deadline=0.7)
        assert engine.results([worker.call("work") for _ in range(5)]) == ["done"] * 5
        assert engine.statistics().events == ()


def test_restarts_on_purpose_do_not_count_as_deaths() -> None:
    with rs.engine("processes") as engine:
        [worker] = engine.spawn(Worker, on_failure="restart", max_restarts=1)
        for _ in range(3):
            worker.restart().result()
        with pytest.raises(rs.ActorDied) as caught:
            worker.call("die").result()
        assert caught.value.outcome == "restarted"
        assert engine.statistics().actors[0].restarts == 4


def test_a_stage_goes_on_without_the_item_it_lost() -> None:
    with rs.engine("processes") as engine:
        learners = engine.spawn(Worker, count=2, on_failure="restart")
        items = flow.from_items(range(20))

        def kill(item: int) -> int:
            if item == 7:
                learners[0].send("die")
            return item

        plan = items.for_each(kill).via(learners, "train", in_flight=2)
        results = list(plan)
        lost = plan.statistics()["Worker.train"].lost
        assert 0 <= lost <= 2
        assert len(results) == 20 - lost
        assert [index for index, _ in results] == [item % 2 for _, item in results]
        assert [item for _, item in results] == sorted(item for _, item in results)


def test_a_stage_deals_the_turns_of_a_dropped_actor_to_the_others() -> None:
    with rs.engine("processes") as engine:
        learners = engine.spawn(Worker, count=3, on_failure="drop")
        with pytest.raises(rs.ActorDied):
            learners[1].call("die").result()
        results = list(flow.from_items(range(9)).via(learners, "train", in_flight=2))
        assert [item for _, item in results] == list(range(9))
        assert {index for index, _ in results} == {0, 2}


def test_counters_of_a_callback_that_fails_surface() -> None:
    def broken(event: rs.ActorEvent) -> None:
        raise KeyError("in the callback")

    with pytest.raises(KeyError, match="in the callback"), rs.engine("processes", on_event=broken) as engine:
        engine.spawn(Worker, on_failure="restart")[0].send("die")


class Door:
    """Holds its guests until it is told to answer, and keeps others waiting."""

    def __init__(self) -> None:
        self.guests: list[rs.Deferred[Any]] = []

    def enter(self) -> rs.Deferred[Any]:
        self.guests.append(rs.Deferred())
        return self.guests[-1]

    def count(self) -> int:
        return len(self.guests)

    def admit(self, value: Any) -> None:
        while self.guests:
            self.guests.pop(0).resolve(value)

    def ask(self, other: rs.Actor[Any], method: str) -> Any:
        return other.call(method).result()

    def pid(self) -> int:
        return os.getpid()

    def make(self, fill: int) -> Any:
        return np.full(20_000, fill)

    def first(self, *arrays: Any) -> list[int]:
        return [int(array[0]) for array in arrays]

    def wait_for(self, path: str) -> None:
        while not Path(path).exists():
            pass


def kill(actor: rs.Actor[Any]) -> None:
    """Kill an actor, and wait until the engine has seen it."""
    before = len(actor.engine.events)
    os.kill(actor.mailbox.process.pid, signal.SIGKILL)
    while len(actor.engine.events) == before:
        threading.Event().wait(0.001)


def test_an_actor_killed_while_it_waits_can_ask_again() -> None:
    """The reply to its earlier life is not taken for that of its new one, nor does it count as waiting."""
    with rs.engine("processes") as engine:
        [door] = engine.spawn(Door, name="door")
        [asker] = engine.spawn(Door, name="asker", on_failure="restart")
        lost = asker.call("ask", door, "enter")
        while not door.call("count").result():
            pass
        kill(asker)
        with pytest.raises(rs.ActorDied, match=r"asker.ask was lost"):
            lost.result()
        again = asker.call("ask", door, "enter")
        assert not engine.idle()
        while door.call("count").result() < 2:
            pass
        door.send("admit", "come in")
        assert again.result(timeout=20) == "come in"


def test_replies_held_back_by_a_dead_actor_are_lost_with_it() -> None:
    with rs.engine("processes") as engine:
        [door] = engine.spawn(Door, name="door", on_failure="restart")
        reply = door.call("enter")
        door.call("count").result()
        kill(door)
        with pytest.raises(rs.ActorDied, match=r"door.enter was lost: door was killed by SIGKILL") as caught:
            reply.result()
        assert caught.value.outcome == "restarted"


def test_what_a_dead_actor_made_can_still_be_read(tmp_path: Path) -> None:
    with rs.engine("processes") as engine:
        [maker] = engine.spawn(Door, name="maker", on_failure="drop")
        [reader] = engine.spawn(Door, name="reader")
        made = maker.call("make", 7)
        assert made.result()[0] == 7
        busy = reader.call("wait_for", str(tmp_path / "go"))
        use = reader.call("first", made)  # in the reader's mailbox, not yet opened
        kill(maker)
        (tmp_path / "go").touch()
        busy.result()
        assert use.result() == [7]


def test_arrays_of_several_actors_in_one_message_are_not_mixed_up() -> None:
    with rs.engine("processes") as engine:
        *makers, reader = engine.spawn(Door, count=4)
        made = [maker.call("make", number) for number, maker in enumerate(makers)]
        assert reader.call("first", *made).result() == [0, 1, 2]


def test_a_message_held_back_for_an_actor_that_dies_does_not_hang_the_engine() -> None:
    with pytest.raises(rs.ActorDied, match="held was killed"), rs.engine("processes") as engine:  # noqa: PT012
        [door], [held] = engine.spawn(Door, name="door"), engine.spawn(Door, name="held")
        held.send("first", door.call("enter"))
        door.call("count").result()
        kill(held)
        door.send("admit", None)


def test_what_a_dead_actor_was_lent_is_free_again() -> None:
    with rs.engine("processes", pool_bytes=1 << 20) as engine:
        holder, other = engine.spawn(Worker, count=2, on_failure="drop")
        large = np.zeros(3 << 18, np.uint8)
        holder.apply(lambda worker, array: setattr(worker, "held", array), large).result()
        with pytest.raises(rs.ActorDied):
            holder.call("die").result()
        other.apply(lambda worker, array: None, large).result()
        assert engine.statistics().grown == 0


class Victim(Worker):
    def block(self, fifo: str) -> None:
        Path(fifo).read_text()

    def take(self, fifo: str, array: Any) -> None:
        Path(fifo).read_text()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_driver_that_waits_for_room_goes_on_when_who_held_it_dies(tmp_path: Path) -> None:
    """Another thread serves meanwhile, so nothing but the death can wake the one that waits."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    os.mkfifo(first)
    os.mkfifo(second)
    with rs.engine("processes", pool_bytes=1 << 20) as engine:
        other, victim = engine.spawn(Victim, count=2, on_failure="drop")
        blocked = other.call("block", first)
        serving = threading.Thread(target=blocked.result)
        serving.start()
        large = np.zeros(3 << 18, np.uint8)
        victim.send("take", second, large)
        threading.Thread(target=lambda: Path(second).write_text("die")).start()
        victim.send("take", second, large)  # does not fit before the first is gone
        Path(first).write_text("go on")
        serving.join()
        assert engine.statistics().grown == 0


def test_failing_calls_do_not_hold_memory() -> None:
    with rs.engine("processes", pool_bytes=8 << 20) as engine:
        [door] = engine.spawn(Door)
        for _ in range(20):
            with pytest.raises(AttributeError):
                door.apply(lambda instance, array: array.nothing, np.zeros(1 << 18)).result()
        assert engine.statistics().grown == 0


# The driver's own end ----------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
import numpy as np
import rollstream as rs
from rollstream import flow

class Worker:
    def sample(self):
        return os.getpid(), np.zeros(100_000)
    def hang(self):
        time.sleep(600)

class Nest:
    def sample(self):
        if not hasattr(self, "plan"):
            self.engine = rs.engine("processes")
            self.plan = flow.from_actors(self.engine.spawn(Worker), "sample").gather_async()
        return next(self.plan)

try:
    with rs.engine("processes") as engine:
        workers, hung = engine.spawn(Worker, count=2), engine.spawn(Worker, count=1)
        [nest] = engine.spawn(Nest)
        hung[0].send("hang")
        inner = nest.call("sample").result()[0]
        for pid, _ in flow.from_actors(workers, "sample").gather_async():
            if inner:
                print(inner, *(link.process.pid for link in engine._links), flush=True)
                inner = None
except KeyboardInterrupt:
    sys.exit("interrupted")
"""


def run_script() -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"some of {pids} live on"
        threading.Event().wait(0.02)


def test_killing_the_driver_leaves_no_process_and_no_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    process, pids = run_script()
    assert len(pids) == 5
    process.kill()
    process.communicate()
    wait_until_gone(pids, 5)
    assert set(os.listdir("/dev/shm")) <= before


def test_ctrl_c_ends_everything_within_two_seconds_with_one_line() -> None:
    process, pids = run_script()
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (output, errors) == ("", "interrupted\n")
    assert time.monotonic() - start < 2
    wait_until_gone(pids, 2)


# Chaos: any order of events, with deaths ---------------------------------------------------------


@pytest.mark.parametrize("policy", ["restart", "drop"])
def test_any_order_of_deaths(policy: Any) -> None:
    for seed in range(200):
        with ChaosEngine(seed, deaths=0.03) as engine:
            workers = engine.spawn(
                Worker, (10**6,), count=3, on_failure=policy, max_restarts=10**6, name="worker"
            )
            [learner] = engine.spawn(Worker, name="learner", on_failure="restart", max_restarts=10**6)
            plan = flow.from_actors(workers, "sample").gather_async(2).via(learner, "train", in_flight=2)
            plan = plan.for_each(lambda pair: pair[1]).take(60)
            items = list(plan)
            check_order(items)
            statistics = plan.statistics()
            assert len(items) == 60 or all(worker.gone for worker in workers)
            given = statistics["gather_async"].items
            assert given - statistics["Worker.train"].lost - 2 <= len(items) <= given
            assert statistics["gather_async"].lost <= sum(worker.lost for worker in workers)


def test_a_flow_that_dropped_a_shard_can_be_saved_and_goes_on_without_it() -> None:
    with ChaosEngine(5) as engine:
        workers = engine.spawn(Worker, (20,), count=3, on_failure="drop", name="worker")
        plan = flow.from_actors(workers, "sample").gather_sync()
        before = [next(plan) for _ in range(5)]
        engine.kill(workers[1])
        assert [len(next(plan)) for _ in range(3)] == [2, 2, 2]
        state = plan.state_dict()
    with ChaosEngine(6) as engine:
        workers = engine.spawn(Worker, (20,), count=3, on_failure="drop", name="worker")
        plan = flow.from_actors(workers, "sample").gather_sync()
        plan.load_state_dict(state)
        assert len(before) == 5
        assert {item["shard"] for row in plan for item in row} == {0, 2}
        assert plan.statistics()["gather_sync"].lost == state["nodes"]["gather_sync"]["lost"] == 1


class Saved(Worker):
    """Dies the first time it is asked for its state, or whether that is written."""

    def __init__(self, *args: Any, when: str, context: ActorContext):
        super().__init__(context=context)
        self._when = when

    def state_dict(self) -> dict[str, Any]:
        self._die("asked")
        return {"life": self.life}

    def finish_save(self) -> str | None:
        self._die("written")
        return None

    def _die(self, when: str) -> None:
        if (self._when, self.life) == (when, 0):
            self.die()


@pytest.mark.parametrize("on_failure", ["restart", "drop", "raise"])
@pytest.mark.parametrize("when", ["asked", "written"])
def test_an_actor_that_dies_while_a_flow_is_saved(when: str, on_failure: Any) -> None:
    with rs.engine("processes") as engine:
        make = partial(engine.spawn, Saved, on_failure=on_failure)
        workers = [*make(name="steady", kwargs={"when": ""}), *make(name="frail", kwargs={"when": when})]
        plan = flow.from_actors(workers, "sample").gather_sync()
        assert len(next(plan)) == 2
        if on_failure == "raise":
            with pytest.raises(ActorDied, match="frail was killed by SIGKILL"):
                (plan.state_dict if when == "asked" else plan.finish_save)()
            return
        actors = plan.state_dict()["actors"]
        assert plan.finish_save() == []
        assert actors["steady"] == {"life": 0}
        if when == "written":
            assert actors["frail"] == {"life": 0}
        else:
            assert actors.get("frail") == ({"life": 1} if on_failure == "restart" else None)
        assert len(next(plan)) == (2 if on_failure == "restart" else 1)


def test_rows_in_any_order_of_deaths() -> None:
    for seed in range(200):
        with ChaosEngine(seed, deaths=0.05) as engine:
            workers = engine.spawn(Worker, count=3, on_failure="restart", max_restarts=10**6)
            plan = flow.from_actors(workers, "sample").gather_sync().take(20)
            rows = list(plan)
            assert [[item["shard"] for item in row] for row in rows] == [[0, 1, 2]] * 20
            check_order([item for row in rows for item in row])


def test_a_rate_limiter_keeps_its_ratio_through_deaths() -> None:
    for seed in range(100):
        with ChaosEngine(seed, deaths=0.05) as engine:
            writers = engine.spawn(Worker, count=2, on_failure="restart", max_restarts=10**6)
            readers = engine.spawn(Worker, count=2, on_failure="restart", max_restarts=10**6)
            inserts, samples = flow.limit_ratio(
                flow.from_actors(writers, "sample").gather_async(2),
                flow.from_actors(readers, "sample").gather_async(2),
                2,
                min_size=4,
                error_buffer=4,
            )
            left, right = inserts.for_each(lambda _: "i"), samples.for_each(lambda _: "s")
            outputs = list(flow.union_async([left, right]).take(90))
            assert abs(outputs.count("s") - 2 * (outputs.count("i") - 4)) <= 4 + 2 + 8
