"""Writers store steps once and complete the right items, however experience is split into writes."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import same_state

from rollstream.replay import (
    ArraySpec,
    Episodes,
    Field,
    Fifo,
    InsertRefused,
    MinSize,
    ReplayError,
    Sample,
    SampleToInsertRatio,
    Sequences,
    SignatureError,
    Table,
    Transitions,
    Uniform,
    Windowing,
    Writer,
    flatten_columns,
    infer_signature,
    unflatten_columns,
)

LENGTH, STACK = 3, 3
"""Of most tables here."""
SIGNATURE = {
    "observation": ArraySpec((), np.int64),
    "action": ArraySpec((2,), np.float32),
    "reward": ArraySpec((), np.float64),
    "terminated": ArraySpec((), np.bool_),
}


def make_fields(stack: int, before: int = 0) -> dict[str, Field]:
    with_history = {
        "first_before": Field("observation", "first", stack, before),
        "all": Field("observation", "steps_and_next", stack, before),
        "acted": Field("action", "steps", before=before),
    }
    return (with_history if before else {}) | {
        "observation": Field("observation", "first", stack=stack),
        "action": Field("action", "first"),
        "reward": Field("reward", "steps"),
        "seen": Field("observation", "steps"),
        "terminated": Field("terminated", "steps"),
        "next_observation": Field("observation", "next", stack=stack),
    }


FIELDS = make_fields(STACK)
WINDOWINGS: dict[str, Windowing] = {
    "1 step": Transitions(1),
    "2 steps": Transitions(2),
    "3 steps": Transitions(3),
    "sequences": Sequences(3),
    "overlapping": Sequences(3, stride=1),
    "overlapping by one": Sequences(3, stride=2),
    "with gaps": Sequences(2, stride=4),
    "episodes": Episodes(LENGTH),
}
ONE_STEP = {"max_length": 1, "stack": 1}
"""Tables of windows of one step without stacked frames, which take a shorter path."""
TABLES: dict[str, tuple[Windowing, dict[str, int]]] = {
    **{name: (windowing, {}) for name, windowing in WINDOWINGS.items()},
    "1 step, no stack": (Transitions(1), ONE_STEP),
    "1 step, no stack, longer items allowed": (Transitions(1), {"stack": 1}),
    "2 steps, no stack": (Transitions(2), {"stack": 1}),
    "sequences of 1 step": (Sequences(1), ONE_STEP),
    "overlapping, after 2 steps": (Sequences(3, stride=2), {"before": 2}),
    "overlapping, after 4 steps, no stack": (Sequences(3, stride=1), {"before": 4, "stack": 1}),
    "1 step, after 2, no stack": (Transitions(1), ONE_STEP | {"before": 2}),
}
every_table = pytest.mark.parametrize(("windowing", "options"), TABLES.values(), ids=TABLES)


def make_table(max_size: int = 1000, *, stack: int = STACK, before: int = 0, **options: Any) -> Table:
    """A FIFO table: sampling `table.size` items returns all of them in order."""
    settings: dict[str, Any] = {
        "max_length": LENGTH,
        "sampler": Fifo(),
        "remover": Fifo(),
        "max_times_sampled": 1,
    }
    return Table(
        SIGNATURE,
        make_fields(stack, before),
        max_size=max_size,
        rate_limiter=MinSize(1),
        initial_rows=4,
        **{**settings, **options},
    )


def items_of(table: Table) -> Sample:
    return table.sample(table.size, np.random.default_rng(0))


def code(stream: int, episode: int, age: int) -> int:
    """A unique observation."""
    return 1 + age + 100 * episode + 10_000 * stream


@dataclass
class Experience:
    """Experience as arguments of `Writer.write`, and as a list of steps."""

    columns: dict[str, Any]
    last: Any
    final: list[tuple[int, int, Any]]
    mask: Any
    steps: list[tuple[int, int, int, int, bool]]
    """Time, stream, episode, step within the episode, and whether it ends the episode."""

    def between(self, start: int, stop: int) -> dict[str, Any]:
        """Arguments of `Writer.write` for a part of it."""
        following = [*self.columns["observation"], self.last]
        return {
            "columns": {name: column[start:stop] for name, column in self.columns.items()},
            "last_observation": following[stop],
            "final_observations": [(t - start, b, seen) for t, b, seen in self.final if start <= t < stop],
            "mask": None if self.mask is None else self.mask[start:stop],
        }


def experience(ends: Any, *, next_step: bool = False, all_finals: bool = True) -> Experience:
    """Experience with the given episode ends, `[T, B]`: 1 for terminated, 2 for truncated.

    With `next_step`, environments reset in the step after an end, which shows the final observation. Without
    `all_finals`, only truncated episodes have final observations.
    """
    ends = np.array(ends)
    shape = ends.shape
    observation, mask = np.zeros(shape, np.int64), np.ones(shape, bool)
    terminated, truncated = np.zeros((2, *shape), bool)
    last = np.zeros(shape[1], np.int64)
    final, steps = [], []
    for b in range(shape[1]):
        episode, age, over = 0, 0, False
        for t in range(shape[0]):
            observation[t, b] = code(b, episode, age)
            if over:
                mask[t, b] = over = False
                episode, age = episode + 1, 0
                continue
            ended = bool(ends[t, b])
            steps.append((t, b, episode, age, ended))
            terminated[t, b], truncated[t, b] = ends[t, b] == 1, ends[t, b] == 2
            age += 1
            if ended and next_step:
                over = True
            elif ended:
                if truncated[t, b] or all_finals:
                    final.append((t, b, np.int64(code(b, episode, age))))
                episode, age = episode + 1, 0
        last[b] = code(b, episode, age)
    columns = {
        "observation": observation,
        "action": np.stack([observation, -observation], axis=-1).astype(np.float32),
        "reward": observation * 0.5,
        "terminated": terminated,
        "truncated": truncated,
    }
    return Experience(columns, last, final, mask if next_step else None, sorted(steps))


def expected(
    windowing: Windowing, steps: list[tuple[int, int, int, int, bool]]
) -> list[tuple[int, int, int, int]]:
    """The windows, computed one step at a time: stream, episode, first step, length."""
    windows = []
    for _, stream, episode, age, ended in steps:
        if isinstance(windowing, Transitions):
            if age + 1 >= windowing.max_length:
                windows.append((stream, episode, age + 1 - windowing.max_length, windowing.max_length))
            if ended:
                starts = range(max(0, age + 2 - windowing.max_length), age + 1)
                windows += [(stream, episode, start, age + 1 - start) for start in starts]
        else:
            assert isinstance(windowing, Sequences)
            start = 0
            while start + windowing.max_length <= age:  # complete before this step
                start += windowing.stride
            if start + windowing.max_length == age + 1:
                windows.append((stream, episode, start, windowing.max_length))
            elif ended and start <= age:
                windows.append((stream, episode, start, age + 1 - start))
    return windows


def stacked(stream: int, episode: int, age: int, stack: int) -> list[int]:
    """The expected frame stack."""
    return [code(stream, episode, max(0, age - back)) for back in range(stack - 1, -1, -1)]


def assert_items(table: Table, windows: list[tuple[int, int, int, int]], ends: set[Any]) -> None:
    """The items have these windows. An unknown final observation may be anything."""
    sample, stack = items_of(table), table.fields["observation"].stack
    before = table.fields["all"].before if "all" in table.fields else 0
    assert sample.lengths.tolist() == [length for *_, length in windows]
    for i, (stream, episode, age, length) in enumerate(windows):
        codes = [code(stream, episode, age + step) for step in range(length)]
        padding = [0] * (table.max_length - length)
        columns = {name: column[i].ravel().tolist() for name, column in sample.columns.items()}
        assert columns["observation"] == stacked(stream, episode, age, stack)
        assert columns["action"] == [codes[0], -codes[0]]
        assert columns["seen"] == codes + padding
        assert columns["reward"] == [0.5 * seen for seen in codes] + padding
        following = stacked(stream, episode, age + length, stack)
        known = not (columns["terminated"][length - 1] and (stream, episode) not in ends)
        if before:
            ages = [max(0, age - back) for back in range(before, 0, -1)]
            assert columns["first_before"] == stacked(stream, episode, ages[0], stack)
            acted = [code(stream, episode, own) for own in ages] + codes
            assert columns["acted"][::2] == acted + padding
            seen = [stacked(stream, episode, age - back, stack) for back in range(before, -length, -1)]
            after = columns["all"][stack * len(seen) :]
            assert columns["all"] == [one for stacks in seen for one in stacks] + after
            assert after[stack:] == [0] * stack * len(padding)
            assert after[: stack if known else stack - 1] == following[: stack if known else -1]
        if not known:
            assert columns["next_observation"][:-1] == following[:-1]
        else:
            assert columns["next_observation"] == following


def assert_references(table: Table, writer: Writer) -> None:
    """Reference counts match items and streams, counted one by one, and all other rows are free."""
    steps = table.storage
    counts: dict[int, int] = {}
    state = table.state_dict()
    for first, last in zip(state["items"]["start"].tolist(), state["items"]["end"].tolist(), strict=True):
        rows = [last]
        while rows[-1] != first:
            rows.append(int(steps.previous[rows[-1]]))
        for _ in range(table.history):
            rows.append(int(steps.previous[rows[-1]]))
        for row in rows:
            counts[row] = counts.get(row, 0) + 1
    state = writer.state_dict()
    for stream, held in enumerate(state["num_held"].tolist()):
        rows = state["history"][::-1, stream][:held].tolist()
        assert len(rows) == held
        for row, before in pairwise(rows):
            assert steps.previous[row] == before
        for row in rows:
            counts[row] = counts.get(row, 0) + 1
    in_use = {row: int(steps.refcounts[row]) for row in np.flatnonzero(steps.refcounts)}
    assert in_use == counts
    assert steps.num_used == len(counts)
    free = steps.allocate(steps.capacity - len(counts))
    assert sorted([*free.tolist(), *counts]) == list(range(steps.capacity))
    steps.release(free)


streams = st.integers(1, 3)
ways = st.sampled_from(["same step", "same step, some finals", "next step"])


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    shape = draw(st.integers(1, 12)), draw(streams)
    ends = draw(
        st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    )
    way = draw(ways)
    return experience(
        np.reshape(ends, shape), next_step=way == "next step", all_finals=way != "same step, some finals"
    )


@every_table
@given(happened=experiences(), data=st.data())
@settings(max_examples=60)
def test_items_do_not_depend_on_chunks(
    windowing: Windowing, options: dict[str, int], happened: Experience, data: st.DataObject
) -> None:
    """They are the windows of episodes, and reference counts are right after every write."""
    total = len(happened.columns["reward"])
    chops = data.draw(st.sets(st.integers(1, total - 1)) if total > 1 else st.just(set()))
    table = make_table(**options)
    writer = Writer(table, windowing)
    saved_at = data.draw(st.sampled_from([0, *chops]))
    for start, stop in zip([0, *sorted(chops)], [*sorted(chops), total], strict=True):
        if start == saved_at:
            table, writer = reloaded(table, writer)
        writer.write(**happened.between(start, stop))
        assert_references(table, writer)
    windows = expected(windowing, happened.steps)
    known_finals = {(b, int(seen) // 100 % 100) for _, b, seen in happened.final}
    if happened.mask is not None:
        known_finals = {(b, episode) for _, b, episode, _, _ in happened.steps}
    assert table.size == len(windows)
    assert table.info().episodes == len({window[:2] for window in windows})
    if windows:
        assert_items(table, windows, known_finals)
    assert_references(table, writer)
    assert table.storage.num_used == writer.state_dict()["num_held"].sum(), "only rows of streams are left"


def reloaded(table: Table, writer: Writer) -> tuple[Table, Writer]:
    stack = table.fields["observation"].stack
    before = table.fields["all"].before if "all" in table.fields else 0
    fresh = make_table(table.max_size, stack=stack, before=before, max_length=table.max_length)
    fresh.load_state_dict(table.state_dict())
    resumed = Writer(fresh, writer.windowing)
    resumed.load_state_dict(writer.state_dict())
    return fresh, resumed


@every_table
@given(happened=experiences(), max_size=st.integers(1, 4))
@settings(max_examples=20)
def test_rows_of_removed_items_are_freed(
    windowing: Windowing, options: dict[str, int], happened: Experience, max_size: int
) -> None:
    """Also if an item is inserted and removed within one write."""
    table = make_table(max_size, **options)
    writer = Writer(table, windowing)
    for _ in range(3):
        writer.write(**happened.between(0, len(happened.columns["reward"])))
        assert_references(table, writer)
        assert table.storage.capacity <= 200, "rows are reused"
    table.delete(table.state_dict()["items"]["keys"])
    assert_references(table, writer)
    assert table.storage.num_used == writer.state_dict()["num_held"].sum(), "only rows of streams are left"


@every_table
@given(seed=st.integers(0, 1000), next_step=st.booleans(), data=st.data())
@settings(max_examples=15)
@pytest.mark.slow
def test_a_full_table_has_the_newest_items(
    windowing: Windowing, options: dict[str, int], seed: int, next_step: bool, data: st.DataObject
) -> None:
    """While rows are reused many times, also where streams are written by turns, and after a restore."""
    generator = np.random.default_rng(seed)
    happened = experience(generator.choice([0] * 8 + [1, 2], (150, 4)), next_step=next_step)
    table = make_table(30, sampler=Uniform(), max_times_sampled=0, **options)
    writer = Writer(table, windowing)
    groups = data.draw(st.sampled_from([[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[1], [3, 2, 0]]]))
    step, start, windows = data.draw(st.sampled_from([1, 3, 20])), 0, []
    while start < 150:
        stop = min(start + step, 150)
        part = happened.between(start, stop)
        for group in groups:
            writer.write(
                {name: column[:, group] for name, column in part["columns"].items()},
                part["last_observation"][group],
                [(t, group.index(b), seen) for t, b, seen in part["final_observations"] if b in group],
                mask=None if part["mask"] is None else part["mask"][:, group],
                streams=group,
            )
            own = [own for own in happened.steps if own[0] < stop and own[1] in group]
            at = {stream: index for index, stream in enumerate(group)}
            own.sort(key=lambda one: (one[0], at[one[1]]))
            new = expected(windowing, own)
            windows += [window for window in new if window not in windows]
        if start == 60:
            fresh = make_table(30, sampler=Uniform(), max_times_sampled=0, **options)
            fresh.load_state_dict(table.state_dict())
            state, table, writer = writer.state_dict(), fresh, Writer(fresh, windowing)
            writer.load_state_dict(state)
        items = table.state_dict()["items"]
        order = np.argsort(items["keys"])
        seen = table.storage.columns["observation"]
        firsts, nexts = seen[items["start"][order]].tolist(), seen[items["end"][order]].tolist()
        newest = windows[-30:]
        assert firsts == [code(stream, episode, age) for stream, episode, age, _ in newest]
        assert nexts == [code(stream, episode, age + length) for stream, episode, age, length in newest]
        start = stop
    assert table.storage.capacity < 250, "rows are reused"
    assert_references(table, writer)


def test_a_reset_stream_starts_a_new_episode() -> None:
    """No window spans the reset, and the abandoned rows are freed."""
    table = make_table()
    writer = Writer(table, Transitions(2))
    part = experience(np.zeros((2, 2)))
    writer.write(**part.between(0, 2))
    writer.reset([1])
    assert_references(table, writer)
    assert writer.state_dict()["num_held"].tolist()[1] == 0
    other = experience(np.zeros((2, 2)))
    other.columns["observation"][:, 0] += 2
    other.columns["observation"][:, 1] = 777, 778
    other.last[:] += 2
    writer.write(**other.between(0, 2))
    assert_references(table, writer)
    sample = items_of(table)
    assert sample.columns["observation"][:, -1].tolist() == [1, 10_001, 2, 3, 777]
    assert sample.columns["observation"][-1].tolist() == [777] * 3
    assert table.storage.num_used == writer.state_dict()["num_held"].sum() > 0
    writer.reset([0, 1])
    assert table.storage.num_used == 0


def test_streams_may_be_written_separately_and_in_any_order() -> None:
    whole, parts = make_table(), make_table()
    happened = experience([[0, 2, 0], [0, 0, 1], [2, 0, 0], [0, 0, 2]])
    Writer(whole, Transitions(2)).write(**happened.between(0, 4))
    writer = Writer(parts, Transitions(2))
    for start in (0, 2):
        for chosen in ([2, 0], [1]):
            part = happened.between(start, start + 2)
            writer.write(
                {name: column[:, chosen] for name, column in part["columns"].items()},
                part["last_observation"][chosen],
                [(t, chosen.index(b), seen) for t, b, seen in part["final_observations"] if b in chosen],
                streams=chosen,
            )
    one, other = items_of(whole), items_of(parts)
    orders = [np.lexsort((s.lengths, s.columns["observation"][:, -1])) for s in (one, other)]
    for name in FIELDS:
        np.testing.assert_array_equal(one.columns[name][orders[0]], other.columns[name][orders[1]])


class Counting(gymnasium.Env[Any, Any]):
    """Observes a step counter; episodes have five steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (2,), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)
    count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.start, self.count = self.count + 1, self.count + 1
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._seen(), 1.0, False, self.count >= self.start + 5, {}

    def _seen(self) -> Any:
        return np.array([self.count, 255 - self.count], np.uint8)


