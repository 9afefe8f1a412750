"""Every row of scenarios/control.md is named by a test: in its name (`row_07`, `scenario_62`) or docstring."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("RADIXPOOL_SHARED", TESTS.parents[1] / "shared"))
ROWS = SHARED / "scenarios" / "control.md"
ON_THE_WIRE = frozenset((1, 2, 3, 5, 7, 12, 14, 20, 22, 25, 35, 42, 43, 44, 50, 54, 55, 58, 59, 61, 62, 63, 64, 65))
"""Rows about which a client, a worker or a follower hears something that another process has to get right."""
_NAME = re.compile(r"(?:row|rows|scenario)_((?:\d+(?:_and)?_)+)")
_TEXT = re.compile(r"\b[Rr]ows? ((?:\d+(?:, | and )?)+)")


def rows_named_by(folder: Path) -> dict[int, list[str]]:
    """Map each row to the test functions under `folder` that name it."""
    found: dict[int, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                text = f"{ast.get_docstring(node) or ''}"
                for numbers in (*_NAME.findall(node.name + "_"), *_TEXT.findall(text)):
                    for number in re.findall(r"\d+", numbers):
                        found.setdefault(int(number), []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


@pytest.fixture(scope="module")
def rows() -> dict[int, str]:
    """Return the number and the report of each row."""
    if not ROWS.is_file():
        pytest.skip(f"the scenarios are not here: {ROWS} is absent (set RADIXPOOL_SHARED)")
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    table = {int(line.split("|")[1]): line for line in lines if re.match(r"\| *\d+ *\|", line)}
    assert len(table) > 40, "the file has another form than this test reads"
    return table


def test_every_row_is_a_test(rows: dict[int, str]) -> None:
    named = rows_named_by(TESTS)
    missing = {number: report for number, report in rows.items() if number not in named}
    assert not missing, "no test names row\n" + "\n".join(missing.values())


def test_rows_where_the_wire_matters_are_tests_over_the_wire(rows: dict[int, str]) -> None:
    assert rows.keys() >= ON_THE_WIRE
    named = {**rows_named_by(TESTS / "ops"), **rows_named_by(TESTS / "rpc")}
    missing = sorted(ON_THE_WIRE - named.keys())
    assert not missing, f"no test over the wire names rows {missing}"


def test_the_names_that_count_are_found() -> None:
    """The reader itself, on this folder: it needs no scenarios."""
    named = rows_named_by(TESTS / "rpc")
    assert {19, 20} <= named.keys(), "of one name with two numbers"
    assert any("test_leases" in test for test in named[58]), "of a docstring"
