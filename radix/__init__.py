"""The cache as a pure, deterministic library: radix trees of ref-counted KV blocks. No I/O, no torch, no grpc."""

from radixpool.radix.cache import RadixCache
from radixpool.radix.errors import (
    CacheBusy,
    EventsLost,
    InvariantViolation,
    NotCached,
    PinBudgetExceeded,
    PoolExhausted,
    QuotaExceeded,
    RadixPoolError,
    UnknownPin,
    UnknownSequence,
    UnknownWorker,
)
from radixpool.radix.events import Cleared, Event, EventLog, Removed, Snapshot, Stored
from radixpool.radix.media import MediaSpan
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.results import (
    BlockInfo,
    BlockState,
    CommitResult,
    CopyOrder,
    EvictResult,
    ExpireResult,
    FlushResult,
    ForkResult,
    InvalidateResult,
    NodeInfo,
    PendingPrefix,
    PinInfo,
    PrefixMatch,
    ReleaseResult,
    Remap,
    RewindResult,
)
from radixpool.radix.sequence import Sequence
from radixpool.radix.stats import CacheStats
from radixpool.radix.tenants import TenantUsage
from radixpool.radix.tokens import pack_tokens

__all__ = [
    "RadixCache",
    "Namespace",
    "DEFAULT_NAMESPACE",
    "Sequence",
    "MediaSpan",
    "pack_tokens",
    # events
    "EventLog",
    "Event",
    "Stored",
    "Removed",
    "Cleared",
    "Snapshot",
    # results
    "BlockInfo",
    "BlockState",
    "CacheStats",
    "CommitResult",
    "CopyOrder",
    "EvictResult",
    "ExpireResult",
    "FlushResult",
    "ForkResult",
    "InvalidateResult",
    "NodeInfo",
    "PendingPrefix",
    "PinInfo",
    "PrefixMatch",
    "ReleaseResult",
    "Remap",
    "RewindResult",
    "TenantUsage",
    # errors
    "RadixPoolError",
    "PoolExhausted",
    "QuotaExceeded",
    "UnknownSequence",
    "UnknownPin",
    "UnknownWorker",
    "PinBudgetExceeded",
    "NotCached",
    "EventsLost",
    "CacheBusy",
    "InvariantViolation",
]
