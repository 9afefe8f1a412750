"""What operators ask of a manager and change in it: counters, proofs, views, pins, evictions, flushes, quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from radixpool.radix import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.media import MediaSpan
from radixpool.rpc import events, inspection
from radixpool.rpc import operations as ops
from radixpool.rpc.advice import AdviceReport, advice_from_wire
from radixpool.rpc.client import codec
from radixpool.rpc.convert import block_ids_from_wire, namespace_to_wire
from radixpool.rpc.status import error_from_rpc
from radixpool.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc

Reply = TypeVar("Reply")


class OperatorCalls:
    """The operators' part of the blocking `Client`, which brings the stubs and `_read`."""

    _cache: cache_pb2_grpc.CacheServiceStub
    _admin: admin_pb2_grpc.AdminServiceStub

    def _read(self, method: Callable[..., Reply], request: Any) -> Reply:
        raise NotImplementedError

    def _change_anew(self, method: Callable[..., Reply], request: Any) -> Reply:
        raise NotImplementedError

    # Changes.

    def pin(
        self,
        tokens: ops.Tokens,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        media: Iterable[MediaSpan] = (),
        ttl_ms: int = 0,
    ) -> inspection.Pinned:
        """Keep the cached whole blocks of a prefix from being evicted; `ttl_ms` 0 means until `unpin`.

        Raises NotCached, PinBudgetExceeded.
        """
        request = admin_pb2.PinRequest(prefix=codec.prefix(tokens, namespace, media), ttl_ms=ttl_ms)
        reply = self._change_anew(self._admin.Pin, request)
        return inspection.Pinned(reply.pin_id, reply.pinned_tokens)

    def unpin(self, pin_id: int) -> None:
        """Remove a pin. Raises UnknownPin."""
        self._change_anew(self._admin.Unpin, admin_pb2.UnpinRequest(pin_id=pin_id))

    def set_retention(
        self,
        tokens: ops.Tokens,
        priority: int,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        media: Iterable[MediaSpan] = (),
        start: int = 0,
        stop: int | None = None,
        ttl_ms: int = 0,
    ) -> int:
        """Set the priority (0 to 100) of what is cached of tokens `[start, stop)`; return how many blocks that is."""
        request = admin_pb2.SetRetentionRequest(
            prefix=codec.prefix(tokens, namespace, media),
            priority=priority,
            start_token=start,
            stop_token=stop,
            ttl_ms=ttl_ms,
        )
        return self._change_anew(self._admin.SetRetention, request).num_blocks

    def evict(self, num_blocks: int, *, dry_run: bool = False) -> npt.NDArray[np.int32]:
        """Evict up to `num_blocks` blocks that nobody holds; return which went, or would go."""
        request = admin_pb2.EvictRequest(num_blocks=num_blocks, dry_run=dry_run)
        return block_ids_from_wire(self._change_anew(self._admin.Evict, request).block_ids)

    def flush(self, mode: inspection.FlushMode, *, namespace: Namespace | None = None) -> inspection.Flushed:
        """Make the content of one namespace, or of all, unfindable. Raises CacheBusy."""
        request = admin_pb2.FlushRequest(
            namespace=None if namespace is None else namespace_to_wire(namespace),
            mode=admin_pb2.FlushMode.ValueType(mode.value),
        )
        reply = self._change_anew(self._admin.Flush, request)
        return inspection.Flushed(reply.freed_blocks, reply.held_blocks)

    def set_quota(self, tenant: str, *, guaranteed_blocks: int = 0, max_blocks: int | None = None) -> None:
        """Give a tenant a guaranteed share and a maximum, in blocks."""
        quota = admin_pb2.Quota(guaranteed_blocks=guaranteed_blocks, max_blocks=max_blocks)
        self._change_anew(self._admin.SetQuota, admin_pb2.SetQuotaRequest(tenant=tenant, quota=quota))

    def remove_quota(self, tenant: str) -> None:
        """Let a tenant share in what has no quota again."""
        self._change_anew(self._admin.SetQuota, admin_pb2.SetQuotaRequest(tenant=tenant, remove=True))

    # Reads.

    def explain_miss(
        self, tokens: ops.Tokens, *, namespace: Namespace = DEFAULT_NAMESPACE, media: Iterable[MediaSpan] = ()
    ) -> inspection.Miss:
        """Say how far a prompt is cached, and why no further."""
        request = admin_pb2.ExplainMissRequest(prefix=codec.prefix(tokens, namespace, media))
        return inspection.miss_from_wire(self._read(self._admin.ExplainMiss, request))

    def subscribe_events(self, after: events.Position | None = None) -> Iterator[events.EventBatch]:
        """Yield what becomes findable and what no longer is, from a snapshot or after a position, without end.

        Closing the iterator ends the subscription. Raises EventsLost when the position is too old or the reader too
        slow, ManagerUnavailable when the manager goes: subscribe again without a position, or with the last one.
        """
        request = admin_pb2.SubscribeEventsRequest()
        if after is not None:
            request.log_id, request.after_seq = after.log_id, after.seq
        call = self._admin.SubscribeEvents(request)
        try:
            for message in call:
                yield events.batch_from_wire(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def info(self) -> ops.ServiceInfo:
        """Return the sizes and limits of the manager."""
        return codec.service_info(self._read(self._cache.GetInfo, cache_pb2.GetInfoRequest()))

    def stats(self) -> inspection.Stats:
        """Return every counter of the cache and of the process."""
        return inspection.stats_from_wire(self._read(self._admin.GetStats, admin_pb2.GetStatsRequest()))

    def advice(self) -> AdviceReport:
        """Return what a pool of another size, or another eviction policy, would have hit of the same requests."""
        return advice_from_wire(self._read(self._admin.GetAdvice, admin_pb2.GetAdviceRequest()))

    def check(self) -> inspection.CheckReport:
        """Prove the invariants of the whole cache; other calls wait meanwhile."""
        reply = self._read(self._admin.CheckInvariants, admin_pb2.CheckInvariantsRequest())
        return inspection.check_report_from_wire(reply)

    def inspect_tree(self, *, namespace: Namespace | None = None, max_nodes: int = 0) -> inspection.TreeView:
        """Return up to `max_nodes` nodes of the tree in pre-order; 0 means the manager's default."""
        wanted = None if namespace is None else namespace_to_wire(namespace)
        request = admin_pb2.InspectTreeRequest(namespace=wanted, max_nodes=max_nodes)
        return inspection.tree_from_wire(self._read(self._admin.InspectTree, request))

    def inspect_block(self, block_id: int) -> inspection.BlockView:
        """Return state, holders and place of one block."""
        request = admin_pb2.InspectBlockRequest(block_id=block_id)
        return inspection.block_from_wire(self._read(self._admin.InspectBlock, request))

    def inspect_sequence(self, sequence: bytes | int) -> inspection.SequenceInfo:
        """Return lengths, block table and owner of one sequence, named by its handle or its sequence id."""
        request = codec.inspect_sequence_request(sequence)
        return inspection.sequences_from_wire(self._read(self._admin.InspectSequence, request)).sequences[0]

    def list_sequences(self, *, max_sequences: int = 0) -> inspection.SequenceList:
        """Return up to `max_sequences` live sequences, oldest first; 0 means the manager's default."""
        request = admin_pb2.InspectSequenceRequest(max_sequences=max_sequences)
        return inspection.sequences_from_wire(self._read(self._admin.InspectSequence, request))

    def list_clients(self) -> tuple[inspection.ClientView, ...]:
        """Return the registered clients, oldest first."""
        reply = self._read(self._admin.ListClients, admin_pb2.ListClientsRequest())
        return tuple(map(inspection.client_from_wire, reply.clients))
