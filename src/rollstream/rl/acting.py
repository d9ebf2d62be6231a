"""Where workers act: on the host, with NumPy or JAX on the CPU, on JAX's default device, or not at all."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from rollstream.engine import RollstreamError
from rollstream.rl.jit import cpu_device, has_accelerator
from rollstream.rl.params import Weights
from rollstream.rl.spaces import is_image, leaves, zeros

Acting: TypeAlias = Literal["auto", "host", "device", "central"]
"""`central`: an inference actor acts for all workers, on its own default device."""
DEVICE_FLOPS = 10e6
"""FLOPs of a step of all environments of a worker from which on an accelerator acts faster than a core.

Measured by `bench/acting.py`, with one H200: see "What it costs" in DESIGN.md."""


def choose_acting(
    acting: Acting, policy: Any, weights: Weights, num_envs: int, *, own_process: bool
) -> Acting:
    """What was asked for, or by default `host` or `device`, whichever is faster.

    Args:
        acting: What was asked for.
        policy: Of the workers.
        weights: Of the policy.
        num_envs: Number of environments per worker.
        own_process: Whether workers have processes of their own, which use the CPU only.
    """
    if acting in ("host", "central"):
        return acting
    if acting == "device":
        _require_device(policy, own_process)
        return "device"
    if own_process or not policy.jit or not has_accelerator():
        return "host"
    return "device" if step_flops(policy, weights, num_envs) >= DEVICE_FLOPS else "host"


def _require_device(policy: Any, own_process: bool) -> None:
    if own_process:
        raise RollstreamError(
            "acting='device' needs workers in the driver's process: set workers=0, engine='threads' or "
            "acting='auto'; workers with processes of their own act on the host"
        )
    if not policy.jit:
        raise RollstreamError(
            f"acting='device' needs a policy that JAX can compile, and {type(policy).__name__} is not one "
            f"(jit=False): set acting='host'"
        )


def step_flops(policy: Any, weights: Weights, num_envs: int) -> float:
    """FLOPs of choosing an action for each environment, as XLA counts them for a CPU before optimization.

    Where it cannot count, they are infinite for images and else two per parameter and environment.
    """
    space = getattr(policy, "observation_space", None)
    counted = None if space is None else _counted_flops(policy, weights, space, num_envs)
    if counted is not None:
        return counted
    if space is not None and any(is_image(part) for _, part in leaves(space)):
        return math.inf
    return 2.0 * num_envs * sum(np.size(value) for value in weights.values())


def _counted_flops(policy: Any, weights: Weights, space: gymnasium.Space[Any], num_envs: int) -> float | None:
    noise = policy.noise(np.random.default_rng(0), num_envs)
    inputs = weights, zeros(space, num_envs), policy.initial_state(num_envs), noise
    shapes = jax.tree.map(lambda own: jax.ShapeDtypeStruct(jnp.shape(own), jnp.result_type(own)), inputs)
    with jax.default_device(cpu_device()):  # accelerators count other FLOPs, and none of convolutions
        lowered = jax.jit(policy.step).lower(*shapes)
    try:
        cost = lowered.cost_analysis()
    except RuntimeError:  # also NotImplementedError
        return None
    return float(cost["flops"]) if isinstance(cost, dict) and "flops" in cost else None


def describe_acting(acting: Acting) -> str:
    """What acts, for people: the host, the name of the device, or the inference actor."""
    if acting == "central":
        return "an inference actor"
    if acting != "device":
        return "the host"
    device = jax.devices()[0]
    return f"the device, {device.device_kind}" if device.platform != "cpu" else "the device, a CPU"
