"""The learner: weights, their version, and the jitted update that trains them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rollstream.engine import RollstreamError
from rollstream.rl.accelerator_program import AcceleratorProgram, on_packed
from rollstream.rl.batch import Batch, Columns
from rollstream.rl.device_replay import DeviceDraw
from rollstream.rl.device_sampling import RingLayout
from rollstream.rl.device_updates import updates_on_draws
from rollstream.rl.jit import has_accelerator, host_memory, jit
from rollstream.rl.normalize import combined_statistics
from rollstream.rl.packed_tree import LARGE, PackedTrees, PublishedWeights
from rollstream.rl.params import Weights, host_arrays, require_same_shapes, trainable
from rollstream.rl.policy import Policy
from rollstream.rl.update_metrics import UpdateMetrics, raise_diverged
from rollstream.rl.update_programs import Update, updates_on_batch
from rollstream.rl.updates import Metrics, optimizer_step

Array = Any


class Learner:
    """Holds the weights and trains them, one jitted call per batch.

    Args:
        policy: The policy whose weights are trained.
        update: Trains on a batch; jitted here. Several take turns: TD3's actor is part of every second one.
            `None` for a learner that only applies gradients.
        optimizer: Applies gradients that workers computed; its state is the learner's state by default.
        init_state: Creates the learner's state from the initial parameters, if it is more than the
            optimizer's: target networks, critics, several optimizers.
        random_inputs: Draws the random inputs of an update, given a generator; in NumPy, because shuffling in
            XLA takes a fifth of an update. If several updates are one program, it is also given how many: the
            leading axis of what it returns.
        schedules: Scheduled values by name, such as the learning rate, given the fraction of training done.
        updates_per_batch: How much a batch adds to the metric `n_updates`: the number of epochs, for
            instance.
        collate: Makes what the update takes of the items that reach the learner: it joins several rollouts,
            for instance, and may have a state. Without it, a list of batches is concatenated.
        seed: Seed of the initial weights and of the random inputs.
        total_steps: Environment steps of the whole training.
        concurrent: Whether independent parts of the update run at the same time; see `jit`.
    """

    def __init__(
        self,
        policy: Policy,
        update: Update | Sequence[Update] | None,
        optimizer: optax.GradientTransformation,
        *,
        init_state: Callable[[Weights], Any] | None = None,
        random_inputs: Callable[..., Any] | None = None,
        schedules: Callable[[float], dict[str, float]] = lambda _: {},
        updates_per_batch: int = 1,
        collate: Any = None,
        seed: int = 0,
        total_steps: int = 1,
        concurrent: bool = False,
    ):
        self.policy = policy
        weights = policy.init(seed)
        state = (init_state or optimizer.init)(trainable(weights))
        self._trained: tuple[Weights, Any] | None = (weights, state)
        """Weights and state; `None` while they are only packed."""
        self._packed: Any = None
        """Weights and state as the jitted updates take them; on an accelerator they are donated."""
        self._published: PublishedWeights | None = None
        """The newest weights, if an update has made them."""
        self.publishes_on_device = False
        """Whether weights are published in the memory of an accelerator, for workers that act on it."""
        self._accelerated = has_accelerator()
        """Whether metrics are read late, and the update keeps weights that it would make NaN."""
        self._packing = PackedTrees(weights, state, large=math.inf if self._accelerated else LARGE)
        self.version = 0
        """How often the weights have changed."""
        self.steps = 0
        """Environment steps trained on."""
        self.total_steps = total_steps
        self.cycle: Sequence[Update] = [] if update is None else [update] if callable(update) else update
        """The updates that take turns."""
        self._compiled: dict[Any, Any] = {}
        """The jitted updates, by the number of updates per call, the first of them, and the kind of batch, or
        the layout of replay on the device."""
        self._finite: Any = np.float32(1)
        """1 while no metric has been NaN or infinite."""
        self._concurrent = concurrent
        self._apply = jit(partial(_apply_gradients, optimizer))
        self._random_inputs = random_inputs
        self._generator = np.random.default_rng([seed, 0, 4])
        self._drawn: tuple[int, Any, Any] | None = None
        """Random inputs drawn ahead: for how many updates, the generator's state before, and the inputs."""
        self._schedules = schedules
        self._scheduled: dict[str, Any] = {}
        """The scheduled values as arrays."""
        self._last_schedules: dict[str, float] = {}
        self._updates_per_batch = updates_per_batch
        self._collate = collate

    # Weights and state -------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """The newest weights."""
        return self._unpacked()[0]

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._set(weights, self.state)

    @property
    def state(self) -> Any:
        """What the update keeps beside the weights: optimizer state, target networks."""
        return self._unpacked()[1]

    @state.setter
    def state(self, state: Any) -> None:
        self._set(self.weights, state)

    def published(self) -> Weights | PublishedWeights:
        """The weights for workers in this process; those of an update are packed."""
        if self._published is None and not self._accelerated:
            return self.weights
        if self._published is None:
            packing = self._packing.parts[0]
            self._published = PublishedWeights(packing, packing.pack_on_device(self.weights))
        return self._published

    def get_weights(self) -> Weights:
        """The weights as NumPy arrays."""
        published = self.published()
        return host_arrays(published.on_host() if isinstance(published, PublishedWeights) else published)

    def _set(self, weights: Weights, state: Any) -> None:
        self._trained, self._packed, self._published = (weights, state), None, None

    def _unpacked(self) -> tuple[Weights, Any]:
        trained = self._trained
        if trained is None:
            self._trained = trained = self._packing.unpack_on_device(self._packed)
        return trained

    def _pack(self) -> Any:
        if self._packed is None:
            self._packed = self._packing.pack_on_device(self._trained)
            if self._accelerated:  # results of programs are bound to a device: others would compile them anew
                self._packed, self._finite = jax.device_put((self._packed, self._finite), jax.devices()[0])
        return self._packed

    # Training ----------------------------------------------------------------------------------

    def collate(self, items: Any) -> Any:
        """What the update takes, of items that reached the learner: a list of batches becomes one batch."""
        if self._collate is not None:
            return self._collate(items)
        if type(items) is list and items and all(isinstance(own, Batch) for own in items):
            return Batch.concatenate(items)
        return items

    def train(self, batch: Any, steps: int | None = None, *, updates: int = 1) -> Mapping[str, Any]:
        """Train on a batch, which makes a new version of the weights; return the metrics.

        On a CPU they are read at once. On an accelerator they are read when somebody looks at them; until
        then, an update that made something NaN or infinite, and those after it, change no weights.

        Args:
            batch: What the update takes.
            steps: New environment steps this training accounts for; `batch.steps` by default.
            updates: Number of updates, each with an equal part of the batch's rows, in one compiled program:
                one, or a multiple of those that take turns.
        """
        kind = type(batch) if issubclass(type(batch), Columns) else None
        columns = batch if kind is None else dict(batch)
        new_steps: int = batch.steps if steps is None else steps
        return self._run(kind, None, (columns,), new_steps, updates)[1]

    def train_on_draw(self, draw: DeviceDraw, *, updates: int = 1) -> Mapping[str, Any]:
        """Train on transitions that the jitted update itself samples from replay on the device.

        It also sets their new priorities, which count from the next update on. Returns the metrics, as
        `train` does.

        Args:
            draw: Chooses the transitions.
            updates: Number of updates, each with an equal part of the draw, in one compiled program; see
                `train`.
        """
        storage = draw.storage
        inputs = storage.arrays, draw.draws
        storage.priorities, metrics = self._run(storage.layout, storage.priorities, inputs, 0, updates)
        return metrics

    def _run(
        self,
        kind: type | RingLayout | None,
        priorities: Any,
        inputs: tuple[Any, ...],
        steps: int,
        updates: int,
    ) -> tuple[Any, UpdateMetrics]:
        """Run the program of updates, and take up what it returns; new priorities, and the metrics."""
        schedules = self._schedule()
        inputs = *inputs, self._draw_inputs(updates), self._scheduled
        program, trained = self._program(updates, kind), self._pack()
        if self._accelerated:
            trained, weights, finite, priorities, packed = program(trained, self._finite, priorities, *inputs)
            metrics = UpdateMetrics(packed, schedules, self.version + 1)
        else:
            trained, finite, priorities, packed = program(trained, self._finite, priorities, *inputs)
            weights, metrics = trained[0], UpdateMetrics(packed, schedules, self.version + 1)
            metrics.rows()  # raises if the update diverged
        self._trained, self._packed, self._finite = None, trained, finite
        self._published = PublishedWeights(self._packing.parts[0], weights)
        self.version += updates
        self.steps += steps
        metrics.latest["n_updates"] = self.n_updates
        if self._accelerated:
            self._draw_ahead(updates)
        return priorities, metrics

    def _program(self, updates: int, kind: type | RingLayout | None = None) -> Any:
        """The jitted updates that come next, so many in one call.

        They are for a batch of this kind, or for draws from replay on the device of this layout.
        """
        assert self.cycle, "this learner applies gradients and has no update for batches"
        turn = self.version % len(self.cycle)
        key = (1, id(self.cycle[turn]), kind) if updates == 1 else (updates, turn, kind)
        if key not in self._compiled:
            turns = [*self.cycle[turn:], *self.cycle[:turn]]
            on_device = isinstance(kind, RingLayout)
            program = updates_on_draws if on_device else updates_on_batch
            program = partial(program, turns, updates, kind, guards=self._accelerated)
            self._compiled[key] = (
                AcceleratorProgram(program, self._packing, self._publish_to(), concurrent=self._concurrent)
                if self._accelerated
                else jit(on_packed(program, self._packing), concurrent=self._concurrent, donate=(2,))
            )  # which donates the priorities
        return self._compiled[key]

    def _publish_to(self) -> Any:
        return None if self.publishes_on_device else host_memory()

    def _draw_inputs(self, updates: int) -> Any:
        if self._random_inputs is None:
            return ()
        drawn, self._drawn = self._drawn, None
        if drawn is not None:
            count, before, inputs = drawn
            if count == updates:
                return inputs
            self._generator.bit_generator.state = before
        if updates == 1:
            return self._random_inputs(self._generator)
        return self._random_inputs(self._generator, updates)

    def _draw_ahead(self, updates: int) -> None:
        """Draw the random inputs of the next call while the accelerator computes this one."""
        before = self._generator.bit_generator.state
        self._drawn = updates, before, self._draw_inputs(updates)

    def apply_gradients(self, grads: Weights, metrics: Metrics, steps: int) -> dict[str, float]:
        """Apply gradients that a worker computed, which makes a new version; return the metrics."""
        scalars = {name: float(value) for name, value in jax.device_get(metrics).items()}
        raise_diverged(scalars, self.version + 1)
        schedules = self._schedule()
        learning_rate = self._scheduled["learning_rate"]
        self._set(*self._apply(learning_rate, grads, self.state, self.weights))
        self.version += 1
        self.steps += steps
        return scalars | schedules | {"n_updates": self.n_updates}

    @property
    def n_updates(self) -> int:
        """Number of updates as Stable-Baselines3 counts them: epochs of PPO, else gradient steps."""
        return self.version * self._updates_per_batch

    def _schedule(self) -> dict[str, float]:
        """Scheduled values, and as arrays in `_scheduled`, which are made anew if a value has changed."""
        schedules = self._schedules(min(1.0, self.steps / self.total_steps))
        if schedules != self._last_schedules:
            self._last_schedules = dict(schedules)
            self._scheduled = {name: np.float32(value) for name, value in schedules.items()}
        return schedules

    def state_dict(self) -> dict[str, Any]:
        """Weights, learner state and counters."""
        return {
            "weights": self.get_weights(),
            "state": [np.asarray(leaf) for leaf in jax.tree.leaves(self.state)],
            "version": self.version,
            "steps": self.steps,
            "generator": self._generator.bit_generator.state if self._drawn is None else self._drawn[1],
            **({"collate": self._collate.state_dict()} if hasattr(self._collate, "state_dict") else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same network."""
        require_same_shapes(state["weights"], self.weights)
        leaves, structure = jax.tree.flatten(self.state)
        if [np.shape(leaf) for leaf in state["state"]] != [np.shape(leaf) for leaf in leaves]:
            raise RollstreamError(
                "this learner state has other arrays: it was saved with another optimizer, or by another "
                "version of Rollstream; its weights can be evaluated, but its training cannot be resumed"
            )
        weights = {name: jnp.asarray(state["weights"][name]) for name in self.weights}
        self._set(weights, jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in state["state"]]))
        self.version, self.steps = int(state["version"]), int(state["steps"])
        self._generator.bit_generator.state, self._drawn = state["generator"], None
        if "collate" in state:
            self._collate.load_state_dict(state["collate"])


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
