"""KV events as vLLM publishes them over ZMQ, so that prefix-aware routers can follow this cache too.

Frames, field names and the replay protocol are those of vLLM 0.33 (`vllm/distributed/kv_events.py`, read as a
specification). A publisher reads the cache's event log from a thread of its own: a subscriber that is slow loses
messages and asks for a replay, a publisher that is slow announces the whole state anew; the cache waits for neither.

`publisher` needs pyzmq and msgpack (`radixpool[events]`); the other modules are pure.
"""
