"""All state of a manager behind one lock: the cache, the handles, the leases, the pool. Knows nothing of gRPC.

Every public method takes the lock itself. The invariant over the parts, which `check` proves: a sequence of the cache
has exactly one handle, which belongs to exactly one lease, live or waiting to be swept.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from radixpool.radix import EventLog, RadixCache
from radixpool.radix.errors import InvariantViolation, RadixPoolError
from radixpool.rpc import limits
from radixpool.rpc.errors import Fenced, Recovering
from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.liveness import ProcessWatch
from radixpool.rpc.manager.handles import HandleTable, RandomBytes
from radixpool.rpc.manager.leases import Lease, LeaseTable
from radixpool.rpc.manager.misses import EventTimes, MissExplainer
from radixpool.rpc.manager.operations import Operations
from radixpool.rpc.manager.options import ManagerOptions
from radixpool.rpc.manager.places import Places
from radixpool.rpc.manager.pools import PoolRegistry
from radixpool.rpc.manager.recovery import FormerLife
from radixpool.rpc.manager.replies import ReplyCache
from radixpool.rpc.manager.shadow import Shadow
from radixpool.rpc.manager.steps import WorkerSteps
from radixpool.v1 import cache_pb2, common_pb2, pool_pb2

_LEASED = failpoint("register.leased")
_RECORDED = failpoint("register.recorded")
_RENEWED = failpoint("heartbeat.renewed")
_REPLY_KEPT = failpoint("reply.kept")
_SLICE = failpoint("sweep.slice")
_TAKEN_OVER = failpoint("pool.taken_over")
_EMPTIED = failpoint("pool.emptied")


class Engine:
    """The manager's state and every change to it.

    `clock` gives monotonic seconds, `random_bytes` the capabilities, `incarnation` a number greater than that of every
    earlier life, `former_life` the cache of the one before.
    """

    def __init__(
        self,
        options: ManagerOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] | None = None,
        incarnation: int | None = None,
        former_life: FormerLife | None = None,
    ) -> None:
        self.options = options
        self.former_life = former_life or FormerLife()
        self.incarnation = self.former_life.incarnation if incarnation is None else incarnation
        self.generation = self.former_life.generation
        self.expired_leases = 0
        self.fenced_requests = 0
        self.sessions = Places("sessions", lambda: limits.MAX_SESSIONS)
        self.subscribers = Places("event subscribers", lambda: limits.MAX_SUBSCRIBERS)
        self.event_log_id = self.incarnation
        self.on_refusal: Callable[[str], None] = lambda _reason: None
        self.lock = threading.Lock()
        self._clock = clock
        self._random_bytes = random_bytes or RandomBytes()
        self._started_at = clock()
        # Epochs count up over all lives of the manager, so that one of an earlier life never matches.
        self.leases = LeaseTable(ttl_s=options.lease_ttl_ms / 1000, clock=clock, first_epoch=self.incarnation)
        self.pools = PoolRegistry(num_blocks=options.num_blocks, block_size=options.block_size)
        self.replies = ReplyCache(clock)
        self.shadow = Shadow(options, clock=clock)
        self._dying: deque[Lease] = deque()
        self._is_draining = False
        self._start_cache()
        self.former_life.restore(self.cache)
        self.pools.last_pool_id = self.former_life.last_pool_id

    def _start_cache(self) -> None:
        self.cache = RadixCache(
            self.options.num_blocks,
            self.options.block_size,
            policy=self.options.policy,
            clock=self._clock,
            persistence=self.former_life.persistence,
            events=EventLog(),
        )
        self.event_log_id += 1
        self.handles = HandleTable(self._random_bytes, is_draining=self._is_draining)
        self._event_times = EventTimes(self._clock)
        self.misses = MissExplainer(self.cache, self.handles, self._event_times)
        self.steps = WorkerSteps(self.cache, self._clock)
        self.removals: Counter[str] = Counter()
        self.operations = Operations(
            self.cache,
            self.handles,
            self.steps,
            on_refusal=self._refused,
            shadow=self.shadow,
            removals=self.removals,
        )

    def _refused(self, reason: str) -> None:
        self.on_refusal(reason)

    # Requests.

    def run(self, kind: str, request: Any, reply: Any) -> None:
        """Run one operation under the header of its own request and fill `reply`. Raises what the operation raises."""
        self._require_recovered()
        self.run_once(request.header, reply, lambda lease: self.operations.run_one(kind, lease, request, reply))

    def run_batch(
        self,
        request: cache_pb2.BatchRequest | cache_pb2.SessionRequest,
        reply: cache_pb2.BatchResponse | cache_pb2.SessionResponse,
    ) -> None:
        """Run operations in order, each by itself, and fill `reply`. Raises for the batch as a whole only."""
        count = len(request.operations)
        if count > limits.MAX_BATCH_OPERATIONS:
            raise ValueError(f"operations: the limit is {limits.MAX_BATCH_OPERATIONS}, got {count}")
        self._require_recovered()
        self.run_once(request.header, reply, lambda lease: self.operations.run_all(lease, request, reply))

    def run_once(self, header: common_pb2.RequestHeader, reply: Any, act: Callable[[Lease], None]) -> None:
        """Admit the caller, `act` and keep the outcome; a request that was here before gets its first one instead."""
        with self.lock:
            lease = self._admit(header)
            if not header.request_id:
                act(lease)
                self.stamp(reply.header)
                return
            outcome = self.replies.find(lease, header)
            if outcome is None:
                outcome = self._outcome(reply, lease, act)
                self.replies.keep(lease, header.request_id, outcome)
                _REPLY_KEPT()
            elif isinstance(outcome, type(reply)):
                reply.CopyFrom(outcome)
            elif not isinstance(outcome, Exception):
                raise ValueError(f"request_id {header.request_id} belongs to an earlier request of another kind")
            if isinstance(outcome, Exception):
                raise outcome.with_traceback(None)

    def _outcome(self, reply: Any, lease: Lease, act: Callable[[Lease], None]) -> Any:
        try:
            act(lease)
        except (RadixPoolError, ValueError, TypeError) as error:
            return error
        self.stamp(reply.header)
        return reply

    def match(self, request: cache_pb2.MatchRequest, reply: cache_pb2.MatchResponse) -> None:
        """Say how much is cached; needs no lease."""
        self._require_recovered()
        with self.lock:
            self.operations.match(request, reply)
            self.stamp(reply.header)

    def get_block_tables(
        self, request: cache_pb2.GetBlockTablesRequest, reply: cache_pb2.GetBlockTablesResponse
    ) -> None:
        """Describe sequences by their handles; needs no lease."""
        with self.lock:
            self.operations.get_block_tables(request, reply)
            self.stamp(reply.header)

    def _require_recovered(self) -> None:
        """Raise Recovering while a restored cache waits for its pool. Not kept as a reply: the call may be repeated."""
        if self.former_life.awaits_pool:
            raise Recovering("the manager has restarted and waits for the pool of its cache to register again")

    def stamp(self, header: common_pb2.ResponseHeader) -> None:
        """Say in a reply which life answered."""
        header.incarnation = self.incarnation
        header.generation = self.generation

    def uptime_ms(self) -> int:
        """Return how long this life has lasted."""
        return int((self._clock() - self._started_at) * 1000)

    # Clients.

    def register_client(
        self, client_id: bytes, *, name: str, role: int, process: cache_pb2.ProcessIdentity | None = None
    ) -> int:
        """Start a new epoch and return it; sequences of the epoch before are aborted. Raises LimitExceeded."""
        with self.lock:
            lease, former = self.leases.register(client_id, name=name, role=role)
            for life_before in filter(None, (former, self.steps.find_lost(client_id))):
                self.steps.replaced(life_before)
            if former is not None:
                self._bury(former)
            _LEASED()
            try:
                self.former_life.client_registered(client_id, role, process)
            except RadixPoolError:
                self.leases.end(client_id)
                raise
            _RECORDED()
            if role == cache_pb2.CLIENT_ROLE_WORKER:
                lease.process = ProcessWatch(process)
                self.steps.add(lease)
            return lease.epoch

    def renew(self, request: cache_pb2.HeartbeatRequest) -> None:
        """Renew a live lease and take a worker's report. Raises Fenced, ValueError."""
        with self.lock:
            lease = self._admit(request.header)
            if request.HasField("steps"):
                self.steps.completed(lease, request.steps)
                self.steps.launched(lease, request.steps)
            self.leases.renew(lease)
            _RENEWED()

    def unregister_client(self, header: common_pb2.RequestHeader) -> int:
        """End a live lease, abort its sequences and return how many there were. Raises Fenced."""
        with self.lock:
            lease = self._admit(header)
            self.leases.end(lease.client_id)
            num_sequences = len(lease.handles)
            self.steps.left(lease)
            self._bury(lease)
            return num_sequences

    def sweep(self) -> bool:
        """Abort a slice of what expired clients held. Returns whether there is more to do at once.

        Holds the lock for at most `EXPIRY_SLICE_SEQUENCES` releases, fewer when they reach `EXPIRY_SLICE_BLOCKS`, so
        that others wait no longer than that.
        """
        with self.lock:
            self.former_life.poll()
            while (lease := self.leases.pop_expired()) is not None:
                self.expired_leases += 1
                if lease.role == cache_pb2.CLIENT_ROLE_WORKER:
                    self.steps.lost(lease)
                self._bury(lease)
            for worker in self.steps.poll():
                self._gone(worker)
            self.cache.expire()
            self._note_event_time()
            num_blocks = 0
            for _ in range(limits.EXPIRY_SLICE_SEQUENCES):
                if not self._dying:
                    return self.former_life.is_ending
                held = self.handles.take_one(self._dying[0])
                if held is None:
                    self._gone(self._dying.popleft())
                else:
                    num_blocks += held.sequence.num_blocks
                    self.cache.release(held.sequence, after_step=self.steps.fence(held, None))
                    _SLICE()
                    if num_blocks >= limits.EXPIRY_SLICE_BLOCKS:
                        return True
            return bool(self._dying) or self.former_life.is_ending

    def _note_event_time(self) -> None:
        if self.cache.events is not None:
            self._event_times.note(self.cache.events.last_seq)

    def _bury(self, dead: Lease) -> None:
        """Queue the sequences of an ended lease for the sweep; their handles are void from now on."""
        if dead.handles:
            self._dying.append(dead)
        else:
            self._gone(dead)

    def _gone(self, dead: Lease) -> None:
        """Forget the client of an ended lease, unless it lives on, is being swept, or may still run a step."""
        client_id = dead.client_id
        waited_for = self.steps.find_lost(client_id) is not None
        if (
            not waited_for
            and client_id not in self.leases
            and all(lease.client_id != client_id for lease in self._dying)
        ):
            self.former_life.client_gone(client_id)

    def _admit(self, header: common_pb2.RequestHeader) -> Lease:
        try:
            return self.leases.admit(header.client_id, header.epoch)
        except Fenced:
            self.fenced_requests += 1
            raise

    # The pool.

    def register_pool(self, request: pool_pb2.RegisterPoolRequest, reply: pool_pb2.RegisterPoolResponse) -> None:
        """Take over a pool. One with other bytes than before empties the cache and fences every other client."""
        self.run_once(request.header, reply, lambda holder: self._take_over_pool(request.pool, holder))

    def _take_over_pool(self, pool: pool_pb2.Pool, holder: Lease) -> None:
        had_pool = bool(self.pools.last_pool_id)
        # What was committed before there was any pool lies in no pool; what was only acquired may go on.
        if self.pools.register(pool, holder) and (had_pool or self.cache.stats().num_nodes):
            self._start_generation(keep=holder)
        _TAKEN_OVER()
        self.former_life.pool_registered(pool.pool_id)

    def _start_generation(self, *, keep: Lease) -> None:
        for lease in list(self.leases):
            if lease is not keep:
                self.leases.end(lease.client_id)
                lease.process.close()
        self.steps.close()
        keep.handles.clear()
        self._dying.clear()
        self.generation += 1
        self.former_life.pool_replaced(self.generation, holder_id=keep.client_id)
        _EMPTIED()
        self._start_cache()

    def pool_state(self) -> tuple[bool, bool]:
        """Return whether a pool is registered, and whether a restored cache waits for one."""
        with self.lock:
            return self.pools.pool is not None, self.former_life.awaits_pool

    def begin_generation(self) -> None:
        """Count a new generation of content. The caller holds the lock."""
        self.generation += 1
        self.former_life.set_generation(self.generation)

    # The end.

    def begin_drain(self) -> None:
        """Take no new sequences from now on; live ones may go on to their end."""
        with self.lock:
            self._is_draining = self.handles.is_draining = True

    def is_drained(self) -> bool:
        """Return whether no sequence is alive."""
        with self.lock:
            return len(self.handles) == 0

    def close(self) -> None:
        """Let go of the directory; nothing may be called afterwards."""
        with self.lock:
            self.former_life.close()

    # Proof.

    def check(self) -> None:
        """Raise InvariantViolation unless the cache, the handles and the leases agree. O(everything)."""
        with self.lock:
            self.cache.check()
            self.former_life.check(self.cache)
            owned = [handle for lease in (*self.leases, *self._dying) for handle in lease.handles]
            live = {sequence.handle for sequence in self.cache.sequences()}
            problems = []
            if sorted(owned) != sorted(held.handle for held in self.handles):
                problems.append(f"{len(owned)} handles under leases, {len(self.handles)} in the table")
            if live != {held.sequence.handle for held in self.handles}:
                problems.append(f"{len(live)} sequences in the cache, {len(self.handles)} handles")
            if problems:
                raise InvariantViolation("; ".join(problems))
