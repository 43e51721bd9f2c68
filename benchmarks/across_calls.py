"""What does a microbatch cost that ends no group, and one that does?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_accum as ja
from benchmarks._machine import Limits
from benchmarks._program import compiled_together, inspect
from benchmarks._result import Claim, Result, Table
from benchmarks._timing import decided, interleaved, milliseconds, ratio

Tree = Any
Way = Callable[[Tree, Any, Tree], tuple[Tree, Any]]
FLOOR = "in-place add"
NEVER = 2**30
OURS = "jax_accum, apply"
OURS_UPDATE = "jax_accum, update"
OPTAX = "optax.MultiSteps"
SINGLE = "jax_accum, k = 1, apply"
SAME_PROGRAMS = "their programs are the same but for scalars: see the claim on their operations"
SLOW = 0.4
"""Seconds of a call from which on it gets few rounds."""
TWO_JITS = "two jits, the host counts"
LIMITS = {OURS: 1.1, SINGLE: 1.03}
"""What these may cost over the base of their table, by the claims."""


def parameters(millions: float, dtype: Any) -> Tree:
    """A tree of matrices and vectors, many leaves, as a transformer has them."""
    width = 512
    layers = max(1, round(millions * 1e6 / (4 * width * width + 2 * width)))
    one = {
        "attention": jnp.ones((2 * width, width), dtype),
        "mlp": jnp.ones((width, 2 * width), dtype),
        "norm": jnp.ones((width,), dtype),
        "bias": jnp.ones((width,), dtype),
    }
    return {f"layer{i}": jax.tree.map(jnp.copy, one) for i in range(layers)}


def ways(inner: optax.GradientTransformation, k: int) -> dict[str, tuple[Way, Callable[..., Any]]]:
    """Each way as `(params, state, grads) -> (params, state)`, with its `init`.

    `k` is `NEVER` for calls that end no group, or 1 for calls that do. A schedule hands it
    over, so that nobody can leave out the accumulator where it is 1.
    """
    schedule = lambda _: k  # noqa: E731
    ours = ja.MultiSteps(inner, schedule)
    theirs = optax.MultiSteps(inner, schedule)

    def with_updates(opt: Any) -> Way:
        def call(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
            updates, state = opt.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return call

    def naive(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        count, inner_state, acc = state
        acc = jax.tree.map(jnp.add, acc, grads)

        def end(params: Tree, inner_state: Any, acc: Tree) -> Any:
            mean = jax.tree.map(lambda x: x / (count + 1), acc)
            updates, inner_state = inner.update(mean, inner_state, params)
            zeros = jax.tree.map(jnp.zeros_like, acc)
            return optax.apply_updates(params, updates), inner_state, zeros, 0

        def hold(params: Tree, inner_state: Any, acc: Tree) -> Any:
            return params, inner_state, acc, count + 1

        params, inner_state, acc, count = jax.lax.cond(
            count + 1 >= k, end, hold, params, inner_state, acc
        )
        return params, (count, inner_state, acc)

    return {
        OURS: (lambda params, state, grads: ours.apply(grads, state, params), ours.init),
        OURS_UPDATE: (with_updates(ours), ours.init),
        OPTAX: (with_updates(theirs), theirs.init),
        "cond, zeroed in its branch": (
            naive,
            lambda p: (jnp.zeros((), jnp.int32), inner.init(p), jax.tree.map(jnp.zeros_like, p)),
        ),
        "optax.apply_every": (
            with_updates(optax.chain(inner, optax.apply_every(k))),
            optax.chain(inner, optax.apply_every(k)).init,
        ),
    }


def add_in_place(params: Tree, acc: Tree, grads: Tree) -> tuple[Tree, Tree]:
    """The least that can be done: read gradient and accumulator, write accumulator."""
    return params, jax.tree.map(jnp.add, acc, grads)


class Runner:
    """Calls a compiled way again and again on a state of its own."""

    def __init__(self, program: Any, params: Tree, state: Any, grads: Tree):
        self.program, self.grads = program, grads
        self.params, self.state = jax.tree.map(jnp.copy, (params, state))

    def __call__(self) -> None:
        """One call, waited for."""
        self.params, self.state = self.program(self.params, self.state, self.grads)
        jax.block_until_ready((self.params, self.state))


def two_jits(
    inner: optax.GradientTransformation, params: Tree, grads: Tree, ends: bool
) -> Callable[..., Any]:
    """One program that adds, another that updates and zeroes, and a host that knows which."""

    def end(params: Tree, inner_state: Any, acc: Tree) -> Any:
        updates, inner_state = inner.update(acc, inner_state, params)
        return optax.apply_updates(params, updates), inner_state, zeros_of(acc)

    state = inner.init(params)
    add = jax.jit(add_in_place, donate_argnums=(0, 1)).lower(params, params, grads).compile()
    close = jax.jit(end, donate_argnums=(0, 1, 2)).lower(params, state, params).compile()

    def call(params: Tree, state: Any, grads: Tree) -> Any:
        inner_state, acc = state
        params, acc = add(params, acc, grads)
        if ends:
            params, inner_state, acc = close(params, inner_state, acc)
        return params, (inner_state, acc)

    return call


def zeros_of(params: Tree) -> Tree:
    """An accumulator of a tree's own types."""
    return jax.tree.map(jnp.zeros_like, params)


