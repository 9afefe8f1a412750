"""Record what is done to a cache, and do it again: for replicas, bug reports, tests and policy benchmarks.

A log is a list of operations as plain data (one JSON object each), with the clock readings they took and what they
answered. Replayed on a cache with the same settings it gives the same handles, tables, victims and refusals, whatever
the wall clock says; `replay` raises at the first difference.

>>> cache = RecordedCache(8, 2, sink=(log := []).append)
>>> cache.release(cache.acquire([1, 2, 3]))
ReleaseResult(freed_blocks=2, quarantined_blocks=0)
>>> [operation.name for operation in log]
['acquire', 'release']
>>> clock = ReplayClock()
>>> replay(log, RadixCache(8, 2, clock=clock), clock)
2
"""

from __future__ import annotations

import base64
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from radixpool.radix.cache import RadixCache
from radixpool.radix.errors import RadixPoolError
from radixpool.radix.media import MediaSpan
from radixpool.radix.namespace import Namespace
from radixpool.radix.sequence import Sequence
from radixpool.radix.tokens import pack_tokens

__all__ = ["Operation", "RecordedCache", "ReplayClock", "ReplayMismatch", "replay"]

OPERATIONS = (
    "acquire", "extend", "reserve", "commit", "rewind", "fork", "release", "invalidate", "pin", "unpin", "expire",
    "set_retention", "set_quota", "remove_quota", "evict", "flush", "add_worker", "complete_step", "remove_worker",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operation:
    """One call as plain data.

    Attributes:
        name: the method of `RadixCache`.
        arguments: by name; tokens as base64 of the packed ids, sequences as handles.
        clock: what the clock read during the call, oldest first.
        answer: what it returned, or `{"error": class, "message": text}`.

    """

    name: str
    arguments: dict[str, Any]
    clock: list[float] = field(default_factory=list)
    answer: Any = None

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Operation:
        """Read one line that `to_json` wrote."""
        return cls(**json.loads(line))


class ReplayMismatch(RadixPoolError):
    """A replayed operation answered differently.

    Attributes:
        index: position of the operation in the log.
        operation: what was recorded.
        answer: what came instead.

    """

    def __init__(self, index: int, operation: Operation, answer: Any) -> None:
        self.index = index
        self.operation = operation
        self.answer = answer
        super().__init__(f"operation {index}, {operation.name}, answered {answer!r} instead of {operation.answer!r}")


class ReplayClock:
    """The clock of a cache that a log is replayed on: reads what the recorded one read."""

    def __init__(self) -> None:
        self._readings: list[float] = []

    def load(self, readings: list[float]) -> None:
        """Set what the next calls return."""
        self._readings = list(readings)

    def __call__(self) -> float:
        """Return the next recorded reading."""
        return self._readings.pop(0)


class RecordedCache(RadixCache):
    """A cache that hands every operation that changes it to `sink`, refused ones included.

    Calls with bad arguments (`ValueError`, `TypeError`) change nothing and are left out.
    """

    def __init__(self, *args: Any, sink: Callable[[Operation], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._sink = sink
        self._readings: list[float] | None = None
        self._wall_clock = self._clock
        self._clock = self._read_clock

    def _read_clock(self) -> float:
        reading = self._wall_clock()
        assert self._readings is not None, "only recorded operations read the clock"
        self._readings.append(reading)
        return reading


def _recorded(name: str) -> Callable[..., Any]:
    inner = getattr(RadixCache, name)
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def call(self: RecordedCache, *args: Any, **options: Any) -> Any:
        if self._readings is not None:  # one operation calls another: the outer one is the log's
            return inner(self, *args, **options)
        bound = signature.bind(self, *args, **options).arguments
        if "media" in bound:
            bound["media"] = tuple(bound["media"])  # it is read twice
        arguments = {key: _encode(value, key) for key, value in bound.items() if key != "self"}
        readings: list[float] = []
        self._readings = readings
        try:
            result = inner(**bound)
        except RadixPoolError as error:
            self._sink(Operation(name, arguments, readings, _describe_error(error)))
            raise
        finally:
            self._readings = None
        self._sink(Operation(name, arguments, readings, _describe(result)))
        return result

    return call


for _name in OPERATIONS:
    setattr(RecordedCache, _name, _recorded(_name))


def replay(operations: Iterable[Operation], cache: RadixCache, clock: ReplayClock) -> int:
    """Do everything in a log again and compare the answers. Return how many operations there were.

    Args:
        operations: the log, from the beginning of a cache's life.
        cache: a new cache with the settings of the recorded one and `clock` as its clock.
        clock: its clock.

    Raises:
        ReplayMismatch: an operation answered differently.

    """
    count = 0
    for index, operation in enumerate(operations):
        clock.load(operation.clock)
        answer: Any
        try:
            arguments = {key: _decode(cache, key, value) for key, value in operation.arguments.items()}
            answer = _describe(getattr(cache, operation.name)(**arguments))
        except RadixPoolError as error:
            answer = _describe_error(error)
        if answer != operation.answer:
            raise ReplayMismatch(index, operation, answer)
        count += 1
    return count


def _encode(value: Any, key: str) -> Any:
    """Turn an argument into plain data."""
    if isinstance(value, Sequence):
        return {"sequence": value.handle}
    if isinstance(value, Namespace):
        return {name: text for name, text in asdict(value).items() if text and not name.startswith("_")}
    if key == "media":
        return [[span[0], span[1], span[2].hex()] for span in value]
    if key == "tokens":
        return base64.b64encode(pack_tokens(value)).decode()
    return dict(value) if isinstance(value, Mapping) else value


def _decode(cache: RadixCache, key: str, value: Any) -> Any:
    if isinstance(value, dict) and "sequence" in value:
        handle = value["sequence"]
        return cache._sequences.get(handle) or _released(handle)
    if key == "namespace":
        return None if value is None else Namespace(**value)
    if key == "media":
        return [MediaSpan(start, length, bytes.fromhex(digest)) for start, length, digest in value]
    return base64.b64decode(value) if key == "tokens" else value


def _released(handle: int) -> Sequence:
    """Stand for a sequence that is gone, as the recorded caller still had it."""
    seq = Sequence()
    seq.handle = handle
    seq.released = True
    return seq


def _describe_error(error: RadixPoolError) -> dict[str, str]:
    return {"error": type(error).__name__, "message": str(error)}


def _describe(result: Any) -> Any:
    """Turn an answer into plain data that JSON gives back unchanged."""
    if isinstance(result, Sequence):
        return {
            "handle": result.handle,
            "cached_tokens": result.cached_tokens,
            "blocks": result.block_table.tolist(),
            "copies": [list(copy) for copy in result.copies],
        }
    if isinstance(result, np.ndarray):
        return result.tolist()
    if isinstance(result, Namespace):
        return _encode(result, "")
    if hasattr(result, "_asdict"):
        return {name: _describe(value) for name, value in result._asdict().items()}
    if hasattr(result, "__dataclass_fields__"):
        return {name: _describe(getattr(result, name)) for name in result.__dataclass_fields__}
    return [_describe(item) for item in result] if isinstance(result, tuple) else result
