"""jax_accum.make_train_step, one call per update, with two terms."""

import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = None
tx = ja.guard(optax.sgd(p.RATE, momentum=0.9))
step = ja.make_train_step(p.two_terms, tx, None, donate=False, tokens_term="tokens")


def case(seed, dtype=p.np.float32):
    recipe = ja.doctor.Recipe("sgd", learning_rate=p.RATE, momentum=0.9)
    return p.make_case(
        seed,
        init=tx.init,
        loss_fn=p.two_terms,
        recipe=recipe,
        dtype=dtype,
        examine=["ragged", "ignored", "nonfinite"],
    )


def update(params, state, microbatches):
    params, state, _ = step(params, state, p.stacked(microbatches))
    return params, state
