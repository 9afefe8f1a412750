"""Every case of shared/scenarios/kernels.md is named by a test of this folder: `Case 7` in its docstring."""

import ast
import os
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SHARED = Path(os.environ.get("RADIXPOOL_SHARED", HERE.parents[2] / "shared"))
CASES = SHARED / "scenarios" / "kernels.md"
NAMED = re.compile(r"\bCases? ((?:\d+(?:, | and )?)+)")


def cases_named() -> dict[int, list[str]]:
    """Map each case to the tests here that name it."""
    found: dict[int, list[str]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for numbers in NAMED.findall(ast.get_docstring(node) or ""):
                    for number in re.findall(r"\d+", numbers):
                        found.setdefault(int(number), []).append(f"{path.name}::{node.name}")
    return found


def test_every_case_is_a_test():
    """All rows concern these kernels; only int8 of case 9 does not: there are no int8 pools."""
    if not CASES.is_file():
        pytest.skip(f"the scenarios are not here: {CASES} is absent (set RADIXPOOL_SHARED)")
    rows = {int(m[1]): m[0] for m in re.finditer(r"^(\d+)\. .*", CASES.read_text(), re.MULTILINE)}
    assert len(rows) > 30, "the file has another form than this test reads"
    missing = [report for number, report in rows.items() if number not in cases_named()]
    assert not missing, "no test names\n" + "\n".join(missing)


def test_the_names_that_count_are_found():
    """The reader itself: it needs no scenarios."""
    named = cases_named()
    assert any("test_alibi" in test for test in named[39])
    assert {12, 13} <= named.keys(), "of a docstring with two numbers"
