"""A per-sequence penalty is added to the summed loss, and all of it divided by the tokens."""

import jax
import optax

from tests.faults import problem as p

FAULT = "second term divided by the first one's weight"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init, loss_fn=p.two_terms)


@jax.jit
@jax.grad
def combined_grad(params, batch):
    terms = p.two_terms(params, batch)
    return terms["tokens"].total + terms["sequences"].total


def update(params, state, microbatches):
    grads, tokens = None, 0
    for batch in microbatches:
        grads = p.add(grads, combined_grad(params, batch))
        tokens += int(p.count_tokens(batch))
    return p.jitted(tx)(params, state, p.times(grads, 1 / tokens))
