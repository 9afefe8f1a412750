"""A small random Llama over the pool: the tokens of plain `generate`, however the work is cut and shared."""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixpool.radix import Namespace, RadixCache
from radixpool.rpc.errors import PoolMismatch
from radixpool.rpc.generation import SamplingParams
from radixpool.rpc.pool.tensors import private_pool
from radixpool.rpc.pool_types import KvDtype
from radixpool.rpc.worker import model as worker_model
from radixpool.rpc.worker.cache_port import LocalPort
from radixpool.rpc.worker.engine import Engine
from radixpool.rpc.worker.errors import DeviceLost, OutOfMemory
from radixpool.rpc.worker.limits import EngineLimits
from radixpool.rpc.worker.model import (
    ModelRunner,
    end_of_sequence_ids,
    fuse_norms,
    load_model,
    rows_for_stable_sums,
)
from radixpool.rpc.worker.model_source import ModelUnavailable, find_model, pool_spec_for
from radixpool.rpc.worker.process import _drive
from radixpool.rpc.worker.requests import GenerateCall, PromptSource
from radixpool.rpc.worker.sampling import TokenSampler

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def source(tiny_model):
    return find_model(str(tiny_model))


@pytest.fixture(scope="module")
def model(source):
    return load_model(source)


@pytest.fixture(scope="module")
def reference(tiny_model):
    """The same weights, run by transformers alone."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    def generate(prompt):
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = plain.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    return generate


class System:
    """An engine with the real model and a cache of this process."""

    def __init__(self, source, model, *, num_blocks=128, dtype=KvDtype.FLOAT32, scales=(1.0, 1.0), **limits):
        scaling = dict(zip(("k_scale", "v_scale"), scales, strict=True))
        spec = pool_spec_for(source, num_blocks=num_blocks, block_size=8, dtype=dtype, **scaling)
        self.cache = RadixCache(num_blocks=num_blocks, block_size=8)
        self.runner = ModelRunner(model, private_pool(spec))
        sizes = {"context_tokens": source.context_tokens, "vocab_size": source.vocab_size} | limits
        self.engine = Engine(
            LocalPort(self.cache), self.runner, limits=EngineLimits(num_blocks=num_blocks, block_size=8, **sizes)
        )

    def run(self, prompts, *, salts=None, sampling=None):
        sampling = sampling or SamplingParams(max_new_tokens=NEW_TOKENS)
        calls = []
        for prompt, salt in zip(prompts, salts or itertools.repeat(""), strict=False):
            tokens = torch.tensor(prompt, dtype=torch.int64).numpy().astype("uint32")
            calls.append(GenerateCall(PromptSource(tokens, Namespace(cache_salt=salt)), sampling))
            self.engine.submit(calls[-1])
        while self.engine.status().running_sequences + self.engine.status().waiting_sequences:
            self.engine.step()
            self.engine.check()
        return calls


def prompts_with_shared_prefixes(seed=0, count=6):
    draw = random.Random(seed)
    system = [draw.randrange(3, 290) for _ in range(37)]
    return [
        system[: draw.choice((37, 20))] + [draw.randrange(3, 290) for _ in range(draw.randrange(1, 40))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("token_budget", [1, 7, 64, 512])
def test_equal_to_generate_however_it_is_cut(source, model, reference, answer_of, token_budget):
    prompts = prompts_with_shared_prefixes()
    system = System(source, model, token_budget=token_budget)
    first = [answer_of(call) for call in system.run(prompts)]
    again = [answer_of(call) for call in system.run(prompts)]
    expected = [reference(prompt) for prompt in prompts]
    assert [answer.tokens for answer in first] == expected
    assert [answer.tokens for answer in again] == expected
    assert all(answer.started.cached_tokens >= len(p) - 8 for answer, p in zip(again, prompts, strict=True))


def test_equal_with_and_without_sharing_over_many_prompts(source, model, answer_of):
    prompts = [prompt for seed in range(8) for prompt in prompts_with_shared_prefixes(seed, 4)]
    shared = System(source, model, num_blocks=60, reserve_tokens=0, token_budget=50)  # small: evicts and preempts
    with_sharing = [answer_of(call).tokens for call in shared.run(prompts)]
    alone = System(source, model, token_budget=512)
    without = [answer_of(alone.run([prompt], salts=[str(n)])[0]).tokens for n, prompt in enumerate(prompts)]
    assert with_sharing == without
    assert shared.cache.stats().evicted_blocks > 0
    assert shared.cache.stats().held_blocks == 0


def test_logits_do_not_depend_on_the_rest_of_the_batch(source, model):
    """To the last bit: linear layers from `min_rows` rows on, attention by tiles that begin at position 0."""
    captured = []
    system = System(source, model, token_budget=512)
    logits_of = system.runner._logits

    def capture(batch):
        captured.append(logits_of(batch))
        return captured[-1]

    system.runner._logits = capture
    prompts = prompts_with_shared_prefixes(3)
    system.run(prompts[:1], salts=["alone"], sampling=SamplingParams(max_new_tokens=1))
    system.run(prompts, salts=map(str, range(9)), sampling=SamplingParams(max_new_tokens=1))
    assert torch.equal(captured[0][0], captured[1][0])


@pytest.mark.parametrize("token_budget", [5, 16, 40, 77])
def test_logits_do_not_depend_on_where_a_prompt_is_cut(source, model, token_budget):
    def last_logits(budget, warm):
        system = System(source, model, token_budget=budget)
        captured, logits_of = [], system.runner._logits

        def capture(batch):
            captured.append(logits_of(batch))
            return captured[-1]

        system.runner._logits = capture
        prompt = prompts_with_shared_prefixes(4)[0] * 4
        if warm:
            system.run([prompt[:150]], sampling=SamplingParams(max_new_tokens=1))
        system.run([prompt], sampling=SamplingParams(max_new_tokens=3))
        return torch.cat(captured[-3:])

    whole = last_logits(512, warm=False)
    assert torch.equal(last_logits(token_budget, warm=False), whole)
    assert torch.equal(last_logits(token_budget, warm=True), whole)


@pytest.mark.parametrize("dtype", [KvDtype.BFLOAT16, KvDtype.FLOAT16])
def test_a_half_precision_pool_works_and_is_close(source, model, reference, answer_of, dtype):
    prompts = prompts_with_shared_prefixes(5, 3)
    answers = [answer_of(call) for call in System(source, model, dtype=dtype).run(prompts)]
    assert all(len(answer.tokens) == NEW_TOKENS for answer in answers)
    agreeing = sum(answer.tokens[0] == reference(prompt)[0] for answer, prompt in zip(answers, prompts, strict=True))
    assert agreeing >= 2


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.125, 0.01)])
def test_over_an_fp8_pool_sharing_changes_nothing(source, model, reference, answer_of, scales):
    """K and V are rounded as they are written, also for the request that computed them; the model stays float32."""
    prompts = prompts_with_shared_prefixes(5, 12)
    together = System(source, model, dtype=KvDtype.FLOAT8_E4M3, scales=scales, token_budget=19)
    first = [answer_of(call).tokens for call in together.run(prompts)]
    again = [answer_of(call) for call in together.run(prompts)]
    assert sum(answer.started.cached_tokens for answer in again) > 0
    alone = [
        answer_of(System(source, model, dtype=KvDtype.FLOAT8_E4M3, scales=scales).run([prompt])[0]).tokens
        for prompt in prompts
    ]
    assert first == [answer.tokens for answer in again] == alone
    agreeing = sum(tokens[0] == reference(prompt)[0] for tokens, prompt in zip(first, prompts, strict=True))
    assert agreeing >= 6  # of 12; a token of chance would agree once in 290


def test_an_fp8_pool_holds_what_was_divided_by_its_scales(source, model):
    """The scales reach the write; that they reach the attention shows in the answers above."""
    unit, scaled = (System(source, model, dtype=KvDtype.FLOAT8_E4M3, scales=scales) for scales in ((1, 1), (2, 4)))
    for system in (unit, scaled):
        system.run([list(range(3, 40))], sampling=SamplingParams(max_new_tokens=1))
    pools = [(system.runner._pool.k[0], system.runner._pool.v[0]) for system in (unit, scaled)]
    for whole, divided, scale in zip(*pools, (2, 4), strict=True):
        stored = whole[:4].float()
        assert torch.count_nonzero(stored) > stored.numel() * 0.9
        torch.testing.assert_close(divided[:4].float() * scale, stored, rtol=0.13, atol=0.02)


@pytest.mark.parametrize("done", [0, 1, 17])
def test_a_seeded_stream_goes_on_where_an_earlier_call_stopped(done):
    logits = torch.randn(40, 290, generator=torch.Generator().manual_seed(3))
    sampling = SamplingParams(max_new_tokens=40, temperature=0.8, seed=5)
    whole, rest = TokenSampler(sampling), TokenSampler(replace(sampling, skip_draws=done))
    expected = [whole.sample(row) for row in logits]
    assert [rest.sample(row) for row in logits[done:]] == expected[done:]


def test_seeded_sampling_does_not_depend_on_company_or_sharing(source, model, answer_of):
    prompts = prompts_with_shared_prefixes(9, 4)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.9, top_p=0.95, top_k=50, seed=11)
    together = [answer_of(call).tokens for call in System(source, model).run(prompts, sampling=sampling)]
    alone = [answer_of(System(source, model).run([prompt], sampling=sampling)[0]).tokens for prompt in prompts]
    assert together == alone
    other = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.9, seed=12)
    assert answer_of(System(source, model).run(prompts[:1], sampling=other)[0]).tokens != together[0]


def test_rows_are_stable_from_the_probed_number_on(model):
    rows = rows_for_stable_sums(model)
    linear = model.lm_head
    x = torch.randn(200, linear.in_features)
    with torch.inference_mode():
        expected = linear(x)
        for count in (rows, rows + 1, 3 * rows, 50):
            assert torch.equal(linear(x[:count]), expected[:count])


@pytest.mark.parametrize(
    "error", [RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("CUDA")]
)
def test_out_of_memory_is_told_apart(source, model, monkeypatch, answer_of, reference, error):
    system = System(source, model)
    forward, failures = model.model.forward, [error]

    def failing(*args, **kwargs):
        if failures:
            raise failures.pop()
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", failing)
    prompt = prompts_with_shared_prefixes()[0]
    (call,) = system.run([prompt])
    assert answer_of(call).tokens == reference(prompt)
    failures.append(error)
    with pytest.raises(OutOfMemory):
        system.runner.forward(batch_of_one(system))


def batch_of_one(system):
    import numpy as np

    from radixpool.rpc.worker.step import StepBatch

    one, zero = np.ones(1, np.int32), np.zeros(1, np.int64)
    return StepBatch(
        token_ids=zero, positions=zero, slot_mapping=zero, query_lens=one, context_lens=one,
        block_tables=[np.zeros(1, np.int32)], sample_rows=zero,
        samplers=[system.runner.sampler(SamplingParams(max_new_tokens=1))],
    )  # fmt: skip


class LostEngine:
    """Its GPU fails at the first step."""

    def step(self):
        raise DeviceLost("cuda:0 has failed")


def test_a_lost_device_ends_the_worker_and_no_step_is_tried_again():
    with pytest.raises(DeviceLost, match="cuda:0 has failed"):
        _drive(LostEngine(), None, None, threading.Event())


def test_a_pool_of_another_shape_is_refused(source, model):
    system = System(source, model)
    other = private_pool(pool_spec_for(source, num_blocks=64, block_size=8, dtype=KvDtype.FLOAT32))
    with pytest.raises(PoolMismatch, match="num_blocks: expected 128, pool has 64"):
        system.runner.use_pool(other)


def test_graphs_are_for_triton_on_a_gpu(source, model):
    with pytest.raises(ValueError, match="graphs need Triton kernels on a GPU, got torch on cpu"):
        System(source, model).runner.capture_graphs(8)


def test_one_plan_serves_all_steps(source, model, monkeypatch):
    """It is moved on from step to step, not made anew."""
    made = []
    plan = worker_model.plan_forest
    monkeypatch.setattr(worker_model, "plan_forest", lambda *a, **k: made.append(plan(*a, **k)) or made[-1])
    System(source, model, token_budget=16).run(prompts_with_shared_prefixes())
    assert len(made) == 1


def test_missing_weights_are_not_made_up(tiny_model, tmp_path):
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailable, match=r"1 weights are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(find_model(str(tmp_path)))


def test_end_of_sequence_comes_from_the_model(model):
    assert end_of_sequence_ids(model) == {2}


@pytest.mark.parametrize(
    ("times_ms", "limit", "expected"),
    [
        ({1: 28, 512: 29, 1024: 28, 2048: 30, 4096: 36}, 4096, 4096),  # nothing but launches
        ({1: 28, 512: 29, 1024: 36, 2048: 60}, 4096, 1024),
        ({1: 28, 512: 40}, 4096, 256),
        ({1: 28, 512: 28, 1000: 28}, 1000, 1000),
        ({1: 28}, 100, 100),
    ],
)
def test_steps_are_captured_as_long_as_launching_them_takes_longer(
    source, model, monkeypatch, times_ms, limit, expected
):
    runner = System(source, model).runner
    monkeypatch.setattr(runner, "_step_time_s", lambda tokens: times_ms[tokens] / 1000)
    assert runner.launch_bound_tokens(limit) == expected


def test_a_step_is_timed_without_its_first_run(source, model, monkeypatch):
    runner = System(source, model).runner
    clock = iter([0, 9, 10, 12, 20, 21, 30, 33])
    monkeypatch.setattr("radixpool.rpc.worker.model.time.perf_counter", lambda: next(clock))
    assert runner._step_time_s(3) == 1


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_a_fused_norm_is_the_models_own(source, dtype, allowed):
    """On a GPU each is one kernel instead of six."""
    plain, fused = (load_model(source, dtype=dtype) for _ in range(2))
    fuse_norms(fused)
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)).to(dtype) * 30
    norms = [
        (own, other) for own, other in zip(plain.modules(), fused.modules(), strict=True) if "RMSNorm" in str(type(own))
    ]
    assert len(norms) == 2 * 2 + 1
    for own, other in norms:
        own.weight.data.uniform_(0.5, 2, generator=torch.Generator().manual_seed(2))
        other.weight.data.copy_(own.weight.data)
        assert "forward" in vars(other)
        torch.testing.assert_close(other(hidden), own(hidden), rtol=allowed, atol=allowed)
