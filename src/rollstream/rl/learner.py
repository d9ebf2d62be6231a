"""The learner: weights, their version, and the jitted update that trains them."""

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
from rollstream.rl.jit import jit
from rollstream.rl.normalize import combined_statistics
from rollstream.rl.params import Weights, require_same_shapes, trainable
from rollstream.rl.policy import Policy
from rollstream.rl.updates import Metrics, optimizer_step

Array = Any


class Diverged(RollstreamError):
    """A loss or gradient is NaN or infinite."""


class Update(Protocol):
    """A pure function that trains on a batch."""

    def __call__(
        self, weights: Weights, state: Any, batch: Any, random_inputs: Any, schedules: Mapping[str, Array], /
    ) -> tuple[Weights, Any, Metrics]:
        """Return the new weights, the new state of the learner and metrics."""
        ...


class Learner:
    """Holds the weights and trains them, one jitted call per batch.

    Args:
        policy: The policy whose weights are trained.
        update: Trains on a batch; jitted here. `None` for a learner that only applies gradients.
        optimizer: Applies gradients that workers computed; its state is the learner's state by default.
        init_state: Creates the learner's state from the initial parameters, if it is more than the
            optimizer's: target networks, critics, several optimizers.
        random_inputs: Draws the random inputs of an update; in NumPy, because shuffling in XLA takes a fifth
            of an update.
        schedules: Scheduled values by name, such as the learning rate, given the fraction of training done.
        updates_per_batch: How much a batch adds to the metric `n_updates`: the number of epochs, for
            instance.
        seed: Seed of the initial weights and of the random inputs.
        total_steps: Environment steps of the whole training.
        concurrent: Whether independent parts of the update run at the same time; see `jit`.
    """

    def __init__(
        self,
        policy: Policy,
        update: Update | None,
        optimizer: optax.GradientTransformation,
        *,
        init_state: Callable[[Weights], Any] | None = None,
        random_inputs: Callable[[np.random.Generator], Any] | None = None,
        schedules: Callable[[float], dict[str, float]] = lambda _: {},
        updates_per_batch: int = 1,
        seed: int = 0,
        total_steps: int = 1,
        concurrent: bool = False,
    ):
        self.policy = policy
        self.weights = policy.init(seed)
        self.state: Any = (init_state or optimizer.init)(trainable(self.weights))
        """What the update keeps beside the weights: optimizer state, target networks."""
        self.version = 0
        """How often the weights have changed."""
        self.steps = 0
        """Environment steps trained on."""
        self.total_steps = total_steps
        self._update = jit(update, concurrent=concurrent) if update is not None else None
        self._apply = jit(partial(_apply_gradients, optimizer))
        self._random_inputs = random_inputs
        self._schedules = schedules
        self._updates_per_batch = updates_per_batch
        self._seed = seed

    def train(self, batch: Any, steps: int | None = None) -> dict[str, Any]:
        """Train on a batch, which makes a new version of the weights; return the metrics.

        Args:
            batch: What the update takes.
            steps: New environment steps this training accounts for; `batch.steps` by default.
        """
        assert self._update is not None, "this learner applies gradients and has no update for batches"
        schedules = self._scheduled()
        random_inputs: Any = ()
        if self._random_inputs is not None:
            random_inputs = self._random_inputs(np.random.default_rng([self._seed, self.version, 0, 4]))
        arrays = {name: np.float32(value) for name, value in schedules.items()}
        result = self._update(self.weights, self.state, batch, random_inputs, arrays)
        weights, state, metrics = _require_update(result)
        host: dict[str, Any] = {name: np.asarray(value) for name, value in metrics.items()}
        scalars = {name: float(value) for name, value in host.items() if value.ndim == 0}
        self._require_finite(scalars)
        self.weights, self.state = weights, state
        self._count(batch.steps if steps is None else steps)
        return host | scalars | schedules | {"n_updates": self.n_updates}

    def apply_gradients(self, grads: Weights, metrics: Metrics, steps: int) -> dict[str, float]:
        """Apply gradients that a worker computed, which makes a new version; return the metrics."""
        scalars = {name: float(value) for name, value in metrics.items()}
        self._require_finite(scalars)
        schedules = self._scheduled()
        learning_rate = np.float32(schedules["learning_rate"])
        self.weights, self.state = self._apply(learning_rate, grads, self.state, self.weights)
        self._count(steps)
        return scalars | schedules | {"n_updates": self.n_updates}

    def update_target(self) -> None:
        """Copy the parameters to the target network."""
        self.state = self.state | {"target": trainable(self.weights)}

    @property
    def n_updates(self) -> int:
        """Number of updates as Stable-Baselines3 counts them: epochs of PPO, else gradient steps."""
        return self.version * self._updates_per_batch

    def _scheduled(self) -> dict[str, float]:
        return self._schedules(min(1.0, self.steps / self.total_steps))

    def _count(self, steps: int) -> None:
        self.version += 1
        self.steps += steps

    def _require_finite(self, metrics: Mapping[str, float]) -> None:
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        bad = sorted(set(bad) - _MAY_BE_NAN, key=lambda name: (not name.endswith("_loss"), name))
        if bad:  # a part of the loss comes first: it is nearest to the cause
            others = f", and so {'is' if len(bad) == 2 else 'are'} {', '.join(bad[1:])}" if bad[1:] else ""
            raise Diverged(
                f"{bad[0]} is {metrics[bad[0]]} in update {self.version + 1}{others}; the weights before it "
                f"are kept. Try a smaller learning rate"
            )

    def get_weights(self) -> Weights:
        """The weights as NumPy arrays."""
        return jax.tree.map(np.asarray, self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Weights, learner state and counters."""
        return {
            "weights": self.get_weights(),
            "state": [np.asarray(leaf) for leaf in jax.tree.leaves(self.state)],
            "version": self.version,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same network."""
        require_same_shapes(state["weights"], self.weights)
        leaves, structure = jax.tree.flatten(self.state)
        require_same_shapes(
            {f"state {index}": leaf for index, leaf in enumerate(state["state"])},
            {f"state {index}": leaf for index, leaf in enumerate(leaves)},
        )
        self.weights = {name: jnp.asarray(state["weights"][name]) for name in self.weights}
        self.state = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in state["state"]])
        self.version, self.steps = int(state["version"]), int(state["steps"])


def _require_update(result: Any) -> tuple[Weights, Any, Metrics]:
    """What an update returned; raise if that is not weights, state and metrics."""
    found = f"{len(result)} results" if isinstance(result, tuple) else type(result).__name__
    if not isinstance(result, tuple) or len(result) != 3:
        raise RollstreamError(f"update must return weights, state and metrics, and returned {found}")
    weights, _, metrics = result
    for name, value in (("weights", weights), ("metrics", metrics)):
        if not isinstance(value, Mapping):
            raise RollstreamError(
                f"update must return weights, state and metrics, and its {name} are a "
                f"{type(value).__name__} instead of a dict"
            )
    return result


_MAY_BE_NAN = frozenset({"explained_variance"})


def _apply_gradients(
    optimizer: optax.GradientTransformation,
    learning_rate: Array,
    grads: Weights,
    opt_state: Any,
    weights: Weights,
) -> tuple[Weights, Any]:
    """Apply gradients, which may come with statistics of the batch they were computed on."""
    weights, opt_state = optimizer_step(optimizer, learning_rate, trainable(grads), opt_state, weights)
    return weights | combined_statistics(weights, grads), opt_state
