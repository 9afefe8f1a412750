"""Read a trace file into a `Trace`: one JSON object a line, the format told by its fields.

| format | fields of a line |
| --- | --- |
| mooncake | `timestamp` (ms), `input_length`, `output_length`, `hash_ids`, optional `duration_ms` |
| qwen | as mooncake with `chat_id`, `parent_chat_id`; `timestamp` in s, 16-token blocks |
| tokens | `tokens` or `prompt_token_ids`, optional list `output_tokens` or `output_token_ids` |
| text | `text`, `prompt` or `input` (and `output` or `completion`), turned into tokens by a tokenizer, or bytes |
| messages | `messages` or `traj`: role/content lists; each assistant message is a request for what stands before it |
| events | KV-cache events as vLLM publishes them, singly or in batches (`readers_events`) |
| oplog | radixpool's own operation log (`readers_oplog`) |

A damaged line is named and skipped, or raises with `on_damage="stop"`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from radixpool.rpc.bench import readers_events, readers_oplog, sources
from radixpool.rpc.bench.tokenizers import Tokenize, utf8_bytes
from radixpool.rpc.bench.trace import DamagedLine, Insert, Record, Trace, TraceBuilder, TraceError

Format = Literal["auto", "mooncake", "qwen", "tokens", "text", "messages", "events", "oplog"]
FORMATS: tuple[Format, ...] = ("auto", "mooncake", "qwen", "tokens", "text", "messages", "events", "oplog")

DEFAULT_BLOCK_SIZE = 16
_TOKEN_FIELDS = ("tokens", "prompt_token_ids", "token_ids")
_TEXT_FIELDS = ("text", "prompt", "input")
_MESSAGE_FIELDS = ("messages", "traj")
_OUTPUT_TOKEN_FIELDS = ("output_tokens", "output_token_ids")
_OUTPUT_TEXT_FIELDS = ("output", "completion", "response")
_MICROSECONDS_FROM, _NANOSECONDS_FROM = 1e14, 1e17


class LineReader(Protocol):
    """Turns one parsed line into requests; keeps state between lines if the format needs it."""

    def read(self, line: Any) -> Iterable[Record]:
        """Return the requests of one line; raises `ValueError` naming the field of a damaged one."""

    def finish(self) -> Iterable[Record]:
        """Return what only the end of the trace completes."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace.

    Attributes:
        format: one of `FORMATS`; "auto" looks at the first whole line.
        block_size: tokens a block; None takes the trace's own, or 16 for tokens, text and messages.
        insert: whether a request's path ends with its prompt or goes on into its output.
        limit: requests to read at most; None for all.
        on_damage: "skip" names damaged lines in `Trace.damaged`, "stop" raises `TraceError` at the first.
        tokenize: turns text into token ids.
        event_gap_ms: KV events that continue a sequence within this time belong to one request.

    """

    format: Format = "auto"
    block_size: int | None = None
    insert: Insert = "prompt"
    limit: int | None = None
    on_damage: Literal["skip", "stop"] = "skip"
    tokenize: Tokenize = utf8_bytes
    event_gap_ms: float = 1_000.0


def read_trace(source: str, options: ReadOptions | None = None) -> Trace:
    """Return the trace in the file `source` ("-": stdin); O(bytes).

    Raises `TraceError` for a file that cannot be opened, holds no request, or is damaged under `on_damage="stop"`.
    """
    options = options or ReadOptions()
    raw = sources.read_bytes(source)
    builder = TraceBuilder(
        name=sources.trace_name(source),
        block_size=options.block_size,
        insert=options.insert,
        sha256=sources.sha256(raw),
    )
    damaged: list[DamagedLine] = []
    for record in _records(raw, source, options, damaged):
        builder.add(record)
        if builder.num_requests == options.limit:
            break
    if not builder.num_requests:
        hint = f"; first damaged line {damaged[0].line}: {damaged[0].reason}" if damaged else ""
        raise TraceError(f"{source}: no request in the trace{hint}")
    return builder.build(damaged=damaged)


def _records(raw: bytes, source: str, options: ReadOptions, damaged: list[DamagedLine]) -> Iterator[Record]:
    reader: LineReader | None = None
    number = 0
    try:
        for number, line in sources.iter_lines(raw, source=source):
            try:
                parsed = json.loads(line)
                reader = reader or make_reader(parsed, options)
                yield from reader.read(parsed)
            except (ValueError, RecursionError) as error:
                reason = f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
                if options.on_damage == "stop":
                    raise TraceError(f"{source}:{number}: {reason}") from error
                damaged.append(DamagedLine(number, reason))
    except TraceError as error:
        if options.on_damage == "stop":
            raise
        damaged.append(DamagedLine(number + 1, str(error)))
    if reader is not None:
        yield from reader.finish()


def make_reader(first: Any, options: ReadOptions) -> LineReader:
    """Return the reader for the options' format, or for the one that the first line shows."""
    name = options.format if options.format != "auto" else detect_format(first)
    if name in ("mooncake", "qwen"):
        return _Each(lambda line: _hash_ids_record(line, time_unit_ms=1_000.0 if name == "qwen" else 1.0))
    if name == "events":
        return readers_events.EventReader(gap_ms=options.event_gap_ms)
    if name == "oplog":
        return readers_oplog.OplogReader(block_size=options.block_size)
    chunks = _Chunker(options.block_size or DEFAULT_BLOCK_SIZE, options.tokenize)
    if name == "messages":
        return _Conversations(chunks)
    return _Each(chunks.token_record if name == "tokens" else chunks.text_record)


