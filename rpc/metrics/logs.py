"""Structured logs on stderr: JSON for machines, coloured lines for people.

What other libraries log through `logging` comes out in the same form. Two processors stand between every event and the
output: one adds the id of the request being served, one takes out what must never be written (see `FORBIDDEN`).
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import sys
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from enum import StrEnum
from typing import Final, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

REQUEST_ID_KEY: Final = "x-request-id"
"""The metadata key that a caller may name its request by; failed calls carry it back in their trailers."""
MAX_REQUEST_ID_CHARS: Final = 64
MAX_FRAMES: Final = 8
"""Innermost frames shown of an exception."""
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/-]+")

LOG_LEVELS: Final = ("debug", "info", "warning", "error")

FORBIDDEN: Final = frozenset(
    {"tokens", "token_ids", "token", "cache_salt", "salt", "handle", "handles", "client_id", "authorization", "secret"}
)
"""Event keys whose value is never written, whoever logs them."""


class LogFormat(StrEnum):
    """How log events are written."""

    CONSOLE = "console"
    JSON = "json"


class RequestScope:
    """The call being served. Its id is the caller's own, or one that is made when it is first needed."""

    __slots__ = ("_id", "_metadata")
    _prefix = secrets.token_hex(4)
    _numbers = itertools.count(1)

    def __init__(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        self._metadata = metadata
        self._id: str | None = None

    @property
    def request_id(self) -> str:
        """The id, the same at every call."""
        if self._id is None:
            self._id = _callers_id(self._metadata or ()) or f"{self._prefix}-{next(self._numbers)}"
        return self._id


def _callers_id(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str):
            usable = len(value) <= MAX_REQUEST_ID_CHARS and _REQUEST_ID.fullmatch(value)
            return value if usable else None
    return None


current_request: ContextVar[RequestScope | None] = ContextVar("radixpool_request", default=None)
"""The call that this thread serves; set by the observer interceptor."""


def add_request_id(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Add the id of the call being served, if any. A structlog processor."""
    scope = current_request.get()
    if scope is not None:
        event.setdefault("request_id", scope.request_id)
    return event


def withhold_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace forbidden values and raw bytes by their length. A structlog processor.

    >>> withhold_secrets(None, "info", {"event": "acquire", "cache_salt": "s3cret", "num_tokens": 4})
    {'event': 'acquire', 'cache_salt': '<6 withheld>', 'num_tokens': 4}
    """
    for key, value in event.items():
        if key in FORBIDDEN or isinstance(value, bytes | bytearray | memoryview):
            size = len(value) if hasattr(value, "__len__") else 1
            event[key] = f"<{size} withheld>"
    return event


def show_frames_only(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace an exception by its class and where it came from. A structlog processor.

    Neither its message nor local variables are written: both can hold what a request held.
    """
    info = event.pop("exc_info", None)
    error = sys.exc_info()[1] if info is True else info[1] if isinstance(info, tuple) else info
    if isinstance(error, BaseException):
        frames = traceback.extract_tb(error.__traceback__)
        event["exception"] = type(error).__name__
        event["frames"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-MAX_FRAMES:]]
    return event


def configure_logging(
    *,
    level: str = "info",
    form: LogFormat = LogFormat.CONSOLE,
    stream: TextIO | None = None,
    process: str = "",
) -> None:
    """Send structlog's and logging's events of at least `level` to `stream` (stderr by default). Process-wide.

    `process` is added to each, where several processes write to one place. Raises ValueError for an unknown level.
    """
    if level.lower() not in LOG_LEVELS:
        raise ValueError(f"log level must be debug, info, warning or error, got {level!r}")
    threshold = logging.getLevelNamesMapping()[level.upper()]
    target = stream if stream is not None else sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        add_request_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        withhold_secrets,
        show_frames_only,
        _adder("process", process),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_renderers(form, target))
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)


def _adder(key: str, value: str) -> Processor:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        if value:
            event[key] = value
        return event

    return add


def _renderers(form: LogFormat, target: TextIO) -> list[Processor]:
    final: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if form is LogFormat.JSON:
        return [*final, structlog.processors.JSONRenderer()]
    return [*final, structlog.dev.ConsoleRenderer(colors=target.isatty())]
