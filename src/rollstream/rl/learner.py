"""The learner: weights, their version, and the jitted update that trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rollstream.engine import RollstreamError
from rollstream.rl.device_replay import DeviceDraw
from rollstream.rl.device_sampling import (
    Priorities,
    RingLayout,
    Storage,
    sample_transitions,
    update_priorities,
)
from rollstream.rl.jit import jit
from rollstream.rl.normalize import combined_statistics
from rollstream.rl.params import Weights, host_arrays, require_same_shapes, trainable
from rollstream.rl.policy import Policy
from rollstream.rl.update_metrics import PackedMetrics, UpdateMetrics, pack, raise_diverged
from rollstream.rl.updates import Metrics, optimizer_step

Array = Any


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
        self._update = update
        self._compiled: dict[Any, Any] = {}
        """The jitted update, by the number of updates per call; for replay on the device also by layout."""
        self._guards = jax.default_backend() != "cpu"
        """Whether metrics are read late, and the update keeps weights that it would make NaN."""
        self._finite: Any = np.float32(1)
        """1 while no metric has been NaN or infinite."""
        self._concurrent = concurrent
        self._apply = jit(partial(_apply_gradients, optimizer))
        self._random_inputs = random_inputs
        self._generator = np.random.default_rng([seed, 0, 4])
        self._schedules = schedules
        self._scheduled: dict[str, tuple[float, Any]] = {}
        self._updates_per_batch = updates_per_batch

    def train(self, batch: Any, steps: int | None = None, *, updates: int = 1) -> Mapping[str, Any]:
        """Train on a batch, which makes a new version of the weights; return the metrics.

        On a CPU they are read at once. On an accelerator they are read when somebody looks at them; until
        then, an update that made something NaN or infinite, and those after it, change no weights.

        Args:
            batch: What the update takes.
            steps: New environment steps this training accounts for; `batch.steps` by default.
            updates: Number of updates, each with an equal part of the batch's rows, in one compiled program.
        """
        assert self._update is not None, "this learner applies gradients and has no update for batches"
        if updates not in self._compiled:
            program = partial(_updates, self._update, updates, guards=self._guards)
            self._compiled[updates] = jit(program, concurrent=self._concurrent)
        schedules = self._schedule()
        arrays = {name: array for name, (_, array) in self._scheduled.items()}
        inputs = self._draw_inputs(updates)
        weights, state, finite, packed = self._compiled[updates](
            self.weights, self.state, self._finite, batch, inputs, arrays
        )
        new_steps = batch.steps if steps is None else steps
        return self._take_up(weights, state, finite, packed, schedules, new_steps, updates)

    def train_on_draw(self, draw: DeviceDraw, *, updates: int = 1) -> Mapping[str, Any]:
        """Train on transitions that the jitted update itself samples from replay on the device.

        It also sets their new priorities, which count from the next update on. Returns the metrics, as
        `train` does.

        Args:
            draw: Chooses the transitions.
            updates: Number of updates, each with an equal part of the draw, in one compiled program.
        """
        assert self._update is not None, "this learner applies gradients and has no update for batches"
        storage = draw.storage
        key = storage.layout, updates
        if key not in self._compiled:
            program = partial(_replayed_updates, self._update, *key, guards=self._guards)
            self._compiled[key] = jit(program, concurrent=self._concurrent, donate=(3,))
        schedules = self._schedule()
        arrays = {name: array for name, (_, array) in self._scheduled.items()}
        weights, state, finite, storage.priorities, packed = self._compiled[key](
            self.weights,
            self.state,
            self._finite,
            storage.priorities,
            storage.arrays,
            draw.draws,
            self._draw_inputs(updates),
            arrays,
        )
        return self._take_up(weights, state, finite, packed, schedules, 0, updates)

    def _take_up(
        self,
        weights: Weights,
        state: Any,
        finite: Array,
        packed: PackedMetrics,
        schedules: dict[str, float],
        steps: int,
        updates: int,
    ) -> Mapping[str, Any]:
        """Take up what an update returned, unless it diverged; return its metrics."""
        metrics = UpdateMetrics(packed, schedules, self.version + 1)
        if not self._guards:
            metrics.rows()
        self.weights, self.state, self._finite = weights, state, finite
        self._count(steps, updates)
        schedules["n_updates"] = self.n_updates
        return metrics

    def _draw_inputs(self, updates: int) -> Any:
        if self._random_inputs is None:
            return ()
        if updates == 1:
            return self._random_inputs(self._generator)
        drawn = [self._random_inputs(self._generator) for _ in range(updates)]
        return jax.tree.map(lambda *each: np.stack(each), *drawn)

    def apply_gradients(self, grads: Weights, metrics: Metrics, steps: int) -> dict[str, float]:
        """Apply gradients that a worker computed, which makes a new version; return the metrics."""
        scalars = {name: float(value) for name, value in metrics.items()}
        raise_diverged(scalars, self.version + 1)
        schedules = self._schedule()
        learning_rate = self._scheduled["learning_rate"][1]
        self.weights, self.state = self._apply(learning_rate, grads, self.state, self.weights)
        self._count(steps)
        return scalars | schedules | {"n_updates": self.n_updates}

    @property
    def n_updates(self) -> int:
        """Number of updates as Stable-Baselines3 counts them: epochs of PPO, else gradient steps."""
        return self.version * self._updates_per_batch

    def _schedule(self) -> dict[str, float]:
        """Scheduled values, and as arrays in `_scheduled`, which are made anew where a value has changed."""
        schedules = self._schedules(min(1.0, self.steps / self.total_steps))
        for name, value in schedules.items():
            if name not in self._scheduled or self._scheduled[name][0] != value:
                self._scheduled[name] = value, np.float32(value)
        return schedules

    def _count(self, steps: int, updates: int = 1) -> None:
        self.version += updates
        self.steps += steps

    def get_weights(self) -> Weights:
        """The weights as NumPy arrays."""
        return host_arrays(self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Weights, learner state and counters."""
        return {
            "weights": self.get_weights(),
            "state": [np.asarray(leaf) for leaf in jax.tree.leaves(self.state)],
            "version": self.version,
            "steps": self.steps,
            "generator": self._generator.bit_generator.state,
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
        self._generator.bit_generator.state = state["generator"]


def _require_update(result: Any) -> tuple[tuple[Weights, Any], Metrics]:
    """Weights and state, and metrics, that an update returned; raise if it returned something else."""
    found = f"{len(result)} results" if isinstance(result, tuple) else type(result).__name__
    if not isinstance(result, tuple) or len(result) != 3:
        raise RollstreamError(f"update must return weights, state and metrics, and returned {found}")
    weights, state, metrics = result
    for name, value in (("weights", weights), ("metrics", metrics)):
        if not isinstance(value, Mapping):
            raise RollstreamError(
                f"update must return weights, state and metrics, and its {name} are a "
                f"{type(value).__name__} instead of a dict"
            )
    return (weights, state), metrics


def _updates(
    update: Update,
    count: int,
    weights: Weights,
    state: Any,
    finite: Array,
    batch: Any,
    random_inputs: Any,
    schedules: Mapping[str, Array],
    *,
    guards: bool,
) -> tuple[Weights, Any, Array, PackedMetrics]:
    """One or several updates, each with an equal part of the rows of a batch, with packed metrics."""
    one = partial(_update_once, update, schedules, guards)
    if count == 1:
        (trained, finite), packed = one(((weights, state), finite), (batch, random_inputs))
        return *trained, finite, packed
    parts = _split(batch, count)
    (trained, finite), packed = jax.lax.scan(one, ((weights, state), finite), (parts, random_inputs))
    arrays = {name: array.reshape(-1, *array.shape[2:]) for name, array in packed.arrays.items()}
    return *trained, finite, replace(packed, arrays=arrays)


def _replayed_updates(
    update: Update,
    layout: RingLayout,
    count: int,
    weights: Weights,
    state: Any,
    finite: Array,
    priorities: Priorities | None,
    storage: Storage,
    draws: Array,
    random_inputs: Any,
    schedules: Mapping[str, Array],
    *,
    guards: bool,
) -> tuple[Weights, Any, Array, Priorities | None, PackedMetrics]:
    """One or several updates, each with transitions sampled with an equal part of the draws."""

    def one(carry: tuple[Any, Priorities | None], inputs: tuple[Array, Any]) -> tuple[Any, PackedMetrics]:
        trained, priorities = carry
        own, noise = inputs
        batch, rows = sample_transitions(layout, storage, priorities, own)
        trained, packed = _update_once(update, schedules, guards, trained, (batch, noise))
        if priorities is not None and "priority" in packed.arrays:
            new = packed.arrays["priority"]
            priorities = update_priorities(layout, priorities, rows, new, packed.finite)
        return (trained, priorities), replace(packed, arrays={})

    carry = ((weights, state), finite), priorities
    if count == 1:
        ((trained, finite), priorities), packed = one(carry, (draws, random_inputs))
    else:
        inputs = _split(draws, count), random_inputs
        ((trained, finite), priorities), packed = jax.lax.scan(one, carry, inputs)
    return *trained, finite, priorities, packed


def _update_once(
    update: Update,
    schedules: Mapping[str, Array],
    guards: bool,
    carry: tuple[Any, Array],
    inputs: tuple[Any, Any],
) -> tuple[tuple[Any, Array], PackedMetrics]:
    """One update of weights and state, and whether all so far were finite; with packed metrics."""
    (weights, state), finite = carry
    rows, noise = inputs
    trained, metrics = _require_update(update(weights, state, rows, noise, schedules))
    packed = pack(metrics, finite)
    if guards:
        trained = jax.tree.map(partial(jnp.where, packed.finite > 0), trained, (weights, state))
    return (trained, packed.finite), packed


def _split(rows: Any, count: int) -> Any:
    """Equal parts of rows `[N, ...]`."""
    return jax.tree.map(lambda own: own.reshape(count, -1, *own.shape[1:]), rows)


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
