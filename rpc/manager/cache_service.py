"""CacheService: from messages to the engine and back. Errors are raised; the interceptor makes statuses of them."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from radixpool._version import __version__
from radixpool.rpc import limits
from radixpool.rpc.manager.engine import Engine
from radixpool.v1 import cache_pb2 as pb
from radixpool.v1 import cache_pb2_grpc


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """The data path and the leases."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def GetInfo(self, request: pb.GetInfoRequest, context: grpc.ServicerContext) -> pb.GetInfoResponse:
        options = self._engine.options
        reply = pb.GetInfoResponse(
            version=__version__,
            num_blocks=options.num_blocks,
            block_size=options.block_size,
            policy=options.policy,
            lease_ttl_ms=options.lease_ttl_ms,
            max_batch_operations=limits.MAX_BATCH_OPERATIONS,
            max_message_bytes=limits.MAX_MESSAGE_BYTES,
            max_step_rows=limits.MAX_STEP_ROWS,
        )
        self._engine.stamp(reply.header)
        return reply

    def RegisterClient(
        self, request: pb.RegisterClientRequest, context: grpc.ServicerContext
    ) -> pb.RegisterClientResponse:
        _check_registration(request)
        process = request.process if request.HasField("process") else None
        epoch = self._engine.register_client(request.client_id, name=request.name, role=request.role, process=process)
        reply = pb.RegisterClientResponse(epoch=epoch, lease_ttl_ms=self._engine.options.lease_ttl_ms)
        self._engine.stamp(reply.header)
        return reply

    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatResponse:
        self._engine.renew(request)
        reply = pb.HeartbeatResponse(lease_ttl_ms=self._engine.options.lease_ttl_ms)
        self._engine.stamp(reply.header)
        return reply

    def UnregisterClient(
        self, request: pb.UnregisterClientRequest, context: grpc.ServicerContext
    ) -> pb.UnregisterClientResponse:
        reply = pb.UnregisterClientResponse(released_sequences=self._engine.unregister_client(request.header))
        self._engine.stamp(reply.header)
        return reply

    def Match(self, request: pb.MatchRequest, context: grpc.ServicerContext) -> pb.MatchResponse:
        reply = pb.MatchResponse()
        self._engine.match(request, reply)
        return reply

    def Acquire(self, request: pb.AcquireRequest, context: grpc.ServicerContext) -> pb.AcquireResponse:
        reply = pb.AcquireResponse()
        self._engine.run("acquire", request, reply)
        return reply

    def Extend(self, request: pb.ExtendRequest, context: grpc.ServicerContext) -> pb.ExtendResponse:
        reply = pb.ExtendResponse()
        self._engine.run("extend", request, reply)
        return reply

    def Reserve(self, request: pb.ReserveRequest, context: grpc.ServicerContext) -> pb.ReserveResponse:
        reply = pb.ReserveResponse()
        self._engine.run("reserve", request, reply)
        return reply

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitResponse:
        reply = pb.CommitResponse()
        self._engine.run("commit", request, reply)
        return reply

    def Rewind(self, request: pb.RewindRequest, context: grpc.ServicerContext) -> pb.RewindResponse:
        reply = pb.RewindResponse()
        self._engine.run("rewind", request, reply)
        return reply

    def Fork(self, request: pb.ForkRequest, context: grpc.ServicerContext) -> pb.ForkResponse:
        reply = pb.ForkResponse()
        self._engine.run("fork", request, reply)
        return reply

    def Invalidate(self, request: pb.InvalidateRequest, context: grpc.ServicerContext) -> pb.InvalidateResponse:
        reply = pb.InvalidateResponse()
        self._engine.run("invalidate", request, reply)
        return reply

    def Release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseResponse:
        reply = pb.ReleaseResponse()
        self._engine.run("release", request, reply)
        return reply

    def GetBlockTables(
        self, request: pb.GetBlockTablesRequest, context: grpc.ServicerContext
    ) -> pb.GetBlockTablesResponse:
        reply = pb.GetBlockTablesResponse()
        self._engine.get_block_tables(request, reply)
        return reply

    def Batch(self, request: pb.BatchRequest, context: grpc.ServicerContext) -> pb.BatchResponse:
        reply = pb.BatchResponse()
        self._engine.run_batch(request, reply)
        return reply

    def Session(
        self, request_iterator: Iterator[pb.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.SessionResponse]:
        with self._engine.sessions.place():
            # No variable holds a request, which may be large, while the session waits for the next one.
            yield from map(self._answer, request_iterator)

    def _answer(self, request: pb.SessionRequest) -> pb.SessionResponse:
        reply = pb.SessionResponse()
        self._engine.run_batch(request, reply)
        return reply


def _check_registration(request: pb.RegisterClientRequest) -> None:
    if len(request.client_id) != limits.CLIENT_ID_BYTES:
        raise ValueError(f"client_id must be {limits.CLIENT_ID_BYTES} bytes, got {len(request.client_id)}")
    name_bytes = len(request.name.encode())
    if name_bytes > limits.MAX_NAME_BYTES:
        raise ValueError(f"name must be at most {limits.MAX_NAME_BYTES} bytes, got {name_bytes}")
    if request.role not in pb.ClientRole.values():
        raise ValueError(f"role must be one of {', '.join(pb.ClientRole.keys())}, got {request.role}")
