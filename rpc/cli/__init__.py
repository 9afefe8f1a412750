"""The command line: `radixpool NOUN`. One module per noun; results on stdout, errors on stderr."""

from __future__ import annotations

import os

import click

from radixpool._version import __version__
from radixpool.rpc.cli.lazy import LazyCommand, LazyGroup
from radixpool.rpc.failpoints import VARIABLE, armed_steps

# gRPC's core writes notes about its peers to stderr by itself, past our log format. It reads this when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Without gRPC's event engine, whoever waits for a call polls the sockets itself: a call costs a third fewer thread
# switches (docs/service.md has the figures). For the manager alone: a client's connecting socket would have to wait.
_POLLING = (("GRPC_EXPERIMENTS", "-event_engine_listener,-event_engine_client"),)

_COMMANDS = {
    "serve": LazyCommand(
        "radixpool.rpc.cli.serve:serve", "Start a manager: the owner of one pool's metadata.", environment=_POLLING
    ),
    "pool": LazyCommand("radixpool.rpc.pool.cli:command", "Allocate and hold the physical pool of KV blocks."),
    "worker": LazyCommand("radixpool.rpc.worker.cli:command", "Run a language model over the pool."),
    "demo": LazyCommand("radixpool.rpc.demo.cli:command", "Start everything and replay chats that share prefixes."),
    "stats": LazyCommand("radixpool.rpc.cli.stats:stats", "Show block states, hit ratio and counters."),
    "top": LazyCommand("radixpool.rpc.cli.top:top", "Watch requests, hit ratio and block states, every second."),
    "advise": LazyCommand("radixpool.rpc.cli.advise:advise", "Say what another pool size or policy would hit."),
    "inspect": LazyCommand("radixpool.rpc.cli.inspect:inspect", "Look at the tree, one block, sequences or clients."),
    "evict": LazyCommand("radixpool.rpc.cli.steer:evict", "Evict cached blocks that nobody holds."),
    "flush": LazyCommand("radixpool.rpc.cli.steer:flush", "Make cached content unfindable."),
    "quota": LazyCommand("radixpool.rpc.cli.steer:quota", "Show and change what tenants may use of the pool."),
    "token": LazyCommand("radixpool.rpc.security.cli:command", "Make bearer tokens for a manager's credential file."),
    "check": LazyCommand("radixpool.rpc.cli.check:check", "Prove the invariants of a running manager."),
    "kernels": LazyCommand("radixpool.rpc.cli.kernels:kernels", "Compile a model's attention kernels ahead of time."),
    "bench": LazyCommand("radixpool.rpc.bench.cli:command", "Measure eviction policies on traces."),
    "completion": LazyCommand("radixpool.rpc.cli.completion:completion", "Let a shell complete commands and options."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="radixpool")
def main() -> None:
    """Share KV-cache prefixes between LLM requests, workers and restarts.

    A manager owns the metadata of one physical pool of KV blocks. A pool holder allocates the pool, workers map it and
    run a model over it, frontends acquire sequences and see at once how much of a prompt is already computed.

    \b
    Try it in three terminals:
      radixpool serve --listen 127.0.0.1:7300 --num-blocks 4096
      radixpool stats --address 127.0.0.1:7300
      radixpool inspect tree --address 127.0.0.1:7300
    or all at once, with a real model:
      radixpool demo

    \b
    Environment of every command that connects:
      RADIXPOOL_ADDRESS                        where the manager listens, in place of --address
      RADIXPOOL_TOKEN or RADIXPOOL_TOKEN_FILE  bearer token (see `radixpool token new`)
      RADIXPOOL_TLS_CERT, _TLS_KEY, _TLS_CA    PEM files of mutual TLS, all three

    \b
    Exit codes: 0 success; 1 the service refused, or a check found a violation; 2 wrong usage or a value out of
    range; 3 nobody answers at the address; 4 the address (or directory) is taken, or cannot be listened on.
    """
    try:
        armed = armed_steps()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if armed:
        click.echo(f"radixpool: {VARIABLE} is set, which is for tests only: {', '.join(armed)}", err=True)
