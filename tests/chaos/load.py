"""A client under chaos, as a process: `python load.py ROLE ADDRESS COUNTERS INDEX SEED`.

The real pool holder's memory is mapped as a worker maps it. Each token's KV is a stamp of 32 bytes: the hash of all
tokens up to it. Whoever computes a token writes its stamp; whoever is told that tokens are cached checks that the
stamps are those of its own prompt. A stale or foreign byte anywhere shows: the process prints STALE and ends with 7.

Workers compute: they acquire in a session that reports their steps, run copy orders, write in the steps, commit and
release. Frontends hold what is cached and read it again and again; what they read counts only if a call afterwards
shows that they still held it. All go on when manager or pool holder go and come back, as our worker does: register,
then map the pool.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import itertools
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from radixpool.radix import PoolExhausted, UnknownSequence
from radixpool.rpc import operations as ops
from radixpool.rpc.client import Client, ClientOptions, ClientRole, RetryOptions, Session, Step
from radixpool.rpc.errors import Draining, Fenced, ManagerUnavailable, PoolUnavailable, ReplyExpired
from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.pool.geometry import pool_bytes, pool_shape
from radixpool.rpc.pool.memory import map_memfd
from radixpool.rpc.pool.sockets import DescriptorRefused, receive_descriptor
from radixpool.rpc.pool_types import MemfdAttachment, PoolSpec

STAMP_BYTES = 32
BLOCK_SIZE = 4
STALE_EXIT_CODE = 7
GONE = (Fenced, UnknownSequence, ManagerUnavailable, Draining, PoolUnavailable, DescriptorRefused, ReplyExpired)
"""What passes when the other processes are back."""
REGISTERED, ATTACHED = failpoint("worker.registered"), failpoint("worker.attached")
LAUNCHED, WRITTEN = failpoint("worker.step.launched"), failpoint("worker.step.written")
REPORTED = failpoint("worker.step.reported")
"""The steps of a worker in rpc/worker, whose place the worker below takes."""


class PoolReplaced(Exception):
    """The manager has another pool than the one mapped here."""


class Pool:
    """The stamps of all tokens in the memory that the pool holder hands out.

    `verified` counts the tokens that were found right, for all to see.
    """

    def __init__(self, client: Client, verified: npt.NDArray[np.int64]) -> None:
        pool = client.attach_pool(PoolSpec(block_size=BLOCK_SIZE))
        assert isinstance(pool.attachment, MemfdAttachment)
        descriptor = receive_descriptor(pool.attachment.socket_path, tag=pool.pool_id)
        try:
            memory = map_memfd(descriptor, pool_bytes(pool.spec))
        finally:
            os.close(descriptor)
        self.pool_id = pool.pool_id
        self._verified = verified
        everything = np.frombuffer(memory, dtype=np.uint8).reshape(*pool_shape(pool.spec)[:-1], STAMP_BYTES)
        self._stamps = everything[0, 0, :, 0]  # the keys of the first layer's only head: [block, token, byte]

    def write(self, tokens: list[int], table: npt.NDArray[np.int32], first: int) -> None:
        """Compute the tokens from `first` on."""
        at = np.arange(first, len(tokens))
        self._stamps[table[at // BLOCK_SIZE], at % BLOCK_SIZE] = stamps(tokens)[first:]

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Run a copy order."""
        self._stamps[target, :num_tokens] = self._stamps[source, :num_tokens]

    def read(self, table: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.uint8]:
        """Return the stamps of the first `count` tokens."""
        at = np.arange(count)
        found: npt.NDArray[np.uint8] = self._stamps[table[at // BLOCK_SIZE], at % BLOCK_SIZE]
        return found

    def check(self, found: npt.NDArray[np.uint8], tokens: list[int]) -> None:
        """End the process when cached tokens do not hold what they say."""
        wrong = (found != stamps(tokens)[: len(found)]).any(axis=1)
        if wrong.any():
            print(f"STALE token {int(wrong.argmax())} of {len(found)} cached of {len(tokens)}", flush=True)
            os._exit(STALE_EXIT_CODE)
        self._verified += len(found)


def stamps(tokens: list[int]) -> npt.NDArray[np.uint8]:
    """Return the stamp of each token, [tokens, STAMP_BYTES]."""
    prefix = hashlib.blake2b(digest_size=STAMP_BYTES)
    digests = []
    for token in tokens:
        prefix.update(token.to_bytes(4, "little"))
        digests.append(prefix.digest())
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(tokens), STAMP_BYTES)


def prompt(chance: random.Random) -> list[int]:
    """Return the beginning of one of 30 texts: together they are more than the pool holds, and all are asked for."""
    text = random.Random(chance.randrange(30))
    return [text.randrange(4) for _ in range(48)][: chance.randrange(9, 49)]


def frontend(client: Client, pool: Pool, chance: random.Random) -> None:
    """Hold what is cached of a prompt for a while; what is held must not change."""
    tokens = prompt(chance)
    with client.acquire(tokens) as seq:
        # A pool that is registered later ends this lease. So it is this one as long as the sequence lives.
        registered = client.get_pool()
        if registered is None or registered.pool_id != pool.pool_id:
            raise PoolReplaced
        read = pool.read(seq.block_table, seq.cached_tokens)
        time.sleep(chance.random() * 0.05)
        again = pool.read(seq.block_table, seq.cached_tokens)
        seq.extend([1])  # raises when the lease was over by now: then what was read counts for nothing
        pool.check(read, tokens)
        pool.check(again, tokens)
        for fork in client.fork(seq.handle, 2).forks:
            client.release(fork.handle)


class Running:
    """One sequence of a worker."""

    def __init__(self, tokens: list[int], acquired: ops.Acquired) -> None:
        self.tokens = tokens
        self.table = acquired.block_table
        self.written = acquired.cached_tokens

    def committed(self, remaps: Iterable[tuple[int, int]]) -> None:
        """Take over the remaps of a commit: positions in the table and the blocks that they name now."""
        self.table = self.table.copy()
        for block_index, block in remaps:
            self.table[block_index] = block


def commit_singly(
    session: Session, running: dict[bytes, Running], acquire: ops.Acquire, steps: ops.StepReport
) -> ops.Result | Exception:
    """Commit what runs, an operation each, and acquire one more. Forgets what is gone."""
    commits: list[ops.Operation] = [ops.Commit(handle, len(own.tokens)) for handle, own in running.items()]
    *results, acquired = session.batch([*commits, acquire], steps=steps)
    for handle, result in zip(list(running), results, strict=True):
        if isinstance(result, ops.Committed):
            running[handle].committed((remap.block_index, remap.to_block) for remap in result.remaps)
        else:
            del running[handle]
    return acquired


def commit_in_columns(
    session: Session, running: dict[bytes, Running], acquire: ops.Acquire, steps: ops.StepReport
) -> ops.Result | Exception:
    """Do the same in columns."""
    handles = list(running)
    step = Step(handles=handles, commit_upto_tokens=[len(own.tokens) for own in running.values()])
    stepped = session.step(step, [acquire], steps=steps)
    remaps = zip(stepped.remap_block_indices.tolist(), stepped.remap_to_blocks.tolist(), strict=True)
    for row, remap in zip(stepped.remap_rows.tolist(), remaps, strict=True):
        running[handles[row]].committed([remap])
    for row in stepped.errors:
        del running[handles[row]]
    return stepped.results[0]


def worker(session: Session, pool: Pool, chance: random.Random) -> None:
    """Run steps over a few sequences for ever: name them all in a batch, then write, and commit in the next batch."""
    running: dict[bytes, Running] = {}
    for step in itertools.count():
        tokens = prompt(chance)
        acquire = ops.Acquire(tokens, partial=chance.random() < 0.5)
        commit = chance.choice((commit_singly, commit_in_columns))
        acquired = commit(session, running, acquire, ops.StepReport(step, step + 1))
        REPORTED()
        if isinstance(acquired, ops.Acquired):
            for order in acquired.copies:
                pool.copy(order.src, order.dst, order.num_tokens)
            running[acquired.handle] = Running(tokens, acquired)
            pool.check(pool.read(acquired.block_table, acquired.cached_tokens), tokens)
        LAUNCHED()
        time.sleep(chance.random() * 0.03)  # a step takes its time, and may be frozen in the middle of it
        for own in running.values():
            pool.write(own.tokens, own.table, own.written)
            own.written = len(own.tokens)
        WRITTEN()
        for handle in list(running)[: max(0, len(running) - 4)]:
            own = running.pop(handle)
            found = pool.read(own.table, own.written)
            (released,) = session.batch([ops.Release(handle, after_step=step + 1)])
            if isinstance(released, ops.Released):  # then it was still ours when we read
                pool.check(found, own.tokens)


def run_worker(client: Client, verified: npt.NDArray[np.int64], chance: random.Random) -> None:
    with client.session() as session:
        REGISTERED()
        pool = Pool(client, verified)
        ATTACHED()
        worker(session, pool, chance)


def run_frontend(client: Client, verified: npt.NDArray[np.int64], chance: random.Random) -> None:
    pool = Pool(client, verified)
    while True:
        with contextlib.suppress(PoolExhausted):
            frontend(client, pool, chance)


def main() -> None:
    role, address, counters, index, seed = sys.argv[1:6]
    run = run_worker if role == "worker" else run_frontend
    kind = ClientRole.WORKER if role == "worker" else ClientRole.FRONTEND
    chance = random.Random(int(seed))
    with open(counters, "r+b") as file:  # noqa: PTH123
        verified = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int64)[int(index) : int(index) + 1]
    faulthandler.register(signal.SIGUSR1)
    options = ClientOptions(
        name=f"{role} {seed}",
        role=kind,
        client_id=os.urandom(16),
        timeout_s=5.0,
        retry=RetryOptions(total_s=1.0),
    )
    while True:
        try:
            with Client(address, options=options) as client:
                run(client, verified, chance)
        except (*GONE, PoolReplaced):
            time.sleep(0.02)


if __name__ == "__main__":
    main()
