"""What observing and authorising calls costs: the same manager bare, observed, and with tokens, alternating in one run.

python bench/guards.py [--lifecycles N] [--rounds N]

One client and one manager in two processes over a unix socket; a lifecycle is Acquire + Commit + Release of 1,024
tokens of which all but the last block are cached. Prints microseconds a call, median over rounds, and the ratio to
bare.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from radixpool.rpc.client import Client, ClientOptions
from radixpool.rpc.security.client import ClientSecurity
from radixpool.rpc.security.tokens import NewToken, new_token

TOKENS = bytes(4 * 1024)
CALLS_PER_LIFECYCLE = 3
VARIANTS = ("bare", "observed", "observed + local", "observed + token")


def serve(folder: str, ready: Connection, variant: str) -> None:
    from prometheus_client import CollectorRegistry

    from radixpool.rpc.manager import ManagerOptions, ManagerServer
    from radixpool.rpc.metrics import ObserverInterceptor, RpcMetrics
    from radixpool.rpc.security.credentials import CredentialFile
    from radixpool.rpc.security.interceptor import AuthInterceptor

    interceptors = [] if variant == "bare" else [ObserverInterceptor(RpcMetrics(CollectorRegistry()))]
    if variant.endswith("local"):
        interceptors.append(AuthInterceptor())
    elif variant.endswith("token"):
        interceptors.append(AuthInterceptor(CredentialFile(f"{folder}/credentials.toml")))
    options = ManagerOptions(listen=f"unix:{folder}/{VARIANTS.index(variant)}.sock", num_blocks=4096, block_size=16)
    server = ManagerServer(options, interceptors=interceptors)
    server.start()
    ready.send(server.address)
    ready.recv()
    server.stop(0)


def microseconds_per_call(client: Client, lifecycles: int) -> float:
    start = time.perf_counter()
    for _ in range(lifecycles):
        sequence = client.acquire(TOKENS)
        client.commit(sequence.handle, 1024)
        client.release(sequence.handle)
    return (time.perf_counter() - start) / (lifecycles * CALLS_PER_LIFECYCLE) * 1e6


def write_credentials(folder: str, token: NewToken) -> None:
    path = Path(folder) / "credentials.toml"
    path.write_text(
        f'[[token]]\nid = "{token.token_id}"\nsha256 = "{token.sha256}"\nname = "bench"\n'
        'roles = ["frontend"]\ntenant = "bench"\nexpires = "never"\n'
    )
    path.chmod(0o600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lifecycles", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    token = new_token()
    with tempfile.TemporaryDirectory(prefix="rpg", dir="/tmp") as folder:
        write_credentials(folder, token)
        clients, pipes = {}, []
        for variant in VARIANTS:
            here, there = context.Pipe()
            context.Process(target=serve, args=(folder, there, variant), daemon=True).start()
            security = ClientSecurity(token=token.secret if variant.endswith("token") else "")
            clients[variant] = Client(here.recv(), options=ClientOptions(security=security))
            pipes.append(here)
        figures: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for round_ in range(arguments.rounds + 1):
            for variant, client in clients.items():
                figure = microseconds_per_call(client, arguments.lifecycles)
                if round_:  # the first round warms up
                    figures[variant].append(figure)
        for client in clients.values():
            client.close()
        for pipe in pipes:
            pipe.send(None)
    bare = statistics.median(figures["bare"])
    print(f"{'manager':<20} {'us a call':>10} {'min':>8} {'max':>8} {'to bare':>8}")
    for variant, values in figures.items():
        median = statistics.median(values)
        print(f"{variant:<20} {median:>10.1f} {min(values):>8.1f} {max(values):>8.1f} {median / bare:>8.3f}")


if __name__ == "__main__":
    main()
