"""Batches and steps to messages and back, for both clients and both kinds of call.

Numpy does the work of a step: nothing is done per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from radixpool.radix.tokens import pack_tokens
from radixpool.rpc import limits
from radixpool.rpc import operations as ops
from radixpool.rpc.client import codec
from radixpool.rpc.errors import ProtocolError
from radixpool.rpc.status import error_from_status
from radixpool.rpc.step_columns import Counts, Step, Stepped, check_columns
from radixpool.v1 import cache_pb2

_UINT32_MAX: Final = 2**32 - 1
_UINT32: Final = np.dtype("<u4")
_INT32: Final = np.dtype("<i4")
_COLUMN_SETS: Final = (
    {"num_tokens": _UINT32, "committed_tokens": _UINT32},
    {"appended_rows": _UINT32, "appended_blocks": _INT32},
    {
        "remap_rows": _UINT32,
        "remap_block_indices": _UINT32,
        "remap_from_blocks": _INT32,
        "remap_to_blocks": _INT32,
    },
    {"invalid_rows": _UINT32, "invalid_from_blocks": _UINT32},
)
"""Columns of the result that must be of one length."""


Request = TypeVar("Request", cache_pb2.BatchRequest, cache_pb2.SessionRequest)
Response: TypeAlias = cache_pb2.BatchResponse | cache_pb2.SessionResponse


def batch_request(
    kind: type[Request], operations: Iterable[ops.Operation], steps: ops.StepReport | None, *, step: Step | None = None
) -> Request:
    """Return the message of a batch: the columns of a step, then operations, and a worker's report of its steps.

    Raises ValueError or TypeError naming what does not fit.
    """
    update = None if step is None else step_update(step)
    messages = list(map(codec.operation_message, operations))
    return kind(step_update=update, operations=messages, steps=codec.step_report(steps))


def batch_results(response: Response, request: Request) -> list[ops.Result | Exception]:
    """Return the results of a batch, in order."""
    return codec.results(response.results, len(request.operations))


def step_update(step: Step) -> cache_pb2.StepUpdate:
    """Return the message of a step. Raises ValueError or TypeError naming the column that does not fit."""
    rows = len(step.handles)
    update = cache_pb2.StepUpdate(
        handles=_pack_handles(step.handles),
        token_counts=_pack_counts(step.token_counts, rows, "token_counts"),
        tokens=pack_tokens(step.tokens),
        commit_upto_tokens=_pack_counts(step.commit_upto_tokens, rows, "commit_upto_tokens"),
    )
    check_columns(update)
    return update


def stepped(response: Response, request: Request) -> Stepped:
    """Return the result of a step and of the operations that went along with it."""
    if not response.HasField("step_update"):
        raise ProtocolError("the manager did not answer the step: it is older than this client")
    result = response.step_update
    rows = len(request.step_update.handles) // limits.HANDLE_BYTES
    columns = _columns(result)
    if len(columns["num_tokens"]) != rows:
        raise ProtocolError(f"the manager answered {len(columns['num_tokens'])} of {rows} rows")
    return Stepped(
        **columns,
        errors={error.row: error_from_status(error.error) for error in result.errors},
        results=tuple(batch_results(response, request)),
    )


def _columns(result: cache_pb2.StepUpdateResult) -> dict[str, npt.NDArray[Any]]:
    """Return the columns as read-only arrays over the message's memory. O(columns)."""
    columns = {}
    for names in _COLUMN_SETS:
        sizes = set()
        for name, dtype in names.items():
            packed = getattr(result, name)
            sizes.add(len(packed))
            columns[name] = np.frombuffer(packed, dtype)
        if len(sizes) > 1:
            raise ProtocolError(f"the manager's columns {', '.join(names)} differ in length")
    return columns


def _pack_handles(handles: Sequence[bytes] | np.ndarray) -> bytes:
    size = limits.HANDLE_BYTES
    if isinstance(handles, np.ndarray):
        if handles.dtype != np.uint8 or handles.ndim != 2 or handles.shape[1] != size:
            raise ValueError(f"handles must be uint8 [S, {size}], got {handles.dtype} {list(handles.shape)}")
        return handles.tobytes()
    if set(map(len, handles)) - {size}:
        row = next(row for row, handle in enumerate(handles) if len(handle) != size)
        raise ValueError(f"handles[{row}] must be {size} bytes, got {len(handles[row])}")
    return b"".join(handles)


def _pack_counts(values: Counts | None, rows: int, name: str) -> bytes:
    if values is None:
        return b""
    column = np.asarray(values)
    if column.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {column.shape}")
    if len(column) != rows:
        raise ValueError(f"{name} must have one entry a row, {rows} in all, got {len(column)}")
    if not rows:
        return b""
    if column.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {column.dtype}")
    if column.dtype != np.uint32:
        for row in (int(column.argmin()), int(column.argmax())):
            if not 0 <= column[row] <= _UINT32_MAX:
                raise ValueError(f"{name}[{row}] must be from 0 to {_UINT32_MAX}, got {column[row]}")
    return column.astype("<u4", copy=False).tobytes()
