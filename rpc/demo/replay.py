"""Send the turns of conversations from several frontends at once to several workers, and measure.

Each frontend takes one conversation after the other and sends its turns in order, as chats do; the turns of one
conversation go to the workers in rotation, so a turn's history was mostly computed by another worker. When a worker
dies its request is sent to the next one.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixpool.radix import Namespace
from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.client import WorkerClient
from radixpool.rpc.demo.prompts import Turn
from radixpool.rpc.errors import ManagerUnavailable
from radixpool.rpc.generation import GenerateStarted, GenerateTokens, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one request. Times in milliseconds, from sending the request."""

    turn: Turn
    worker: str
    cached_tokens: int = 0
    tokens: tuple[int, ...] = ()
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    error: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Return how fast tokens came after the first one; None for fewer than two."""
        elapsed_s = (self.total_ms - self.ttft_ms) / 1000
        return (len(self.tokens) - 1) / elapsed_s if len(self.tokens) > 1 and elapsed_s > 0 else None


@dataclass(frozen=True, slots=True)
class Target:
    """A worker to send requests to."""

    name: str
    address: str


class Replay:
    """Send requests to `targets`; `namespace_of(turn)` decides who shares with whom."""

    def __init__(
        self,
        targets: Sequence[Target],
        sampling: SamplingParams,
        *,
        namespace_of: Callable[[Turn], Namespace] = lambda _turn: Namespace(),
        on_outcome: Callable[[Outcome], None] = lambda _outcome: None,
    ) -> None:
        self._targets = targets
        self._sampling = sampling
        self._namespace_of = namespace_of
        self._on_outcome = on_outcome
        self._clients = [WorkerClient(target.address) for target in targets]

    def close(self) -> None:
        """Close the connections; requests that still run end with an error."""
        for client in self._clients:
            client.close()

    def run(self, chats: Sequence[Sequence[Turn]], *, frontends: int) -> list[Outcome]:
        """Send every turn of every chat and return the outcomes in the order of `chats`. Blocks until all are done."""
        waiting: queue.SimpleQueue[tuple[int, Sequence[Turn]]] = queue.SimpleQueue()
        for numbered in enumerate(chats):
            waiting.put(numbered)
        outcomes: dict[tuple[int, int], Outcome] = {}
        threads = [
            threading.Thread(target=self._frontend, args=(waiting, outcomes), name=f"frontend-{number}", daemon=True)
            for number in range(min(frontends, len(chats)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # so that Ctrl-C is heard
        return [outcomes[key] for key in sorted(outcomes)]

    def _frontend(
        self, waiting: queue.SimpleQueue[tuple[int, Sequence[Turn]]], outcomes: dict[tuple[int, int], Outcome]
    ) -> None:
        while True:
            try:
                chat_number, chat = waiting.get_nowait()
            except queue.Empty:
                return
            for turn_number, turn in enumerate(chat):
                outcome = self._send(turn, first_target=chat_number + turn_number)
                outcomes[chat_number, turn_number] = outcome
                self._on_outcome(outcome)

    def _send(self, turn: Turn, *, first_target: int) -> Outcome:
        """Send to one worker after the other until one answers."""
        count = len(self._targets)
        for index in itertools.islice(itertools.count(first_target), count):
            target, client = self._targets[index % count], self._clients[index % count]
            try:
                return self._stream(turn, target, client)
            except ManagerUnavailable as error:
                outcome = Outcome(turn=turn, worker=target.name, error=f"{target.name} is out of reach: {error}")
            except (RadixPoolError, ValueError) as error:
                return Outcome(turn=turn, worker=target.name, error=str(error))
        return outcome

    def _stream(self, turn: Turn, target: Target, client: WorkerClient) -> Outcome:
        start = time.perf_counter()
        tokens: list[int] = []
        cached_tokens = 0
        ttft_ms = 0.0
        for event in client.generate(turn.tokens, self._sampling, namespace=self._namespace_of(turn)):
            if isinstance(event, GenerateStarted):
                cached_tokens = event.cached_tokens
            elif isinstance(event, GenerateTokens):
                ttft_ms = ttft_ms or (time.perf_counter() - start) * 1000
                tokens += event.tokens
        total_ms = (time.perf_counter() - start) * 1000
        return Outcome(
            turn=turn,
            worker=target.name,
            cached_tokens=cached_tokens,
            tokens=tuple(tokens),
            ttft_ms=ttft_ms,
            total_ms=total_ms,
        )
