"""Fences: no block that a GPU step may still touch is handed out, and none waits for longer than that."""

from __future__ import annotations

import subprocess
import sys

import pytest

from radixpool.radix import PoolExhausted, UnknownSequence
from radixpool.rpc import operations as ops
from radixpool.rpc.client import Client, ClientRole
from radixpool.rpc.liveness import ProcessWatch, own_process
from radixpool.rpc.manager import Engine, ManagerOptions
from radixpool.rpc.manager.steps import GRACE_S
from radixpool.v1 import cache_pb2, common_pb2

PROMPT = list(range(10))  # three blocks of four


@pytest.fixture
def worker(make_client):
    return make_client(name="worker", role=ClientRole.WORKER)


def states(client: Client) -> tuple[int, int, int, int]:
    cache = client.stats().cache
    return cache.free_blocks, cache.cached_blocks, cache.held_blocks, cache.quarantined_blocks


def test_what_a_launched_step_may_touch_waits_for_it(client, worker):
    seq = client.acquire(PROMPT)
    with worker.session() as session:
        session.batch([ops.GetBlockTables((seq.handle,))], steps=ops.StepReport(0, 1))
        seq.release()
        assert states(client) == (61, 0, 0, 3)
        with pytest.raises(PoolExhausted) as refusal:
            client.acquire(range(4 * 62))
        assert refusal.value.retry_after_step == 1
        (gone,) = session.batch([ops.Commit(seq.handle, 10)], steps=ops.StepReport(1, 1))
        assert isinstance(gone, UnknownSequence)
        assert states(client) == (64, 0, 0, 0)


def test_an_idle_worker_makes_nobody_wait(client, worker):
    seq = client.acquire(PROMPT)
    with worker.session() as session:
        session.batch([ops.GetBlockTables((seq.handle,))], steps=ops.StepReport(0, 1))
        session.batch([ops.Commit(seq.handle, 10)], steps=ops.StepReport(1, 1))
        seq.release()
        assert states(client) == (62, 2, 0, 0)


def test_a_sequence_that_no_worker_used_waits_for_none(client, worker):
    with worker.session() as session:
        session.batch([], steps=ops.StepReport(0, 5))
        client.acquire(PROMPT).release()
        assert states(client) == (64, 0, 0, 0)


def test_row_07_a_worker_names_the_step(worker, client):
    worker.report_steps(ops.StepReport(6, 7))
    seq = worker.acquire(PROMPT)
    seq.commit(10)
    worker.release(seq.handle, after_step=7)
    assert states(client) == (61, 0, 0, 3)
    assert client.match(PROMPT).cached_tokens == 8
    worker.report_steps(ops.StepReport(7, 7))
    assert states(client) == (62, 2, 0, 0)


def test_row_20_a_duplicate_waits_for_the_step_that_may_still_read_it(client, worker):
    first = client.acquire(PROMPT)
    with worker.session() as session:
        (second,) = session.batch([ops.Acquire(PROMPT)], steps=ops.StepReport(0, 2))
        first.commit(10)
        (committed,) = session.batch([ops.Commit(second.handle, 10)], steps=ops.StepReport(1, 3))
        assert [remap.block_index for remap in committed.remaps] == [0, 1]
        assert states(client)[3] == 2
        session.batch([], steps=ops.StepReport(2, 3))
        assert states(client)[3] == 0


def test_row_14_drafts_that_were_rejected_wait_too(client, worker):
    with worker.session() as session:
        (acquired,) = session.batch([ops.Acquire(PROMPT)], steps=ops.StepReport(0, 1))
        session.batch([ops.Commit(acquired.handle, 10), ops.Extend(acquired.handle, [1] * 8)])
        rewound, matched = session.batch([ops.Rewind(acquired.handle, 11), ops.Match([*PROMPT, 1, 1])])
        assert rewound == ops.Rewound(11, 3)
        assert matched == ops.Matched(8)
        assert states(client) == (59, 0, 3, 2)
        session.batch([], steps=ops.StepReport(1, 1))
        assert states(client) == (61, 0, 3, 0)


