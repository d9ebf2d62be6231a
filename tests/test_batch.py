"""Batches: columns that fit together, joined and taken apart without loss, and often without copies."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.rl.batch import Batch, BatchError
from rollstream.rl.operators import ConcatBatches, SelectExperiences


def numbered(length: int, width: int, first: int = 0) -> Batch:
    """Columns of several kinds; no number comes up twice in a column."""
    steps = np.arange(first, first + length * width).reshape(length, width)
    return Batch(
        reward=steps.astype(np.float32),
        observation={"where": np.stack([steps, -steps], axis=-1), "what": (steps + 0.5, steps % 2 == 0)},
        action=steps,
    )


def assert_same(one: Batch, other: Batch) -> None:
    assert type(one) is type(other) is Batch
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def shares_memory(one: Batch, other: Batch) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.shares_memory(left, right) for left, right in pairs)


sizes = st.integers(1, 5)


@given(length=sizes, widths=st.lists(sizes, min_size=1, max_size=4))
def test_joined_batches_can_be_split_again(length: int, widths: list[int]) -> None:
    parts = [numbered(length, width, first=100 * i) for i, width in enumerate(widths)]
    joined = Batch.concatenate(parts).validated()
    assert joined.shape == (length, sum(widths))
    assert joined.steps == length * sum(widths)
    start = 0
    for part, width in zip(parts, widths, strict=True):
        own = slice(start, start + width)
        assert_same(joined.map(lambda array, own=own: array[:, own]), part)
        start += width


@given(length=sizes, width=sizes)
def test_flattened_rows_keep_together_what_belongs_together(length: int, width: int) -> None:
    batch = numbered(length, width)
    rows = batch.flattened()
    np.testing.assert_array_equal(rows["action"], np.arange(length * width))
    np.testing.assert_array_equal(rows["observation"]["where"][:, 1], -rows["action"])
    assert shares_memory(Batch(rows), batch)


def test_a_single_batch_is_not_copied() -> None:
    batch = numbered(2, 2)
    assert Batch.concatenate([batch]) is batch


def test_columns_that_do_not_fit_are_named() -> None:
    assert numbered(2, 3).validated().shape == (2, 3)
    odd = Batch(reward=np.zeros((2, 3)), observation={"a": np.zeros((2, 4, 5))})
    with pytest.raises(BatchError, match=r"\['observation'\]\['a'\] \(2, 4\), \['reward'\] \(2, 3\)"):
        odd.validated()
    with pytest.raises(BatchError, match=r"the same \[T, B\]"):
        Batch(reward=np.zeros(3)).validated()
    with pytest.raises(BatchError):
        Batch().validated()


def test_batches_without_a_shape_say_so() -> None:
    with pytest.raises(BatchError, match="a batch without columns has no shape"):
        _ = Batch().shape
    with pytest.raises(
        BatchError, match=r"columns of a batch have shape \[T, B, ...\]; the first one here has \[3\]"
    ):
        _ = Batch(reward=np.zeros(3)).steps


def test_batches_that_cannot_be_joined_say_why() -> None:
    with pytest.raises(BatchError, match="no batches to concatenate"):
        Batch.concatenate([])
    with pytest.raises(BatchError, match="different columns cannot be concatenated: mask is only in some"):
        Batch.concatenate([numbered(2, 1), Batch(numbered(2, 1) | {"mask": np.ones((2, 1))})])
    with pytest.raises(BatchError, match="batches of 2 and 3 steps cannot be concatenated"):
        Batch.concatenate([numbered(2, 1), numbered(3, 1)])


def test_batches_are_joined_until_there_are_enough_steps() -> None:
    """Also when what waits to be joined is saved meanwhile."""
    for pause in range(3):
        join = ConcatBatches(min_steps=5)
        given = []
        for number in range(6):
            if number == pause:
                state = join.state_dict()
                join = ConcatBatches(min_steps=5)
                join.load_state_dict(state)
            given.append(join(numbered(2, 1, first=10 * number)))
        assert [len(batches) for batches in given] == [0, 0, 1, 0, 0, 1]
        [joined] = given[2]
        np.testing.assert_array_equal(joined["action"], [[0, 10, 20], [1, 11, 21]])


def test_only_what_is_learned_from_travels() -> None:
    assert list(SelectExperiences("action")(numbered(2, 2))) == ["action"]


def test_some_columns() -> None:
    batch = numbered(2, 2)
    assert list(batch.select(["action", "reward"])) == ["action", "reward"]
    assert batch.select(("reward",))["reward"] is batch["reward"]
    with pytest.raises(BatchError, match="there is no column value; there are reward, observation, action"):
        batch.select(["value", "reward"])


def test_jax_sees_the_columns() -> None:
    @jax.jit
    def doubled(batch: Batch) -> Batch:
        return jax.tree.map(lambda column: column * 2, batch)

    batch = Batch(b=jnp.ones((2, 3)), a={"x": jnp.zeros((2, 3))})
    result = doubled(batch)
    assert type(result) is Batch
    assert set(result) == {"a", "b"}
    np.testing.assert_array_equal(result["b"], 2 * np.ones((2, 3)))
    gradient: Any = jax.grad(lambda own: jnp.sum(own["b"] ** 2))(batch)
    np.testing.assert_array_equal(gradient["b"], 2 * np.ones((2, 3)))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    assert paths == ["['a']['x']", "['b']"]


def test_the_order_in_which_columns_came_does_not_matter_to_jax() -> None:
    one, other = Batch(a=np.ones((1, 1)), b=np.zeros((1, 1))), Batch(b=np.zeros((1, 1)), a=np.ones((1, 1)))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    joined = Batch.concatenate([one, other])
    np.testing.assert_array_equal(joined["a"], [[1, 1]])
    np.testing.assert_array_equal(joined["b"], [[0, 0]])


def test_a_batch_travels() -> None:
    batch = numbered(2, 2)
    assert_same(pickle.loads(pickle.dumps(batch)), batch)
