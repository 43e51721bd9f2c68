"""What the group gradient compiles to on 8 devices: communication, flops and memory."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp

import jax_accum as ja
from jax_accum.testing import count_collectives

DEVICES = 8
SCALARS = 64  # bytes: losses, weights and counters may travel with a gradient or by themselves


def gradients(program):
    """Collectives of more than a few scalars."""
    return [c for c in program["collectives"] if c["bytes"] > SCALARS]


def test_one_reduction_per_update_and_the_flops_and_memory_of_a_scan(run_python, subtests):
    program = Path(__file__).parent / "programs" / "compiled.py"
    found = json.loads(run_python(program, devices=DEVICES))
    for a, programs in found["sizes"].items():
        for name in ("once", "two terms"):
            with subtests.test(f"{name}: one all-reduce of one tree after the loop", A=a):
                reductions = gradients(programs[name])
                assert {(c["kind"], c["in_loop"]) for c in reductions} == {("all-reduce", False)}
                payload = sum(c["bytes"] for c in reductions)
                assert found["tall"] <= payload <= found["tall"] + SCALARS
                # Nothing but scalars besides: no collective moves the batch.
                assert not any(c["in_loop"] for c in programs[name]["collectives"])
        with subtests.test("each: reduce-scatters of one tree in the loop", A=a):
            reductions = gradients(programs["each"])
            assert {(c["kind"], c["in_loop"]) for c in reductions} == {("reduce-scatter", True)}
            assert sum(c["bytes"] for c in reductions) == found["tall"] / DEVICES
        with subtests.test("flops of a device: its share of the undivided batch", A=a):
            share = programs["undivided"]["flops"]  # of a device, as XLA counts
            # XLA counts the body of the loop once.
            assert abs(programs["once"]["flops"] * int(a) / share - 1) < 0.01
        with subtests.test("the fault is seen: a reshape across devices", A=a):
            kinds = {c["kind"] for c in gradients(programs["reshaped"])}
            assert "all-gather" in kinds
            assert programs["reshaped"]["flops"] * int(a) / share > min(DEVICES, int(a)) - 0.5
        for name in ("wide", "table"):  # matrices; a table of embeddings, whose gradient scatters
            with subtests.test(f"{name}: the memory of a scan by hand", A=a):
                more = programs[name]["temporary"] - programs[f"{name}, by hand"]["temporary"]
                assert more <= 16 * SCALARS  # losses, weights and counters of the group
                assert found[name] > 1000 * 16 * SCALARS  # where one leaf twice would be seen


def test_collectives_are_counted_through_calls_and_in_halves():
    text = """
    region (p: f32[8]) -> f32[8] {
      ROOT r = (bf16[8,2]{1,0}, f32[]) all-reduce(f32[8]{0} p, f32[] q), to_apply=add
    }
    body (p: f32[8]) -> f32[8] {
      ROOT c = f32[8]{0} call(f32[8]{0} p), to_apply=region
    }
    ENTRY main (x: f32[8]) -> f32[8] {
      s = (f32[8]{0}, f32[64]{0}) all-gather-start(f32[8]{0} x), dimensions={0}
      d = f32[64]{0} all-gather-done((f32[8]{0}, f32[64]{0}) s)
      ROOT w = f32[8]{0} while(f32[8]{0} x), condition=cond, body=body
    }
    """.replace("\n    ", "\n")
    reduce, gather = count_collectives(text)
    assert (reduce.kind, reduce.in_loop, reduce.bytes) == ("all-reduce", True, 36)
    assert (gather.kind, gather.in_loop, gather.shapes) == ("all-gather", False, (("f32", (64,)),))


def test_the_order_of_the_microbatches_is_not_looked_up_for_every_number_of_the_batch():
    def loss_fn(params, batch):
        total = jnp.sum(jnp.sin(batch["x"] * params) * batch["mask"])
        return ja.Weighted(total, jnp.sum(batch["mask"]))

    batch = {"x": jnp.ones((20, 64)), "mask": jnp.ones((20, 64))}
    step = jax.jit(ja.accumulated_value_and_grad(loss_fn, 5))
    text = step.lower(jnp.ones(64), batch).compile().as_text()
    blocks = re.split(r"\n(?=\S)", text)
    look_ups = [x for x in blocks if re.search(r"= s32\[1\]\S* dynamic-slice\(", x)]
    assert look_ups  # once a turn, for a scalar
    # But for the slice of one microbatch that the weights are read from.
    roots = [re.search(r"ROOT .*? = (\S+) ([\w-]+)", block).groups() for block in look_ups]
    assert [x for x in roots if not x[0].startswith("s32[]") and x[1] != "dynamic-slice"] == []
