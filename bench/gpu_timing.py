"""Timing on a GPU: medians with spread, L2 flushed before every run, eager or as a replayed CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Timing:
    """Microseconds: median, 20th and 80th percentile."""

    us: float
    low_us: float
    high_us: float


def time_eager(fn: Callable[[], object], *, rep_ms: int = 100) -> Timing:
    """Time `fn` with device events; the L2 cache is overwritten before each run."""
    median, low, high = triton.testing.do_bench(fn, warmup=25, rep=rep_ms, quantiles=[0.5, 0.2, 0.8])
    return Timing(median * 1e3, low * 1e3, high * 1e3)


def time_graph(fn: Callable[[], object], *, rep_ms: int = 100) -> Timing:
    """Capture `fn` and time the replay."""
    fn()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        fn()
        with torch.cuda.graph(graph, stream=stream):
            fn()
    torch.cuda.synchronize()
    return time_eager(graph.replay, rep_ms=rep_ms)


@contextmanager
def clean_cache() -> Iterator[None]:
    """Fill the L2 cache by reading, not by writing, before each run: no dirty line is left to be written back."""
    active = triton.runtime.driver.active
    active.clear_cache = lambda cache: torch.sum(cache.view(-1, 4096), 1)
    try:
        yield
    finally:
        del active.clear_cache


def host_time(fn: Callable[[], object], *, calls: int = 100) -> float:
    """Return the microseconds of CPU that one call takes while the GPU's queue has room."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / calls * 1e6


def read_bandwidth() -> float:
    """Return the measured read bandwidth in bytes per second: row sums of 4 GiB."""
    a = torch.randn(2**31 // 4096, 4096, device="cuda", dtype=torch.bfloat16)
    seconds = triton.testing.do_bench(lambda: torch.sum(a, 1), warmup=25, rep=200, return_mode="median") / 1e3
    return a.numel() * 2 / seconds