def detect_format(line: Any) -> Format:
    """Return the format whose fields the line has; raises `ValueError` listing what it looked for.

    >>> detect_format({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]})
    'mooncake'
    """
    if readers_events.looks_like_events(line):
        return "events"
    if readers_oplog.looks_like_oplog(line):
        return "oplog"
    if isinstance(line, dict):
        if "hash_ids" in line:
            return "qwen" if "chat_id" in line else "mooncake"
        for name, fields in (("tokens", _TOKEN_FIELDS), ("messages", _MESSAGE_FIELDS), ("text", _TEXT_FIELDS)):
            if any(field in line for field in fields):
                return name  # type: ignore[return-value]
    raise ValueError(
        f"cannot tell the format: expected an object with hash_ids, one of {', '.join(_TOKEN_FIELDS)}, "
        f"one of {', '.join(_MESSAGE_FIELDS)}, one of {', '.join(_TEXT_FIELDS)}, or KV events"
    )


@dataclass(slots=True)
class _Each:
    """A format with one request a line and no state."""

    convert: Callable[[Any], Record]

    def read(self, line: Any) -> Iterable[Record]:
        return (self.convert(line),)

    def finish(self) -> Iterable[Record]:
        return ()


def _hash_ids_record(line: Any, *, time_unit_ms: float) -> Record:
    fields = _object(line)
    ids = fields.get("hash_ids")
    if not isinstance(ids, list):
        raise ValueError(f"field hash_ids: expected a list, got {type(ids).__name__}")
    for position, key in enumerate(ids):
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise ValueError(f"field hash_ids[{position}]: expected an integer or a string, got {key!r:.40}")
    return Record(
        keys=ids,
        input_tokens=_count(fields, "input_length"),
        output_tokens=_count(fields, "output_length", default=0),
        arrival_ms=_time(fields, "timestamp", time_unit_ms),
        duration_ms=_time(fields, "duration_ms", 1.0),
    )


