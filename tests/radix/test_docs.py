"""What the documentation shows is what happens."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "radix.md"
MODULES = ("cache", "eviction", "media", "namespace", "replay", "tokens")


@pytest.mark.skipif(not GUIDE.exists(), reason="the documentation is not beside the tests")
def test_the_guide() -> None:
    result = doctest.testfile(str(GUIDE), module_relative=False)
    assert result.attempted > 40
    assert result.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings(name) -> None:
    result = doctest.testmod(importlib.import_module(f"radixpool.radix.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
