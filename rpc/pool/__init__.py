"""The shared physical pool: one process allocates the KV blocks, workers map the same bytes.

`PoolHolder` owns the memory and hands it out, `attach` maps it, `radixpool.rpc.pool.geometry` says how it is laid out.
Metadata (who may use which block) is the manager's; nothing here knows of it.
"""
