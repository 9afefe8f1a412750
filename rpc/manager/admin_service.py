"""AdminService: counters, proofs and views for operators. Every answer is bounded."""

from __future__ import annotations

import hashlib
import itertools
import os
import time

import grpc

from radixpool.radix import Namespace, NodeInfo
from radixpool.radix.errors import InvariantViolation
from radixpool.rpc import limits
from radixpool.rpc.convert import block_ids_to_wire, namespace_to_wire
from radixpool.rpc.inspection import STATE_TO_WIRE
from radixpool.rpc.manager.engine import Engine
from radixpool.rpc.manager.handles import Held
from radixpool.rpc.manager.operations import checked_namespace
from radixpool.v1 import admin_pb2 as pb
from radixpool.v1 import admin_pb2_grpc, cache_pb2, common_pb2

_CACHE_FIELDS = tuple(field.name for field in pb.CacheStats.DESCRIPTOR.fields)
_SALT_HASH_BYTES = 4


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Reads under the engine's lock; changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._salt_key = os.urandom(hashlib.blake2b.MAX_KEY_SIZE)

    def GetStats(self, request: pb.GetStatsRequest, context: grpc.ServicerContext) -> pb.GetStatsResponse:
        engine = self._engine
        with engine.lock:
            cache = engine.cache.stats()
            service = pb.ServiceStats(
                uptime_ms=engine.uptime_ms(),
                num_clients=len(engine.leases),
                expired_leases=engine.expired_leases,
                fenced_requests=engine.fenced_requests,
                open_sessions=engine.open_sessions,
            )
        counters = pb.CacheStats(**{name: getattr(cache, name) for name in _CACHE_FIELDS})
        reply = pb.GetStatsResponse(cache=counters, service=service)
        engine.stamp(reply.header)
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
            nodes=map(self._tree_node, nodes), total_nodes=total, block_size=self._engine.options.block_size
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
            reply = pb.InspectBlockResponse(
                block_id=block.block_id,
                state=STATE_TO_WIRE[block.state],
                findable=block.findable,
                block_index=block.position,
                namespace=None if block.namespace is None else self._shown_namespace(block.namespace),
                last_use=block.last_use,
                holders=map(self._sequence_info, holders),
            )
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
                    reply.sequences.append(self._sequence_details(handles.get(request.handle)))
                case "sequence_id":
                    reply.sequences.append(self._sequence_details(handles.get_by_id(request.sequence_id)))
                case _:
                    reply.sequences.extend(map(self._sequence_info, itertools.islice(handles, count)))
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

    def _tree_node(self, node: NodeInfo) -> pb.TreeNode:
        return pb.TreeNode(
            level=node.level,
            start_block=node.start,
            block_ids=block_ids_to_wire(node.blocks),
            holders=node.ref_count,
            num_children=node.num_children,
            state=STATE_TO_WIRE[node.state],
            last_use=node.last_use,
            pinned=node.pinned,
            namespace=self._shown_namespace(node.namespace) if node.level == 0 else None,
        )

    def _sequence_info(self, held: Held) -> pb.SequenceInfo:
        sequence = held.sequence
        return pb.SequenceInfo(
            sequence_id=sequence.handle,
            client_name=held.lease.name,
            num_tokens=sequence.num_tokens,
            cached_tokens=sequence.cached_tokens,
            committed_tokens=sequence.committed_tokens,
            num_blocks=sequence.num_blocks,
            namespace=self._shown_namespace(sequence.namespace),
        )

    def _sequence_details(self, held: Held) -> pb.SequenceInfo:
        info = self._sequence_info(held)
        info.block_table = held.sequence.packed_block_table
        return info

    def _shown_namespace(self, namespace: Namespace) -> common_pb2.Namespace:
        """Show a salt as a hash under a key of this life: two salts can be told apart, none can be guessed."""
        message = namespace_to_wire(namespace)
        if message.cache_salt:
            digest = hashlib.blake2b(message.cache_salt.encode(), key=self._salt_key, digest_size=_SALT_HASH_BYTES)
            message.cache_salt = f"hash:{digest.hexdigest()}"
        return message


def _bounded(field: str, value: int) -> int:
    if value > limits.MAX_INSPECTED:
        raise ValueError(f"{field} must be at most {limits.MAX_INSPECTED}, got {value}")
    return value or limits.DEFAULT_INSPECTED
