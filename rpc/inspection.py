"""What operators see: counters, the tree, blocks, sequences and clients. Frozen, and made from wire messages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from radixpool.radix import BlockState, Namespace
from radixpool.rpc.convert import block_ids_from_wire, namespace_from_wire
from radixpool.v1 import admin_pb2, cache_pb2


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """The counters of the cache; free + cached + held + quarantined = num_blocks."""

    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    quarantined_blocks: int
    pinned_blocks: int
    num_sequences: int
    num_nodes: int
    num_namespaces: int
    queried_tokens: int
    hit_tokens: int
    admitted_requests: int
    refused_requests: int
    committed_blocks: int
    remapped_blocks: int
    evicted_blocks: int

    @property
    def hit_ratio(self) -> float:
        """Hit tokens over queried tokens, 0.0 before the first request."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ServiceCounters:
    """The counters of the manager process."""

    uptime_ms: int
    num_clients: int
    expired_leases: int
    fenced_requests: int
    open_sessions: int


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """A tenant's quota and what is used of it, in blocks. `max_blocks` None: no maximum."""

    tenant: str
    guaranteed_blocks: int
    max_blocks: int | None
    used_blocks: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Every counter at one moment. `tenants` are those with a quota."""

    incarnation: int
    generation: int
    cache: CacheCounters
    service: ServiceCounters
    tenants: tuple[TenantUsage, ...]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The violated invariants, none when all is well."""

    violations: tuple[str, ...]
    elapsed_us: int


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A run of blocks. `namespace` is set at level 0; `last_use` is logical time."""

    level: int
    start_block: int
    block_ids: npt.NDArray[np.int32]
    holders: int
    num_children: int
    state: BlockState
    last_use: int
    pinned: bool
    namespace: Namespace | None


@dataclass(frozen=True, slots=True)
class TreeView:
    """Nodes in pre-order; `total_nodes` is how many there are, more than `nodes` when the answer was limited."""

    nodes: tuple[TreeNode, ...]
    total_nodes: int
    block_size: int


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """One live sequence. `block_table` is empty unless it was asked for by itself."""

    sequence_id: int
    client_name: str
    num_tokens: int
    cached_tokens: int
    committed_tokens: int
    num_blocks: int
    namespace: Namespace
    block_table: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SequenceList:
    """Live sequences, oldest first; `total_sequences` is how many there are."""

    sequences: tuple[SequenceInfo, ...]
    total_sequences: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block, explained. What does not apply to its state is None."""

    block_id: int
    state: BlockState
    findable: bool
    block_index: int | None
    namespace: Namespace | None
    last_use: int | None
    holders: tuple[SequenceInfo, ...]


