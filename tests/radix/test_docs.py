"""What the documentation shows is what happens."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
MODULES = ("cache", "eviction", "media", "namespace", "replay", "tokens")


@pytest.mark.parametrize(("page", "least"), [("README.md", 6), ("docs/radix.md", 40)])
def test_the_guides(page, least) -> None:
    result = doctest.testfile(str(REPO / page), module_relative=False)
    assert result.attempted > least
    assert result.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings(name) -> None:
    result = doctest.testmod(importlib.import_module(f"radixpool.radix.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
