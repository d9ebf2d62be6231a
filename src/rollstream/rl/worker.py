"""The actor that lives with environments: it acts in them and gives what happened as batches."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import jax
import numpy as np

from rollstream.engine import ActorContext
from rollstream.flow import Context
from rollstream.rl.batch import Batch
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.env_state import UnknownState
from rollstream.rl.episodes import Episodes
from rollstream.rl.jit import compiled
from rollstream.rl.policy import Policy, Weights
from rollstream.rl.spaces import Observation, forgotten, put, take, zeros
from rollstream.state_codec import serializable

PolicyMaker = Callable[[gymnasium.Space[Any], gymnasium.Space[Any]], Any]
"""Makes a policy for an observation and an action space."""


@serializable
@dataclass
class Rollout:
    """What happened in some steps, before anybody has thought about it."""

    columns: Batch
    """`observation`, `action`, `reward`, `terminated`, `truncated`, and what more a worker records."""
    last: Observation
    """What is to be acted on next, `[B, ...]`."""
    final: list[tuple[int, int, Observation]]
    """Step, environment and final observation of episodes that were truncated, where `observation` does not
    go on with it."""
    worker: int = 0
    """The number of the worker it is from."""
    begins: bool = False
    """Whether its environments have been reset since the rollout before."""


Finish = Callable[[Weights, Rollout], Any]
"""Adds what can be said of a rollout under the weights it was sampled with: values, advantages."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is made from; it travels to where the worker lives."""

    environment: EnvSpec
    environments: int
    """How many, side by side."""
    length: int
    """Steps of a batch."""
    policy: PolicyMaker
    finish: Callable[[Any], Finish] | None = None
    """Given the policy, makes what finishes rollouts."""
    gradients: Callable[[Any], Callable[[Weights, Batch], tuple[Weights, dict[str, Any]]]] | None = None
    """Given the policy, makes the function that computes gradients; for plans that do that here."""
    seed: int = 0
    clip_reward: bool = False
    """Whether rewards are learned from by their sign alone."""
    discount: float | None = None
    """If given, returns discounted by it are recorded, to scale rewards by."""
    vary: Callable[[Weights, int], Weights] | None = None
    """What a worker changes in the weights it is told, given its number: how it explores, say."""
    apart: bool = False
    """Whether the worker has a process of its own, which is not to look for accelerators."""


