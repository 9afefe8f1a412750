"""The background thread that keeps a client's lease."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.errors import Fenced

RENEWALS_PER_TTL: Final = 3


class Heartbeat:
    """Call `renew` every third of the TTL until it is fenced or stopped; a failed renewal is tried again."""

    def __init__(self, renew: Callable[[], None], *, ttl_ms: int) -> None:
        self._renew = renew
        self._interval_s = ttl_ms / 1000 / RENEWALS_PER_TTL
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="radixpool-heartbeat", daemon=True)

    def start(self) -> None:
        """Start renewing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop and wait for a renewal under way."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._renew()
            except Fenced:
                return  # the lease is over for good; the next call of the owner learns it too
            except RadixPoolError:
                continue  # the manager did not answer: the next beat tries again
