"""The bench of extend counts the work it reports: visible (query, key) pairs only."""

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("extend_cases")
    sys.modules.pop("extend_cases", None)


def test_operations_are_counted_pair_by_pair(cases):
    case = cases.Case("", (4, 2), ((2, 3, 5), (1, 1, 7)), head_dim=16)
    pairs = 2 * sum(5 + row + 1 for row in range(3)) + 8
    assert case.flops == 4 * 4 * 16 * pairs


def test_every_case_is_whole(cases):
    names = [c.name for suite in cases.SUITES.values() for c in suite]
    assert len(set(names)) == len(names)
    for case in (c for suite in cases.SUITES.values() for c in suite):
        assert case.shared % case.block_size == 0
        assert all(cached >= case.shared for _, _, cached in case.sequences)
