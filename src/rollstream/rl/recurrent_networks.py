"""Recurrent networks: an LSTM or a GRU between hidden layers and a head, of actor and critic or of Q values.

What does not depend on the state (encoder, hidden layers, the cells' input products) and the heads are
functions of one step, which JAX maps over all steps at once; only the cells themselves go through time step
by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from numpy.random import Generator

from rollstream.rl.action_distributions import ActionDistribution
from rollstream.rl.initializers import orthogonal
from rollstream.rl.matrix_products import product
from rollstream.rl.networks import (
    MLP,
    Dense,
    Encoder,
    actor_critic_heads,
    dense,
    hidden_sizes,
    q_outputs,
    with_log_std,
)

Array = Any
Memory: TypeAlias = Literal["none", "lstm", "gru"]
"""The recurrent layer of a network."""
RecurrentMemory: TypeAlias = Literal["lstm", "gru"]
"""The recurrent layer of a network that has one."""


class LSTM(eqx.Module):
    """Long short-term memory (Hochreiter & Schmidhuber, 1997, doi:10.1162/neco.1997.9.8.1735).

    Gates are in the order input, forget, cell, output. The bias of the forget gate starts at 1 (Jozefowicz et
    al., 2015), so that at first the cell forgets slowly.
    """

    input: Dense
    recurrent: Array

    def __init__(self, size: int, units: int, random: Generator):
        self.input = dense(size, 4 * units, 1.0, random)
        self.input.bias[units : 2 * units] = 1.0
        self.recurrent = _orthogonal_blocks(4, units, random)

    def initial_state(self) -> tuple[Array, Array]:
        """Output and cell at the start of an episode."""
        zero = np.zeros(self.recurrent.shape[1], np.float32)
        return zero, zero

    def __call__(self, inputs: Array, state: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        """The output and the new state, given `input(x)` of one step."""
        output, cell = state
        i, f, g, o = jnp.split(inputs + product(self.recurrent, output), 4)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        output = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return output, (output, cell)


class GRU(eqx.Module):
    """A gated recurrent unit (Cho et al., 2014, arXiv:1406.1078), as cuDNN, PyTorch and Equinox compute it.

    Gates are in the order reset, update, new.
    """

    input: Dense
    recurrent: Array
    bias: Array

    def __init__(self, size: int, units: int, random: Generator):
        self.input = dense(size, 3 * units, 1.0, random)
        self.recurrent = _orthogonal_blocks(3, units, random)
        self.bias = np.zeros(units, np.float32)

    def initial_state(self) -> Array:
        """The output at the start of an episode."""
        return np.zeros(len(self.bias), np.float32)

    def __call__(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        """The output and the new state, given `input(x)` of one step."""
        reset, update, new = jnp.split(inputs, 3)
        recurrent = jnp.split(product(self.recurrent, state), 3)
        reset, update = jax.nn.sigmoid(reset + recurrent[0]), jax.nn.sigmoid(update + recurrent[1])
        new = jnp.tanh(new + reset * (recurrent[2] + self.bias))
        output = new + update * (state - new)
        return output, output


def _orthogonal_blocks(count: int, units: int, random: Generator) -> Array:
    """Weights of so many gates, each orthogonal by itself."""
    return np.concatenate([orthogonal((units, units), 1.0, random) for _ in range(count)])


class RecurrentMLP(eqx.Module):
    """Hidden layers, then an LSTM or a GRU."""

    body: MLP
    cell: LSTM | GRU

    def inputs(self, features: Array) -> Array:
        """What the cell takes of one step."""
        return self.cell.input(self.body(features))


class RecurrentActorCritic(eqx.Module):
    """An actor and a critic, each with hidden layers and a cell of its own, over a shared encoder.

    They share no more because a critic learns with other gradients: of values in the hundreds, they would
    leave a shared cell nothing to learn from the actor's.

    A network of your own has these four methods. States, inputs and outputs may be any pytrees of arrays.
    """

    encoder: Encoder
    actor: RecurrentMLP
    critic: RecurrentMLP
    actor_head: Dense
    critic_head: Dense
    log_std: Array | None

    def initial_state(self) -> tuple[Any, Any]:
        """The state of one environment at the start of an episode, of actor and critic."""
        return self.actor.cell.initial_state(), self.critic.cell.initial_state()

    def inputs(self, observation: Any) -> tuple[Array, Array]:
        """What the cells take of one observation."""
        features = self.encoder(observation)
        return self.actor.inputs(features), self.critic.inputs(features)

    def step(self, inputs: tuple[Array, Array], state: tuple[Any, Any]) -> tuple[tuple[Array, Array], Any]:
        """The outputs of the cells and the new state."""
        actor, actor_state = self.actor.cell(inputs[0], state[0])
        critic, critic_state = self.critic.cell(inputs[1], state[1])
        return (actor, critic), (actor_state, critic_state)

    def heads(self, output: tuple[Array, Array]) -> tuple[Array, Array]:
        """Distribution outputs and value, given the outputs of the cells."""
        outputs, value = self.actor_head(output[0]), self.critic_head(output[1])[0]
        return outputs if self.log_std is None else with_log_std(outputs, self.log_std, jnp), value


def recurrent_actor_critic(
    space: gymnasium.Space[Any],
    distribution: ActionDistribution,
    random: Generator,
    *,
    memory: RecurrentMemory = "lstm",
    memory_size: int = 64,
    hidden: Sequence[int] | None = None,
    activation: str = "tanh",
    log_std: float = 0.0,
) -> RecurrentActorCritic:
    """The default recurrent network; initialization is orthogonal, also that of the recurrent weights."""
    encoder, hidden = Encoder(space, random), hidden_sizes(space, hidden, (64, 64))
    sizes = encoder.size, hidden, activation, memory, memory_size
    actor, critic = (_recurrent_mlp(*sizes, random) for _ in range(2))
    heads = actor_critic_heads(memory_size, distribution, log_std, random)
    return RecurrentActorCritic(encoder, actor, critic, *heads)


class RecurrentQNetwork(eqx.Module):
    """Q values of all actions, with a cell before the head.

    A network of your own has these four methods, as `RecurrentActorCritic` has them.
    """

    encoder: Encoder
    body: RecurrentMLP
    head: Dense
    value_head: Dense | None
    """The state value of a dueling network (Wang et al., 2016, arXiv:1511.06581)."""

    def initial_state(self) -> Any:
        """The state of one environment at the start of an episode."""
        return self.body.cell.initial_state()

    def inputs(self, observation: Any) -> Array:
        """What the cell takes of one observation."""
        return self.body.inputs(self.encoder(observation))

    def step(self, inputs: Array, state: Any) -> tuple[Array, Any]:
        """The output of the cell and the new state."""
        return self.body.cell(inputs, state)

    def heads(self, output: Array) -> Array:
        """Q values, given the output of the cell."""
        value = [] if self.value_head is None else [self.value_head(output)]
        return q_outputs(1, self.head(output), *value)


def recurrent_q_network(
    space: gymnasium.Space[Any],
    actions: int,
    random: Generator,
    *,
    memory: RecurrentMemory = "lstm",
    memory_size: int = 64,
    hidden: Sequence[int] | None = None,
    activation: str = "relu",
    dueling: bool = False,
) -> RecurrentQNetwork:
    """The default recurrent Q network."""
    encoder, hidden = Encoder(space, random), hidden_sizes(space, hidden, (64, 64))
    body = _recurrent_mlp(encoder.size, hidden, activation, memory, memory_size, random)
    value = dense(memory_size, 1, 1.0, random) if dueling else None
    return RecurrentQNetwork(encoder, body, dense(memory_size, actions, 1.0, random), value)


def _recurrent_mlp(
    size: int,
    hidden: Sequence[int],
    activation: str,
    memory: RecurrentMemory,
    memory_size: int,
    random: Generator,
) -> RecurrentMLP:
    """Hidden layers and a cell, for features of some size."""
    body, kind = MLP(size, hidden, activation, random), {"lstm": LSTM, "gru": GRU}[memory]
    return RecurrentMLP(body, kind(hidden[-1] if hidden else size, memory_size, random))
