"""V-trace against the paper's definition, and the rollouts it is computed from."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from small_envs import Scripted, Signals, worker_of
from test_reset_steps import short_worker

from rollstream.flow import Context
from rollstream.rl.batch import Batch
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.episode_statistics import ended_episodes
from rollstream.rl.gae import compute_gae
from rollstream.rl.normalize import Moments, batch_statistics
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.rollout import Rollout
from rollstream.rl.rollout_batches import JoinRollouts, join_rollouts, steps_of
from rollstream.rl.updates import explained_variance, masked_mean
from rollstream.rl.vtrace import compute_vtrace, evaluate_rollouts, rollout_for_vtrace
from rollstream.rl.worker import RolloutWorker, WorkerSpec

T, B = 12, 5
Settings = dict[str, float]


def by_definition(
    data: dict[str, Any], *, gamma: float, vtrace_lambda: float, clip_rho: float, clip_c: float
) -> tuple[Any, Any]:
    """Section 4.1 of the paper, with the sums and products written out, up to the end of the episode."""
    reward, value, next_value, done = (data[name] for name in ("reward", "value", "next_value", "done"))
    ratio = np.exp(np.asarray(data["log_ratio"], np.float64))
    target, advantage = np.zeros(reward.shape), np.zeros(reward.shape)
    for s, i in np.ndindex(reward.shape):
        ends = np.flatnonzero(done[s:, i])
        stop = s + ends[0] + 1 if len(ends) else len(reward)
        target[s, i] = value[s, i]
        for t in range(s, stop):
            trace = np.prod([vtrace_lambda * min(clip_c, ratio[k, i]) for k in range(s, t)])
            td_error = reward[t, i] + gamma * next_value[t, i] - value[t, i]
            target[s, i] += gamma ** (t - s) * trace * min(clip_rho, ratio[t, i]) * td_error
    for s, i in np.ndindex(reward.shape):
        last = s == len(reward) - 1 or done[s, i]
        later = 0 if last else vtrace_lambda * (target[s + 1, i] - value[s + 1, i])
        q_value = reward[s, i] + gamma * (next_value[s, i] + later)
        advantage[s, i] = min(clip_rho, ratio[s, i]) * (q_value - value[s, i])
    return target, advantage


def random_data(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    reward, value, final, log_ratio = random.normal(size=(4, T, B))
    terminated, truncated = random.random((2, T, B)) < 0.15
    next_value = np.concatenate([value[1:], random.normal(size=(1, B))])
    next_value = np.where(terminated, 0.0, np.where(truncated, final, next_value))
    assert terminated.any()
    assert (truncated & ~terminated).any()
    return {
        "reward": reward,
        "value": value,
        "next_value": next_value,
        "done": terminated | truncated,
        "log_ratio": log_ratio,
    }


# V-trace -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"gamma": 0.9, "vtrace_lambda": 1.0, "clip_rho": 1.0, "clip_c": 1.0},
        {"gamma": 0.95, "vtrace_lambda": 0.7, "clip_rho": 2.0, "clip_c": 0.8},
        {"gamma": 1.0, "vtrace_lambda": 0.0, "clip_rho": 0.5, "clip_c": 1.5},
    ],
)
def test_vtrace_by_its_definition(settings: Settings) -> None:
    data = random_data()
    found = jax.jit(partial(compute_vtrace, **settings))(**data)
    target, advantage = by_definition(data, **settings)
    np.testing.assert_allclose(found.value_target, target, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.advantage, advantage, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vtrace_lambda", [1.0, 0.6])
def test_on_policy_it_is_gae(vtrace_lambda: float) -> None:
    data: dict[str, Any] = random_data(2) | {"log_ratio": np.zeros((T, B))}
    found = compute_vtrace(**data, gamma=0.9, vtrace_lambda=vtrace_lambda)
    steps = {name: data[name] for name in ("reward", "value", "next_value", "done")}
    gae = compute_gae(**steps, gamma=0.9, gae_lambda=vtrace_lambda)
    np.testing.assert_allclose(found.advantage, gae, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.value_target, gae + data["value"], rtol=1e-5, atol=1e-6)


def test_on_policy_targets_are_n_step_returns() -> None:
    data: dict[str, Any] = random_data(3) | {"log_ratio": np.zeros((T, B))}
    returns, following = np.zeros((T, B)), data["next_value"][-1]
    for t in reversed(range(T)):
        following = data["reward"][t] + 0.9 * np.where(data["done"][t], data["next_value"][t], following)
        returns[t] = following
    found = compute_vtrace(**data, gamma=0.9)
    np.testing.assert_allclose(found.value_target, returns, rtol=1e-5, atol=1e-6)


def test_no_gradient_flows_through_targets_and_advantages() -> None:
    data = random_data()

    def total(value: Any, next_value: Any, log_ratio: Any) -> Any:
        changed = {"value": value, "next_value": next_value, "log_ratio": log_ratio}
        return sum(jnp.sum(own) for own in compute_vtrace(**data | changed, gamma=0.9))

    inputs = [jnp.asarray(data[name]) for name in ("value", "next_value", "log_ratio")]
    for grads in jax.grad(total, argnums=(0, 1, 2))(*inputs):
        np.testing.assert_array_equal(grads, np.zeros((T, B)))


# Rollouts of workers -----------------------------------------------------------------------------


def sampled(worker: RolloutWorker) -> Rollout:
    return worker.sample(Context("sample", ("worker", "sample", 0), None, {}))


def scripted_worker(index: int = 0, **options: Any) -> RolloutWorker:
    spec = WorkerSpec(EnvSpec(Scripted), 3, 10, ActorCriticPolicy, rollout_for_vtrace, **options)
    return worker_of(spec, index)


class ActsWithJax(ActorCriticPolicy):
    """Evaluates its steps while it acts."""

    def acts_in_numpy(self, num_envs: int) -> bool:
        return False


@pytest.mark.parametrize("kind", [ActorCriticPolicy, ActsWithJax])
def test_workers_send_log_probs_and_final_values(kind: type[ActorCriticPolicy]) -> None:
    """Under the weights that acted; without anything else that the learner does not need."""
    spec = WorkerSpec(EnvSpec(Scripted), 3, 10, kind, rollout_for_vtrace, evaluates_steps=True)
    worker, same = worker_of(spec), worker_of(spec)
    raw, sent = worker._rollout(), sampled(same)
    policy: Any = worker.policy
    expected = {"reward", "observation", "action", "terminated", "truncated", "log_prob", "final_value"}
    assert sent.columns.keys() == expected | {"episode_return", "episode_length", "episode_success"}
    log_prob, _, _ = policy.evaluate_actions(
        worker.weights, raw.columns["observation"], raw.columns["action"]
    )
    np.testing.assert_allclose(sent.columns["log_prob"], log_prob, rtol=1e-5, atol=1e-6)
    assert raw.final_observations
    assert sent.final_observations == []
    final_value = np.full((10, 3), np.nan)
    for t, i, observation in raw.final_observations:
        final_value[t, i] = policy.value(worker.weights, observation[None])[0]
    np.testing.assert_allclose(sent.columns["final_value"], final_value, rtol=1e-5)
    np.testing.assert_array_equal(
        np.isnan(final_value), raw.columns["terminated"] | ~raw.columns["truncated"]
    )


def expected_targets(policy: Any, weights: Any, rollout: Rollout, settings: Settings) -> tuple[Any, Any]:
    """V-trace of one rollout, from forward passes of its parts."""
    columns = rollout.columns
    log_prob, _, value = policy.evaluate_actions(weights, columns["observation"], columns["action"])
    last = policy.value(weights, rollout.last_observation)
    next_value = np.concatenate([value[1:], last[None]])
    next_value = np.where(np.isnan(columns["final_value"]), next_value, columns["final_value"])
    data = {
        "reward": columns["reward"],
        "value": np.asarray(value),
        "next_value": np.where(columns["terminated"], 0.0, next_value),
        "done": columns["terminated"] | columns["truncated"],
        "log_ratio": log_prob - columns["log_prob"],
    }
    return by_definition(data, **settings)


def test_joined_rollouts_are_evaluated_in_one_forward_pass() -> None:
    settings = {"gamma": 0.9, "vtrace_lambda": 0.9, "clip_rho": 1.2, "clip_c": 0.9}
    rollouts = [sampled(scripted_worker(index)) for index in range(2)]
    policy: Any = scripted_worker().policy
    weights, calls = policy.init(7), []
    policy.evaluate_actions = lambda *args: calls.append(args) or type(policy).evaluate_actions(policy, *args)
    own, vtrace = evaluate_rollouts(policy, weights, join_rollouts(rollouts), **settings)
    assert len(calls) == 1
    del policy.evaluate_actions
    for index, rollout in enumerate(rollouts):
        part, columns = np.s_[:, 3 * index : 3 * index + 3], rollout.columns
        target, advantage = expected_targets(policy, weights, rollout, settings)
        np.testing.assert_allclose(vtrace.value_target[part], target, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vtrace.advantage[part], advantage, rtol=1e-4, atol=1e-5)
        expected = policy.evaluate_actions(weights, columns["observation"], columns["action"])
        for found, value in zip(own, expected, strict=True):
            np.testing.assert_allclose(found[part], value, rtol=1e-5, atol=1e-6)


def test_rewards_are_normalized_by_the_learner() -> None:
    rollout = sampled(scripted_worker())
    normalizing: Any = ActorCriticPolicy(
        Scripted.observation_space, Scripted.action_space, normalize_rewards=True
    )
    plain: Any = ActorCriticPolicy(Scripted.observation_space, Scripted.action_space)
    weights = normalizing.init(0) | Moments(np.float32(4), np.float32(0), np.float32(16)).as_weights("return")
    batch = join_rollouts([rollout])
    _, found = evaluate_rollouts(normalizing, weights, batch, gamma=0.9)
    scaled = Batch(batch | {"reward": batch["reward"] / 2})
    _, expected = evaluate_rollouts(plain, weights, scaled, gamma=0.9)
    np.testing.assert_allclose(found.value_target, expected.value_target, rtol=1e-4)


# Steps that only reset ---------------------------------------------------------------------------


def test_reset_steps_cut_the_recursion_and_change_nothing_else() -> None:
    """Targets of all other steps are those of environments that reset within the step."""
    worker, same = (
        short_worker(mode, length=20, num_envs=1, postprocess=rollout_for_vtrace)
        for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
    )
    policy: Any = worker.policy
    with_resets, without = (join_rollouts([sampled(own)]) for own in (worker, same))
    mask = steps_of(with_resets)["mask"][:, 0]
    assert 0 < np.count_nonzero(~mask) < 15
    count = int(mask.sum())
    np.testing.assert_array_equal(
        with_resets["observation"][:-1][mask], without["observation"][:-1][:count], "the same episodes"
    )
    # Actions differ, and with them log probabilities; rewards and observations do not depend on them.
    alike = Batch(
        with_resets | {"log_prob": policy.evaluate_actions(worker.weights, *_acted(with_resets))[0]}
    )
    other = Batch(without | {"log_prob": policy.evaluate_actions(worker.weights, *_acted(without))[0]})
    (_, found), (_, expected) = (
        evaluate_rollouts(policy, worker.weights, own, gamma=0.9) for own in (alike, other)
    )
    complete = np.flatnonzero(without["terminated"][:count, 0])[-1] + 1  # the last episode may go on
    for mine, others in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine[mask][:complete], others[:complete], rtol=1e-4, atol=1e-6)
    worker.close()
    same.close()


def _acted(batch: Batch) -> tuple[Any, Any]:
    return batch["observation"], batch["action"]


def test_a_reset_step_is_no_bridge_between_episodes() -> None:
    """Even if nothing else said that an episode had ended."""
    policy: Any = ActorCriticPolicy(spaces.Box(-1, 1, (1,)), spaces.Discrete(2))
    weights, shape = policy.init(0), (4, 1)
    columns = Batch(
        observation=np.linspace(-1, 1, 4, dtype=np.float32).reshape(4, 1, 1),
        action=np.zeros(shape, int),
        reward=np.ones(shape, np.float32),
        terminated=np.zeros(shape, bool),
        truncated=np.zeros(shape, bool),
        log_prob=np.full(shape, -1, np.float32),
        final_value=np.full(shape, np.nan, np.float32),
        mask=np.array([[True], [False], [True], [True]]),
    )

    def target(reward: float) -> Any:
        late = columns["reward"].copy()
        late[2:] = reward
        rollout = Rollout(Batch(columns | {"reward": late}), np.zeros((1, 1), np.float32), [])
        return evaluate_rollouts(policy, weights, join_rollouts([rollout]), gamma=0.9)[1].value_target

    one, other = target(1), target(100)
    np.testing.assert_array_equal(one[:2], other[:2])
    assert (one[2:] != other[2:]).all()


def test_means_and_statistics_leave_reset_steps_out() -> None:
    values, mask = np.array([1.0, 2.0, 90.0, 6.0]), np.array([True, True, False, True])
    assert float(masked_mean(values, mask)) == 3
    assert float(masked_mean(values, None)) == 24.75
    assert float(masked_mean(values, np.zeros(4, bool))) == 0
    kept = values[mask]
    assert float(explained_variance(values / 2, values, mask)) == pytest.approx(
        float(explained_variance(kept / 2, kept))
    )
    batch = {"observation": values.reshape(4, 1, 1), "discounted_return": values, "mask": mask}
    found = batch_statistics(spaces.Box(-1, 1, (1,)), batch, normalize_observations=True)
    for name in ("observation", "return"):
        moments = Moments.from_weights(found, name)
        assert float(moments.count) == 3
        np.testing.assert_allclose(np.ravel(moments.mean), kept.mean(), rtol=1e-5)
        np.testing.assert_allclose(np.ravel(moments.std), kept.std(), rtol=1e-5)


# Batches of rollouts -----------------------------------------------------------------------------


def numbered(number: float, width: int = 2) -> Rollout:
    """Two steps; one episode ends with the last."""
    episode = np.array([[np.nan] * width, [number] * width], np.float32)
    return Rollout(
        Batch(
            observation=np.full((2, width, 1), number, np.float32),
            reward=np.full((2, width), number, np.float32),
            episode_return=episode,
            episode_length=episode,
            episode_success=episode,
        ),
        np.full((width, 1), number + 0.5, np.float32),
        [],
    )


@pytest.mark.parametrize("put", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_rollouts_are_joined_side_by_side_with_the_observations_after_them(put: Any) -> None:
    rollouts = [numbered(1), numbered(2, width=3)]
    for rollout in rollouts:
        rollout.columns["observation"] = put(rollout.columns["observation"])
        rollout.last_observation = put(rollout.last_observation)
    batch = join_rollouts(rollouts).validated()
    assert batch.shape == (3, 5)
    assert isinstance(batch["observation"], jax.Array if put is jnp.asarray else np.ndarray)
    assert isinstance(batch["reward"], np.ndarray)
    np.testing.assert_array_equal(
        batch["observation"][..., 0], [[1, 1, 2, 2, 2], [1, 1, 2, 2, 2], [1.5, 1.5, 2.5, 2.5, 2.5]]
    )
    assert steps_of(batch).shape == (2, 5)
    assert ended_episodes(batch)[:, 0].tolist() == [1, 1, 2, 2, 2], "each once"


def test_observations_with_parts_are_joined() -> None:
    spec = WorkerSpec(EnvSpec(Signals), 2, 4, ActorCriticPolicy, rollout_for_vtrace)
    rollouts = [sampled(worker_of(spec, index)) for index in range(2)]
    batch = join_rollouts(rollouts).validated()
    assert batch["observation"]["action_mask"].shape == (5, 4, 3)
    assert batch["observation"]["observation"]["number"].shape == (5, 4, 2)
    last = rollouts[1].last_observation["observation"]["choice"]
    np.testing.assert_array_equal(batch["observation"]["observation"]["choice"][-1, 2:], last)


def test_without_replay_nothing_is_kept() -> None:
    join = JoinRollouts()
    join([numbered(1)])
    assert join.state_dict()["pool"] == []


def test_new_batches_are_joined_with_some_of_the_newest_whose_episodes_do_not_count_again() -> None:
    join, seen = JoinRollouts(replay_batches=3, replay_ratio=2, seed=1), set()
    for number in range(1, 60):
        batch = join([numbered(number)]).validated()
        assert batch.shape == (3, 6), "also the first, so that one compilation does"
        first, *replayed = batch["reward"][0, ::2].tolist()
        assert first == number
        assert all(max(1, number - 2) <= own <= number for own in replayed)
        seen |= {number - own for own in replayed}
        assert ended_episodes(batch)[:, 0].tolist() == [number, number]
    assert seen == {0, 1, 2}


def test_replay_goes_on_exactly() -> None:
    first, resumed = (JoinRollouts(4, 1) for _ in range(2))
    for number in range(6):
        first([numbered(number)])
    resumed.load_state_dict(first.state_dict())
    for number in range(6, 12):
        one, other = first([numbered(number)]), resumed([numbered(number)])
        np.testing.assert_array_equal(one["reward"], other["reward"])
