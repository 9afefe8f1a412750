"""The plain modules beside this file, for the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    full_name = f"radixpool_tests_chaos_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        module = sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full_name]


@pytest.fixture(scope="session")
def house_module() -> ModuleType:
    return _load("house")


@pytest.fixture(scope="session")
def rounds() -> ModuleType:
    return _load("rounds")