@dataclass(slots=True)
class _Chunker:
    """Cuts tokens into full blocks; only a full block can be shared, so a tail shorter than a block is no reference."""

    block_size: int
    tokenize: Tokenize

    def token_record(self, line: Any) -> Record:
        fields = _object(line)
        tokens = _token_ids(fields, _first_field(fields, _TOKEN_FIELDS))
        outputs = [f for f in _OUTPUT_TOKEN_FIELDS if isinstance(fields.get(f), list)]
        return self.record(fields, tokens, _token_ids(fields, outputs[0]) if outputs else None)

    def text_record(self, line: Any) -> Record:
        fields = _object(line)
        prompt = _text(fields, _first_field(fields, _TEXT_FIELDS))
        outputs = [f for f in _OUTPUT_TEXT_FIELDS if f in fields]
        return self.record(fields, self.tokenize(prompt), self.tokenize(_text(fields, outputs[0])) if outputs else None)

    def record(self, fields: dict[str, Any], tokens: list[int], output: list[int] | None) -> Record:
        size = self.block_size
        whole = tokens + (output or [])
        keys = [tuple(whole[i : i + size]) for i in range(0, len(whole) - size + 1, size)]
        cut = len(tokens) // size
        return Record(
            keys=list(keys[:cut]),
            input_tokens=len(tokens),
            output_tokens=len(output) if output is not None else _count(fields, "output_length", default=0),
            arrival_ms=_timestamp_ms(fields),
            duration_ms=_time(fields, "duration_ms", 1.0),
            output_keys=None if output is None else list(keys[cut:]),
        )


@dataclass(slots=True)
class _Conversations:
    """Message lists: one request for each assistant message, or one for the whole list when there is none."""

    chunks: _Chunker

    def read(self, line: Any) -> Iterable[Record]:
        for conversation in line if isinstance(line, list) else [line]:
            yield from self._requests(_object(conversation))

    def finish(self) -> Iterable[Record]:
        return ()

    def _requests(self, fields: dict[str, Any]) -> Iterator[Record]:
        name = _first_field(fields, _MESSAGE_FIELDS)
        messages = fields[name]
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError(f"field {name}: expected a list of objects with role and content")
        prompt: list[int] = []
        turns = 0
        for message in messages:
            tokens = self.chunks.tokenize(_render(message))
            if message["role"] == "assistant":
                turns += 1
                yield self.chunks.record(fields, prompt, tokens)
            prompt = prompt + tokens
        if not turns:
            yield self.chunks.record(fields, prompt, None)


def _render(message: dict[str, Any]) -> str:
    """Write a message as text: role, content and tool calls, each on its own line."""
    parts = [f"<{message['role']}>"]
    content = message.get("content")
    if isinstance(content, str):
        parts.append(content)
    elif content is not None:
        parts.append(json.dumps(content, sort_keys=True))
    if message.get("tool_calls"):
        parts.append(json.dumps(message["tool_calls"], sort_keys=True))
    return "\n".join(parts) + "\n"


def _object(line: Any) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise ValueError(f"expected a JSON object, got {type(line).__name__}")
    return line


def _first_field(fields: dict[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if name in fields:
            return name
    raise ValueError(f"field {' or '.join(names)}: missing")


def _token_ids(fields: dict[str, Any], name: str) -> list[int]:
    tokens = fields[name]
    if not isinstance(tokens, list):
        raise ValueError(f"field {name}: expected a list of token ids, got {type(tokens).__name__}")
    for position, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 32:
            raise ValueError(f"field {name}[{position}]: token id must be in 0..2^32-1, got {token!r:.40}")
    return tokens


def _text(fields: dict[str, Any], name: str) -> str:
    if not isinstance(fields[name], str):
        raise ValueError(f"field {name}: expected a string, got {type(fields[name]).__name__}")
    return str(fields[name])


def _count(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"field {name}: expected a count of at least 0, got {value!r:.40}")
    return value


def _time(fields: dict[str, Any], name: str, unit_ms: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"field {name}: expected a time of at least 0, got {value!r:.40}")
    return float(value) * unit_ms


def _timestamp_ms(fields: dict[str, Any]) -> float | None:
    """Take `timestamp` as milliseconds, or as micro- or nanoseconds since 1970 when it is that large."""
    value = _time(fields, "timestamp", 1.0)
    if value is None or value < _MICROSECONDS_FROM:
        return value
    return value / (1e3 if value < _NANOSECONDS_FROM else 1e6)
