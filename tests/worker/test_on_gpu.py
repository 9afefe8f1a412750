"""The worker on a GPU: one pool in its memory, shared between real processes by descriptor, our own kernels over it.

In float32 the tokens are those of transformers' `generate`. What the driver says when it refuses is tested without a
GPU, in test_cuda_pool.py.
"""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from radixpool.radix import Namespace, RadixCache
from radixpool.rpc.client import WorkerClient
from radixpool.rpc.convert import pool_to_wire
from radixpool.rpc.demo.prompts import Turn
from radixpool.rpc.demo.replay import Replay, Target
from radixpool.rpc.demo.supervisor import ProcessFailed, Supervisor
from radixpool.rpc.generation import SamplingParams
from radixpool.rpc.pool.attach import attach
from radixpool.rpc.pool.cuda import CudaDevice
from radixpool.rpc.pool.device import Device
from radixpool.rpc.pool.geometry import pool_bytes
from radixpool.rpc.pool.holder import IpcMemory, PoolHolder
from radixpool.rpc.pool.sockets import DescriptorRefused
from radixpool.rpc.pool.tensors import CudaMapping, pool_on_device, private_pool
from radixpool.rpc.pool_types import CudaFdAttachment, KvDtype, Pool
from radixpool.rpc.worker.cache_port import LocalPort
from radixpool.rpc.worker.engine import Engine
from radixpool.rpc.worker.errors import DeviceLost
from radixpool.rpc.worker.limits import EngineLimits
from radixpool.rpc.worker.model import ModelRunner, computed_in, load_model
from radixpool.rpc.worker.model_source import find_model, pool_spec_for
from radixpool.rpc.worker.requests import GenerateCall, PromptSource
from radixpool.rpc.worker.step import StepBatch, idle_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.xdist_group("worker-gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEW_TOKENS = 10
GPU = Device(0)
SALTS = map(str, itertools.count())


def random_tokens(count, seed=None):
    draw = random.Random(seed)
    return [draw.randrange(3, 290) for _ in range(count)]


@pytest.fixture(scope="module")
def reference(tiny_model):
    """The tokens of transformers alone, on the GPU in float32."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval().to("cuda")

    def generate(prompt, count=NEW_TOKENS):
        with torch.inference_mode():
            ids = torch.tensor([prompt], device="cuda")
            out = plain.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    return generate


# Processes.


@pytest.fixture(scope="module")
def system(tiny_model, process_system):
    with Supervisor(parent_dir=Path("/tmp")) as supervisor:
        options = ("--device", "cuda:0")
        system = process_system(
            supervisor, tiny_model, pool_options=(*options, "--dtype", "float32"), worker_options=options
        )
        yield system
        assert not system.client.check().violations
        system.client.close()


def test_the_pool_lies_on_the_gpu_and_its_holder_needs_no_torch(system):
    pool = system.client.get_pool()
    assert isinstance(pool.attachment, CudaFdAttachment)
    assert pool.attachment.device_uuid == CudaDevice(0).uuid
    assert pool.attachment.size_bytes >= pool_bytes(pool.spec)
    maps = Path(f"/proc/{system.pool.popen.pid}/maps").read_text()
    assert "libcuda" in maps
    assert "libtorch" not in maps


def test_what_one_worker_computed_the_other_reads_and_both_are_right(system, reference):
    prompt = random_tokens(100, seed=1)
    first = system.generate(system.workers[0], prompt, NEW_TOKENS)
    second = system.generate(system.workers[1], prompt, NEW_TOKENS)
    alone = system.generate(system.workers[1], prompt, NEW_TOKENS, namespace=Namespace(cache_salt=next(SALTS)))
    assert (first.cached, second.cached, alone.cached) == (0, 96, 0)
    assert first.tokens == second.tokens == alone.tokens == reference(prompt)


def test_many_at_once_over_both_workers(system, reference):
    """Prefixes of several lengths, in company that changes from step to step."""
    prefix = random_tokens(80, seed=2)
    prompts = [prefix[: 16 * (n % 6)] + random_tokens(3 + 17 * (n % 5), seed=10 + n) for n in range(24)]
    chats = [(Turn(f"chat {n}", 1, np.asarray(prompt, np.uint32)),) for n, prompt in enumerate(prompts)]
    replay = Replay([Target(w.name, w.address) for w in system.workers], SamplingParams(max_new_tokens=NEW_TOKENS))
    outcomes = replay.run(chats, frontends=12)
    replay.close()
    assert [outcome.error for outcome in outcomes] == [""] * 24
    assert [list(outcome.tokens) for outcome in outcomes] == [reference(prompt) for prompt in prompts]


def test_a_frontend_acquires_and_a_worker_computes(system, reference, generated):
    prompt = random_tokens(70, seed=3)
    with system.client.acquire(prompt, namespace=system.namespace) as sequence:
        with WorkerClient(system.workers[0].address) as client:
            result = generated(client.generate_sequence(sequence.handle, SamplingParams(max_new_tokens=NEW_TOKENS)))
        assert result.tokens == reference(prompt)


def test_a_worker_on_the_cpu_is_told_where_the_pool_lies(system):
    command = ["worker", "--address", system.address, "--model", system.model]
    with pytest.raises(ProcessFailed, match="device: the pool lies in the memory of a GPU, this worker runs on cpu"):
        system.supervisor.start(next(system.names), command)


def test_this_process_maps_the_pool_and_lets_go_of_it(system):
    """The tensors keep the mapping, and their end unmaps it; the holder's memory stays as it is."""
    description = system.client.get_pool()
    prompt = random_tokens(32, seed=4)
    system.generate(system.workers[0], prompt)
    pool = attach(description, expected=description.spec, device=GPU)
    assert pool.k[0].shape == (256, 2, 16, 16)
    assert pool.k[0].dtype is torch.float32
    with system.client.acquire([*prompt, 5], namespace=system.namespace) as sequence:
        blocks = torch.as_tensor(sequence.block_table[:2].astype(np.int64), device="cuda")
        assert torch.count_nonzero(pool.k[1][blocks]) == pool.k[1][blocks].numel()
    again = attach(description, expected=description.spec, device=GPU)
    assert torch.equal(pool.v[1], again.v[1])
    del pool, again, blocks
    gc.collect()
    assert system.generate(system.workers[1], prompt).cached == 16


def test_a_worker_killed_under_load_leaves_the_pool_whole(system, reference):
    prefix = random_tokens(64, seed=7)
    chats = []
    for number in range(4):
        tokens, turns = list(prefix), []
        for turn in range(1, 9):
            tokens = tokens + random_tokens(32, seed=100 * number + turn)
            turns.append(Turn(f"chat {number}", turn, np.asarray(tokens, np.uint32)))
        chats.append(tuple(turns))
    victim, survivor = system.workers
    by_victim, killed = [], threading.Event()

    def kill_after_a_few(outcome):
        if outcome.worker == victim.name:
            by_victim.append(outcome)
        if len(by_victim) >= 5 and not killed.is_set():
            killed.set()
            victim.kill()

    targets = [Target(worker.name, worker.address) for worker in system.workers]
    replay = Replay(targets, SamplingParams(max_new_tokens=NEW_TOKENS), on_outcome=kill_after_a_few)
    outcomes = replay.run(chats, frontends=4)
    replay.close()
    assert killed.is_set()
    assert [outcome.error for outcome in outcomes] == [""] * 32
    for outcome in outcomes:
        assert list(outcome.tokens) == reference(outcome.turn.tokens.tolist())
    again = system.generate(survivor, by_victim[-1].turn.tokens, NEW_TOKENS)
    assert again.cached >= len(by_victim[-1].turn.tokens) - 16
    assert again.tokens == list(by_victim[-1].tokens)
    system.wait(lambda: system.client.stats().cache.held_blocks == 0)
    system.workers = [*system.start_workers(1), survivor]
    fresh = system.generate(system.workers[0], by_victim[0].turn.tokens, NEW_TOKENS)
    assert fresh.cached >= len(by_victim[0].turn.tokens) - 16
    assert fresh.tokens == list(by_victim[0].tokens)


def test_a_killed_holder_empties_the_cache_and_workers_move_to_the_new_pool(system, reference):
    prompt = random_tokens(100, seed=8)
    expected = reference(prompt)
    assert system.generate(system.workers[0], prompt, NEW_TOKENS).tokens == expected
    old = system.client.get_pool()
    system.pool.kill()
    system.wait(lambda: system.client.get_pool() is None)
    with pytest.raises(DescriptorRefused):
        attach(old, expected=old.spec, device=GPU)
    system.pool = system.start_pool()
    assert system.client.get_pool().pool_id != old.pool_id
    assert system.matched(prompt) == 0
    for worker in system.workers:
        assert system.generate(worker, prompt, NEW_TOKENS).tokens == expected
        with WorkerClient(worker.address) as client:
            assert client.status().pool_id == system.client.get_pool().pool_id


def test_memory_outlives_its_holder_and_goes_with_the_last_mapping(system):
    """CUDA promises both of memory shared by descriptor. A killed holder's is the same: the kernel closes for it."""
    spec = pool_spec_for(find_model(system.model), num_blocks=1 << 20, block_size=16, dtype=KvDtype.FLOAT32)
    size = 8 << 30  # far more than what other processes on the GPU take or give back meanwhile
    device = CudaDevice(0)
    assert pool_bytes(spec) == size
    torch.zeros(1, device="cuda")
    before = device.free_bytes()
    holder = PoolHolder(spec, device=GPU)
    pool, other = (attach(holder.describe(), expected=spec, device=GPU) for _ in range(2))
    holder.close()
    pool.k[0].fill_(2.5)
    assert float(other.k[0].sum()) == 2.5 * other.k[0].numel()
    assert torch.count_nonzero(other.v[1]) == 0
    with pytest.raises(DescriptorRefused):
        attach(holder.describe(), expected=spec, device=GPU)
    del pool
    gc.collect()
    assert before - device.free_bytes() > 0.75 * size
    del other
    gc.collect()
    assert before - device.free_bytes() < 0.25 * size


WRITE_BY_IPC = """
import sys, torch
from radixpool.rpc.convert import pool_from_wire
from radixpool.v1 import pool_pb2
from radixpool.rpc.pool.attach import attach
from radixpool.rpc.pool.device import Device
described = pool_from_wire(pool_pb2.Pool.FromString(bytes.fromhex(sys.argv[1])))
attach(described, expected=described.spec, device=Device(0)).k[1].fill_(3)
torch.cuda.synchronize()
"""


def test_cuda_ipc_is_there_for_gpus_that_cannot_share_by_descriptor(system):
    spec, device = system.client.get_pool().spec, CudaDevice(0)
    memory = IpcMemory(pool_bytes(spec), device)
    described = Pool(bytes(16), spec, memory.attachment)
    command = [sys.executable, "-c", WRITE_BY_IPC, pool_to_wire(described).SerializeToString().hex()]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    seen = pool_on_device(CudaMapping(memory.pointer, pool_bytes(spec), lambda: None), spec, 0)
    assert float(seen.k[1].min()) == 3
    assert torch.count_nonzero(seen.k[0]) == 0
    device.free(memory.pointer)


# One process.


class LocalSystem:
    """An engine with the real model on the GPU and a cache of this process."""

    def __init__(self, source, *, dtype=KvDtype.FLOAT32, graphed=0, backend=None, num_blocks=256, **limits):
        spec = pool_spec_for(source, num_blocks=num_blocks, block_size=16, dtype=dtype)
        self.cache = RadixCache(num_blocks=num_blocks, block_size=16)
        pool = private_pool(spec, "cuda:0")
        model = load_model(source, dtype=computed_in(pool.k[0].dtype, GPU), device="cuda:0")
        self.runner = ModelRunner(model, pool, backend=backend)
        if graphed:
            self.runner.capture_graphs(graphed)
        sizes = {"context_tokens": source.context_tokens, "vocab_size": source.vocab_size} | limits
        self.engine = Engine(
            LocalPort(self.cache), self.runner, limits=EngineLimits(num_blocks=num_blocks, block_size=16, **sizes)
        )

    def run(self, prompts, sampling=None):
        sampling = sampling or SamplingParams(max_new_tokens=NEW_TOKENS)
        sources = [PromptSource(np.asarray(prompt, np.uint32), Namespace()) for prompt in prompts]
        calls = [GenerateCall(source, sampling) for source in sources]
        for call in calls:
            self.engine.submit(call)
        while self.engine.status().running_sequences + self.engine.status().waiting_sequences:
            self.engine.step()
            self.engine.check()
        return calls


@pytest.fixture(scope="module")
def source(tiny_model):
    return find_model(str(tiny_model))


def prompts_with_shared_prefixes(count=12):
    prefix = random_tokens(90, seed=20)
    return [prefix[: 15 * (n % 7)] + random_tokens(2 + 11 * (n % 6), seed=30 + n) for n in range(count)]


@pytest.mark.parametrize("graphed", [0, 8, 300, 600])  # the last two: longer passes in pieces
@pytest.mark.parametrize("token_budget", [7, 512])
def test_equal_to_generate_however_it_is_cut_and_captured(source, reference, answer_of, graphed, token_budget):
    prompts = prompts_with_shared_prefixes()
    system = LocalSystem(source, graphed=graphed, token_budget=token_budget)
    first = [answer_of(call).tokens for call in system.run(prompts)]
    again = [answer_of(call).tokens for call in system.run(prompts)]
    assert first == again == [reference(prompt) for prompt in prompts]
    assert system.cache.stats().held_blocks == 0


def test_the_torch_backend_gives_the_same_tokens(source, reference, answer_of):
    prompts = prompts_with_shared_prefixes(4)
    system = LocalSystem(source, backend="torch")
    assert [answer_of(call).tokens for call in system.run(prompts)] == [reference(prompt) for prompt in prompts]


@pytest.mark.parametrize(("dtype", "enough"), [(KvDtype.BFLOAT16, 10), (KvDtype.FLOAT16, 10), (KvDtype.FLOAT8_E4M3, 6)])
@pytest.mark.parametrize("graphed", [0, 600])
def test_lower_precision_is_close(source, reference, answer_of, dtype, enough, graphed):
    prompts = prompts_with_shared_prefixes()
    answers = [answer_of(call).tokens for call in LocalSystem(source, dtype=dtype, graphed=graphed).run(prompts)]
    assert all(len(tokens) == NEW_TOKENS for tokens in answers)
    agreeing = sum(tokens[0] == reference(prompt, 1)[0] for tokens, prompt in zip(answers, prompts, strict=True))
    assert agreeing >= enough  # of 12; the logits of this model lie far apart


def test_sampling_with_a_seed_is_the_same_in_any_company(source, answer_of):
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.8, top_k=40, seed=5)
    prompts = prompts_with_shared_prefixes(5)
    together = [answer_of(call).tokens for call in LocalSystem(source, graphed=64).run(prompts, sampling)]
    alone = [answer_of(LocalSystem(source).run([prompt], sampling)[0]).tokens for prompt in prompts]
    assert together == alone


