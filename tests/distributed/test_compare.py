"""`compare` on one device and on eight."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxprs import normal

import jamp.debug


def test_one_device_and_eight_agree_until_one_forgets_a_factor():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = normal(2, 16, 16), normal(16, 16, seed=1)
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))

    def loss(w, x, batch=16):
        for i in range(2):
            x = jnp.tanh(x @ w[i])
        return jnp.sum(x**2) / batch

    on_eight = lambda w, x: loss(w, sharded)
    found = jamp.debug.compare(loss, on_eight)(w, x)
    assert not found
    assert len(found.rows) >= 6
    wrong = jamp.debug.compare(loss, lambda w, x: loss(w, sharded, batch=2))(w, x)  # the batch of one device
    assert wrong
    assert wrong.first.operation == "div"
