"""The report folder: what is written, that it can be opened anywhere, that text stays text."""

import dataclasses
import json
import math
import stat
from html.parser import HTMLParser

import pytest

from jax_accum.crosscheck import report
from jax_accum.crosscheck.cases import Case
from jax_accum.crosscheck.data import WINDOW, Document
from jax_accum.crosscheck.errors import InputError
from jax_accum.crosscheck.faults import FAULTS
from jax_accum.crosscheck.gpt import GPTSizes
from jax_accum.crosscheck.run import Crosscheck
from jax_accum.crosscheck.summary import Told, as_data

SMALL = GPTSizes(max_length=WINDOW, layers=1, heads=2, width=8)
EVIL = "<script>alert(1)</script> & \"quotes\" 'more' <img src=x onerror=alert(2)>"
CASES = [Case("across", 4, "sgd", "float32"), Case("across", 4, "sgd", "float64")]


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


def ran(fault=None):
    documents = [Document(f"{EVIL}:{i}", EVIL * (i + 1)) for i in range(6)]
    crosscheck = Crosscheck(documents, updates=2, fault=fault, sizes=SMALL)
    crosscheck.compare_all(CASES)
    return Told(crosscheck, len(CASES), f"jax-accum crosscheck --text '{EVIL}'", EVIL)


@pytest.fixture(scope="module")
def equal():
    return ran()


@pytest.fixture(scope="module")
def differ():
    return ran(FAULTS["mean-of-means"])


def test_text_and_names_with_markup_stay_text(equal, tmp_path):
    page = Page(report.write(tmp_path, equal).read_text())
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(EVIL) >= 3  # in the source, an ID, the command


def test_the_page_needs_nothing_outside_itself(equal, tmp_path):
    html = report.write(tmp_path, equal).read_text()
    page = Page(html)
    sources = [value for name, value in page.attributes if name in ("src", "href")]
    assert len(sources) == 3
    assert all(value.startswith("data:image/png;base64,iVBOR") for value in sources)
    assert "http" not in html.replace("data:", "")
    assert "@import" not in html


def test_the_first_lines_give_the_verdict(equal, differ, tmp_path):
    body = report.write(tmp_path, equal).read_text().split("<body>")[1]
    assert Page(body).text.split("\n")[2] == "Equal: JAX and PyTorch trained the same"
    assert Page(body).text.split("\n")[3].startswith("JAX and PyTorch trained the same in all 2")
    page = Page(report.write(tmp_path, differ).read_text())
    assert "They differ" in page.text
    assert "loss at update 1 (JAX) is off by" in page.text
    assert FAULTS["mean-of-means"].meaning in page.text


def test_plots_and_numbers_lie_beside_the_page(equal, tmp_path):
    report.write(tmp_path, equal)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "cases.png",
        "losses.png",
        "parameters.png",
        "report.html",
        "report.json",
    }
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) & stat.S_IRUSR


def test_the_json_says_what_the_run_said(equal, differ, tmp_path):
    report.write(tmp_path, equal)
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert (data["verdict"], data["complete"]) == ("equal", True)
    assert [case["name"] for case in data["cases"]] == [case.name for case in CASES]
    assert all(case["first_failure"] is None for case in data["cases"])
    first = data["cases"][0]
    assert first["losses"]["JAX"]["accumulated"] == equal.results[0].jax["accumulated"]
    assert first["counters"]["JAX"]["updates"] == 2
    assert len(first["parameters"]) == len(equal.run.weights)

    report.write(tmp_path, differ)
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert (data["verdict"], data["settings"]["fault"]) == ("differ", "mean-of-means")
    failure = data["cases"][0]["first_failure"]
    assert (failure["quantity"], failure["side"], failure["update"]) == ("loss", "JAX", 1)
    assert failure["ratio"] == failure["error"] / failure["allowed"] > 1


def test_a_number_that_is_not_finite_is_named_in_valid_json(equal, tmp_path):
    result = equal.results[0]
    bad = dataclasses.replace(
        result,
        jax={"accumulated": [math.nan, math.inf], "undivided float64": [1.0, 1.0]},
        findings=[dataclasses.replace(f, error=math.nan) for f in result.findings],
    )
    run = dataclasses.replace(equal.run, results=[bad])
    told = dataclasses.replace(equal, run=run)
    report.write(tmp_path, told)
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert data["verdict"] == "differ"
    assert data["cases"][0]["losses"]["JAX"]["accumulated"] == ["nan", "inf"]


def test_a_run_that_was_cut_short_says_so(equal, tmp_path):
    told = dataclasses.replace(equal, planned=9, interrupted=True)
    page = Page(report.write(tmp_path, told).read_text())
    assert "cut short after 2 of 9 cases" in page.text
    assert not as_data(told)["complete"]


def test_nothing_compared_is_no_verdict(equal, tmp_path):
    run = dataclasses.replace(equal.run, results=[])
    told = dataclasses.replace(equal, run=run, planned=9, interrupted=True)
    assert told.verdict == "nothing compared"
    page = Page(report.write(tmp_path, told).read_text())
    assert "Nothing was compared" in page.text
    assert not list(tmp_path.glob("*.png"))


def test_a_text_that_is_too_short_is_noted(equal):
    assert equal.notes == []
    run = dataclasses.replace(equal.run, documents=equal.run.documents[:2])
    notes = dataclasses.replace(equal, run=run).notes
    assert notes == ["The text gives 5 examples and the runs use 16: examples repeat."]


def test_a_folder_that_cannot_be_written_is_found_before_the_run(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for folder in (file, file / "below", tmp_path / "nul\0l"):
        with pytest.raises(InputError, match=r"--report .* (is a file|not writable)"):
            report.check_folder(folder)
    report.check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
