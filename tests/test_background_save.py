"""Actors save large states to files in the background; a file is complete or does not count."""

import os
import signal
import textwrap
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripts
from learning_runs import training
from safetensors.numpy import load_file

import rollstream as rs
from rollstream import flow
from rollstream.background_save import BackgroundSave, read_checksum, read_state, write_state
from rollstream.flow import StateError
from rollstream.flow.snapshot import actor_files
from rollstream.rl.worker_set import WorkerSet
from rollstream.training.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from rollstream.training.loop import TrainingLoop

STATE = {
    "columns": {"frames": np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, ::2], "ends": np.array([True])},
    "counts": (1, 2.5, None, "three", 2**70),
    "none": np.zeros((0, 3), np.float32),
    "one": np.float64(0.1),
    "halves": np.array([0.5], np.float16),
    "complex": np.array([1j]),
}


def run(code: str, *arguments: Path) -> None:
    """In a process of its own, which can be forked: JAX is not there."""
    code = "import os, signal, sys; from pathlib import Path; import numpy as np\n" + textwrap.dedent(code)
    code = "from rollstream.background_save import BackgroundSave\n" + code
    done = scripts.run("-W", "error", "-c", code, *map(str, arguments))
    assert (done.stdout, done.stderr) == ("", "")


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    write_state(path, STATE)
    found = read_state(path)
    np.testing.assert_equal(found, STATE)
    assert found["columns"]["frames"].dtype == np.uint8
    assert set(load_file(path)) == {"columns/frames", "columns/ends", "none", "one", "halves", "complex"}
    about = read_checksum(path)
    assert about is not None
    assert about["bytes"] == path.stat().st_size


