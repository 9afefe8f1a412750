"""PoolService: how workers find the physical pool."""

from __future__ import annotations

import grpc

from radixpool.rpc.manager.engine import Engine
from radixpool.v1 import pool_pb2 as pb
from radixpool.v1 import pool_pb2_grpc


class PoolService(pool_pb2_grpc.PoolServiceServicer):
    """Register, attach, get."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def RegisterPool(self, request: pb.RegisterPoolRequest, context: grpc.ServicerContext) -> pb.RegisterPoolResponse:
        reply = pb.RegisterPoolResponse()
        self._engine.register_pool(request, reply)
        return reply

    def AttachPool(self, request: pb.AttachPoolRequest, context: grpc.ServicerContext) -> pb.AttachPoolResponse:
        with self._engine.lock:
            reply = pb.AttachPoolResponse(pool=self._engine.pools.attach(request.expected))
            self._engine.stamp(reply.header)
        return reply

    def GetPool(self, request: pb.GetPoolRequest, context: grpc.ServicerContext) -> pb.GetPoolResponse:
        with self._engine.lock:
            reply = pb.GetPoolResponse(pool=self._engine.pools.pool)
            self._engine.stamp(reply.header)
        return reply
