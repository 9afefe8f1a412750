"""The blocking client of a manager: sequences, batches, sessions, the pool, and what operators ask.

It registers itself before the first call that changes something, and keeps its lease from a background thread until it
is closed. While the manager does not answer, calls are tried again (`RetryOptions`). After a manager's restart, or when
the lease was lost, calls that name a sequence raise Fenced or UnknownSequence, because their sequences are gone; the
next call registers the client again (`RemoteSequence.reacquire`). One client may be used from many threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc

from radixpool.radix import DEFAULT_NAMESPACE, Namespace
from radixpool.rpc import inspection
from radixpool.rpc import operations as ops
from radixpool.rpc.client import codec
from radixpool.rpc.client.channel import open_channel
from radixpool.rpc.client.heartbeat import Heartbeat
from radixpool.rpc.client.identity import Identity
from radixpool.rpc.client.options import ClientOptions
from radixpool.rpc.client.retry import call_with_retries
from radixpool.rpc.client.sequence import RemoteSequence
from radixpool.rpc.client.session import Session
from radixpool.rpc.convert import namespace_to_wire, pool_from_wire, pool_spec_to_wire, pool_to_wire
from radixpool.rpc.errors import Fenced
from radixpool.rpc.pool_types import Pool, PoolSpec
from radixpool.rpc.status import error_from_rpc
from radixpool.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, pool_pb2, pool_pb2_grpc

Reply = TypeVar("Reply")


class Client:
    """A connection to one manager.

    Data path: acquire, extend, reserve, commit, release, match, get_block_tables, batch, session.
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
    ) -> RemoteSequence:
        """Pin the cached prefix of `tokens` and allocate the rest, with room for `reserve` more tokens.

        Use it in a `with` statement: leaving it releases the sequence. Raises PoolExhausted, nothing changed.
        """
        request = codec.acquire_request(ops.Acquire(tokens, namespace, reserve, max_hit))
        return RemoteSequence(self, request, self.reacquire(request))

    def reacquire(self, request: cache_pb2.AcquireRequest) -> ops.Acquired:
        """Send an acquire, once more in a new epoch if fenced; `RemoteSequence.reacquire` is for callers."""
        return codec.acquired(self._change_anew(self._cache.Acquire, request))

    def extend(self, handle: bytes, tokens: ops.Tokens) -> ops.Extended:
        """Append known tokens to a sequence. Raises PoolExhausted, nothing changed."""
        return codec.extended(self._change(self._cache.Extend, codec.extend_request(ops.Extend(handle, tokens))))

    def reserve(self, handle: bytes, num_tokens: int) -> ops.Reserved:
        """Make room for `num_tokens` beyond the present length. Raises PoolExhausted, nothing changed."""
        return codec.reserved(self._change(self._cache.Reserve, codec.reserve_request(ops.Reserve(handle, num_tokens))))

    def commit(self, handle: bytes, upto: int) -> ops.Committed:
        """Make the full blocks of the first `upto` tokens findable; apply the remaps of the result."""
        return codec.committed(self._change(self._cache.Commit, codec.commit_request(ops.Commit(handle, upto))))

    def release(self, handle: bytes) -> ops.Released:
        """End a sequence; what was committed stays cached."""
        return codec.released(self._change(self._cache.Release, codec.release_request(ops.Release(handle))))

    def match(self, tokens: ops.Tokens, *, namespace: Namespace = DEFAULT_NAMESPACE) -> ops.Matched:
        """Return how long a prefix of `tokens` is cached right now; holds nothing."""
        return codec.matched(self._read(self._cache.Match, codec.match_request(ops.Match(tokens, namespace))))

    def get_block_tables(self, handles: Iterable[bytes]) -> ops.BlockTables:
        """Return tokens and block tables of sequences that anybody acquired; errors stand in their place."""
        request = codec.block_tables_request(ops.GetBlockTables(tuple(handles)))
        return codec.block_tables(self._read(self._cache.GetBlockTables, request))

    def batch(self, operations: Iterable[ops.Operation]) -> list[ops.Result | Exception]:
        """Run many operations in one call. One that fails gives an exception in its place and disturbs no other."""
        messages = list(map(codec.operation_message, operations))
        reply = self._change(self._cache.Batch, cache_pb2.BatchRequest(operations=messages))
        return codec.results(reply.results, len(messages))

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

    # Operators.

    def info(self) -> ops.ServiceInfo:
        """Return the sizes and limits of the manager."""
        return codec.service_info(self._read(self._cache.GetInfo, cache_pb2.GetInfoRequest()))

    def stats(self) -> inspection.Stats:
        """Return every counter of the cache and of the process."""
        return inspection.stats_from_wire(self._read(self._admin.GetStats, admin_pb2.GetStatsRequest()))

    def check(self) -> inspection.CheckReport:
        """Prove the invariants of the whole cache; other calls wait meanwhile."""
        reply = self._read(self._admin.CheckInvariants, admin_pb2.CheckInvariantsRequest())
        return inspection.check_report_from_wire(reply)

    def inspect_tree(self, *, namespace: Namespace | None = None, max_nodes: int = 0) -> inspection.TreeView:
        """Return up to `max_nodes` nodes of the tree in pre-order; 0 means the manager's default."""
        wanted = None if namespace is None else namespace_to_wire(namespace)
        request = admin_pb2.InspectTreeRequest(namespace=wanted, max_nodes=max_nodes)
        return inspection.tree_from_wire(self._read(self._admin.InspectTree, request))

    def inspect_block(self, block_id: int) -> inspection.BlockView:
        """Return state, holders and place of one block."""
        request = admin_pb2.InspectBlockRequest(block_id=block_id)
        return inspection.block_from_wire(self._read(self._admin.InspectBlock, request))

    def inspect_sequence(self, sequence: bytes | int) -> inspection.SequenceInfo:
        """Return lengths, block table and owner of one sequence, named by its handle or its sequence id."""
        request = codec.inspect_sequence_request(sequence)
        return inspection.sequences_from_wire(self._read(self._admin.InspectSequence, request)).sequences[0]

    def list_sequences(self, *, max_sequences: int = 0) -> inspection.SequenceList:
        """Return up to `max_sequences` live sequences, oldest first; 0 means the manager's default."""
        request = admin_pb2.InspectSequenceRequest(max_sequences=max_sequences)
        return inspection.sequences_from_wire(self._read(self._admin.InspectSequence, request))

    def list_clients(self) -> tuple[inspection.ClientView, ...]:
        """Return the registered clients, oldest first."""
        reply = self._read(self._admin.ListClients, admin_pb2.ListClientsRequest())
        return tuple(map(inspection.client_from_wire, reply.clients))

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
