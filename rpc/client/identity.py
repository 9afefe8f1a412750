"""Who a client is to the manager: a secret id for its life, an epoch per registration, a number per request.

Thread-safe. A header acknowledges every reply before the oldest request that is still under way.
"""

from __future__ import annotations

import os
import socket
import threading

from radixpool.rpc import limits
from radixpool.rpc.client.options import ClientOptions
from radixpool.rpc.liveness import own_process
from radixpool.v1 import cache_pb2, common_pb2


class Identity:
    """The client id, the current epoch (0 while not registered) and the requests under way."""

    def __init__(self, options: ClientOptions) -> None:
        self._name = options.name or f"{socket.gethostname()}:{os.getpid()}"
        self._role = options.role
        self._client_id = options.client_id or os.urandom(limits.CLIENT_ID_BYTES)
        self._lock = threading.Lock()
        self._last_request_id = 0
        self._under_way: dict[int, None] = {}  # in rising order: ids are given out under the lock
        self._epoch = 0

    @property
    def is_registered(self) -> bool:
        """Whether the manager has given this client an epoch that it has not ended since."""
        return self._epoch != 0

    def registration(self) -> cache_pb2.RegisterClientRequest:
        """Return the request that starts a new epoch."""
        role = cache_pb2.ClientRole.ValueType(self._role.value)
        return cache_pb2.RegisterClientRequest(
            client_id=self._client_id, name=self._name, role=role, process=own_process()
        )

    def start_epoch(self, epoch: int) -> None:
        """Use this epoch from now on."""
        self._epoch = epoch

    def end_epoch(self, epoch: int) -> None:
        """Note that the manager has ended `epoch`; a later one is left alone."""
        with self._lock:
            if self._epoch == epoch:
                self._epoch = 0

    def bare_header(self) -> common_pb2.RequestHeader:
        """Return the header of a request that may be run twice."""
        return common_pb2.RequestHeader(client_id=self._client_id, epoch=self._epoch)

    def begin(self) -> common_pb2.RequestHeader:
        """Return the header of one new request; `end` it when its reply is here or given up."""
        with self._lock:
            self._last_request_id += 1
            self._under_way[self._last_request_id] = None
            oldest = next(iter(self._under_way))
            return common_pb2.RequestHeader(
                client_id=self._client_id,
                epoch=self._epoch,
                request_id=self._last_request_id,
                acknowledged_request_id=oldest - 1,
            )

    def end(self, header: common_pb2.RequestHeader) -> None:
        """Acknowledge the reply of a request with the next header."""
        with self._lock:
            del self._under_way[header.request_id]
