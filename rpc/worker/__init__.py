"""A worker: a decoder model whose KV lives in the shared pool, served over gRPC.

`model_source` finds weights, `model` loads and runs them over a `KvPool`, `scheduler` decides what each step computes,
`engine` drives the steps against a `CachePort`, `service` speaks `WorkerService`, `process` puts it all together.
"""
