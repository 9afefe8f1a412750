"""What the manager says about itself: Prometheus metrics over HTTP, and structured logs.

Values that the cache and the service already count are read when somebody scrapes, so that they cost nothing while
serving; the only work done per call is one histogram observation.

Neither metrics nor logs ever hold token ids, cache salts, handles, client ids or credentials.
"""

from radixpool.rpc.metrics.collector import ManagerCollector, ManagerSource, ServiceSnapshot
from radixpool.rpc.metrics.http import MetricsServer
from radixpool.rpc.metrics.logs import LogFormat, configure_logging
from radixpool.rpc.metrics.observer import ObserverInterceptor
from radixpool.rpc.metrics.rpcs import RpcMetrics

__all__ = [
    "LogFormat",
    "ManagerCollector",
    "ManagerSource",
    "MetricsServer",
    "ObserverInterceptor",
    "RpcMetrics",
    "ServiceSnapshot",
    "configure_logging",
]
