"""Rollout workers: actors that step environments with a policy and send batches of experience."""

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
from rollstream.rl.acting import Acting
from rollstream.rl.batch import Batch
from rollstream.rl.device_acting import DeviceActing, without_stacking
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.env_state import UnknownState
from rollstream.rl.episode_statistics import EpisodeStatistics
from rollstream.rl.jit import jit
from rollstream.rl.normalize import lacks_statistics
from rollstream.rl.params import Weights, host_arrays
from rollstream.rl.policy import Act, EvaluatingPolicy, NumpyPolicy, Policy
from rollstream.rl.rollout import Postprocess, Rollout, replace_reset_steps
from rollstream.rl.rollout_checks import check_rollout
from rollstream.rl.spaces import Observation, put, reset_rows, take, zeros

PolicyMaker = Callable[[gymnasium.Space[Any], gymnasium.Space[Any]], Any]
"""Creates a policy for an observation and an action space."""
GradientFunction = Callable[[Weights, Batch], tuple[Weights, dict[str, Any]]]
"""Gradients of a loss on a batch, and metrics."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker needs to start; it is sent to the worker's process."""

    environment: EnvSpec
    num_envs: int
    """Number of environments per worker."""
    rollout_length: int
    """Number of steps per environment in a rollout."""
    policy: PolicyMaker
    postprocess: Callable[[Any], Postprocess] | None = None
    """Given the policy, returns the postprocessing of rollouts: GAE, for instance. Without it a worker sends
    the columns of the rollout."""
    gradients: Callable[[Any], GradientFunction] | None = None
    """Given the policy, returns the gradient function, for plans that compute gradients on workers."""
    exploration: Callable[[Weights, int], Weights] | None = None
    """Changes the weights a worker receives, given its index: its epsilon, for instance."""
    evaluates_steps: bool = False
    """Record `log_prob` and `value` while acting, where that saves a forward pass: with JAX, not NumPy."""
    seed: int = 0
    clip_rewards: bool = False
    """Clip rewards to their sign; episode returns are of the rewards before clipping."""
    reward_norm_gamma: float | None = None
    """Record `discounted_return` with this discount factor, to normalize rewards."""
    for_replay: bool = False
    """Keep the newest frames on the host, for replay, also if the worker acts on the device."""
    own_process: bool = False
    """Whether the worker has a process of its own, where JAX uses the CPU only."""
    acting: Acting = "auto"
    """Where the worker acts; a `WorkerSet` chooses `host` or `device` for `auto`."""
    env_threads: int | None = None
    """Number of threads of ALE's and EnvPool's vector environments; their own default without one."""


_STATISTICS_STEPS = 256
"""Environment steps of a worker before its first rollout, to estimate the statistics that normalize. They are
at most those of a rollout, which has a deadline."""