def lone_ways(inner: optax.GradientTransformation) -> dict[str, tuple[Way, Callable[..., Any]]]:
    """Groups of one microbatch, known to be such: the inner optimizer alone, and ours around it."""
    single = ja.MultiSteps(inner, 1)

    def alone(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def ours(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        return single.apply(grads, state, params)

    return {
        "inner optimizer": (alone, inner.init),
        SINGLE: (ours, single.init),
    }


def least(limits: Limits, params: Tree, state: Any, ends: bool, orthogonalised: bool) -> float:
    """Seconds of a call that no way can do without.

    A microbatch that ends no group: read the gradient, read and write a float32 accumulator.
    One that does: read the gradient, read and write parameters and the optimizer's state; and for
    Muon the products of five Newton-Schulz iterations on each matrix.
    """
    grads = sum(x.nbytes for x in jax.tree.leaves(params))
    if not ends:
        return limits.least(grads + 2 * sum(4 * x.size for x in jax.tree.leaves(params)))
    kept = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    flops = 0.0
    if orthogonalised:
        for n, m in (sorted(x.shape) for x in jax.tree.leaves(params) if x.ndim == 2):
            flops += 5 * (2 * 2 * n * n * m + 2 * n**3)
    return limits.least(grads + 2 * kept, flops)


def timed(
    runners: dict[str, Runner], always: tuple[str, ...], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds per call by way: for each way the rounds in which it took its turn.

    A way that takes long gets fewer rounds, so that a round of the others is short: their noise
    is that of the machine in between. `always` are in all rounds, to be compared with.
    """
    start = {
        way: interleaved({way: run}, rounds=1, warm_up=0)[way][0] for way, run in runners.items()
    }
    slow = [way for way in runners if start[way] > SLOW]
    quick = {way: run for way, run in runners.items() if way not in slow}
    seconds = interleaved(quick, rounds=rounds, calls=2)
    found = dict.fromkeys(quick, seconds)
    if slow:
        both = {way: run for way, run in runners.items() if way in slow or way in always}
        more = interleaved(both, rounds=1, warm_up=0)
        found |= {name: {way: [start[way], *more[way]] for way in both} for name in slow}
    return found


def measure(
    result: Result,
    inner: optax.GradientTransformation,
    name: str,
    params: Tree,
    rounds: int,
    limits: Limits,
    *,
    few: bool = False,
) -> None:
    """Times all ways for one inner optimizer and tree, and reads their programs.

    Each way has a state of its own: `few` leaves out all but Optax's and ours, for large trees.
    """
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-3), params)
    size = f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.2g} M"
    alone, init_alone = lone_ways(inner)["inner optimizer"]
    lone = compiled_together({"": (alone, (params, init_alone(params), grads))})
    own = inspect(lone[""], params)
    for ends, k in (("ends no group", NEVER), ("ends a group", 1)):
        base = "inner optimizer" if k == 1 else FLOOR
        known = lone_ways(inner) if k == 1 else {base: (add_in_place, zeros_of)}
        compared = {
            way: (call, init)
            for way, (call, init) in (known | ways(inner, k)).items()
            if not few or way in (*known, OURS, OURS_UPDATE, OPTAX)
        }
        compiled = compiled_together(
            {
                way: (call, (params, jax.eval_shape(init, params), grads))
                for way, (call, init) in compared.items()
            }
        )
        programs = {way: inspect(program, params) for way, program in compiled.items()}
        runners = {
            way: Runner(compiled[way], params, init(params), grads)
            for way, (_, init) in compared.items()
        }
        if not few:
            pair = two_jits(inner, params, grads, ends=k == 1)
            runners[TWO_JITS] = Runner(pair, params, (inner.init(params), zeros_of(params)), grads)
        seconds = timed(runners, (base, OURS, OURS_UPDATE), rounds)
        claimed = SINGLE if k == 1 else OURS
        slow = max(seconds[base][base]) > SLOW
        seconds[claimed] = decided(
            {way: runners[way] for way in (claimed, base)},
            LIMITS[claimed],
            most=16 if slow else 60,
            calls=1 if slow else 2,
            seconds=seconds[claimed],
        )
        bound = 1e3 * least(limits, params, inner.init(params), k == 1, name.startswith("Muon"))
        rows: list[list[Any]] = []
        for way in runners:
            key = f"{name}/{ends}/{way}"
            time = result.add(ratio(f"{key}/time", seconds[way], way, base))
            spent = result.add(milliseconds(f"{key}/ms", seconds[way][way]))
            row = [way, time, "", "", "", spent, spent.value / bound]
            if way in programs:
                extra = max(0.0, programs[way].temporary - own.temporary)
                copies = max(0, programs[way].large_copies - own.large_copies)
                if k == 1:
                    more = programs[way].operations - own.operations
                    result.exact(f"{key}/operations beside the optimizer", more)
                row[2:5] = [
                    result.exact(f"{key}/temporary", programs[way].temporary, "P"),
                    result.exact(f"{key}/temporary beside the optimizer", extra, "P"),
                    result.exact(f"{key}/copies beside the optimizer", copies, "copies"),
                ]
            rows.append(row)
        if k != 1:
            result.add(ratio(f"{name}/{OPTAX} over ours", seconds[OPTAX], OPTAX, OURS))
            result.add(ratio(f"{name}/update over {OPTAX}", seconds[OPTAX], OURS_UPDATE, OPTAX))
        result.tables.append(
            Table(
                f"{name}, {size} parameters: a microbatch that {ends}",
                [
                    "way",
                    f"time over {base}",
                    "temporary memory, P",
                    "beside the inner optimizer's own, P",
                    "copies of a leaf beside its own",
                    "ms",
                    "times the limit",
                ],
                [*rows, ["physical limit", "", "", "", "", f"{bound:.3g}", ""]],
                "P is the memory of one parameter tree. Parameters and state are donated. A "
                "program that may end a group holds the inner optimizer, whose own needs are not "
                "the wrapper's. The limit: bytes that must move over the bandwidth measured in "
                "this run" + (", and flops of Muon over its matrix rate." if k == 1 else "."),
            )
        )


def run(*, limits: Limits, quick: bool = False, full: bool = False) -> Result:
    """The benchmark; `quick` at a tiny size, `full` with 200 M parameters and bfloat16 too."""
    result = Result("across_calls", __doc__ or "")
    rounds = 3 if quick else 15
    # A step of Muon is for the most part products: on two cores seconds, at 20 M.
    millions = dict.fromkeys(("AdamW", "SGD"), 0.5 if quick else 20) | {"Muon": 10}
    result.configuration = {"millions of parameters": millions, "rounds": rounds}
    optimizers = {"AdamW": optax.adamw(1e-3), "SGD": optax.sgd(1e-3, momentum=0.9)}
    if not quick:
        optimizers["Muon"] = optax.contrib.muon(1e-3)
    for name, inner in optimizers.items():
        tree = parameters(millions[name], jnp.float32)
        measure(result, inner, f"{name} f32", tree, rounds, limits)
    if full:
        for dtype, size in ((jnp.bfloat16, 20), (jnp.float32, 200)):
            label = f"AdamW {jnp.dtype(dtype).name} {size} M"
            tree = parameters(size, dtype)
            measure(result, optax.adamw(1e-3), label, tree, rounds, limits, few=size > 100)
    for name in [n for n in ("AdamW f32", "Muon f32") if not quick or n.startswith("AdamW")]:
        key = f"{name}/ends no group"
        result.claims += [
            Claim(f"{name}: apply costs an in-place add", f"{key}/{OURS}/time", LIMITS[OURS]),
            Claim(
                f"{name}: apply needs no temporary tree",
                f"{key}/{OURS}/temporary beside the optimizer",
                0.01,
            ),
            Claim(f"{name}: apply copies no leaf", f"{key}/{OURS}/copies beside the optimizer", 0),
            Claim(f"{name}: update against the add", f"{key}/{OURS_UPDATE}/time", 4.5),
            Claim(
                f"{name}: update needs no temporary tree",
                f"{key}/{OURS_UPDATE}/temporary beside the optimizer",
                0.01,
            ),
            Claim(f"{name}: update against {OPTAX}", f"{name}/update over {OPTAX}", 0.5),
            Claim(
                f"{name}: k = 1 costs the inner optimizer alone",
                f"{name}/ends a group/{SINGLE}/time",
                LIMITS[SINGLE],
                why=SAME_PROGRAMS,
            ),
            Claim(
                f"{name}: k = 1 runs no operation of a parameter's size beside the optimizer's",
                f"{name}/ends a group/{SINGLE}/operations beside the optimizer",
                0,
            ),
        ]
    result.claims.append(
        Claim(
            "AdamW: optax.MultiSteps takes at least 8 times as long as apply",
            f"AdamW f32/{OPTAX} over ours",
            8,
            at_most=False,
        )
    )
    return result
