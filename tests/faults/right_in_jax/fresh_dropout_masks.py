"""A key for each microbatch."""

import jax
import optax

from tests.faults import problem as p

FAULT = None
DTYPES = [p.np.float32]  # bfloat16 parameters round more than masks differ
tx = optax.sgd(p.RATE)


def case(seed, dtype=p.np.float32):
    return p.make_case(
        seed,
        init=lambda params: (tx.init(params), jax.random.key(seed)),
        dropout=True,
        dtype=dtype,
    )


def update(params, state, microbatches):
    inner, key = state
    key, group_key = jax.random.split(key)
    grads, tokens = None, 0
    for i, batch in enumerate(microbatches):
        own = jax.random.fold_in(group_key, i)
        grads = p.add(grads, p.dropout_grad(params, batch, own))
        tokens += int(p.count_tokens(batch))
    params, inner = p.jitted(tx)(params, inner, p.times(grads, 1 / tokens))
    return params, (inner, key)
