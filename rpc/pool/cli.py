"""`radixpool pool`."""

from __future__ import annotations

import click

from radixpool.rpc.address import parse_address
from radixpool.rpc.cli.device_option import device_option, dtype_option, pool_dtype, scale_option
from radixpool.rpc.cli.options import address_option, usage_errors
from radixpool.rpc.cli.running import announce, log_as, log_options, ready_fd_option, stop_on_signals
from radixpool.rpc.pool.device import Device
from radixpool.rpc.pool.geometry import pool_bytes, require_complete
from radixpool.rpc.pool.holder import PoolHolder
from radixpool.rpc.pool.process import HolderOptions, HolderProcess
from radixpool.rpc.pool_types import KvDtype, PoolSpec
from radixpool.rpc.worker.model_source import DEFAULT_MODEL, find_model, pool_spec_for


@click.command(name="pool")
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    help="Whose KV the pool is for: a known name, a .gguf file, or a directory with config.json and safetensors.",
)
@device_option("Where the pool lies: cpu, or cuda or cuda:N for the memory of a GPU.")
@dtype_option
@scale_option("k")
@scale_option("v")
@click.option(
    "--socket",
    "socket_address",
    help="Unix socket that hands out the memory: a path, or @name (abstract).  [default: a fresh @name]",
)
@click.option("--name", default="pool", show_default=True, help="Shown to operators.")
@address_option
@log_options
@ready_fd_option
def command(
    address: str,
    model: str,
    device: Device,
    dtype: str | None,
    k_scale: float | None,
    v_scale: float | None,
    socket_address: str | None,
    name: str,
    log_level: str,
    log_format: str,
    ready_fd: int | None,
) -> None:
    """Allocate and hold the physical pool of KV blocks.

    The manager at --address decides how many blocks of how many tokens there are, the model decides how many bytes one
    takes. Workers of the same user map the pool and share every block in it. The pool lives as long as this process
    runs: it outlives workers and restarts of the manager, and it leaves nothing behind when it ends or is killed. On a
    GPU this process needs the driver only, not torch.

    \b
    Example, with a manager running:
      radixpool pool --model smollm2
      radixpool worker --model smollm2 --listen 127.0.0.1:7400
    """
    log_as("pool", name, level=log_level, form=log_format)
    source = find_model(model)
    kv_dtype = pool_dtype(dtype, device)

    scales = {name: value for name, value in (("k_scale", k_scale), ("v_scale", v_scale)) if value is not None}
    if scales and kv_dtype is not KvDtype.FLOAT8_E4M3:
        raise click.UsageError(f"--k-scale and --v-scale are for --kv-dtype fp8_e4m3, not for {kv_dtype.option}")

    def make_spec(num_blocks: int, block_size: int) -> PoolSpec:
        return pool_spec_for(source, num_blocks=num_blocks, block_size=block_size, dtype=kv_dtype, **scales)

    def on_ready(holder: PoolHolder) -> None:
        spec = holder.describe().spec
        blocks = f"{spec.num_blocks} blocks of {spec.block_size} tokens"
        size = f"{blocks}, {kv_dtype.option}, {pool_bytes(spec) / 2**30:.2f} GiB on {device}"
        announce(f"radixpool pool ready ({size}, for {spec.model})", address, ready_fd=ready_fd)

    with usage_errors():
        parse_address(address)
        require_complete(make_spec(1, 1))
    options = HolderOptions(manager=address, name=name, device=device, socket_address=socket_address)
    HolderProcess(options, make_spec, stop=stop_on_signals()).run(on_ready)
