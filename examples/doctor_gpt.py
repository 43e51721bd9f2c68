"""The doctor on the small GPT of train_gpt.py, on real text, as a JAX step and as a PyTorch loop.

    jax-accum doctor examples/doctor_gpt.py:right
    jax-accum doctor examples/doctor_gpt.py:mean_of_means
    jax-accum doctor examples/doctor_gpt.py:torch_right
    jax-accum doctor examples/doctor_gpt.py:torch_mean_of_means

Two blocks of width 64 over bytes, windows of 64: 135 thousand parameters, one of its many sizes.
Shapes: m rows, T positions, V bytes. It needs jax-accum[crosscheck].
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax

import jax_accum as ja
from jax_accum.crosscheck.corpus import default_documents
from jax_accum.crosscheck.data import ordered_examples
from jax_accum.crosscheck.gpt import GPT, GPTSizes, parameter_shapes
from jax_accum.crosscheck.maps import flatten, gpt_map, initial_weights, unflatten

SIZES = GPTSizes()
T, A, RATE = SIZES.max_length, 4, 0.5
MODEL = GPT(SIZES)


def loss_fn(params: Any, batch: dict[str, Any]) -> ja.Weighted:
    """Cross entropy, summed over supervised tokens, and how many they are."""
    logits_BxTxV = MODEL.apply({"params": params}, batch["tokens"])
    return ja.losses.softmax_cross_entropy(logits_BxTxV, batch["labels"])


def case(**more: Any) -> ja.doctor.Case:
    """24 windows of the help topics of Python, of very different lengths."""
    texts = sorted(ordered_examples(default_documents(), seed=0), key=lambda e: len(e.tokens))
    examples = []
    for text in texts[:: len(texts) // 24][:24]:
        tokens, labels = np.zeros(T, np.int32), np.full(T, -100, np.int32)
        tokens[: len(text.tokens)] = text.tokens
        labels[: len(text.tokens) - 1] = text.tokens[1:]
        examples.append({"tokens": tokens, "labels": labels})
    params = unflatten(initial_weights(parameter_shapes(SIZES), seed=0))
    return ja.doctor.Case(
        params=jax.tree.map(np.float32, params),
        examples=examples,
        loss_fn=loss_fn,
        recipe=ja.doctor.Recipe("sgd", learning_rate=RATE),
        microbatches=A,
        labels="labels",
        **more,
    )


def right() -> tuple[Any, ja.doctor.Case]:
    """make_train_step: one call per group."""
    tx = ja.guard(optax.sgd(RATE))
    step = ja.make_train_step(loss_fn, tx, None, donate=False)

    def update(params: Any, state: Any, microbatches: list[Any]) -> tuple[Any, Any]:
        batch = jax.tree.map(lambda *x: np.stack(x), *microbatches)
        params, state, _ = step(params, state, batch)
        return params, state

    return update, case(init=tx.init)


def mean_of_means() -> tuple[Any, ja.doctor.Case]:
    """optax.MultiSteps, which takes the mean of what it is given, with mean losses."""
    opt = optax.MultiSteps(optax.sgd(RATE), A)

    @jax.jit
    def call(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        grads = jax.grad(lambda p: loss_fn(p, batch).mean)(params)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def update(params: Any, state: Any, microbatches: list[Any]) -> tuple[Any, Any]:
        for batch in microbatches:
            params, state = call(params, state, batch)
        return params, state

    return update, case(init=opt.init)


def torch_right() -> tuple[Any, ja.doctor.Case]:
    """A loop in PyTorch that counts the group's tokens before its first backward pass."""
    return _torch(lambda told, tokens, size: told.sum() / tokens)


def torch_mean_of_means() -> tuple[Any, ja.doctor.Case]:
    """The loop that many write: the mean loss of each microbatch, over their number."""
    return _torch(lambda told, tokens, size: told.mean() / size)


def _torch(share: Any) -> tuple[Any, ja.doctor.Case]:
    import torch
    from torch.nn.functional import cross_entropy

    from torch_ref import models

    torch.set_num_threads(1)  # so small a model is not worth sharing out
    mapping = gpt_map(SIZES)

    def init(params: Any) -> SimpleNamespace:
        model = models.GPT(models.GPTConfig(**vars(SIZES)))
        weights = mapping.to_torch(flatten(params))
        model.load_state_dict({name: torch.from_numpy(x.copy()) for name, x in weights.items()})
        return SimpleNamespace(model=model, sgd=torch.optim.SGD(model.parameters(), lr=RATE))

    def update(params: Any, loop: Any, microbatches: list[Any]) -> tuple[Any, Any]:
        batches = [{n: torch.from_numpy(x).long() for n, x in b.items()} for b in microbatches]
        tokens = sum(int((b["labels"] != -100).sum()) for b in batches)
        loop.sgd.zero_grad()
        for batch in batches:
            logits_BxTxV = loop.model(batch["tokens"])
            losses = cross_entropy(
                logits_BxTxV.flatten(0, 1), batch["labels"].flatten(), reduction="none"
            )
            told = losses[batch["labels"].flatten() != -100]
            if len(told):
                share(told, tokens, len(batches)).backward()
        loop.sgd.step()  # without any gradient it changes nothing
        weights = {n: w.detach().numpy().copy() for n, w in loop.model.named_parameters()}
        return unflatten(mapping.to_jax(weights)), loop

    return update, case(init=init)
