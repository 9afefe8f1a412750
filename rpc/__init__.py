"""Processes and the wire: the manager, its clients, the shared pool, workers and the command line.

`radixpool.rpc.client` is what a serving frontend imports; `radixpool.rpc.manager` is the server. Neither imports torch.
"""
