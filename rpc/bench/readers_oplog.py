"""Read radixpool's own operation logs (`radixpool.radix.replay`): what was asked of a cache, in order.

Each admitted `acquire` is one request; what `extend` adds to its sequence is its output; `release` ends it. Refused
operations ask nothing. Logs carry no wall clock, so time is one millisecond an operation: the interleaving is real.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from radixpool.rpc.bench.trace import Record

_TOKEN_BYTES = 4


def looks_like_oplog(line: Any) -> bool:
    """Tell whether a parsed line is one operation of a log; O(1)."""
    return isinstance(line, dict) and {"name", "arguments", "answer"} <= line.keys()


@dataclass(slots=True)
class _Sequence:
    """What is known of one admitted request."""

    prompt: bytes
    root: Hashable
    media: list[tuple[int, int, str]]
    room_tokens: int
    num_blocks: int
    start: int
    output: bytes = b""
    end: int | None = None


@dataclass(slots=True)
class OplogReader:
    """Collects requests by handle; they come out at the end, when the block size is known."""

    block_size: int | None
    _operations: int = 0
    _requests: dict[int, _Sequence] = field(default_factory=dict)

    def read(self, line: Any) -> Iterable[Record]:
        """Take one operation; O(its tokens)."""
        if not looks_like_oplog(line):
            raise ValueError("expected an operation with name, arguments and answer")
        self._operations += 1
        name, arguments, answer = line["name"], line["arguments"], line["answer"]
        if isinstance(answer, dict) and "error" in answer:
            return ()
        if name == "acquire":
            self._acquire(arguments, answer)
        elif name in ("extend", "release"):
            sequence = self._requests.get(_handle(arguments))
            if sequence is not None and name == "extend":
                sequence.output += _tokens(arguments)
            elif sequence is not None and sequence.end is None:
                sequence.end = self._operations
        return ()

    def finish(self) -> Iterable[Record]:
        """Return the requests in order of admission; O(tokens)."""
        size = self.block_size or self._infer_block_size()
        return [self._record(sequence, size) for sequence in self._requests.values()]

    def _acquire(self, arguments: dict[str, Any], answer: dict[str, Any]) -> None:
        prompt = _tokens(arguments)
        try:
            handle, blocks = answer["handle"], answer["blocks"]
        except (KeyError, TypeError):
            raise ValueError("field answer: expected the handle and blocks of a sequence") from None
        self._requests[handle] = _Sequence(
            prompt=prompt,
            root=tuple(sorted((arguments.get("namespace") or {}).items())),
            media=[(start, length, digest) for start, length, digest in arguments.get("media") or ()],
            room_tokens=len(prompt) // _TOKEN_BYTES + arguments.get("reserve", 0),
            num_blocks=len(blocks),
            start=self._operations,
        )

    def _infer_block_size(self) -> int:
        """Return the largest power of two that explains every admitted table; 1 where none does."""
        fitting = [
            size
            for size in (1 << i for i in range(17))
            if all(-(-s.room_tokens // size) == s.num_blocks for s in self._requests.values())
        ]
        return max(fitting, default=1)

    def _record(self, sequence: _Sequence, size: int) -> Record:
        keys = self._keys(sequence, size)
        cut = len(sequence.prompt) // (size * _TOKEN_BYTES)
        return Record(
            keys=keys[:cut],
            input_tokens=len(sequence.prompt) // _TOKEN_BYTES,
            output_tokens=len(sequence.output) // _TOKEN_BYTES,
            arrival_ms=float(sequence.start),
            duration_ms=float((sequence.end or self._operations) - sequence.start),
            output_keys=keys[cut:],
        )

    @staticmethod
    def _keys(sequence: _Sequence, size: int) -> list[Hashable]:
        """Return one key a full block: its tokens, the media over it and, for the first, the namespace."""
        data, stride = sequence.prompt + sequence.output, size * _TOKEN_BYTES
        keys: list[Hashable] = []
        for index in range(len(data) // stride):
            first, last = index * size, (index + 1) * size
            media = tuple(span for span in sequence.media if span[0] < last and first < span[0] + span[1])
            root = sequence.root if index == 0 else None
            keys.append((root, data[index * stride : (index + 1) * stride], media))
        return keys


def _tokens(arguments: dict[str, Any]) -> bytes:
    try:
        packed = base64.b64decode(arguments["tokens"], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"field arguments.tokens: expected base64 of packed ids: {error}") from None
    if len(packed) % _TOKEN_BYTES:
        raise ValueError(f"field arguments.tokens: {len(packed)} bytes are not whole 4-byte ids")
    return packed


def _handle(arguments: dict[str, Any]) -> int:
    try:
        return int(arguments["seq"]["sequence"])
    except (KeyError, TypeError, ValueError):
        raise ValueError("field arguments.seq: expected the handle of a sequence") from None
