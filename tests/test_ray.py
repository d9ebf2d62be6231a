"""The ray engine: the rules of all engines, and what is particular to a cluster."""

import os
import signal
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripts
from faulty import Worker, check_order

import rollstream as rs
from rollstream import flow
from rollstream.testing.engines import ENGINE_CHECKS

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.usefixtures("ray_cluster")
QUICK_RULES = ("calls_reply", "errors_reach_the_caller", "messages_keep_their_order")


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=pytest.mark.quick if rule in QUICK_RULES else ()) for rule in ENGINE_CHECKS],
)
def test_rule(rule: str) -> None:
    ENGINE_CHECKS[rule](lambda: rs.engine("ray"))


# The cluster -------------------------------------------------------------------------------------


def test_resources_are_passed_on() -> None:
    def available() -> tuple[float, float]:
        resources = ray.available_resources()
        return resources["CPU"], resources["arm"]

    with rs.engine("ray") as engine:
        engine.spawn(Worker, count=4)
        assert available() == (4, 2), "actors without resources count for nothing"
        engine.spawn(Worker, count=2, resources={"num_cpus": 1, "arm": 0.5})
        scripts.eventually(lambda: available() == (2, 1))
    scripts.eventually(lambda: available() == (4, 2))


def test_resources_that_no_machine_has_are_warned_of_and_ctrl_c_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []

    def interrupt(message: Any, *_: Any) -> None:
        shown.append(str(message))
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()

    monkeypatch.setattr(warnings, "showwarning", interrupt)
    with rs.engine("ray") as engine, warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            engine.spawn(Worker, resources={"num_cpus": 400})
    assert "no machine of the cluster has these" in shown[0]


def environment(worker: Worker) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NPROC")}


def test_actors_use_one_thread_each() -> None:
    with rs.engine("ray") as engine:
        [worker] = engine.spawn(Worker)
        found = worker.apply(environment).result()
        assert found == {name: engine.statistics().environment[name] for name in found}
    with rs.engine("ray", threads=3) as engine:
        assert engine.spawn(Worker)[0].apply(environment).result()["NPROC"] == "3"


@pytest.mark.quick
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


@pytest.mark.slow
def test_an_engine_starts_a_cluster_of_its_own_and_ends_it() -> None:
    done = scripts.run_code(OWN_CLUSTER)
    assert done.stderr == ""
    assert "hello from inner" in done.stdout, "what is printed at the very end may be too late"


@pytest.mark.quick
def test_without_ray_the_error_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['ray'] = None; import rollstream as rs; rs.engine('ray')"
    errors = scripts.run_code(code, check=False).stderr
    assert "EngineError: the ray engine needs Ray: pip install 'rollstream[ray]'" in errors


# Machines ----------------------------------------------------------------------------------------


def node(worker: Worker) -> str:
    return ray.get_runtime_context().get_node_id()


def make(worker: Worker, size: int) -> np.ndarray[Any, Any]:
    return np.arange(size)


def total(worker: Worker, array: np.ndarray[Any, Any]) -> tuple[int, bool]:
    return int(array.sum()), array.flags.writeable


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
        homes = [worker.apply(node).result() for worker in workers]
        assert len(set(homes)) == 3, "actors are spread over the nodes"
        read = workers[0].apply(total, workers[1].apply(make, 1_000_000))
        assert read.result() == (499999500000, False), "also from one node to another"
        dead = {index for index, home in enumerate(homes) if home == nodes[1].node_id}
        restarted: set[int] = set()
        plan = flow.from_actors(workers, "sample").gather_async(2)
        items: list[dict[str, Any]] = []
        while restarted != dead:  # the others continue meanwhile
            item = next(plan)
            items.append({**item, "data": item["data"].copy()})
            if len(items) == 100:
                cluster.remove_node(nodes[1], allow_graceful=False)
            if item["incarnation"]:
                restarted.add(item["shard"])
        items += [next(plan) for _ in range(50)]  # the flow has been told of every loss
        check_order(items)
        events = engine.statistics().events
        assert {event.actor for event in events} == {workers[index].name for index in dead}
        assert {event.reason for event in events} <= {
            "died with its node",
            "died: it can no longer be reached",
            "died: its worker process was killed or crashed",
        }
        assert plan.statistics()["gather_async"].lost >= sum(event.lost for event in events) > 0
        assert nodes[1].node_id not in [worker.apply(node).result() for worker in workers]
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_a_flow_continues_when_a_node_dies() -> None:
    code = "from test_ray import lose_a_node; lose_a_node()"
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}  # where others look for a cluster to join
        scripts.run_code(code, cwd=Path(__file__).parent, env=environment)
