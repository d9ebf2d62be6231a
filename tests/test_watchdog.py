"""Workers that hang, crash or are stopped: the user is told, and a signal ends the training nevertheless."""

import os
import signal
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import scripts

import rollstream as rs
from rollstream.training import watchdog
from rollstream.training.progress import NoDisplay

SCRIPT = """
    import os, signal, sys, threading, time
    import gymnasium
    import rollstream as rs
    from rollstream.training import watchdog

    class Stuck(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            print("stuck", flush=True)
            if sys.argv[1:] == ["stopped"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            if sys.argv[2:] == ["signalled"]:  # in this thread: the main thread sleeps on
                signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            time.sleep(1e6)

    watchdog.GRACE = 0.2
    engine = {"stopped": "processes"}.get(sys.argv[1], sys.argv[1])
    rs.train("ppo", env=Stuck, steps=4096, workers=1, engine=engine)
"""


class Env(gymnasium.Env[Any, Any]):
    """Does nothing; its class says what a step does."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}


class Hanging(Env):
    def step(self, action: Any) -> Any:
        time.sleep(1e6)


class Crashing(Env):
    def step(self, action: Any) -> Any:
        os._exit(7)


class Notes(NoDisplay):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


# Silence -----------------------------------------------------------------------------------------


class Silent:
    """Stands for an engine with one worker, and for the signals."""

    remote = True

    def __init__(self, longest: float = 0.0, deadline: float | None = None):
        options = SimpleNamespace(deadline=deadline)
        worker = SimpleNamespace(longest=longest, rebuilding=None, cls=object, options=options)
        self.actors, self.seconds = {"worker[0]": worker}, 0.0
        self.received: int | None = None
        self.forced = 0

    def silences(self) -> dict[str, float]:
        return {"worker[0]": self.seconds} if self.seconds else {}

    def wake(self) -> None:
        pass

    def force(self) -> None:
        self.forced += 1


def looked(engine: Any, silences: list[float]) -> list[str]:
    notes: list[str] = []
    dog = watchdog.Watchdog(engine, engine, notes.append)
    for now, engine.seconds in enumerate(silences):
        dog.look(now)
    return notes


def test_silence_is_told_when_it_has_doubled() -> None:
    notes = looked(Silent(deadline=100.0), [29, 30, 59, 60, 119, 0, 1, 30])
    assert notes == [f"worker[0] has been silent for {seconds} s" for seconds in (30, 60, 30)]
    [note] = looked(Silent(), [30])
    assert "deadline" in note


def test_what_took_long_before_is_not_silence() -> None:
    assert looked(Silent(longest=40.0), [30, 79]) == []


def test_after_a_signal_nobody_waits_for_the_silent() -> None:
    engine = Silent()
    engine.received = signal.SIGTERM
    looked(engine, [0.0, 1, 2, 3, 4, 4.9, 4.9])
    assert not engine.forced
    looked(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert engine.forced == 1, "and again after a while, if that did not help"
    slow = Silent(longest=20.0)
    slow.received = signal.SIGTERM
    looked(slow, list(range(1, 40)))
    assert not slow.forced


@pytest.mark.slow
@pytest.mark.parametrize("how", ["inline", "threads", "processes", "ray", "stopped"])
def test_a_signal_ends_a_training_whose_worker_is_stuck(how: str) -> None:
    with scripts.started("-c", textwrap.dedent(SCRIPT), how) as training:
        assert training.stdout is not None
        lines = iter(training.stdout.readline, "")
        assert any("stuck" in line for line in lines)
        training.send_signal(signal.SIGTERM)
        rest = "".join(lines)
        assert training.wait() in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert "no answer from worker: stopping without a last checkpoint" in rest


def test_a_signal_that_does_not_wake_the_main_thread_ends_a_training() -> None:
    with scripts.started("-c", textwrap.dedent(SCRIPT), "threads", "signalled") as training:
        output, _ = training.communicate()
    assert training.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert "SIGTERM: stopping" in output


# Death -------------------------------------------------------------------------------------------


def test_workers_that_always_crash_are_not_restarted_again_and_again() -> None:
    notes = Notes()
    with pytest.raises(rs.RollstreamError, match="exit code 7: 2 deaths before any worker has delivered"):
        rs.train("ppo", env=Crashing, steps=4096, workers=2, display=notes)
    deaths = [text for text in notes.texts if "exit code 7: restarted" in text]
    assert len(deaths) == 2


def test_a_deadline_restarts_a_worker_that_hangs() -> None:
    notes = Notes()
    with pytest.raises(rs.RollstreamError, match=r"hung: worker\.\w+ took longer than 0\.5 s: 2 deaths"):
        rs.train("ppo", env=Hanging, steps=4096, workers=1, deadline=0.5, display=notes)
    assert any("took longer than 0.5 s: restarted" in text for text in notes.texts)


def test_a_deadline_needs_workers_that_can_be_killed() -> None:
    with pytest.raises(rs.RollstreamError, match=r"deadline=3 .* use the engine processes"):
        rs.train("ppo", env="CartPole-v1", steps=4096, deadline=3.0, quiet=True)


def test_the_death_of_a_shard_is_told_when_it_happens_with_what_is_lost() -> None:
    notes, known = Notes(), []

    def kill_shard(report: dict[str, Any]) -> bool:
        if report.get("replay/size", 0) < 100:
            return False
        known.append(int(report["replay/size"]))
        before = len(notes.texts)
        [shard] = [pid for pid, name in children().items() if name == "replay"]
        os.kill(shard, signal.SIGKILL)
        scripts.eventually(lambda: len(notes.texts) > before, "the note")  # while no report can come
        return True

    config = {"learning_starts": 50, "batch_size": 8, "num_envs": 2, "report_every": 20}
    rs.train(
        "apex",
        env="CartPole-v1",
        steps=100_000,
        workers=1,
        config=config,
        display=notes,
        on_report=kill_shard,
    )
    [note] = [text for text in notes.texts if text.startswith("replay was killed by SIGKILL: restarted")]
    lost = int(note.partition("about ")[2].partition(" stored items are lost")[0].replace(",", ""))
    assert lost >= known[0]


def children() -> dict[int, str]:
    """The names of the actors of this process, by process."""
    found: dict[int, str] = {}
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            arguments = Path("/proc", pid, "cmdline").read_text().split("\0")
            if len(arguments) > 3:
                found[int(pid)] = arguments[3]
    return found
