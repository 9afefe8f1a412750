"""The blocking client of a manager: sequences, batches, sessions, the pool, and what operators ask.

It registers itself before the first call that changes something, and keeps its lease from a background thread until it
is closed. While the manager does not answer, calls are tried again (`RetryOptions`). After a manager's restart, or when
the lease was lost, calls that name a sequence raise Fenced or UnknownSequence, because their sequences are gone; the
next call registers the client again (`RemoteSequence.reacquire`). One client may be used from many threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import grpc

from radixpool.radix import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.media import MediaSpan
from radixpool.rpc import operations as ops
from radixpool.rpc.client import codec
from radixpool.rpc.client.channel import open_channel
from radixpool.rpc.client.heartbeat import Heartbeat
from radixpool.rpc.client.identity import Identity
from radixpool.rpc.client.operator import OperatorCalls
from radixpool.rpc.client.options import ClientOptions
from radixpool.rpc.client.retry import call_with_retries, lacks_room, until_room
from radixpool.rpc.client.sequence import RemoteSequence
from radixpool.rpc.client.session import Session
from radixpool.rpc.client.stepping import batch_request, batch_results, stepped
from radixpool.rpc.convert import pool_from_wire, pool_spec_to_wire, pool_to_wire
from radixpool.rpc.errors import Fenced
from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.pool_types import Pool, PoolSpec
from radixpool.rpc.status import error_from_rpc
from radixpool.rpc.step_columns import Step, Stepped
from radixpool.v1 import admin_pb2_grpc, cache_pb2, cache_pb2_grpc, pool_pb2, pool_pb2_grpc

Reply = TypeVar("Reply")
IN_FLIGHT_POLL_S: Final = 0.005
"""How often to ask whether another sequence has computed the prefix."""

_ACQUIRED = failpoint("client.acquired")


class Client(OperatorCalls):
    """A connection to one manager.

    Data path: acquire, extend, reserve, commit, release, match, get_block_tables, batch, step, session.
    Pool: register_pool, attach_pool, get_pool. Operators: info, stats, check, inspect_tree, inspect_block,
    inspect_sequence, list_clients. Life: close, or use it as a context manager.
    """

    def __init__(self, address: str, *, options: ClientOptions | None = None) -> None:
        self._options = options or ClientOptions()
        self._address = address
        self._channel = open_channel(address, self._options.security)
        self._cache = cache_pb2_grpc.CacheServiceStub(self._channel)
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._identity = Identity(self._options)
        self._lock = threading.Lock()
        self._heartbeat: Heartbeat | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the lease, which aborts what is still held, and close the channel. A second close does nothing."""
        with self._lock:
            heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        header = self._identity.bare_header()
        if header.epoch:
            self._identity.end_epoch(header.epoch)
            request = cache_pb2.UnregisterClientRequest(header=header)
            # When the manager is gone or has fenced us, the lease is over just the same.
            with contextlib.suppress(grpc.RpcError):
                self._cache.UnregisterClient(request, timeout=self._options.timeout_s)
        self._channel.close()

    # Data path.

    def acquire(
        self,
        tokens: ops.Tokens,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        reserve: int = 0,
        max_hit: int | None = None,
        media: Iterable[MediaSpan] = (),
        partial: bool = False,
        wait_s: float = 0.0,
    ) -> RemoteSequence:
        """Pin the cached prefix of `tokens` and allocate the rest, with room for `reserve` more tokens.

        `media` are contents that placeholder tokens stand for; `partial` also uses the beginning of a block that
        differs later (run `copies` first). While another sequence computes more of the prefix, wait up to `wait_s` for
        it instead of computing it again.

        Use it in a `with` statement: leaving it releases the sequence. Raises PoolExhausted, nothing changed.
        """
        operation = ops.Acquire(tokens, namespace, reserve, max_hit, tuple(media), partial)
        request = codec.acquire_request(operation)
        sequence = RemoteSequence(self, request, self.reacquire(request, wait_s=wait_s))
        _ACQUIRED()
        return sequence

    def reacquire(self, request: cache_pb2.AcquireRequest, *, wait_s: float = 0.0) -> ops.Acquired:
        """Send an acquire, once more in a new epoch if fenced; `RemoteSequence.reacquire` is for callers."""
        deadline = time.monotonic() + wait_s
        request.in_flight = cache_pb2.IN_FLIGHT_MODE_WAIT
        while time.monotonic() < deadline:
            reply = self._change_anew(self._cache.Acquire, request)
            if not reply.HasField("pending"):
                return codec.acquired(reply)
            time.sleep(IN_FLIGHT_POLL_S)
        request.in_flight = cache_pb2.IN_FLIGHT_MODE_UNSPECIFIED
        return codec.acquired(self._change_anew(self._cache.Acquire, request))

    def reacquire_when_there_is_room(self, request: cache_pb2.AcquireRequest) -> ops.Acquired:
        """Send an acquire as often as `RetryOptions` say while the pool is exhausted; for `RemoteSequence.resume`."""
        return call_with_retries(lambda: self.reacquire(request), until_room(self._options.retry), may_pass=lacks_room)

    def extend(self, handle: bytes, tokens: ops.Tokens) -> ops.Extended:
        """Append known tokens to a sequence. Raises PoolExhausted, nothing changed."""
        return codec.extended(self._change(self._cache.Extend, codec.extend_request(ops.Extend(handle, tokens))))

    def reserve(self, handle: bytes, num_tokens: int) -> ops.Reserved:
        """Make room for `num_tokens` beyond the present length. Raises PoolExhausted, nothing changed."""
        return codec.reserved(self._change(self._cache.Reserve, codec.reserve_request(ops.Reserve(handle, num_tokens))))

    def commit(self, handle: bytes, upto: int) -> ops.Committed:
        """Make the full blocks of the first `upto` tokens findable; apply the remaps of the result."""
        return codec.committed(self._change(self._cache.Commit, codec.commit_request(ops.Commit(handle, upto))))

    def rewind(self, handle: bytes, to: int, *, after_step: int | None = None) -> ops.Rewound:
        """Forget the tokens from `to` on. A worker's steps up to `after_step` may still touch what is given back."""
        request = codec.rewind_request(ops.Rewind(handle, to, after_step))
        return codec.rewound(self._change(self._cache.Rewind, request))

    def fork(self, handle: bytes, num_forks: int = 1) -> ops.Forked:
        """Make sequences that go on from where this one is; run the copy orders. Raises PoolExhausted."""
        return codec.forked(self._change(self._cache.Fork, codec.fork_request(ops.Fork(handle, num_forks))))

    def invalidate(self, handle: bytes, block_index: int) -> ops.Invalidated:
        """Declare that the data of one block of the table is bad."""
        request = codec.invalidate_request(ops.Invalidate(handle, block_index))
        return codec.invalidated(self._change(self._cache.Invalidate, request))

    def release(self, handle: bytes, *, after_step: int | None = None, commit_upto: int | None = None) -> ops.Released:
        """End a sequence; what was committed stays cached. A worker's steps up to `after_step` may still touch it.

        `commit_upto` commits so many leading tokens before, in the same call; when that is refused, it lives on.
        """
        request = codec.release_request(ops.Release(handle, after_step, commit_upto))
        return codec.released(self._change(self._cache.Release, request))

    def match(
        self, tokens: ops.Tokens, *, namespace: Namespace = DEFAULT_NAMESPACE, media: Iterable[MediaSpan] = ()
    ) -> ops.Matched:
        """Return how long a prefix of `tokens` is cached right now; holds nothing."""
        request = codec.match_request(ops.Match(tokens, namespace, tuple(media)))
        return codec.matched(self._read(self._cache.Match, request))

    def get_block_tables(self, handles: Iterable[bytes]) -> ops.BlockTables:
        """Return tokens and block tables of sequences that anybody acquired; errors stand in their place."""
        request = codec.block_tables_request(ops.GetBlockTables(tuple(handles)))
        return codec.block_tables(self._read(self._cache.GetBlockTables, request))

    def batch(
        self, operations: Iterable[ops.Operation], *, steps: ops.StepReport | None = None
    ) -> list[ops.Result | Exception]:
        """Run many operations in one call. One that fails gives an exception in its place and disturbs no other.

        A worker reports its `steps`: what is over counts before the operations, what it launches next after them.
        """
        request = batch_request(cache_pb2.BatchRequest, operations, steps)
        return batch_results(self._change(self._cache.Batch, request), request)

    def step(
        self, step: Step, operations: Iterable[ops.Operation] = (), *, steps: ops.StepReport | None = None
    ) -> Stepped:
        """Extend and commit many sequences at once, then run `operations`; `Session.step` does the same faster."""
        request = batch_request(cache_pb2.BatchRequest, operations, steps, step=step)
        return stepped(self._change(self._cache.Batch, request), request)

    def report_steps(self, steps: ops.StepReport) -> None:
        """Report a worker's steps when there is no batch to send; renews the lease too."""
        request = cache_pb2.HeartbeatRequest(steps=codec.step_report(steps))
        self._change(self._cache.Heartbeat, request)

    def session(self) -> Session:
        """Open a stream for many batches, answered in order: several times faster than calls. Close it, or `with`."""
        self._ensure_registered()
        return Session(self._cache.Session, self._identity, retry=self._options.retry, address=self._address)

    # The pool.

    def register_pool(self, pool: Pool) -> None:
        """Announce the pool of this process, which must stay open: the manager forgets it with the lease."""
        self._change_anew(self._pool.RegisterPool, pool_pb2.RegisterPoolRequest(pool=pool_to_wire(pool)))

    def attach_pool(self, expected: PoolSpec) -> Pool:
        """Return how to map the pool. Raises PoolMismatch naming the field, or PoolUnavailable."""
        request = pool_pb2.AttachPoolRequest(expected=pool_spec_to_wire(expected))
        return pool_from_wire(self._read(self._pool.AttachPool, request).pool)

    def get_pool(self) -> Pool | None:
        """Return the registered pool, or None."""
        reply = self._read(self._pool.GetPool, pool_pb2.GetPoolRequest())
        return pool_from_wire(reply.pool) if reply.HasField("pool") else None

    # Calls.

    def _read(self, method: Callable[..., Reply], request: Any) -> Reply:
        def attempt() -> Reply:
            try:
                return method(request, timeout=self._options.timeout_s)
            except grpc.RpcError as error:
                raise error_from_rpc(error, address=self._address) from None

        return call_with_retries(attempt, self._options.retry)

    def _change(self, method: Callable[..., Reply], request: Any) -> Reply:
        """Send a request under one number, however often; registers the client before it if need be."""
        self._ensure_registered()
        header = self._identity.begin()
        request.header.CopyFrom(header)
        try:
            return self._read(method, request)
        except Fenced:
            self._identity.end_epoch(header.epoch)
            raise
        finally:
            self._identity.end(header)

    def _change_anew(self, method: Callable[..., Reply], request: Any) -> Reply:
        """Do the same for a request that needs no earlier one: when fenced, it goes out once more in a new epoch."""
        try:
            return self._change(method, request)
        except Fenced:
            return self._change(method, request)

    def _ensure_registered(self) -> None:
        with self._lock:
            if self._identity.is_registered:
                return
            if self._heartbeat is not None:
                self._heartbeat.stop()
            reply = self._read(self._cache.RegisterClient, self._identity.registration())
            self._identity.start_epoch(reply.epoch)
            self._heartbeat = Heartbeat(self._renew_lease, ttl_ms=reply.lease_ttl_ms)
            self._heartbeat.start()

    def _renew_lease(self) -> None:
        request = cache_pb2.HeartbeatRequest(header=self._identity.bare_header())
        try:
            self._cache.Heartbeat(request, timeout=self._options.timeout_s)
        except grpc.RpcError as error:
            renewal_error = error_from_rpc(error, address=self._address)
            if isinstance(renewal_error, Fenced):
                self._identity.end_epoch(request.header.epoch)
            raise renewal_error from None
