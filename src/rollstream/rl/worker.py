"""Rollout workers: actors that step environments with a policy and send batches of experience."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import numpy as np

from rollstream.engine import ActorContext
from rollstream.flow import Context
from rollstream.rl.batch import Batch
from rollstream.rl.device_acting import DeviceActing, without_stacking
from rollstream.rl.env_worker import EnvWorker
from rollstream.rl.jit import has_accelerator, jit
from rollstream.rl.normalize import lacks_statistics
from rollstream.rl.packed_tree import PublishedWeights
from rollstream.rl.params import Weights, host_arrays
from rollstream.rl.policy import Act, NumpyPolicy
from rollstream.rl.rollout import Rollout
from rollstream.rl.worker_spec import GradientFunction, PolicyMaker, WorkerSpec, policy_step

__all__ = ["GradientFunction", "PolicyMaker", "RolloutWorker", "WorkerSpec"]


class RolloutWorker(EnvWorker):
    """Steps its environments under the weights it received last."""

    def __init__(self, spec: WorkerSpec, *, context: ActorContext):
        super().__init__(spec, context)
        policy = self.policy
        self._received: Weights | PublishedWeights | None = None
        self.version = -1
        self._lacks_statistics = False
        maybe_jit = jit if policy.jit else lambda function: function
        self._numpy_policy = (
            policy if isinstance(policy, NumpyPolicy) and policy.acts_in_numpy(spec.num_envs) else None
        )
        step = policy_step(spec, policy)
        self._step = maybe_jit(step)
        if spec.acting == "device":
            self.vector, self._numpy_policy = without_stacking(self.vector), None
            self._device = DeviceActing(step, self.vector, for_replay=spec.for_replay)
        self._act: Any = None
        # Small weights travel with each call, which is faster than moving them to the device first.
        self._acts_in_jax = policy.jit and self._numpy_policy is None
        # NumPy reads the learner's own arrays on a CPU, and JAX takes them as they are.
        self._reads_weights = not policy.jit or has_accelerator()
        self._gradients = maybe_jit(spec.gradients(policy)) if spec.gradients is not None else None
        self._reset()

    def set_weights(self, version: int, weights: Weights | PublishedWeights) -> None:
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

    def _use(self, received: Weights | PublishedWeights) -> None:
        self._received = None
        if isinstance(received, PublishedWeights):
            weights = received.on_device(self._jax_device) if self._acts_in_jax else received.on_host()
        else:
            weights = jax.device_put(received, self._jax_device) if self._acts_in_jax else received
        if self.spec.exploration is not None:
            weights = self.spec.exploration(weights, self._identity[1])
            weights = jax.device_put(weights, self._jax_device) if self._acts_in_jax else weights
        if self._reads_weights and not self._acts_in_jax:
            weights = host_arrays(weights)
        self._weights, self._lacks_statistics = weights, lacks_statistics(weights)
        if self._device is not None:
            self._act = self._device.act
        elif self._numpy_policy is not None:
            self._act = self._numpy_policy.numpy_step(weights, self.spec.num_envs)
        else:
            self._act = partial(self._step, weights)

    def sample(self, context: Context) -> Any:
        """A rollout of every environment, postprocessed."""
        start, sampled = time.perf_counter(), None
        while sampled is None:
            weights = self.weights
            if self._lacks_statistics:
                weights = self._estimate_statistics()
            rollout = self._rollout()
            rollout.version = self.version
            sampled = self._item(weights, rollout)
        item, steps = sampled
        context.note(version=self.version, steps=steps, sample_time=time.perf_counter() - start)
        return item

    def _rollout(self, length: int | None = None) -> Rollout:
        act, steps = self._acting(), self._record_rollout(length)
        asked = next(steps)
        while not isinstance(asked, Rollout):
            asked = steps.send(act(*asked))
        return asked

    def compute_gradients(self, batch: Batch) -> tuple[Weights, dict[str, Any]]:
        """Gradients of the loss on a batch under this worker's weights, and metrics."""
        assert self._gradients is not None, "this worker has no gradient function: set WorkerSpec.gradients"
        with self._on_device():
            gradients = self._gradients(self.weights, batch)
        return gradients if self._device is not None else jax.tree.map(np.asarray, gradients)

    def _estimate_statistics(self) -> Weights:
        """Weights with an estimate of the statistics that normalize, from steps that count nowhere."""
        policy: Any = self.policy
        columns = self._rollout(self._statistics_length).columns
        with self._on_device():
            statistics = jax.tree.map(np.asarray, policy.batch_statistics(columns))
        self._use(self.weights | statistics)
        self._lacks_statistics = False  # also if there are none: rewards are not recorded
        self._reset(1)
        return self.weights
