"""Forward passes of small networks in NumPy: calling a jitted function would cost more than it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rollstream.rl.params import Weights

if TYPE_CHECKING:
    from rollstream.rl.networks import MLP, Dense

Array = Any
Forward = Callable[[Array], list[Array]]
"""The outputs of each head for rows `[N, features]`."""
_ZERO = np.zeros((), np.float32)
"""NumPy takes 250 ns to make an array of a number."""
_IN_PLACE: dict[str, Callable[[Array], Any]] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, _ZERO, out=x),
    "silu": lambda x: np.multiply(x, 0.5 + 0.5 * np.tanh(0.5 * x), out=x),  # cannot overflow
}


class NumpyForward:
    """Dense layers with an activation, then one or several heads.

    Args:
        body: The layers, with the names of their arrays among the weights instead of the arrays.
        heads: The layers after them, likewise.
    """

    def __init__(self, body: MLP, heads: Sequence[Dense]):
        self._names = [(layer.weight, layer.bias) for layer in (*body.layers, *heads)]
        self._num_heads = len(heads)
        self._activate = _IN_PLACE[body.activation]

    def bind(self, weights: Weights, rows: int) -> Forward:
        """The forward pass with these weights, for that many rows at once.

        For several rows the transpose of a matrix is contiguous, which is faster; one row gains nothing, and
        its weights may be used only once, so they are not copied. A bias has the shape of a row: NumPy adds
        arrays of the same shape in a fifth of the time that it takes to broadcast one of few numbers.
        """
        convert = np.asfortranarray if rows > 1 else np.asarray
        layers = [(convert(weights[name]).T, np.asarray(weights[bias])[None]) for name, bias in self._names]
        body, heads, activate = layers[: -self._num_heads], layers[-self._num_heads :], self._activate

        def forward(x: Array) -> list[Array]:
            for weight, bias in body:
                x = x.dot(weight)  # takes half as long as `@` for small arrays
                x += bias
                activate(x)
            outputs: list[Array] = []
            for weight, bias in heads:
                output = x.dot(weight)
                output += bias
                outputs.append(output)
            return outputs

        return forward
