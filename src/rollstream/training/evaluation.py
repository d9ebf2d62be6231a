"""How good a policy is: whole episodes in environments of its own, with the likeliest actions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstream.engine import RollstreamError
from rollstream.flow import Iter
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.operators import Report, is_beat
from rollstream.rl.policy import Policy, Weights
from rollstream.rl.spaces import forgotten
from rollstream.rl.vector import Vector
from rollstream.rl.worker_set import WorkerSet
from rollstream.training.inference import likeliest, placed

_WIDTH = 16
"""Environments side by side, at most."""
_LONGEST = 100_000
"""Steps of an episode, at most: not every environment ends by itself whatever is done in it."""

_SHORT = 1_000
"""Steps of an evaluation that is finished even if it is to stop: so a run that was interrupted and goes on is
the same as one that was not."""


class EvaluationStopped(RollstreamError):
    """It was asked to end before its episodes had."""


@dataclass(frozen=True)
class Evaluation:
    """What came of some episodes."""

    mean_return: float
    std_return: float
    mean_length: float
    episodes: int

    def __str__(self) -> str:
        episodes = "episode" if self.episodes == 1 else "episodes"
        return (
            f"mean return {self.mean_return:,.1f} ± {self.std_return:,.1f} over {self.episodes} {episodes}, "
            f"{self.mean_length:,.1f} steps long on average"
        )


class Evaluator:
    """Runs episodes in environments of its own. The same weights and seed give the same episodes.

    Args:
        environment: where.
        policy: what acts.
        seed: of the episodes.
        longest: steps of an episode, at most. One that has not ended by then counts as it is, and its
            environment begins no other.
        say: tells a person, once, that an episode was that long.
        stopped: asked at each step of a long evaluation, it ends that by `EvaluationStopped`.
    """

    def __init__(
        self,
        environment: EnvSpec,
        policy: Policy,
        seed: int = 0,
        *,
        longest: int = _LONGEST,
        say: Callable[[str], None] = warnings.warn,
        stopped: Callable[[], bool] = lambda: False,
    ):
        self._environment = environment
        self._policy = policy
        self._seed = seed
        self._longest = longest
        self._say = say
        self._stopped = stopped
        self._told = False
        self._step = likeliest(policy)
        self._vector: Vector | None = None

    def __call__(self, weights: Weights, episodes: int, number: int = 0) -> Evaluation:
        """Run so many episodes; with another number, others."""
        vector, weights = self._made(min(episodes, _WIDTH)), placed(self._policy, weights)
        seeds = np.random.SeedSequence([self._seed, number, 2]).generate_state(vector.count)
        observation = vector.reset([int(seed) >> 1 for seed in seeds])
        state = self._policy.initial_state(vector.count)
        # Each environment has its share: taking those that end first would favour short episodes.
        left = np.full(vector.count, episodes // vector.count)
        left[: episodes % vector.count] += 1
        returns, lengths = np.zeros((2, vector.count))
        ended: list[tuple[float, float]] = []
        steps = 0
        while left.any():
            steps += 1
            if steps > _SHORT and self._stopped():
                raise EvaluationStopped("the evaluation was stopped before its episodes had ended")
            action, state = self._step(weights, observation, state)
            step = vector.step(np.asarray(action))
            observation = step.observation
            real = np.ones(vector.count, bool) if step.real is None else step.real
            returns += np.where(real, step.reward, 0)
            lengths += real
            for index in step.ended:
                if left[index]:
                    ended.append((float(returns[index]), float(lengths[index])))
                    left[index] -= 1
                returns[index] = lengths[index] = 0
            for index in np.flatnonzero((lengths >= self._longest) & (left > 0)):
                ended.append((float(returns[index]), float(lengths[index])))
                left[index] = 0
                self._tell()
            if begun := step.begun:
                state = forgotten(state, self._policy.initial_state(vector.count), begun)
        all_returns, all_lengths = np.array(ended).T
        return Evaluation(
            float(all_returns.mean()), float(all_returns.std()), float(all_lengths.mean()), len(ended)
        )

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._say(
                f"an episode of {self._environment.name} has not ended after {self._longest:,} steps, and is "
                f"evaluated as it is; limit them, as by env_options={{'max_episode_steps': 1000}}"
            )

    def _made(self, count: int) -> Vector:
        if self._vector is None or self._vector.count != count:
            self.close()
            self._vector = self._environment.make(count, self._seed)
        return self._vector

    def close(self) -> None:
        """Let the environments go; they are made again when needed."""
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
    """Reports which, every so many steps, also say how good the policy is.

    Adds `eval/mean_reward`, `eval/std_reward`, `eval/mean_ep_length` and `eval/best_mean_reward`, the best so
    far. To stop early, leave the loop over the reports:

        if report.get("eval/mean_reward", -math.inf) >= 475:
            break
    """
    return reports.for_each(_Evaluate(workers, evaluator, every, episodes), name="Evaluate")


class _Evaluate:
    """Looks at the steps of every report, and evaluates when it is time."""

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
        if steps < self._due or is_beat(report):
            return report
        try:
            evaluation = self._evaluator(self._workers.learner.published(), self._episodes, self._count)
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