@dataclass(frozen=True, slots=True)
class ClientView:
    """One registered client."""

    name: str
    role: str
    epoch: int
    num_sequences: int
    lease_remaining_ms: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin over `pinned_tokens` leading tokens."""

    pin_id: int
    pinned_tokens: int


class FlushMode(Enum):
    """What a flush does with what is in use: refuse, leave it findable, or let its holders finish unfindable."""

    IDLE_ONLY = 1
    DRAIN = 2
    NEW_GENERATION = 3


@dataclass(frozen=True, slots=True)
class Flushed:
    """`held_blocks` become free when their holders go."""

    freed_blocks: int
    held_blocks: int


class MissReason(Enum):
    """Why a prompt is not cached any further."""

    BELOW_BLOCK_GRANULARITY = 1
    IN_FLIGHT = 2
    EVICTED = 3
    OTHER_NAMESPACE = 4
    NEVER_SEEN = 5


@dataclass(frozen=True, slots=True)
class Miss:
    """How far a prompt is cached, and why no further. What does not apply to the reason is None or empty."""

    cached_tokens: int
    reason: MissReason
    removed_ms_ago: int | None
    producers: tuple[SequenceInfo, ...]
    other_namespace: Namespace | None
    other_cached_tokens: int


_STATE_FROM_WIRE = {
    admin_pb2.BLOCK_STATE_FREE: BlockState.FREE,
    admin_pb2.BLOCK_STATE_CACHED: BlockState.CACHED,
    admin_pb2.BLOCK_STATE_HELD: BlockState.HELD,
    admin_pb2.BLOCK_STATE_QUARANTINED: BlockState.QUARANTINED,
}
STATE_TO_WIRE = {state: wire for wire, state in _STATE_FROM_WIRE.items()}


def stats_from_wire(message: admin_pb2.GetStatsResponse) -> Stats:
    """Return the counters of a reply."""
    cache = {name: getattr(message.cache, name) for name in CacheCounters.__dataclass_fields__}
    service = {name: getattr(message.service, name) for name in ServiceCounters.__dataclass_fields__}
    return Stats(
        message.header.incarnation,
        message.header.generation,
        CacheCounters(**cache),
        ServiceCounters(**service),
        tuple(map(_tenant_from_wire, message.tenants)),
    )


def _tenant_from_wire(message: admin_pb2.TenantUsage) -> TenantUsage:
    return TenantUsage(
        message.tenant,
        message.guaranteed_blocks,
        message.max_blocks if message.HasField("max_blocks") else None,
        message.used_blocks,
        message.cached_blocks,
    )


def check_report_from_wire(message: admin_pb2.CheckInvariantsResponse) -> CheckReport:
    """Return the report of a reply."""
    return CheckReport(tuple(message.violations), message.elapsed_us)


def tree_from_wire(message: admin_pb2.InspectTreeResponse) -> TreeView:
    """Return the nodes of a reply."""
    return TreeView(tuple(map(_node_from_wire, message.nodes)), message.total_nodes, message.block_size)


def _node_from_wire(node: admin_pb2.TreeNode) -> TreeNode:
    return TreeNode(
        level=node.level,
        start_block=node.start_block,
        block_ids=block_ids_from_wire(node.block_ids),
        holders=node.holders,
        num_children=node.num_children,
        state=_STATE_FROM_WIRE[node.state],
        last_use=node.last_use,
        pinned=node.pinned,
        namespace=namespace_from_wire(node.namespace) if node.HasField("namespace") else None,
    )


def block_from_wire(message: admin_pb2.InspectBlockResponse) -> BlockView:
    """Return the block of a reply."""
    return BlockView(
        block_id=message.block_id,
        state=_STATE_FROM_WIRE[message.state],
        findable=message.findable,
        block_index=message.block_index if message.HasField("block_index") else None,
        namespace=namespace_from_wire(message.namespace) if message.HasField("namespace") else None,
        last_use=message.last_use if message.HasField("last_use") else None,
        holders=tuple(map(sequence_from_wire, message.holders)),
    )


def sequences_from_wire(message: admin_pb2.InspectSequenceResponse) -> SequenceList:
    """Return the sequences of a reply."""
    return SequenceList(tuple(map(sequence_from_wire, message.sequences)), message.total_sequences)


def sequence_from_wire(info: admin_pb2.SequenceInfo) -> SequenceInfo:
    """Return one sequence."""
    return SequenceInfo(
        sequence_id=info.sequence_id,
        client_name=info.client_name,
        num_tokens=info.num_tokens,
        cached_tokens=info.cached_tokens,
        committed_tokens=info.committed_tokens,
        num_blocks=info.num_blocks,
        namespace=namespace_from_wire(info.namespace),
        block_table=block_ids_from_wire(info.block_table),
    )


def client_from_wire(info: admin_pb2.ClientInfo) -> ClientView:
    """Return one client."""
    role = cache_pb2.ClientRole.Name(info.role).removeprefix("CLIENT_ROLE_").lower()
    return ClientView(info.name, role, info.epoch, info.num_sequences, info.lease_remaining_ms)


def miss_from_wire(message: admin_pb2.ExplainMissResponse) -> Miss:
    """Return the explanation of a reply."""
    has_other = message.HasField("other_namespace")
    return Miss(
        cached_tokens=message.cached_tokens,
        reason=MissReason(message.reason),
        removed_ms_ago=message.removed_ms_ago if message.HasField("removed_ms_ago") else None,
        producers=tuple(map(sequence_from_wire, message.producers)),
        other_namespace=namespace_from_wire(message.other_namespace) if has_other else None,
        other_cached_tokens=message.other_cached_tokens,
    )
