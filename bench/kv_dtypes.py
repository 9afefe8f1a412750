"""What does a smaller element type of the pool cost in answers? The next token after every prefix of real prompts.

    python bench/kv_dtypes.py                      SmolLM2-135M on the CPU, some minutes
    python bench/kv_dtypes.py --device cuda        on a GPU, where the model computes in the pool's type
    python bench/kv_dtypes.py --conversations FILE --limit 4 --json out.json

The prompts are the last turns of the demo's conversations. Each goes through the worker's model once over a pool of
every type, and the most likely next token after each of its tokens is compared with what a float32 pool gives. All KV
is read back from the pool, as in serving; the text is the same for all, so one difference does not bring others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from radixpool.rpc.cli.device_option import device_option
from radixpool.rpc.demo.conversations import own_script, read_conversations
from radixpool.rpc.demo.prompts import load_tokenizer, turns
from radixpool.rpc.generation import SamplingParams
from radixpool.rpc.pool.device import Device
from radixpool.rpc.pool.tensors import private_pool
from radixpool.rpc.pool_types import KvDtype
from radixpool.rpc.worker.model import ModelRunner, computed_in, load_model
from radixpool.rpc.worker.model_source import ModelSource, find_model, pool_spec_for
from radixpool.rpc.worker.step import StepBatch

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
REFERENCE = KvDtype.FLOAT32
COMPARED = (KvDtype.BFLOAT16, KvDtype.FLOAT16, KvDtype.FLOAT8_E4M3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How often the next token is the one that a float32 pool gives."""

    dtype: str
    tokens: int
    same: int
    share: float


def chunk_batch(tokens: np.ndarray[Any, Any], start: int, runner: ModelRunner) -> StepBatch:
    """Return the step that computes a chunk of one sequence in blocks 0, 1, ... and samples after every token."""
    positions = np.arange(start, min(start + CHUNK_TOKENS, len(tokens)), dtype=np.int64)
    table = np.arange(-(-len(tokens) // BLOCK_SIZE), dtype=np.int32)
    return StepBatch(
        token_ids=tokens[positions].astype(np.int64),
        positions=positions,
        slot_mapping=positions,
        query_lens=np.asarray([len(positions)], np.int32),
        context_lens=np.asarray([positions[-1] + 1], np.int32),
        block_tables=[table],
        sample_rows=np.arange(len(positions)),
        samplers=[runner.sampler(SamplingParams(max_new_tokens=1))] * len(positions),
    )


def next_tokens(
    source: ModelSource, device: Device, dtype: KvDtype, prompts: list[Any], advance: Callable[[int], None]
) -> np.ndarray[Any, Any]:
    """Return the most likely next token after each token of each prompt, one after the other."""
    blocks = -(-max(map(len, prompts)) // BLOCK_SIZE)
    pool = private_pool(pool_spec_for(source, num_blocks=blocks, block_size=BLOCK_SIZE, dtype=dtype), str(device))
    model = load_model(source, dtype=computed_in(pool.k[0].dtype, device), device=str(device))
    runner = ModelRunner(model, pool)

    def walk() -> Iterator[int]:
        for tokens in prompts:
            for start in range(0, len(tokens), CHUNK_TOKENS):
                batch = chunk_batch(tokens, start, runner)
                yield from runner.forward(batch)
                advance(batch.num_tokens)

    return np.fromiter(walk(), np.int64)


@click.command(help=__doc__)
@click.option("--model", default="smollm2", show_default=True)
@device_option("Where the model runs.")
@click.option("--conversations", type=click.Path(path_type=Path, exists=True), help="As of the demo.")
@click.option("--limit", type=click.IntRange(1), default=4, show_default=True, help="Conversations to take.")
@click.option("--max-tokens", type=click.IntRange(16), default=2048, show_default=True, help="Of each prompt.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here too.")
def main(
    model: str, device: Device, conversations: Path | None, limit: int, max_tokens: int, json_file: Path | None
) -> None:
    torch.set_num_threads(1)
    source = find_model(model)
    found = own_script() if conversations is None else read_conversations(conversations)
    tokenizer = load_tokenizer(source)
    longest = min(max_tokens, source.context_tokens)
    prompts = [list(turns(chat, tokenizer))[-1].tokens[:longest] for chat in found.conversations[:limit]]
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=(1 + len(COMPARED)) * sum(map(len, prompts)))
        expected = np.empty(0)
        for dtype in (REFERENCE, *COMPARED):
            progress.update(task, description=dtype.option)
            got = next_tokens(source, device, dtype, prompts, lambda count: progress.advance(task, count))
            expected = got if dtype is REFERENCE else expected
            same = int((got == expected).sum())
            rows.append(Row(dtype=dtype.option, tokens=len(got), same=same, share=same / len(got)))
    table = Table("pool", "tokens", "same next token as float32")
    for row in rows:
        table.add_row(row.dtype, f"{row.tokens:,}", f"{row.share:.2%}")
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
