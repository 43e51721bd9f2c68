"""The gradient has the global denominator on every replica, is reduced, and then summed again."""

import jax

from tests.faults import problem as p

FAULT = "multiplied by the replicas"


def case(seed):
    return p.make_case(seed, replicas=2, microbatches=3)


@jax.jit
def replicas(params, batches):
    def replica(batches):
        sums = jax.vmap(p.grad_of_sum, (None, 0))(params, batches)
        tokens = jax.lax.psum(jax.vmap(p.count_tokens)(batches).sum(), "data")
        mean = jax.tree.map(lambda g: jax.lax.psum(g.sum(0), "data") / tokens, sums)
        return jax.lax.psum(mean, "data")

    grads = jax.vmap(replica, axis_name="data")(batches)
    return jax.tree.map(lambda w, g: w - p.RATE * g[0], params, grads)


def update(params, state, microbatches):
    return replicas(params, p.by_replica(microbatches, 2)), state
