"""The operations of the data path: from a request message to the cache and into a reply message.

Every handler fills the reply that it is given, so that a batch builds its answers in place. A handler that raises has
changed nothing. The caller holds the engine's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

from radixpool.radix import CommitResult, CopyOrder, Namespace, PendingPrefix, RadixCache
from radixpool.radix.errors import RadixPoolError
from radixpool.radix.namespace import DEFAULT_NAMESPACE
from radixpool.rpc import limits
from radixpool.rpc.convert import media_from_wire, namespace_from_wire
from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.manager.handles import HandleTable, Held
from radixpool.rpc.manager.leases import Lease
from radixpool.rpc.manager.reply_room import ReplyRoom
from radixpool.rpc.manager.shadow import Shadow
from radixpool.rpc.manager.stepping import Stepping
from radixpool.rpc.manager.steps import WorkerSteps
from radixpool.rpc.status import row_of, status_from_error
from radixpool.rpc.step_columns import read_rows
from radixpool.v1 import cache_pb2, common_pb2

Handler: TypeAlias = Callable[[Lease, Any, Any], None]

_ACQUIRE_BEGUN = failpoint("acquire.begun")
_ALLOCATED = failpoint("acquire.allocated")
_COMMIT_BEGUN = failpoint("commit.begun")
_FINDABLE = failpoint("commit.findable")
_REMAPPED = failpoint("commit.remapped")
_RELEASE_BEGUN = failpoint("release.begun")
_GIVEN_BACK = failpoint("release.given_back")
_STEPS_COMPLETED = failpoint("steps.completed")
_HALF = failpoint("batch.half")
TOKEN_BYTES: Final = 4
BLOCK_ID_BYTES: Final = 4
_REMAP_BYTES: Final = 20
"""What a commit answers at most of a block that another sequence has committed before."""
_REMEMBERED_NAMESPACE_BYTES: Final = 512
"""The longest namespace message that is remembered, so that what is kept is bounded."""


class Operations:
    """The handlers over one cache and its handles.

    `on_refusal` hears the reason of each error inside a reply, `shadow` sees every admitted request, `removals` counts
    blocks that stop being findable, by cause.
    """

    def __init__(
        self,
        cache: RadixCache,
        handles: HandleTable,
        steps: WorkerSteps,
        *,
        on_refusal: Callable[[str], None],
        shadow: Shadow,
        removals: Counter[str],
    ) -> None:
        self._cache = cache
        self._handles = handles
        self._steps = steps
        self._on_refusal = on_refusal
        self._room = ReplyRoom()
        self._stepping = Stepping(cache, handles, steps, room=self._room, on_refusal=on_refusal)
        self._shadow = shadow
        self._removals = removals
        self._handlers: dict[str, Handler] = {
            "acquire": self._acquire,
            "extend": self._extend,
            "reserve": self._reserve,
            "commit": self._commit,
            "rewind": self._rewind,
            "fork": self._fork,
            "invalidate": self._invalidate,
            "release": self._release,
            "match": lambda _lease, request, reply: self.match(request, reply),
            "get_block_tables": self._get_block_tables,
        }

    def run_one(self, kind: str, lease: Lease, request: Any, reply: Any) -> None:
        """Run the operation of a call of its own."""
        self._room.begin(num_answers=1)
        self._handlers[kind](lease, request, reply)

    def run_all(
        self,
        lease: Lease,
        request: cache_pb2.BatchRequest | cache_pb2.SessionRequest,
        reply: cache_pb2.BatchResponse | cache_pb2.SessionResponse,
    ) -> None:
        """Run the rows and operations of a batch in order, each by itself: an error becomes its result."""
        rows = read_rows(request.step_update) if request.HasField("step_update") else None
        self._room.begin(len(request.operations) + (0 if rows is None else len(rows)))
        if rows is not None:  # a row and a block for each that is appended
            self._room.take(2 * self._table_bytes(len(request.step_update.tokens) // TOKEN_BYTES))
        has_steps = request.HasField("steps")
        if has_steps:
            self._steps.completed(lease, request.steps)
            _STEPS_COMPLETED()
        if rows is not None:
            self._stepping.run(lease, rows, reply.step_update)
        add_result = reply.results.add
        for operation in request.operations:
            self._run_one(lease, operation, add_result())
            _HALF()
        if has_steps:
            self._steps.launched(lease, request.steps)

    def _run_one(self, lease: Lease, operation: cache_pb2.Operation, result: cache_pb2.OperationResult) -> None:
        kind = operation.WhichOneof("operation")
        try:
            if kind is None:
                raise ValueError(f"operation must be one of {', '.join(self._handlers)}, got none of them")
            self._handlers[kind](lease, getattr(operation, kind), getattr(result, kind))
        except (RadixPoolError, ValueError, TypeError) as error:
            self._refuse(result, error)

    def match(self, request: cache_pb2.MatchRequest, reply: cache_pb2.MatchResponse) -> None:
        """Say how much is cached. O(length of the match)."""
        media = request.media
        reply.cached_tokens = self._cache.match(
            request.tokens, namespace=_namespace(request), media=media_from_wire(media) if media else ()
        ).tokens

    def get_block_tables(
        self, request: cache_pb2.GetBlockTablesRequest, reply: cache_pb2.GetBlockTablesResponse
    ) -> None:
        """Describe sequences, each by itself, as far as the reply has room. O(tokens of the sequences)."""
        self._room.begin(num_answers=0)
        self._get_block_tables(None, request, reply)

    def _get_block_tables(
        self,
        lease: Lease | None,
        request: cache_pb2.GetBlockTablesRequest,
        reply: cache_pb2.GetBlockTablesResponse,
    ) -> None:
        reply.SetInParent()
        if len(request.handles) > limits.MAX_HANDLES_PER_QUERY:
            raise ValueError(f"handles: the limit is {limits.MAX_HANDLES_PER_QUERY}, got {len(request.handles)}")
        self._room.take(0, num_answers=len(request.handles))
        for handle in request.handles:
            result = reply.results.add()
            try:
                self._describe(self._find(lease, handle), result.sequence)
            except (RadixPoolError, ValueError) as error:
                self._refuse(result, error)

    def _refuse(self, result: cache_pb2.OperationResult | cache_pb2.BlockTableResult, error: Exception) -> None:
        row = row_of(error)
        assert row is not None, "every error that a handler may raise has a row"
        self._on_refusal(row.reason)
        result.error.CopyFrom(status_from_error(error))

    def _find(self, caller: Lease | None, handle: bytes) -> Held:
        """Return a live sequence; a worker that asks may use its blocks from now on."""
        held = self._handles.get(handle)
        if caller is not None and caller.role == cache_pb2.CLIENT_ROLE_WORKER:
            held.used_by(caller)
        return held

    def _describe(self, held: Held, view: cache_pb2.SequenceView) -> None:
        sequence = held.sequence
        self._room.take(len(sequence.packed_tokens) + len(sequence.packed_block_table))
        view.handle = held.handle
        view.tokens = sequence.packed_tokens
        view.block_table = sequence.packed_block_table
        view.cached_tokens = sequence.cached_tokens
        view.committed_tokens = sequence.committed_tokens
        view.tenant = sequence.namespace.tenant
        if sequence.invalid_from is not None:
            view.invalid_from_block = sequence.invalid_from

    def _acquire(self, lease: Lease, request: cache_pb2.AcquireRequest, reply: cache_pb2.AcquireResponse) -> None:
        self._handles.check_room(lease)
        self._room.take(self._table_bytes(len(request.tokens) // TOKEN_BYTES + request.reserve))
        media = request.media
        _ACQUIRE_BEGUN()
        outcome = self._cache.acquire(
            request.tokens,
            namespace=_namespace(request),
            reserve=request.reserve,
            max_hit=request.max_hit_tokens if request.HasField("max_hit_tokens") else None,
            media=media_from_wire(media) if media else (),
            partial=request.partial,
            in_flight=_in_flight_mode(request.in_flight) if request.in_flight else "ignore",
        )
        if isinstance(outcome, PendingPrefix):
            reply.pending.cached_tokens = outcome.cached_tokens
            reply.pending.available_tokens = outcome.available_tokens
            return
        _ALLOCATED()
        held = self._handles.add(outcome, lease)
        if lease.role == cache_pb2.CLIENT_ROLE_WORKER:
            held.used_by(lease)
        reply.handle = held.handle
        reply.cached_tokens = outcome.cached_tokens
        reply.block_table = outcome.packed_block_table
        if outcome.copies:
            _add_copies(reply.copies, outcome.copies)
        self._shadow.admitted(outcome, media)

    def _table_bytes(self, num_tokens: int) -> int:
        """Return what the table of so many new tokens takes at most, within what the pool has."""
        return min(num_tokens // self._cache.block_size + 1, self._cache.num_blocks) * BLOCK_ID_BYTES

    def _extend(self, lease: Lease, request: cache_pb2.ExtendRequest, reply: cache_pb2.ExtendResponse) -> None:
        sequence = self._find(lease, request.handle).sequence
        self._room.take(self._table_bytes(len(request.tokens) // TOKEN_BYTES))
        before = len(sequence.packed_block_table)
        self._cache.extend(sequence, request.tokens)
        reply.num_tokens = sequence.num_tokens
        reply.appended_blocks = sequence.packed_block_table[before:]
        if sequence.invalid_from is not None:
            reply.invalid_from_block = sequence.invalid_from

    def _reserve(self, lease: Lease, request: cache_pb2.ReserveRequest, reply: cache_pb2.ReserveResponse) -> None:
        sequence = self._find(lease, request.handle).sequence
        self._room.take(self._table_bytes(request.num_tokens))
        before = len(sequence.packed_block_table)
        self._cache.reserve(sequence, request.num_tokens)
        reply.appended_blocks = sequence.packed_block_table[before:]

    def _commit(self, lease: Lease, request: cache_pb2.CommitRequest, reply: cache_pb2.CommitResponse) -> None:
        held = self._find(lease, request.handle)
        sequence = held.sequence
        new_tokens = min(request.upto_tokens, sequence.num_tokens) - sequence.committed_tokens
        self._room.take(max(0, new_tokens) // self._cache.block_size * _REMAP_BYTES)
        committed = self._commit_blocks(held, request.upto_tokens, self._steps.fence(held, lease))
        reply.committed_tokens = committed.committed_tokens
        for remap in committed.remaps:
            reply.remaps.add(block_index=remap.index, from_block=remap.old_block, to_block=remap.new_block)
        if sequence.invalid_from is not None:
            reply.invalid_from_block = sequence.invalid_from

    def _commit_blocks(self, held: Held, upto_tokens: int, fence: dict[str, int]) -> CommitResult:
        _COMMIT_BEGUN()
        committed = self._cache.commit(held.sequence, upto_tokens, after_step=fence)
        _FINDABLE()
        if committed.remaps:
            _REMAPPED()
        return committed

    def _rewind(self, lease: Lease, request: cache_pb2.RewindRequest, reply: cache_pb2.RewindResponse) -> None:
        held = self._find(lease, request.handle)
        fence = self._steps.fence(held, lease, _after_step(request))
        reply.num_tokens = self._cache.rewind(held.sequence, request.to_tokens, after_step=fence).num_tokens
        reply.num_blocks = held.sequence.num_blocks

    def _fork(self, lease: Lease, request: cache_pb2.ForkRequest, reply: cache_pb2.ForkResponse) -> None:
        source = self._find(lease, request.handle)
        self._handles.check_room(lease, request.num_forks)
        self._room.take(request.num_forks * source.sequence.num_blocks * BLOCK_ID_BYTES, num_answers=request.num_forks)
        forked = self._cache.fork(source.sequence, request.num_forks)
        for sequence_id in forked.handles:
            held = self._handles.add(self._cache.sequence(sequence_id), lease)
            held.workers = source.workers
            reply.forks.add(
                handle=held.handle,
                block_table=held.sequence.packed_block_table,
                committed_tokens=held.sequence.committed_tokens,
            )
        _add_copies(reply.copies, forked.copies)

    def _invalidate(
        self, lease: Lease, request: cache_pb2.InvalidateRequest, reply: cache_pb2.InvalidateResponse
    ) -> None:
        removed = self._cache.invalidate(self._find(lease, request.handle).sequence, request.block_index)
        self._removals["invalidate"] += removed.removed_blocks
        reply.removed_blocks = removed.removed_blocks
        reply.freed_blocks = removed.freed_blocks
        reply.num_holders = len(removed.holders)

    def _release(self, lease: Lease, request: cache_pb2.ReleaseRequest, reply: cache_pb2.ReleaseResponse) -> None:
        reply.SetInParent()
        held = self._handles.get(request.handle)
        fence = self._steps.fence(held, lease, _after_step(request))
        if request.HasField("commit_upto_tokens"):
            self._commit_blocks(held, request.commit_upto_tokens, fence)
        _RELEASE_BEGUN()
        self._cache.release(held.sequence, after_step=fence)
        _GIVEN_BACK()
        self._handles.remove(held)


def _add_copies(messages: Any, copies: Iterable[CopyOrder]) -> None:
    for copy in copies:
        messages.add(from_block=copy.src, to_block=copy.dst, num_tokens=copy.num_tokens)


def _after_step(request: cache_pb2.RewindRequest | cache_pb2.ReleaseRequest) -> int | None:
    return request.after_step if request.HasField("after_step") else None


def _in_flight_mode(mode: int) -> Literal["ignore", "wait"]:
    if mode == cache_pb2.IN_FLIGHT_MODE_UNSPECIFIED:
        return "ignore"
    if mode == cache_pb2.IN_FLIGHT_MODE_WAIT:
        return "wait"
    raise ValueError(f"in_flight must be one of {', '.join(cache_pb2.InFlightMode.keys())}, got {mode}")


def _namespace(request: cache_pb2.AcquireRequest | cache_pb2.MatchRequest) -> Namespace:
    return checked_namespace(request.namespace) if request.HasField("namespace") else DEFAULT_NAMESPACE


def checked_namespace(message: common_pb2.Namespace) -> Namespace:
    """Return the namespace of a request. Raises ValueError naming a field that is too long."""
    packed = message.SerializeToString()
    return _known_namespace(packed) if len(packed) <= _REMEMBERED_NAMESPACE_BYTES else _read_namespace(message)


@lru_cache(maxsize=1_024)
def _known_namespace(packed: bytes) -> Namespace:
    return _read_namespace(common_pb2.Namespace.FromString(packed))


def _read_namespace(message: common_pb2.Namespace) -> Namespace:
    if message.ByteSize() > limits.MAX_NAMESPACE_FIELD_BYTES:
        for field in ("model", "revision", "adapter", "tenant", "cache_salt"):
            size = len(getattr(message, field).encode())
            if size > limits.MAX_NAMESPACE_FIELD_BYTES:
                limit = limits.MAX_NAMESPACE_FIELD_BYTES
                raise ValueError(f"namespace.{field} must be at most {limit} bytes, got {size}")
    return namespace_from_wire(message)
