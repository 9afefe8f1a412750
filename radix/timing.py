"""Times to live, in seconds of the injected clock."""

from __future__ import annotations

__all__ = ["check_ttl"]


def check_ttl(ttl: float | None) -> None:
    """Raise unless `ttl` is None or a positive number of seconds."""
    if ttl is None:
        return
    if isinstance(ttl, bool) or not isinstance(ttl, int | float):
        raise TypeError(f"ttl must be a number of seconds or None, not {type(ttl).__name__}")
    if not ttl > 0:
        raise ValueError(f"ttl must be more than 0 seconds, not {ttl}")
