"""What tests of flows, operators and engines need; also for operators and engines written elsewhere."""

from rollstream.testing.chaos import chaos_engine
from rollstream.testing.engines import ENGINE_CHECKS, check_engine
from rollstream.testing.faults import kill
from rollstream.testing.operators import check_operator
from rollstream.testing.scripted import Fail, Pause, ScriptedSource

__all__ = [
    "ENGINE_CHECKS",
    "Fail",
    "Pause",
    "ScriptedSource",
    "chaos_engine",
    "check_engine",
    "check_operator",
    "kill",
]
