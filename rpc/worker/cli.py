"""`radixpool worker`."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import click

from radixpool.rpc import limits
from radixpool.rpc.cli.device_option import device_option, graphed_tokens_option
from radixpool.rpc.cli.options import address_option, usage_errors
from radixpool.rpc.cli.running import announce, log_as, log_options, ready_fd_option, stop_on_signals
from radixpool.rpc.pool.device import Device
from radixpool.rpc.worker.model_source import DEFAULT_MODEL, find_model

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from radixpool.kernels.spec import Backend


@click.command(name="worker")
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    help="A known name, a .gguf file, or a directory with config.json and safetensors (Llama family).",
)
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="unix:/path or HOST:PORT; port 0: a free one.")
@click.option("--name", default="worker", show_default=True, help="Shown to operators.")
@device_option("Where the model runs, and the pool lies: cpu, or cuda or cuda:N for a GPU.")
@click.option(
    "--attention",
    type=click.Choice(["torch", "triton"]),
    help="Kernels that attend. triton on the CPU is Triton's interpreter: for tests, very slow."
    "  [default: torch on the CPU, triton on a GPU]",
)
@graphed_tokens_option
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads for the model.")
@click.option(
    "--token-budget",
    type=click.IntRange(1),
    help="New tokens in one forward pass. More speeds prompts up and makes running answers wait longer."
    "  [default: 256 on the CPU, 4096 on a GPU]",
)
@click.option(
    "--reserve-tokens",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Room that a request gets ahead of its answer.",
)
@click.option(
    "--max-running",
    type=click.IntRange(1, limits.MAX_STEP_ROWS),
    default=64,
    show_default=True,
    help="Requests in one batch.",
)
@click.option("--max-waiting", type=click.IntRange(0), default=256, show_default=True, help="Requests in the queue.")
@click.option(
    "--credentials",
    default="",
    help="TOML file of the tokens that callers need (`radixpool token`); without it whoever can connect may generate.",
)
@address_option
@log_options
@ready_fd_option
def command(
    address: str,
    model: str,
    listen: str,
    name: str,
    device: Device,
    attention: Backend | None,
    graphed_tokens: int | None,
    threads: int,
    token_budget: int | None,
    reserve_tokens: int,
    max_running: int,
    max_waiting: int,
    credentials: str,
    log_level: str,
    log_format: str,
    ready_fd: int | None,
) -> None:
    """Run a language model over the pool.

    Attaches to the pool that is registered with the manager at --address, loads the model, and serves Generate:
    continuous batching, prompts computed in chunks and only where they are not cached, the KV in shared blocks. Several
    workers of one pool use what any of them has computed; one that is killed loses nothing of it. On a GPU the model
    computes in the element type of the pool.

    \b
    Examples, with a manager and a pool running:
      radixpool worker --model smollm2 --listen 127.0.0.1:7400
      radixpool worker --model ./Llama-3.1-8B --device cuda:0
    """
    log_as("worker", name, level=log_level, form=log_format)
    source = find_model(model)
    kernels: Backend = attention or ("triton" if device.is_cuda else "torch")
    if kernels == "triton" and not device.is_cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    log.info("importing torch and transformers")
    _load_torch(threads)
    from radixpool.rpc.worker.process import WorkerOptions, check_options, run_worker

    with usage_errors():
        options = WorkerOptions(
            manager=address,
            listen=listen,
            name=name,
            device=device,
            attention=attention,
            graphed_tokens=graphed_tokens,
            token_budget=token_budget or 0,
            reserve_tokens=reserve_tokens,
            max_running=max_running,
            max_waiting=max_waiting,
            credentials=credentials,
            stop=stop_on_signals(),
        )
        check_options(options)
    what = f"{source.name} on {device}, {kernels} attention"
    run_worker(
        source,
        options,
        on_ready=lambda at: announce(f"radixpool worker ready on {at} ({what})", at, ready_fd=ready_fd),
    )


def _load_torch(threads: int) -> None:
    try:
        import torch

        import radixpool.rpc.worker.process  # noqa: F401  # which needs the rest of the extra
    except ImportError as error:
        raise click.ClickException(f"a worker needs {error.name}: pip install 'radixpool[worker]'") from error
    torch.set_num_threads(threads)
