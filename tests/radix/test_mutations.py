"""The simulator finds planted bugs: each patch in mutations/ breaks a copy of the package and must turn it red."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import radixpool
import radixpool.radix

HERE = Path(__file__).parent
PATCHES = sorted((HERE / "mutations").glob("*.patch"))
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import radixpool, simulation
assert radixpool.__file__.startswith(sys.argv[2]), radixpool.__file__
for seed in range(60):
    actions = simulation.actions_of(seed, 120)
    error, _ = simulation.run(seed, actions, "lru")
    if error is not None:
        print(simulation.shortest(seed, actions, "lru"))
        sys.exit(3)
"""


@pytest.fixture
def copy_of_package(tmp_path) -> Path:
    """Return a folder that holds the package's root and its cache, nothing else."""
    target = tmp_path / "radixpool"
    target.mkdir()
    for name in ("__init__.py", "_version.py"):
        shutil.copy(Path(radixpool.__file__).parent / name, target / name)
    source = Path(radixpool.radix.__file__).parent.resolve()
    shutil.copytree(source, target / "radix", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def simulate(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(HERE), str(folder)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_unchanged_copy_is_green(copy_of_package) -> None:
    done = simulate(copy_of_package)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_at_least_three_mutations() -> None:
    assert len(PATCHES) >= 3


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_planted_bug_turns_the_simulator_red(copy_of_package, patch) -> None:
    applied = subprocess.run(
        ["git", "apply", "-p1", str(patch)],
        cwd=copy_of_package / "radixpool",
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(copy_of_package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert applied.returncode == 0, f"the code has changed: make {patch.name} again\n{applied.stderr}"
    done = simulate(copy_of_package)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "shortest log found" in done.stdout
