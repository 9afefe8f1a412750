"""`radixpool serve`."""

from __future__ import annotations

import ctypes
import gc
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from radixpool.rpc.cli.options import default_address, json_option, usage_errors
from radixpool.rpc.cli.running import announce, ready_fd_option, stop_on_signals
from radixpool.rpc.config import ServeConfig, config_flags
from radixpool.rpc.directory import reset
from radixpool.rpc.manager.launch import ManagerService
from radixpool.rpc.metrics import LogFormat, configure_logging

_GC_THRESHOLDS: Final = (100_000, 50, 1_000)
_M_ARENA_MAX: Final = -8
"""As malloc.h has it."""


@click.command()
@config_flags
@click.option("--reset-directory", is_flag=True, help="Give up what --directory holds, damaged or not, and start anew.")
@ready_fd_option
@json_option
def serve(config: ServeConfig, reset_directory: bool, ready_fd: int | None, as_json: bool) -> None:
    """Start a manager: the owner of one pool's metadata.

    It prints one line with its address when it is ready and runs until SIGTERM or SIGINT, which let running calls
    finish. It starts without a pool: `radixpool pool` brings one. Exit code 2 for a configuration that cannot be used,
    4 when an address or the directory is taken.

    \b
    Examples:
      radixpool serve --num-blocks 65536
      radixpool serve --listen unix:/run/radixpool.sock --num-blocks 65536 --block-size 32
      radixpool serve --config /etc/radixpool.toml --metrics-listen 127.0.0.1:9400
      radixpool serve --num-blocks 65536 --directory /run/radixpool/directory
      radixpool serve --num-blocks 65536 --print-config >radixpool.toml
    """
    if not config.server.listen:
        config = replace(config, server=replace(config.server, listen=default_address()))
    share_one_heap()
    configure_logging(level=config.logs.level, form=LogFormat(config.logs.format))
    with usage_errors():
        if reset_directory:
            _reset(config.directory.path)
        service = ManagerService(config)
    stop = stop_on_signals()
    service.start()
    calm_collector()
    announce(_ready_line(service, config, as_json=as_json), service.address, ready_fd=ready_fd)
    stop.wait()
    service.stop()


def _reset(path: str) -> None:
    if not path:
        raise ValueError("--reset-directory needs --directory")
    reset(Path(path))


def share_one_heap() -> None:
    """Let all threads allocate from one heap, unless MALLOC_ARENA_MAX says otherwise.

    With a heap a thread, glibc keeps in each of them what the largest request ever took, twice as much in all.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, and other habits
    if set_option is not None and "MALLOC_ARENA_MAX" not in os.environ:
        set_option(_M_ARENA_MAX, 1)


def calm_collector() -> None:
    """Let Python's cyclic collector look rarely, and never at what is there already.

    Nothing in the cache needs it, and with a million blocks each full collection stops the manager for a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def _ready_line(service: ManagerService, config: ServeConfig, *, as_json: bool) -> str:
    cache = config.cache
    if not as_json:
        blocks = f"{cache.num_blocks} blocks of {cache.block_size} tokens, policy {cache.policy}"
        return f"radixpool manager ready on {service.address} ({blocks})"
    ready: dict[str, object] = {"address": service.address, "pid": os.getpid(), "num_blocks": cache.num_blocks}
    ready |= {"block_size": cache.block_size, "policy": cache.policy}
    if service.metrics_port is not None:
        ready["metrics_port"] = service.metrics_port
    for name, endpoint in zip(("kv_events", "kv_events_replay"), service.kv_events_endpoints, strict=True):
        if endpoint:
            ready[name] = endpoint
    return json.dumps(ready)
