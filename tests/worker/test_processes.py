"""Manager, pool holder and workers as real processes over a small random model, and each of them killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from radixpool.radix import Namespace
from radixpool.rpc.client import AsyncClient, AsyncWorkerClient, Client, WorkerClient
from radixpool.rpc.demo.prompts import Turn
from radixpool.rpc.demo.replay import Replay, Target
from radixpool.rpc.demo.supervisor import ProcessFailed, Supervisor
from radixpool.rpc.errors import ManagerUnavailable, PoolMismatch, SequenceLost
from radixpool.rpc.generation import GenerateTokens, SamplingParams
from radixpool.rpc.pool_types import KvDtype

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("worker-processes")]

BLOCK = 16
SALTS = map(str, itertools.count())


JSON_LOGS = ("--log-format", "json")


@pytest.fixture(scope="module")
def system(tiny_model, process_system):
    with Supervisor(parent_dir=Path("/tmp")) as supervisor:
        system = process_system(supervisor, tiny_model, pool_options=JSON_LOGS, worker_options=JSON_LOGS)
        yield system
        assert not system.client.check().violations
        system.client.close()


def nothing_is_held(system):
    cache = system.client.stats().cache
    return cache.held_blocks == cache.quarantined_blocks == 0


def random_tokens(count, seed=None):
    draw = random.Random(seed)
    return [draw.randrange(3, 290) for _ in range(count)]


def test_what_one_worker_computed_the_other_reads(system):
    prompt = random_tokens(100)
    first = system.generate(system.workers[0], prompt)
    second = system.generate(system.workers[1], prompt)
    assert (first.cached, second.cached) == (0, 96)
    alone = system.generate(system.workers[1], prompt, namespace=Namespace(cache_salt=next(SALTS)))
    assert alone.cached == 0
    assert first.tokens == second.tokens == alone.tokens


def test_a_frontend_acquires_generates_and_releases(system, generated):
    prompt = random_tokens(100)
    expected = system.generate(system.workers[0], prompt, 6).tokens
    with system.client.acquire(prompt, namespace=system.namespace) as sequence:
        assert sequence.cached_tokens == 96
        with WorkerClient(system.workers[1].address) as client:
            result = generated(client.generate_sequence(sequence.handle, SamplingParams(max_new_tokens=6)))
        assert result.tokens == expected
        view = system.client.get_block_tables([sequence.handle]).sequences[0]
        assert view.tokens.tolist() == prompt + expected


def test_our_triton_kernels_give_the_same_tokens_where_they_are_asked_for(system):
    """On the CPU they run in Triton's interpreter, over the same pool and beside a worker on the torch reference."""
    (interpreted,) = system.start_workers(1, "--attention", "triton")
    prompt = random_tokens(45, seed=5)
    expected = system.generate(system.workers[0], prompt, namespace=Namespace(cache_salt=next(SALTS))).tokens
    salt = Namespace(cache_salt=next(SALTS))
    cold = system.generate(interpreted, prompt, namespace=salt)
    warm = system.generate(interpreted, prompt, namespace=salt)
    other = system.generate(system.workers[1], prompt, namespace=salt)  # reads what the interpreted kernels wrote
    assert (cold.cached, warm.cached, other.cached) == (0, 32, 32)
    assert cold.tokens == warm.tokens == other.tokens == expected
    assert "on cpu, triton attention" in system.supervisor.log_of(interpreted.name)
    assert "on cpu, torch attention" in system.supervisor.log_of(system.workers[0].name)
    interpreted.popen.terminate()
    assert interpreted.popen.wait(20) == 0


def test_an_fp8_pool_is_one_option(tiny_model, process_system):
    with Supervisor(parent_dir=Path("/tmp")) as supervisor:
        options = ("--kv-dtype", "fp8_e4m3", "--k-scale", "0.5")
        house = process_system(supervisor, tiny_model, pool_options=options)
        spec = house.client.get_pool().spec
        assert (spec.dtype, spec.k_scale, spec.v_scale) == (KvDtype.FLOAT8_E4M3, 0.5, 1.0)
        assert "fp8_e4m3, 0.00 GiB on cpu" in supervisor.log_of(house.pool.name)
        prompt = random_tokens(100, seed=5)
        first, second = (house.generate(worker, prompt) for worker in house.workers)
        alone = house.generate(house.workers[1], prompt, namespace=Namespace(cache_salt=next(SALTS)))
        assert [answer.cached for answer in (first, second, alone)] == [0, 96, 0]
        assert first.tokens == second.tokens == alone.tokens
        with pytest.raises(PoolMismatch, match=r"k_scale: the pool has 0\.5, the worker needs 1\.0"):
            house.client.attach_pool(replace(spec, k_scale=1.0))
        with pytest.raises(ProcessFailed, match="dtype: Triton's interpreter rounds to fp8 wrongly"):
            house.start_workers(1, "--attention", "triton")
        house.client.close()