def test_frame_stacks_match_gymnasium() -> None:
    """Samples are stacked as `FrameStackObservation` does, from frames stored once."""
    stacking = gymnasium.wrappers.FrameStackObservation(Counting(), 4, padding_type="reset")
    plain = Counting()
    signature = {"observation": ArraySpec((2,), np.uint8)}
    fields = {
        "observation": Field("observation", "first", stack=4),
        "next_observation": Field("observation", "next", stack=4),
    }
    table = Table(
        signature,
        fields,
        max_size=100,
        sampler=Fifo(),
        remover=Fifo(),
        rate_limiter=MinSize(1),
        max_times_sampled=1,
    )
    writer = Writer(table, Transitions(1))
    seen: list[tuple[Any, Any]] = []
    frame, stack = plain.reset()[0], stacking.reset()[0]
    for _ in range(23):
        next_frame, _, _, truncated, _ = plain.step(0)
        next_stack = stacking.step(0)[0]
        seen.append((stack, next_stack))
        columns = {
            "observation": frame[None, None],
            "terminated": np.zeros((1, 1), bool),
            "truncated": np.full((1, 1), truncated),
        }
        final = [(0, 0, next_frame)] if truncated else []
        frame, stack = (plain.reset()[0], stacking.reset()[0]) if truncated else (next_frame, next_stack)
        writer.write(columns, frame[None], final)
    sample = items_of(table)
    np.testing.assert_array_equal(sample.columns["observation"], [before for before, _ in seen])
    np.testing.assert_array_equal(sample.columns["next_observation"], [after for _, after in seen])


