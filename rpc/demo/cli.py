"""`radixpool demo`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
from rich.console import Console

from radixpool.rpc.cli.device_option import device_option, dtype_option, pool_dtype
from radixpool.rpc.cli.lazy import EXIT_OPERATING_ERROR
from radixpool.rpc.cli.options import usage_errors
from radixpool.rpc.cli.table_printer import print_tree
from radixpool.rpc.demo.report import as_data, print_report
from radixpool.rpc.demo.run import DemoOptions, run_demo
from radixpool.rpc.pool.device import Device
from radixpool.rpc.worker.model_source import DEFAULT_MODEL


@click.command(name="demo")
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="A known name, a .gguf file or a directory.")
@click.option(
    "--conversations",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON or JSONL, also .xz or .gz: OpenAI-style message lists, or records that hold one under messages or traj.",
)
@click.option("--limit", type=click.IntRange(1), help="Use the first N conversations that fit the model's context.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=12, show_default=True, help="Tokens per answer.")
@click.option(
    "--compare",
    type=click.IntRange(0),
    help="Run the first N requests again without sharing.  [default: all of the own script, 3 of a file]",
)
@click.option("--workers", "num_workers", type=click.IntRange(1, 16), default=2, show_default=True, help="Processes.")
@click.option(
    "--frontends", "num_frontends", type=click.IntRange(1, 64), default=4, show_default=True, help="Chats at once."
)
@click.option("--num-blocks", type=click.IntRange(1), help="Blocks of the pool.  [default: what the chats need]")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens a block.")
@device_option("Where the pool lies and the model runs: cpu, or cuda or cuda:N for a GPU.")
@dtype_option
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the data here too.",
)
@click.pass_context
def command(
    context: click.Context,
    model: str,
    conversations: Path | None,
    limit: int | None,
    max_new_tokens: int,
    compare: int | None,
    num_workers: int,
    num_frontends: int,
    num_blocks: int | None,
    block_size: int,
    device: Device,
    dtype: str | None,
    json_file: Path | None,
) -> None:
    """Start everything and replay chats that share prefixes.

    Runs a manager, a pool holder and workers as processes of their own, sends multi-turn chats to them from several
    frontends at once, and shows for each request how much of its prompt was in the cache. Then it runs requests again
    with nothing shared and compares the (greedy) output. Needs no other software and no GPU.

    In float32 the outputs must be identical. In half precision on a GPU a token may differ, because rounding depends on
    the shapes of a step: how many do is shown.

    Exit code 1 when a request failed or a float32 output differed.

    \b
    Examples:
      radixpool demo
      radixpool demo --device cuda
      radixpool demo --conversations chats.jsonl --limit 4 --max-new-tokens 16 --json out.json
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the workers: one thread each
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options = DemoOptions(
        model=model,
        conversations=conversations,
        limit=limit,
        max_new_tokens=max_new_tokens,
        compare=compare,
        num_workers=num_workers,
        num_frontends=num_frontends,
        num_blocks=num_blocks,
        block_size=block_size,
        device=device,
        dtype=pool_dtype(dtype, device),
    )
    with usage_errors():
        result = run_demo(options, console=Console(stderr=True))
    console = Console()
    print_tree(result.tree)
    print_report(result.report, console)
    if json_file is not None:
        json_file.write_text(json.dumps(as_data(result.report), indent=2) + "\n")
        console.print(f"data written to {json_file}", markup=False)
    if result.report.failed or not result.report.as_promised:
        context.exit(EXIT_OPERATING_ERROR)
