"""Layers compute what they say, whichever way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.rl.networks import Convolution


@pytest.mark.parametrize(
    ("height", "width", "size", "stride"), [(84, 84, 8, 4), (20, 23, 4, 2), (9, 7, 3, 1)]
)
def test_a_convolution_as_a_product_is_the_same(height: int, width: int, size: int, stride: int) -> None:
    random = np.random.default_rng(0)
    image = random.standard_normal((3, height, width)).astype(np.float32)
    weight = random.standard_normal((5, 3, size, size)).astype(np.float32)

    def both(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer = Convolution(weight, np.zeros((5, 1, 1), np.float32), stride)
        return layer._as_product(image), layer._as_convolution(image)

    product, convolution = both(jnp.asarray(weight))
    np.testing.assert_allclose(product, convolution, rtol=1e-4, atol=1e-4)
    one, other = (jax.grad(lambda own, i=i: (both(own)[i] ** 2).sum())(jnp.asarray(weight)) for i in range(2))
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-1)