def test_reports_that_cannot_be_are_refused(client, worker):
    with worker.session() as session:
        session.batch([], steps=ops.StepReport(2, 3))
    for completed, launched, message in ((1, 3, "from 2"), (4, 3, "steps.launched_step"), (2, 2, "at least 3")):
        with pytest.raises(ValueError, match=message):
            worker.batch([ops.Acquire(PROMPT)], steps=ops.StepReport(completed, launched))
    with pytest.raises(ValueError, match="CLIENT_ROLE_WORKER"):
        client.report_steps(ops.StepReport(1, 1))
    assert states(client) == (64, 0, 0, 0)


def test_a_worker_that_leaves_or_comes_again_is_waited_for_no_longer(make_client, client):
    for leave in (Client.close, lambda worker: worker._identity.end_epoch(worker._identity.bare_header().epoch)):
        worker = make_client(role=ClientRole.WORKER)
        seq = client.acquire(PROMPT)
        with worker.session() as session:
            session.batch([ops.GetBlockTables((seq.handle,))], steps=ops.StepReport(0, 1))
        seq.release()
        assert states(client)[3] == 3
        leave(worker)
        if leave is not Client.close:
            worker.report_steps(ops.StepReport(0, 0))  # registers again, in a new epoch
        assert states(client) == (64, 0, 0, 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Life:
    """A manager without a wire, one frontend and one worker that has launched a step over the frontend's sequence."""

    def __init__(self, process: cache_pb2.ProcessIdentity | None) -> None:
        self.clock = Clock()
        self.engine = Engine(ManagerOptions(listen="localhost:0", num_blocks=64, block_size=4), clock=self.clock)
        register = self.engine.register_client
        epoch = register(b"w" * 16, name="w", role=cache_pb2.CLIENT_ROLE_WORKER, process=process)
        header = common_pb2.RequestHeader(client_id=b"w" * 16, epoch=epoch)
        acquire = cache_pb2.Operation(acquire=cache_pb2.AcquireRequest(tokens=bytes(40)))
        steps = cache_pb2.StepReport(completed_step=0, launched_step=1)
        request = cache_pb2.BatchRequest(header=header, operations=[acquire], steps=steps)
        self.engine.run_batch(request, cache_pb2.BatchResponse())

    def wait(self, seconds: float) -> tuple[int, int]:
        """Return the free and the quarantined blocks after so many seconds."""
        self.clock.now += seconds
        while self.engine.sweep():
            pass
        self.engine.check()
        cache = self.engine.cache.stats()
        return cache.free_blocks, cache.quarantined_blocks


def test_a_silent_worker_that_cannot_be_watched_is_waited_out():
    life = Life(process=None)
    assert life.wait(10) == (61, 3)
    assert life.wait(GRACE_S - 0.1) == (61, 3)
    assert life.wait(0.1) == (64, 0)


def test_a_silent_worker_that_lives_is_waited_for_until_it_dies():
    command = "import sys; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        identity = own_process()
        identity.pid = process.pid
        life = Life(identity)
        assert life.wait(10) == (61, 3)
        assert life.wait(3600) == (61, 3)
        process.kill()
        process.wait()
        assert life.wait(0.1) == (64, 0)


def test_a_silent_worker_that_registers_again_is_waited_for_no_longer():
    life = Life(own_process())
    assert life.wait(10) == (61, 3)
    life.engine.register_client(b"w" * 16, name="w", role=cache_pb2.CLIENT_ROLE_WORKER, process=own_process())
    assert life.wait(0) == (64, 0)


def test_a_process_of_another_machine_cannot_be_watched():
    identity = own_process()
    assert ProcessWatch(identity).is_certain
    assert not ProcessWatch(identity).is_dead
    for change in ({"boot_id": "elsewhere"}, {"namespace": 1}, {"pid": 0}, {"pid": 2**32 - 1}):
        other = cache_pb2.ProcessIdentity()
        other.CopyFrom(identity)
        for name, value in change.items():
            setattr(other, name, value)
        assert not ProcessWatch(other).is_certain
