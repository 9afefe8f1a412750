"""A limited number of places, for streams that each hold a server thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from radixpool.rpc.errors import LimitExceeded


class Places:
    """At most `limit()` holders at a time; `what` names them in the error."""

    def __init__(self, what: str, limit: Callable[[], int]) -> None:
        self._what = what
        self._limit = limit
        self._lock = threading.Lock()
        self.taken = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place for the time of the block. Raises LimitExceeded."""
        with self._lock:
            if self.taken >= self._limit():
                raise LimitExceeded(f"{self._what}: the limit is {self._limit()}, all are open")
            self.taken += 1
        try:
            yield
        finally:
            with self._lock:
                self.taken -= 1
