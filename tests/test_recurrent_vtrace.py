"""V-trace of recurrent policies: what a learner evaluates is what stepping through the rollouts gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from small_envs import Scripted, worker_of
from test_recurrent import (
    MEMORIES,
    SMALL,
    in_double,
    recurrent_policy,
    reference_rows,
    reference_step,
    spread,
    unprocessed,
    with_autoreset,
)
from test_vtrace import by_definition

from rollstream.algos import appo
from rollstream.rl.batch import Batch
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.rollout import Rollout
from rollstream.rl.rollout_batches import JoinRollouts, join_rollouts, steps_of
from rollstream.rl.updates import compute_grads
from rollstream.rl.vtrace import evaluate_rollouts, rollout_for_vtrace
from rollstream.rl.worker import RolloutWorker, WorkerSpec

SETTINGS = {"gamma": 0.9, "vtrace_lambda": 0.8, "clip_rho": 1.2, "clip_c": 0.9}
close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def scripted_worker(
    memory: Any, mode: AutoresetMode | None = None, index: int = 0, **options: Any
) -> RolloutWorker:
    """Of three scripted environments, in rollouts of seven steps for V-trace."""
    spec = WorkerSpec(EnvSpec(Scripted), 3, 7, recurrent_policy(memory), rollout_for_vtrace, **options)
    return with_autoreset(worker_of(spec, index), mode, seed=10 * index)


def state_before(batch: Batch, i: int) -> Any:
    return jax.tree.map(lambda own: np.asarray(own[0, i], np.float64), batch["first_state"])


def expected_columns(memory: str, weights: Any, rollout: Rollout, i: int) -> dict[str, Any]:
    """Log probabilities and values of one environment by stepping, and V-trace by its definition."""
    columns = {name: np.asarray(own)[:, i : i + 1] for name, own in rollout.columns.per_step().items()}
    rows, state = reference_rows(memory, weights, rollout.columns, i, state_before(rollout.columns, i))
    last = np.asarray(rollout.last_observation[i], np.float64)
    last_value = reference_step(memory, weights, last, None if last[1] == 0 else state)[1]
    value, log_prob = (np.array([[row[name]] for row in rows]) for name in ("value", "log_prob"))
    next_value = np.concatenate([value[1:], [[last_value]]])
    next_value = np.where(np.isnan(columns["final_value"]), next_value, columns["final_value"])
    data = {
        "reward": columns["reward"],
        "value": value,
        "next_value": np.where(columns["terminated"], 0.0, next_value),
        "done": columns["terminated"] | columns["truncated"] | ~columns.get("mask", np.True_),
        "log_ratio": log_prob - columns["log_prob"],
    }
    target, advantage = by_definition(data, **SETTINGS)
    found = {"log_prob": log_prob, "value": value, "value_target": target, "advantage": advantage}
    return {name: column[:, 0] for name, column in found.items()}


@pytest.mark.parametrize("mode", [None, *AutoresetMode], ids=str)
@pytest.mark.parametrize("memory", MEMORIES)
def test_joined_rollouts_are_what_stepping_gives(memory: Any, mode: AutoresetMode | None) -> None:
    """Under other weights than those that acted, from the states of those that did."""
    workers = [scripted_worker(memory, mode, index, evaluates_steps=True) for index in range(2)]
    policy: Any = workers[0].policy
    weights = spread(policy, seed=2)
    evaluate = jax.jit(partial(evaluate_rollouts, policy, **SETTINGS))
    started: list[bool] = []
    for _ in range(4):
        rollouts = [unprocessed(worker) for worker in workers]
        batch = join_rollouts(rollouts).validated()
        started += batch["episode_start"][-1].tolist()
        own, vtrace = evaluate(weights, batch)
        found = own._asdict() | vtrace._asdict()
        for column in range(6):
            rollout, i = rollouts[column // 3], column % 3
            for name, expected in expected_columns(memory, weights, rollout, i).items():
                close(found[name][:, column], expected, err_msg=name)
    assert any(started), "an episode starts with the observation after the last step"
    assert not all(started)
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("evaluates_steps", [True, False], ids=["while acting", "afterwards"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_workers_send_log_probs_and_values_of_final_observations(memory: Any, evaluates_steps: bool) -> None:
    """Given the state before the reset; the states themselves are not sent."""
    worker = scripted_worker(memory, evaluates_steps=evaluates_steps)
    states: list[Any] = [None] * 3
    truncated = 0
    for _ in range(4):
        rollout = unprocessed(worker)
        columns = rollout.columns
        for i in range(3):
            rows, states[i] = reference_rows(memory, worker.weights, columns, i, states[i])
            close(columns["log_prob"][:, i], [row["log_prob"] for row in rows])
            cut = columns["truncated"][:, i] & ~columns["terminated"][:, i]
            final = [row["final_value"] if own else np.nan for row, own in zip(rows, cut, strict=True)]
            close(columns["final_value"][:, i], final)
            truncated += cut.sum()
        assert (rollout.last_state, rollout.final_states, rollout.final_observations) == (None, [], [])
    assert truncated
    worker.close()


def test_states_are_joined_and_replayed_with_their_rollouts() -> None:
    workers = [scripted_worker("lstm", index=index) for index in range(2)]
    join, known = JoinRollouts(replay_batches=2, replay_ratio=1), {}
    for _ in range(3):
        rollouts = [unprocessed(worker) for worker in workers]
        batch = join(rollouts).validated()
        assert batch.shape == (8, 12)
        known |= {own.columns["observation"].tobytes(): own.columns["first_state"] for own in rollouts}
        for start in range(0, 12, 3):
            part = batch.map(lambda own, start=start: own[:, start : start + 3])
            expected = known[steps_of(part)["observation"].tobytes()]
            jax.tree.map(np.testing.assert_array_equal, part["first_state"], expected)
        steps = steps_of(batch).validated()
        assert steps.shape == (7, 12)
        jax.tree.map(np.testing.assert_array_equal, steps["first_state"], batch["first_state"])
    for worker in workers:
        worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_gradients_of_appo_are_those_of_finite_differences(memory: Any) -> None:
    """IMPALA's are the same right after an update of the target network, which is tested there."""
    worker = scripted_worker(memory)
    policy: Any = worker.policy
    config = appo.Config(**SMALL, memory=memory, entropy_coefficient=0.3)
    batch = join_rollouts([unprocessed(worker)])
    steps = appo.with_targets(policy, config, batch, spread(policy, seed=2))
    weights = worker.weights
    grads, _ = compute_grads(partial(appo.loss, policy, config, steps), weights)
    with jax.enable_x64(True):
        double, steps = jax.tree.map(in_double, (dict(weights), steps))
        names = [name for name in double if name.endswith(("cell.recurrent", "body.layers[0].weight"))]
        assert len(names) >= 2
        for name in names:
            direction = np.random.default_rng(3).normal(size=double[name].shape)
            near = (double | {name: double[name] + h * direction} for h in (1e-5, -1e-5))
            high, low = (appo.loss(policy, config, steps, own)[0] for own in near)
            slope = float((grads[name] * direction).sum())
            assert slope == pytest.approx(float(high - low) / 2e-5, rel=1e-3)
    worker.close()
