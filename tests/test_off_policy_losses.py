"""Losses of DQN, SAC and TD3, their gradients and updates, against versions in numpy and double precision."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollstream.algos import ddpg, dqn, sac, td3
from rollstream.rl.action_distributions import LOG_STD_RANGE, TanhNormal
from rollstream.rl.algorithm import Task
from rollstream.rl.critics import Critics
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.packed_tree import PublishedWeights
from rollstream.rl.params import trainable
from rollstream.rl.update_metrics import Diverged
from rollstream.rl.updates import n_step_returns, polyak_update

Weights = dict[str, Any]
OBSERVATIONS = spaces.Box(-np.inf, np.inf, (2,))
CHOICES = spaces.Discrete(3)
NUMBERS = spaces.Box(np.array([-1, -3], np.float32), np.array([1, 5], np.float32))
N = 12


def task(seed: int = 3) -> Task:
    return Task(EnvSpec("CartPole-v1"), 1000, seed)


def in_double(weights: Weights) -> Weights:
    return {name: np.asarray(value, np.float64) for name, value in weights.items()}


def moved(weights: Weights, seed: int) -> Weights:
    """Other weights than those at first, so that nothing is 0 or small by chance."""
    random = np.random.default_rng(seed)
    return {
        name: (np.asarray(value) + random.normal(0, 0.8, np.shape(value))).astype(np.float32)
        for name, value in trainable(weights).items()
    }


def layers(weights: Weights, x: Any, name: str = "network", head: str = "head") -> Any:
    """One hidden layer and a head."""
    hidden = np.tanh(x @ weights[f"{name}.body.layers[0].weight"].T + weights[f"{name}.body.layers[0].bias"])
    return hidden @ weights[f"{name}.{head}.weight"].T + weights[f"{name}.{head}.bias"]


def gradients_of(loss: Callable[[Weights], float], weights: Weights) -> Weights:
    """The gradient, by small differences."""
    grads = {}
    for name, value in weights.items():
        grads[name] = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            sides = []
            for change in (1e-6, -1e-6):
                other = value.copy()
                other[index] += change
                sides.append(loss(weights | {name: other}))
            grads[name][index] = (sides[0] - sides[1]) / 2e-6
    return grads


def assert_descended(before: Weights, after: Weights, grads: Weights, rate: float) -> None:
    """Adam's first step is as long as the learning rate, against every slope that is clearly not 0."""
    for name, slope in grads.items():
        clear = np.abs(slope) > 1e-4
        change = np.asarray(after[name], np.float64) - np.asarray(before[name], np.float64)
        assert clear.any(), name
        np.testing.assert_allclose(change[clear], -rate * np.sign(slope)[clear], rtol=2e-2, err_msg=name)


