"""The loss scale grows in mid-group; what was added before is unscaled with the new one."""

import optax

from tests.faults import problem as p

FAULT = "loss scale changed inside the group"
tx = optax.sgd(p.RATE)
INTERVAL = 6  # microbatches


def case(seed):
    return p.make_case(seed, init=lambda params: (tx.init(params), 8.0, 0))


def update(params, state, microbatches):
    inner, scale, good = state
    grads, tokens = None, 0
    for batch in microbatches:
        grads = p.add(grads, p.times(p.grad_of_sum(params, batch), scale))
        tokens += int(p.count_tokens(batch))
        good += 1
        if good % INTERVAL == 0:
            scale *= 2
    params, inner = p.jitted(tx)(params, inner, p.times(grads, 1 / (scale * tokens)))
    return params, (inner, scale, good)
