"""A random life of a manager against a plain model of who holds what, on a clock of its own.

After every step `Engine.check` proves the engine's invariants, and the number of live handles is the model's.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixpool.radix import PoolExhausted, UnknownSequence
from radixpool.rpc.errors import Fenced
from radixpool.rpc.manager import Engine, ManagerOptions
from radixpool.v1 import cache_pb2, common_pb2

TTL_S = 10.0
CLIENTS = [bytes([n]) * 16 for n in range(3)]


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.counter = 0
        options = ManagerOptions(listen="localhost:0", num_blocks=12, block_size=2, lease_ttl_ms=int(TTL_S * 1000))
        self.engine = Engine(options, clock=lambda: self.now, random_bytes=self.next_bytes, incarnation=1)
        self.epochs: dict[bytes, int] = {}  # the last epoch that each client was given
        self.deadlines: dict[bytes, float] = {}  # of the leases that were not ended
        self.owners: dict[bytes, tuple[bytes, int]] = {}  # handle -> (client, epoch); never forgotten

    def next_bytes(self, count: int) -> bytes:
        self.counter += 1
        return self.counter.to_bytes(count, "big")

    def header(self, client: bytes) -> common_pb2.RequestHeader:
        return common_pb2.RequestHeader(client_id=client, epoch=self.epochs.get(client, 0))

    def is_alive(self, client: bytes) -> bool:
        return self.deadlines.get(client, -1.0) > self.now

    def owns(self, handle: bytes) -> bool:
        """Whether the owner's lease is in its table yet: a lapsed one counts until it is swept."""
        client, epoch = self.owners[handle]
        return client in self.deadlines and self.epochs[client] == epoch

    @rule(client=st.sampled_from(CLIENTS))
    def register(self, client: bytes) -> None:
        epoch = self.engine.register_client(client, name="c", role=1)
        assert epoch > max(self.epochs.values(), default=0)
        self.epochs[client] = epoch
        self.deadlines[client] = self.now + TTL_S

    @rule(client=st.sampled_from(CLIENTS))
    def heartbeat(self, client: bytes) -> None:
        alive = self.is_alive(client)
        try:
            self.engine.renew(cache_pb2.HeartbeatRequest(header=self.header(client)))
        except Fenced:
            assert not alive
        else:
            assert alive
            self.deadlines[client] = self.now + TTL_S

    @rule(client=st.sampled_from(CLIENTS))
    def unregister(self, client: bytes) -> None:
        alive = self.is_alive(client)
        try:
            self.engine.unregister_client(self.header(client))
        except Fenced:
            assert not alive
        else:
            assert alive
            del self.deadlines[client]

    @rule(client=st.sampled_from(CLIENTS), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def acquire(self, client: bytes, tokens: list[int]) -> None:
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        request = cache_pb2.AcquireRequest(header=self.header(client), tokens=packed)
        reply = cache_pb2.AcquireResponse()
        alive = self.is_alive(client)
        try:
            self.engine.run("acquire", request, reply)
        except Fenced:
            assert not alive
        except PoolExhausted:
            assert alive
        else:
            assert alive
            self.owners[reply.handle] = (client, self.epochs[client])

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), client=st.sampled_from(CLIENTS), kind=st.sampled_from(["commit", "release", "both"]))
    def use_a_handle(self, data: st.DataObject, client: bytes, kind: str) -> None:
        handle = data.draw(st.sampled_from(sorted(self.owners)))
        alive, owned = self.is_alive(client), self.owns(handle)
        request = (
            cache_pb2.CommitRequest(header=self.header(client), handle=handle, upto_tokens=1)
            if kind == "commit"
            else cache_pb2.ReleaseRequest(
                header=self.header(client), handle=handle, commit_upto_tokens=1 if kind == "both" else None
            )
        )
        reply = cache_pb2.CommitResponse() if kind == "commit" else cache_pb2.ReleaseResponse()
        try:
            self.engine.run("commit" if kind == "commit" else "release", request, reply)
        except Fenced:
            assert not alive
        except UnknownSequence:
            assert alive and not owned
        else:
            assert alive and owned
            if kind != "commit":
                self.owners[handle] = (b"released", 0)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        while self.engine.sweep():
            pass
        self.deadlines = {client: end for client, end in self.deadlines.items() if end > self.now}
        assert self.engine.cache.stats().num_sequences == sum(map(self.owns, self.owners))

    @invariant()
    def consistent(self) -> None:
        self.engine.check()


ManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestManagerMachine = ManagerMachine.TestCase
