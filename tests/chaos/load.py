"""A client under chaos, as a process: `python load.py ROLE ADDRESS POOL SEED`.

The pool is a file of one 32-byte stamp per block; the stamp stands for the block's KV. Whoever computes a block writes
the hash of all tokens up to the block's end; whoever is told that a block is cached checks that the stamp is that hash.
A stale or foreign byte anywhere shows as a wrong stamp: the process prints STALE and ends with code 7.

Workers compute: they acquire in a session that reports their steps, write in the steps, commit and release. Frontends
hold what is cached and read it again and again; what they read counts only if a call afterwards shows that they still
held it. All go on when the manager goes and comes back.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import random
import sys
import time

import numpy as np

from radixpool.radix import PoolExhausted, UnknownSequence
from radixpool.rpc import operations as ops
from radixpool.rpc.client import Client, ClientOptions, ClientRole, Session
from radixpool.rpc.errors import Draining, Fenced, ManagerUnavailable

STAMP_BYTES = 32
BLOCK_SIZE = 4
STALE_EXIT_CODE = 7
GONE = (Fenced, UnknownSequence, ManagerUnavailable, Draining)


class Pool:
    """The stamps, mapped from the file that all share."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(fd, 0)
        os.close(fd)

    def write(self, block: int, stamp: bytes) -> None:
        self._map[block * STAMP_BYTES : (block + 1) * STAMP_BYTES] = stamp

    def read(self, block: int) -> bytes:
        return self._map[block * STAMP_BYTES : (block + 1) * STAMP_BYTES]


def stamp(tokens: list[int]) -> bytes:
    return hashlib.blake2b(np.array(tokens, dtype="<u4").tobytes(), digest_size=STAMP_BYTES).digest()


def compute(pool: Pool, tokens: list[int], table: np.ndarray, first_token: int) -> None:
    """Write the stamps of the full blocks from `first_token` on."""
    for index in range(first_token // BLOCK_SIZE, len(tokens) // BLOCK_SIZE):
        pool.write(int(table[index]), stamp(tokens[: (index + 1) * BLOCK_SIZE]))


def check(found: bytes, tokens: list[int], index: int) -> None:
    """End the process when a cached block does not hold what its tokens say."""
    if found != stamp(tokens[: (index + 1) * BLOCK_SIZE]):
        print(f"STALE block at index {index} of a prompt of {len(tokens)} tokens", flush=True)
        os._exit(STALE_EXIT_CODE)


def prompt(chance: random.Random) -> list[int]:
    """Return the beginning of one of 30 texts: together they are more than the pool holds, and all are asked for."""
    text = random.Random(chance.randrange(30))
    return [text.randrange(4) for _ in range(48)][: chance.randrange(9, 49)]


def frontend(client: Client, pool: Pool, chance: random.Random) -> None:
    """Hold what is cached of a prompt for a while; what is held must not change."""
    tokens = prompt(chance)
    with client.acquire(tokens, partial=False) as seq:
        read = [pool.read(int(block)) for block in seq.block_table[: seq.cached_tokens // BLOCK_SIZE]]
        time.sleep(chance.random() * 0.05)
        again = [pool.read(int(block)) for block in seq.block_table[: seq.cached_tokens // BLOCK_SIZE]]
        seq.extend([1])  # raises when the lease was over by now: then what was read counts for nothing
        for index, stamps in enumerate(zip(read, again, strict=True)):
            check(stamps[0], tokens, index)
            check(stamps[1], tokens, index)
        for fork in client.fork(seq.handle, 2).forks:
            client.release(fork.handle)


def worker(session: Session, pool: Pool, chance: random.Random) -> None:
    """Run steps over a few sequences for ever: name them all in a batch, then write, and commit in the next batch."""
    running: dict[bytes, list[int]] = {}
    tables: dict[bytes, np.ndarray] = {}
    written: dict[bytes, int] = {}
    for step in itertools.count():
        tokens = prompt(chance)
        commits: list[ops.Operation] = [ops.Commit(handle, len(running[handle])) for handle in running]
        *results, acquired = session.batch([*commits, ops.Acquire(tokens)], steps=ops.StepReport(step, step + 1))
        for handle, result in zip(list(running), results, strict=True):
            if isinstance(result, ops.Committed):
                tables[handle] = remapped(tables[handle], result)
            else:
                del running[handle]
        if isinstance(acquired, ops.Acquired):
            running[acquired.handle], tables[acquired.handle] = tokens, acquired.block_table
            written[acquired.handle] = acquired.cached_tokens
            for index in range(acquired.cached_tokens // BLOCK_SIZE):
                check(pool.read(int(acquired.block_table[index])), tokens, index)
        time.sleep(chance.random() * 0.03)  # a step takes its time, and may be frozen in the middle of it
        for handle, own in running.items():
            compute(pool, own, tables[handle], written[handle])
            written[handle] = len(own)
        for handle in list(running)[: max(0, len(running) - 4)]:
            own = running.pop(handle)
            found = [pool.read(int(block)) for block in tables[handle][: written[handle] // BLOCK_SIZE]]
            (released,) = session.batch([ops.Release(handle, after_step=step + 1)])
            if isinstance(released, ops.Released):  # then it was still ours when we read
                for index, stamps in enumerate(found):
                    check(stamps, own, index)


def remapped(table: np.ndarray, result: ops.Committed) -> np.ndarray:
    """Return the block table after a commit."""
    table = table.copy()
    for remap in result.remaps:
        table[remap.block_index] = remap.to_block
    return table


def main() -> None:
    role, address, path, seed = sys.argv[1:5]
    pool, chance = Pool(path), random.Random(int(seed))
    kind = ClientRole.WORKER if role == "worker" else ClientRole.FRONTEND
    options = ClientOptions(name=f"{role} {seed}", role=kind, client_id=os.urandom(16), timeout_s=5.0)
    print("ready", flush=True)
    while True:
        try:
            with Client(address, options=options) as client:
                if role == "worker":
                    with client.session() as session:
                        worker(session, pool, chance)
                while role != "worker":
                    with contextlib.suppress(PoolExhausted):
                        frontend(client, pool, chance)
        except GONE:
            time.sleep(0.02)


if __name__ == "__main__":
    main()
