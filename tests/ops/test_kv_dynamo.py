"""NVIDIA Dynamo's router, fed by our events alone, knows which node holds which prefix.

`make interop` installs ai-dynamo-runtime (230 MB, so it is not among the development packages) and runs this.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from radixpool.radix import EventLog, Namespace, RadixCache
from radixpool.rpc.kv_events.messages import AllCleared, BlocksRemoved, BlocksStored, Encoding
from radixpool.rpc.kv_events.translator import Translator

pytest.importorskip("zmq", reason="pyzmq is not installed: pip install radixpool[events]")
dynamo = pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed: make interop")

from radixpool.rpc.kv_events.publisher import KvEventPublisher, PublisherOptions  # noqa: E402

BLOCK_SIZE = 16
NUM_BLOCKS = 256
PROMPT = list(range(1000, 1000 + 8 * BLOCK_SIZE))
WAIT_S = 15.0


class Node:
    """One node's cache with its publisher."""

    def __init__(self, stack: ExitStack, encoding: Encoding, *, buffer_batches: int = 100) -> None:
        self.lock = threading.Lock()
        self.cache = RadixCache(NUM_BLOCKS, BLOCK_SIZE, events=EventLog())
        options = PublisherOptions(
            endpoint="tcp://127.0.0.1:*",
            replay_endpoint="tcp://127.0.0.1:*",
            encoding=encoding,
            buffer_batches=buffer_batches,
        )
        self.publisher = KvEventPublisher(self, options, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        stack.callback(self.publisher.close)

    def last_seq(self) -> int:
        return self.cache.events.last_seq

    def since(self, seq: int) -> Any:
        with self.lock:
            return self.cache.events.since(seq)

    def snapshot(self) -> Any:
        with self.lock:
            return self.cache.snapshot()

    def put(self, tokens: list[int], namespace: Namespace | None = None) -> None:
        with self.lock:
            sequence = self.cache.acquire(tokens, namespace=namespace or Namespace())
            self.cache.commit(sequence, len(tokens))
            self.cache.release(sequence)

    def evict(self, num_blocks: int) -> None:
        with self.lock:
            self.cache.evict(num_blocks)

    def registration(self, worker_id: int) -> dict[str, Any]:
        return {
            "worker_id": worker_id,
            "model_name": "m",
            "endpoint": f"http://127.0.0.1:{9000 + worker_id}",
            "block_size": BLOCK_SIZE,
            "kv_events_endpoints": {0: self.publisher.endpoint},
            "replay_endpoint": self.publisher.replay_endpoint,
            "total_kv_blocks": NUM_BLOCKS,
            "max_num_batched_tokens": 2048,
        }


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def overlaps(service: Any, tokens: list[int]) -> dict[int, int]:
    """Return how many leading blocks of `tokens` each worker holds."""
    answer = await service.overlap_scores({"model_name": "m", "token_ids": tokens})
    return {row["worker_id"]: row["device_blocks"] for row in answer["workers"]}


async def eventually(service: Any, tokens: list[int], wanted: dict[int, int]) -> None:
    deadline = time.monotonic() + WAIT_S
    while (found := await overlaps(service, tokens)) != wanted:
        assert time.monotonic() < deadline, f"wanted {wanted}, the router says {found}"
        await asyncio.sleep(0.05)


@pytest.fixture
def router(stack: ExitStack) -> Callable[[Callable[[Any], Awaitable[None]]], None]:
    """Run a scenario with a selection service of its own."""

    def run(scenario: Callable[[Any], Awaitable[None]]) -> None:
        async def body() -> None:
            service = dynamo.SelectionService(indexer_threads=1)
            stack.callback(service.shutdown)
            await scenario(service)

        asyncio.run(body())

    return run


@pytest.mark.parametrize("encoding", list(Encoding))
def test_the_selection_service_scores_our_nodes_and_sends_requests_to_the_better(
    stack: ExitStack, router: Callable[..., None], encoding: Encoding
) -> None:
    async def scenario(service: Any) -> None:
        left, right = Node(stack, encoding), Node(stack, encoding)
        for worker_id, node in ((1, left), (2, right)):
            await service.upsert_worker(node.registration(worker_id))
            node.publisher.start()
        left.put(PROMPT)
        right.put(PROMPT[: 2 * BLOCK_SIZE])
        await eventually(service, PROMPT, {1: 8, 2: 2})
        assert (await service.select({"model_name": "m", "token_ids": PROMPT}))["worker_id"] == 1
        left.evict(7)
        await eventually(service, PROMPT, {1: 1, 2: 2})
        assert (await service.select({"model_name": "m", "token_ids": PROMPT}))["worker_id"] == 2
        with right.lock:
            right.cache.flush()
        await eventually(service, PROMPT, {1: 1, 2: 0})
        left.put(PROMPT)
        await eventually(service, PROMPT, {1: 8, 2: 0})

    router(scenario)


def test_a_router_that_comes_late_catches_up_by_replay(stack: ExitStack, router: Callable[..., None]) -> None:
    async def scenario(service: Any) -> None:
        node = Node(stack, Encoding.MAP)
        node.publisher.start()
        for start in range(5):
            node.put([start, *PROMPT[1:]])
            await asyncio.sleep(0.05)
        await service.upsert_worker(node.registration(1))
        await asyncio.sleep(0.3)
        node.put(list(range(BLOCK_SIZE)))
        await eventually(service, [3, *PROMPT[1:]], {1: 8})

    router(scenario)


def test_a_router_that_comes_too_late_for_replay_gets_the_whole_state(
    stack: ExitStack, router: Callable[..., None]
) -> None:
    async def scenario(service: Any) -> None:
        node = Node(stack, Encoding.MAP, buffer_batches=2)
        node.publisher.start()
        for start in range(8):
            node.put([start, *PROMPT[1:]])
            await asyncio.sleep(0.05)
        await service.upsert_worker(node.registration(1))
        await asyncio.sleep(0.3)
        node.put(list(range(BLOCK_SIZE)))
        for start in range(8):
            await eventually(service, [start, *PROMPT[1:]], {1: 8})

    router(scenario)


def test_namespaces_with_secrets_are_taken_in_too(stack: ExitStack, router: Callable[..., None]) -> None:
    async def scenario(service: Any) -> None:
        node = Node(stack, Encoding.MAP)
        await service.upsert_worker(node.registration(1))
        node.publisher.start()
        node.put(PROMPT, Namespace(tenant="acme", cache_salt="s3cret"))
        await eventually(service, PROMPT, {1: 8})

    router(scenario)


def test_the_radix_tree_takes_our_names(stack: ExitStack) -> None:
    """Dynamo's index without its transport: our names beside its own hashes of the tokens."""
    tree = dynamo.RadixTree()
    local = dynamo.compute_block_hash_for_seq(PROMPT, BLOCK_SIZE)
    event_ids = itertools.count()

    def apply(worker: int, event: Any) -> None:
        match event:
            case BlocksStored():
                hashes = dynamo.compute_block_hash_for_seq(list(event.tokens), BLOCK_SIZE)
                pairs = zip(event.hashes, hashes, strict=True)
                blocks = [{"block_hash": name, "tokens_hash": tokens} for name, tokens in pairs]
                data: Any = {"stored": {"parent_hash": event.parent, "blocks": blocks}}
            case BlocksRemoved(names):
                data = {"removed": {"block_hashes": list(names)}}
            case AllCleared():
                data = "cleared"
        tree.apply_event(worker, json.dumps({"event_id": next(event_ids), "data": data, "dp_rank": 0}).encode())

    def overlap() -> dict[int, int]:
        return {
            key[0] if isinstance(key, tuple) else key: value for key, value in tree.find_matches(local).scores.items()
        }

    nodes = [Node(stack, Encoding.MAP) for _ in range(2)]
    translators = [Translator(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) for _ in nodes]
    seen = [0, 0]

    def follow() -> None:
        for worker, (node, translator) in enumerate(zip(nodes, translators, strict=True)):
            for event in node.since(seen[worker]):
                for translated in translator.translate(event):
                    apply(worker, translated)
                seen[worker] = event.seq

    nodes[0].put(PROMPT)
    nodes[1].put(PROMPT[: 2 * BLOCK_SIZE])
    follow()
    assert overlap() == {0: 8, 1: 2}
    nodes[0].evict(3)
    nodes[1].put(PROMPT[: 4 * BLOCK_SIZE])
    follow()
    assert overlap() == {0: 5, 1: 4}
    nodes[0].cache.flush()
    follow()
    assert overlap() == {1: 4}
