"""`radixpool kernels`."""

from __future__ import annotations

import os
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from radixpool.rpc.cli.json_printer import print_json
from radixpool.rpc.cli.options import json_option
from radixpool.rpc.worker.model_source import DEFAULT_MODEL, find_model

_DTYPES = ("bf16", "fp16", "fp32")


class HeadsType(click.ParamType[tuple[int, int]]):
    """`QUERY/KV`: heads of a model, as 32/8."""

    name = "QUERY/KV"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return both numbers."""
        query, _, kv = str(value).partition("/")
        if not (query.isdecimal() and kv.isdecimal()):
            self.fail(f"expected two numbers as 32/8, got {value!r}", param, ctx)
        return int(query), int(kv)


@click.group()
def kernels() -> None:
    """Work with the attention kernels of GPU workers."""


@kernels.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="A known name, a .gguf file or a directory.")
@click.option("--heads", type=HeadsType(), help="Heads instead of --model, as 32/8; needs --head-dim.")
@click.option("--head-dim", type=click.IntRange(16, 256), help="Width of a head, with --heads.")
@click.option(
    "--tensor-parallel", type=click.IntRange(1), default=1, show_default=True, help="Ranks that share the heads."
)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a KV block.")
@click.option(
    "--dtype", type=click.Choice(_DTYPES), default="bf16", show_default=True, help="Type of Q and the output."
)
@click.option(
    "--kv-dtype", type=click.Choice(("same", "fp8")), default="same", show_default=True, help="Type of the pool."
)
@click.option("--arch", type=click.IntRange(70), help="Compute capability x 10, as 90; default: that of GPU 0.")
@click.option(
    "--jobs", type=click.IntRange(1), default=os.cpu_count(), help="Kernels compiled at a time. [default: CPUs]"
)
@json_option
def build(
    model: str, heads: tuple[int, int] | None, head_dim: int | None, tensor_parallel: int, block_size: int, dtype: str,
    kv_dtype: str, arch: int | None, jobs: int, as_json: bool,
) -> None:  # fmt: skip
    """Compile every attention kernel of a model's shapes into Triton's cache.

    A worker that starts afterwards with the same cache (TRITON_CACHE_DIR, by default ~/.triton/cache) compiles nothing
    for decoding and extending without windows, caps, sinks or LSE. Needs no GPU if --arch is given; seconds a kernel.

    \b
    Examples:
      radixpool kernels build --model ./Llama-3.1-8B --arch 90
      radixpool kernels build --heads 64/8 --head-dim 128 --tensor-parallel 8 --kv-dtype fp8 --arch 90
    """
    if (heads is None) != (head_dim is None):
        raise click.UsageError("--heads and --head-dim go together")
    if heads is None or head_dim is None:
        source = find_model(model)
        heads, head_dim = (source.num_heads, source.num_kv_heads), source.head_dim
    built = _build(heads, head_dim, tensor_parallel, block_size, dtype, kv_dtype, arch, jobs)
    (print_json if as_json else _print)(built)


def _build(
    heads: tuple[int, int], head_dim: int, ranks: int, block_size: int, dtype: str, kv_dtype: str, arch: int | None,
    jobs: int,
) -> list[dict[str, Any]]:  # fmt: skip
    try:
        import torch

        from radixpool.kernels import AttentionSpec
        from radixpool.kernels.build import build_model, kernel_names
    except ImportError as error:
        raise click.ClickException(f"this needs torch and triton: pip install 'radixpool[worker]' ({error})") from error
    if arch is None:
        if not torch.cuda.is_available():
            raise click.UsageError("--arch: there is no GPU here to read it from; give it, as 90 for an H100 or H200")
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    if heads[0] % ranks or heads[1] % ranks:
        raise click.UsageError(f"--tensor-parallel: expected a divisor of {heads[0]} and {heads[1]} heads, got {ranks}")
    q_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    try:
        spec = AttentionSpec(
            num_q_heads=heads[0] // ranks, num_kv_heads=heads[1] // ranks, head_dim=head_dim, block_size=block_size,
            q_dtype=q_dtype, kv_dtype=torch.float8_e4m3fn if kv_dtype == "fp8" else q_dtype,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    built = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"sm_{arch}", total=len(kernel_names(spec, arch)))
        for kernel in build_model(spec, arch, jobs=jobs):
            built.append({name: getattr(kernel, name) for name in _FIELDS})
            progress.update(task, advance=1, description=kernel.name)
    return sorted(built, key=lambda row: str(row["name"]))


_FIELDS = ("name", "seconds", "registers", "spill_bytes", "shared_bytes")


def _print(built: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("kernel", "seconds", "registers", "spilled B", "shared B"):
        table.add_column(title, justify="left" if title == "kernel" else "right")
    for row in built:
        table.add_row(
            row["name"], f"{row['seconds']:.1f}", str(row["registers"]), str(row["spill_bytes"]),
            f"{row['shared_bytes']:,}",
        )  # fmt: skip
    Console().print(table)
