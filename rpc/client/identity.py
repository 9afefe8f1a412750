"""Who a client is to the manager: a secret id for its life, an epoch per registration, a number per request."""

from __future__ import annotations

import itertools
import os
import socket

from radixpool.rpc import limits
from radixpool.rpc.client.options import ClientOptions
from radixpool.v1 import cache_pb2, common_pb2


class Identity:
    """The client id, the current epoch (0 before the first registration) and the counter of request ids."""

    def __init__(self, options: ClientOptions) -> None:
        self._name = options.name or f"{socket.gethostname()}:{os.getpid()}"
        self._role = options.role
        self._client_id = os.urandom(limits.CLIENT_ID_BYTES)
        self._request_ids = itertools.count(1)
        self.epoch = 0

    @property
    def is_registered(self) -> bool:
        """Whether the manager has given this client an epoch."""
        return self.epoch != 0

    def registration(self) -> cache_pb2.RegisterClientRequest:
        """Return the request that starts a new epoch."""
        role = cache_pb2.ClientRole.ValueType(self._role.value)
        return cache_pb2.RegisterClientRequest(client_id=self._client_id, name=self._name, role=role)

    def header(self) -> common_pb2.RequestHeader:
        """Return the header of one new request."""
        return common_pb2.RequestHeader(client_id=self._client_id, epoch=self.epoch, request_id=next(self._request_ids))
