"""The one table between errors and gRPC: exception class <-> status code and reason, in both directions.

An error travels as a google.rpc.Status with a google.rpc.ErrorInfo (domain "radixpool", the reason, and the error's
numbers as metadata) and, where waiting can help, a google.rpc.RetryInfo. The client raises the same class again.
`TABLE` is the list; docs/service.md shows it to readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from radixpool.radix import errors as radix_errors
from radixpool.rpc import errors as rpc_errors
from radixpool.rpc.directory.errors import DirectoryNoSpace

DOMAIN: Final = "radixpool"
RETRY_AFTER_MS: Final = 50
"""What a client should wait before it asks again for what others may give back: blocks, or bytes of requests."""

Metadata = Mapping[str, str]
_Code = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class WireError:
    """One row: how `error` travels, which of its attributes go along, and how the client builds it again."""

    error: type[Exception]
    code: grpc.StatusCode
    reason: str
    fields: tuple[str, ...] = ()
    build: Callable[[Metadata], Exception] | None = None


def _optional_int(metadata: Metadata, field: str) -> int | None:
    return int(metadata[field]) if field in metadata else None


def _sequence_name(text: str) -> int | str:
    """Return a sequence id as the number that it was; a handle's fingerprint stays text."""
    return int(text) if text.isdecimal() else text


