"""Checkpoints: exact, whole or not at all, and never a damaged one taken for good."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from rollstream.rl.batch import Batch
from rollstream.state_codec import StateEncodingError, decode_state, encode_state
from rollstream.training.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    remove_after,
    save_checkpoint,
)


def assert_same(one: Any, other: Any) -> None:
    """The same types all the way down, and the same bits."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for own, its in zip(one, other, strict=True):
            assert_same(own, its)
    elif isinstance(one, (np.ndarray, np.generic)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    else:
        assert repr(one) == repr(other)


AWKWARD = {
    "none": None,
    "flags": [True, False],
    "numbers": [0, -1, 2**53, 2**53 + 1, -(2**127), 0.1, -0.0, float("nan"), float("inf"), float("-inf")],
    "text": ["", "$array", "näme\n"],
    "tuples": ((), (1,), [(), [()]]),
    "empty": [{}, [], ()],
    "$array": "a key that looks like a mark",
    "keys": {1: "one", None: "none", ("a", 2): "tuple", 2.5: "float", False: np.float32(1)},
    "a/b": np.arange(3),
    "a": {"b": np.arange(4)},
    "arrays": [
        np.array([[1, np.nan], [np.inf, -0.0]], np.float32),
        np.array(3.5),
        np.zeros((0, 3), np.int8),
        np.array([True, False]),
        np.arange(6).reshape(2, 3).T,
        np.arange(10)[::2],
        np.array([1 + 2j], np.complex64),
        np.array([1, 2], ">i4"),
        np.array(["ab", "c"]),
        np.array("2026-01-01", "datetime64[D]"),
        np.array([2**64 - 1], np.uint64),
        np.array([65504], np.float16),
    ],
    "scalars": [
        np.float64(0.1),
        np.int64(-5),
        np.bool_(True),
        np.uint8(255),
        np.float32("nan"),
        np.complex128(1j),
    ],
    "generator": np.random.default_rng(7).bit_generator.state,
    "others": [
        np.random.Generator(kind(3)).bit_generator.state for kind in (np.random.MT19937, np.random.Philox)
    ],
    "batch": Batch(reward=np.ones((2, 3)), observation={"x": np.zeros((2, 3, 1))}),
}


def test_awkward_values_come_back_exactly(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, AWKWARD)
    assert_same(load_checkpoint(path).state, AWKWARD)
    json.loads((path / "state.json").read_text(), parse_constant=pytest.fail)  # what everybody reads as JSON


def test_arrays_of_jax_come_back_as_numpy() -> None:
    import jax.numpy as jnp

    state = decode_state(*encode_state([jnp.ones(2), jnp.bfloat16(1.5), jnp.ones((1, 2), jnp.bfloat16)]))
    assert [own.dtype.name for own in state] == ["float32", "bfloat16", "bfloat16"]
    assert [own.shape for own in state] == [(2,), (), (1, 2)]
    assert [float(own.sum()) for own in state] == [2.0, 1.5, 2.0]


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st_numpy.arrays(
        st_numpy.boolean_dtypes()
        | st_numpy.integer_dtypes()
        | st_numpy.floating_dtypes(sizes=(16, 32, 64))
        | st_numpy.complex_number_dtypes(sizes=(64, 128)),
        st_numpy.array_shapes(min_dims=0, min_side=0, max_side=3),
    )
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(STATES)
def test_any_plain_state_comes_back_exactly(state: Any) -> None:
    structure, arrays = encode_state(state)
    assert_same(decode_state(json.loads(json.dumps(structure, allow_nan=False)), arrays), state)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": [1, object()]}, r"a/1 is a builtins.object, which cannot be saved; use dicts"),
        ({"a": np.array([None])}, r"a is an array of object, which cannot be saved; use numeric arrays"),
        ({1, 2}, r"the state is a builtins.set, which cannot be saved"),
    ],
)
def test_what_is_not_plain_is_refused(tmp_path: Path, state: Any, text: str) -> None:
    with pytest.raises(StateEncodingError, match=text):
        save_checkpoint(tmp_path, 1, state)
    assert not list(tmp_path.iterdir())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10, 20):
        save_checkpoint(tmp_path, step, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000010", "step_000000020"]
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.state) == (20, 20)


