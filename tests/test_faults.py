"""Actors that die, wherever they live: losses are counted, and the rest continues."""

import os
import random
import signal
import textwrap
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripts
from faulty import Deaths, Worker, check_order, kill

import rollstream as rs
from rollstream import flow
from rollstream.engine import ActorContext, ActorDied
from rollstream.testing import chaos_engine
from rollstream.testing import kill as kill_actor

KILLED = {"processes": "was killed by SIGKILL", "ray": "died: its worker process was killed or crashed"}
EXITED = {"processes": "ended with exit code 7", "ray": "died: its worker process was killed or crashed"}
"""What each engine knows of a death."""

everywhere = pytest.mark.parametrize("name", ["processes", "ray"])


# Sources -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kills", "count"),
    [
        ("processes", 10, 2_000),
        pytest.param("processes", 50, 10_000, marks=pytest.mark.slow),
        ("ray", 6, 600),
    ],
)
def test_kills_during_a_flow(name: str, kills: int, count: int) -> None:
    dice = random.Random(3)
    moments = sorted(dice.sample(range(count // 100, count - count // 100), kills))
    deaths, items = Deaths(), list[dict[str, Any]]()
    with rs.engine(name, on_event=deaths) as engine:
        workers = engine.spawn(
            Worker, kwargs={"size": 2000}, count=4, name="worker", on_failure="restart", max_restarts=100
        )
        plan = flow.from_actors(workers, "sample").gather_async(2)
        killed: set[int] = set()
        while len(items) < count or len(deaths) < kills:
            item = next(plan)
            items.append({**item, "data": item["data"].copy()})
            if moments and moments[0] <= len(items) and item["pid"] not in killed:
                del moments[0]
                killed.add(item["pid"])
                os.kill(item["pid"], signal.SIGKILL)
        items += [next(plan) for _ in range(50)]  # the flow has been told of the last death, too
        statistics, actors = plan.statistics(), engine.statistics().actors
    check_order(items)
    assert [(event.outcome, event.reason) for event in deaths] == [("restarted", KILLED[name])] * kills
    assert sum(actor.restarts for actor in actors) == kills
    assert statistics["gather_async"].lost == sum(event.lost for event in deaths)
    made = statistics["Worker.sample"].items
    assert len(items) <= made <= len(items) + 8, "what restarted shards had made before counts, too"


@pytest.mark.quick
@everywhere
def test_a_restarted_actor_has_its_arguments_and_its_sticky_messages(name: str) -> None:
    deaths = Deaths()
    with rs.engine(name, on_event=deaths) as engine:
        [worker] = engine.spawn(Worker, (1000,), name="worker", on_failure="restart")
        plan = flow.from_actors(worker, "sample").gather_async()
        assert next(plan)["incarnation"] == 0
        worker.send("set_version", 1, sticky=True)
        worker.send("set_version", engine.put(2), sticky=True)
        assert worker.apply(lambda own: own.version).result() == 2, "so nothing else is in flight"
        worker.send("die")
        items = [next(plan) for _ in range(3)]
        assert [(item["incarnation"], item["version"]) for item in items[-2:]] == [(1, 2), (1, 2)]
        [row] = engine.statistics().actors
        lost = 2 if items[0]["incarnation"] else 1
        assert (row.restarts, row.lost) == (1, lost), "`die`, and an item asked for"
    [event] = deaths
    assert (event.actor, event.outcome, event.reason) == ("worker", "restarted", KILLED[name])
    assert f"worker {KILLED[name]}: restarted" in str(event)


@everywhere
def test_rows_stay_whole_when_an_actor_is_restarted(name: str) -> None:
    with rs.engine(name) as engine:
        workers = engine.spawn(Worker, count=3, on_failure="restart")
        plan = flow.from_actors(workers, "sample").gather_sync()
        for step in range(12):
            row = next(plan)
            assert [item["shard"] for item in row] == [0, 1, 2]
            if step % 5 == 2:
                os.kill(row[step % 3]["pid"], signal.SIGKILL)
        assert sum(actor.restarts for actor in engine.statistics().actors) == 2
        assert plan.statistics()["gather_sync"].items == 12


@everywhere
@pytest.mark.parametrize("gather", ["gather_sync", "gather_async"])
def test_the_others_continue_without_a_dropped_shard(name: str, gather: str) -> None:
    with rs.engine(name) as engine:
        workers = engine.spawn(Worker, (50,), count=3, name="worker", on_failure="drop")
        parallel = flow.from_actors(workers, "sample")
        rows = parallel.gather_sync() if gather == "gather_sync" else parallel.gather_async(2).batch(1)
        items: list[dict[str, Any]] = []
        dropped = -1
        for row in rows:
            items += row
            for worker in workers:
                worker.send("set_version", len(items))  # a broadcast reaches those that are left
            if len(items) == 30:
                os.kill(items[-1]["pid"], signal.SIGKILL)
                dropped = items[-1]["shard"]
        check_order(items)
        shards = [item["shard"] for item in items]
        assert [shards.count(shard) for shard in range(3) if shard != dropped] == [50, 50]
        assert shards.count(dropped) < 50
        [event] = engine.statistics().events
        assert (event.actor, event.outcome) == (f"worker[{dropped}]", "dropped")
        with pytest.raises(rs.ActorDied, match=KILLED[name]):
            workers[dropped].call("pid").result()


@everywhere
def test_a_flow_ends_when_every_shard_was_dropped(name: str) -> None:
    with rs.engine(name) as engine:
        workers = engine.spawn(Worker, count=2, on_failure="drop")
        plan = flow.from_actors(workers, "sample").gather_async()
        next(plan)
        for worker in workers:
            worker.send("die")
        assert len(list(plan)) < 10


@pytest.mark.quick
@everywhere
def test_an_actor_whose_death_is_raised_is_named_with_its_last_words(name: str) -> None:
    with pytest.raises(rs.ActorDied) as caught, rs.engine(name) as engine:  # noqa: PT012
        workers = engine.spawn(Worker, count=2, name="worker")
        plan = flow.from_actors(workers, "sample").gather_async()
        next(plan)
        workers[1].send("die")
        for _ in plan:
            pass
    assert f"worker[1] {KILLED[name]}" in str(caught.value)
    assert "these are my last words" in str(caught.value)


# Supervision -------------------------------------------------------------------------------------


@everywhere
def test_a_death_that_nobody_waits_for_is_raised_at_the_end(name: str) -> None:
    with pytest.raises(rs.ActorDied, match=EXITED[name]), rs.engine(name) as engine:
        engine.spawn(Worker)[0].send("exit", 7)


@everywhere
def test_the_death_of_an_idle_actor_is_noticed(name: str) -> None:
    deaths = Deaths()
    with rs.engine(name, on_event=deaths) as engine:
        [worker] = engine.spawn(Worker, on_failure="restart")
        pid = worker.call("pid").result()
        os.kill(pid, signal.SIGKILL)
        deaths.wait()
        assert worker.call("pid").result() != pid


@everywhere
def test_restarts_are_bounded(name: str) -> None:
    with rs.engine(name) as engine:
        [worker] = engine.spawn(Worker, name="worker", on_failure="restart", max_restarts=2)
        for _ in range(2):
            with pytest.raises(rs.ActorDied, match=r"worker.die was lost"):
                worker.call("die").result()
            assert worker.call("pid").result() > 0
        with pytest.raises(rs.ActorDied, match=f"{KILLED[name]}, after 2 restarts"):
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


@everywhere
def test_an_actor_that_cannot_be_built_again_says_why(name: str, tmp_path: Path) -> None:
    with rs.engine(name) as engine:
        [fragile] = engine.spawn(Fragile, (str(tmp_path / "built"),), on_failure="restart", max_restarts=2)
        plan = flow.from_actors(fragile, "sample").gather_async()
        next(plan)
        fragile.send("die")
        with pytest.raises(rs.ActorDied, match=r"could not be built again \(OSError: the port is in use\)"):
            list(plan)
        assert [event.restarts for event in engine.statistics().events] == [1, 2, 2]


@everywhere
def test_a_hung_actor_has_a_deadline(name: str) -> None:
    with rs.engine(name) as engine:
        [worker] = engine.spawn(Worker, name="worker", on_failure="restart", deadline=2)
        plan = flow.from_actors(worker, "sample").gather_async()
        next(plan)
        worker.send("hang")
        while next(plan)["incarnation"] == 0:
            pass
        assert engine.statistics().events[0].reason == "hung: worker.hang took longer than 2 s"


class Leisurely:
    def work(self) -> str:
        threading.Event().wait(0.5)  # the slowness under test
        return "done"


@pytest.mark.slow
@everywhere
def test_a_deadline_is_for_one_message(name: str) -> None:
    with rs.engine(name) as engine:
        [worker] = engine.spawn(Leisurely, on_failure="restart", deadline=5)
        assert engine.results([worker.call("work") for _ in range(12)]) == ["done"] * 12
        assert engine.statistics().events == ()


def test_a_callback_that_fails_surfaces() -> None:
    def broken(event: rs.ActorEvent) -> None:
        raise KeyError("in the callback")

    with pytest.raises(KeyError, match="in the callback"), rs.engine("processes", on_event=broken) as engine:
        engine.spawn(Worker, on_failure="restart")[0].send("die")


# Stages ------------------------------------------------------------------------------------------


@everywhere
def test_a_stage_continues_without_the_item_it_lost(name: str) -> None:
    with rs.engine(name) as engine:
        learners = engine.spawn(Worker, count=2, on_failure="restart")

        def kill_at_7(item: int) -> int:
            if item == 7:
                learners[0].send("die")
            return item

        plan = flow.from_items(range(20)).for_each(kill_at_7).via(learners, "train", in_flight=2)
        results = list(plan)
        lost = plan.statistics()["Worker.train"].lost
        assert [event.actor for event in engine.events] == [learners[0].name]
        assert 0 <= lost <= 2, "at most what was in flight"
        assert len(results) == 20 - lost
        assert [index for index, _ in results] == [item % 2 for _, item in results]
        assert [item for _, item in results] == sorted(item for _, item in results)


@everywhere
def test_a_stage_deals_the_turns_of_a_dropped_actor_to_the_others(name: str) -> None:
    with rs.engine(name) as engine:
        learners = engine.spawn(Worker, count=3, on_failure="drop")
        with pytest.raises(rs.ActorDied):
            learners[1].call("die").result()
        results = list(flow.from_items(range(9)).via(learners, "train", in_flight=2))
        assert [item for _, item in results] == list(range(9))
        assert {index for index, _ in results} == {0, 2}


# Messages ----------------------------------------------------------------------------------------


class Door(Worker):
    """Holds its guests until it is told to answer."""

    def __init__(self, *, context: ActorContext):
        super().__init__(context=context)
        self.guests: list[rs.Deferred[Any]] = []

    def enter(self) -> rs.Deferred[Any]:
        self.guests.append(rs.Deferred())
        return self.guests[-1]

    def admit(self, value: Any) -> None:
        while self.guests:
            self.guests.pop(0).resolve(value)

    def make(self, fill: int) -> Any:
        return np.full(20_000, fill)

    def first(self, *arrays: Any) -> list[int]:
        return [int(array[0]) for array in arrays]


@everywhere
def test_replies_deferred_by_a_dead_actor_are_lost_with_it(name: str) -> None:
    with rs.engine(name) as engine:
        [door] = engine.spawn(Door, name="door", on_failure="restart")
        reply = door.call("enter")
        kill(door)
        with pytest.raises(rs.ActorDied, match=f"door.enter was lost: door {KILLED[name]}") as caught:
            reply.result()
        assert caught.value.outcome == "restarted"


@everywhere
def test_the_arrays_of_a_dead_actor_can_still_be_read(name: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    deaths = Deaths()
    with rs.engine(name, on_event=deaths) as engine:
        [maker] = engine.spawn(Door, name="maker", on_failure="drop")
        [reader] = engine.spawn(Door, name="reader")
        made = maker.call("make", 7)
        assert made.result()[0] == 7
        reader.send("read", str(fifo))
        use = reader.call("first", made)  # in the reader's mailbox, not yet opened
        kill(maker)
        deaths.wait()
        fifo.write_text("continue")
        assert use.result() == [7]


@everywhere
def test_a_message_held_back_for_an_actor_that_dies_does_not_hang_the_engine(name: str) -> None:
    deaths = Deaths()
    with pytest.raises(rs.ActorDied, match="held"), rs.engine(name, on_event=deaths) as engine:  # noqa: PT012
        [door], [held] = engine.spawn(Door, name="door"), engine.spawn(Door, name="held")
        pid = held.call("pid").result()
        held.send("first", door.call("enter"))
        os.kill(pid, signal.SIGKILL)
        deaths.wait()
        door.send("admit", None)


# States ------------------------------------------------------------------------------------------


class Saved(Worker):
    """Dies the first time it is asked for its state, or whether that is written."""

    def __init__(self, *args: Any, when: str, context: ActorContext):
        super().__init__(context=context)
        self._when = when

    def state_dict(self) -> dict[str, Any]:
        self._die("asked")
        return {"incarnation": self.incarnation}

    def wait_saved(self) -> str | None:
        self._die("written")
        return None

    def _die(self, when: str) -> None:
        if (self._when, self.incarnation) == (when, 0):
            self.die()


@everywhere
@pytest.mark.parametrize("on_failure", ["restart", "drop", "raise"])
@pytest.mark.parametrize("when", ["asked", "written"])
def test_an_actor_that_dies_while_a_flow_is_saved(name: str, when: str, on_failure: Any) -> None:
    with rs.engine(name) as engine:
        make = partial(engine.spawn, Saved, on_failure=on_failure)
        workers = [*make(name="steady", kwargs={"when": ""}), *make(name="frail", kwargs={"when": when})]
        plan = flow.from_actors(workers, "sample").gather_sync()
        assert len(next(plan)) == 2
        if on_failure == "raise":
            with pytest.raises(ActorDied, match=f"frail {KILLED[name]}"):
                (plan.state_dict if when == "asked" else plan.wait_saved)()
            return
        actors = plan.state_dict()["actors"]
        assert plan.wait_saved() == []
        assert actors["steady"] == {"incarnation": 0}
        if when == "written":
            assert actors["frail"] == {"incarnation": 0}
        else:
            assert actors.get("frail") == ({"incarnation": 1} if on_failure == "restart" else None)
        assert len(next(plan)) == (2 if on_failure == "restart" else 1)


# The driver's own end ----------------------------------------------------------------------------

SCRIPT = """
import os, sys, threading
import numpy as np
import rollstream as rs
from rollstream import flow

class Worker:
    def sample(self):
        return np.zeros(100_000)
    def pid(self):
        return os.getpid()
    def hang(self):
        threading.Event().wait()

class Nest(Worker):
    def inner(self):
        self.engine = rs.engine("processes")
        [worker] = self.engine.spawn(Worker)
        self.plan = flow.from_actors(worker, "sample").gather_async()
        next(self.plan)
        return worker.call("pid").result()

try:
    with rs.engine(sys.argv[1]) as engine:
        workers, [hung], [nest] = engine.spawn(Worker, count=2), engine.spawn(Worker), engine.spawn(Nest)
        pids = [nest.call("inner").result(), *(a.call("pid").result() for a in [*workers, hung, nest])]
        hung.send("hang")
        for _ in flow.from_actors(workers, "sample").gather_async():
            if pids:
                print(*pids, flush=True)
                pids = None
except KeyboardInterrupt:
    sys.exit("interrupted")
"""


@everywhere
def test_killing_the_driver_leaves_no_process(name: str) -> None:
    with scripts.started("-c", SCRIPT, name) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 5
        process.kill()
    scripts.eventually(lambda: scripts.ended(pids))  # shared memory is looked for after every test


@everywhere
def test_ctrl_c_ends_everything_with_one_line(name: str) -> None:
    with scripts.started("-c", SCRIPT, name) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "interrupted\n")
    scripts.eventually(lambda: scripts.ended(pids))


# Chaos: any order of events, with deaths ---------------------------------------------------------


seeds = pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 500), marks=pytest.mark.slow)], ids=str
)


