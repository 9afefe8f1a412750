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
    for name in ("extend_cases", "extend_ahead", "extend_peers", "attention_peers", "attention_cases"):
        sys.modules.pop(name, None)


@pytest.fixture
def ahead(cases):
    return importlib.import_module("extend_ahead")


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


def test_every_shape_is_compiled_ahead_once(cases, ahead):
    all_cases = [c for suite in cases.SUITES.values() for c in suite]
    small = ahead.shapes(all_cases)
    assert {c.spec for c in small} == {c.spec for c in all_cases} and len({c.spec for c in small}) == len(small)
    assert all(sum(c.lens) < 2048 for c in small)
    found = list(ahead.tasks(all_cases, Path("peers"), ["vllm", "fa3"], 90))
    assert sum(function is ahead.run_peer for _, function, _ in found) == len(small)
    for case in small:
        names = [task[2] for _, function, task in found if function is ahead.build_named and task[0] == case.spec]
        fast = "extend_fp8" if case.dtype == cases.FP8 else "extend_bfloat16"
        assert any(name.startswith(fast) for name in names)
    assert not any(function is ahead.run_peer for _, function, _ in ahead.tasks(all_cases, None, ["vllm"], 90))


def test_peers_that_compile_are_peers(ahead):
    assert set(ahead.IMPLEMENTATIONS) < set(ahead.LOADERS)