def test_what_is_written_is_what_there_was(tmp_path: Path) -> None:
    run(
        """
        numbers = np.arange(1000)
        writing = BackgroundSave(Path(sys.argv[1]), lambda: {"numbers": numbers})
        numbers[:] = -1
        assert writing.wait() is None
        """,
        tmp_path / "state",
    )
    np.testing.assert_array_equal(read_state(tmp_path / "state")["numbers"], np.arange(1000))


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process writing state was killed by signal 9"),
        ("{'a': object()}", "a is a builtins.object, which cannot be saved"),
        ("np.zeros(1 << 20)", "File too large"),
        ("[].pop()", "pop from empty list"),
    ],
)
def test_a_writer_that_fails_says_why_and_leaves_nothing_that_looks_whole(
    tmp_path: Path, state: str, reason: str
) -> None:
    run(
        f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # as if the disk were full
        writing = BackgroundSave(Path(sys.argv[1]), lambda: {state})
        told = writing.wait()
        assert {reason!r} in told, told
        """,
        tmp_path / "state",
    )
    assert read_checksum(tmp_path / "state") is None


def test_signals_for_the_driver_pass_the_writer_by(tmp_path: Path) -> None:
    run(
        """
        writing = BackgroundSave(Path(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert writing.wait() is None
        """,
        tmp_path / "state",
    )
    assert read_checksum(tmp_path / "state") is not None


def test_nobody_writes_on_whose_owner_is_gone(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError, match="state is no longer needed"):
        write_state(tmp_path / "state", STATE, still_needed=lambda: False)
    assert read_checksum(tmp_path / "state") is None


# Checkpoints -------------------------------------------------------------------------------------


def written(folder: Path, step: int) -> CheckpointWriter:
    writer = CheckpointWriter(folder, step)
    writer.write({"step": step}, {}, ["big.safetensors"])
    return writer


def test_a_checkpoint_waits_for_what_others_write(tmp_path: Path) -> None:
    writer = written(tmp_path, 2)
    assert not writer.is_complete
    write_state(writer.partial / "big.safetensors", STATE)
    assert writer.is_complete
    path = writer.commit(keep=1)
    assert load_checkpoint(path).state == {"step": 2}
    np.testing.assert_equal(read_state(path / "big.safetensors"), STATE)


def test_what_is_not_whole_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="incomplete"), written(tmp_path, 2) as writer:
        writer.commit(keep=1)
    assert not list(tmp_path.iterdir())


def test_one_that_never_became_whole_is_passed_over_and_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"step": 1})
    written(tmp_path, 2)  # and then the machine stops
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.state == {"step": 1}
    save_checkpoint(tmp_path, 3, {"step": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000001", "step_000000003"]


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(tmp_path: Path, damage: str) -> None:
    save_checkpoint(tmp_path, 1, {"step": 1})
    writer = written(tmp_path, 2)
    write_state(writer.partial / "big.safetensors", STATE)
    big = writer.commit(keep=3) / "big.safetensors"
    if damage == "missing":
        big.unlink()
    else:
        data = bytearray(big.read_bytes())
        data[-1] ^= 1
        big.write_bytes(data if damage == "changed" else data[:-1])
    with pytest.raises(CheckpointError, match=r"big\.safetensors"):
        load_checkpoint(big.parent)
    with pytest.warns(UserWarning, match=r"big\.safetensors .*step_000000001 instead"):
        found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


# Flows -------------------------------------------------------------------------------------------

APEX: dict[str, Any] = {"num_envs": 4, "rollout_length": 10, "batch_size": 16, "hidden": (8,)}


def shard_infos(workers: WorkerSet) -> list[Any]:
    actors = workers.engine.actors
    return [actor.call("info").result() for name, actor in actors.items() if name.startswith("replay")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Any], float]:
    """A state of Ape-X whose shards wrote files, after the driver had moved to another folder."""
    folder = tmp_path_factory.mktemp("saved")
    with training("apex", "processes", replay_shards=2, **APEX) as (plan, workers):
        reports = [next(plan) for _ in range(12)]
        with chdir(folder):
            state = plan.state_dict(folder=Path())
            names = actor_files(state)
            assert plan.wait_saved() == []
            infos = shard_infos(workers)
            assert len(names) == len(infos) == 2
        next(plan)
    assert all(read_checksum(folder / name) is not None for name in names)
    return folder, state, infos, reports[-1]["time/total_timesteps"]


@pytest.mark.parametrize("engine", [pytest.param("processes", marks=pytest.mark.slow), "inline"])
def test_shards_write_their_own_files_and_are_restored_from_them(saved: Any, engine: str) -> None:
    """Also on an engine whose actors do not read files."""
    folder, state, infos, steps = saved
    with training("apex", engine, replay_shards=2, **APEX) as (plan, workers), chdir(folder):
        plan.load_state_dict(state, folder=Path())
        assert shard_infos(workers) == infos
        report = next(plan)
        assert report["time/total_timesteps"] > steps
        assert report["replay/lost_items"] == 0


@pytest.mark.slow
def test_a_state_without_its_files_says_so(saved: Any) -> None:
    _, state, *_ = saved
    with (
        training("apex", "inline", replay_shards=2, **APEX) as (plan, _),
        pytest.raises(StateError, match="which folder"),
    ):
        plan.load_state_dict(state)


class Clumsy:
    """Its writer is killed, every time."""

    def sample(self) -> int:
        return 1

    def save_to(self, path: Path) -> None:
        self._writing = BackgroundSave(path, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def wait_saved(self) -> str | None:
        return self._writing.wait()


@pytest.mark.slow
def test_a_flow_goes_on_when_a_writer_is_killed(tmp_path: Path) -> None:
    with rs.engine("processes") as engine:
        plan = flow.from_actors(engine.spawn(Clumsy, count=2), "sample").gather_sync()
        next(plan)
        [one, other] = actor_files(plan.state_dict(folder=tmp_path))
        assert plan.wait_saved() == [
            f"the process writing {name} was killed by signal 9" for name in (one, other)
        ]
        assert next(plan) == [1, 1]


@pytest.mark.slow
def test_a_resumed_run_restores_the_replay_from_its_files(tmp_path: Path) -> None:
    out, settings = tmp_path / "run", {**APEX, "learning_starts": 80, "report_every": 40}
    first = rs.train("apex", env="CartPole-v1", steps=400, workers=2, out=out, quiet=True, config=settings)
    [newest, *_] = sorted((out / "checkpoints").iterdir(), reverse=True)
    assert (newest / "actor-replay.safetensors").exists()
    assert not list((out / "checkpoints").glob("*.partial"))
    again = rs.train("apex", steps=800, out=out, resume=True, quiet=True)
    steps, sizes = (
        [float(run.metrics[-1][name]) for run in (first, again)]
        for name in ("time/total_timesteps", "replay/size")
    )
    assert steps[0] < 800 <= steps[1]
    assert sizes[0] < sizes[1]


def test_an_error_while_others_write_does_not_cost_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the best one, which is replaced only together with it."""
    recorded, out = TrainingLoop._record, tmp_path / "run"

    def record(loop: TrainingLoop, report: Any, *more: Any) -> None:
        recorded(loop, report, *more)
        if loop._checkpointing is not None and loop._checkpointing.pending is not None:
            raise RuntimeError("something else went wrong")

    monkeypatch.setattr(TrainingLoop, "_record", record)
    looks: list[int] = []

    def look(writer: CheckpointWriter) -> bool:
        if writer._folder.name == "checkpoints":
            looks.append(writer.step)
        return len(looks) != 1

    monkeypatch.setattr(CheckpointWriter, "is_complete", property(look))

    settings = {**APEX, "learning_starts": 80, "report_every": 40}
    with pytest.raises(RuntimeError, match="something else"):
        rs.train(
            "apex",
            env="CartPole-v1",
            steps=400,
            workers=1,
            out=out,
            quiet=True,
            config=settings,
            checkpoint_every=100,
            evaluate_every=100,
        )
    monkeypatch.undo()
    [name] = [path.name for path in (out / "checkpoints").iterdir()]
    assert [path.name for path in (out / "best").iterdir()] == [name]
    found = latest_checkpoint(out / "checkpoints")
    assert found is not None
    assert read_state(found.path / "actor-replay.safetensors")["env_steps"] >= 100
