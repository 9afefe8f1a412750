"""bench/kv_dtypes.py compares what it says: a pool of the same type agrees wholly, one of fp8 mostly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from radixpool.rpc.pool.device import CPU
from radixpool.rpc.pool_types import KvDtype
from radixpool.rpc.worker.model_source import find_model

BENCH = Path(__file__).parents[2] / "bench" / "kv_dtypes.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_kv_dtypes", BENCH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_next_tokens_of_a_pool_of_every_type(bench, tiny_model, monkeypatch):
    monkeypatch.setattr(bench, "CHUNK_TOKENS", 48)  # chunks read what earlier ones wrote
    prompts = [np.random.default_rng(seed).integers(3, 290, 100 + seed) for seed in (1, 2)]
    computed = []
    source = find_model(str(tiny_model))
    tokens = {dtype: bench.next_tokens(source, CPU, dtype, prompts, computed.append) for dtype in KvDtype}
    assert sum(computed) == 4 * 203
    shares = {dtype: (got == tokens[KvDtype.FLOAT32]).mean() for dtype, got in tokens.items()}
    assert shares[KvDtype.FLOAT32] == 1
    assert shares[KvDtype.FLOAT16] >= shares[KvDtype.BFLOAT16] - 0.02 > 0.9
    assert 0.5 < shares[KvDtype.FLOAT8_E4M3] < 1
