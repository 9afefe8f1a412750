"""Tests that share processes or a build run one after the other: pytest-xdist keeps their groups together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GROUPED = """
import os
from pathlib import Path

import pytest


@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(6))
def test_grouped(number):
    Path(f"worker-{number}").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


def test_a_group_runs_on_one_worker(tmp_path: Path) -> None:
    """pytest 9.2 took away what pytest-xdist 3.8 marks groups by: they were spread over the workers, silently."""
    (tmp_path / "test_grouped.py").write_text(GROUPED)
    options = ["-n", "2", "--dist", "loadgroup", "-q", "-c", "none.ini", "-p", "no:cacheprovider"]
    (tmp_path / "none.ini").write_text("")
    ran = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    workers = [file.read_text() for file in tmp_path.glob("worker-*")]
    assert len(workers) == 6
    assert len(set(workers)) == 1, workers