def test_a_step_is_over_when_the_device_says_so(source, monkeypatch):
    """A step that samples nothing copies nothing back: only the wait at its end keeps it from being reported early."""
    system = LocalSystem(source)
    spin = system.runner._model.model.norm.register_forward_hook(lambda *_: torch.cuda._sleep(200_000_000))
    batch = idle_batch(1, 64, 16)
    system.runner.forward(batch)
    assert torch.cuda.current_stream().query()
    monkeypatch.setattr(system.runner, "_wait_for_device", lambda: None)
    system.runner.forward(batch)
    assert not torch.cuda.current_stream().query(), "the test cannot tell: a step is over at once here"
    torch.cuda.synchronize()
    spin.remove()


def test_a_step_that_fails_is_waited_for_too(source, monkeypatch):
    system = LocalSystem(source)

    def launch_and_fail(*_):
        torch.cuda._sleep(200_000_000)
        raise RuntimeError("half way")

    hook = system.runner._model.model.norm.register_forward_hook(launch_and_fail)
    with pytest.raises(RuntimeError, match="half way"):
        system.runner.forward(idle_batch(1, 64, 16))
    assert torch.cuda.current_stream().query()
    hook.remove()


def test_padding_of_a_graph_writes_no_kv(source):
    system = LocalSystem(source, graphed=16)
    before = [tensor.clone() for tensor in (*system.runner._pool.k, *system.runner._pool.v)]
    system.runner.forward(idle_batch(1, 5, 16))
    after = (*system.runner._pool.k, *system.runner._pool.v)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("rows", [257, 400, 512, 600])
