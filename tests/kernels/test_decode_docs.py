"""The tables of the decode page come from a run's CSV: ratios, verdicts, and only what stands between the marks."""

import csv
import importlib
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def docs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("decode_docs")
    sys.modules.pop("decode_docs", None)


def write_run(path, case, **times):
    columns = ("eager_us", "eager_high_us", "graph_us", "clean_us", "host_us")
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, ["case", "name", *columns, "failed"])
        writer.writeheader()
        for name, values in times.items():
            writer.writerow({"case": case, "name": name, **dict(zip(columns, values, strict=True)), "failed": ""})


def test_ratios_compare_with_the_better_peer_and_say_which_goal_is_met(docs, tmp_path):
    nan = math.nan
    write_run(
        tmp_path / "decode.csv", "8/1 B=64 4k", plain_read=(nan, nan, 46.6, 34.0, nan),
        radixpool=(50.0, 60.0, 40.0, 20.0, 9.0), fa3=(60.0, 60.0, 60.0, 60.0, 9.0),
        flashinfer=(54.0, 54.0, 54.0, 50.0, 9.0), fi_cascade=(nan, nan, nan, nan, nan),
    )  # fmt: skip
    row = docs.plain_table(docs.load(tmp_path / "decode.csv")).splitlines()[-1]
    cells = [c.strip() for c in row.strip("|").split("|")]
    assert cells == [
        "8/1 B=64 4k", "46.6", "50.0 (to 60.0)", "40.0", "60.0", "60.0", "54.0", "54.0", "1.08 / 1.35", "2.50",
        "1.1: graph only",
    ]  # fmt: skip


def test_a_goal_is_not_met_by_rounding(docs):
    assert docs.verdict(1.1, (1.0999, 1.1)) == "1.1: graph only"
    assert docs.verdict(1.4, (1.399, 1.3999)) == "1.4: missed"
    assert docs.verdict(0, (1.0, 1.0)) == ""


def test_only_what_stands_between_the_marks_changes(docs):
    text = "a\n<!-- x: made by bench/decode_docs.py -->\nold\n<!-- end of x -->\nb\n"
    made = docs.replace_between(text, "x", "new")
    assert made == "a\n<!-- x: made by bench/decode_docs.py -->\n\nnew\n\n<!-- end of x -->\nb\n"
    assert docs.replace_between(made, "x", "new") == made


def test_the_page_has_every_mark_and_the_goals_name_cases_of_the_bench(docs):
    page = (ROOT / "docs" / "performance-kernels.md").read_text()
    for name in ("machine", "plain", "shared", "host", "notes"):
        assert docs.replace_between(page, name, "here").count("\nhere\n") == 1
    source = (ROOT / "bench" / "attention_cases.py").read_text()
    assert all(f'"{name}"' in source for name in docs.SHARED_GOALS)