def windows(n_step: int, actions: spaces.Space[Any], seed: int = 1) -> dict[str, Any]:
    """Transitions as a buffer gives them: some end within the window, by termination or by truncation."""
    random = np.random.default_rng(seed)
    length = random.integers(1, n_step + 1, N)
    length[: N // 3] = n_step
    within = np.arange(n_step) < length[:, None]
    last = np.arange(n_step) == length[:, None] - 1
    dies = random.random(N) < 0.4
    actions.seed(seed)
    return {
        "observation": random.normal(size=(N, 2)).astype(np.float32),
        "next_observation": random.normal(size=(N, 2)).astype(np.float32),
        "action": np.stack([actions.sample() for _ in range(N)]).astype(
            np.int32 if actions is CHOICES else np.float32
        ),
        "reward": np.where(within, random.normal(0, 2, (N, n_step)), 0).astype(np.float32),
        "terminated": last & dies[:, None],
        "length": length.astype(np.float32),
        "relative_probability": random.uniform(1, 5, N).astype(np.float32),
    }


def summed(rows: Any, i: int, gamma: float) -> tuple[float, float]:
    """The rewards of a window, and what whatever comes after them counts; one after the other."""
    total, scale = 0.0, 1.0
    for k in range(int(rows["length"][i])):
        total += scale * float(rows["reward"][i, k])
        scale *= gamma
        if rows["terminated"][i, k]:
            return total, 0.0
    return total, scale


@pytest.mark.parametrize("n_step", [1, 3])
def test_rewards_of_windows_are_added_up_to_the_end_of_the_episode(n_step: int) -> None:
    rows = windows(n_step, CHOICES)
    assert n_step == 1 or len(set(rows["length"])) == 3
    assert 0 < rows["terminated"].any(1).sum() < N
    total, discount_t = n_step_returns(rows, 0.9)
    expected = [summed(rows, i, 0.9) for i in range(N)]
    np.testing.assert_allclose(np.stack([total, discount_t], 1), expected, rtol=1e-5)


# DQN ---------------------------------------------------------------------------------------------


def q_outputs(weights: Weights, observation: Any, config: dqn.Config) -> Any:
    """`[N, actions, atoms]`."""
    each = layers(weights, observation).reshape(len(observation), -1, config.num_atoms)
    if config.dueling:
        value = layers(weights, observation, head="value_head")[:, None]
        each = value + each - each.mean(1, keepdims=True)
    return each


def softmax(logits: Any) -> Any:
    likely = np.exp(logits - logits.max(-1, keepdims=True))
    return likely / likely.sum(-1, keepdims=True)


def shared_out(atoms: Any, reward: float, discount_t: float, probabilities: Any) -> Any:
    """Algorithm 1 of Bellemare et al. (2017), atom by atom."""
    result, step = np.zeros(len(atoms)), atoms[1] - atoms[0]
    for atom, probability in zip(atoms, probabilities, strict=True):
        place = (min(max(reward + discount_t * atom, atoms[0]), atoms[-1]) - atoms[0]) / step
        below, above = int(np.floor(place)), int(np.ceil(place))
        if below == above:
            result[below] += probability
        else:
            result[below] += probability * (above - place)
            result[above] += probability * (place - below)
    return result


def dqn_loss_of(
    config: dqn.Config, target: Weights, beta: float, weights: Weights, rows: Any
) -> tuple[float, Any]:
    """The loss and the td_error of each row."""
    losses, td_errors = [], []
    atoms = np.linspace(*config.value_range, config.num_atoms) if config.num_atoms > 1 else np.ones(1)
    for i in range(N):
        reward, discount_t = summed(rows, i, config.gamma)
        now, next_ = rows["observation"][i : i + 1], rows["next_observation"][i : i + 1]
        chosen = q_outputs(weights, now, config)[0, rows["action"][i]]
        judged = q_outputs(weights if config.double else target, next_, config)[0]
        after = q_outputs(target, next_, config)[0]
        if config.num_atoms == 1:
            best = np.argmax(judged[:, 0])
            error = abs(reward + discount_t * after[best, 0] - chosen[0])
            td_errors.append(error)
            losses.append(0.5 * error**2 if error <= 1 else error - 0.5)
        else:
            best = np.argmax(softmax(judged) @ atoms)
            wanted = shared_out(atoms, reward, discount_t, softmax(after[best]))
            td_errors.append(-(wanted * np.log(softmax(chosen))).sum())
            losses.append(td_errors[-1])
        if config.priority_exponent:
            losses[-1] *= float(rows["relative_probability"][i]) ** -beta
    return float(np.mean(losses)), np.array(td_errors)


@pytest.mark.parametrize("n_step", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "options",
    [
        {"double": False},
        {"double": True},
        {"dueling": True, "priority_exponent": 0.6},
        {"num_atoms": 7, "value_range": (-2.0, 3.0), "double": False},
        {"num_atoms": 7, "value_range": (-2.0, 3.0), "dueling": True, "priority_exponent": 0.6},
    ],
    ids=["plain", "double", "dueling and prioritized", "atoms", "rainbow"],
)
def test_the_loss_of_dqn_and_its_gradient(options: dict[str, Any], n_step: int) -> None:
    config = dqn.Config(hidden=(3,), activation="tanh", n_step=n_step, gamma=0.9, **options)
    policy = dqn.make_policy(config, OBSERVATIONS, CHOICES)
    weights, target = moved(policy.init(0), 1), moved(policy.init(5), 9)
    rows = windows(n_step, CHOICES)
    reference = partial(dqn_loss_of, config, in_double(target), 0.7)
    expected, td_error = reference(in_double(weights), rows)
    grads, metrics = jax.grad(partial(dqn.loss, policy, config, target, 0.7, rows), has_aux=True)(weights)
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-4)
    assert ("priority" in metrics) == bool(config.priority_exponent)
    if config.priority_exponent:
        np.testing.assert_allclose(metrics["priority"], td_error, rtol=1e-4, atol=1e-5)
    numeric = gradients_of(lambda own: reference(own, rows)[0], in_double(weights))
    for name in weights:
        np.testing.assert_allclose(grads[name], numeric[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_the_networks_of_these_tests_disagree() -> None:
    """Which action is best, where that counts: else double DQN would be the same as plain."""
    config = dqn.Config(hidden=(3,), activation="tanh")
    policy = dqn.make_policy(config, OBSERVATIONS, CHOICES)
    weights, target = moved(policy.init(0), 1), moved(policy.init(5), 9)
    rows = windows(1, CHOICES)
    discount_t = ~rows["terminated"][:, 0]
    one, other = (np.argmax(policy.q_values(own, rows["next_observation"]), -1) for own in (weights, target))
    assert 2 < (one != other)[discount_t].sum() < discount_t.sum()


def test_projection_by_hand() -> None:
    """Between atoms, beyond both ends, on an atom, and at the end of an episode."""
    atoms = np.array([-1.0, 0.0, 1.0], np.float32)
    evenly = np.full((5, 3), 1 / 3, np.float32)
    reward, discount_t = np.array([0.25, 9, -9, 0, 0.5]), np.array([0.0, 1, 1, 1, 1])
    found = dqn.project_distribution(atoms, reward, discount_t, evenly)
    sixth = 1 / 6
    expected = [
        [0, 0.75, 0.25],
        [0, 0, 1],
        [1, 0, 0],
        [2 * sixth, 2 * sixth, 2 * sixth],
        [sixth, 2 * sixth, 3 * sixth],
    ]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_projection_keeps_all_probability_and_the_mean_within_the_range() -> None:
    random = np.random.default_rng(0)
    atoms = np.linspace(-10, 10, 51, dtype=np.float32)
    probabilities = softmax(random.normal(size=(200, 51))).astype(np.float32)
    reward, discount_t = random.uniform(-15, 15, 200).astype(np.float32), np.full(200, 0.5, np.float32)
    found = np.asarray(dqn.project_distribution(atoms, reward, discount_t, probabilities))
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    expected = [
        shared_out(np.linspace(-10, 10, 51), float(reward[i]), 0.5, probabilities[i]) for i in range(200)
    ]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    inside = np.abs(reward) < 5
    means = reward + 0.5 * probabilities @ atoms
    np.testing.assert_allclose((found @ atoms)[inside], means[inside], atol=1e-4)


def test_targets_are_of_legal_actions() -> None:
    """What is worth most by far is not legal where it would count, and changes nothing there."""
    space = spaces.Dict({"observation": OBSERVATIONS, "action_mask": spaces.MultiBinary(3)})
    plain = dqn.Config(hidden=(3,), double=False)
    weights = moved(dqn.make_policy(plain, OBSERVATIONS, CHOICES).init(0), 1)
    rows = windows(1, CHOICES)
    rows["terminated"] = np.zeros((N, 1), bool)
    for double in (False, True):
        config = dqn.Config(hidden=(3,), activation="relu", double=double)
        policy = dqn.make_policy(config, space, CHOICES)
        losses = []
        for lure in (0.0, 100.0):
            tempting = weights | {"network.head.bias": np.array([0, 0, lure], np.float32)}
            masked = rows | {
                name: {"observation": rows[name], "action_mask": np.tile([1, 1, 0], (N, 1)).astype(np.int8)}
                for name in ("observation", "next_observation")
            }
            masked["action"] = rows["action"] % 2
            losses.append(float(dqn.loss(policy, config, tempting, 0.0, masked, tempting)[0]))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_dqn_follows_its_gradient_and_updates_its_target_at_intervals() -> None:
    config = dqn.Config(
        hidden=(3,), activation="tanh", learning_rate=0.01, max_grad_norm=1e6, target_update_interval=3
    )
    policy = dqn.make_policy(config, OBSERVATIONS, CHOICES)
    learner = dqn.learner(config, task(), policy)
    before, target = trainable(learner.weights), moved(learner.weights, 2)
    learner.state = learner.state | {"target": target}
    rows = windows(1, CHOICES)
    known = learner.train(rows, 4)
    grads = gradients_of(
        lambda own: dqn_loss_of(config, in_double(target), 0.4, own, rows)[0], in_double(before)
    )
    assert_descended(before, learner.weights, grads, 0.01)
    assert known["learning_rate"] == 0.01
    for update in range(2, 8):
        for name, value in target.items():
            np.testing.assert_array_equal(learner.state["target"][name], value)
        learner.train(rows, 4)
        assert learner.state["target"].keys() == before.keys()
        target = trainable(learner.weights) if update % 3 == 0 else target


def test_what_changes_while_dqn_learns() -> None:
    config = dqn.Config(exploration_fraction=0.5, final_epsilon=0.2, importance_exponent=0.4)
    assert config.schedules(0.0) == {"learning_rate": 2.5e-4, "epsilon": 1.0, "beta": 0.4}
    assert config.schedules(0.25)["epsilon"] == pytest.approx(0.6)
    assert config.schedules(0.5) == pytest.approx({"learning_rate": 2.5e-4, "epsilon": 0.2, "beta": 0.7})
    assert config.schedules(1.0) == pytest.approx({"learning_rate": 2.5e-4, "epsilon": 0.2, "beta": 1.0})
    assert dqn.Config(exploration_fraction=0.0).schedules(0.0)["epsilon"] == pytest.approx(0.05)


# Squashed normals --------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.5, -1.0), (-0.7, 0.7), (3.0, -3.0)])
def test_densities_of_squashed_normals_add_up(mean: float, log_std: float) -> None:
    """To 1 in all, and between two places to what a normal variable has between them before squashing."""
    normal = np.linspace(-9, 9, 200_001, dtype=np.float32)[:, None]
    outputs = np.tile(np.array([mean, log_std], np.float32), (len(normal), 1))
    action, log_prob = (
        np.asarray(own, np.float64) for own in TanhNormal(_unit(1)).sample_and_log_prob(outputs, normal)
    )
    before = mean + np.exp(log_std) * np.asarray(normal[:, 0], np.float64)
    action, density = np.tanh(before), np.exp(log_prob)
    pieces = np.diff(action) * (density[1:] + density[:-1]) / 2
    assert pieces.sum() == pytest.approx(1, abs=2e-3)
    within = np.abs(normal[1:, 0]) < 1
    assert pieces[within].sum() == pytest.approx(0.6827, abs=2e-3)


def _unit(size: int) -> spaces.Box:
    return spaces.Box(-1, 1, (size,))


def test_squashed_normals_of_several_numbers_are_independent() -> None:
    outputs = np.array([[0.3, -1.0, 0.5, -0.5]], np.float32)
    normal = np.array([[0.7, -1.2]], np.float32)
    action, log_prob = TanhNormal(_unit(2)).sample_and_log_prob(outputs, normal)
    parts = [
        TanhNormal(_unit(1)).sample_and_log_prob(outputs[:, i::2], normal[:, i : i + 1]) for i in range(2)
    ]
    np.testing.assert_allclose(action, np.concatenate([own for own, _ in parts], 1), rtol=1e-6)
    np.testing.assert_allclose(log_prob, sum(own for _, own in parts), rtol=1e-5)


def test_squashed_normals_far_out_are_numbers_with_grads() -> None:
    distribution = TanhNormal(_unit(1))

    def log_prob(outputs: Any) -> Any:
        return distribution.sample_and_log_prob(outputs, jnp.ones((1, 1)))[1][0]

    for mean in (-80.0, 80.0):
        value, slope = jax.value_and_grad(log_prob)(jnp.array([[mean, 0.0]]))
        assert np.isfinite(value)
        assert slope[0, 0] == pytest.approx(np.sign(mean) * 2)  # minus that of log(1 - tanh^2)
    wide = distribution.sample_and_log_prob(
        np.array([[0.0, 99.0]], np.float32), np.full((1, 1), 0.1, np.float32)
    )
    same = distribution.sample_and_log_prob(
        np.array([[0.0, LOG_STD_RANGE[1]]], np.float32), np.full((1, 1), 0.1, np.float32)
    )
    assert [float(own.sum()) for own in wide] == [float(own.sum()) for own in same]


# SAC ---------------------------------------------------------------------------------------------


def actor_of(weights: Weights, observation: Any) -> Any:
    return layers(weights, observation)


def critics_of(weights: Weights, observation: Any, *action: Any, count: int = 2) -> Any:
    """`[critics, N, outputs]`."""
    x = np.concatenate([observation, *action], -1)
    return np.stack([layers(weights, x, f"network[{i}]") for i in range(count)])


DROPPED = 2


def sac_soft_of(
    kind: str, actor: Weights, critic: Weights, observation: Any, normal: Any, *, target: bool = False
) -> tuple[Any, Any]:
    """Values `[N]` and log probabilities; with quantiles, those `[K, N]` of a target are its quantiles."""
    outputs = actor_of(actor, observation)
    if kind == "choices":
        probability = softmax(outputs)
        value = critics_of(critic, observation).min(0)
        return (probability * value).sum(-1), (probability * np.log(probability)).sum(-1)
    mean, log_std = outputs[:, :2], np.clip(outputs[:, 2:], *LOG_STD_RANGE)
    before = mean + np.exp(log_std) * normal
    action = np.tanh(before)
    squashing = -2 * (np.logaddexp(before, -before) - np.log(2))  # log(1 - tanh^2) = -2 log cosh
    each = -0.5 * normal**2 - 0.5 * np.log(2 * np.pi) - log_std - squashing
    values = critics_of(critic, observation, action)
    if kind == "numbers":
        return values.min(0)[:, 0], each.sum(-1)
    if not target:
        return values.mean((0, 2)), each.sum(-1)
    kept = values.shape[0] * values.shape[2] - 2 * DROPPED
    return np.transpose([sorted(values[:, i].ravel())[:kept] for i in range(N)]), each.sum(-1)


def quantile_loss_of(quantiles: Any, targets: Any) -> float:
    """The quantile Huber loss of one critic for one row, one quantile and target after the other."""
    total = 0.0
    for number, quantile in enumerate(quantiles):
        level = (2 * (number + 1) - 1) / (2 * len(quantiles))
        for target in targets:
            error = target - quantile
            huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
            total += (level if error >= 0 else 1 - level) * huber
    return total / (len(quantiles) * len(targets))


def sac_critic_loss_of(kind: str, critic: Weights, target: Any, rows: Any) -> float:
    if kind == "choices":
        every = critics_of(critic, rows["observation"])
        values = every[:, np.arange(N), rows["action"]]
    else:
        flat = (rows["action"] - np.array([0.0, 1.0])) / np.array([1.0, 4.0])
        values = critics_of(critic, rows["observation"], flat)
        if kind == "quantiles":
            return sum(quantile_loss_of(own[i], target[:, i]) for own in values for i in range(N)) / N
        values = values[..., 0]
    return sum(0.5 * np.mean((own - target) ** 2) for own in values)


@pytest.mark.parametrize("n_step", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numbers", "choices", "quantiles"])
def test_an_update_of_sac(kind: str, n_step: int) -> None:
    actions = CHOICES if kind == "choices" else NUMBERS
    config = sac.Config(
        hidden=(3,),
        activation="tanh",
        batch_size=N,
        n_step=n_step,
        gamma=0.9,
        learning_rate=0.01,
        tau=0.1,
        initial_temperature=0.3,
        num_quantiles=5 if kind == "quantiles" else 1,
        dropped_quantiles=DROPPED,
    )
    policy = sac.make_policy(config, OBSERVATIONS, actions)
    learner = sac.learner(config, task(), policy)
    actor, target = moved(learner.weights, 4), moved(learner.state["critic"], 5)
    learner.weights = learner.weights | actor
    learner.state = learner.state | {"target_critic": target}
    critic, rows = learner.state["critic"], windows(n_step, actions)
    assert learner._random_inputs is not None
    noise = learner._random_inputs(np.random.default_rng([3, 0, 4]))
    known = learner.train(rows, 1)
    after = learner.state["critic"]

    value, log_prob = sac_soft_of(
        kind, in_double(actor), in_double(target), rows["next_observation"], noise[0], target=True
    )
    wanted = np.array([summed(rows, i, 0.9) for i in range(N)])
    wanted = wanted[:, 0] + wanted[:, 1] * (value - 0.3 * log_prob)
    expected = sac_critic_loss_of(kind, in_double(critic), wanted, rows)
    assert known["critic_loss"] == pytest.approx(expected, rel=1e-4)
    grads = gradients_of(lambda own: sac_critic_loss_of(kind, own, wanted, rows), in_double(critic))
    assert_descended(critic, after, grads, 0.01)
    for name, own in target.items():
        followed = 0.9 * own + 0.1 * np.asarray(after[name])
        np.testing.assert_allclose(learner.state["target_critic"][name], followed, rtol=1e-4, atol=1e-6)

    def actor_loss(own: Weights) -> float:
        value, log_prob = sac_soft_of(kind, own, in_double(after), rows["observation"], noise[1])
        return float(np.mean(0.3 * log_prob - value))

    assert known["actor_loss"] == pytest.approx(actor_loss(in_double(actor)), rel=1e-4)
    assert_descended(actor, learner.weights, gradients_of(actor_loss, in_double(actor)), 0.01)

    _, log_prob = sac_soft_of(kind, in_double(actor), in_double(after), rows["observation"], noise[1])
    entropy = -np.mean(log_prob)
    assert known["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert known["ent_coef"] == pytest.approx(0.3)
    least = 0.6 * np.log(3) if kind == "choices" else -2.0
    assert known["ent_coef_loss"] == pytest.approx(np.log(0.3) * (entropy - least), rel=1e-4)
    rises = entropy < least
    change = float(learner.state["log_temperature"]) - np.log(0.3)
    assert change == pytest.approx(0.01 if rises else -0.01, rel=1e-3)
    assert float(learner.weights["epsilon"]) == 0.0


@pytest.mark.parametrize(("wanted", "sign"), [(-50.0, -1), (50.0, 1)])
def test_the_temperature_rises_while_the_actor_is_too_decided(wanted: float, sign: int) -> None:
    config = sac.Config(hidden=(3,), batch_size=N, target_entropy=wanted)
    learner = sac.learner(config, task(), sac.make_policy(config, OBSERVATIONS, NUMBERS))
    learner.train(windows(1, NUMBERS), 1)
    assert np.sign(float(learner.state["log_temperature"])) == sign


def test_a_temperature_that_is_not_learned_stays() -> None:
    config = sac.Config(hidden=(3,), batch_size=N, initial_temperature=0.2, learn_temperature=False)
    learner = sac.learner(config, task(), sac.make_policy(config, OBSERVATIONS, NUMBERS))
    found = [learner.train(windows(1, NUMBERS), 1)["ent_coef"] for _ in range(3)]
    assert found == pytest.approx([0.2] * 3)


def test_sac_does_not_count_actions_that_are_not_legal() -> None:
    space = spaces.Dict({"observation": OBSERVATIONS, "action_mask": spaces.MultiBinary(3)})
    config = sac.Config(hidden=(3,), activation="tanh")
    policy = sac.make_policy(config, space, CHOICES)
    critics = Critics(space, outputs=3, action_size=0, hidden=(3,), activation="tanh")
    actor, critic = moved(policy.init(0), 1), moved(critics.init(0), 2)
    critic |= {f"network[{i}].head.bias": np.array([0, 0, 1000], np.float32) for i in range(2)}
    observation = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
    seen = {"observation": observation, "action_mask": np.tile([1, 1, 0], (N, 1)).astype(np.int8)}
    normal = np.zeros((N, 0), np.float32)
    soft_value = partial(sac.value_and_log_prob, policy, critics, sac.min_of_critics, critic, seen, normal)
    value, log_prob = soft_value(actor)
    two = softmax(actor_of(in_double(actor), observation)[:, :2])
    values = critics_of(in_double(critic), observation).min(0)[:, :2]
    np.testing.assert_allclose(value, (two * values).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(log_prob, (two * np.log(two)).sum(-1), rtol=1e-4)
    grads = jax.grad(lambda own: jnp.sum(soft_value(own)[1]), allow_int=True)(actor)
    assert np.isfinite(grads["network.head.weight"]).all()


@pytest.mark.parametrize(("mask", "expected"), [([1, 1, 0], 0.6 * np.log(2)), ([0, 1, 0], 0.0)])
def test_the_target_entropy_is_that_of_the_legal_actions(mask: list[int], expected: float) -> None:
    """More than log(n) can never be reached, so the temperature would rise forever."""
    space = spaces.Dict({"observation": OBSERVATIONS, "action_mask": spaces.MultiBinary(3)})
    config = sac.Config(hidden=(3,))
    policy = sac.make_policy(config, space, CHOICES)
    masks = np.tile(mask, (N, 1)).astype(np.int8)
    found = sac.target_entropy(config, policy, {"action_mask": jnp.asarray(masks)})
    assert float(found) == pytest.approx(expected)
    assert sac.target_entropy(sac.Config(target_entropy=0.1), policy, {"action_mask": masks}) == 0.1


def test_the_largest_quantiles_of_both_critics_together_are_dropped() -> None:
    """In the first row all of them are the first critic's, in the second one of each."""
    first = [[12.0, 10, 11], [1, 2, 3]]
    second = [[3.0, 1, 2], [-4, -9, 4]]
    kept = np.asarray(sac.drop_largest(jnp.array([first, second]), 1))
    assert [sorted(own) for own in kept.T.tolist()] == [[1, 2, 3, 10], [-9, -4, 1, 2]]
    assert sac.drop_largest(jnp.array([first, second]), 0).shape == (6, 2)


def test_the_quantile_huber_loss_by_hand() -> None:
    """A target above a quantile counts as much as its level, and linearly from 1 on."""
    quantiles, target = jnp.array([[[0.0, 2.0]]]), jnp.array([[1.0], [4.0]])
    by_hand = (0.25 * 0.5 + 0.25 * 3.5 + 0.25 * 0.5 + 0.75 * 1.5) / 4
    assert float(sac.quantile_huber_loss(quantiles, target)) == pytest.approx(by_hand)
    both = jnp.concatenate([quantiles, quantiles])
    assert float(sac.quantile_huber_loss(both, target)) == pytest.approx(2 * by_hand)


def test_quantiles_of_a_distribution_have_the_least_loss() -> None:
    target = jnp.asarray(np.random.default_rng(0).permutation(np.linspace(0, 1000, 501)))[:, None]
    expected = np.array([100.0, 300.0, 500.0, 700.0, 900.0])
    quantiles, grads = jnp.zeros((1, 1, 5)), jax.jit(jax.grad(sac.quantile_huber_loss))
    for _ in range(100):
        quantiles = quantiles - 2_500 * grads(quantiles, target)
    np.testing.assert_allclose(quantiles[0, 0], expected, atol=5)


# TD3 ---------------------------------------------------------------------------------------------


def td3_target_of(config: td3.Config, targets: Any, rows: Any, normal: Any) -> Any:
    next_observation = rows["next_observation"]
    limit = config.target_noise_clip
    noise = np.clip(config.target_policy_noise * np.asarray(normal, np.float64), -limit, limit)
    action = np.clip(np.tanh(actor_of(in_double(targets["actor"]), next_observation)) + noise, -1, 1)
    value = critics_of(in_double(targets["critic"]), next_observation, action, count=config.num_critics).min(
        0
    )[:, 0]
    wanted = np.array([summed(rows, i, config.gamma) for i in range(N)])
    return wanted[:, 0] + wanted[:, 1] * value


def td3_critic_loss_of(config: td3.Config, critic: Weights, target: Any, rows: Any) -> float:
    flat = (rows["action"] - np.array([0.0, 1.0])) / np.array([1.0, 4.0])
    values = critics_of(critic, rows["observation"], flat, count=config.num_critics)[..., 0]
    return sum(np.mean((own - target) ** 2) for own in values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        td3.Config(hidden=(3,), activation="tanh", batch_size=N, target_policy_noise=0.4, tau=0.1, n_step=2),
        td3.Config(hidden=(3,), activation="tanh", batch_size=N, target_policy_noise=0.4, policy_delay=3),
        ddpg.Config(hidden=(3,), activation="tanh", batch_size=N, tau=0.1),
    ],
    ids=["td3", "delayed more", "ddpg"],
)
def test_updates_of_td3(config: td3.Config) -> None:
    policy = td3.make_policy(config, OBSERVATIONS, NUMBERS)
    learner = td3.learner(config, task(), policy)
    learner.weights = learner.weights | moved(learner.weights, 4)
    learner.state = learner.state | {
        "targets": {"actor": moved(learner.weights, 6), "critic": moved(learner.state["critic"], 5)}
    }
    assert learner._random_inputs is not None
    random = np.random.default_rng([3, 0, 4])
    for number in range(6):
        rows = windows(config.n_step, NUMBERS, seed=number)
        before, state = learner.weights, learner.state
        noise = learner._random_inputs(random)
        assert (np.abs(config.target_policy_noise * noise) > config.target_noise_clip).any() == (
            config.target_policy_noise > 0
        )
        known = learner.train(rows, 1)
        wanted = td3_target_of(config, state["targets"], rows, noise)
        expected = td3_critic_loss_of(config, in_double(state["critic"]), wanted, rows)
        assert known["critic_loss"] == pytest.approx(expected, rel=1e-4), number
        after = learner.state["critic"]
        if number == 0:
            grads = gradients_of(
                partial(td3_critic_loss_of, config, target=wanted, rows=rows), in_double(state["critic"])
            )
            assert_descended(state["critic"], after, grads, config.learning_rate)
        changes = any((np.asarray(learner.weights[name]) != before[name]).any() for name in trainable(before))
        assert changes == ((number + 1) % config.policy_delay == 0)
        own = {"actor": trainable(learner.weights), "critic": after}
        rate = config.tau if changes else 0.0
        for part, target in state["targets"].items():
            for name, value in target.items():
                followed = np.asarray(value) + rate * (np.asarray(own[part][name]) - np.asarray(value))
                np.testing.assert_allclose(
                    learner.state["targets"][part][name], followed, rtol=1e-5, atol=1e-7
                )
        if not changes:
            assert known["actor_loss"] == float(state["actor_loss"])
            continue

        def actor_loss(own: Weights, rows: Any = rows, critic: Weights = after) -> float:
            action = np.tanh(actor_of(own, rows["observation"]))
            first = critics_of(in_double(critic), rows["observation"], action, count=config.num_critics)[0]
            return -float(first.mean())

        actor = in_double(trainable(before))
        assert known["actor_loss"] == pytest.approx(actor_loss(actor), rel=1e-4)
        if number + 1 == config.policy_delay:
            assert_descended(before, learner.weights, gradients_of(actor_loss, actor), config.learning_rate)


def test_ddpg_is_td3_without_what_that_added() -> None:
    plain = ddpg.Config()
    assert (plain.num_critics, plain.policy_delay, plain.target_policy_noise) == (1, 1, 0.0)
    same = {name: value for name, value in vars(plain).items() if name not in _ADDED}
    assert same == {name: value for name, value in vars(td3.Config()).items() if name not in _ADDED}


_ADDED = ("num_critics", "policy_delay", "target_policy_noise")


def test_targets_follow_slowly() -> None:
    followed = polyak_update({"a": np.zeros(2)}, {"a": np.ones(2)}, 0.25)
    assert followed["a"].tolist() == [0.25, 0.25]
    assert polyak_update(followed, {"a": np.ones(2)}, 1.0)["a"].tolist() == [1, 1]


# What goes wrong ---------------------------------------------------------------------------------

LEARNERS: dict[str, tuple[Any, Any, spaces.Space[Any], str]] = {
    "dqn": (dqn, dqn.Config(hidden=(3,)), CHOICES, "loss"),
    "dqn with atoms": (dqn, dqn.Config(hidden=(3,), num_atoms=5), CHOICES, "loss"),
    "sac": (sac, sac.Config(hidden=(3,), batch_size=N), NUMBERS, "critic_loss"),
    "discrete sac": (sac, sac.Config(hidden=(3,), batch_size=N), CHOICES, "critic_loss"),
    "tqc": (sac, sac.Config(hidden=(3,), batch_size=N, num_quantiles=5), NUMBERS, "critic_loss"),
    "td3": (td3, td3.Config(hidden=(3,), batch_size=N), NUMBERS, "critic_loss"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_nan_stops_the_update(name: str) -> None:
    """And all of that has compiled each update once."""
    algorithm, config, actions, loss = LEARNERS[name]
    learner = algorithm.learner(config, task(), algorithm.make_policy(config, OBSERVATIONS, actions))
    rows, traced = windows(1, actions), []

    def counted(update: Any, *arguments: Any) -> Any:
        traced.append(update)
        return update(*arguments)

    learner.cycle = [partial(counted, update) for update in learner.cycle]
    learner.train(rows, 1)
    before, state = learner.weights, learner.state
    for column in ("reward", "observation", "next_observation"):
        broken = rows[column].copy()
        broken[0] = np.nan
        with pytest.raises(Diverged, match=rf"\b{loss} is nan in update 2|in update 2, and so .*\b{loss}\b"):
            learner.train(rows | {column: broken}, 1)
        assert learner.weights is before
        assert learner.state is state
        assert (learner.version, learner.steps) == (1, 1)
    assert len(traced) == len(set(traced)) == min(2, len(learner.cycle))


def joined(batches: list[Weights]) -> Weights:
    """The rows of several batches."""
    return {name: np.concatenate([own[name] for own in batches]) for name in batches[0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_several_updates_in_one_program_are_the_same_updates(name: str) -> None:
    algorithm, config, actions, loss = LEARNERS[name]
    config = replace(config, **({"target_update_interval": 2} if algorithm is dqn else {"tau": 0.5}))
    policy = algorithm.make_policy(config, OBSERVATIONS, actions)
    one_by_one, at_once = (algorithm.learner(config, task(), policy) for _ in range(2))
    batches = [windows(1, actions, seed=seed) for seed in range(6)]
    losses = [one_by_one.train(rows, 0)[loss] for rows in batches]
    metrics = at_once.train(joined(batches), 7, updates=6)
    np.testing.assert_allclose(metrics.rows()[:, metrics.names.index(loss)], losses, rtol=1e-4)
    assert metrics[loss] == pytest.approx(np.mean(losses), rel=1e-4)
    assert (at_once.version, at_once.steps, at_once.n_updates) == (6, 7, 6)
    assert (one_by_one.version, metrics["n_updates"]) == (6, 6)
    for one, other in zip(
        jax.tree.leaves((one_by_one.weights, one_by_one.state)),
        jax.tree.leaves((at_once.weights, at_once.state)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("updates", [1, 2])
def test_an_accelerator_trains_with_packed_arrays_as_a_cpu_does_without(name: str, updates: int) -> None:
    algorithm, config, actions, loss = LEARNERS[name]
    policy = algorithm.make_policy(config, OBSERVATIONS, actions)
    plain, packed = (algorithm.learner(config, task(), policy) for _ in range(2))
    packed._accelerated = True
    initial = packed.published()
    assert isinstance(initial, PublishedWeights)
    jax.tree.map(np.testing.assert_array_equal, initial.on_host(), dict(plain.weights))
    for seed in range(3):
        batch = joined([windows(1, actions, seed=10 * seed + update) for update in range(updates)])
        expected, metrics = plain.train(batch, 4, updates=updates), packed.train(batch, 4, updates=updates)
        assert metrics[loss] == pytest.approx(expected[loss], rel=1e-4)
    published = packed.published()
    assert isinstance(published, PublishedWeights)
    assert not np.array_equal(initial._packed[0], published._packed[0])  # nothing published is donated
    for weights in (
        packed.weights,
        packed.get_weights(),
        published.on_host(),
        published.on_device(jax.devices()[0]),
    ):
        assert weights.keys() == plain.weights.keys()
        for key, value in plain.weights.items():
            np.testing.assert_allclose(weights[key], value, rtol=1e-4, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), packed.state, plain.state)
    programs: list[Any] = [own for key in packed._compiled.values() for own in key._compiled.values()]
    assert [compiled._cache_size() for _, compiled in programs] == [1] * len(programs)
    resumed = algorithm.learner(config, task(), policy)
    resumed._accelerated = True
    resumed.load_state_dict(packed.state_dict())
    batch = windows(1, actions, seed=40)
    assert resumed.train(batch, 4)[loss] == packed.train(batch, 4)[loss]
    jax.tree.map(np.testing.assert_array_equal, resumed.state, packed.state)


def test_new_priorities_of_several_updates_are_in_the_order_of_the_rows() -> None:
    config = dqn.Config(hidden=(3,), priority_exponent=0.6, learning_rate=0.0)
    policy = dqn.make_policy(config, OBSERVATIONS, CHOICES)
    batches = [windows(1, CHOICES, seed=seed) for seed in range(3)]
    alone = [dqn.learner(config, task(), policy).train(rows, 0)["priority"] for rows in batches]
    together = dqn.learner(config, task(), policy).train(joined(batches), 0, updates=3)["priority"]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 3])
def test_on_an_accelerator_divergence_is_seen_late_and_the_weights_before_it_are_kept(updates: int) -> None:
    algorithm, config, actions, _ = LEARNERS["sac"]
    learner = algorithm.learner(config, task(), algorithm.make_policy(config, OBSERVATIONS, actions))
    learner._accelerated = True  # as it is on an accelerator
    rows = joined([windows(1, actions, seed=seed) for seed in range(updates)])
    broken = {name: column.copy() for name, column in rows.items()}
    broken["reward"][-N] = np.nan  # of the last update
    assert np.isfinite(learner.train(rows, 0, updates=updates)["critic_loss"])
    kept = jax.tree.map(np.asarray, (learner.weights, learner.state))
    late = learner.train(broken, 0, updates=updates)
    if updates == 1:  # else the updates before the last one count
        jax.tree.map(np.testing.assert_array_equal, (learner.weights, learner.state), kept)
    kept = jax.tree.map(np.asarray, (learner.weights, learner.state))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(kept))
    after = learner.train(rows, 0, updates=updates)
    jax.tree.map(np.testing.assert_array_equal, (learner.weights, learner.state), kept)
    with pytest.raises(Diverged, match=rf"_loss is nan in update {2 * updates}\b"):
        late["critic_loss"]
    with pytest.raises(Diverged):
        after["critic_loss"]