def test_a_pass_in_pieces_gives_what_the_same_pass_gives_without(source, rows):
    """Two sequences over cached prefixes; the hidden states of padding reach nothing."""
    plain, pieces = LocalSystem(source), LocalSystem(source, graphed=600)
    lens = np.asarray([rows - 100, 100], np.int32)
    positions = np.concatenate([np.arange(16, 16 + lens[0]), np.arange(32, 132)])
    tables = [np.arange(1, 50, dtype=np.int32), np.arange(60, 80, dtype=np.int32)]
    blocks = np.concatenate([tables[0][positions[: lens[0]] // 16], tables[1][positions[lens[0] :] // 16]])
    sampled = np.asarray([lens[0] - 1, rows - 1, 3])
    batch = StepBatch(
        token_ids=np.random.default_rng(rows).integers(3, 290, rows),
        positions=positions,
        slot_mapping=blocks.astype(np.int64) * 16 + positions % 16,
        query_lens=lens,
        context_lens=lens + np.asarray([16, 32], np.int32),
        block_tables=tables,
        sample_rows=sampled,
        samplers=[plain.runner.sampler(SamplingParams(max_new_tokens=1))] * 3,
    )
    for system in (plain, pieces):
        torch.manual_seed(0)
        for tensor in (*system.runner._pool.k, *system.runner._pool.v):
            tensor.normal_()
    assert pieces.runner._pieces.holds(rows)
    with torch.inference_mode():
        expected, got = plain.runner._logits(batch), pieces.runner._logits(batch)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(plain.runner._pool.k, pieces.runner._pool.k, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_graphs_follow_the_runner_to_another_pool(source, reference, answer_of):
    system = LocalSystem(source, graphed=512, token_budget=300)
    prompts = [random_tokens(300, seed=50), *prompts_with_shared_prefixes(4)]
    system.run(prompts)
    former = [tensor.clone() for tensor in system.runner._pool.k]
    pool = system.runner._pool
    system.runner.use_pool(private_pool(pool.spec, "cuda:0"))
    system.cache.flush(Namespace())
    assert [answer_of(call).tokens for call in system.run(prompts)] == [reference(prompt) for prompt in prompts]
    assert all(torch.equal(old, new) for old, new in zip(former, pool.k, strict=True))


def test_a_lost_device_ends_the_engine(source, monkeypatch):
    system = LocalSystem(source)

    def fail(*_args, **_kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda.Event, "synchronize", fail)
    with pytest.raises(DeviceLost, match="cuda:0 has failed: CUDA error: an illegal memory access"):
        system.run([random_tokens(5)])
