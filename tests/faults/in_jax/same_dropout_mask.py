"""One key per update, used for every microbatch of it."""

import jax
import optax

from tests.faults import problem as p

FAULT = "same dropout mask reused"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(
        seed, init=lambda params: (tx.init(params), jax.random.key(seed)), dropout=True
    )


def update(params, state, microbatches):
    inner, key = state
    key, mask_key = jax.random.split(key)
    grads, tokens = None, 0
    for batch in microbatches:
        grads = p.add(grads, p.dropout_grad(params, batch, mask_key))
        tokens += int(p.count_tokens(batch))
    params, inner = p.jitted(tx)(params, inner, p.times(grads, 1 / tokens))
    return params, (inner, key)
