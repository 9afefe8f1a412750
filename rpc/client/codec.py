"""Operations to messages and messages to results: one function each way per operation, shared by both clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from radixpool.radix import CopyOrder, Namespace
from radixpool.radix.media import MediaSpan
from radixpool.radix.tokens import pack_tokens
from radixpool.rpc import operations as ops
from radixpool.rpc.convert import (
    block_ids_from_wire,
    media_to_wire,
    namespace_to_wire,
    optional_namespace_to_wire,
    tokens_from_wire,
)
from radixpool.rpc.errors import ProtocolError
from radixpool.rpc.status import error_from_status
from radixpool.v1 import admin_pb2, cache_pb2


def match_request(op: ops.Match) -> cache_pb2.MatchRequest:
    """Return the message of a match."""
    return cache_pb2.MatchRequest(
        tokens=pack_tokens(op.tokens),
        namespace=optional_namespace_to_wire(op.namespace),
        media=media_to_wire(op.media),
    )


def acquire_request(op: ops.Acquire) -> cache_pb2.AcquireRequest:
    """Return the message of an acquire."""
    return cache_pb2.AcquireRequest(
        tokens=pack_tokens(op.tokens),
        namespace=optional_namespace_to_wire(op.namespace),
        reserve=op.reserve,
        max_hit_tokens=op.max_hit,
        media=media_to_wire(op.media),
        partial=op.partial,
        in_flight=cache_pb2.InFlightMode.ValueType(op.in_flight.value),
    )


def extend_request(op: ops.Extend) -> cache_pb2.ExtendRequest:
    """Return the message of an extend."""
    return cache_pb2.ExtendRequest(handle=op.handle, tokens=pack_tokens(op.tokens))


def reserve_request(op: ops.Reserve) -> cache_pb2.ReserveRequest:
    """Return the message of a reserve."""
    return cache_pb2.ReserveRequest(handle=op.handle, num_tokens=op.num_tokens)


def commit_request(op: ops.Commit) -> cache_pb2.CommitRequest:
    """Return the message of a commit."""
    return cache_pb2.CommitRequest(handle=op.handle, upto_tokens=op.upto)


def release_request(op: ops.Release) -> cache_pb2.ReleaseRequest:
    """Return the message of a release."""
    return cache_pb2.ReleaseRequest(handle=op.handle, after_step=op.after_step, commit_upto_tokens=op.commit_upto)


def rewind_request(op: ops.Rewind) -> cache_pb2.RewindRequest:
    """Return the message of a rewind."""
    return cache_pb2.RewindRequest(handle=op.handle, to_tokens=op.to, after_step=op.after_step)


def fork_request(op: ops.Fork) -> cache_pb2.ForkRequest:
    """Return the message of a fork."""
    return cache_pb2.ForkRequest(handle=op.handle, num_forks=op.num_forks)


def invalidate_request(op: ops.Invalidate) -> cache_pb2.InvalidateRequest:
    """Return the message of an invalidation."""
    return cache_pb2.InvalidateRequest(handle=op.handle, block_index=op.block_index)


def step_report(steps: ops.StepReport | None) -> cache_pb2.StepReport | None:
    """Return the message of a worker's report, None when there is none."""
    if steps is None:
        return None
    return cache_pb2.StepReport(completed_step=steps.completed_step, launched_step=steps.launched_step)


def block_tables_request(op: ops.GetBlockTables) -> cache_pb2.GetBlockTablesRequest:
    """Return the message of a table query."""
    return cache_pb2.GetBlockTablesRequest(handles=op.handles)


def operation_message(op: ops.Operation) -> cache_pb2.Operation:
    """Return `op` as one operation of a batch. Raises ValueError or TypeError for a malformed field."""
    match op:
        case ops.Acquire():
            return cache_pb2.Operation(acquire=acquire_request(op))
        case ops.Extend():
            return cache_pb2.Operation(extend=extend_request(op))
        case ops.Commit():
            return cache_pb2.Operation(commit=commit_request(op))
        case ops.Release():
            return cache_pb2.Operation(release=release_request(op))
        case ops.Reserve():
            return cache_pb2.Operation(reserve=reserve_request(op))
        case ops.Match():
            return cache_pb2.Operation(match=match_request(op))
        case ops.Rewind():
            return cache_pb2.Operation(rewind=rewind_request(op))
        case ops.Fork():
            return cache_pb2.Operation(fork=fork_request(op))
        case ops.Invalidate():
            return cache_pb2.Operation(invalidate=invalidate_request(op))
        case ops.GetBlockTables():
            return cache_pb2.Operation(get_block_tables=block_tables_request(op))
        case _:
            raise TypeError(f"a batch takes operations of radixpool.rpc.operations, got {type(op).__name__}")


def matched(message: cache_pb2.MatchResponse) -> ops.Matched:
    """Return the result of a match."""
    return ops.Matched(message.cached_tokens)


def acquired(message: cache_pb2.AcquireResponse) -> ops.Acquired:
    """Return the result of an acquire that did not ask to wait."""
    return ops.Acquired(
        message.handle, message.cached_tokens, block_ids_from_wire(message.block_table), _copies(message.copies)
    )


