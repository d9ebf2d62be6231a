"""A sum tree: weighted sampling in logarithmic time (Schaul et al., 2016, arXiv:1511.05952)."""

from __future__ import annotations

import numpy as np

from rollstream.replay.arrays import Array


class SumTree:
    """Weights as the leaves of a tree whose nodes hold the sum of their 32 children.

    Descending one level compares the cumulative sums of 32 adjacent numbers with the target. Sums are always
    computed from the children: they do not drift, and depend only on the weights.

    Args:
        capacity: Number of leaves.
    """

    BITS = 5
    WIDTH = 1 << BITS
    MAX_ROOTS = 2048
    """Nodes of the top level, which is searched by its cumulative sum. With 1M items, sampling and updating
    32 took 33 us with 32 children per node, 35 us with 16 and 39 us with 8; 1024 items took 510, 450 and
    440 us."""

    def __init__(self, capacity: int):
        self._sums: list[Array] = []  # per level, from the leaves up
        count = capacity
        while True:
            count = -(-count // self.WIDTH) * self.WIDTH
            self._sums.append(np.zeros(count))
            if count <= self.MAX_ROOTS:
                break
            count //= self.WIDTH
        self._children = [sums.reshape(-1, self.WIDTH) for sums in self._sums[:-1]]
        self._cumulative = np.zeros(len(self._sums[-1]))  # of the top level
        self._bounds, self._total = self._cumulative[:-1], self._cumulative[-1:]
        self._stale: list[Array | slice] = []  # leaves whose parents have to be summed again
        self._num_stale = 0

    @property
    def total(self) -> float:
        """The sum of all weights."""
        if self._stale:
            self._refresh()
        return self._total.item()

    def update(self, leaves: Array | slice, weights: Array | float) -> None:
        """Set weights; sums are updated before the next read."""
        self._sums[0][leaves] = weights
        if isinstance(leaves, slice):
            last = self._stale[-1] if self._stale else None
            if isinstance(last, slice) and last.stop == leaves.start:
                self._stale[-1] = slice(last.start, leaves.stop)
                return
            self._num_stale += 1
        else:
            self._num_stale += len(leaves)
        self._stale.append(leaves)
        if self._num_stale > self.MAX_ROOTS:
            self._refresh()

    def _refresh(self) -> None:
        parents = [
            np.arange(leaves.start >> self.BITS, (leaves.stop - 1 >> self.BITS) + 1)
            if isinstance(leaves, slice)
            else leaves >> _BITS
            for leaves in self._stale
        ]
        nodes = parents[0] if len(parents) == 1 else np.concatenate(parents)
        self._stale, self._num_stale = [], 0
        for level, children in enumerate(self._children):
            if level:
                nodes = nodes >> _BITS
            if nodes.size > 64:  # adjacent children share their parent
                nodes = nodes[np.concatenate(([True], nodes[1:] != nodes[:-1]))]
            self._sums[level + 1][nodes] = np.add.reduce(children.take(nodes, 0), 1)
        np.add.accumulate(self._sums[-1], 0, None, self._cumulative)

    def sample(self, uniforms: Array) -> tuple[Array, Array]:
        """A leaf for each random number in [0, 1), in proportion to the weights; and its share of the total.

        The total has to be positive.
        """
        if self._stale:
            self._refresh()
        leaves = self._find(uniforms * self._total)
        weights = self._sums[0][leaves]
        if np.count_nonzero(weights) < len(weights):  # rounding carried a target out of its node
            lost = np.flatnonzero(weights == 0)
            positive = np.flatnonzero(self._sums[0])
            leaves[lost] = positive.take(positive.searchsorted(leaves[lost]), mode="clip")
            weights = self._sums[0][leaves]
        return leaves, weights / self._total

    def _find(self, targets: Array) -> Array:
        """The leaf at which the cumulative sum of the weights passes each target.

        At every level, descend to the first child whose cumulative sum reaches the target. What exceeds the
        target is the target among its children: as random as what lies below, and without a special case
        for the first child.
        """
        nodes = self._bounds.searchsorted(targets, "right")
        targets = self._cumulative[nodes] - targets
        ends = np.arange(0, len(targets) * self.WIDTH, self.WIDTH)
        for children in reversed(self._children):
            sums = children.take(nodes, 0)
            first = sums[:, 0]
            first -= targets
            np.add.accumulate(sums, 1, None, sums)
            child = (sums >= _ZERO).argmax(1)
            nodes = (nodes << _BITS) + child
            targets = sums.ravel()[ends + child]
        return nodes


# NumPy takes 0.3 us for an operation on 32 numbers with an array, and 0.6 us with a Python number.
_BITS, _ZERO = np.array(SumTree.BITS), np.array(0.0)
