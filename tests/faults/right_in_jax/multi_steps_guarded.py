"""jax_accum.MultiSteps around a guard, AdamW, clipping and a schedule."""

import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = None


def rate(count):
    return 0.05 / (1 + count)


tx = optax.chain(optax.clip_by_global_norm(0.2), optax.adamw(rate, weight_decay=0.1))
opt = ja.MultiSteps(ja.guard(tx), p.A)


def case(seed, dtype=p.np.float32):
    recipe = ja.doctor.Recipe("adamw", learning_rate=rate, weight_decay=0.1, clip_norm=0.2)
    return p.make_case(
        seed,
        init=opt.init,
        recipe=recipe,
        dtype=dtype,
        examine=["ragged", "ignored", "empty", "nonfinite"],
    )


@p.jax.jit
def apply(params, state, grads, tokens, last):
    return opt.apply(grads, state, params, weight=tokens, flush=last)


def update(params, state, microbatches):
    for i, batch in enumerate(microbatches, 1):
        grads, tokens = p.grad_of_mean(params, batch), p.count_tokens(batch)
        params, state = apply(params, state, grads, tokens, i == len(microbatches))
    return params, state