def acquired_or_pending(message: cache_pb2.AcquireResponse) -> ops.Acquired | ops.Pending:
    """Return the result of an acquire."""
    if message.HasField("pending"):
        return ops.Pending(message.pending.cached_tokens, message.pending.available_tokens)
    return acquired(message)


def _copies(messages: Iterable[cache_pb2.CopyOrder]) -> tuple[CopyOrder, ...]:
    return tuple(CopyOrder(copy.from_block, copy.to_block, copy.num_tokens) for copy in messages)


def extended(message: cache_pb2.ExtendResponse) -> ops.Extended:
    """Return the result of an extend."""
    return ops.Extended(message.num_tokens, block_ids_from_wire(message.appended_blocks), _invalid_from(message))


def reserved(message: cache_pb2.ReserveResponse) -> ops.Reserved:
    """Return the result of a reserve."""
    return ops.Reserved(block_ids_from_wire(message.appended_blocks))


def committed(message: cache_pb2.CommitResponse) -> ops.Committed:
    """Return the result of a commit."""
    remaps = tuple(ops.Remap(item.block_index, item.from_block, item.to_block) for item in message.remaps)
    return ops.Committed(message.committed_tokens, remaps, _invalid_from(message))


def _invalid_from(message: cache_pb2.ExtendResponse | cache_pb2.CommitResponse | cache_pb2.SequenceView) -> int | None:
    return message.invalid_from_block if message.HasField("invalid_from_block") else None


def rewound(message: cache_pb2.RewindResponse) -> ops.Rewound:
    """Return the result of a rewind."""
    return ops.Rewound(message.num_tokens, message.num_blocks)


def forked(message: cache_pb2.ForkResponse) -> ops.Forked:
    """Return the result of a fork."""
    forks = (
        ops.ForkedSequence(fork.handle, block_ids_from_wire(fork.block_table), fork.committed_tokens)
        for fork in message.forks
    )
    return ops.Forked(tuple(forks), _copies(message.copies))


def invalidated(message: cache_pb2.InvalidateResponse) -> ops.Invalidated:
    """Return the result of an invalidation."""
    return ops.Invalidated(message.removed_blocks, message.freed_blocks, message.num_holders)


def released(_message: cache_pb2.ReleaseResponse) -> ops.Released:
    """Return the result of a release."""
    return ops.Released()


def block_tables(message: cache_pb2.GetBlockTablesResponse) -> ops.BlockTables:
    """Return the result of a table query."""
    return ops.BlockTables(tuple(map(_block_table, message.results)))


def _block_table(message: cache_pb2.BlockTableResult) -> ops.SequenceView | Exception:
    if message.WhichOneof("result") == "error":
        return error_from_status(message.error)
    view = message.sequence
    return ops.SequenceView(
        handle=view.handle,
        tokens=tokens_from_wire(view.tokens),
        block_table=block_ids_from_wire(view.block_table),
        cached_tokens=view.cached_tokens,
        committed_tokens=view.committed_tokens,
        invalid_from_block=_invalid_from(view),
        tenant=view.tenant,
    )


_RESULT_DECODERS: dict[str, Callable[[Any], ops.Result | Exception]] = {
    "acquire": acquired_or_pending,
    "rewind": rewound,
    "fork": forked,
    "invalidate": invalidated,
    "extend": extended,
    "commit": committed,
    "release": released,
    "reserve": reserved,
    "match": matched,
    "get_block_tables": block_tables,
    "error": error_from_status,
}


def result(message: cache_pb2.OperationResult) -> ops.Result | Exception:
    """Return what one operation of a batch led to; an error is returned, not raised."""
    kind = message.WhichOneof("result")
    if kind is None:
        raise ProtocolError("the manager answered an operation with a kind of result that this client does not know")
    return _RESULT_DECODERS[kind](getattr(message, kind))


def results(messages: Iterable[cache_pb2.OperationResult], expected: int) -> list[ops.Result | Exception]:
    """Return the results of a batch of `expected` operations, in order."""
    decoded = [result(message) for message in messages]
    if len(decoded) != expected:
        raise ProtocolError(f"the manager answered {len(decoded)} of {expected} operations")
    return decoded


def service_info(message: cache_pb2.GetInfoResponse) -> ops.ServiceInfo:
    """Return sizes and limits of a manager."""
    return ops.ServiceInfo(
        version=message.version,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        policy=message.policy,
        lease_ttl_ms=message.lease_ttl_ms,
        max_batch_operations=message.max_batch_operations,
        max_message_bytes=message.max_message_bytes,
        max_step_rows=message.max_step_rows,
        incarnation=message.header.incarnation,
        generation=message.header.generation,
    )


def inspect_sequence_request(sequence: bytes | int) -> admin_pb2.InspectSequenceRequest:
    """Return the message that asks for one sequence by handle or sequence id."""
    if isinstance(sequence, bytes):
        return admin_pb2.InspectSequenceRequest(handle=sequence)
    return admin_pb2.InspectSequenceRequest(sequence_id=sequence)


def prefix(tokens: ops.Tokens, namespace: Namespace, media: Iterable[MediaSpan]) -> admin_pb2.Prefix:
    """Return the message that names tokens, with their media, in a namespace."""
    return admin_pb2.Prefix(
        tokens=pack_tokens(tokens), namespace=namespace_to_wire(namespace), media=media_to_wire(media)
    )
