"""What a manager is started with."""

from __future__ import annotations

from dataclasses import dataclass

from radixpool.rpc import limits
from radixpool.rpc.address import parse_address

MAX_NUM_BLOCKS = 2**31 - 1
MAX_BLOCK_SIZE = 65_536
MAX_CONNECTIONS = 1_000_000
DEFAULT_ADVICE_CPU_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerOptions:
    """Sizes and address of a manager. Raises ValueError naming the field, the limit and the value.

    listen: `unix:/path` or `HOST:PORT`; port 0 lets the system choose.
    num_blocks, block_size: of the physical pool; block_size in tokens.
    policy: name of the eviction policy.
    lease_ttl_ms: how long a client may be silent.
    directory: folder that keeps the cache over a restart, empty for none.
    max_connections: connections at a time; more are closed as soon as they are made.
    advice_cpu_share: most of the time that the shadow behind `radixpool advise` may take, 0 for no shadow.
    """

    listen: str
    num_blocks: int
    block_size: int
    policy: str = "lru"
    lease_ttl_ms: int = limits.DEFAULT_LEASE_TTL_MS
    directory: str = ""
    max_connections: int = limits.MAX_CONNECTIONS
    advice_cpu_share: float = DEFAULT_ADVICE_CPU_SHARE

    def __post_init__(self) -> None:
        parse_address(self.listen)
        _check_range("num_blocks", self.num_blocks, 1, MAX_NUM_BLOCKS)
        _check_range("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        _check_range("max_connections", self.max_connections, 1, MAX_CONNECTIONS)
        _check_range("advice_cpu_share", self.advice_cpu_share, 0.0, 1.0)
        _check_range("lease_ttl_ms", self.lease_ttl_ms, limits.MIN_LEASE_TTL_MS, limits.MAX_LEASE_TTL_MS)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{field} must be from {low} to {high}, got {value}")
