"""Every replica reads the first shard: the process index was forgotten in the loader."""

import jax

from tests.faults import problem as p

FAULT = "same examples on every replica"


def case(seed):
    return p.make_case(seed, replicas=2, microbatches=3)


@jax.jit
def replicas(params, batches):
    def replica(batches):
        sums = jax.vmap(p.grad_of_sum, (None, 0))(params, batches)
        tokens = jax.lax.psum(jax.vmap(p.count_tokens)(batches).sum(), "data")
        return jax.tree.map(lambda g: jax.lax.psum(g.sum(0), "data") / tokens, sums)

    shard = jax.tree.map(lambda x: jax.numpy.stack([x[0], x[0]]), batches)
    grads = jax.vmap(replica, axis_name="data")(shard)
    return jax.tree.map(lambda w, g: w - p.RATE * g[0], params, grads)


def update(params, state, microbatches):
    return replicas(params, p.by_replica(microbatches, 2)), state
