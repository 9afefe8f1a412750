"""The manager's sampled shadow: sees every admitted request, answers what other sizes and policies would hit.

Called under the engine's lock, for at most its share of the time; it never touches the cache.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache

from radixpool.radix import Namespace, Sequence
from radixpool.radix.advise import Advisor, AdvisorState
from radixpool.rpc.advice import AdviceReport
from radixpool.rpc.manager.options import ManagerOptions
from radixpool.v1 import cache_pb2


class Shadow:
    """An `Advisor` over admitted requests, or nothing when its share of the time is 0."""

    def __init__(
        self,
        options: ManagerOptions,
        *,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._advisor: Advisor | None = None
        if options.advice_cpu_share > 0.0:
            self._advisor = Advisor(
                options.num_blocks,
                options.block_size,
                policy=options.policy,
                cpu_share=options.advice_cpu_share,
                clock=clock,
                cpu_clock=cpu_clock,
            )

    def admitted(self, sequence: Sequence, media: Iterable[cache_pb2.MediaSpan]) -> None:
        """Look at an admitted request; media make it another namespace. See `Advisor.observe` for the cost."""
        if self._advisor is None:
            return
        namespace = _namespace_hash(sequence.namespace)
        for span in media:
            namespace = zlib.crc32(span.digest, namespace)
        self._advisor.observe(sequence.packed_tokens, namespace=namespace)

    def report(self) -> AdviceReport:
        """Return the estimates and how they came about."""
        if self._advisor is None:
            return AdviceReport((), AdvisorState(0, 0, 0, 0, 0.0, 0.0, 0.0))
        return AdviceReport(tuple(self._advisor.advice()), self._advisor.state())


@lru_cache(maxsize=1_024)
def _namespace_hash(namespace: Namespace) -> int:
    return zlib.crc32(namespace.encode())
