"""What observation costs a call: the same unary handler and stream with and without the observer interceptor.

python bench/observer.py [--calls N]      # in process: handler and interceptor only, no socket
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from radixpool.rpc.interception import behavior_of
from radixpool.rpc.metrics import ObserverInterceptor, RpcMetrics


class Details:
    """What gRPC hands to an interceptor."""

    method = "/radixpool.v1.CacheService/Acquire"
    invocation_metadata = (("user-agent", "grpc-python"), ("authorization", "Bearer x"))


class Context:
    """The part of a servicer context that a successful call touches."""

    @staticmethod
    def code() -> None:
        return None


def microseconds_per_call(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _context: request)
    observer = ObserverInterceptor(RpcMetrics(CollectorRegistry()))
    context = Context()

    def plain() -> None:
        behavior_of(handler)(None, context)

    def observed() -> None:
        wrapped = observer.intercept_service(lambda _details: handler, Details)  # type: ignore[arg-type]
        assert wrapped is not None
        behavior_of(wrapped)(None, context)

    pairs = [
        (microseconds_per_call(plain, arguments.calls), microseconds_per_call(observed, arguments.calls))
        for _ in range(arguments.rounds)
    ]
    extra = sorted(after - before for before, after in pairs)
    print(f"observer: {statistics.median(extra):.2f} us a call more (min {extra[0]:.2f}, max {extra[-1]:.2f})")


if __name__ == "__main__":
    main()