def cpu_device() -> Any:
    """The CPU, where workers act on the host although there is an accelerator."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX was started without a CPU backend
        return None


_BUT_LAST = slice(-1)


class RolloutWorker:
    """Steps its environments under the weights it received last."""

    def __init__(self, spec: WorkerSpec, *, context: ActorContext):
        if spec.own_process:
            jax.config.update("jax_platforms", "cpu")
        self.spec = spec
        self._identity = (spec.seed, context.index, context.restarts)
        pool_seed = np.random.SeedSequence([*self._identity, 3]).generate_state(1)[0]
        self.vector = spec.environment.make(spec.num_envs, int(pool_seed) >> 1, spec.env_threads)
        self.policy: Policy = spec.policy(self.vector.observation_space, self.vector.action_space)
        self._weights: Weights = {}
        self._received: Weights | None = None
        self.version = -1
        self._lacks_statistics = False
        maybe_jit = jit if self.policy.jit else lambda function: function
        policy = self.policy
        self._numpy_policy = (
            policy if isinstance(policy, NumpyPolicy) and policy.acts_in_numpy(spec.num_envs) else None
        )
        step: Any = policy.step
        if spec.evaluates_steps and isinstance(policy, EvaluatingPolicy) and policy.evaluates_steps():
            step = policy.evaluated_step
        self._step = maybe_jit(step)
        self._device: DeviceActing | None = None
        if spec.acting == "device":
            self.vector, self._numpy_policy = without_stacking(self.vector), None
            self._device = DeviceActing(step, self.vector, for_replay=spec.for_replay)
        self._act: Any = None
        # NumPy reads the learner's own arrays on a CPU.
        self._reads_weights = not policy.jit or (
            self._numpy_policy is not None and jax.default_backend() != "cpu"
        )
        # Small weights travel with each call, which is faster than moving them to the device first.
        self._moves_weights = self.policy.jit and (
            self._numpy_policy is None or jax.default_backend() != "cpu"
        )
        self._postprocess = spec.postprocess(self.policy) if spec.postprocess is not None else None
        self._gradients = maybe_jit(spec.gradients(self.policy)) if spec.gradients is not None else None
        self._clips_rewards = spec.clip_rewards or spec.environment.clips_rewards
        self._generator = np.random.default_rng([*self._identity, 5])
        self._reset()
        self._is_recurrent = bool(jax.tree.leaves(self.state))

    def _reset(self, *salt: int) -> None:
        """Start an episode in every environment; the seeds depend on the worker's identity and the salt."""
        num_envs = self.spec.num_envs
        seeds = np.random.SeedSequence([*self._identity, *salt, 1]).generate_state(num_envs)
        self.observation = self.vector.reset([int(seed) >> 1 for seed in seeds])
        if self._device is not None:
            self._device.forget()
        self.state = self.policy.initial_state(num_envs)
        self._episodes = EpisodeStatistics(num_envs, self.spec.reward_norm_gamma)
        self._after_reset = True
        self._plain: Any = None
        if isinstance(own := self._new_observations(1), np.ndarray):
            self._plain = own.shape[2:], own.dtype

    def set_weights(self, version: int, weights: Weights) -> None:
        """Receive a version of the weights; it is used from the next rollout on."""
        self.version = version
        self._received = weights

    @property
    def weights(self) -> Weights:
        """The weights received last, where the policy acts."""
        self._acting()
        return self._weights

    def _acting(self) -> Act:
        """How to act with the weights received last; nothing is done for those that came before them."""
        if self._received is not None:
            self._use(self._received)
        return self._act

    def _use(self, weights: Weights) -> None:
        self._received = None
        if self.spec.exploration is not None:
            weights = self.spec.exploration(weights, self._identity[1])
        if self._reads_weights:
            weights = host_arrays(weights)
        self._lacks_statistics = lacks_statistics(weights)
        if self._device is not None:
            self._weights, self._act = self._device.put_weights(weights), self._device.act
            return
        self._weights = jax.device_put(weights, cpu_device()) if self._moves_weights else weights
        if self._numpy_policy is not None:
            self._act = self._numpy_policy.numpy_step(weights, self.spec.num_envs)
        else:
            self._act = partial(self._step, self._weights)

    def sample(self, context: Context) -> Any:
        """A rollout of every environment, postprocessed."""
        start = time.perf_counter()
        weights = self.weights
        if self._lacks_statistics:
            weights = self._estimate_statistics()
        rollout = self._rollout()
        item = rollout.columns if self._postprocess is None else self._postprocess(weights, rollout)
        mask = rollout.columns.get("mask")
        steps = rollout.columns["reward"].size if mask is None else int(mask.sum())
        if mask is not None and isinstance(item, Batch):
            if not steps:  # every environment was only reset
                return self.sample(context)
            item = replace_reset_steps(item, mask, self._generator)
        context.note(version=self.version, steps=steps, sample_time=time.perf_counter() - start)
        return item

    def compute_gradients(self, batch: Batch) -> tuple[Weights, dict[str, Any]]:
        """Gradients of the loss on a batch under this worker's weights, and metrics."""
        assert self._gradients is not None, "this worker has no gradient function: set WorkerSpec.gradients"
        gradients = self._gradients(self.weights, batch)
        return gradients if self._device is not None else jax.tree.map(np.asarray, gradients)

    def _estimate_statistics(self) -> Weights:
        """Weights with an estimate of the statistics that normalize, from steps that count nowhere."""
        policy: Any = self.policy
        length = min(self.spec.rollout_length, max(1, _STATISTICS_STEPS // self.spec.num_envs))
        columns = self._rollout(length).columns
        statistics = jax.tree.map(np.asarray, policy.batch_statistics(columns))
        self._use(self.weights | statistics)
        self._lacks_statistics = False  # also if there are none: rewards are not recorded
        self._reset(1)
        return self.weights

    def _rollout(self, length: int | None = None) -> Rollout:
        spec, vector, num_envs = self.spec, self.vector, self.spec.num_envs
        length = spec.rollout_length if length is None else length
        observations = self._new_observations(length + 1)
        reward = np.empty((length, num_envs), np.float32)
        terminated, truncated = np.zeros((2, length, num_envs), bool)
        episodes: np.ndarray[Any, Any] | None = None
        mask = np.ones((length, num_envs), bool) if vector.has_reset_steps else None
        noise = self.policy.noise(self._generator, length, num_envs)
        actions: list[np.ndarray[Any, Any]] = []
        evaluated: list[Any] = []
        final: list[tuple[int, int, Observation]] = []
        write: Any = operator.setitem if isinstance(observations, np.ndarray) else put
        if observations is None:
            write = _write_nothing
        read: Any = operator.getitem if isinstance(noise, np.ndarray) else take
        act, advance, observation, state = self._acting(), vector.step, self.observation, self.state
        write(observations, 0, observation)
        if self._device is not None:
            self._device.start(self._weights, noise, length)
        for t in range(length):
            action, state, *estimates = act(observation, state, read(noise, t))
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
                terminated[t], truncated[t] = step.terminated, step.truncated
                final += [(t, i, last) for i, last in step.final_observations if not step.terminated[i]]
                for i, succeeded in step.success:
                    episodes[2, t, i] = succeeded
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
        check_rollout(
            rollout, observations, vector.observation_space, spec.environment.name, self._episodes.lengths
        )
        self._after_reset = False
        if self._clips_rewards:
            columns["reward"] = np.sign(reward)
        done = None if episodes is None else terminated | truncated
        columns |= self._episodes.columns(reward, done, mask, columns["reward"], episodes)
        return rollout

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
