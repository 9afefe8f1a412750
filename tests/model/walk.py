"""A seeded random walk over all operations of a driver, for long runs that hypothesis would be slow for."""

from __future__ import annotations

import random

from radixpool.radix import Namespace

NAMESPACES = (Namespace(), Namespace(), Namespace(tenant="t"))


def _tokens(rng: random.Random, most: int = 12) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randint(1, most))]


def _step(rng: random.Random, driver) -> None:
    handles, workers = driver.handles, list(driver.oracle.workers)
    choice = rng.random()
    if choice < 0.3 or not handles:
        max_hit = rng.choice((None, None, None, rng.randrange(14)))
        driver.acquire(_tokens(rng), rng.choice(NAMESPACES), rng.choice((0, 0, 0, 1, 4)), max_hit)
    elif choice < 0.38:
        driver.extend(rng.choice(handles), _tokens(rng, 4))
    elif choice < 0.41:
        driver.reserve(rng.choice(handles), rng.randrange(6))
    elif choice < 0.65:
        handle = rng.choice(handles)
        known = len(driver.oracle.sequences[handle].tokens)
        driver.commit(handle, known if rng.random() < 0.6 else rng.randint(0, known))
    elif choice < 0.85:
        steps = {w: driver.oracle.workers[w] + rng.randrange(3) for w in workers if rng.random() < 0.7}
        driver.release(rng.choice(handles), {w: s for w, s in steps.items() if s >= 0})
    elif choice < 0.9:
        driver.match(_tokens(rng), rng.choice(NAMESPACES))
    elif choice < 0.93:
        driver.evict(rng.randrange(4))
    elif choice < 0.95:
        driver.add_worker(rng.choice(("w0", "w1")))
    elif workers and choice < 0.99:
        worker = rng.choice(workers)
        driver.complete(worker, max(0, driver.oracle.workers[worker] + rng.randrange(3)))
    elif workers:
        driver.remove_worker(rng.choice(workers))


def random_walk(driver, seed: int, steps: int) -> None:
    """Take `steps` random steps, comparing after each, and drain."""
    rng = random.Random(seed)
    for _ in range(steps):
        _step(rng, driver)
        driver.compare()
    driver.drain()
