"""AdminService: counters, proofs and views for operators, and what they steer. Every answer is bounded."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import grpc

from radixpool.radix import TenantUsage
from radixpool.radix.errors import InvariantViolation
from radixpool.rpc import limits
from radixpool.rpc.advice import advice_to_wire
from radixpool.rpc.manager import steering
from radixpool.rpc.manager.engine import Engine
from radixpool.rpc.manager.operations import checked_namespace
from radixpool.rpc.manager.subscriptions import Subscription
from radixpool.rpc.manager.views import Views
from radixpool.v1 import admin_pb2 as pb
from radixpool.v1 import admin_pb2_grpc, cache_pb2

_FIELD_BYTES: Final = 8
"""What a node takes in an answer besides its own bytes."""
_REST_BYTES: Final = 256
"""What an answer takes besides its nodes."""
_CACHE_FIELDS = tuple(field.name for field in pb.CacheStats.DESCRIPTOR.fields)


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Everything under the engine's lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._views = Views()

    def GetStats(self, request: pb.GetStatsRequest, context: grpc.ServicerContext) -> pb.GetStatsResponse:
        engine = self._engine
        with engine.lock:
            cache = engine.cache.stats()
            tenants = [_tenant_usage(usage) for usage in engine.cache.quotas()]
            service = pb.ServiceStats(
                uptime_ms=engine.uptime_ms(),
                num_clients=len(engine.leases),
                expired_leases=engine.expired_leases,
                fenced_requests=engine.fenced_requests,
                open_sessions=engine.sessions.taken,
            )
        counters = pb.CacheStats(**{name: getattr(cache, name) for name in _CACHE_FIELDS})
        reply = pb.GetStatsResponse(cache=counters, service=service, tenants=tenants)
        engine.stamp(reply.header)
        return reply

    def GetAdvice(self, request: pb.GetAdviceRequest, context: grpc.ServicerContext) -> pb.GetAdviceResponse:
        with self._engine.lock:
            reply = advice_to_wire(self._engine.shadow.report())
        self._engine.stamp(reply.header)
        return reply

    def CheckInvariants(
        self, request: pb.CheckInvariantsRequest, context: grpc.ServicerContext
    ) -> pb.CheckInvariantsResponse:
        reply = pb.CheckInvariantsResponse()
        start_ns = time.perf_counter_ns()
        try:
            self._engine.check()
        except InvariantViolation as violation:
            reply.violations.append(str(violation))
        reply.elapsed_us = (time.perf_counter_ns() - start_ns) // 1000
        self._engine.stamp(reply.header)
        return reply

    def InspectTree(self, request: pb.InspectTreeRequest, context: grpc.ServicerContext) -> pb.InspectTreeResponse:
        count = _bounded("max_nodes", request.max_nodes)
        namespace = checked_namespace(request.namespace) if request.HasField("namespace") else None
        with self._engine.lock:
            nodes = list(itertools.islice(self._engine.cache.nodes(namespace), count))
            total = self._engine.cache.stats().num_nodes
        reply = pb.InspectTreeResponse(
            nodes=_fitting(map(self._views.node, nodes)), total_nodes=total, block_size=self._engine.options.block_size
        )
        self._engine.stamp(reply.header)
        return reply

    def InspectBlock(self, request: pb.InspectBlockRequest, context: grpc.ServicerContext) -> pb.InspectBlockResponse:
        num_blocks = self._engine.options.num_blocks
        if request.block_id >= num_blocks:
            raise ValueError(f"block_id must be from 0 to {num_blocks - 1}, got {request.block_id}")
        with self._engine.lock:
            block = self._engine.cache.block_info(request.block_id)
            holders = [self._engine.handles.get_by_id(handle) for handle in block.holders]
            reply = self._views.block(block, holders)
            self._engine.stamp(reply.header)
        return reply

    def InspectSequence(
        self, request: pb.InspectSequenceRequest, context: grpc.ServicerContext
    ) -> pb.InspectSequenceResponse:
        count = _bounded("max_sequences", request.max_sequences)
        with self._engine.lock:
            handles = self._engine.handles
            reply = pb.InspectSequenceResponse(total_sequences=len(handles))
            match request.WhichOneof("sequence"):
                case "handle":
                    reply.sequences.append(self._views.sequence_with_table(handles.get(request.handle)))
                case "sequence_id":
                    reply.sequences.append(self._views.sequence_with_table(handles.get_by_id(request.sequence_id)))
                case _:
                    reply.sequences.extend(map(self._views.sequence, itertools.islice(handles, count)))
            self._engine.stamp(reply.header)
        return reply

    def ListClients(self, request: pb.ListClientsRequest, context: grpc.ServicerContext) -> pb.ListClientsResponse:
        with self._engine.lock:
            leases = self._engine.leases
            clients = [
                pb.ClientInfo(
                    name=lease.name,
                    role=cache_pb2.ClientRole.ValueType(lease.role),
                    epoch=lease.epoch,
                    num_sequences=len(lease.handles),
                    lease_remaining_ms=leases.remaining_ms(lease),
                )
                for lease in sorted(leases, key=lambda lease: lease.epoch)
            ]
        reply = pb.ListClientsResponse(clients=clients)
        self._engine.stamp(reply.header)
        return reply

    def Pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.PinResponse:
        reply = pb.PinResponse()
        self._change(request, reply, lambda: steering.pin(self._engine.cache, request, reply))
        return reply

    def Unpin(self, request: pb.UnpinRequest, context: grpc.ServicerContext) -> pb.UnpinResponse:
        reply = pb.UnpinResponse()
        self._change(request, reply, lambda: steering.unpin(self._engine.cache, request))
        return reply

    def SetRetention(self, request: pb.SetRetentionRequest, context: grpc.ServicerContext) -> pb.SetRetentionResponse:
        reply, engine = pb.SetRetentionResponse(), self._engine
        self._change(request, reply, lambda: steering.set_retention(engine.cache, engine.handles, request, reply))
        return reply

    def Evict(self, request: pb.EvictRequest, context: grpc.ServicerContext) -> pb.EvictResponse:
        reply = pb.EvictResponse()
        self._change(request, reply, lambda: steering.evict(self._engine, request, reply))
        return reply

    def Flush(self, request: pb.FlushRequest, context: grpc.ServicerContext) -> pb.FlushResponse:
        reply = pb.FlushResponse()
        self._change(request, reply, lambda: steering.flush(self._engine, request, reply))
        return reply

    def SetQuota(self, request: pb.SetQuotaRequest, context: grpc.ServicerContext) -> pb.SetQuotaResponse:
        reply = pb.SetQuotaResponse()
        self._change(request, reply, lambda: steering.set_quota(self._engine.cache, request))
        return reply

    def ExplainMiss(self, request: pb.ExplainMissRequest, context: grpc.ServicerContext) -> pb.ExplainMissResponse:
        reply = pb.ExplainMissResponse()
        with self._engine.lock:
            self._engine.misses.explain(request, reply, self._views)
            self._engine.stamp(reply.header)
        return reply

    def SubscribeEvents(
        self, request: pb.SubscribeEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.SubscribeEventsResponse]:
        with self._engine.subscribers.place():
            yield from Subscription(self._engine, self._views, context.is_active).run(request)

    def _change(self, request: Any, reply: Any, act: Callable[[], None]) -> None:
        self._engine.run_once(request.header, reply, lambda _lease: act())


def _bounded(field: str, value: int) -> int:
    if value > limits.MAX_INSPECTED:
        raise ValueError(f"{field} must be at most {limits.MAX_INSPECTED}, got {value}")
    return value or limits.DEFAULT_INSPECTED


def _fitting(nodes: Iterable[pb.TreeNode]) -> Iterator[pb.TreeNode]:
    """Yield the nodes that one message has room for."""
    room = limits.MAX_MESSAGE_BYTES - _REST_BYTES
    for node in nodes:
        room -= _FIELD_BYTES + node.ByteSize()
        if room < 0:
            return
        yield node


def _tenant_usage(usage: TenantUsage) -> pb.TenantUsage:
    return pb.TenantUsage(
        tenant=usage.tenant,
        guaranteed_blocks=usage.guaranteed_blocks,
        max_blocks=usage.max_blocks,
        used_blocks=usage.used_blocks,
        cached_blocks=usage.cached_blocks,
    )
