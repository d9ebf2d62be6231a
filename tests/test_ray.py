"""The ray engine: the rules of all engines, and what is particular to a cluster."""

from collections.abc import Iterator

import pytest

import rollstream as rs
from rollstream.testing.engines import ENGINE_CHECKS

ray = pytest.importorskip("ray")


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all: engines join it, and leave it running."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.parametrize("rule", ENGINE_CHECKS)
def test_rule(rule: str) -> None:
    ENGINE_CHECKS[rule](lambda: rs.engine("ray"))