def test_requests_beyond_the_pool_wait_and_all_end_well(system):
    prompts = [random_tokens(400) for _ in range(16)]  # 16 * 26 blocks, the pool has 256
    chats = [(Turn(f"chat {number}", 1, np.asarray(prompt, np.uint32)),) for number, prompt in enumerate(prompts)]
    targets = [Target(worker.name, worker.address) for worker in system.workers]
    replay = Replay(targets, SamplingParams(max_new_tokens=8))
    outcomes = replay.run(chats, frontends=16)
    replay.close()
    assert [outcome.error for outcome in outcomes] == [""] * 16
    assert system.client.stats().cache.evicted_blocks > 0


def test_prompts_longer_than_pool_or_model_are_refused_by_name(system):
    with pytest.raises(ValueError, match="more than the model's context of 512 tokens"):
        system.generate(system.workers[0], random_tokens(510))
    assert system.generate(system.workers[0], random_tokens(20)).finished


def test_a_worker_whose_pool_does_not_match_says_what_differs(system, tmp_path):
    other = tmp_path / "other-model"
    other.mkdir()
    for path in Path(system.model).iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    command = ["worker", "--address", system.address, "--model", str(other)]
    with pytest.raises(ProcessFailed, match=r"model: the pool has '.*', the worker needs 'other-model'"):
        system.supervisor.start(next(system.names), command)
    with pytest.raises(ProcessFailed, match="another pool is registered"):
        system.supervisor.start(next(system.names), ["pool", "--address", system.address, "--model", system.model])
    assert system.generate(system.workers[0], random_tokens(20)).finished


def run_cli(*arguments):
    command = [sys.executable, "-m", "radixpool.rpc.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("worker", "--model", "/no/such"), 1, "model '/no/such': no such file or directory"),
        (("pool", "--model", "/no/such"), 1, "model '/no/such': no such file or directory"),
        (("worker", "--threads", "0"), 2, "0 is not in the range x>=1"),
        (("worker", "--device", "gpu"), 2, "device must be cpu, cuda or cuda:N, got 'gpu'"),
        (("pool", "--k-scale", "2"), 2, "--k-scale and --v-scale are for --kv-dtype fp8_e4m3, not for float32"),
        (("pool", "--kv-dtype", "fp8_e4m3", "--v-scale", "nan"), 2, "v_scale must be a positive number for fp8"),
        (("pool", "--kv-dtype", "int4"), 2, "'int4' is not one of 'float32', 'bfloat16', 'float16', 'fp8_e4m3'"),
        (("pool", "--log-format", "xml"), 2, "'xml' is not one of 'console', 'json'"),
        (("worker", "--log-level", "chatty"), 2, "'chatty' is not one of 'debug', 'info', 'warning', 'error'"),
        (("demo", "--conversations", "/no/such"), 2, "'/no/such' does not exist"),
        (("demo", "--max-new-tokens", "0"), 2, "0 is not in the range x>=1"),
    ],
)
def test_commands_say_what_is_wrong_in_one_line(arguments, code, message):
    done = run_cli(*arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["pool", "worker", "demo"])
