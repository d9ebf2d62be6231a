"""Selectors against a list model, and their sampling frequencies against their probabilities."""

import importlib.util
import json
from typing import Any

import numpy as np
import pytest
import scripts
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.replay import (
    Fifo,
    Lifo,
    MaxHeap,
    MinHeap,
    OrderedSelector,
    Prioritized,
    ReplayError,
    Selector,
    Uniform,
    importance_weights,
)

MAKERS = {
    "uniform": Uniform,
    "prioritized": lambda: Prioritized(0.6),
    "prioritized, exponent 1": lambda: Prioritized(1.0),
    "prioritized, exponent 0": lambda: Prioritized(0.0),
    "fifo": Fifo,
    "lifo": Lifo,
    "min heap": MinHeap,
    "max heap": MaxHeap,
}
every_selector = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
SLOTS = 12


class ListModel:
    """A model of a selector: for each slot, its priority and when it was inserted and updated."""

    def __init__(self) -> None:
        self.items: dict[int, list[float]] = {}
        self.clock = 0

    def insert(self, slots: Any, priorities: Any) -> None:
        for slot, priority in zip(slots, priorities, strict=True):
            self.items[slot] = [priority, self.clock, self.clock]
            self.clock += 1

    def update(self, slots: Any, priorities: Any) -> None:
        for slot, priority in zip(slots, priorities, strict=True):
            self.items[slot][0], self.items[slot][2] = priority, self.clock
            self.clock += 1

    def remove(self, slots: Any) -> None:
        for slot in slots:
            del self.items[slot]

    def replace(self, slots: Any, priorities: Any) -> None:
        self.remove(slots)
        self.insert(slots, priorities)

    def order(self, selector: Selector) -> list[int]:
        """Slots in the order of an ordered selector."""
        keys: Any = {
            Fifo: lambda slot: self.items[slot][1],
            Lifo: lambda slot: -self.items[slot][1],
            MinHeap: lambda slot: (self.items[slot][0], self.items[slot][2]),
            MaxHeap: lambda slot: (-self.items[slot][0], self.items[slot][2]),
        }
        return sorted(self.items, key=keys[type(selector)])

    def probabilities(self, selector: Selector) -> dict[int, float]:
        """The probability of each slot."""
        if isinstance(selector, OrderedSelector):
            return dict.fromkeys(self.items, 0.0) | {self.order(selector)[0]: 1.0}
        weights = dict.fromkeys(self.items, 1.0)
        if isinstance(selector, Prioritized) and any(priority for priority, *_ in self.items.values()):
            weights = {
                slot: p**selector.priority_exponent if p else 0.0 for slot, (p, *_) in self.items.items()
            }
        total = sum(weights.values())
        return {slot: weight / total for slot, weight in weights.items()}


priorities = st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 1e3))


@every_selector
@given(data=st.data())
@settings(max_examples=50)
def test_selector_matches_a_list_model(make: Any, data: st.DataObject) -> None:
    """After any inserts, updates, removals and restores."""
    selector: Selector = make()
    selector.reset(SLOTS)
    model = ListModel()
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["insert", "insert", "update", "remove", "replace", "save"]))
        if kind == "insert":
            vacant = st.sampled_from([slot for slot in range(SLOTS) if slot not in model.items] or [None])
            slots = [slot for slot in data.draw(st.lists(vacant, unique=True)) if slot is not None]
        else:
            slots = data.draw(st.lists(st.sampled_from(list(model.items) or [None]), unique=kind != "update"))
            slots = [slot for slot in slots if slot is not None]
        if kind == "save":
            saved = selector.slots()
            selector = make()
            selector.reset(SLOTS)
            selector.insert(saved, np.array([model.items[slot][0] for slot in saved.tolist()]))
        elif kind == "remove":
            selector.remove(np.array(slots, np.int64))
            model.remove(slots)
        else:
            given = data.draw(st.lists(priorities, min_size=len(slots), max_size=len(slots)))
            getattr(selector, kind)(np.array(slots, np.int64), np.array(given, np.float64))
            getattr(model, kind)(slots, given)
        assert_matches(selector, model)


