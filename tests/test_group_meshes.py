"""The group gradient over meshes: right, reduced where it should be, shardings kept."""

import json
from pathlib import Path

ONCE = [["all-reduce", False]]


def test_over_meshes_of_8_devices(run_python, subtests):
    found = json.loads(run_python(Path(__file__).parent / "programs" / "meshes.py", devices=8))
    for name, fact in found.items():
        if "close" in fact:
            with subtests.test("the gradient of the undivided batch", mesh=name):
                assert fact["close"]
                assert fact["rows"] == 16  # also where the batch lies on every device
    with subtests.test("one reduction, after the loop"):
        for name in ("sharded", "explicit", "two data axes"):
            assert found[name]["collectives"] == ONCE, name
    with subtests.test("reduced in every microbatch, tensor-parallel leaves over no other axis"):
        # `qkv`, [8, 24], lies over both axes: half of the columns, a quarter of the rows.
        inside = found["model, each"]["in the loop"]
        assert ["reduce-scatter", [["f32", [2, 12]]]] in inside
        assert ["all-gather", [["f32", [8, 24]]]] not in inside
        assert "data" in found["model, each"]["specs"]["embedding"]
    with subtests.test("sharded parameters are gathered once per group"):
        kinds = found["fsdp, group"]["collectives"]
        assert ["all-gather", False] in kinds
        assert ["all-gather", True] not in kinds
        assert ["reduce-scatter", False] in kinds
    with subtests.test("or in every microbatch"):
        for name in ("fsdp, microbatch", "fsdp and model"):
            kinds = found[name]["collectives"]
            assert ["all-gather", True] in kinds, name
        assert ["all-gather", False] not in found["fsdp, microbatch"]["collectives"]
        assert ["reduce-scatter", True] in found["fsdp, microbatch"]["collectives"]
    with subtests.test("dropout by example is the same for every partition"):
        assert found["dropout by example"] == [True, True]
    with subtests.test("every microbatch of every replica has a mask of its own"):
        assert found["masks"] == [[2, 8], 16]
    with subtests.test("auxiliary output over replicas"):
        # Replica d has the values 2 d and 2 d + 1, one a microbatch.
        assert found["aux"] == {"sum": 120, "last": [2 * d + 1 for d in range(8)]}
    with subtests.test("state over replicas"):
        ends = [0.5 * (2 * d) + 2 * d + 1 for d in range(8)]
        assert found["state, mean"] == {"mean": sum(ends) / 8, "n": 2}
        assert found["state, first"] == {"mean": ends[0], "n": 2}
    for name in ("once", "each", "model, each", "fsdp"):
        with subtests.test("the step keeps shardings, compiles once, copies nothing", step=name):
            fact = found[f"step, {name}"]
            assert fact["kept"]
            assert fact["compiled"] == 1
            assert fact["copied"] < 1024  # the metrics