def test_every_step_is_stored_once() -> None:
    """Overlapping windows and frame stacks need no further rows."""
    table = make_table()
    Writer(table, Sequences(3, stride=1)).write(**experience(np.zeros((100, 4))).between(0, 100))
    assert table.size == 4 * 98
    assert table.info().rows == 4 * 101


def test_observations_may_be_dicts_and_tuples() -> None:
    columns = {
        "observation": {"where": np.arange(6.0).reshape(3, 2, 1), "what": (np.ones((3, 2), np.int8),)},
        "terminated": np.array([[False, False], [True, False], [False, False]]),
        "truncated": np.zeros((3, 2), bool),
    }
    signature = infer_signature(columns)
    assert list(signature) == ["observation/where", "observation/what/#0", "terminated", "truncated"]
    fields = {"where": Field("observation/where"), "next": Field("observation/where", "next")}
    table = Table(
        signature,
        fields,
        max_size=9,
        sampler=Fifo(),
        remover=Fifo(),
        rate_limiter=MinSize(1),
        max_times_sampled=1,
    )
    last = {"where": np.array([[6.0], [7.0]]), "what": (np.ones(2, np.int8),)}
    final = [(1, 0, {"where": np.array([44.0]), "what": (np.int8(3),)})]
    Writer(table, Transitions(1)).write(columns, last, final)
    sample = items_of(table)
    assert sample.columns["where"].ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert sample.columns["next"].ravel().tolist() == [2, 3, 44, 5, 6, 7]


