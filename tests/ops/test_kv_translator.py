"""Events by content: equal prefixes have equal names everywhere, and a consumer of them knows what the cache knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpool.radix import DEFAULT_NAMESPACE, EventLog, Namespace, PoolExhausted, RadixCache
from radixpool.radix.events import Cleared
from radixpool.rpc.kv_events.hashes import root_hash, run_hashes
from radixpool.rpc.kv_events.messages import AllCleared, BlocksRemoved, BlocksStored, Encoding, batch, message
from radixpool.rpc.kv_events.replay import ReplayBuffer
from radixpool.rpc.kv_events.translator import MAX_BLOCKS_PER_EVENT, Translator

BLOCK_SIZE = 2
TENANT = Namespace(tenant="acme", cache_salt="s3cret", adapter="lora-1", model="m")


class Router:
    """What a prefix-aware router keeps: blocks by name. It knows nothing of radixpool but the events."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def take(self, events: Iterable[Any]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    assert event.parent is None or event.parent in self.blocks, "unknown parent"
                    assert len(event.tokens) == len(event.hashes) * event.block_size
                    assert len(event.extra_keys) == len(event.hashes)
                    parent = event.parent
                    for index, name in enumerate(event.hashes):
                        tokens = tuple(event.tokens[index * event.block_size : (index + 1) * event.block_size])
                        self.blocks[name] = (parent, tokens)
                        parent = name
                case BlocksRemoved(hashes):
                    for name in hashes:
                        del self.blocks[name]
                case AllCleared():
                    self.blocks.clear()

    def overlap(self, tokens: list[int], namespace: Namespace) -> int:
        names = run_hashes(root_hash(namespace), np.asarray(tokens, "<u4").tobytes(), block_size=BLOCK_SIZE)
        return next((index for index, name in enumerate(names) if name not in self.blocks), len(names))


