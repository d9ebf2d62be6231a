"""Metrics of updates: one array per call, which stays on the device until somebody reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollstream.engine import RollstreamError
from rollstream.rl.updates import Metrics

Array = Any
MAY_BE_NAN = frozenset({"explained_variance"})
"""Metrics that are NaN where they are not defined."""


class Diverged(RollstreamError):
    """A loss or gradient is NaN or infinite."""


@partial(jax.tree_util.register_dataclass, data_fields=("scalars", "arrays"), meta_fields=("names",))
@dataclass(frozen=True)
class PackedMetrics:
    """Metrics as few arrays, so that reading them takes few transfers."""

    scalars: Array
    """`[n + 1]`, or `[updates, n + 1]`; the last is 1 if all so far are finite, else 0."""
    names: tuple[str, ...]
    """Names of the n scalars."""
    arrays: dict[str, Array]
    """Metrics of items, such as priorities."""

    @property
    def finite(self) -> Array:
        """1 if all metrics are finite, else 0."""
        return self.scalars[..., -1]


def pack(metrics: Metrics, before: Array) -> PackedMetrics:
    """Pack metrics, inside a jitted function.

    Args:
        metrics: Scalars and arrays by name.
        before: 1 if the metrics of all updates before this one were finite, else 0.
    """
    arrays = {name: value for name, value in metrics.items() if jnp.ndim(value)}
    scalars = {name: jnp.float32(value) for name, value in metrics.items() if not jnp.ndim(value)}
    finite = [jnp.isfinite(value) for name, value in scalars.items() if name not in MAY_BE_NAN]
    all_finite = jnp.where(jnp.all(jnp.array(finite)), before, 0)
    packed = jnp.stack([*scalars.values(), all_finite])
    return PackedMetrics(packed, tuple(scalars), arrays)


class UpdateMetrics(Mapping[str, Any]):
    """Metrics of one or several updates by name: means of scalars, arrays, and the latest of schedules.

    Args:
        packed: The metrics.
        latest: Values the host knows, of which a report has the latest: schedules, counts.
        first: Number of the first of these updates.
    """

    def __init__(self, packed: PackedMetrics, latest: dict[str, float], first: int):
        self.packed = packed
        self.latest = latest
        self._first = first
        self._rows: np.ndarray[Any, Any] | None = None

    @staticmethod
    def of_rows(names: Sequence[str], rows: np.ndarray[Any, Any], latest: dict[str, float]) -> UpdateMetrics:
        """Metrics that have been read before."""
        finite = np.ones((len(rows), 1))
        return UpdateMetrics(PackedMetrics(np.hstack([rows, finite]), tuple(names), {}), latest, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scalars of each update."""
        return self.packed.names

    def copy_to_host_async(self) -> None:
        """Start to read them."""
        if self._rows is None and isinstance(self.packed.scalars, jax.Array):
            self.packed.scalars.copy_to_host_async()

    def rows(self) -> np.ndarray[Any, Any]:
        """Scalars `[updates, n]`; waits for them. Raises `Diverged` if one is NaN or infinite."""
        if self._rows is None:
            packed = np.asarray(self.packed.scalars)
            packed = packed.reshape(-1, packed.shape[-1])
            if not packed[-1, -1]:
                row = int(np.argmin(packed[:, -1]))  # the first
                raise_diverged(dict(zip(self.names, packed[row].tolist(), strict=False)), self._first + row)
                raise Diverged(f"a metric was NaN or infinite before update {self._first + row}")
            self._rows = packed[:, :-1]
        return self._rows

    def __getitem__(self, name: str) -> Any:
        packed = self.packed
        if name in self.names:
            return float(self.rows()[:, self.names.index(name)].mean())
        if name in packed.arrays:
            return np.asarray(packed.arrays[name])
        return self.latest[name]

    def __contains__(self, name: object) -> bool:
        return name in self.packed.arrays or name in self.names or name in self.latest

    def __iter__(self) -> Iterator[str]:
        return iter([*self.names, *self.packed.arrays, *self.latest])

    def __len__(self) -> int:
        return len(self.names) + len(self.packed.arrays) + len(self.latest)


def raise_diverged(metrics: Mapping[str, float], update: int) -> None:
    """Raise `Diverged` if a metric is NaN or infinite, naming the one nearest to the cause."""
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    bad = sorted(set(bad) - MAY_BE_NAN, key=lambda name: (not name.endswith("_loss"), name))
    if bad:  # a part of the loss comes first: it is nearest to the cause
        others = f", and so {'is' if len(bad) == 2 else 'are'} {', '.join(bad[1:])}" if bad[1:] else ""
        raise Diverged(
            f"{bad[0]} is {metrics[bad[0]]} in update {update}{others}; the weights before it are kept. "
            f"Try a smaller learning rate"
        )
