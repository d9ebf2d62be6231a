"""Evaluation: complete episodes in separate environments, with deterministic actions by default."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstream.engine import RollstreamError
from rollstream.flow import Iter
from rollstream.rl.acting import Acting
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.operators import Report, is_heartbeat
from rollstream.rl.policy import Policy, Weights
from rollstream.rl.rollout_checks import check_observation, check_step
from rollstream.rl.spaces import reset_rows
from rollstream.rl.vector import Vector
from rollstream.rl.worker_set import WorkerSet
from rollstream.training.inference import acting_device, deterministic_step, moved_to, stochastic_step
from rollstream.training.progress_tracker import significant

_MAX_ENVIRONMENTS = 32
_MAX_EPISODE_STEPS = 100_000
"""Not every environment ends under every policy."""
_UNINTERRUPTED_STEPS = 1_000
"""Evaluations up to this long are finished even after a signal, so that a resumed run equals an uninterrupted
one."""


class EvaluationStopped(RollstreamError):
    """An evaluation was stopped before all of its episodes had ended."""


@dataclass(frozen=True)
class Evaluation:
    """Statistics of evaluation episodes."""

    mean_return: float
    std_return: float
    mean_length: float
    episodes: int

    def __str__(self) -> str:
        episodes = "episode" if self.episodes == 1 else "episodes"
        return (
            f"mean return {significant(self.mean_return)} ± {significant(self.std_return)} over "
            f"{self.episodes} {episodes}, mean length {significant(self.mean_length)} steps"
        )


class Evaluator:
    """Runs evaluation episodes. The same weights and seed give the same episodes.

    Args:
        env_spec: makes the environments.
        policy: selects the actions.
        seed: of the episodes, and of stochastic actions.
        deterministic: take the modes of action distributions instead of samples.
        max_episode_steps: an episode that has not ended by then counts as it is, and its environment starts
            no other.
        notify: told, once, that an episode was cut off.
        should_stop: checked at each step of a long evaluation; if true, it raises `EvaluationStopped`.
        acting: where actions are computed.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        policy: Policy,
        seed: int = 0,
        *,
        deterministic: bool = True,
        max_episode_steps: int = _MAX_EPISODE_STEPS,
        notify: Callable[[str], None] = warnings.warn,
        should_stop: Callable[[], bool] = lambda: False,
        acting: Acting = "auto",
    ):
        self._env_spec = env_spec
        self._policy = policy
        self._seed = seed
        self._max_episode_steps = max_episode_steps
        self._notify = notify
        self._should_stop = should_stop
        self._acting: Acting = acting
        self._devices: dict[int, Any] = {}
        """By the number of environments."""
        self._notified = False
        self._deterministic = deterministic
        self._step = deterministic_step(policy) if deterministic else stochastic_step(policy)
        self._vector: Vector | None = None

    def __call__(self, weights: Weights, episodes: int, index: int = 0) -> Evaluation:
        """Run episodes; each index has its own."""
        vector = self._environments(min(episodes, _MAX_ENVIRONMENTS))
        if vector.count not in self._devices:
            device = acting_device(self._policy, weights, vector.count, self._acting)
            self._devices[vector.count] = device
        weights = moved_to(self._devices[vector.count], weights)
        seeds = np.random.SeedSequence([self._seed, index, 2]).generate_state(vector.count)
        observation = vector.reset([int(seed) >> 1 for seed in seeds])
        state = self._policy.initial_state(vector.count)
        generator = np.random.default_rng([self._seed, index, 7])
        # Each environment runs a fixed share: taking the episodes that end first would favour short ones.
        left = np.full(vector.count, episodes // vector.count)
        left[: episodes % vector.count] += 1
        returns, lengths = np.zeros((2, vector.count))
        ended: list[tuple[float, float]] = []
        steps, name, waiting = 0, self._env_spec.name, set[int]()
        while left.any():
            steps += 1
            if steps > _UNINTERRUPTED_STEPS and self._should_stop():
                raise EvaluationStopped("the evaluation was stopped before all of its episodes had ended")
            check_observation(observation, waiting, vector.observation_space, name, lengths)
            noise = () if self._deterministic else (self._policy.noise(generator, vector.count),)
            action, state = self._step(weights, observation, state, *noise)
            step = vector.step(np.asarray(action))
            observation = step.observation
            mask = np.ones(vector.count, bool) if step.mask is None else step.mask
            returns += np.where(mask, step.reward, 0)
            lengths += mask
            check_step(np.asarray(action), step.reward, name, lengths)
            waiting = set(step.ended) - set(step.started)
            for i in step.ended:
                if left[i]:
                    ended.append((float(returns[i]), float(lengths[i])))
                    left[i] -= 1
                returns[i] = lengths[i] = 0
            for i in np.flatnonzero((lengths >= self._max_episode_steps) & (left > 0)):
                ended.append((float(returns[i]), float(lengths[i])))
                left[i] = 0
                self._notify_cut_off()
            if started := step.started:
                state = reset_rows(state, self._policy.initial_state(vector.count), started)
        all_returns, all_lengths = np.array(ended).T
        return Evaluation(
            float(all_returns.mean()), float(all_returns.std()), float(all_lengths.mean()), len(ended)
        )

    def _notify_cut_off(self) -> None:
        if not self._notified:
            self._notified = True
            self._notify(
                f"an evaluation episode of {self._env_spec.name} was cut off after "
                f"{self._max_episode_steps:,} steps; limit its length, for example with "
                f"env_kwargs={{'max_episode_steps': 1000}}"
            )

    def _environments(self, count: int) -> Vector:
        if self._vector is None or self._vector.count != count:
            self.close()
            self._vector = self._env_spec.make(count, self._seed)
        return self._vector

    def close(self) -> None:
        """Close the environments; they are made again when needed."""
        if self._vector is not None:
            self._vector.close()
            self._vector = None

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# In a flow ---------------------------------------------------------------------------------------


def with_evaluation(
    reports: Iter[Report], workers: WorkerSet, evaluator: Evaluator, every: int = 10_000, episodes: int = 10
) -> Iter[Report]:
    """Evaluate the policy every so many environment steps.

    Adds `eval/mean_reward`, `eval/std_reward`, `eval/mean_ep_length` and `eval/best_mean_reward` to the
    report. To stop early, leave the loop over the reports:

        if report.get("eval/mean_reward", -math.inf) >= 475:
            break
    """
    return reports.for_each(_Evaluate(workers, evaluator, every, episodes), name="Evaluate")


class _Evaluate:
    """Evaluates when the steps of a report reach the next multiple of `every`."""

    def __init__(self, workers: WorkerSet, evaluator: Evaluator, every: int, episodes: int):
        self._workers = workers
        self._evaluator = evaluator
        self._every = every
        self._episodes = episodes
        self._due = every
        self._count = 0
        self._best = -np.inf

    def __call__(self, report: Report) -> Report:
        steps = int(report["time/total_timesteps"])
        if steps < self._due or is_heartbeat(report):
            return report
        try:
            evaluation = self._evaluator(self._workers.learner.get_weights(), self._episodes, self._count)
        except EvaluationStopped:  # it stays due
            return report
        self._due = (steps // self._every + 1) * self._every
        self._count += 1
        self._best = max(self._best, evaluation.mean_return)
        return report | {
            "eval/mean_reward": evaluation.mean_return,
            "eval/std_reward": evaluation.std_return,
            "eval/mean_ep_length": evaluation.mean_length,
            "eval/best_mean_reward": self._best,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"due": self._due, "count": self._count, "best": float(self._best)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._due, self._count, self._best = state["due"], state["count"], state["best"]