def processor() -> Any:
    """Where workers compute: actions are small, and accelerators are for the learner."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # there are only others
        return None


class RolloutWorker:
    """Steps its environments under the weights it was last told, and keeps count of episodes."""

    def __init__(self, spec: WorkerSpec, *, context: ActorContext):
        if spec.apart:
            jax.config.update("jax_platforms", "cpu")
        self.spec = spec
        self._identity = (spec.seed, context.index, context.restarts)
        pool_seed = np.random.SeedSequence([*self._identity, 3]).generate_state(1)[0]
        self.vector = spec.environment.make(spec.environments, int(pool_seed) >> 1)
        self.policy: Policy = spec.policy(self.vector.observation_space, self.vector.action_space)
        self.weights: Weights = {}
        self.version = -1
        maybe_compiled = compiled if self.policy.compiled else lambda function: function
        self._step = maybe_compiled(self.policy.step)
        quick = getattr(self.policy, "quick", None)  # some have a faster way to act
        self._acting: Any = quick(spec.environments) if quick is not None else None
        self._act: Any = None
        # Small weights are taken along with each call: that is quicker than to move them beforehand.
        self._moves = self.policy.compiled and (self._acting is None or jax.default_backend() != "cpu")
        self._finish = spec.finish(self.policy) if spec.finish is not None else None
        self._gradients = maybe_compiled(spec.gradients(self.policy)) if spec.gradients is not None else None
        self._generator = np.random.default_rng([*self._identity, 5])
        self._count = spec.environments
        self._begin()
        self._remembers = bool(jax.tree.leaves(self.state))

    def _begin(self, *more: int) -> None:
        """A new episode everywhere; the same numbers give the same episodes."""
        seeds = np.random.SeedSequence([*self._identity, *more, 1]).generate_state(self._count)
        self.observation = self.vector.reset([int(seed) >> 1 for seed in seeds])
        self.state = self.policy.initial_state(self._count)
        self._episodes = Episodes(self._count, self.spec.discount)
        self._begins = True

    def set_weights(self, version: int, weights: Weights) -> None:
        """Install exactly this version."""
        self.version = version
        if self.spec.vary is not None:
            weights = self.spec.vary(weights, self._identity[1])
        self.weights = jax.device_put(weights, processor()) if self._moves else weights
        self._act = self._acting(weights) if self._acting is not None else partial(self._step, self.weights)

    def sample(self, context: Context) -> Any:
        """Some steps of every environment: a batch, or what finishing makes of it."""
        start = time.perf_counter()
        rollout = self._roll()
        columns = rollout.columns
        batch = columns if self._finish is None else self._finish(self.weights, rollout)
        steps = int(columns["real"].sum()) if "real" in columns else columns.steps
        context.note(version=self.version, steps=steps, sample_time=time.perf_counter() - start)
        return batch

    def compute_gradients(self, batch: Batch) -> tuple[Weights, dict[str, Any]]:
        """The gradient of the loss under the weights here, and what is to be known of it."""
        assert self._gradients is not None, "this worker was not told how to compute gradients"
        return jax.tree.map(np.asarray, self._gradients(self.weights, batch))

    def _roll(self) -> Rollout:
        spec, vector, count, length = self.spec, self.vector, self._count, self.spec.length
        observations = zeros(vector.observation_space, length, count)
        reward = np.empty((length, count), np.float32)
        terminated, truncated = np.zeros((2, length, count), bool)
        real = np.ones((length, count), bool) if vector.resets_late else None
        noise = self.policy.noise(self._generator, length, count)
        actions: list[np.ndarray[Any, Any]] = []
        final: list[tuple[int, int, Observation]] = []
        write: Any = operator.setitem if isinstance(observations, np.ndarray) else put
        read: Any = operator.getitem if isinstance(noise, np.ndarray) else take
        act, advance, observation, state = self._act, vector.step, self.observation, self.state
        for t in range(length):
            write(observations, t, observation)
            action, state = act(observation, state, read(noise, t))
            action = np.asarray(action)
            actions.append(action)
            step = advance(action)
            observation = step.observation
            reward[t] = step.reward
            if step.real is not None and real is not None:
                real[t] = step.real
            if step.ended:
                terminated[t], truncated[t] = step.terminated, step.truncated
                final += [(t, i, last) for i, last in step.final if not step.terminated[i]]
            if self._remembers and (begun := step.begun):
                state = forgotten(state, self.policy.initial_state(self._count), begun)
        self.observation, self.state = observation, state
        learned = np.sign(reward) if spec.clip_reward else reward
        columns = Batch(
            observation=observations,
            action=np.stack(actions),
            reward=learned,
            terminated=terminated,
            truncated=truncated,
            **self._episodes.columns(reward, terminated | truncated, real, learned),
        )
        if real is not None:
            columns["real"] = real
        begins, self._begins = self._begins, False
        return Rollout(columns, self.observation, final, self._identity[1], begins)

    # State -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All but the weights, which the learner has. Environments that cannot be saved say why."""
        try:
            environment, reason = self.vector.state_dict(), None
        except UnknownState as unknown:
            environment, reason = None, str(unknown)
        return {
            "environment": environment,
            "reason": reason,
            "observation": self.observation,
            "memory": self.state,
            "episodes": self._episodes.state_dict(),
            "begins": self._begins,
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on; environments that could not be saved, from a reset that depends on the saved state alone."""
        self._generator.bit_generator.state = state["generator"]
        if state["environment"] is None:
            self._begin(int(self._generator.integers(1 << 31)))
            return
        self.vector.load_state_dict(state["environment"])
        self.observation, self.state = state["observation"], state["memory"]
        self._episodes.load_state_dict(state["episodes"])
        self._begins = state["begins"]

    def close(self) -> None:
        """Let the environments go."""
        self.vector.close()
