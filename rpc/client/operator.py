"""What operators ask of a manager: sizes, counters, proofs and views. All of it only reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from radixpool.radix import Namespace
from radixpool.rpc import inspection
from radixpool.rpc import operations as ops
from radixpool.rpc.client import codec
from radixpool.rpc.convert import namespace_to_wire
from radixpool.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc

Reply = TypeVar("Reply")


class OperatorCalls:
    """The operators' part of the blocking `Client`, which brings the stubs and `_read`."""

    _cache: cache_pb2_grpc.CacheServiceStub
    _admin: admin_pb2_grpc.AdminServiceStub

    def _read(self, method: Callable[..., Reply], request: Any) -> Reply:
        raise NotImplementedError

    def info(self) -> ops.ServiceInfo:
        """Return the sizes and limits of the manager."""
        return codec.service_info(self._read(self._cache.GetInfo, cache_pb2.GetInfoRequest()))

    def stats(self) -> inspection.Stats:
        """Return every counter of the cache and of the process."""
        return inspection.stats_from_wire(self._read(self._admin.GetStats, admin_pb2.GetStatsRequest()))

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
