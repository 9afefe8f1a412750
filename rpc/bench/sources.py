"""Open a trace for reading lines: plain, .gz, .xz or .zst, or stdin; compression is told by the first bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from radixpool.rpc.bench.trace import TraceError

STDIN = "-"
MAX_LINE_BYTES = 64 << 20
"""The longest line taken: a request of 4M tokens as decimal numbers fits."""

_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_STREAM_ERRORS = (EOFError, OSError, lzma.LZMAError, zlib.error)


def read_bytes(source: str) -> bytes:
    """Return the file's (or stdin's, for "-") raw bytes; raises `TraceError` naming the file."""
    if source == STDIN:
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read trace {source!r}: {error.strerror or error}") from error


def trace_name(source: str) -> str:
    """Return a short name for the trace: the file's name without its endings.

    >>> trace_name("/data/mooncake_conversation_trace.jsonl.xz")
    'mooncake_conversation_trace'
    """
    return "stdin" if source == STDIN else Path(source).name.split(".")[0]


def sha256(raw: bytes) -> str:
    """Return the hex SHA-256 of the trace as stored, compression included."""
    return hashlib.sha256(raw).hexdigest()


def iter_lines(raw: bytes, *, source: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) of the unpacked bytes, empty lines left out.

    A stream that ends or breaks early raises `TraceError` after its last whole line.
    """
    number = 0
    with _unpack(raw) as stream:
        while True:
            try:
                line = stream.readline(MAX_LINE_BYTES + 1)
            except _STREAM_ERRORS as error:
                raise TraceError(f"{source}:{number + 1}: the compressed stream is damaged: {error}") from error
            except Exception as error:  # zstandard's own error type; the package is optional
                if type(error).__name__ != "ZstdError":
                    raise
                raise TraceError(f"{source}:{number + 1}: the compressed stream is damaged: {error}") from error
            if not line:
                return
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise TraceError(f"{source}:{number}: line longer than {MAX_LINE_BYTES} bytes")
            if not line.isspace():
                yield number, line


def _unpack(raw: bytes) -> BinaryIO:
    if raw.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=io.BytesIO(raw)))
    if raw.startswith(_XZ):
        return cast(BinaryIO, lzma.LZMAFile(io.BytesIO(raw)))
    if raw.startswith(_ZSTD):
        try:
            import zstandard
        except ImportError as error:
            raise TraceError("reading .zst needs the package zstandard: pip install 'radixpool[bench]'") from error
        return cast(BinaryIO, io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw))))
    return io.BytesIO(raw)