class Followed:
    """A cache, its translator and a router that follows."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.cache = RadixCache(num_blocks, BLOCK_SIZE, events=EventLog())
        self.translator = Translator(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.router = Router()
        self.router.take(self.translator.restart(self.cache.snapshot()))
        self.seq = 0

    def follow(self) -> list[Any]:
        assert self.cache.events is not None
        news = self.cache.events.since(self.seq)
        events = [translated for event in news for translated in self.translator.translate(event)]
        self.seq = self.cache.events.last_seq
        self.router.take(events)
        self.translator.check()
        return events

    def put(self, tokens: list[int], namespace: Namespace = DEFAULT_NAMESPACE) -> None:
        sequence = self.cache.acquire(tokens, namespace=namespace)
        self.cache.commit(sequence, len(tokens))
        self.cache.release(sequence)


def test_scenario_59_each_commit_names_its_own_tokens_and_parent() -> None:
    followed = Followed()
    sequence = followed.cache.acquire([1, 2, 3, 4, 5, 6])
    followed.cache.commit(sequence, 3)
    (first,) = followed.follow()
    followed.cache.commit(sequence, 6)
    (second,) = followed.follow()
    assert (first.parent, first.tokens) == (None, [1, 2])
    assert (second.parent, second.tokens) == (first.hashes[0], [3, 4, 5, 6])
    assert first.hashes + second.hashes == run_hashes(
        root_hash(Namespace()), np.arange(1, 7, dtype="<u4").tobytes(), block_size=BLOCK_SIZE
    )


def test_two_managers_name_equal_prefixes_alike_and_nothing_else() -> None:
    left, right = Followed(), Followed(32)
    right.put([9, 9, 9, 9])
    for followed in (left, right):
        followed.put([1, 2, 3, 4])
        followed.put([1, 2, 3, 4], TENANT)
        followed.follow()
    assert set(left.router.blocks) < set(right.router.blocks)
    assert len(left.router.blocks) == 4, "namespaces do not share names"


def test_namespaces_are_seen_to_differ_but_not_told() -> None:
    followed = Followed()
    followed.put([1, 2, 3, 4], TENANT)
    (event,) = followed.follow()
    assert event.adapter == "lora-1"
    assert event.extra_keys == [[f"namespace:{root_hash(TENANT):016x}"], None]
    assert "s3cret" not in str(event)
    assert "acme" not in str(event)
    followed.put([1, 2], Namespace(model="m", adapter="lora-1"))
    (plain,) = followed.follow()
    assert plain.extra_keys == [None], "model and adapter have places of their own"


def test_eviction_removes_the_names_of_the_tail() -> None:
    followed = Followed()
    followed.put([1, 2, 3, 4, 5, 6])
    followed.follow()
    followed.cache.evict(1)
    (removed,) = followed.follow()
    names = run_hashes(root_hash(Namespace()), np.arange(1, 7, dtype="<u4").tobytes(), block_size=BLOCK_SIZE)
    assert removed == BlocksRemoved(names[2:])
    assert followed.router.overlap([1, 2, 3, 4, 5, 6], Namespace()) == 2


def test_scenario_61_a_flush_of_one_namespace_removes_its_names_and_a_flush_of_all_clears() -> None:
    followed = Followed()
    followed.put([1, 2, 3, 4])
    followed.put([1, 2, 3, 4], TENANT)
    followed.follow()
    followed.cache.flush(TENANT)
    events = followed.follow()
    assert sum(len(event.hashes) for event in events) == 2
    assert followed.router.overlap([1, 2, 3, 4], TENANT) == 0
    assert followed.router.overlap([1, 2, 3, 4], Namespace()) == 2
    followed.cache.flush()
    assert AllCleared() in followed.follow()
    assert followed.router.blocks == {}


def test_a_cleared_namespace_that_was_never_announced_says_nothing() -> None:
    translator = Translator(num_blocks=4, block_size=2)
    assert list(translator.translate(Cleared(1, TENANT, 1))) == []


def test_long_runs_are_announced_in_pieces_that_follow_each_other() -> None:
    followed = Followed(3 * MAX_BLOCKS_PER_EVENT)
    tokens = list(range(2 * BLOCK_SIZE * MAX_BLOCKS_PER_EVENT + BLOCK_SIZE))
    followed.put(tokens, TENANT)
    events = followed.follow()
    assert [len(event.hashes) for event in events] == [MAX_BLOCKS_PER_EVENT, MAX_BLOCKS_PER_EVENT, 1]
    assert [event.extra_keys[0] is None for event in events] == [False, True, True]
    assert followed.router.overlap(tokens, TENANT) == len(tokens) // BLOCK_SIZE


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_router_that_follows_knows_what_the_cache_knows(data: st.DataObject) -> None:
    followed = Followed(12)
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    spaces = st.sampled_from([Namespace(), TENANT])
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["put", "put", "put", "evict", "flush", "flush all", "resync"])):
            case "put":
                try:
                    followed.put(data.draw(prompts), data.draw(spaces))
                except PoolExhausted:
                    continue
            case "evict":
                followed.cache.evict(data.draw(st.integers(1, 4)))
            case "flush":
                followed.cache.flush(data.draw(spaces))
            case "flush all":
                followed.cache.flush()
            case "resync":
                snapshot = followed.cache.snapshot()
                followed.router.take(followed.translator.restart(snapshot))
                followed.seq = snapshot.seq
        if data.draw(st.booleans()):
            followed.follow()
    followed.follow()
    assert len(followed.router.blocks) == followed.cache.stats().tree_blocks
    for _ in range(5):
        tokens, namespace = data.draw(prompts), data.draw(spaces)
        matched = followed.cache.match(tokens, namespace=namespace).tokens
        assert (
            followed.router.overlap(tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE], namespace) * BLOCK_SIZE == matched
        )


STORED = BlocksStored(
    hashes=[7, 2**64 - 1],
    parent=3,
    tokens=[1, 2, 3, 4],
    block_size=2,
    adapter="lora",
    extra_keys=[["namespace:x"], None],
)


def test_maps_have_the_fields_that_vllm_0_33_writes() -> None:
    assert message(STORED, encoding=Encoding.MAP, medium="GPU") == {
        "type": "BlockStored",
        "block_hashes": [7, 2**64 - 1],
        "parent_block_hash": 3,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "lora",
        "extra_keys": [["namespace:x"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert message(BlocksRemoved([7]), encoding=Encoding.MAP, medium="CPU") == {
        "type": "BlockRemoved",
        "block_hashes": [7],
        "medium": "CPU",
        "group_idx": 0,
    }
    assert message(AllCleared(), encoding=Encoding.MAP, medium="GPU") == {"type": "AllBlocksCleared"}


def test_arrays_have_the_order_of_older_versions() -> None:
    stored = message(STORED, encoding=Encoding.ARRAY, medium="GPU")
    assert stored == ["BlockStored", [7, 2**64 - 1], 3, [1, 2, 3, 4], 2, None, "GPU", "lora"]
    assert message(BlocksRemoved([7]), encoding=Encoding.ARRAY, medium="GPU") == ["BlockRemoved", [7], "GPU"]
    assert message(AllCleared(), encoding=Encoding.ARRAY, medium="GPU") == ["AllBlocksCleared"]
    assert batch([stored], timestamp=1.5, rank=2) == [1.5, [stored], 2]


def test_the_replay_buffer_keeps_the_newest_within_both_bounds() -> None:
    buffer = ReplayBuffer(3, max_bytes=10)
    assert (buffer.first_seq, buffer.next_seq, list(buffer.since(0))) == (0, 0, [])
    assert [buffer.append(payload) for payload in (b"a", b"b", b"c", b"d")] == [0, 1, 2, 3]
    assert list(buffer.since(0)) == [(1, b"b"), (2, b"c"), (3, b"d")]
    assert list(buffer.since(3)) == [(3, b"d")]
    assert list(buffer.since(4)) == []
    buffer.append(b"x" * 9)
    assert list(buffer.since(0)) == [(3, b"d"), (4, b"x" * 9)]
    buffer.append(b"y" * 11)
    assert (buffer.first_seq, buffer.next_seq) == (6, 6)


@pytest.mark.parametrize("pair", [("a", "b"), ("model", "adapter")])
def test_no_field_can_stand_for_another(pair: tuple[str, str]) -> None:
    assert root_hash(Namespace(model=pair[0], adapter=pair[1])) != root_hash(Namespace(model=pair[1], adapter=pair[0]))
    assert root_hash(Namespace(cache_salt="x")) != root_hash(Namespace(tenant="x"))
