"""PPO on CartPole-v1 with a policy and a learner in PyTorch, through the plan that comes with the package.

Plans know policies and learners by a few methods that name no framework. A policy has `init`,
`initial_state`, `noise` and `step` (`rollstream.rl.policy.Policy`), and says by `compiled = False` that JAX
is to leave it alone. A learner has `train`, `published`, `version`, `state_dict` and `load_state_dict`. The
plan, the workers, their environments and the engines are the same as ever. It needs PyTorch:

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
from rollstream.rl.policy import Weights
from rollstream.rl.worker import Finish, Rollout, WorkerSpec

Array = np.ndarray[Any, Any]


class TorchPolicy:
    """Two small networks: what to do, and how good things are. For vectors and a choice of actions."""

    compiled = False

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
        """Fresh weights."""
        return arrays(self._fresh(seed))

    def initial_state(self, size: int) -> tuple[()]:  # noqa: ARG002
        """Nothing is remembered."""
        return ()

    def noise(self, generator: np.random.Generator, *leading: int) -> Array:
        """The largest logit with noise of this kind is a draw from their distribution."""
        return generator.gumbel(size=(*leading, self._actions)).astype(np.float32)

    def step(
        self, weights: Weights, observation: Array, state: Any, noise: Array | None
    ) -> tuple[Array, Any]:
        """An action for each of the observations."""
        self.use(weights)
        with torch.no_grad():
            logits = self.network["actor"](torch.as_tensor(observation)).numpy()
        return (logits if noise is None else logits + noise).argmax(-1), state

    def use(self, weights: Weights) -> None:
        """Put weights into the network, unless they are there."""
        if weights is not self._weights:
            self.network.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
            self._weights = weights

    def evaluate(self, observation: Any, action: Any) -> tuple[Any, Any, Any]:
        """How likely actions were, how undecided the policy is, how good things are."""
        choice = torch.distributions.Categorical(logits=self.network["actor"](observation))
        return choice.log_prob(action), choice.entropy(), self.value(observation)

    def value(self, observation: Any) -> Any:
        """How good things are."""
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
    """A network's weights by name, as they travel."""
    return {name: value.detach().numpy().copy() for name, value in network.state_dict().items()}


# On the workers --------------------------------------------------------------------------------


def with_advantages(policy: TorchPolicy, *, discount: float, trace: float) -> Finish:
    """Adds what PPO learns from to rollouts."""

    def finish(weights: Weights, rollout: Rollout) -> Batch:
        policy.use(weights)
        columns = rollout.columns
        with torch.no_grad():
            log_prob, _, value = policy.evaluate(
                torch.as_tensor(columns["observation"]), torch.as_tensor(columns["action"])
            )
            last = policy.value(torch.as_tensor(rollout.last))
            next_value = torch.cat([value[1:], last[None]]).numpy()
            for t, i, observation in rollout.final:  # episodes that were cut off go on beyond their end
                next_value[t, i] = policy.value(torch.as_tensor(observation)).item()
        next_value[columns["terminated"]] = 0.0
        delta = columns["reward"] + discount * next_value - value.numpy()
        goes_on = ~(columns["terminated"] | columns["truncated"])
        advantage = np.empty_like(delta)
        after = np.zeros_like(delta[0])
        for t in reversed(range(len(delta))):
            advantage[t] = after = delta[t] + discount * trace * goes_on[t] * after
        more = {"log_prob": log_prob.numpy(), "value": value.numpy(), "advantage": advantage}
        return Batch(columns | more | {"value_target": advantage + value.numpy()})

    return finish


def worker(config: ppo.Config, task: Task) -> WorkerSpec:
    """The usual worker with another policy."""
    finish = partial(with_advantages, discount=config.discount, trace=config.gae_lambda)
    return replace(config.worker(task), policy=task.policy or TorchPolicy, finish=finish)


# In the driver ---------------------------------------------------------------------------------


class TorchLearner:
    """Adam on the clipped loss of PPO, in minibatches."""

    def __init__(self, config: ppo.Config, task: Task, policy: TorchPolicy):
        self.policy = policy
        """For others to act with; what is learned is kept apart from it."""
        self.version = self.steps = 0
        self.total_steps = task.steps
        self._config = config
        self._seed = task.seed
        self._trained = copy.deepcopy(policy)
        self._trained.use(policy.init(task.seed))
        self._parameters = list(self._trained.network.parameters())
        self._optimizer = torch.optim.Adam(self._parameters, eps=1e-5)

    def train(self, batch: Batch, steps: int | None = None) -> dict[str, float]:
        """Learn from a batch: a new version, and what is to be known of it."""
        config, random = self._config, np.random.default_rng([self._seed, self.version])
        settings = config.settings(min(1.0, self.steps / self.total_steps))
        self._optimizer.param_groups[0]["lr"] = settings["learning_rate"]
        learned = ("observation", "action", "log_prob", "advantage", "value_target")
        rows = {name: torch.tensor(column) for name, column in batch.only(learned).flattened().items()}
        known: list[dict[str, float]] = []
        for _ in range(config.epochs):
            order = torch.from_numpy(random.permutation(batch.steps))
            for chosen in order.split(config.minibatch_size):
                some = {name: column[chosen] for name, column in rows.items()}
                known.append(self._descend(some, settings["clip_range"]))
        self.version += 1
        self.steps += batch.steps if steps is None else steps
        return {name: float(np.mean([one[name] for one in known])) for name in known[0]} | settings

    def _descend(self, rows: dict[str, Any], clip_range: float) -> dict[str, float]:
        log_prob, entropy, value = self._trained.evaluate(rows["observation"], rows["action"])
        ratio = (log_prob - rows["log_prob"]).exp()
        clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
        policy_loss = -torch.minimum(ratio * rows["advantage"], clipped * rows["advantage"]).mean()
        value_loss = ((value - rows["value_target"]) ** 2).mean()
        loss = policy_loss + self._config.value_coefficient * value_loss
        loss = loss - self._config.entropy_coefficient * entropy.mean()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self._config.max_gradient_norm)
        self._optimizer.step()
        return {
            "loss": loss.item(),
            "policy_gradient_loss": policy_loss.item(),
            "value_loss": value_loss.item(),
            "entropy_loss": -entropy.mean().item(),
        }

    def published(self) -> Weights:
        """The weights as numpy arrays, to send."""
        return arrays(self._trained.network)

    def state_dict(self) -> dict[str, Any]:
        """Weights, the optimizer's state, counters."""
        moments = [self._optimizer.state[own] for own in self._parameters if own in self._optimizer.state]
        return {
            "weights": self.published(),
            "optimizer": [value.numpy().copy() for own in moments for value in own.values()],
            "version": self.version,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._trained.use(dict(state["weights"]))
        values = iter([torch.tensor(value) for value in state["optimizer"]])
        self._optimizer.state.clear()
        for own, (step, mean, square) in zip(
            self._parameters, zip(values, values, values, strict=True), strict=False
        ):
            self._optimizer.state[own] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
        self.version, self.steps = int(state["version"]), int(state["steps"])


def learner(config: ppo.Config, task: Task, policy: TorchPolicy) -> Any:
    """It is no `Learner`, but does what one does."""
    return TorchLearner(config, task, policy)


TORCH_PPO = Algorithm("torch_ppo", ppo.Config, worker, learner, ppo.plan)


def main() -> None:
    """Train until CartPole is balanced most of the time."""
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
