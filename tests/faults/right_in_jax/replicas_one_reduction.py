"""Two replicas: sums and tokens are added over both, and divided once."""

import jax

from tests.faults import problem as p

FAULT = None


def case(seed, dtype=p.np.float32):
    return p.make_case(seed, replicas=2, microbatches=3, dtype=dtype)


@jax.jit
def replicas(params, batches):
    def replica(batches):
        sums = jax.vmap(p.grad_of_sum, (None, 0))(params, batches)
        tokens = jax.lax.psum(jax.vmap(p.count_tokens)(batches).sum(), "data")
        total = jax.tree.map(lambda g: jax.lax.psum(g.astype("float32").sum(0), "data"), sums)
        return p.times(total, 1 / jax.numpy.maximum(tokens, 1))

    grads = jax.vmap(replica, axis_name="data")(batches)
    return jax.tree.map(lambda w, g: (w - p.RATE * g[0]).astype(w.dtype), params, grads)


def update(params, state, microbatches):
    return replicas(params, p.by_replica(microbatches, 2)), state