@seeds
@pytest.mark.parametrize("policy", ["restart", "drop"])
def test_any_order_of_deaths(policy: Any, seeds: range) -> None:
    for seed in seeds:
        with chaos_engine(seed, deaths=0.03) as engine:
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
    with chaos_engine(5) as engine:
        workers = engine.spawn(Worker, (20,), count=3, on_failure="drop", name="worker")
        plan = flow.from_actors(workers, "sample").gather_sync()
        before = [next(plan) for _ in range(5)]
        kill_actor(workers[1])
        assert [len(next(plan)) for _ in range(3)] == [2, 2, 2]
        state = plan.state_dict()
    with chaos_engine(6) as engine:
        workers = engine.spawn(Worker, (20,), count=3, on_failure="drop", name="worker")
        plan = flow.from_actors(workers, "sample").gather_sync()
        plan.load_state_dict(state)
        assert len(before) == 5
        assert {item["shard"] for row in plan for item in row} == {0, 2}
        assert plan.statistics()["gather_sync"].lost == state["nodes"]["gather_sync"]["lost"] == 1


@seeds
def test_rows_in_any_order_of_deaths(seeds: range) -> None:
    for seed in seeds:
        with chaos_engine(seed, deaths=0.05) as engine:
            workers = engine.spawn(Worker, count=3, on_failure="restart", max_restarts=10**6)
            plan = flow.from_actors(workers, "sample").gather_sync().take(20)
            rows = list(plan)
            assert [[item["shard"] for item in row] for row in rows] == [[0, 1, 2]] * 20
            check_order([item for row in rows for item in row])


@seeds
def test_a_rate_limiter_keeps_its_ratio_through_deaths(seeds: range) -> None:
    for seed in seeds:
        with chaos_engine(seed, deaths=0.05) as engine:
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


@everywhere
def test_a_stopped_actor_does_not_outlive_a_killed_driver(name: str) -> None:
    script = """
        import os, signal, sys
        import rollstream as rs

        class Worker:
            def pid(self):
                return os.getpid()
            def stop(self):
                os.kill(os.getpid(), signal.SIGSTOP)

        with rs.engine(sys.argv[1]) as engine:
            [worker] = engine.spawn(Worker)
            print(worker.call("pid").result(), flush=True)
            worker.call("stop").result()
    """
    with scripts.started("-c", textwrap.dedent(script), name) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        scripts.eventually(lambda: scripts.state(pid) == "T", "the stop")
        driver.kill()
    scripts.eventually(lambda: scripts.ended([pid]), "the end of the worker")
