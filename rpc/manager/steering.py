"""What operators change: pins, priorities, evictions, flushes, quotas. From a message to the cache and into a reply.

The caller holds the engine's lock. A function that raises has changed nothing.
"""

from __future__ import annotations

from typing import Final, Literal

from radixpool.radix import RadixCache
from radixpool.rpc import limits
from radixpool.rpc.convert import block_ids_to_wire, media_from_wire
from radixpool.rpc.manager.engine import Engine
from radixpool.rpc.manager.handles import HandleTable
from radixpool.rpc.manager.operations import checked_namespace
from radixpool.v1 import admin_pb2 as pb

_FLUSH_MODES: Final[dict[int, Literal["idle_only", "drain", "new_generation"]]] = {
    pb.FLUSH_MODE_IDLE_ONLY: "idle_only",
    pb.FLUSH_MODE_DRAIN: "drain",
    pb.FLUSH_MODE_NEW_GENERATION: "new_generation",
}


def pin(cache: RadixCache, request: pb.PinRequest, reply: pb.PinResponse) -> None:
    """Pin what is cached of a prefix."""
    prefix = request.prefix
    pinned = cache.pin(
        prefix.tokens,
        namespace=checked_namespace(prefix.namespace),
        media=media_from_wire(prefix.media),
        ttl=_seconds(request.ttl_ms),
    )
    reply.pin_id = pinned.pin_id
    reply.pinned_tokens = pinned.num_tokens


def unpin(cache: RadixCache, request: pb.UnpinRequest) -> None:
    """Remove a pin."""
    cache.unpin(request.pin_id)


def set_retention(
    cache: RadixCache, handles: HandleTable, request: pb.SetRetentionRequest, reply: pb.SetRetentionResponse
) -> None:
    """Set the priority of a range of a prefix, or of a sequence named by its handle."""
    start = request.start_token
    stop = request.stop_token if request.HasField("stop_token") else None
    ttl = _seconds(request.ttl_ms)
    match request.WhichOneof("target"):
        case "prefix":
            reply.num_blocks = cache.set_retention(
                request.prefix.tokens,
                request.priority,
                namespace=checked_namespace(request.prefix.namespace),
                media=media_from_wire(request.prefix.media),
                start=start,
                stop=stop,
                ttl=ttl,
            )
        case "handle":
            sequence = handles.get(request.handle).sequence
            reply.num_blocks = cache.set_retention(sequence, request.priority, start=start, stop=stop, ttl=ttl)
        case _:
            raise ValueError("target must be prefix or handle, got neither")


def evict(engine: Engine, request: pb.EvictRequest, reply: pb.EvictResponse) -> None:
    """Evict blocks that nobody holds, or say which would go: as many as an answer has room for."""
    if request.num_blocks > limits.MAX_EVICTED_BLOCKS:
        raise ValueError(f"num_blocks must be at most {limits.MAX_EVICTED_BLOCKS} at a time, got {request.num_blocks}")
    evicted = engine.cache.evict(request.num_blocks, dry_run=request.dry_run)
    if not request.dry_run:
        engine.removals["operator"] += evicted.num_blocks
    reply.block_ids = block_ids_to_wire(evicted.blocks)


def flush(engine: Engine, request: pb.FlushRequest, reply: pb.FlushResponse) -> None:
    """Make cached content unfindable; a new generation of it is counted."""
    mode = _FLUSH_MODES.get(request.mode)
    if mode is None:
        raise ValueError(f"mode must be one of {', '.join(pb.FlushMode.keys()[1:])}, got {request.mode}")
    namespace = checked_namespace(request.namespace) if request.HasField("namespace") else None
    flushed = engine.cache.flush(namespace, mode=mode)
    if mode == "new_generation":
        engine.begin_generation()
    engine.removals["flush"] += flushed.freed_blocks + flushed.held_blocks
    reply.freed_blocks = flushed.freed_blocks
    reply.held_blocks = flushed.held_blocks


def set_quota(cache: RadixCache, request: pb.SetQuotaRequest) -> None:
    """Give a tenant a quota, or take it away."""
    match request.WhichOneof("change"):
        case "quota":
            quota = request.quota
            maximum = quota.max_blocks if quota.HasField("max_blocks") else None
            cache.set_quota(request.tenant, guaranteed_blocks=quota.guaranteed_blocks, max_blocks=maximum)
        case "remove":
            cache.remove_quota(request.tenant)
        case _:
            raise ValueError("change must be quota or remove, got neither")


def _seconds(ttl_ms: int) -> float | None:
    return ttl_ms / 1000 if ttl_ms else None
