"""Compile all that `extend.py` will run before it times anything: our kernels and the peers', in parallel processes.

Triton and FlashInfer keep what they compile on disk, so the bench itself then only loads it. Compiling between timings
would take many times as long, one kernel after another, and disturb them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import extend_cases
import torch
from extend_cases import Case, Workload
from extend_peers import LOADERS
from rich.progress import track

from radixpool.kernels.build import build_named, kernel_names

SMALL_POOL = 2**26
IMPLEMENTATIONS = {  # of the peers that compile at their first call; what takes longest first
    "flashinfer": ("flashinfer_fa3", "flashinfer_fa2"), "sglang": ("sglang_triton",), "vllm": ("vllm_triton",),
}  # fmt: skip


def shapes(cases: list[Case]) -> list[Case]:
    """Return small cases, one for each shape that kernels are compiled for."""
    small = (replace(case, name="", sequences=((2, 256, 256),), shared=0) for case in cases)
    return list(dict.fromkeys(small))


def run_peer(folder: Path, peer: str, implementation: str, case: Case) -> None:
    """Run a peer's implementation once on a small workload, which compiles it."""
    extend_cases.POOL_BYTES = SMALL_POOL
    bind = LOADERS[peer](folder)[implementation]
    try:
        bind(Workload(case))()
        torch.cuda.synchronize()
    except NotImplementedError:
        pass


def tasks(
    cases: list[Case], folder: Path | None, peers: list[str], arch: int
) -> Iterator[tuple[str, Callable[..., object], tuple[object, ...]]]:
    """Yield name, function and arguments of everything to compile."""
    for peer, implementations in IMPLEMENTATIONS.items():
        for case in shapes(cases) if folder is not None and peer in peers else []:
            for name in implementations:
                yield f"{name} for {case.spec}", run_peer, (folder, peer, name, case)
    for case in shapes(cases):
        for name in reversed(kernel_names(case.spec, arch)):  # the fast kernels come last there
            yield name, build_named, (case.spec, arch, name)


def attempt(function: Callable[..., object], arguments: tuple[object, ...]) -> str:
    """Call a function in this process; return what went wrong, as text: not every exception can be sent back."""
    try:
        function(*arguments)
    except Exception as error:
        return repr(error)[:200]
    return ""


def compile_ahead(cases: list[Case], folder: Path | None, peers: list[str], *, jobs: int = 0) -> None:
    """Compile everything for these cases, `jobs` at a time (0: one a core); report what fails and how long it took."""
    major, minor = torch.cuda.get_device_capability()
    start, failed = time.perf_counter(), 0
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        waiting: dict[Future[str], str] = {
            pool.submit(attempt, function, arguments): name
            for name, function, arguments in tasks(cases, folder, peers, 10 * major + minor)
        }
        for done in track(as_completed(waiting), "compiling", total=len(waiting)):
            if wrong := str(done.exception() or done.result()):  # an exception: the process died
                failed += 1
                print(f"{waiting[done]}: {wrong}"[:300], flush=True)
    print(f"compiled {len(waiting) - failed} of {len(waiting)} in {time.perf_counter() - start:.0f} s", flush=True)
