"""What publishing KV events costs: per block in the publisher, and for a manager that commits while it publishes.

python bench/kv_events.py [--blocks N] [--rounds N]

Prints microseconds a block for naming, translating and encoding, then how long commits of a cache take without and with
a publisher that follows it and one subscriber, alternating.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import zmq

from radixpool.radix import EventLog, RadixCache
from radixpool.rpc.kv_events.hashes import run_hashes
from radixpool.rpc.kv_events.messages import Encoding, batch, message
from radixpool.rpc.kv_events.publisher import KvEventPublisher, PublisherOptions
from radixpool.rpc.kv_events.translator import Translator

BLOCK_SIZE = 16
RUN_BLOCKS = 256
PACE = 50
"""Commits a second: 50 prompts of 4,096 new tokens."""


def fill(cache: RadixCache, num_blocks: int, *, first: int = 0) -> None:
    """Commit runs of RUN_BLOCKS blocks that share nothing."""
    for start in range(first, first + num_blocks // RUN_BLOCKS):
        tokens = np.arange(RUN_BLOCKS * BLOCK_SIZE, dtype=np.uint32) + start * 7919
        sequence = cache.acquire(tokens.tobytes())
        cache.commit(sequence, len(tokens))
        cache.release(sequence)


def microseconds_a_block(act: Callable[[], object], num_blocks: int) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) / num_blocks * 1e6


def announcement(num_blocks: int) -> None:
    cache = RadixCache(num_blocks, BLOCK_SIZE, events=EventLog())
    fill(cache, num_blocks)
    snapshot_us = microseconds_a_block(cache.snapshot, num_blocks)
    snapshot = cache.snapshot()
    tokens = bytes(4 * BLOCK_SIZE * num_blocks)
    naming_us = microseconds_a_block(lambda: run_hashes(1, tokens, block_size=BLOCK_SIZE), num_blocks)
    events: list[Any] = []
    translator = Translator(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    whole_us = microseconds_a_block(lambda: events.extend(translator.restart(snapshot)), num_blocks)

    def encode() -> None:
        for event in events:
            messages = [message(event, encoding=Encoding.MAP, medium="GPU")]
            msgpack.packb(batch(messages, timestamp=0.0, rank=0))

    encoding_us = microseconds_a_block(encode, num_blocks)
    print(f"{num_blocks} blocks of {BLOCK_SIZE} tokens, us a block:")
    print(f"  snapshot under the lock {snapshot_us:.3f}, naming {naming_us:.2f}, ", end="")
    print(f"naming and translating {whole_us:.2f}, encoding {encoding_us:.2f}")


class Source:
    """A cache behind a lock."""

    def __init__(self, num_blocks: int) -> None:
        self.lock = threading.Lock()
        self.cache = RadixCache(num_blocks, BLOCK_SIZE, events=EventLog())

    def last_seq(self) -> int:
        return self.cache.events.last_seq

    def since(self, seq: int) -> Any:
        with self.lock:
            return self.cache.events.since(seq)

    def snapshot(self) -> Any:
        with self.lock:
            return self.cache.snapshot()


def paced_latencies_us(source: Source, *, commits: int, first: int) -> list[float]:
    """Commit RUN_BLOCKS new blocks PACE times a second, as a fast node would; return how long each took."""
    latencies = []
    due = time.perf_counter()
    for run in range(commits):
        due += 1 / PACE
        time.sleep(max(0.0, due - time.perf_counter()))
        start = time.perf_counter()
        with source.lock:
            fill(source.cache, RUN_BLOCKS, first=first + run)
        latencies.append((time.perf_counter() - start) * 1e6)
    return latencies


def interference(num_blocks: int, rounds: int) -> None:
    quiet, published = Source(num_blocks), Source(num_blocks)
    figures: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(prefix="rpk", dir="/tmp") as folder, zmq.Context() as context:
        options = PublisherOptions(endpoint=f"ipc://{folder}/e")
        publisher = KvEventPublisher(published, options, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        publisher.start()
        with context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(publisher.endpoint)
            time.sleep(1)
            for round_ in range(rounds):
                figures["without"] += paced_latencies_us(quiet, commits=PACE, first=round_ * PACE)
                figures["with"] += paced_latencies_us(published, commits=PACE, first=round_ * PACE)
                while subscriber.poll(100):
                    subscriber.recv_multipart()
        publisher.close()
    print(f"acquire + commit + release of {RUN_BLOCKS} new blocks, {PACE} a second, us:")
    for name, values in figures.items():
        values.sort()
        p50, p99 = values[len(values) // 2], values[len(values) * 99 // 100]
        print(f"  {name:<8} a publisher: p50 {p50:.0f}, p99 {p99:.0f}, mean {statistics.mean(values):.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    announcement(arguments.blocks)
    interference(min(arguments.blocks, 16_384), arguments.rounds)


if __name__ == "__main__":
    main()