def assert_matches(selector: Selector, model: ListModel) -> None:
    assert selector.size == len(model.items)
    if not model.items:
        return
    probabilities_by_slot = model.probabilities(selector)
    uniforms = np.random.default_rng(selector.size).random(40)
    uniforms[:2] = 0.0, np.nextafter(1.0, 0.0)
    slots, stated = selector.select(uniforms)
    assert all(probabilities_by_slot[slot] > 0 for slot in slots.tolist())
    np.testing.assert_allclose(stated, [probabilities_by_slot[slot] for slot in slots.tolist()], rtol=1e-9)
    one_by_one = [int(selector.select(np.array([u]))[0][0]) for u in uniforms[:5]]
    assert one_by_one == slots[:5].tolist(), "selecting several at once equals selecting one by one"
    if isinstance(selector, OrderedSelector):
        for count in (1, 2, SLOTS):
            assert selector.peek(count).tolist() == model.order(selector)[:count]


@pytest.mark.parametrize("make", [Uniform, lambda: Prioritized(0.7)], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("slots", [5, 17, 5_000, 200_000])
def test_random_selectors_match_their_probabilities(make: Any, slots: int) -> None:
    """Chi-square of 200,000 draws over 20 groups of items, after some were removed and updated."""
    generator = np.random.default_rng(3)
    selector: Selector = make()
    selector.reset(slots)
    weights = generator.random(slots) ** 3 + 0.01
    selector.insert(np.arange(slots), weights)
    gone = generator.permutation(slots)[: slots // 3]
    selector.remove(gone)
    weights[gone] = 0.0
    kept = np.flatnonzero(weights)
    changed = kept[::4]
    weights[changed] = 2.0 * weights[changed]
    selector.update(changed, weights[changed])
    mass = np.where(weights > 0, weights**0.7 if isinstance(selector, Prioritized) else 1.0, 0.0)
    drawn, stated = selector.select(generator.random(200_000))
    np.testing.assert_allclose(stated, mass[drawn] / mass.sum(), rtol=1e-9)
    groups = np.arange(slots) % 20
    counts = np.bincount(groups[drawn], minlength=20)
    expected = np.bincount(groups, mass, minlength=20) / mass.sum() * len(drawn)
    assert not counts[expected == 0].any()
    present = expected > 0
    assert chi_square(counts[present], expected[present]) < 50  # 19 degrees of freedom: once in 10,000 runs


def chi_square(counts: Any, expected: Any) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@given(
    exponents=st.lists(st.integers(-150, 150), min_size=1, max_size=40),
    uniforms=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
    seed=st.integers(0, 100),
)
def test_rounding_never_selects_a_missing_item(
    exponents: list[int], uniforms: list[float], seed: int
) -> None:
    """With weights of any magnitude side by side, and zeros and removed items between them."""
    generator = np.random.default_rng(seed)
    slots = 32 * 4096 + 5  # three levels
    selector = Prioritized(1.0)
    selector.reset(slots)
    chosen = generator.permutation(slots)[: 3 * len(exponents)]
    third = len(exponents)
    weights = np.concatenate([10.0 ** np.array(exponents), np.zeros(third), np.ones(third)])
    selector.insert(chosen, weights)
    selector.remove(chosen[2 * third :])
    drawn, stated = selector.select(np.array([*uniforms, 0.0, np.nextafter(1.0, 0.0)]))
    assert set(drawn.tolist()) <= set(chosen[:third].tolist())
    assert (stated > 0).all()
    selector.remove(chosen[:third])
    drawn, stated = selector.select(np.array(uniforms))
    assert set(drawn.tolist()) <= set(chosen[third : 2 * third].tolist()), "all items left have priority 0"
    assert (stated == 1 / third).all()


def test_a_target_rounded_to_the_end_of_a_node_selects_an_item_of_the_node() -> None:
    """Here the target less the sums before its node, 2**52 + 1.5, is rounded up to the sum of the node."""
    weights = {0: 1.5, 32: 2.0**52 + 2}
    selector = Prioritized(1.0)
    selector.reset(8192)  # two levels: slots 32 to 63 have one parent
    selector.insert(np.array(list(weights)), np.array(list(weights.values())))
    target = 2.0**52 + 3
    uniform = target / selector.total_weight
    assert uniform * selector.total_weight == target
    assert selector.select(np.array([uniform]))[0].tolist() == [32]


def test_sums_do_not_drift() -> None:
    """After many updates they equal those of a tree built at once."""
    generator = np.random.default_rng(0)
    selector, fresh = Prioritized(0.5), Prioritized(0.5)
    for one in (selector, fresh):
        one.reset(70_000)
    slots = np.arange(70_000)
    selector.insert(slots, generator.random(70_000) * 1e9)
    for _ in range(200):
        some = generator.integers(0, 70_000, 500)
        selector.update(some, generator.random(500) * 10.0 ** generator.integers(-9, 9))
    final = generator.random(70_000)
    for part in np.array_split(generator.permutation(slots), 50):
        selector.update(part, final[part])
    fresh.insert(slots, final)
    assert selector.total_weight == fresh.total_weight
    uniforms = generator.random(1000)
    np.testing.assert_array_equal(selector.select(uniforms)[0], fresh.select(uniforms)[0])


def test_heaps_break_ties_by_age() -> None:
    for make in (MinHeap, MaxHeap):
        selector = make()
        selector.reset(4)
        selector.insert(np.arange(4), np.ones(4))
        assert selector.peek(4).tolist() == [0, 1, 2, 3]
        selector.update(np.array([1]), np.ones(1))
        assert selector.peek(4).tolist() == [0, 2, 3, 1]


@pytest.mark.parametrize("make", [Fifo, Lifo, MinHeap], ids=["fifo", "lifo", "heap"])
def test_memory_of_removed_items_is_bounded(make: Any) -> None:
    selector = make()
    selector.reset(10)
    selector.insert(np.arange(5), np.ones(5))
    for i in range(1000):
        slot = np.array([5 + i % 5])
        selector.insert(slot, np.array([2.0 + i]))
        if make is MinHeap:
            selector.update(slot, np.array([3.0 + i]))
        selector.remove(slot)
    kept = len(selector._heap) if isinstance(selector, MinHeap) else len(selector._queue)
    assert kept <= 100
    assert sorted(selector.peek(10).tolist()) == [0, 1, 2, 3, 4]


def test_importance_weights_match_the_paper() -> None:
    probabilities = np.array([0.1, 0.4, 0.2])
    for beta in (0.0, 0.4, 1.0):
        plain = (10 * probabilities) ** -beta
        np.testing.assert_allclose(importance_weights(probabilities, beta), plain / plain.max())
    np.testing.assert_array_equal(importance_weights(probabilities, 0.0), np.ones(3))
    relative = np.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(importance_weights(relative, 0.5, 1.0), [1, 0.5**0.5, 0.5])
    np.testing.assert_allclose(importance_weights(relative * 3, 1.0, 1.0), [1 / 3, 1 / 6, 1 / 12])


def test_negative_priority_exponent_is_rejected() -> None:
    with pytest.raises(ReplayError, match="priority_exponent is -1; set it to 0 or more"):
        Prioritized(-1)


IN_CPPRB = """
import cpprb, json, numpy as np, sys
request = json.load(sys.stdin)
size = len(request["priorities"])
columns = {"index": {"dtype": np.int64}}
buffer = cpprb.PrioritizedReplayBuffer(size, columns, alpha=request["alpha"], eps=0.0)
buffer.add(index=np.arange(size), priorities=np.array(request["priorities"]))
slots, weights = [], []
for _ in range(100):
    batch = buffer.sample(3000, beta=request["beta"])  # the next one is written into the same arrays
    slots.append(batch["index"].ravel().tolist())
    weights.append(batch["weights"].tolist())
print(json.dumps([slots, weights]))
"""


@pytest.mark.skipif(importlib.util.find_spec("cpprb") is None, reason="cpprb is not installed")
def test_cpprb_agrees() -> None:
    """cpprb samples with the same frequencies, and its importance weights are proportional to ours.

    It runs in its own process, since it keeps shared memory until the process ends.
    """
    generator = np.random.default_rng(1)
    size, alpha, beta = 300, 0.6, 0.4
    given = generator.random(size) + 0.05
    request = json.dumps({"priorities": given.tolist(), "alpha": alpha, "beta": beta})
    done = scripts.run_code(IN_CPPRB, given=request)
    batches, weights = (np.array(part) for part in json.loads(done.stdout.splitlines()[-1]))
    ours = Prioritized(alpha)
    ours.reset(size)
    ours.insert(np.arange(size), given)
    drawn, probabilities = ours.select(generator.random(batches.size))
    np.testing.assert_allclose(probabilities, given[drawn] ** alpha / (given**alpha).sum())
    for slots, own in zip(batches, weights, strict=True):
        expected = importance_weights(given[slots] ** alpha / (given**alpha).sum(), beta)
        np.testing.assert_allclose(own / own.max(), expected, rtol=1e-5)
    counts = [np.bincount(slots, minlength=size) for slots in (drawn, batches.ravel())]
    pooled = (counts[0] + counts[1]) / 2
    assert sum(chi_square(count, pooled) for count in counts) < 450  # 299 degrees of freedom, six deviations
