"""What a rollout worker is started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium

from rollstream.engine import RollstreamError
from rollstream.rl.acting import Acting
from rollstream.rl.batch import Batch
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.params import Weights
from rollstream.rl.policy import EvaluatingPolicy, Policy
from rollstream.rl.rollout import Postprocess

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
    bootstrap_values: tuple[Literal["last", "final"], ...] | None = None
    """Values that postprocessing needs besides those of the steps: of the `last` observation, of `final`
    ones. If it needs nothing else of the network, an inference actor can act for the workers; `None` if it
    needs the weights."""
    inference_batch: int | None = None
    """Number of requests in a batch of the inference actor; by default half of the workers."""
    inference_deadline: float = 2.0
    """Milliseconds after which it computes a smaller batch."""
    own_process: bool = False
    """Whether the worker has a process of its own, where JAX uses the CPU only."""
    acting: Acting = "auto"
    """Where the worker acts, or an inference actor for it; a `WorkerSet` chooses for `auto`."""
    tasks: int | None = None
    """Number of tasks of a `TaskWorker`, which divides `num_envs`; other workers have none."""
    adapt: Callable[[Any], Callable[[Weights, Any], Weights]] | None = None
    """Given the policy, returns what adapts weights to the steps of a task: a pure function."""
    env_threads: int | None = None
    """Number of threads of ALE's and EnvPool's vector environments; their own default without one."""


def policy_step(spec: WorkerSpec, policy: Policy) -> Any:
    """How a policy acts: `evaluated_step`, if steps are to be evaluated and it can, else `step`."""
    step = policy.step
    if spec.evaluates_steps and isinstance(policy, EvaluatingPolicy) and policy.evaluates_steps():
        step = policy.evaluated_step
    return step


def require_central(spec: WorkerSpec, policy: Any) -> None:
    """Raise unless an inference actor can act for these workers."""
    if spec.gradients or spec.exploration or spec.bootstrap_values is None:
        needs = (
            "compute gradients"
            if spec.gradients
            else "vary them to explore"
            if spec.exploration
            else "postprocess rollouts with them (WorkerSpec.bootstrap_values is None)"
        )
        raise RollstreamError(
            f"acting='central' leaves the weights with an inference actor, but the workers of this algorithm "
            f"{needs}: set acting='auto'"
        )
    if spec.bootstrap_values and policy_step(spec, policy) == policy.step:
        raise RollstreamError(
            f"acting='central' needs a policy that evaluates its steps, and {type(policy).__name__} does not "
            f"(evaluates_steps): give it an evaluated_step, or set acting='host'"
        )
