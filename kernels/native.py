"""Loads the package's C code, compiled once on this machine into Triton's cache folder.

Triton itself needs a C compiler wherever it runs kernels, so one is there; without one (`load` returns None) the
numpy functions do the same work. `CC` names another compiler. No Python headers are used: one library serves every
Python of the machine.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

LOG = logging.getLogger(__name__)
FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-ffp-contract=off")  # a fused product would round unlike numpy
COMPILE_SECONDS = 60


def compiler() -> str | None:
    """Return the path of the C compiler: `CC`, cc, gcc or clang; None where there is none."""
    names = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    return next((path for name in names if (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """Return where compiled code is kept: Triton's cache."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named or Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache")


def compile_library(source: str, options: tuple[str, ...], target: Path, cc: str) -> None:
    """Compile `source` to the shared library `target`, which appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        code, library = Path(scratch) / "code.c", Path(scratch) / "code.so"
        code.write_text(source)
        command = [cc, *FLAGS, *options, str(code), "-o", str(library), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
        if result.returncode:
            raise OSError(f"{' '.join(command)}: {result.stderr.strip()[-500:]}")
        library.replace(target)


def build(names: tuple[str, ...], constants: Mapping[str, float]) -> Path:
    """Return the library made of `<name>.c`, one after another as one file, with `constants` as macros.

    Compiles it unless the cache holds it. Raises `OSError` where that is not possible.
    """
    folder_of_sources = resources.files("radixpool.kernels")
    source = "\n".join(folder_of_sources.joinpath(f"{name}.c").read_text() for name in names)
    options = tuple(f"-D{key}={value!r}" for key, value in constants.items())
    identity = "\0".join((source, *FLAGS, *options, platform.system(), platform.machine()))
    folder = cache_folder() / f"radixpool-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
    target = folder / f"{names[-1]}.so"
    if not target.exists():
        cc = compiler()
        if cc is None:
            raise OSError("there is no C compiler (cc, gcc or clang; CC names another)")
        compile_library(source, options, target, cc)
    return target


@functools.cache
def load(names: tuple[str, ...], constants: tuple[tuple[str, float], ...]) -> ctypes.CDLL | None:
    """Return the library of `build`, or None where it can't be compiled (logged once: planning is then slower)."""
    try:
        return ctypes.CDLL(str(build(names, dict(constants))))
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: a user without a home
        LOG.warning("%s.c is not compiled, numpy does its work, slower: %s", names[-1], error)
        return None