def test_priorities_belong_to_first_steps_and_default_to_the_maximum() -> None:
    table = make_table(sampler=Uniform(), max_times_sampled=0)
    writer = Writer(table, Transitions(2))
    happened = experience([[0], [0], [2], [0], [0], [0], [0]])
    writer.write(**happened.between(0, 3), priorities=np.array([[1.0], [2.0], [3.0]]))
    assert table.state_dict()["items"]["priorities"].tolist() == [1, 2, 3]
    table.update_priorities(table.state_dict()["items"]["keys"][:1], np.array([7.0]))
    writer.write(**happened.between(3, 5))
    assert table.state_dict()["items"]["priorities"].tolist() == [7, 2, 3, 7]
    writer.write(**happened.between(5, 6), priorities=4.0)
    assert table.state_dict()["items"]["priorities"].tolist() == [7, 2, 3, 7, 7]
    other = Writer(table, Transitions(2))
    other.load_state_dict(writer.state_dict())
    other.write(**happened.between(6, 7), priorities=5.0)  # its item started in the write before
    assert table.state_dict()["items"]["priorities"].tolist() == [7, 2, 3, 7, 7, 4]


def test_a_refused_write_changes_nothing() -> None:
    table = Table(
        SIGNATURE,
        FIELDS,
        max_size=100,
        max_length=LENGTH,
        sampler=Uniform(),
        remover=Fifo(),
        rate_limiter=SampleToInsertRatio(1, min_size=1, error_buffer=3),
    )
    writer = Writer(table, Transitions(2))
    happened = experience([[0], [0], [1], [0], [2], [0]], all_finals=False)
    writer.write(**happened.between(0, 3))
    before = [table.state_dict(), writer.state_dict()]
    with pytest.raises(
        InsertRefused, match="does not allow 2 inserts after 3 inserts, 0 samples and 0 deletes"
    ):
        writer.write(**happened.between(3, 6))
    assert same_state([table.state_dict(), writer.state_dict()], before)
    table.sample(3, np.random.default_rng(0))
    assert len(writer.write(**happened.between(3, 6))) == 2
    assert_references(table, writer)


