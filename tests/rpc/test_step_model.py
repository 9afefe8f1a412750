"""A step in columns against the same single operations: two managers live the same life, one says it in columns.

After every message both have the same tree, tables, tokens and counters, and gave the same answers.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixpool.rpc import operations as ops
from radixpool.rpc.client.stepping import batch_request, batch_results, stepped
from radixpool.rpc.manager import Engine, ManagerOptions
from radixpool.rpc.step_columns import Step, Stepped
from radixpool.v1 import cache_pb2, common_pb2

CLIENT = b"c" * 16
UNKNOWN = b"?" * 16
TOKENS = st.one_of(st.sampled_from([[0] * 5, [0, 1] * 3]), st.lists(st.integers(0, 1), min_size=1, max_size=9))
"""Few ids and short prompts in a small pool: twins, hits and refusals are frequent."""
ROW = st.tuples(
    st.integers(0, 7),
    st.lists(st.integers(0, 1), max_size=3),
    st.sampled_from([0, 3, 4, 5, 6, 7, 8, 12]),
    st.sampled_from([False] * 9 + [True]),
)
"""Which sequence, its new tokens, what is committed of it, and whether it ends."""


class Life:
    """A manager without a wire and one client of it, whose handles count up."""

    def __init__(self, role: int) -> None:
        self.counter = 0
        options = ManagerOptions(listen="localhost:0", num_blocks=20, block_size=2, advice_cpu_share=0.0)
        self.engine = Engine(options, clock=lambda: 0.0, random_bytes=self.next_bytes, incarnation=1)
        self.header = common_pb2.RequestHeader(client_id=CLIENT)
        self.header.epoch = self.engine.register_client(CLIENT, name="c", role=role)

    def next_bytes(self, count: int) -> bytes:
        self.counter += 1
        return self.counter.to_bytes(count, "big")

    def batch(self, request: cache_pb2.BatchRequest) -> cache_pb2.BatchResponse:
        self.header.request_id += 1
        request.header.CopyFrom(self.header)
        reply = cache_pb2.BatchResponse()
        self.engine.run_batch(request, reply)
        return reply

    def results(self, operations: list[ops.Operation], steps: ops.StepReport | None = None) -> list:
        request = batch_request(cache_pb2.BatchRequest, operations, steps)
        return batch_results(self.batch(request), request)

    def state(self) -> object:
        """Return all that can be seen of the cache."""
        cache = self.engine.cache
        views = [
            (held.handle, len(held.workers), seq.packed_tokens, seq.packed_block_table, seq.committed_tokens, seq.state)
            for held in self.engine.handles
            for seq in [held.sequence]
        ]
        return views, asdict(cache.stats()), cache.snapshot(), cache.workers()


def in_one_row(results: list[ops.Result | Exception]) -> dict:
    """Return what a row has to answer where the single operations answered so."""
    answer: dict = {"error": None, "blocks": [], "remaps": []}
    for result in results:
        match result:
            case ops.Extended(num_tokens, appended_blocks, invalid):
                answer |= {"num_tokens": num_tokens, "blocks": appended_blocks.tolist(), "invalid": invalid}
            case ops.Committed(committed_tokens, remaps, invalid):
                moved = [(remap.block_index, remap.from_block, remap.to_block) for remap in remaps]
                answer |= {"committed_tokens": committed_tokens, "remaps": moved, "invalid": invalid}
            case Exception():
                answer["error"] = answer["error"] or repr(result)
    return answer


def row_of(result: Stepped, row: int, expected: dict) -> dict:
    """Return what the columns answer for a row, the lengths only where `expected` has them."""
    error = result.errors.get(row)
    remaps = zip(
        result.remap_rows, result.remap_block_indices, result.remap_from_blocks, result.remap_to_blocks, strict=True
    )
    invalid = dict(zip(result.invalid_rows, result.invalid_from_blocks, strict=True))
    answer = {
        "num_tokens": result.num_tokens[row],
        "committed_tokens": result.committed_tokens[row],
        "error": None if error is None else repr(error),
        "blocks": result.appended_blocks[result.appended_rows == row].tolist(),
        "remaps": [tuple(remap) for number, *remap in remaps if number == row],
        "invalid": invalid.get(row),
    }
    return {name: value for name, value in answer.items() if name in expected}


class StepMachine(RuleBasedStateMachine):
    @initialize(role=st.sampled_from([cache_pb2.CLIENT_ROLE_FRONTEND, cache_pb2.CLIENT_ROLE_WORKER]))
    def start(self, role: int) -> None:
        self.columns, self.single = Life(role), Life(role)
        self.is_worker = role == cache_pb2.CLIENT_ROLE_WORKER
        self.handles: list[bytes] = []
        self.gone = UNKNOWN
        self.completed = self.launched = 0

    def both(self, operations: list[ops.Operation]) -> list:
        first, second = (life.results(operations) for life in (self.columns, self.single))
        assert repr(first) == repr(second)
        return first

    @rule(tokens=TOKENS, reserve=st.integers(0, 3))
    def acquire(self, tokens: list[int], reserve: int) -> None:
        (result,) = self.both([ops.Acquire(tokens, reserve=reserve)])
        if isinstance(result, ops.Acquired):
            self.handles.append(result.handle)

    @precondition(lambda self: self.handles)
    @rule(index=st.integers(0, 7), to=st.integers(2, 7))
    def rewind(self, index: int, to: int) -> None:
        self.both([ops.Rewind(self.handles[index % len(self.handles)], to)])

    @precondition(lambda self: self.handles)
    @rule(index=st.integers(0, 7), block=st.sampled_from([0, 3, 3, 3]))
    def invalidate(self, index: int, block: int) -> None:
        self.both([ops.Invalidate(self.handles[index % len(self.handles)], block)])

    @rule(
        drawn=st.lists(ROW, max_size=8, unique_by=lambda row: row[0]),
        reports=st.booleans(),
        completes=st.booleans(),
        launches=st.integers(0, 2),
    )
    def step(self, drawn: list[tuple], *, reports: bool, completes: bool, launches: int) -> None:
        named = [*self.handles, self.gone]
        drawn = [row for row in drawn if row[0] < len(named)]
        handles = [named[row[0]] for row in drawn]
        tokens = [row[1] for row in drawn]
        uptos = [row[2] for row in drawn]
        ends = [ops.Release(handle) for handle, row in zip(handles, drawn, strict=True) if row[3]]
        report = None
        if reports and self.is_worker:
            self.completed = self.launched if completes else self.completed
            self.launched += launches
            report = ops.StepReport(self.completed, self.launched)
        rows: list[list[ops.Operation]] = [
            [*([ops.Extend(handle, new)] if new else []), ops.Commit(handle, upto)]
            for handle, new, upto in zip(handles, tokens, uptos, strict=True)
        ]
        singles = iter(self.single.results([*chain.from_iterable(rows), *ends], report))
        step = Step(
            handles=handles,
            tokens=[token for new in tokens for token in new],
            token_counts=[len(new) for new in tokens],
            commit_upto_tokens=uptos,
        )
        request = batch_request(cache_pb2.BatchRequest, ends, report, step=step)
        result = stepped(self.columns.batch(request), request)
        for number, row in enumerate(rows):
            expected = in_one_row([next(singles) for _ in row])
            assert row_of(result, number, expected) == expected
        assert repr(list(result.results)) == repr(list(singles))
        for end in ends:
            if end.handle in self.handles:
                self.handles.remove(end.handle)
                self.gone = end.handle

    @invariant()
    def same_state(self) -> None:
        assert self.columns.state() == self.single.state()
        self.columns.engine.check()
        self.single.engine.check()


StepMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestStepMachine = StepMachine.TestCase
