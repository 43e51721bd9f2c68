"""Every way of cutting the same examples gives the same gradient, loss, norm and counters."""

from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


def test_partitions_into_microbatches_and_replicas_give_the_same(run_python):
    """Any microbatch size, number of microbatches and replicas, ragged end and order of rows.

    float64 to 1e-12; float32 at most 4 times as far from the float64 gradient of the undivided
    batch as the undivided float32 gradient is.
    """
    program = PROGRAMS / "partitions.py"
    assert "held" in run_python(program, devices=8, JAX_ENABLE_X64="1")
