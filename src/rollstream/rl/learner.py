"""The learner: weights, their versions, and the compiled update that improves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rollstream.engine import RollstreamError
from rollstream.rl.jit import compiled
from rollstream.rl.normalize import with_seen
from rollstream.rl.params import TRAINED, Weights
from rollstream.rl.policy import Policy

Array = Any
Metrics = dict[str, Any]


class Diverged(RollstreamError):
    """A loss or gradient is no number any more."""


class Update(Protocol):
    """A pure function that learns from a batch; `settings` are numbers that may change while training."""

    def __call__(
        self, weights: Weights, state: Any, batch: Any, noise: Any, settings: Mapping[str, Array], /
    ) -> tuple[Weights, Any, Metrics]:
        """Better weights, the new state of whatever is kept beside them, and what is to be known of it."""
        ...


class Learner:
    """Holds weights and improves them, in one compiled dispatch a batch.

    Args:
        policy: whose weights are learned.
        update: how, for learners that are given batches; compiled here.
        optimizer: whose state is kept between updates; applies gradients that are computed elsewhere.
        begin: makes, of the first weights, what else is kept between updates instead: target networks,
            critics, several optimizers.
        noise: draws what is random in an update; with numpy, since sorting in XLA takes a fifth of an update.
        settings: the update's settings, given how much of the training is done (0 to 1).
        seed: of the first weights and of whatever is random in updates.
        total_steps: environment steps of the whole training, for schedules.
        side_by_side: whether independent parts of an update are computed at the same time (see `compiled`).
    """

    def __init__(
        self,
        policy: Policy,
        update: Update | None,
        optimizer: optax.GradientTransformation,
        *,
        begin: Callable[[Weights], Any] | None = None,
        noise: Callable[[np.random.Generator], Any] | None = None,
        settings: Callable[[float], dict[str, float]] = lambda _: {},
        seed: int = 0,
        total_steps: int = 1,
        side_by_side: bool = False,
    ):
        self.policy = policy
        self.weights = policy.init(seed)
        self.state: Any = (begin or optimizer.init)(trained(self.weights))
        """What is kept beside the weights from update to update: the optimizer's state, at least."""
        self.version = 0
        """How often the weights have changed."""
        self.steps = 0
        """Environment steps learned from."""
        self._update = compiled(update, side_by_side=side_by_side) if update is not None else None
        self._apply = compiled(partial(_applied, optimizer))
        self._noise = noise
        self._settings = settings
        self._seed = seed
        self.total_steps = total_steps
        """Environment steps of the whole training."""

    def train(self, batch: Any, steps: int | None = None) -> dict[str, Any]:
        """Learn from a batch: a new version, and what is to be known of it.

        It comes with so many new environment steps; left out, with as many as it has.
        """
        assert self._update is not None, "this learner is given gradients, not batches"
        progress = min(1.0, self.steps / self.total_steps)
        settings = self._settings(progress)
        noise: Any = ()
        if self._noise is not None:
            noise = self._noise(np.random.default_rng([self._seed, self.version, 0, 4]))
        arrays = {name: np.float32(value) for name, value in settings.items()}
        weights, state, metrics = self._update(self.weights, self.state, batch, noise, arrays)
        known: dict[str, Any] = {name: np.asarray(value) for name, value in metrics.items()}
        numbers = {name: float(value) for name, value in known.items() if value.ndim == 0}
        self._require_numbers(numbers)
        self.weights, self.state = weights, state
        self.version += 1
        self.steps += batch.steps if steps is None else steps
        return known | numbers | settings

    def update_target(self) -> None:
        """Make the weights as they are now the target that updates are computed with."""
        self.state = self.state | {"target": trained(self.weights)}

    def apply(self, gradients: Weights, metrics: Metrics, steps: int) -> dict[str, float]:
        """Take one step by a gradient that was computed elsewhere: a new version."""
        known = {name: float(value) for name, value in metrics.items()}
        self._require_numbers(known)
        settings = self._settings(min(1.0, self.steps / self.total_steps))
        rate = np.float32(settings["learning_rate"])
        self.weights, self.state = self._apply(rate, gradients, self.state, self.weights)
        self.version += 1
        self.steps += steps
        return known | settings

    def _require_numbers(self, metrics: Mapping[str, float]) -> None:
        odd = [name for name, value in metrics.items() if not math.isfinite(value)]
        odd = sorted(set(odd) - _MAY_BE_UNKNOWN, key=lambda name: (not name.endswith("_loss"), name))
        if odd:  # a part of the loss comes first: it is nearest to the cause
            others = f", and so {'is' if len(odd) == 2 else 'are'} {', '.join(odd[1:])}" if odd[1:] else ""
            raise Diverged(
                f"{odd[0]} is {metrics[odd[0]]} in update {self.version + 1}{others}; the weights before "
                f"it are kept. Try a smaller learning rate, or look for rewards or observations that are no "
                f"numbers"
            )

    def published(self) -> Weights:
        """The weights as numpy arrays, to send."""
        return jax.tree.map(np.asarray, self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Weights, what is kept beside them, counters."""
        return {
            "weights": self.published(),
            "state": [np.asarray(leaf) for leaf in jax.tree.leaves(self.state)],
            "version": self.version,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        expected = {name: np.shape(value) for name, value in self.weights.items()}
        found = {name: np.shape(value) for name, value in state["weights"].items()}
        if expected != found:
            odd = sorted(
                name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
            )
            raise RollstreamError(
                f"these weights are of another network: {odd[0]} is {found.get(odd[0], 'missing')}, "
                f"not {expected.get(odd[0], 'expected at all')}"
            )
        self.weights = {name: jnp.asarray(state["weights"][name]) for name in self.weights}
        structure = jax.tree.structure(self.state)
        self.state = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in state["state"]])
        self.version, self.steps = int(state["version"]), int(state["steps"])


_MAY_BE_UNKNOWN = frozenset({"explained_variance"})


def trained(weights: Weights) -> Weights:
    """The weights that gradients change."""
    return {name: value for name, value in weights.items() if name.startswith(TRAINED)}


def descended(
    optimizer: optax.GradientTransformation,
    learning_rate: Array,
    gradients: Weights,
    state: Any,
    weights: Weights,
) -> tuple[Weights, Any]:
    """One step down: new weights, the optimizer's new state."""
    changes: Any
    changes, state = optimizer.update(gradients, state, trained(weights))
    moved = {name: weights[name] - learning_rate * change for name, change in changes.items()}
    return weights | moved, state


def _applied(
    optimizer: optax.GradientTransformation, learning_rate: Array, item: Weights, state: Any, weights: Weights
) -> tuple[Weights, Any]:
    """One step by gradients, which may have come with what the statistics are to learn."""
    weights, state = descended(optimizer, learning_rate, trained(item), state, weights)
    return with_seen(weights, item), state


def shuffled(random: np.random.Generator, count: int, *, epochs: int, size: int) -> np.ndarray[Any, Any]:
    """Numbers of rows, `size` at a time, such that every one comes up once an epoch."""
    orders = [random.permutation(count)[: count // size * size] for _ in range(epochs)]
    return np.concatenate(orders).reshape(-1, size).astype(np.int32)


def in_minibatches(
    step: Callable[[Any, Any], tuple[Any, Metrics]], carry: Any, rows: Any, order: Array
) -> tuple[Any, Metrics]:
    """Go through rows `[N, ...]` in the order of `shuffled`: the mean of all metrics.

    If some come to no number, those of the first minibatch where that is so: after it all are none.
    """

    def one(carry: Any, chosen: Array) -> tuple[Any, Metrics]:
        return step(carry, jax.tree.map(lambda column: column[chosen], rows))

    carry, metrics = jax.lax.scan(one, carry, order)
    odd = ~jnp.stack([jnp.isfinite(each) for each in metrics.values()]).all(axis=0)
    first = jnp.argmax(odd)
    return carry, {name: jnp.where(odd[first], each[first], jnp.mean(each)) for name, each in metrics.items()}
