"""A state machine of requests, cancellations, other holders and lost managers against the engine."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from radixpool.radix import Namespace
from radixpool.rpc.generation import SamplingParams
from radixpool.rpc.operations import Acquire, Acquired, Release
from radixpool.rpc.worker.cache_port import CacheLost
from radixpool.rpc.worker.errors import OutOfMemory

PREFIXES = ([1] * 12, [1] * 6 + [2] * 6, [3, 4] * 10, [])
prompts = st.tuples(st.sampled_from(PREFIXES), st.lists(st.integers(0, 4), min_size=1, max_size=6)).map(
    lambda p: p[0] + p[1]
)


def machine(make_harness, answer_of, expected_tokens):
    class EngineMachine(RuleBasedStateMachine):
        calls = Bundle("calls")
        borrowed = Bundle("borrowed")
        foreign = Bundle("foreign")

        @initialize(num_blocks=st.integers(12, 40), budget=st.integers(1, 40), reserve=st.integers(0, 9))
        def start(self, num_blocks, budget, reserve):
            self.harness = make_harness(
                num_blocks=num_blocks, token_budget=budget, reserve_tokens=reserve, stall_timeout_s=1.0, max_running=5
            )
            self.expected = {}
            self.cancelled = set()
            self.lost = set()
            self.borrowed_handles = {}
            self.borrowed_calls = set()

        @rule(target=calls, prompt=prompts, new=st.integers(1, 12), salt=st.sampled_from(["", "s"]))
        def submit(self, prompt, new, salt):
            call = self.harness.submit(prompt, new, namespace=Namespace(cache_salt=salt))
            self.expected[call] = expected_tokens(prompt, SamplingParams(max_new_tokens=new))
            return call

        @rule(target=borrowed, prompt=prompts, new=st.integers(1, 8))
        def submit_borrowed(self, prompt, new):
            acquired = self.harness.port.batch([Acquire(prompt, Namespace())])[0]
            if not isinstance(acquired, Acquired):
                return multiple()
            call = self.harness.submit_handle(acquired.handle, new)
            self.expected[call] = expected_tokens(prompt, SamplingParams(max_new_tokens=new))
            self.borrowed_handles[call] = acquired.handle
            self.borrowed_calls.add(call)
            return call

        @rule(call=consumes(calls))
        def cancel(self, call):
            self.harness.engine.cancel(call)
            self.cancelled.add(call)

        @rule(steps=st.integers(1, 6))
        def run(self, steps):
            for _ in range(steps):
                self.harness.now += 0.1
                self.harness.step()
                self.notice_losses()

        @rule()
        def out_of_memory(self):
            self.harness.runner.fail_with = [OutOfMemory("injected")]

        @rule(target=foreign, tokens=st.lists(st.integers(0, 4), min_size=1, max_size=30))
        def others_take_blocks(self, tokens):
            acquired = self.harness.port.batch([Acquire(tokens, Namespace(tenant="other"))])[0]
            return acquired.handle if isinstance(acquired, Acquired) else multiple()

        @rule(handle=consumes(foreign))
        def others_give_blocks_back(self, handle):
            self.harness.port.batch([Release(handle)])

        @rule(n=st.integers(1, 20))
        def evict(self, n):
            self.harness.cache.evict(n)

        @rule()
        def lose_the_manager(self):
            self.harness.engine.interrupt(CacheLost("gone"))
            self.harness.port.void()
            self.harness.losses += 1
            self.notice_losses()

        @rule(calls=st.integers(1, 4), reply_lost=st.booleans())
        def lose_the_manager_during_a_step(self, calls, reply_lost):
            self.harness.port.lost_in, self.harness.port.reply_lost = calls, reply_lost

        def notice_losses(self):
            if self.harness.losses:
                self.harness.losses = 0
                self.lost.update(self.borrowed_handles)
                self.borrowed_handles.clear()

        @rule(at=st.integers(0, 5))
        def lose_one_sequence(self, at):
            """Its lease is over; the manager keeps its blocks from others until the step under way is over."""
            known = self.harness.port._sequences
            running = [seq for seq in self.harness.engine._running if seq.owned and seq.handle in known]
            if running:
                lost = known.pop(running[at % len(running)].handle)
                self.harness.cache.release(lost, after_step=self.harness.steps)

        @invariant()
        def holds(self):
            if hasattr(self, "harness"):
                self.harness.engine.check()
                self.harness.cache.check()

        def teardown(self):
            if not hasattr(self, "harness"):
                return
            harness = self.harness
            harness.runner.fail_with = []
            harness.port.lost_in = -1
            engine_handles = {sequence.handle for sequence in harness.engine._running}
            for handle in set(harness.port._sequences) - engine_handles - set(self.borrowed_handles.values()):
                harness.port.batch([Release(handle)])
            for _ in range(1000):
                harness.now += 0.1
                harness.step()
                active = {sequence.call for sequence in harness.engine._running} | set(harness.engine._waiting)
                ended = [call for call in self.borrowed_handles if call not in active]
                harness.port.batch([Release(self.borrowed_handles.pop(call)) for call in ended])
                if not active:
                    break
            for call, expected in self.expected.items():
                answer = answer_of(call)
                assert expected[: len(answer.tokens)] == answer.tokens, "wrong tokens"
                if call in self.cancelled or call in self.lost:
                    continue
                failed_alone = call in self.borrowed_calls and answer.error is not None  # stalled, or out of memory
                out_of_memory = isinstance(answer.error, OutOfMemory)
                assert failed_alone or out_of_memory or (answer.finished and answer.tokens == expected)
            stats = harness.cache.stats()
            assert (stats.held_blocks, stats.num_sequences) == (0, 0)

    return EngineMachine


def test_outputs_are_right_whatever_happens(make_harness, answer_of, expected_tokens):
    run = machine(make_harness, answer_of, expected_tokens).TestCase
    run.settings = settings(
        max_examples=int(os.environ.get("EXAMPLES", "60")),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run().runTest()
