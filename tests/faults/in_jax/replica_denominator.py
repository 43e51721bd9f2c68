"""Each replica divides by its own tokens, then pmean."""

import jax

from tests.faults import problem as p

FAULT = "replica's own denominator"


def case(seed):
    return p.make_case(seed, replicas=2, microbatches=3)


@jax.jit
def replicas(params, batches):
    def replica(batches):
        sums = jax.vmap(p.grad_of_sum, (None, 0))(params, batches)
        tokens = jax.vmap(p.count_tokens)(batches).sum()
        own = jax.tree.map(lambda g: g.sum(0) / tokens, sums)
        return jax.lax.pmean(own, "data")

    grads = jax.vmap(replica, axis_name="data")(batches)
    return jax.tree.map(lambda w, g: w - p.RATE * g[0], params, grads)


def update(params, state, microbatches):
    return replicas(params, p.by_replica(microbatches, 2)), state