TABLE: Final = (
    WireError(
        radix_errors.PoolExhausted,
        _Code.RESOURCE_EXHAUSTED,
        "POOL_EXHAUSTED",
        ("needed_blocks", "allocatable_blocks", "num_blocks", "retry_after_step"),
        lambda data: radix_errors.PoolExhausted(
            int(data["needed_blocks"]),
            allocatable_blocks=int(data["allocatable_blocks"]),
            num_blocks=int(data["num_blocks"]),
            retry_after_step=_optional_int(data, "retry_after_step"),
        ),
    ),
    WireError(
        radix_errors.QuotaExceeded,
        _Code.RESOURCE_EXHAUSTED,
        "QUOTA_EXCEEDED",
        ("tenant", "needed_blocks", "allocatable_blocks", "max_blocks"),
        lambda data: radix_errors.QuotaExceeded(
            data["tenant"],
            needed_blocks=int(data["needed_blocks"]),
            allocatable_blocks=int(data["allocatable_blocks"]),
            max_blocks=int(data["max_blocks"]),
        ),
    ),
    WireError(
        radix_errors.PinBudgetExceeded,
        _Code.RESOURCE_EXHAUSTED,
        "PIN_BUDGET_EXCEEDED",
        ("needed_blocks", "pinned_blocks", "budget_blocks"),
        lambda data: radix_errors.PinBudgetExceeded(
            needed_blocks=int(data["needed_blocks"]),
            pinned_blocks=int(data["pinned_blocks"]),
            budget_blocks=int(data["budget_blocks"]),
        ),
    ),
    WireError(
        radix_errors.UnknownSequence,
        _Code.NOT_FOUND,
        "UNKNOWN_SEQUENCE",
        ("handle",),
        lambda data: radix_errors.UnknownSequence(_sequence_name(data["handle"])),
    ),
    WireError(
        radix_errors.UnknownPin,
        _Code.NOT_FOUND,
        "UNKNOWN_PIN",
        ("pin_id",),
        lambda data: radix_errors.UnknownPin(int(data["pin_id"])),
    ),
    WireError(
        radix_errors.UnknownWorker,
        _Code.NOT_FOUND,
        "UNKNOWN_WORKER",
        ("worker",),
        lambda data: radix_errors.UnknownWorker(data["worker"]),
    ),
    WireError(
        radix_errors.NotCached,
        _Code.NOT_FOUND,
        "NOT_CACHED",
        ("num_tokens",),
        lambda data: radix_errors.NotCached(int(data["num_tokens"])),
    ),
    WireError(
        radix_errors.EventsLost,
        _Code.OUT_OF_RANGE,
        "EVENTS_LOST",
        ("seq", "first_seq"),
        lambda data: radix_errors.EventsLost(int(data["seq"]), first_seq=int(data["first_seq"])),
    ),
    WireError(
        radix_errors.CacheBusy,
        _Code.FAILED_PRECONDITION,
        "CACHE_BUSY",
        ("held_blocks", "quarantined_blocks"),
        lambda data: radix_errors.CacheBusy(
            held_blocks=int(data["held_blocks"]), quarantined_blocks=int(data["quarantined_blocks"])
        ),
    ),
    WireError(radix_errors.InvariantViolation, _Code.INTERNAL, "INVARIANT_VIOLATION"),
    WireError(rpc_errors.Fenced, _Code.ABORTED, "FENCED"),
    WireError(rpc_errors.ReplyExpired, _Code.FAILED_PRECONDITION, "REPLY_EXPIRED"),
    WireError(rpc_errors.LimitExceeded, _Code.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED"),
    WireError(rpc_errors.PoolMismatch, _Code.FAILED_PRECONDITION, "POOL_MISMATCH"),
    WireError(rpc_errors.PoolUnavailable, _Code.FAILED_PRECONDITION, "POOL_UNAVAILABLE"),
    WireError(rpc_errors.Draining, _Code.UNAVAILABLE, "DRAINING"),
    WireError(rpc_errors.Recovering, _Code.UNAVAILABLE, "RECOVERING"),
    WireError(rpc_errors.Overloaded, _Code.RESOURCE_EXHAUSTED, "OVERLOADED"),
    WireError(rpc_errors.SequenceLost, _Code.UNAVAILABLE, "SEQUENCE_LOST"),
    WireError(rpc_errors.ManagerUnavailable, _Code.UNAVAILABLE, "UNAVAILABLE"),
    WireError(DirectoryNoSpace, _Code.RESOURCE_EXHAUSTED, "NO_SPACE"),
    WireError(rpc_errors.Unauthenticated, _Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
    WireError(rpc_errors.PermissionDenied, _Code.PERMISSION_DENIED, "PERMISSION_DENIED"),
    WireError(ValueError, _Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    WireError(TypeError, _Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    WireError(radix_errors.RadixPoolError, _Code.INTERNAL, "INTERNAL"),
)

_BY_ERROR: Final = {row.error: row for row in TABLE}
_BY_REASON: Final = {row.reason: row for row in reversed(TABLE)}
_BY_CODE: Final = {
    _Code.UNAVAILABLE.value[0]: rpc_errors.ManagerUnavailable,
    _Code.DEADLINE_EXCEEDED.value[0]: rpc_errors.ManagerUnavailable,
    _Code.CANCELLED.value[0]: rpc_errors.ManagerUnavailable,
    _Code.UNIMPLEMENTED.value[0]: rpc_errors.ProtocolError,
    _Code.INVALID_ARGUMENT.value[0]: ValueError,
    _Code.RESOURCE_EXHAUSTED.value[0]: rpc_errors.LimitExceeded,
}
"""Statuses that gRPC itself makes carry no ErrorInfo."""
_UNANSWERED: Final = (_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED)


def row_of(error: Exception) -> WireError | None:
    """Return the table's row for `error` or its nearest base class; None means a bug, not an operating error."""
    return next((_BY_ERROR[kind] for kind in type(error).__mro__ if kind in _BY_ERROR), None)


def status_from_error(error: Exception) -> status_pb2.Status:
    """Return the status that `error` travels as. An error outside the table shows nothing of itself."""
    row = row_of(error)
    if row is None:
        return _status(_Code.INTERNAL, "internal error; the manager's log has the details", "INTERNAL", {})
    values = ((field, getattr(error, field)) for field in row.fields)
    status = _status(row.code, str(error), row.reason, {k: str(v) for k, v in values if v is not None})
    if _may_pass_soon(error):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(RETRY_AFTER_MS)
        status.details.add().Pack(retry)
    return status


def _may_pass_soon(error: Exception) -> bool:
    if isinstance(error, radix_errors.PoolExhausted):
        return not error.permanent
    return isinstance(error, rpc_errors.Overloaded)


def error_from_status(status: status_pb2.Status) -> Exception:
    """Return the error that `status` describes, of the class it had on the other side."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            row = _BY_REASON.get(info.reason)
            if row is not None:
                return row.build(info.metadata) if row.build else row.error(status.message)
    return _BY_CODE.get(status.code, radix_errors.RadixPoolError)(status.message)


def error_from_rpc(error: grpc.RpcError, *, address: str = "") -> Exception:
    """Return the domain error behind a failed call to `address`."""
    status = rpc_status.from_call(cast(grpc.Call, error))  # an RpcError of a call is the call
    if status is None and address and error.code() in _UNANSWERED:
        return rpc_errors.ManagerUnavailable(f"nobody answers at {address}: {_why(error.details() or '')}")
    if status is None:
        status = status_pb2.Status(code=error.code().value[0], message=error.details() or error.code().name)
    return error_from_status(status)


def _why(details: str) -> str:
    """Return the cause at the end of what gRPC says of a failed connection, with a hint where it has one.

    >>> _why("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused")
    'Connection refused'
    >>> _why("Deadline Exceeded")
    'Deadline Exceeded'
    """
    connecting, _, cause = details.rpartition("last error: ")
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        return "its certificate is not one of the authorities in RADIXPOOL_TLS_CA"
    if "handshake failed" in cause:
        return f"TLS failed: {cause}"
    if connecting and cause.endswith("Socket closed"):
        return (
            "it closes the connection, as one does that wants (other) certificates: see RADIXPOOL_TLS_CERT, _KEY, _CA"
        )
    return cause.rpartition(": ")[2].removeprefix("Failed to connect to remote host: ")


def _status(code: grpc.StatusCode, message: str, reason: str, metadata: Metadata) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    return status
