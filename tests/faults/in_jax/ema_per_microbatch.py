"""The average of the parameters is updated once per microbatch."""

import jax
import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = "EMA per microbatch"
tx = optax.sgd(p.RATE)
DECAY = 0.9


def case(seed):
    recipe = ja.doctor.Recipe("sgd", learning_rate=p.RATE, ema_decay=DECAY)
    return p.make_case(
        seed,
        init=lambda params: (tx.init(params), params),
        recipe=recipe,
        observe=lambda state: {"ema": state[1]},
    )


def update(params, state, microbatches):
    inner, ema = state
    params, inner = p.jitted(tx)(params, inner, p.right_gradient(params, microbatches))
    for _ in microbatches:
        ema = jax.tree.map(lambda e, w: DECAY * e + (1 - DECAY) * w, ema, params)
    return params, (inner, ema)
