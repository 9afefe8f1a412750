"""Fixtures of the model tests: the oracle, the driver and the walk are plain modules beside this file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    """Import a module or a package that lies beside this file."""
    full, path = f"radixpool_tests_model_{name}", Path(__file__).parent / name
    if full not in sys.modules:
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        spec = importlib.util.spec_from_file_location(full, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture
def make_driver():
    """Return a factory of drivers over a fresh cache and a fresh oracle."""
    oracle, driver = _load("oracle"), _load("driver")
    return lambda **options: driver.Driver(oracle.Oracle, oracle.Refused, **options)


@pytest.fixture
def random_walk():
    """Return the seeded random walk."""
    return _load("walk").random_walk
