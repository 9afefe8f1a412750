"""The asyncio client of a manager: the data path and the pool, with the same names as the blocking `Client`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import grpc
import grpc.aio

from radixpool.radix import Namespace
from radixpool.radix.media import MediaSpan
from radixpool.radix.namespace import DEFAULT_NAMESPACE
from radixpool.rpc import inspection
from radixpool.rpc import operations as ops
from radixpool.rpc.client import codec
from radixpool.rpc.client.aio_sequence import AsyncSequence
from radixpool.rpc.client.aio_session import AsyncSession
from radixpool.rpc.client.channel import open_async_channel
from radixpool.rpc.client.heartbeat import RENEWALS_PER_TTL
from radixpool.rpc.client.identity import Identity
from radixpool.rpc.client.options import ClientOptions
from radixpool.rpc.client.retry import call_with_retries_async, lacks_room, until_room
from radixpool.rpc.client.stepping import batch_request, batch_results, stepped
from radixpool.rpc.client.sync import IN_FLIGHT_POLL_S
from radixpool.rpc.errors import Fenced
from radixpool.rpc.status import error_from_rpc
from radixpool.rpc.step_columns import Step, Stepped
from radixpool.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc


class AsyncClient:
    """A connection to one manager, for one event loop.

    Data path: acquire, extend, reserve, commit, release, match, get_block_tables, batch, step, session.
    Operators: info, stats. Life: close, or use it as an async context manager.

    A caller may be cancelled at any moment: a release that has begun goes on in the background, and what an acquire or
    a fork brings then is released. Any other call that is cancelled may or may not have run.
    """

    def __init__(self, address: str, *, options: ClientOptions | None = None) -> None:
        self._options = options or ClientOptions()
        self._address = address
        self._channel = open_async_channel(address, self._options.security)
        self._cache = cache_pb2_grpc.CacheServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._identity = Identity(self._options)
        self._lock = asyncio.Lock()
        self._heartbeat: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the lease, which aborts what is still held, and close the channel. A second close does nothing."""
        await self._stop_heartbeat()
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)
        header = self._identity.bare_header()
        if header.epoch:
            self._identity.end_epoch(header.epoch)
            # When the manager is gone or has fenced us, the lease is over just the same.
            with contextlib.suppress(grpc.RpcError):
                request = cache_pb2.UnregisterClientRequest(header=header)
                await self._cache.UnregisterClient(request, timeout=self._options.timeout_s)
        await self._channel.close(None)

    async def acquire(
        self,
        tokens: ops.Tokens,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        reserve: int = 0,
        max_hit: int | None = None,
        media: Iterable[MediaSpan] = (),
        partial: bool = False,
        wait_s: float = 0.0,
    ) -> AsyncSequence:
        """Pin the cached prefix of `tokens` and allocate the rest, with room for `reserve` more tokens.

        `media` are contents that placeholder tokens stand for; `partial` also uses the beginning of a block that
        differs later (run `copies` first). While another sequence computes more of the prefix, wait up to `wait_s` for
        it instead of computing it again.

        Use it in an `async with` statement: leaving it releases the sequence. Raises PoolExhausted, nothing changed.
        """
        operation = ops.Acquire(tokens, namespace, reserve, max_hit, tuple(media), partial)
        request = codec.acquire_request(operation)
        return AsyncSequence(self, request, await self.reacquire(request, wait_s=wait_s))

    async def reacquire(self, request: cache_pb2.AcquireRequest, *, wait_s: float = 0.0) -> ops.Acquired:
        """Send an acquire, once more in a new epoch if fenced; `AsyncSequence.reacquire` is for callers."""
        deadline = time.monotonic() + wait_s
        request.in_flight = cache_pb2.IN_FLIGHT_MODE_WAIT
        while time.monotonic() < deadline:
            reply = await self._acquire_once(request)
            if not reply.HasField("pending"):
                return codec.acquired(reply)
            await asyncio.sleep(IN_FLIGHT_POLL_S)
        request.in_flight = cache_pb2.IN_FLIGHT_MODE_UNSPECIFIED
        return codec.acquired(await self._acquire_once(request))

    async def reacquire_when_there_is_room(self, request: cache_pb2.AcquireRequest) -> ops.Acquired:
        """Send an acquire as often as `RetryOptions` say while the pool is exhausted; for `AsyncSequence.resume`."""
        return await call_with_retries_async(
            lambda: self.reacquire(request), until_room(self._options.retry), may_pass=lacks_room
        )

    async def _acquire_once(self, request: cache_pb2.AcquireRequest) -> cache_pb2.AcquireResponse:
        own = cache_pb2.AcquireRequest()
        own.CopyFrom(request)  # it may still be under way when the caller sends the same one again
        reply: cache_pb2.AcquireResponse = await self._to_its_end(
            self._change_anew(self._cache.Acquire, own), handles=lambda reply: [reply.handle] if reply.handle else []
        )
        return reply

    async def extend(self, handle: bytes, tokens: ops.Tokens) -> ops.Extended:
        """Append known tokens to a sequence. Raises PoolExhausted, nothing changed."""
        return codec.extended(await self._change(self._cache.Extend, codec.extend_request(ops.Extend(handle, tokens))))

    async def reserve(self, handle: bytes, num_tokens: int) -> ops.Reserved:
        """Make room for `num_tokens` beyond the present length. Raises PoolExhausted, nothing changed."""
        request = codec.reserve_request(ops.Reserve(handle, num_tokens))
        return codec.reserved(await self._change(self._cache.Reserve, request))

    async def commit(self, handle: bytes, upto: int) -> ops.Committed:
        """Make the full blocks of the first `upto` tokens findable; apply the remaps of the result."""
        return codec.committed(await self._change(self._cache.Commit, codec.commit_request(ops.Commit(handle, upto))))

    async def rewind(self, handle: bytes, to: int, *, after_step: int | None = None) -> ops.Rewound:
        """Forget the tokens from `to` on. A worker's steps up to `after_step` may still touch what is given back."""
        request = codec.rewind_request(ops.Rewind(handle, to, after_step))
        return codec.rewound(await self._change(self._cache.Rewind, request))

    async def fork(self, handle: bytes, num_forks: int = 1) -> ops.Forked:
        """Make sequences that go on from where this one is; run the copy orders. Raises PoolExhausted."""
        change = self._change(self._cache.Fork, codec.fork_request(ops.Fork(handle, num_forks)))
        return codec.forked(await self._to_its_end(change, handles=lambda reply: [fork.handle for fork in reply.forks]))

    async def invalidate(self, handle: bytes, block_index: int) -> ops.Invalidated:
        """Declare that the data of one block of the table is bad."""
        request = codec.invalidate_request(ops.Invalidate(handle, block_index))
        return codec.invalidated(await self._change(self._cache.Invalidate, request))

    async def release(
        self, handle: bytes, *, after_step: int | None = None, commit_upto: int | None = None
    ) -> ops.Released:
        """End a sequence; what was committed stays cached. A worker's steps up to `after_step` may still touch it.

        `commit_upto` commits so many leading tokens before, in the same call; when that is refused, it lives on.
        """
        request = codec.release_request(ops.Release(handle, after_step, commit_upto))
        return codec.released(await self._to_its_end(self._change(self._cache.Release, request)))

    async def match(
        self, tokens: ops.Tokens, *, namespace: Namespace = DEFAULT_NAMESPACE, media: Iterable[MediaSpan] = ()
    ) -> ops.Matched:
        """Return how long a prefix of `tokens` is cached right now; holds nothing."""
        request = codec.match_request(ops.Match(tokens, namespace, tuple(media)))
        return codec.matched(await self._read(self._cache.Match, request))

    async def get_block_tables(self, handles: Iterable[bytes]) -> ops.BlockTables:
        """Return tokens and block tables of sequences that anybody acquired; errors stand in their place."""
        request = codec.block_tables_request(ops.GetBlockTables(tuple(handles)))
        return codec.block_tables(await self._read(self._cache.GetBlockTables, request))

    async def batch(
        self, operations: Iterable[ops.Operation], *, steps: ops.StepReport | None = None
    ) -> list[ops.Result | Exception]:
        """Run many operations in one call. One that fails gives an exception in its place and disturbs no other.

        A worker reports its `steps`: what is over counts before the operations, what it launches next after them.
        """
        request = batch_request(cache_pb2.BatchRequest, operations, steps)
        return batch_results(await self._change(self._cache.Batch, request), request)

    async def step(
        self, step: Step, operations: Iterable[ops.Operation] = (), *, steps: ops.StepReport | None = None
    ) -> Stepped:
        """Extend and commit many sequences at once, then run `operations`; `Session.step` does the same faster."""
        request = batch_request(cache_pb2.BatchRequest, operations, steps, step=step)
        return stepped(await self._change(self._cache.Batch, request), request)

    async def session(self) -> AsyncSession:
        """Open a stream for many batches, answered in order: several times faster than calls."""
        await self._ensure_registered()
        return AsyncSession(self._cache.Session, self._identity, retry=self._options.retry, address=self._address)

    async def info(self) -> ops.ServiceInfo:
        """Return the sizes and limits of the manager."""
        return codec.service_info(await self._read(self._cache.GetInfo, cache_pb2.GetInfoRequest()))

    async def stats(self) -> inspection.Stats:
        """Return every counter of the cache and of the process."""
        return inspection.stats_from_wire(await self._read(self._admin.GetStats, admin_pb2.GetStatsRequest()))

    async def _to_its_end(
        self, change: Coroutine[Any, Any, Any], *, handles: Callable[[Any], list[bytes]] = lambda _reply: []
    ) -> Any:
        """Await `change`, which runs to its end even if the caller is cancelled: then its `handles` are released.

        Otherwise nobody would know the handle of what a cancelled call has acquired, and its blocks would be held for
        as long as the client lives.
        """
        call = self._in_background(change)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(lambda call: self._give_back(call, handles))
            raise

    def _give_back(self, call: asyncio.Task[Any], handles: Callable[[Any], list[bytes]]) -> None:
        if not call.cancelled() and call.exception() is None:
            for handle in handles(call.result()):
                self._in_background(self.release(handle))

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # seen: what fails in the background has an ended lease, or will have

    async def _read(self, method: Callable[..., Any], request: Any) -> Any:
        async def attempt() -> Any:
            try:
                return await method(request, timeout=self._options.timeout_s)
            except grpc.RpcError as error:
                raise error_from_rpc(error, address=self._address) from None

        return await call_with_retries_async(attempt, self._options.retry)

    async def _change(self, method: Callable[..., Any], request: Any) -> Any:
        """Send a request under one number, however often; registers the client before it if need be."""
        await self._ensure_registered()
        header = self._identity.begin()
        request.header.CopyFrom(header)
        try:
            return await self._read(method, request)
        except Fenced:
            self._identity.end_epoch(header.epoch)
            raise
        finally:
            self._identity.end(header)

    async def _change_anew(self, method: Callable[..., Any], request: Any) -> Any:
        """Do the same for a request that needs no earlier one: when fenced, it goes out once more in a new epoch."""
        try:
            return await self._change(method, request)
        except Fenced:
            return await self._change(method, request)

    async def _ensure_registered(self) -> None:
        async with self._lock:
            if self._identity.is_registered:
                return
            await self._stop_heartbeat()
            reply = await self._read(self._cache.RegisterClient, self._identity.registration())
            self._identity.start_epoch(reply.epoch)
            self._heartbeat = asyncio.create_task(self._keep_lease(reply.lease_ttl_ms / 1000 / RENEWALS_PER_TTL))

    async def _stop_heartbeat(self) -> None:
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.cancel()
            await asyncio.wait([heartbeat])  # which, unlike an await, does not take our own cancellation for its

    async def _keep_lease(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            header = self._identity.bare_header()
            try:
                await self._cache.Heartbeat(cache_pb2.HeartbeatRequest(header=header), timeout=self._options.timeout_s)
            except grpc.RpcError as error:
                if isinstance(error_from_rpc(error), Fenced):
                    self._identity.end_epoch(header.epoch)
                    return  # the lease is over for good; the next call of the owner registers again
