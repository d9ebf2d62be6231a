"""PPO on CartPole-v1 with a policy and a learner in PyTorch, through the plan that comes with the package.

Plans use policies and learners through a few methods that are independent of the framework. A policy has
`init`, `initial_state`, `noise` and `step` (`rollstream.rl.policy.Policy`); with `jit = False`, `step` is
called with NumPy arrays. A learner has `train`, `get_weights`, `version`, `state_dict` and `load_state_dict`.
Plan, workers, environments and engines stay the same. It needs PyTorch:

    pip install torch
    python examples/torch_policy.py                # here, in one thread
    python examples/torch_policy.py processes 2    # two workers, each in a process
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from gymnasium import spaces
from torch import nn  # pyright: ignore[reportMissingImports]

import rollstream as rs
from rollstream.algos import ppo
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.batch import Batch
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.params import Weights
from rollstream.rl.rollout import Postprocess, Rollout
from rollstream.rl.worker import WorkerSpec

Array = np.ndarray[Any, Any]


class TorchPolicy:
    """An actor and a critic for Box observations and Discrete actions."""

    jit = False

    def __init__(self, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]):
        assert isinstance(observations, spaces.Box)
        assert isinstance(actions, spaces.Discrete)
        torch.set_num_threads(1)  # small networks gain nothing by more
        self._size, self._actions = int(np.prod(observations.shape)), int(actions.n)
        self.network = self._fresh(0)
        self._weights: Weights | None = None

    def _fresh(self, seed: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.ModuleDict(
                {
                    "actor": _layers(self._size, self._actions, last_gain=0.01),
                    "critic": _layers(self._size, 1, last_gain=1.0),
                }
            )

    def init(self, seed: int) -> Weights:
        """Initial weights."""
        return arrays(self._fresh(seed))

    def initial_state(self, size: int) -> tuple[()]:  # noqa: ARG002
        """No state."""
        return ()

    def noise(self, generator: np.random.Generator, *leading: int) -> Array:
        """Gumbel noise: the argmax of logits plus noise is a sample."""
        return generator.gumbel(size=(*leading, self._actions)).astype(np.float32)

    def step(
        self, weights: Weights, observation: Array, state: Any, noise: Array | None
    ) -> tuple[Array, Any]:
        """Actions for a batch of observations."""
        self.use(weights)
        with torch.no_grad():
            logits = self.network["actor"](torch.as_tensor(observation)).numpy()
        return (logits if noise is None else logits + noise).argmax(-1), state

    def use(self, weights: Weights) -> None:
        """Load weights into the network, unless they are loaded already."""
        if weights is not self._weights:
            self.network.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
            self._weights = weights

    def evaluate_actions(self, observation: Any, action: Any) -> tuple[Any, Any, Any]:
        """Log probabilities, entropies and values."""
        distribution = torch.distributions.Categorical(logits=self.network["actor"](observation))
        return distribution.log_prob(action), distribution.entropy(), self.value(observation)

    def value(self, observation: Any) -> Any:
        """Values of observations."""
        return self.network["critic"](observation)[..., 0]


def _layers(inputs: int, outputs: int, *, last_gain: float) -> Any:
    sizes, gains = [inputs, 64, 64, outputs], [np.sqrt(2), np.sqrt(2), last_gain]
    layers: list[Any] = []
    for before, after, gain in zip(sizes, sizes[1:], gains, strict=False):
        layer = nn.Linear(before, after)
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def arrays(network: Any) -> Weights:
    """A network's parameters as NumPy arrays by name."""
    return {name: value.detach().numpy().copy() for name, value in network.state_dict().items()}


# On the workers --------------------------------------------------------------------------------


def add_gae(policy: TorchPolicy, *, gamma: float, gae_lambda: float) -> Postprocess:
    """Postprocessing that adds the columns of PPO's loss to a rollout."""

    def postprocess(weights: Weights, rollout: Rollout) -> Batch:
        policy.use(weights)
        columns = rollout.columns
        with torch.no_grad():
            log_prob, _, value = policy.evaluate_actions(
                torch.as_tensor(columns["observation"]), torch.as_tensor(columns["action"])
            )
            last_value = policy.value(torch.as_tensor(rollout.last_observation))
            next_value = torch.cat([value[1:], last_value[None]]).numpy()
            for t, i, observation in rollout.final_observations:  # truncated episodes bootstrap from these
                next_value[t, i] = policy.value(torch.as_tensor(observation)).item()
        next_value[columns["terminated"]] = 0.0
        td_error = columns["reward"] + gamma * next_value - value.numpy()
        continues = ~(columns["terminated"] | columns["truncated"])
        advantage = np.empty_like(td_error)
        advantage_t = np.zeros_like(td_error[0])
        for t in reversed(range(len(td_error))):
            advantage[t] = advantage_t = td_error[t] + gamma * gae_lambda * continues[t] * advantage_t
        estimates = {"log_prob": log_prob.numpy(), "value": value.numpy(), "advantage": advantage}
        return Batch(columns | estimates | {"value_target": advantage + value.numpy()})

    return postprocess


