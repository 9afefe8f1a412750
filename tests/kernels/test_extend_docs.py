"""The tables of the extend page come from a run's CSV: speeds against FA3, shares of the ceiling, errors."""

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
    yield importlib.import_module("extend_docs")
    for name in ("extend_docs", "extend_cases", "decode_docs"):
        sys.modules.pop(name, None)


def write_run(path, *rows):
    """Write rows of (case, name, error, us, tflops)."""
    with path.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["case", "name", "error", "us", "low_us", "high_us", "tflops", "failed"])
        for case, name, error, us, tflops in rows:
            writer.writerow([case, name, error, us, us - 1, us + 1, tflops, ""])


def cells(table):
    return [c.strip() for c in table.splitlines()[-1].strip("|").split("|")]


def test_a_case_is_set_beside_fa3_and_the_dense_product(docs, tmp_path):
    write_run(
        tmp_path / "extend.csv", ("dense matrix product", "dense_bf16", math.nan, 1.0, 700.0),
        ("dense matrix product", "dense_bf16", math.nan, 1.0, 800.0),
        ("dense matrix product", "dense_fp8", math.nan, math.nan, math.nan),
        ("4 x 4096 new", "radixpool", 1e-3, 900.0, 600.0),
        ("4 x 4096 new", "fa3", 1e-3, 990.0, 550.0), ("4 x 4096 new", "radixpool_plain", 1e-3, 1800.0, 300.0),
        ("4 x 4096 new", "sglang_triton", 1e-3, 9900.0, 55.0),
    )  # fmt: skip
    found, ceilings = docs.load(tmp_path / "extend.csv")
    assert ceilings == {"bf16": 800.0}
    row = cells(docs.main_table(found, ceilings))
    assert row == [
        "4 x 4096 new",
        "900 (899 to 901)",
        "600",
        "75 %",
        "**1.10**",
        "2.00",
        "550",
        "-",
        "-",
        "-",
        "55",
        "-",
    ]


def test_fp8_products_are_set_beside_exact_ones_with_their_errors(docs, tmp_path):
    name = "fp8 4 x 4096 new"
    write_run(
        tmp_path / "extend.csv", ("dense matrix product", "dense_fp8", math.nan, 1.0, 1500.0),
        (name, "radixpool", 2.3e-3, 1000.0, 550.0), (name, "radixpool_fp8", 3.7e-2, 800.0, 750.0),
        (name, "fa3", 3.6e-2, 1000.0, 550.0), ("4 x 4096 new", "radixpool", 1e-3, 900.0, 600.0),
        (name, "flashinfer_fa2", 2.3e-3, 2000.0, 275.0),
    )  # fmt: skip
    assert cells(docs.fp8_table(*docs.load(tmp_path / "extend.csv"))) == [
        name, "1000", "550", "2.3e-03", "1.00", "0.90", "800", "750", "50 %", "3.7e-02", "**1.25**", "1.12", "1000",
        "550", "3.6e-02", "275", "-",
    ]  # fmt: skip


def test_the_page_has_a_place_for_every_table(docs):
    page = (ROOT / "docs" / "performance-extend.md").read_text()
    for name in ("ceiling", "cases", "fp8"):
        assert "new table" in docs.replace_between(page, name, "new table", script="extend_docs.py")
