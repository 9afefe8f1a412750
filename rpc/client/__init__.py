"""Clients of the manager and of workers, blocking and asyncio.

    with Client("unix:/run/radixpool.sock") as client, client.acquire(tokens) as seq:
        ...                       # compute what is not cached into seq.block_table
        seq.commit(len(tokens))

Every error is a `radixpool.radix.errors.RadixPoolError`, or ValueError / TypeError for a caller's mistake.
"""

from radixpool.rpc.client.aio import AsyncClient
from radixpool.rpc.client.aio_sequence import AsyncSequence
from radixpool.rpc.client.aio_session import AsyncSession
from radixpool.rpc.client.aio_worker import AsyncWorkerClient
from radixpool.rpc.client.options import ClientOptions, ClientRole
from radixpool.rpc.client.retry import NO_RETRY, RetryOptions
from radixpool.rpc.client.sequence import RemoteSequence
from radixpool.rpc.client.session import Session
from radixpool.rpc.client.sync import Client
from radixpool.rpc.client.worker import WorkerClient
from radixpool.rpc.step_columns import Step, Stepped

__all__ = [
    "AsyncClient",
    "AsyncSequence",
    "AsyncSession",
    "AsyncWorkerClient",
    "Client",
    "ClientOptions",
    "ClientRole",
    "NO_RETRY",
    "RetryOptions",
    "RemoteSequence",
    "Session",
    "Step",
    "Stepped",
    "WorkerClient",
]