def test_invalid_writes_are_rejected() -> None:
    writer = Writer(make_table(), Transitions(1))
    good = experience(np.zeros((2, 1))).between(0, 2)

    def write(changes: dict[str, Any], **more: Any) -> None:
        columns = {**good["columns"], **changes}
        columns = {name: column for name, column in columns.items() if column is not None}
        writer.write(**{**good, "columns": columns, **more})

    with pytest.raises(SignatureError, match="column 'reward' is missing; got observation, action"):
        write({"reward": None})
    with pytest.raises(
        SignatureError, match="the table has no column value; its columns are observation, action"
    ):
        write({"value": np.zeros((2, 1))})
    with pytest.raises(SignatureError, match=r"'reward' is float32\[2, 1\]; expected float64\[2, 1\]"):
        write({"reward": np.zeros((2, 1), np.float32)})
    with pytest.raises(SignatureError, match=r"'action' is float32\[2, 1, 3\]; expected float32\[2, 1, 2\]"):
        write({"action": np.zeros((2, 1, 3), np.float32)})
    with pytest.raises(SignatureError, match=r"'observation' is int64\[2\]; expected int64\[1\]"):
        write({}, last_observation=np.zeros(2, np.int64))
    with pytest.raises(ReplayError, match="must include 'terminated' and 'truncated'"):
        write({"truncated": None})
    with pytest.raises(ReplayError, match=r"must be \[T, B\], not \[2\] and \[2, 1\]"):
        write({"terminated": np.zeros(2, bool)})
    with pytest.raises(ReplayError, match="1 streams, but streams has 2 indices"):
        write({}, streams=[0, 1])
    with pytest.raises(ReplayError, match=r"mask has shape \[1, 1\]; expected \[T, B\] = \[2, 1\]"):
        write({}, mask=np.ones((1, 1), bool))
    with pytest.raises(
        ReplayError, match="step 1 of stream 0, which does not end an episode; set terminated"
    ):
        write({}, final_observations=[(1, 0, np.int64(3))])
    assert writer.table.storage.num_used == 0, "no stream has started"
    with pytest.raises(
        ReplayError, match=r"windows have up to 5 steps .* create the table with max_length=5"
    ):
        Writer(make_table(), Sequences(5))
    only: Any = {"sampler": Uniform(), "remover": Fifo(), "rate_limiter": MinSize(1)}
    blind = Table({"reward": ArraySpec((), np.float32)}, {}, max_size=1, **only)
    with pytest.raises(ReplayError, match="no column 'observation', only reward"):
        Writer(blind, Transitions(1))
    with pytest.raises(ReplayError, match="n_step is 0; set it to 1 or more"):
        Transitions(0)
    with pytest.raises(ReplayError, match="stride is 0; set both to 1 or more"):
        Sequences(3, stride=0)
    assert writer.write(**experience(np.zeros((0, 1))).between(0, 0)).size == 0


names = st.text("a/#%0 é", min_size=1, max_size=3)


@given(
    parts=st.recursive(
        st.just(0),
        lambda inner: (
            st.dictionaries(names, inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=3).map(tuple)
        ),
        max_leaves=6,
    )
)
def test_flattening_is_invertible_for_any_names(parts: Any) -> None:
    columns = {"observation": parts, "reward": 0}
    assert unflatten_columns(flatten_columns(columns)) == columns
