"""What does an update cost, in time and memory, over the same examples cut into A microbatches?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_accum as ja
from benchmarks._machine import Limits
from benchmarks._model import Transformer
from benchmarks._program import compiled_together, inspect
from benchmarks._result import Claim, Plot, Result, Table
from benchmarks._timing import decided, interleaved, milliseconds, ratio
from benchmarks.across_calls import SAME_PROGRAMS, Runner

Tree = Any
OURS = "jax_accum"
REFERENCES = "jax_accum, references"
CHUNKED = "jax_accum, loss in 8 chunks"
THROUGH = "gradient of a scan over losses"
THROUGH_CHECKPOINTED = "the same, each microbatch checkpointed"
BY_HAND = "hand-written scan"
OPTAX = "optax.MultiSteps"
UNDIVIDED = "undivided batch"
LIMITS = {BY_HAND: 1.02, OPTAX: 0.6}
"""What ours may take over these, by the claims."""


def _mean(model: Transformer) -> Callable[[Tree, Tree], jax.Array]:
    def loss(params: Tree, batch: Tree) -> jax.Array:
        value = model.loss(params, batch)
        return value.total / value.weight

    return loss


def _update(tx: Any, grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _cut(batch: Tree, a: int) -> Tree:
    return jax.tree.map(lambda x: x.reshape(a, x.shape[0] // a, *x.shape[1:]), batch)


def ways(model: Transformer, tx: Any, a: int) -> dict[str, tuple[Callable[..., Any], Any]]:
    """Each way as `(params, state, batch) -> (params, state)`, with the optimizer to init."""

    def undivided(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
        return _update(tx, jax.grad(_mean(model))(params, batch), state, params)

    def by_hand(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
        # What an expert would write: sums, and one division by the tokens of the group.
        tokens = jnp.sum(batch["mask"][:, 1:]).astype(jnp.float32)

        def body(acc: Tree, part: Tree) -> tuple[Tree, None]:
            grads = jax.grad(lambda p: model.loss(p, part).total / tokens)(params)
            return jax.tree.map(jnp.add, acc, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, _ = jax.lax.scan(body, zeros, _cut(batch, a))
        return _update(tx, grads, state, params)

    def microbatching(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
        tokens = jnp.sum(batch["mask"][:, 1:]).astype(jnp.float32)
        grad = jax.grad(lambda p, part: model.loss(p, part).total / tokens)
        summed = optax.microbatching.microbatch(
            grad,
            argnums=1,
            microbatch_size=batch["tokens"].shape[0] // a,
            accumulator=optax.microbatching.AccumulationType.SUM,
        )
        return _update(tx, summed(params, batch), state, params)

    multi = optax.MultiSteps(tx, a)

    def multi_steps(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
        def body(carry: Any, part: Tree) -> tuple[Any, None]:
            params, state = carry
            return _update(multi, jax.grad(_mean(model))(params, part), state, params), None

        carry, _ = jax.lax.scan(body, (params, state), _cut(batch, a))
        return carry

    value_and_grad = ja.accumulated_value_and_grad(model.loss, a)

    def ours(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
        _, grads = value_and_grad(params, batch)
        return _update(tx, grads, state, params)

    in_place = ja.accumulated_value_and_grad(model.loss, a, references=True)

    def references(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
        _, grads = in_place(params, batch)
        return _update(tx, grads, state, params)

    in_chunks = ja.accumulated_value_and_grad(model.chunked_loss, a)

    def chunked(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
        _, grads = in_chunks(params, batch)
        return _update(tx, grads, state, params)

    def through(keep: bool) -> Callable[..., Any]:
        def call(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
            tokens = jnp.sum(batch["mask"][:, 1:]).astype(jnp.float32)

            def loss(params: Tree) -> jax.Array:
                def body(total: jax.Array, part: Tree) -> tuple[jax.Array, None]:
                    return total + model.loss(params, part).total, None

                run = body if keep else jax.checkpoint(body)
                return jax.lax.scan(run, jnp.zeros(()), _cut(batch, a))[0] / tokens

            return _update(tx, jax.grad(loss)(params), state, params)

        return call

    known = {
        UNDIVIDED: (undivided, tx),
        BY_HAND: (by_hand, tx),
        OURS: (ours, tx),
        REFERENCES: (references, tx),
        CHUNKED: (chunked, tx),
        THROUGH: (through(True), tx),
        THROUGH_CHECKPOINTED: (through(False), tx),
    }
    if hasattr(optax, "microbatching"):
        known["optax.microbatching"] = (microbatching, tx)
    known[OPTAX] = (multi_steps, multi)
    return known


def measure(
    result: Result,
    name: str,
    model: Transformer,
    rows: int,
    cuts: list[int],
    rounds: int,
    limits: Limits,
    *,
    base: str | None = None,
    every_way: bool = False,
) -> None:
    """Time and peak at every A, of the ways to accumulate, or of `every_way`.

    With `base`, ours is then timed against that way until it is told from its limit.
    """
    tx = optax.adamw(1e-3)
    params, batch = model.init(), model.batch(rows)
    peaks: dict[str, list[tuple[float, float]]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    table: list[list[Any]] = []
    # AdamW reads the gradient, and reads and writes the parameters and two moments.
    tree = sum(x.nbytes for x in jax.tree.leaves(params))
    bound = 1e3 * limits.least(7 * tree, model.flops(rows))
    compiled: dict[str, Any] = {}  # undivided it is the same program for every A
    for a in cuts:
        compared = {
            way: (call, opt)
            for way, (call, opt) in ways(model, tx, a).items()
            if every_way or way not in (CHUNKED, THROUGH, THROUGH_CHECKPOINTED)
        }
        compiled |= compiled_together(
            {
                way: (call, (params, jax.eval_shape(opt.init, params), batch))
                for way, (call, opt) in compared.items()
                if way != UNDIVIDED or UNDIVIDED not in compiled
            }
        )
        programs = {way: inspect(compiled[way], params) for way in compared}
        runners = {
            way: Runner(compiled[way], params, opt.init(params), batch)
            for way, (_, opt) in compared.items()
        }
        seconds = interleaved(runners, rounds=rounds)
        for way in runners:
            key = f"{name}/A={a}/{way}"
            over = result.add(ratio(f"{key}/time", seconds, way, UNDIVIDED))
            peak = result.exact(f"{key}/peak", programs[way].peak, "P")
            spent = result.add(milliseconds(f"{key}/ms", seconds[way]))
            table.append([f"A = {a}", way, over, peak, spent, spent.value / bound])
            peaks.setdefault(way, []).append((a, peak.value))
            times.setdefault(way, []).append((a, over.value))
        key = f"{name}/A={a}"
        if base:
            pair = {way: runners[way] for way in (OURS, base)}
            both = decided(pair, LIMITS[base], most=80)
            result.add(ratio(f"{key}/ours over {base}", both, OURS, base))
        more = programs[OURS].operations - programs[BY_HAND].operations
        result.exact(f"{key}/operations beyond a {BY_HAND}", more)
        gap = programs[OURS].peak - programs[BY_HAND].peak
        result.exact(f"{key}/peak above {BY_HAND}", gap, "P")
        saved = programs[OURS].peak - programs[REFERENCES].peak
        result.exact(f"{key}/peak saved by references", saved, "P", "higher")
        result.exact(
            f"{key}/peak below {OPTAX}", programs[OPTAX].peak - programs[OURS].peak, "P", "higher"
        )
    result.tables.append(
        Table(
            f"{name}: {rows} rows cut into A microbatches, AdamW",
            ["A", "way", f"time over {UNDIVIDED}", "peak, P", "ms", "times the limit"],
            [*table, ["", "physical limit", "", "", f"{bound:.3g}", ""]],
            f"{tree / 4e6:.2g} M parameters, {model.length} tokens a row. P is the memory of one "
            "parameter tree; peak is arguments, results and temporary. The limit: flops of the "
            "matrix products over the matrix rate, and bytes of one AdamW update over the "
            "bandwidth, both measured in this run.",
        )
    )
    result.plots += [
        Plot(f"{name}: memory", "microbatches A", "peak, parameter trees", peaks),
        Plot(f"{name}: time", "microbatches A", f"time over {UNDIVIDED}", times),
    ]


def run(*, limits: Limits, quick: bool = False, full: bool = False) -> Result:
    """The benchmark; `full` adds scanned and checkpointed layers."""
    result = Result("in_one_call", __doc__ or "")
    tiny = {"vocabulary": 64, "length": 16, "layers": 2, "width": 32}
    sizes = tiny if quick else {"length": 32}
    rows, cuts, rounds = (8, [4], 3) if quick else (64, [1, 4, 16, 64], 3)
    result.configuration = {"model": Transformer(**sizes).__dict__, "rows": rows, "rounds": rounds}
    plain = Transformer(**sizes)
    measure(result, "unrolled layers", plain, rows, cuts, rounds, limits, base=BY_HAND)
    if not quick:
        scanned = Transformer(**sizes, scanned=True, checkpointed=True)
        measure(result, "scanned layers, checkpointed", scanned, rows, [4, 16], rounds, limits)
        result.claims.append(
            Claim(
                "A = 16, scanned layers: memory saved by references, P",
                "scanned layers, checkpointed/A=16/peak saved by references",
                0.3,
                at_most=False,
            )
        )
    if full:
        scanned = Transformer(**sizes, scanned=True)
        measure(result, "scanned layers", scanned, rows, cuts, rounds, limits)
    for a in cuts:
        key = f"unrolled layers/A={a}"
        result.claims += [
            Claim(
                f"A = {a}: time over a {BY_HAND}",
                f"{key}/ours over {BY_HAND}",
                LIMITS[BY_HAND],
                why=SAME_PROGRAMS,
            ),
            Claim(
                f"A = {a}: operations of a parameter's size beyond a {BY_HAND}",
                f"{key}/operations beyond a {BY_HAND}",
                0,
            ),
            Claim(
                f"A = {a}: no more memory than a {BY_HAND}", f"{key}/peak above {BY_HAND}", 0.005
            ),
        ]
    # What Optax's wrapper costs is an optimizer update per microbatch: it counts where a
    # microbatch has few tokens for the parameters, 24 at A = 16, and drowns where it has many, as
    # above. An accelerator has more arithmetic for its bandwidth: there a microbatch of 24 tokens
    # here is as one of many hundred.
    key = "unrolled layers" if quick else "few tokens for the parameters"
    if not quick:
        large = Transformer(layers=4, width=384, length=24)
        result.configuration[key] = large.__dict__
        measure(result, key, large, 16, [4, 16], rounds, limits, base=OPTAX, every_way=True)
    key += "/A=16"
    result.claims += [
        Claim(
            f"A = 16: time over {OPTAX}",
            f"{key}/ours over {OPTAX}",
            LIMITS[OPTAX],
            why="what it saves is a pass of the optimizer per microbatch: the fewer tokens in a "
            "microbatch, the more that is of the whole",
        ),
        Claim(f"A = 16: memory less than {OPTAX}, P", f"{key}/peak below {OPTAX}", 0.5, False),
    ]
    return result