def test_a_gpu_that_is_not_here_is_one_line(system, command):
    options = [] if command == "demo" else ["--address", system.address]
    done = run_cli(command, "--device", "cuda:99", "--model", system.model, *options)
    assert done.returncode == 1, done.stderr
    assert "there is no CUDA driver here" in done.stderr or "this process sees" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "manager", "said"),
    [
        ("pool", "nobody", "waiting up to 30 s for the manager"),
        ("worker", "nobody", "waiting for the manager at unix:/nobody/here.sock and its pool"),
        ("pool", "busy", "another pool is registered"),
    ],
)
def test_a_stop_while_it_waits_is_no_failure(system, command, manager, said):
    """For a manager that does not come, or for the place of a holder that lives."""
    address = system.address if manager == "busy" else "unix:/nobody/here.sock"
    arguments = [command, "--address", address, "--model", system.model]
    command = [sys.executable, "-m", "radixpool.rpc.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert any(said in line for line in process.stderr)
        process.terminate()
        assert process.wait(20) == 0, process.stderr.read()


def test_the_pool_has_no_name_that_could_stay_behind(system, named_memory_of):
    for process in (system.manager, system.pool, *system.workers):
        assert named_memory_of(process.popen.pid) == []
    for process in (system.pool, *system.workers):
        assert "/memfd:radixpool" in Path(f"/proc/{process.popen.pid}/maps").read_text() or process is system.pool


def test_a_worker_killed_under_load_loses_no_cached_block(system):
    """Chats go on over the other worker, which hits what the dead one had committed."""
    draw = random.Random(7)
    prefix = random_tokens(64, seed=7)
    chats = []
    for number in range(4):
        tokens, turns = list(prefix), []
        for turn in range(1, 9):
            tokens = tokens + [draw.randrange(3, 290) for _ in range(32)]
            turns.append(Turn(f"chat {number}", turn, np.asarray(tokens, np.uint32)))
        chats.append(tuple(turns))
    victim, survivor = system.workers
    by_victim, found_before, turn = [], [], threading.Lock()

    def kill_after_a_few(outcome):
        with turn:  # frontends report from threads of their own
            if outcome.worker != victim.name or found_before:
                return
            by_victim.append(outcome)
            if len(by_victim) == 5:
                found_before.extend(system.matched(o.turn.tokens) for o in by_victim)
                victim.kill()

    targets = [Target(worker.name, worker.address) for worker in system.workers]
    replay = Replay(targets, SamplingParams(max_new_tokens=6), on_outcome=kill_after_a_few)
    outcomes = replay.run(chats, frontends=4)
    replay.close()
    assert found_before
    assert not victim.alive
    assert [outcome.error for outcome in outcomes] == [""] * 32
    for outcome, found in zip(by_victim, found_before, strict=True):
        length = len(outcome.turn.tokens)
        assert found == system.matched(outcome.turn.tokens) == length - length % BLOCK
    last = [outcome for outcome in outcomes if outcome.turn.number == 8]
    assert all(outcome.worker == survivor.name for outcome in last)
    assert all(outcome.cached_tokens >= len(outcome.turn.tokens) - 32 - BLOCK for outcome in last)
    again = system.generate(survivor, by_victim[-1].turn.tokens, 6)
    assert again.cached >= len(by_victim[-1].turn.tokens) - BLOCK
    assert again.tokens == list(by_victim[-1].tokens)
    alone = system.generate(survivor, by_victim[-1].turn.tokens, 6, namespace=Namespace(cache_salt=next(SALTS)))
    assert alone.tokens == again.tokens
    # The dead one's lease runs out and what it held comes back.
    system.wait(lambda: system.client.stats().cache.held_blocks == 0)
    system.workers = [*system.start_workers(1), survivor]
    fresh = system.generate(system.workers[0], by_victim[0].turn.tokens)
    assert fresh.cached >= len(by_victim[0].turn.tokens) - BLOCK


@pytest.mark.parametrize("step", ["worker.step.written", "session.sent"])
def test_a_worker_killed_at_a_step_of_the_protocol_leaves_nothing_wrong_behind(system, monkeypatch, step):
    monkeypatch.setenv("RADIXPOOL_FAILPOINTS", f"{step}=kill@4")
    (armed,) = system.start_workers(1)
    monkeypatch.delenv("RADIXPOOL_FAILPOINTS")
    prompt = random_tokens(100)
    with pytest.raises(ManagerUnavailable):
        system.generate(armed, prompt, 24)
    assert armed.popen.wait(10) == -signal.SIGKILL
    survivor = next(worker for worker in system.workers if worker.alive)
    again = system.generate(survivor, prompt, 24)
    alone = system.generate(survivor, prompt, 24, namespace=Namespace(cache_salt=next(SALTS)))
    assert again.cached > 0
    assert again.tokens == alone.tokens


def test_requests_survive_a_killed_manager(system):
    """The same output, and the cache is still there: the manager keeps a block directory."""
    prompt = random_tokens(100)
    expected = system.generate(system.workers[0], prompt, 200).tokens
    results = []
    thread = threading.Thread(target=lambda: results.append(system.generate(system.workers[0], prompt, 200)))
    thread.start()
    time.sleep(0.2)
    system.manager.kill()
    system.manager = system.start_manager()
    thread.join(60)
    assert results
    assert results[0].tokens == expected
    system.wait(lambda: system.client.get_pool() is not None)
    afterwards = system.generate(system.workers[1], prompt + expected)
    assert afterwards.cached == (len(prompt) + len(expected)) // BLOCK * BLOCK
    assert system.generate(system.workers[1], prompt).tokens == expected[:4]
    for process, kind, said in (
        (system.pool, "pool", "registered the pool again"),
        (system.workers[0], "worker", "connected again"),
    ):
        events = logged(system.supervisor.log_of(process.name))
        assert [event["process"] for event in events if event["event"] == said] == [kind]
        assert all(event["level"] in ("info", "warning") and event["timestamp"] for event in events)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"])
def test_a_callers_own_sequence_survives_a_killed_manager(system, sampling):
    """By its handle alone it ends with an error; given as itself, the caller's client acquires it again.

    The same is asked of the blocking and of the asyncio client, at the same time.
    """
    params = SamplingParams(max_new_tokens=150, ignore_eos=True, **sampling)
    prompt = random_tokens(100)
    alone, ours = (replace(system.namespace, cache_salt=next(SALTS)) for _ in range(2))
    with Client(system.address) as owner, WorkerClient(system.workers[0].address) as worker:
        system.wait(lambda: nothing_is_held(system))  # else a manager killed just before still fences its blocks
        with owner.acquire(prompt, namespace=alone) as sequence:
            expected = streamed(worker.generate_sequence(sequence.handle, params))
        whole = owner.acquire(prompt, namespace=ours)
        bare = owner.acquire(random_tokens(40), namespace=ours)
        outcomes = {}

        def note(name, run):
            try:
                outcomes[name] = run()
            except Exception as error:
                outcomes[name] = error

        async def by_asyncio():
            async with (
                AsyncClient(system.address) as owner,
                AsyncWorkerClient(system.workers[0].address) as worker,
                await owner.acquire(prompt, namespace=ours) as sequence,
            ):
                return streamed([event async for event in worker.generate_sequence(sequence, params)])

        begun = threading.Event()
        runs = {
            "whole": lambda: streamed(told(worker.generate_sequence(whole, params), begun)),
            "bare": lambda: streamed(worker.generate_sequence(bare.handle, params)),
            "asyncio": lambda: asyncio.run(by_asyncio()),
        }
        threads = [threading.Thread(target=note, args=named) for named in runs.items()]
        for thread in threads:
            thread.start()
        system.wait(lambda: worker.status().running_sequences == 3 and begun.is_set())
        system.manager.kill()
        system.manager = system.start_manager()
        for thread in threads:
            thread.join(60)
        assert isinstance(outcomes["bare"], SequenceLost), outcomes["bare"]
        assert outcomes["whole"] == expected
        assert outcomes["asyncio"] == expected
        assert whole.num_tokens > len(prompt), "it was acquired again in the middle"
        whole.release()
        system.wait(lambda: system.client.stats().cache.num_sequences == 0)


def told(events, begun):
    """The same events; `begun` is set by the first tokens."""
    for event in events:
        if isinstance(event, GenerateTokens):
            begun.set()
        yield event


def streamed(events):
    return [token for event in events if isinstance(event, GenerateTokens) for token in event.tokens]


def logged(log):
    """The events of a process that logs JSON; its other line says that it is ready."""
    lines = log.splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(lines) - len(events) == 1, log
    return events


def test_a_killed_holder_empties_the_cache_and_workers_move_to_the_new_pool(system):
    prompt = random_tokens(100)
    expected = system.generate(system.workers[0], prompt).tokens
    assert system.matched(prompt) == 96
    old_pool = system.client.get_pool().pool_id
    system.pool.kill()
    system.wait(lambda: system.client.get_pool() is None)
    system.pool = system.start_pool()
    assert system.client.get_pool().pool_id != old_pool
    assert system.matched(prompt) == 0
    for worker in system.workers:
        assert system.generate(worker, prompt).tokens == expected
        with WorkerClient(worker.address) as client:
            assert client.status().pool_id == system.client.get_pool().pool_id


def test_nothing_is_left_when_everything_is_killed(tiny_model, named_memory_of):
    """A demo that is killed takes its processes along; the next one removes its directory."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from radixpool.rpc.demo.supervisor import Supervisor\n"
        "supervisor = Supervisor(parent_dir=Path('/tmp'))\n"
        "address = supervisor.socket_address('m')\n"
        "a = supervisor.start('m', ['serve', '--listen', address, '--num-blocks', '64'])\n"
        f"b = supervisor.start('p', ['pool', '--address', address, '--model', {str(tiny_model)!r}])\n"
        "print(a.popen.pid, b.popen.pid, supervisor._directory, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as demo:
        manager, pool, directory = demo.stdout.readline().split()
        assert named_memory_of(int(manager)) == named_memory_of(int(pool)) == []
        demo.kill()
    deadline = time.monotonic() + 10
    while any(
        Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (manager, pool)
    ):
        assert time.monotonic() < deadline, "a child outlived its parent"
        time.sleep(0.05)
    assert Path(directory).exists()
    Supervisor(parent_dir=Path("/tmp")).stop()
    assert not Path(directory).exists()
