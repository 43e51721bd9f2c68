"""The benchmarks run, at tiny sizes; what they say of a figure is what was measured."""

import dataclasses
import itertools
import json
import math
import random
import struct

import pytest

from benchmarks import _compare, _program, _report, _timing
from benchmarks.__main__ import NAMES, main
from benchmarks._result import Claim, Figure, Plot, Result, Table

MACHINE = {
    "date": "2026-01-01",
    "processor": "one <b>",
    "cores": 2,
    "devices": ["cpu: cpu"],
    "python": "3",
    "versions": {"jax": "0"},
}
LIMITS = {"bytes_per_second": 1e9, "flops_per_second": 1e9}


def result_of(*figures: Figure, claims: tuple[Claim, ...] = ()) -> Result:
    return Result("one", "Is it?", list(figures), list(claims))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "frameworks"])
def test_a_quick_run_writes_the_report_and_its_exact_claims_hold(name, tmp_path):
    assert main(["--quick", "--only", name, "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "results.json").read_text())
    (result,) = data["results"]
    assert result["name"] == name
    keys = {f["key"]: Figure(**f) for f in result["figures"]}
    assert keys
    claims = [Claim(**c) for c in result["claims"] if c["key"] in keys]
    exact = [c for c in claims if keys[c.key].exact]
    assert exact
    assert [c.text for c in exact if c.verdict(keys[c.key]) != "holds"] == []
    assert f"id={name}" in (tmp_path / "report.html").read_text()
    pictures = sorted(tmp_path.glob("*.png"))
    assert len(pictures) == len(result["plots"])
    for picture in pictures:
        width, height = struct.unpack(">II", picture.read_bytes()[16:24])
        assert width > 300
        assert height > 200


def test_ways_take_turns_and_the_order_is_turned_round_in_every_other_round():
    order: list[str] = []
    ways = {name: (lambda name=name: order.append(name)) for name in "abc"}
    seconds = _timing.interleaved(ways, rounds=3, warm_up=0)
    assert "".join(order) == "abccbaabc"
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 3)


def test_a_ratio_is_of_the_same_round():
    seconds = {"slow": [2.0, 20.0, 2.0], "base": [1.0, 10.0, 1.0]}
    figure = _timing.ratio("r", seconds, "slow", "base")
    assert (figure.low, figure.value, figure.high) == (2.0, 2.0, 2.0)
    assert (figure.median_low, figure.median_high) == (None, None)  # of three rounds


def test_a_ratio_of_enough_rounds_says_where_its_median_lies():
    seconds = {"ours": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "base": [1.0] * 8}
    figure = _timing.ratio("r", seconds, "ours", "base")
    assert (figure.median_low, figure.median_high) == (1.0, 8.0)


def test_the_interval_of_a_median_holds_it_as_often_as_it_says():
    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        low, high = _timing.interval([rng.expovariate(1.0) for _ in range(21)])
        held += low <= math.log(2) <= high
    # For 21 values the exact probability is 0.9928: a sign test can't be sure of just 99%.
    assert 0.987 <= held / 2000 <= 0.998
    assert _timing.interval([1.0] * 7) == (-math.inf, math.inf)  # all above: once in 64


class Clock:
    """Time for `_timing` alone: it passes where a way says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(_timing.time, "perf_counter", lambda: self.now)

    def way(self, *seconds):
        turns = itertools.cycle(seconds)

        def run():
            self.now += next(turns)

        return run


@pytest.mark.parametrize(
    ("ours", "rounds"),
    [((1.0,), 8), ((2.0,), 8), ((1.5,), 40), ((1.25, 1.0), 8), ((1.75, 1.25), 40)],
    ids=["below", "above", "at the limit", "spread below", "spread about the limit"],
)
def test_rounds_are_added_until_a_ratio_is_told_from_its_limit(ours, rounds, monkeypatch):
    clock = Clock(monkeypatch)
    ways = {"ours": clock.way(*ours), "base": clock.way(1.0)}
    seconds = _timing.decided(ways, 1.5, most=40)
    assert {way: len(values) for way, values in seconds.items()} == dict.fromkeys(ways, rounds)
    assert set(seconds["ours"]) == set(ours)


def test_rounds_that_there_are_count_towards_a_decision(monkeypatch):
    clock = Clock(monkeypatch)
    ways = {"ours": clock.way(1.0), "base": clock.way(1.0)}
    there = {"ours": [1.0] * 15, "base": [1.0] * 15, "another": [9.0] * 15}
    assert _timing.decided(ways, 1.5, most=40, seconds=there) == {
        "ours": [1.0] * 15,
        "base": [1.0] * 15,
    }
    assert clock.now == 0


@pytest.mark.parametrize(
    ("old", "new", "worse"),
    [
        (Figure("x", 1.0, 0.9, 1.1), Figure("x", 1.5, 1.4, 1.6), True),
        (Figure("x", 1.0, 0.9, 1.1), Figure("x", 1.2, 1.05, 1.6), False),
        (Figure("x", 1.5, 1.4, 1.6), Figure("x", 1.0, 0.9, 1.1), False),
        (Figure("x", 1, 1, 1, "", True), Figure("x", 2, 2, 2, "", True), True),
        (Figure("x", 2, 2, 2, "", True), Figure("x", 1, 1, 1, "", True), False),
        (
            Figure("x", 2, 2, 2, "", True, "higher"),
            Figure("x", 1, 1, 1, "", True, "higher"),
            True,
        ),
        (Figure("x", 1, 1, 1, "ms"), Figure("x", 9, 9, 9, "ms"), False),
    ],
    ids=[
        "slower beyond the noise",
        "slower within the noise",
        "faster",
        "an exact figure rose",
        "an exact figure fell",
        "an exact figure that should be high fell",
        "milliseconds belong to the machine",
    ],
)
def test_compare_names_what_got_worse(old, new, worse, tmp_path, capsys):
    for name, figure in (("old", old), ("new", new)):
        claims = (Claim("x is small", "x", 9.0),)
        data = _report.as_json([result_of(figure, claims=claims)], MACHINE, LIMITS)
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    status = main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")])
    assert status == int(worse)
    assert ("one/x" in capsys.readouterr().out) == worse


@pytest.mark.parametrize(("now", "worse"), [(1.3, False), (1.4, True)])
def test_a_ratio_that_no_claim_rests_on_must_be_a_third_worse(now, worse):
    old, new = Figure("x", 1.0, 0.99, 1.01), Figure("x", now, now - 0.01, now + 0.01)
    runs = _compare.Run({"x": old}, set(), {}), _compare.Run({"x": new}, set(), {})
    assert (_compare.compare(*runs) != []) == worse
    claimed = [run._replace(claimed={"x"}) for run in runs]
    assert _compare.compare(*claimed) != []


def test_less_of_what_is_claimed_to_be_at_least_so_much_is_worse(tmp_path, capsys):
    claims = (Claim("as fast as the other", "x", 1.0, at_most=False),)
    for name, value in (("old", 1.2), ("new", 0.8)):
        result = result_of(Figure("x", value, value - 0.01, value + 0.01), claims=claims)
        data = _report.as_json([result], MACHINE, LIMITS)
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    assert main(["compare", old, new]) == 1
    assert "one/x" in capsys.readouterr().out
    assert main(["compare", new, old]) == 0


def test_compare_leaves_out_what_was_configured_otherwise(tmp_path, capsys):
    for name, width, rounds in (("old", 128, 3), ("same", 128, 9), ("new", 256, 3)):
        x = 1 if name == "old" else 2
        result = result_of(Figure("x", x, x, x, "", True))
        result.configuration = {"width": width, "rounds": rounds}
        _report.write(tmp_path / name, [result], MACHINE, LIMITS)
    files = [str(tmp_path / name / "results.json") for name in ("old", "same", "new")]
    assert main(["compare", files[0], files[1]]) == 1
    assert capsys.readouterr().out.startswith("one/x: 1 before, 2 now")
    assert main(["compare", files[0], files[2]]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "one: not compared, for its configuration differs (width: 128 before, 256 now)",
        "nothing is worse beyond the noise",
    ]


def test_compare_says_which_file_it_cannot_read(tmp_path, capsys):
    (tmp_path / "a.json").write_text("[]")
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 2
    assert "a.json is not a results.json" in capsys.readouterr().err


def test_a_missed_claim_stands_in_the_first_lines_and_says_why(tmp_path):
    result = result_of(
        Figure("x", 3.0, 2.9, 3.1), claims=(Claim("x is small", "x", 2.0, why="it is large"),)
    )
    result.tables.append(Table("<script>", ["a"], [["<i>"]]))
    result.plots.append(Plot("p", "x", "y", {"s": [(1.0, 1.0), (2.0, 3.0)]}))
    page = _report.write(tmp_path, [result], MACHINE, LIMITS).read_text()
    assert page.index("0 of 1 claims hold, 1 do not") < page.index("x is small (it is large)")
    assert "<script>" not in page
    assert "<i>" not in page
    assert "one <b>" not in page
    assert "Not measured on GPU yet." in page


@pytest.mark.parametrize(
    ("figure", "at_most", "verdict"),
    [
        (Figure("x", 1.0, 0.9, 1.2), True, "holds"),
        (Figure("x", 1.1, 0.9, 1.2), True, "within the noise"),
        (Figure("x", 1.1, 1.05, 1.2), True, "does not"),
        (Figure("x", 1.0, 0.9, 1.2), False, "holds"),
        (Figure("x", 0.9, 0.8, 1.2), False, "within the noise"),
        (Figure("x", 0.9, 0.8, 0.95), False, "does not"),
        (Figure("x", 2, 2, 2, "", True), True, "does not"),
        (Figure("x", 1.1, 0.9, 1.2, median_low=1.01, median_high=1.15), True, "does not"),
        (Figure("x", 1.1, 1.05, 1.2, median_low=0.99, median_high=1.3), True, "within the noise"),
        (Figure("x", 0.9, 0.8, 1.2, median_low=0.85, median_high=0.99), False, "does not"),
        (Figure("x", 0.9, 0.8, 0.95, median_low=0.7, median_high=1.01), False, "within the noise"),
    ],
)
def test_a_claim_fails_where_the_median_can_not_lie_within_the_limit(figure, at_most, verdict):
    assert Claim("x", "x", 1.0, at_most).verdict(figure) == verdict
    result = result_of(figure, claims=(Claim("x", "x", 1.0, at_most),))
    words = {"holds": "All 1 claims", "does not": "0 of 1 claims hold, 1 do not"}
    said = words.get(verdict, "0 of 1 claims hold, 1 within the noise on")
    assert _report.headline([result]).startswith(said)


def test_operations_of_a_program_are_counted_by_what_they_write_but_not_inside_fusions():
    text = """
%fused (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  ROOT %e = f32[4,4]{1,0} exponential(%p)
}
%body (t: (f32[4,4], s32[])) -> (f32[4,4], s32[]) {
  %t = (f32[4,4]{1,0}, s32[]) parameter(0)
  %x = f32[4,4]{1,0} get-tuple-element(%t), index=0
  %y = f32[4,4]{1,0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %r = (f32[4,4]{1,0}, s32[]) tuple(%y, %n)
}
ENTRY %main (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %c = f32[4,4]{1,0} copy(%a)
  %w = (f32[4,4]{1,0}, s32[]) while(%v), condition=%cond, body=%body
  %s = s32[] add(%n, %n)
  ROOT %d = f32[8]{0} dot(%c, %c)
}
"""
    assert _program.operation_sizes(text) == [16, 16, 1, 8]
    assert _program.copied_sizes(text) == [16]


def test_what_does_not_hold_comes_first():
    figures = [Figure("a", 1, 1, 1), Figure("b", 1.5, 1, 2), Figure("c", 2, 2, 2)]
    claims = tuple(Claim(f.key, f.key, 1.0) for f in figures)
    rows = _report.claims_table([result_of(*figures, claims=claims)]).rows
    assert [(row[0], row[1]) for row in rows] == [
        ("does not", "c"),
        ("within the noise", "b"),
        ("holds", "a"),
    ]


def test_a_claim_on_what_was_not_measured_is_not_a_verdict():
    assert result_of(claims=(Claim("no", "nothing", 1.0),)).verdicts() == []


def test_a_report_can_be_read_back(tmp_path):
    figure = Figure("x", 1.0, 0.5, 1.5)
    _report.write(tmp_path, [result_of(figure)], MACHINE, LIMITS)
    (read,) = _compare.load(tmp_path / "results.json").figures.values()
    assert dataclasses.asdict(read) == dataclasses.asdict(figure)
