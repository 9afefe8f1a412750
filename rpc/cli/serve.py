"""`radixpool serve`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Final

import click

from radixpool.rpc import limits
from radixpool.rpc.cli.options import default_address, json_option, usage_errors
from radixpool.rpc.manager import ManagerOptions, ManagerServer

_GRACE_S: Final = 5.0


@click.command()
@click.option(
    "--listen",
    envvar="RADIXPOOL_ADDRESS",
    default=default_address,
    show_default="unix:$XDG_RUNTIME_DIR/radixpool.sock, else 127.0.0.1:7300",
    show_envvar=True,
    help="unix:/path (mode 0600) or HOST:PORT; port 0 lets the system choose.",
)
@click.option("--num-blocks", type=int, required=True, help="KV blocks of the pool.")
@click.option("--block-size", type=int, default=16, show_default=True, help="Tokens a block.")
@click.option("--policy", default="lru", show_default=True, help="Eviction policy.")
@click.option(
    "--lease-ttl-ms",
    type=int,
    default=limits.DEFAULT_LEASE_TTL_MS,
    show_default=True,
    help="How long a client may be silent before its sequences are aborted.",
)
@click.option("--ready-fd", type=int, help="Write the address and a newline to this file descriptor once ready.")
@json_option
def serve(
    listen: str, num_blocks: int, block_size: int, policy: str, lease_ttl_ms: int, ready_fd: int | None, as_json: bool
) -> None:
    """Start a manager: the owner of one pool's metadata.

    It prints one line with its address when it is ready and runs until SIGTERM or SIGINT, which let running calls
    finish. It starts without a pool: `radixpool pool` brings one. Exit code 4 when the address is taken.

    \b
    Examples:
      radixpool serve --num-blocks 65536
      radixpool serve --listen unix:/run/radixpool.sock --num-blocks 65536 --block-size 32
    """
    with usage_errors():
        options = ManagerOptions(
            listen=listen, num_blocks=num_blocks, block_size=block_size, policy=policy, lease_ttl_ms=lease_ttl_ms
        )
        server = ManagerServer(options)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server.start()
    _announce(server.address, options, ready_fd=ready_fd, as_json=as_json)
    stop.wait()
    server.stop(_GRACE_S)


def _announce(address: str, options: ManagerOptions, *, ready_fd: int | None, as_json: bool) -> None:
    if as_json:
        sizes = {"num_blocks": options.num_blocks, "block_size": options.block_size, "policy": options.policy}
        click.echo(json.dumps({"address": address, "pid": os.getpid(), **sizes}))
    else:
        blocks = f"{options.num_blocks} blocks of {options.block_size} tokens, policy {options.policy}"
        click.echo(f"radixpool manager ready on {address} ({blocks})")
    sys.stdout.flush()
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as ready:
            ready.write(f"{address}\n")
