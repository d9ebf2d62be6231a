"""Workers step environments and record rollouts, whoever chooses the actions."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np

from rollstream.engine import ActorContext
from rollstream.flow import Context
from rollstream.replay.arrays import constant
from rollstream.rl.batch import Batch
from rollstream.rl.device_acting import DeviceActing
from rollstream.rl.env_state import UnknownState
from rollstream.rl.episode_statistics import EpisodeStatistics
from rollstream.rl.jit import cpu_device, has_accelerator
from rollstream.rl.params import Weights
from rollstream.rl.policy import Policy, SequencePolicy, SequenceQPolicy, State
from rollstream.rl.rollout import RecordedStates, Rollout, replace_reset_steps
from rollstream.rl.rollout_checks import check_rollout
from rollstream.rl.spaces import Observation, put, reset_rows, take, zeros
from rollstream.rl.worker_spec import WorkerSpec

Inputs: TypeAlias = tuple[Observation, State, Any]
"""What a policy chooses actions for: observations, its state, and noise."""
_BUT_LAST = slice(-1)
_STATISTICS_STEPS = 256
"""Environment steps of a worker before its first rollout, to estimate the statistics that normalize. They are
at most those of a rollout, which has a deadline."""


class EnvWorker(ABC):
    """Environments and their episodes; subclasses know where actions come from."""

    def __init__(self, spec: WorkerSpec, context: ActorContext):
        if spec.own_process:
            jax.config.update("jax_platforms", "cpu")
        self.spec = spec
        self._identity = (spec.seed, context.index, context.restarts)
        pool_seed = np.random.SeedSequence([*self._identity, 3]).generate_state(1)[0]
        self.vector = spec.environment.make(spec.num_envs, int(pool_seed) >> 1, spec.env_threads)
        self.policy: Policy = spec.policy(self.vector.observation_space, self.vector.action_space)
        self._weights: Weights = {}
        self._device: DeviceActing | None = None
        self._jax_device = jax.devices()[0] if spec.acting == "device" else cpu_device()
        """The device that JAX uses here."""
        elsewhere = has_accelerator() and spec.acting != "device"
        self._on_device = partial(jax.default_device, self._jax_device) if elsewhere else nullcontext
        self._postprocess = spec.postprocess(self.policy) if spec.postprocess is not None else None
        self._clips_rewards = spec.clip_rewards or spec.environment.clips_rewards
        self._env_name = spec.environment.name
        self._generator = np.random.default_rng([*self._identity, 5])
        self._is_recurrent = bool(jax.tree.leaves(self.policy.initial_state(spec.num_envs)))
        self._records_states = isinstance(self.policy, (SequencePolicy, SequenceQPolicy))

    def _reset(self, *salt: int) -> None:
        """Start an episode in every environment; the seeds depend on the worker's identity and the salt."""
        num_envs = self.spec.num_envs
        seeds = np.random.SeedSequence([*self._identity, *salt, 1]).generate_state(num_envs)
        self.observation = self._start_episodes([int(seed) >> 1 for seed in seeds])
        if self._device is not None:
            self._device.forget()
        self.state = self.policy.initial_state(num_envs)
        self._episodes = EpisodeStatistics(num_envs, self.spec.reward_norm_gamma)
        self._after_reset = True
        self._plain: Any = None
        if isinstance(own := self._new_observations(1), np.ndarray):
            self._plain = own.shape[2:], own.dtype

    def _start_episodes(self, seeds: list[int]) -> Observation:
        return self.vector.reset(seeds)

    @abstractmethod
    def sample(self, context: Context) -> Any:
        """A rollout of every environment, postprocessed."""

    @property
    def _statistics_length(self) -> int:
        """Length of the rollout that statistics are estimated from."""
        return min(self.spec.rollout_length, max(1, _STATISTICS_STEPS // self.spec.num_envs))

    def _item(self, weights: Weights, rollout: Rollout) -> tuple[Any, int] | None:
        """What is sent of a rollout, and its number of steps; `None` if every environment was only reset."""
        columns = rollout.columns
        with self._on_device():
            item = columns if self._postprocess is None else self._postprocess(weights, rollout)
        mask = columns.get("mask")
        steps = columns["reward"].size if mask is None else int(mask.sum())
        if mask is not None and isinstance(item, Batch):
            if not steps:
                return None
            item = replace_reset_steps(item, mask, self._generator)
        return item, steps

    def _record_rollout(
        self, length: int | None = None
    ) -> Generator[Inputs | Rollout, tuple[Any, ...], None]:
        """Step the environments: yields what to choose actions for, and at last the rollout.

        It is sent the actions, the new state, and log probabilities and values if the policy has evaluated
        the step. (`return` instead of a last `yield` would need an exception per rollout, and would take an
        environment's own StopIteration for the end.)
        """
        vector, num_envs = self.vector, self.spec.num_envs
        length = self.spec.rollout_length if length is None else length
        observations = self._new_observations(length + 1)
        reward = np.empty((length, num_envs), np.float32)
        terminated = truncated = constant((length, num_envs), False, bool)
        episodes: np.ndarray[Any, Any] | None = None
        mask = np.ones((length, num_envs), bool) if vector.has_reset_steps else None
        noise = self.policy.noise(self._generator, length, num_envs)
        actions: list[np.ndarray[Any, Any]] = []
        evaluated: list[Any] = []
        final: list[tuple[int, int, Observation]] = []
        states = RecordedStates(self.state, length, num_envs) if self._records_states else None
        write: Any = operator.setitem if isinstance(observations, np.ndarray) else put
        if observations is None:
            write = _write_nothing
        read: Any = operator.getitem if isinstance(noise, np.ndarray) else take
        advance, observation, state = vector.step, self.observation, self.state
        write(observations, 0, observation)
        if self._device is not None:
            self._device.start(self._weights, noise, length)
        for t in range(length):
            action, state, *estimates = yield observation, state, read(noise, t)
            if not isinstance(action, np.ndarray):
                action = np.asarray(action)
            actions.append(action)
            if estimates:
                evaluated.append(estimates)
            step = advance(action)
            observation = step.observation
            write(observations, t + 1, observation)
            reward[t] = step.reward
            if step.mask is not None and mask is not None:
                mask[t] = step.mask
            if step.ended:
                if episodes is None:
                    episodes = np.full((3, length, num_envs), np.nan, np.float32)
                    terminated, truncated = np.zeros((2, length, num_envs), bool)
                terminated[t], truncated[t] = step.terminated, step.truncated
                final += [(t, i, last) for i, last in step.final_observations if not step.terminated[i]]
                for i, succeeded in step.success:
                    episodes[2, t, i] = succeeded
            if states is not None:
                states.add(t, step, state)
            if self._is_recurrent and (started := step.started):
                state = reset_rows(state, self.policy.initial_state(num_envs), started)
        self.observation, self.state = observation, state
        if self._device is None:
            recorded, frames = {"observation": take(observations, _BUT_LAST)}, None
        else:
            (recorded, observation), frames = self._device.finish(observation), observations
        columns = Batch(
            **recorded,
            action=np.array(actions) if length > 1 else actions[0][None],  # `stack` takes 6 us
            reward=reward,
            terminated=terminated,
            truncated=truncated,
        )
        if evaluated:
            columns["log_prob"], columns["value"] = (np.stack(own) for own in zip(*evaluated, strict=True))
        if mask is not None:
            columns["mask"] = mask
        rollout = Rollout(columns, observation, final, self._identity[1], self._after_reset, frames)
        if states is not None:
            columns |= states.columns
            rollout.last_state, rollout.last_start = state, states.last_start
            rollout.final_states = states.final
        check_rollout(rollout, observations, vector.observation_space, self._env_name, self._episodes.lengths)
        self._after_reset = False
        if self._clips_rewards:
            columns["reward"] = np.sign(reward)
        done = None if episodes is None else terminated | truncated
        columns |= self._episodes.columns(reward, done, mask, columns["reward"], episodes)
        yield rollout

    def _new_observations(self, length: int) -> Observation:
        """Arrays for so many observations on the host; `None` if they are on the device only."""
        space = self.vector.observation_space if self._device is None else self._device.host_space
        if self._plain is not None:
            shape, dtype = self._plain
            return np.empty((length, self.spec.num_envs, *shape), dtype)
        return None if space is None else zeros(space, length, self.spec.num_envs)

    # State -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of the environments, or why it cannot be saved, and everything else but the weights."""
        try:
            environment, reason = self.vector.state_dict(), None
        except UnknownState as unknown:
            environment, reason = None, str(unknown)
        return {
            "environment": environment,
            "reason": reason,
            "observation": (
                self.observation if self._device is None else self._device.stacked(self.observation)
            ),
            "memory": self.state,
            "episodes": self._episodes.state_dict(),
            "after_reset": self._after_reset,
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; environments without one are reset, with seeds from the restored generator."""
        self._generator.bit_generator.state = state["generator"]
        if state["environment"] is None:
            self._reset(int(self._generator.integers(1 << 31)))
            return
        self.vector.load_state_dict(state["environment"])
        self.observation, self.state = state["observation"], state["memory"]
        if self._device is not None:
            self._device.forget()
            self.observation = self._device.unstacked(self.observation)
        self._episodes.load_state_dict(state["episodes"])
        self._after_reset = state["after_reset"]

    def start_anew(self, step: int) -> None:
        """Start new episodes, unlike those at the start of the training, after so many steps."""
        self._generator = np.random.default_rng([*self._identity, step, 9])
        self._reset(step, 9)

    def close(self) -> None:
        """Close the environments."""
        self.vector.close()


def _write_nothing(*_: Any) -> None:
    """Observations are recorded on the device."""