def test_the_same_step_is_replaced_and_later_ones_can_be_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, "one")
    save_checkpoint(tmp_path, 1, "other")
    save_checkpoint(tmp_path, 2, "two")
    remove_after(tmp_path, 1)
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.state) == (1, "other")


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_weights_are_read_without_the_rest(tmp_path: Path) -> None:
    weights = {"network.bias": np.array([1, 2], np.float32), "count": np.zeros((), np.float32)}
    path = save_checkpoint(tmp_path, 1, {}, weights=weights)
    (path / "state.json").unlink()
    assert_same(dict(sorted(load_weights(path).items())), dict(sorted(weights.items())))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink])
@pytest.mark.parametrize("name", ["state.json", "arrays.safetensors", "weights.safetensors", "manifest.json"])
def test_a_damaged_one_is_found_and_the_one_before_it_is_used(tmp_path: Path, name: str, damage: Any) -> None:
    save_checkpoint(tmp_path, 1, {"x": np.ones(3)})
    newest = save_checkpoint(tmp_path, 2, {"x": np.zeros(3)})
    damage(newest / name)
    with pytest.raises(CheckpointError, match=rf"step_000000002 is damaged: {name}"):
        load_checkpoint(newest)
    with pytest.warns(
        UserWarning, match=rf"step_000000002 is damaged: {name}.*; using step_000000001 instead"
    ):
        checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    _truncate(save_checkpoint(tmp_path, 1, {}) / "state.json")
    with pytest.raises(CheckpointError, match=r"has no other checkpoint that can be used"):
        latest_checkpoint(tmp_path)


def test_what_a_crash_left_behind_is_no_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, "whole")
    (tmp_path / "step_000000002.partial").mkdir()
    (tmp_path / "step_000000002.partial" / "state.json").write_text("{")
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.state == "whole"
    save_checkpoint(tmp_path, 2, "now")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000001", "step_000000002"]


@pytest.mark.parametrize("done", [0, 1])
def test_a_crash_while_the_same_step_is_replaced_leaves_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    save_checkpoint(tmp_path, 1, "one", keep=1)
    renamed: list[Any] = []
    rename = os.rename

    def crash(source: Path, target: Path) -> None:
        if len(renamed) == done:
            raise KeyboardInterrupt
        renamed.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, "other", keep=1)
    monkeypatch.setattr(os, "rename", rename)
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.state == "one"
    save_checkpoint(tmp_path, 1, "third", keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000001"]
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.state == "third"


def test_one_that_replaces_another_is_the_newer(tmp_path: Path) -> None:
    shutil.move(save_checkpoint(tmp_path, 1, "one"), tmp_path / "kept")
    save_checkpoint(tmp_path, 1, "other")
    shutil.move(tmp_path / "kept", tmp_path / "step_000000001.old")  # a crash before it was removed
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.state == "other"


@pytest.mark.parametrize("missing", ["format", "step", "files"])
def test_a_manifest_without_all_it_needs_is_damaged(tmp_path: Path, missing: str) -> None:
    save_checkpoint(tmp_path, 1, "whole")
    path = save_checkpoint(tmp_path, 2, "newer") / "manifest.json"
    manifest = json.loads(path.read_bytes())
    path.write_text(json.dumps({key: own for key, own in manifest.items() if key != missing}))
    with pytest.warns(UserWarning, match=r"step_000000002 is damaged: manifest.json cannot be read"):
        checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_a_file_in_place_of_a_checkpoint_is_a_damaged_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, "whole")
    (tmp_path / "step_000000002").write_text("not a folder")
    with pytest.warns(UserWarning, match=r"step_000000002 is damaged"):
        checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1
    save_checkpoint(tmp_path, 2, "now")
    (tmp_path / "step_000000003").write_text("not a folder")
    remove_after(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000001", "step_000000002"]


def test_a_folder_in_place_of_a_file_is_damage(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, "whole")
    (path / "state.json").unlink()
    (path / "state.json").mkdir()
    with pytest.raises(CheckpointError, match=r"is damaged: state.json cannot be read"):
        load_checkpoint(path)


def test_leftovers_of_any_step_are_removed(tmp_path: Path) -> None:
    (tmp_path / "step_000000005.partial").mkdir()
    save_checkpoint(tmp_path, 6, "now")
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000006"]


def test_weights_of_any_type_come_back(tmp_path: Path) -> None:
    import jax.numpy as jnp

    weights = {"half": jnp.full((2, 1), 1.5, jnp.bfloat16), "usual": np.ones(3, np.float32)}
    loaded = load_weights(save_checkpoint(tmp_path, 1, {}, weights=weights))
    assert {name: (own.dtype.name, own.tolist()) for name, own in loaded.items()} == {
        "half": ("bfloat16", [[1.5], [1.5]]),
        "usual": ("float32", [1.0, 1.0, 1.0]),
    }
