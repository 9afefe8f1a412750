from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixpool.radix import Namespace
from radixpool.rpc import convert
from radixpool.rpc.generation import (
    FinishReason,
    GenerateFinished,
    GenerateStarted,
    GenerateTokens,
    SamplingParams,
)
from radixpool.rpc.pool_types import (
    CudaFdAttachment,
    CudaIpcAllocation,
    CudaIpcAttachment,
    KvDtype,
    MemfdAttachment,
    Pool,
    PoolLayout,
    PoolSpec,
)

U32 = st.integers(0, 2**32 - 1)
TEXT = st.text(max_size=20)
NAMESPACES = st.builds(Namespace, TEXT, TEXT, TEXT, st.integers(0, 2**64 - 1), TEXT, TEXT)
SPECS = st.builds(
    PoolSpec,
    model=TEXT,
    revision=TEXT,
    num_layers=U32,
    num_kv_heads=U32,
    head_dim=U32,
    block_size=U32,
    num_blocks=U32,
    dtype=st.none() | st.sampled_from(KvDtype),
    layout=st.none() | st.sampled_from(PoolLayout),
    k_scale=st.floats(0, 1e30),
    v_scale=st.floats(0, 1e30),
)
ALLOCATIONS = st.builds(CudaIpcAllocation, st.binary(min_size=64, max_size=64), st.integers(0, 2**64 - 1))
ATTACHMENTS = (
    st.builds(MemfdAttachment, TEXT, st.integers(0, 2**64 - 1))
    | st.builds(CudaIpcAttachment, st.binary(min_size=16, max_size=16), st.lists(ALLOCATIONS, max_size=3).map(tuple))
    | st.builds(CudaFdAttachment, st.binary(min_size=16, max_size=16), TEXT, st.integers(0, 2**64 - 1))
)
EVENTS = (
    st.builds(GenerateStarted, U32, U32)
    | st.builds(GenerateTokens, st.lists(U32, max_size=5).map(tuple))
    | st.builds(GenerateFinished, st.sampled_from(FinishReason), U32, U32, U32)
)


@given(NAMESPACES)
def test_namespaces(namespace):
    assert convert.namespace_from_wire(convert.namespace_to_wire(namespace)) == namespace


@given(st.builds(Pool, st.binary(min_size=16, max_size=16), SPECS, ATTACHMENTS))
def test_pools(pool):
    assert convert.pool_from_wire(convert.pool_to_wire(pool)) == pool


@given(
    st.builds(
        SamplingParams,
        max_new_tokens=U32,
        temperature=st.floats(0, 2, width=32),
        top_p=st.floats(0.015625, 1, width=32),
        top_k=U32,
        seed=st.none() | st.integers(0, 2**64 - 1),
        stop_token_ids=st.lists(U32, max_size=4).map(tuple),
        ignore_eos=st.booleans(),
    )
)
def test_sampling(sampling):
    assert convert.sampling_from_wire(convert.sampling_to_wire(sampling)) == sampling


@given(EVENTS)
def test_events(event):
    assert convert.generate_event_from_wire(convert.generate_event_to_wire(event)) == event


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_block_ids(ids):
    packed = convert.block_ids_to_wire(np.array(ids, dtype=np.int32))
    assert len(packed) == 4 * len(ids)
    unpacked = convert.block_ids_from_wire(packed)
    assert unpacked.tolist() == ids
    assert not unpacked.flags.writeable