def worker(config: ppo.Config, task: Task) -> WorkerSpec:
    """PPO's worker with another policy."""
    postprocess = partial(add_gae, gamma=config.gamma, gae_lambda=config.gae_lambda)
    return replace(ppo.worker(config, task), policy=task.policy or TorchPolicy, postprocess=postprocess)


# In the driver ---------------------------------------------------------------------------------


class TorchLearner:
    """Adam on PPO's clipped loss, in minibatches."""

    def __init__(self, config: ppo.Config, task: Task, policy: TorchPolicy):
        self.policy = policy
        """For evaluation; the trained network is a copy."""
        self.version = self.steps = 0
        self.total_steps = task.steps
        self._config = config
        self._seed = task.seed
        self._trained = copy.deepcopy(policy)
        self._trained.use(policy.init(task.seed))
        self._parameters = list(self._trained.network.parameters())
        self._optimizer = torch.optim.Adam(self._parameters, eps=1e-5)

    def train(self, batch: Batch, steps: int | None = None) -> dict[str, float]:
        """Train on a batch, which makes a new version of the weights; return the metrics."""
        config, random = self._config, np.random.default_rng([self._seed, self.version])
        schedules = config.schedules(min(1.0, self.steps / self.total_steps))
        self._optimizer.param_groups[0]["lr"] = schedules["learning_rate"]
        columns = ("observation", "action", "log_prob", "advantage", "value_target")
        rows = {name: torch.tensor(column) for name, column in batch.select(columns).flattened().items()}
        metrics: list[dict[str, float]] = []
        for _ in range(config.epochs):
            permutation = torch.from_numpy(random.permutation(batch.steps))
            for indices in permutation.split(config.steps_per_minibatch(recurrent=False)):
                minibatch = {name: column[indices] for name, column in rows.items()}
                metrics.append(self._update(minibatch, schedules["clip_range"]))
        self.version += 1
        self.steps += batch.steps if steps is None else steps
        means = {name: float(np.mean([own[name] for own in metrics])) for name in metrics[0]}
        return means | schedules | {"n_updates": self.version * config.epochs}

    def _update(self, batch: dict[str, Any], clip_range: float) -> dict[str, float]:
        log_prob, entropy, value = self._trained.evaluate_actions(batch["observation"], batch["action"])
        ratio = (log_prob - batch["log_prob"]).exp()
        clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
        policy_loss = -torch.minimum(ratio * batch["advantage"], clipped * batch["advantage"]).mean()
        value_loss = ((value - batch["value_target"]) ** 2).mean()
        loss = policy_loss + self._config.value_coefficient * value_loss
        loss = loss - self._config.entropy_coefficient * entropy.mean()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        self._optimizer.step()
        return {
            "loss": loss.item(),
            "policy_gradient_loss": policy_loss.item(),
            "value_loss": value_loss.item(),
            "entropy_loss": -entropy.mean().item(),
        }

    @property
    def weights(self) -> Weights:
        """The weights, for workers in this process."""
        return self.get_weights()

    def get_weights(self) -> Weights:
        """The weights as NumPy arrays."""
        return arrays(self._trained.network)

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer state and counters."""
        moments = [self._optimizer.state[own] for own in self._parameters if own in self._optimizer.state]
        return {
            "weights": self.get_weights(),
            "optimizer": [value.numpy().copy() for own in moments for value in own.values()],
            "version": self.version,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._trained.use(dict(state["weights"]))
        values = iter([torch.tensor(value) for value in state["optimizer"]])
        self._optimizer.state.clear()
        for own, (step, mean, square) in zip(
            self._parameters, zip(values, values, values, strict=True), strict=False
        ):
            self._optimizer.state[own] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
        self.version, self.steps = int(state["version"]), int(state["steps"])


def learner(config: ppo.Config, task: Task, policy: TorchPolicy) -> Any:
    """Not a `Learner`, but with the same methods."""
    return TorchLearner(config, task, policy)


TORCH_PPO = Algorithm("torch_ppo", ppo.Config, worker, learner, ppo.plan)


def main() -> None:
    """Train until CartPole is solved."""
    name = sys.argv[1] if len(sys.argv) > 1 else "inline"
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    task = Task(EnvSpec("CartPole-v1"), steps=100_000, seed=1, workers=workers)
    config = ppo.Config()
    with rs.engine(name) as engine:
        for report in TORCH_PPO.plan(TORCH_PPO.workers(engine, config, task), config):
            steps, mean = report["time/total_timesteps"], report.get("rollout/ep_rew_mean", float("nan"))
            print(f"{steps:7.0f} steps   mean return {mean:6.1f}   loss {report['train/loss']:8.3f}")
            if steps >= task.steps or mean >= 475:
                break


if __name__ == "__main__":
    main()
