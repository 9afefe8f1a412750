"""The manager: one process, one `RadixCache`, one lock, and the gRPC services over them.

`Engine` owns all state and knows nothing of gRPC; the services translate; `ManagerServer` listens.
"""

from radixpool.rpc.manager.engine import Engine
from radixpool.rpc.manager.options import ManagerOptions
from radixpool.rpc.manager.server import ManagerServer

__all__ = ["Engine", "ManagerOptions", "ManagerServer"]
