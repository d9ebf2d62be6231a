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
    32 took 83 us with 32 children per node, 89 us with 16 and 95 us with 64; 1024 items took 780, 620 and
    1070 us."""

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
        self._cumulative = np.zeros(len(self._sums[-1]) + 1)  # of the top level
        self._stale: list[Array | slice] = []  # leaves whose parents have to be summed again
        self._num_stale = 0

    @property
    def total(self) -> float:
        """The sum of all weights."""
        self._refresh()
        return float(self._cumulative[-1])

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
        if not self._stale:
            return
        parents = [
            np.arange(leaves.start >> self.BITS, (leaves.stop - 1 >> self.BITS) + 1)
            if isinstance(leaves, slice)
            else leaves >> self.BITS
            for leaves in self._stale
        ]
        nodes = parents[0] if len(parents) == 1 else np.concatenate(parents)
        self._stale, self._num_stale = [], 0
        for level, children in enumerate(self._children):
            if level:
                nodes = nodes >> self.BITS
            if nodes.size > 64:  # adjacent children share their parent
                nodes = nodes[np.concatenate(([True], nodes[1:] != nodes[:-1]))]
            self._sums[level + 1][nodes] = children.take(nodes, axis=0).sum(axis=1)
        self._sums[-1].cumsum(out=self._cumulative[1:])

    def sample(self, uniforms: Array) -> tuple[Array, Array]:
        """A leaf for each random number in [0, 1), in proportion to the weights; and its weight.

        Rounding may carry a target to the end of a node, and from there to a leaf of weight 0. Such a target
        is searched for again, with clipping. The total has to be positive.
        """
        targets = uniforms * self.total
        leaves = self._find(targets)
        weights = self._sums[0].take(leaves)
        if np.count_nonzero(weights) < len(weights):
            lost = np.flatnonzero(weights == 0)
            leaves[lost] = self._find(targets[lost], clip=True)
            weights = self._sums[0].take(leaves)
        return leaves, weights

    def _find(self, targets: Array, *, clip: bool = False) -> Array:
        """The leaf at which the cumulative sum of the weights passes each target.

        At every level, descend to the first child whose cumulative sum is above the rest of the target. With
        `clip` the rest stays below the node's sum, so there is one, and it has a positive sum, however it was
        rounded.
        """
        if clip:
            targets = np.minimum(targets, np.nextafter(self._cumulative[-1], 0))
        nodes = self._cumulative.searchsorted(targets, side="right") - 1
        np.minimum(nodes, len(self._cumulative) - 2, out=nodes)
        before = self._cumulative.take(nodes)
        for level in range(len(self._children) - 1, -1, -1):
            targets = targets - before
            sums = self._children[level].take(nodes, axis=0).cumsum(axis=1)
            if clip:
                targets = np.minimum(targets, np.nextafter(sums[:, -1], 0))
            child = (sums > targets[:, None]).argmax(axis=1)
            nodes = (nodes << self.BITS) + child
            if level:
                index = np.arange(-1, sums.size - 1, self.WIDTH) + child
                before = sums.ravel().take(index, mode="wrap") * (child > 0)
        return nodes
