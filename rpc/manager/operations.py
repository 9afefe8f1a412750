"""The operations of the data path: from a request message to the cache and into a reply message.

Every handler fills the reply that it is given, so that a batch builds its answers in place. A handler that raises has
changed nothing. The caller holds the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from radixpool.radix import Namespace, RadixCache
from radixpool.radix.errors import RadixPoolError
from radixpool.radix.namespace import DEFAULT_NAMESPACE
from radixpool.rpc import limits
from radixpool.rpc.convert import namespace_from_wire
from radixpool.rpc.manager.handles import HandleTable
from radixpool.rpc.manager.leases import Lease
from radixpool.rpc.status import row_of, status_from_error
from radixpool.v1 import cache_pb2, common_pb2

Handler: TypeAlias = Callable[[Lease, Any, Any], None]


class Operations:
    """The handlers over one cache and its handles. `on_refusal` hears the reason of each error inside a reply."""

    def __init__(self, cache: RadixCache, handles: HandleTable, *, on_refusal: Callable[[str], None]) -> None:
        self._cache = cache
        self._handles = handles
        self._on_refusal = on_refusal
        self.handlers: dict[str, Handler] = {
            "acquire": self._acquire,
            "extend": self._extend,
            "reserve": self._reserve,
            "commit": self._commit,
            "release": self._release,
            "match": lambda _lease, request, reply: self.match(request, reply),
            "get_block_tables": lambda _lease, request, reply: self.get_block_tables(request, reply),
        }

    def run_all(
        self,
        lease: Lease,
        request: cache_pb2.BatchRequest | cache_pb2.SessionRequest,
        reply: cache_pb2.BatchResponse | cache_pb2.SessionResponse,
    ) -> None:
        """Run the operations of a batch in order, each by itself: an error becomes its result."""
        for operation in request.operations:
            self._run_one(lease, operation, reply.results.add())

    def _run_one(self, lease: Lease, operation: cache_pb2.Operation, result: cache_pb2.OperationResult) -> None:
        kind = operation.WhichOneof("operation")
        try:
            if kind is None:
                raise ValueError(f"operation must be one of {', '.join(self.handlers)}, got none of them")
            reply = getattr(result, kind)
            reply.SetInParent()
            self.handlers[kind](lease, getattr(operation, kind), reply)
        except (RadixPoolError, ValueError, TypeError) as error:
            self._refuse(result, error)

    def match(self, request: cache_pb2.MatchRequest, reply: cache_pb2.MatchResponse) -> None:
        """Say how much is cached. O(length of the match)."""
        reply.cached_tokens = self._cache.match(request.tokens, namespace=_namespace(request)).tokens

    def get_block_tables(
        self, request: cache_pb2.GetBlockTablesRequest, reply: cache_pb2.GetBlockTablesResponse
    ) -> None:
        """Describe sequences, each by itself. O(tokens of the sequences)."""
        if len(request.handles) > limits.MAX_HANDLES_PER_QUERY:
            raise ValueError(f"handles: the limit is {limits.MAX_HANDLES_PER_QUERY}, got {len(request.handles)}")
        for handle in request.handles:
            result = reply.results.add()
            try:
                self._describe(handle, result.sequence)
            except (RadixPoolError, ValueError) as error:
                self._refuse(result, error)

    def _refuse(self, result: cache_pb2.OperationResult | cache_pb2.BlockTableResult, error: Exception) -> None:
        row = row_of(error)
        assert row is not None, "every error that a handler may raise has a row"
        self._on_refusal(row.reason)
        result.error.CopyFrom(status_from_error(error))

    def _describe(self, handle: bytes, view: cache_pb2.SequenceView) -> None:
        sequence = self._handles.get(handle).sequence
        view.handle = handle
        view.tokens = sequence.packed_tokens
        view.block_table = sequence.packed_block_table
        view.cached_tokens = sequence.cached_tokens
        view.committed_tokens = sequence.committed_tokens

    def _acquire(self, lease: Lease, request: cache_pb2.AcquireRequest, reply: cache_pb2.AcquireResponse) -> None:
        self._handles.check_room(lease)
        sequence = self._cache.acquire(
            request.tokens,
            namespace=_namespace(request),
            reserve=request.reserve,
            max_hit=request.max_hit_tokens if request.HasField("max_hit_tokens") else None,
        )
        reply.handle = self._handles.add(sequence, lease)
        reply.cached_tokens = sequence.cached_tokens
        reply.block_table = sequence.packed_block_table

    def _extend(self, _lease: Lease, request: cache_pb2.ExtendRequest, reply: cache_pb2.ExtendResponse) -> None:
        sequence = self._handles.get(request.handle).sequence
        before = len(sequence.packed_block_table)
        self._cache.extend(sequence, request.tokens)
        reply.num_tokens = sequence.num_tokens
        reply.appended_blocks = sequence.packed_block_table[before:]

    def _reserve(self, _lease: Lease, request: cache_pb2.ReserveRequest, reply: cache_pb2.ReserveResponse) -> None:
        sequence = self._handles.get(request.handle).sequence
        before = len(sequence.packed_block_table)
        self._cache.reserve(sequence, request.num_tokens)
        reply.appended_blocks = sequence.packed_block_table[before:]

    def _commit(self, _lease: Lease, request: cache_pb2.CommitRequest, reply: cache_pb2.CommitResponse) -> None:
        committed = self._cache.commit(self._handles.get(request.handle).sequence, request.upto_tokens)
        reply.committed_tokens = committed.committed_tokens
        for remap in committed.remaps:
            reply.remaps.add(block_index=remap.index, from_block=remap.old_block, to_block=remap.new_block)

    def _release(self, _lease: Lease, request: cache_pb2.ReleaseRequest, _reply: cache_pb2.ReleaseResponse) -> None:
        held = self._handles.get(request.handle)
        self._cache.release(held.sequence)
        self._handles.remove(held)


def _namespace(request: cache_pb2.AcquireRequest | cache_pb2.MatchRequest) -> Namespace:
    if not request.HasField("namespace"):
        return DEFAULT_NAMESPACE
    return checked_namespace(request.namespace)


def checked_namespace(message: common_pb2.Namespace) -> Namespace:
    """Return the namespace of a request. Raises ValueError naming a field that is too long."""
    if message.ByteSize() > limits.MAX_NAMESPACE_FIELD_BYTES:
        for field in ("model", "revision", "adapter", "tenant", "cache_salt"):
            size = len(getattr(message, field).encode())
            if size > limits.MAX_NAMESPACE_FIELD_BYTES:
                limit = limits.MAX_NAMESPACE_FIELD_BYTES
                raise ValueError(f"namespace.{field} must be at most {limit} bytes, got {size}")
    return namespace_from_wire(message)
