"""Read recordings of KV-cache events as vLLM publishes them (BlockStored, BlockRemoved, AllBlocksCleared).

A recording holds what was stored, not what was asked: a request that hit everything stored nothing and is not in it.
What comes out is one request for each stored run: the chain from its root through its parent to its last block.
Runs that continue the same tail within `gap_ms` (chunked prefill, decoding) are one request. So reuse is a lower bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from radixpool.rpc.bench.trace import Record

_STORED, _REMOVED, _CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
_KINDS = (_STORED, _REMOVED, _CLEARED)
_ARRAY_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")


def looks_like_events(line: Any) -> bool:
    """Tell whether a parsed line is an event, a batch of them as an object, or one as an array; O(1)."""
    if isinstance(line, dict):
        return line.get("type") in _KINDS or isinstance(line.get("events"), list)
    if isinstance(line, list) and line:
        return line[0] in _KINDS or (len(line) >= 2 and isinstance(line[1], list) and _is_number(line[0]))
    return False


@dataclass(slots=True)
class _Open:
    """A request whose last stored run may still go on."""

    keys: list[Hashable]
    first_ms: float | None
    last_ms: float | None
    block_size: int


@dataclass(slots=True)
class EventReader:
    """Turns stored runs into requests; O(chain) a run. The chain of every block hash seen is kept."""

    gap_ms: float
    _parents: dict[Hashable, Hashable | None] = field(default_factory=dict)
    _open: dict[Hashable, _Open] = field(default_factory=dict)

    def read(self, line: Any) -> Iterable[Record]:
        """Return the requests that this event or batch shows to be over."""
        time_ms, events = _batch(line)
        done = list(self._expire(time_ms))
        for event in events:
            fields = _event(event)
            if fields["type"] == _STORED:
                self._store(fields, time_ms)
        return done

    def finish(self) -> Iterable[Record]:
        """Return the requests still open when the recording ends."""
        return [_record(request) for request in self._open.values()]

    def _expire(self, now_ms: float | None) -> Iterator[Record]:
        """Close, oldest first, what has not gone on for `gap_ms`; without times nothing closes before the end."""
        while now_ms is not None and self._open:
            tail, request = next(iter(self._open.items()))
            if request.last_ms is not None and request.last_ms + self.gap_ms >= now_ms:
                return
            del self._open[tail]
            yield _record(request)

    def _store(self, fields: dict[str, Any], time_ms: float | None) -> None:
        hashes, parent = _hashes(fields), _hash(fields.get("parent_block_hash"), "parent_block_hash")
        size = fields.get("block_size")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"field block_size: expected at least 1, got {size!r:.40}")
        if parent is not None and parent not in self._parents:
            raise ValueError(f"field parent_block_hash: {parent!r:.40} was never stored")
        chain = self._open.pop(parent) if parent in self._open else None
        keys = chain.keys if chain else list(self._chain(parent))
        for block in hashes:
            if block == parent:
                raise ValueError(f"field block_hashes: {block!r:.40} is its own parent")
            self._parents.setdefault(block, parent)
            parent = block
        keys.extend(hashes)
        self._open[hashes[-1]] = _Open(keys, chain.first_ms if chain else time_ms, time_ms, size)

    def _chain(self, tail: Hashable | None) -> list[Hashable]:
        chain: list[Hashable] = []
        while tail is not None:
            chain.append(tail)
            tail = self._parents[tail]
        return chain[::-1]


def _record(request: _Open) -> Record:
    duration = None
    if request.first_ms is not None and request.last_ms is not None:
        duration = request.last_ms - request.first_ms
    return Record(
        keys=request.keys,
        input_tokens=len(request.keys) * request.block_size,
        arrival_ms=request.first_ms,
        duration_ms=duration,
    )


def _batch(line: Any) -> tuple[float | None, list[Any]]:
    """Return (time in ms or None, events) of a line: an event, `{"ts", "events"}`, or `[ts, events, rank]`."""
    if isinstance(line, dict) and "events" in line:
        time, events = line.get("ts"), line["events"]
    elif isinstance(line, list) and line and line[0] not in _KINDS:
        time, events = line[0], line[1] if len(line) > 1 else None
    else:
        time, events = (line.get("ts") if isinstance(line, dict) else None), [line]
    if not isinstance(events, list):
        raise ValueError(f"field events: expected a list, got {type(events).__name__}")
    if time is not None and not _is_number(time):
        raise ValueError(f"field ts: expected seconds, got {time!r:.40}")
    return (None if time is None else float(time) * 1e3), events


def _event(event: Any) -> dict[str, Any]:
    if isinstance(event, list) and event and event[0] in _KINDS:
        return {"type": event[0], **dict(zip(_ARRAY_FIELDS, event[1:], strict=False))}
    if isinstance(event, dict) and event.get("type") in _KINDS:
        return event
    raise ValueError(f"field type: expected one of {', '.join(_KINDS)}, got {event!r:.60}")


def _hashes(fields: dict[str, Any]) -> list[Hashable]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not hashes:
        raise ValueError("field block_hashes: expected a list of at least one block hash")
    return [_hash(value, "block_hashes") for value in hashes]


def _hash(value: Any, field_name: str) -> Hashable:
    if isinstance(value, bool) or not isinstance(value, int | str | type(None)):
        raise ValueError(f"field {field_name}: expected an integer or a string, got {value!r:.40}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
