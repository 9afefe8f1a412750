"""A seeded random walk over all operations of a driver, for long runs that hypothesis would be slow for."""

from __future__ import annotations

import random

from radixpool.radix import MediaSpan, Namespace

NAMESPACES = (Namespace(), Namespace(), Namespace(tenant="t"))


def _tokens(rng: random.Random, most: int = 12) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randint(1, most))]


def _media(rng: random.Random, tokens: list[int]) -> list[MediaSpan]:
    """Put up to two contents under the tokens, mostly none."""
    spans, at = [], 0
    while rng.random() < 0.35 and at < len(tokens):  # near each other's places, so that prompts almost agree
        start = min(at + rng.randrange(3), len(tokens) - 1)
        length = rng.randint(1, min(3, len(tokens) - start))
        spans.append(MediaSpan(start, length, rng.choice((b"cat", b"cat", b"dog"))))
        at = start + length
    return spans


def _steps(rng: random.Random, driver) -> dict[str, int]:
    steps = {w: done + rng.randrange(3) for w, done in driver.oracle.workers.items() if rng.random() < 0.7}
    return {w: s for w, s in steps.items() if s >= 0}


def _acquire(rng: random.Random, driver) -> None:
    max_hit = rng.choice((None, None, None, rng.randrange(14)))
    in_flight = rng.choice(("ignore", "ignore", "report", "wait"))
    reserve = rng.choice((0, 0, 0, 1, 4))
    tokens, partial = _tokens(rng), rng.random() < 0.3
    driver.acquire(tokens, rng.choice(NAMESPACES), reserve, max_hit, partial, in_flight, _media(rng, tokens))


def _on_sequence(rng: random.Random, driver) -> None:
    handle = rng.choice(driver.handles)
    seq = driver.oracle.sequences[handle]
    known = len(seq.tokens)
    choice = rng.random()
    if choice < 0.15:
        tokens = _tokens(rng, 4)
        driver.extend(handle, tokens, _media(rng, tokens))
    elif choice < 0.22:
        driver.reserve(handle, rng.randrange(6))
    elif choice < 0.55:
        driver.commit(handle, known if rng.random() < 0.6 else rng.randint(0, known))
    elif choice < 0.62:
        driver.rewind(handle, rng.randint(max(0, known - 3), known), _steps(rng, driver))
    elif choice < 0.67:
        driver.fork(handle, rng.randint(1, 2))
    elif choice < 0.71:
        driver.invalidate(handle, rng.randrange(len(seq.table) + 1) if rng.random() < 0.9 else 99)
    else:
        driver.release(handle, _steps(rng, driver))


def _on_pool(rng: random.Random, driver) -> None:
    choice, workers, pins = rng.random(), list(driver.oracle.workers), list(driver.oracle.pins)
    if choice < 0.25:
        tokens = _tokens(rng)
        driver.match(tokens, rng.choice(NAMESPACES), _media(rng, tokens))
    elif choice < 0.4:
        driver.evict(rng.randrange(4))
    elif choice < 0.5:
        tokens = _tokens(rng)
        driver.pin(tokens, rng.choice(NAMESPACES), _media(rng, tokens))
    elif choice < 0.62 and pins:
        driver.unpin(rng.choice(pins))
    elif choice < 0.68:
        mode = rng.choice(("idle_only", "drain", "new_generation"))
        driver.flush(rng.choice((None, *NAMESPACES)), mode)
    elif choice < 0.75:
        driver.add_worker(rng.choice(("w0", "w1")))
    elif workers and choice < 0.96:
        worker = rng.choice(workers)
        driver.complete(worker, max(0, driver.oracle.workers[worker] + rng.randrange(3)))
    elif workers:
        driver.remove_worker(rng.choice(workers))


def _step(rng: random.Random, driver) -> None:
    choice = rng.random()
    if choice < 0.25 or not driver.handles:
        _acquire(rng, driver)
    elif choice < 0.8:
        _on_sequence(rng, driver)
    else:
        _on_pool(rng, driver)


def random_walk(driver, seed: int, steps: int) -> None:
    """Take `steps` random steps, comparing after each, and drain."""
    rng = random.Random(seed)
    for _ in range(steps):
        _step(rng, driver)
        driver.compare()
    driver.drain()
