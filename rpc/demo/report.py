"""What a demo run showed: as data, and as tables for people. Pure, but for printing."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixpool.rpc.demo.replay import Outcome
from radixpool.rpc.inspection import CacheCounters
from radixpool.rpc.pool_types import KvDtype

_STATES = ("free", "cached", "held", "quarantined")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcomes of the replay, and the state of the cache after it.

    `repeated` and `unshared` are its first requests once more, with sharing and without, under equal load.
    `notes` are what a reader must know: skipped conversations, unreadable lines, workers that died.
    """

    model: str
    device: str
    dtype: KvDtype
    outcomes: tuple[Outcome, ...]
    repeated: tuple[Outcome, ...]
    unshared: tuple[Outcome, ...]
    cache: CacheCounters
    notes: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens of all answered requests."""
        return sum(len(outcome.turn.tokens) for outcome in self.outcomes if not outcome.error)

    @property
    def cached_tokens(self) -> int:
        """Return how many of them were not computed."""
        return sum(outcome.cached_tokens for outcome in self.outcomes)

    @property
    def hit_ratio(self) -> float:
        """Return the share of prompt tokens that came from the cache; 0 without requests."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """Return the requests that got no answer."""
        return tuple(outcome for outcome in (*self.outcomes, *self.repeated, *self.unshared) if outcome.error)

    @property
    def compared(self) -> tuple[Comparison, ...]:
        """Return the requests that also ran without sharing, in order."""
        first, again = ({_key(outcome): outcome for outcome in run} for run in (self.outcomes, self.repeated))
        return tuple(Comparison(first[_key(alone)], again[_key(alone)], alone) for alone in self.unshared)

    @property
    def identical(self) -> bool | None:
        """Whether every compared output is the same token for token; None when none was compared."""
        return all(comparison.identical for comparison in self.compared) if self.unshared else None

    @property
    def as_promised(self) -> bool:
        """Whether the outputs are the same where they have to be: in float32."""
        return self.identical is not False or self.dtype is not KvDtype.FLOAT32

    @property
    def differing_tokens(self) -> int:
        """Return how many tokens of the compared outputs are not those of the run without sharing."""
        return sum(comparison.differing_tokens for comparison in self.compared)

    @property
    def compared_tokens(self) -> int:
        """Return how many tokens were compared: each output with sharing, of the replay and of its repetition."""
        return sum(2 * len(comparison.alone.tokens) for comparison in self.compared)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One request three times: in the replay, again with sharing, and without sharing."""

    first: Outcome
    again: Outcome
    alone: Outcome

    @property
    def identical(self) -> bool:
        """Whether all three gave the same tokens."""
        answered = not (self.first.error or self.again.error or self.alone.error)
        return answered and self.first.tokens == self.again.tokens == self.alone.tokens

    @property
    def differing_tokens(self) -> int:
        """Return how many tokens of both runs with sharing lie behind the first one that differs, itself included."""
        length = len(self.alone.tokens)
        return sum(length - _common_length(run.tokens, self.alone.tokens) for run in (self.first, self.again))


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def as_data(report: Report) -> dict[str, Any]:
    """Return the report as JSON-ready data."""
    compared = {_key(comparison.first): comparison for comparison in report.compared}
    return {
        "model": report.model,
        "device": report.device,
        "dtype": report.dtype.value,
        "requests": [_request_data(outcome, compared.get(_key(outcome))) for outcome in report.outcomes],
        "identical_without_sharing": report.identical,
        "compared_requests": len(report.unshared),
        "compared_tokens": report.compared_tokens,
        "differing_tokens": report.differing_tokens,
        "hit_ratio": report.hit_ratio,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "ttft_ms": {
            "median": _median([outcome.ttft_ms for outcome in report.outcomes if not outcome.error]),
            "repeated_with_sharing": _median([item.again.ttft_ms for item in report.compared]),
            "repeated_without_sharing": _median([item.alone.ttft_ms for item in report.compared]),
        },
        "blocks": {f"{state}_blocks": getattr(report.cache, f"{state}_blocks") for state in _STATES}
        | {"num_blocks": report.cache.num_blocks, "evicted_blocks": report.cache.evicted_blocks},
        "notes": list(report.notes),
    }


def print_report(report: Report, console: Console) -> None:
    """Print a row per request, then the summary."""
    console.print(_request_table(report))
    console.print(_summary_table(report))
    for note in report.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    for outcome in report.failed:
        console.print(f"[red]failed:[/] {_name(outcome)}: {escape(outcome.error)}")


def _request_table(report: Report) -> Table:
    caption = "TTFT: time to first token in ms, all chats at once; shared, unshared: once more under equal load"
    table = Table(title="requests", caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for column in ("turn", "worker", "prompt", "cached", "TTFT", "tok/s"):
        table.add_column(column, justify="left" if column in ("turn", "worker") else "right", no_wrap=True)
    if report.compared:
        for column in ("shared", "unshared", "same"):
            table.add_column(column, justify="right", no_wrap=True)
    compared = {_key(comparison.first): comparison for comparison in report.compared}
    for outcome in report.outcomes:
        cells = _request_cells(outcome)
        comparison = compared.get(_key(outcome))
        if comparison is not None:
            same = "[green]yes[/]" if comparison.identical else "[red]no[/]"
            cells += [_ms(comparison.again.ttft_ms), _ms(comparison.alone.ttft_ms), same]
        table.add_row(*cells)
    return table


def _request_cells(outcome: Outcome) -> list[str]:
    prompt = len(outcome.turn.tokens)
    cells = [f"{escape(outcome.turn.conversation)} {outcome.turn.number}", outcome.worker, f"{prompt:,}"]
    if outcome.error:
        return [*cells, "[red]failed[/]"]
    speed = outcome.tokens_per_s
    return [
        *cells,
        f"{outcome.cached_tokens:,}",
        _ms(outcome.ttft_ms),
        f"{speed:.1f}" if speed is not None else "-",
    ]


def _summary_table(report: Report) -> Table:
    cache = report.cache
    table = Table(title="summary", show_header=False, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("hit ratio", f"{report.hit_ratio:.1%} of {report.prompt_tokens:,} prompt tokens")
    table.add_row("prefill tokens saved", f"{report.cached_tokens:,}")
    if report.compared:
        shared = statistics.median(item.again.ttft_ms for item in report.compared)
        alone = statistics.median(item.alone.ttft_ms for item in report.compared)
        ratio = f", {alone / shared:.1f} times as long" if shared else ""
        table.add_row("median TTFT, repeated", f"{_ms(shared)} ms with sharing, {_ms(alone)} ms without{ratio}")
        table.add_row("output without sharing", _verdict(report))
    states = ", ".join(f"{getattr(cache, f'{state}_blocks'):,} {state}" for state in _STATES)
    table.add_row("blocks", f"{states} of {cache.num_blocks:,}; {cache.evicted_blocks:,} evicted")
    return table


def _ms(value: float) -> str:
    """Return milliseconds as people read them: a tenth matters below 100.

    >>> _ms(7.25), _ms(12345.6)
    ('7.2', '12,346')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _verdict(report: Report) -> str:
    compared = f"{len(report.compared)} requests compared, greedy"
    if report.identical:
        return f"[green]identical[/] ({compared})"
    tokens = f"{report.differing_tokens:,} of {report.compared_tokens:,} tokens from the first difference on"
    if report.as_promised:
        return f"[yellow]{tokens} differ[/] ({compared}; {report.dtype.value} rounds by the shapes of a step)"
    return f"[red]DIFFERENT[/]: {tokens} ({compared})"


def _request_data(outcome: Outcome, compared: Comparison | None) -> dict[str, Any]:
    data: dict[str, Any] = {
        "conversation": outcome.turn.conversation,
        "turn": outcome.turn.number,
        "worker": outcome.worker,
        "prompt_tokens": len(outcome.turn.tokens),
        "cached_tokens": outcome.cached_tokens,
        "ttft_ms": outcome.ttft_ms,
        "tokens_per_s": outcome.tokens_per_s,
        "output_tokens": len(outcome.tokens),
        "output_token_ids": list(outcome.tokens),
    }
    if outcome.error:
        data["error"] = outcome.error
    if compared is not None:
        data["identical"] = compared.identical
        for name, other in (("repeated", compared.again), ("unshared", compared.alone)):
            data[f"{name}_cached_tokens"] = other.cached_tokens
            data[f"{name}_ttft_ms"] = other.ttft_ms
            data[f"{name}_output_token_ids"] = list(other.tokens)
    return data


def _key(outcome: Outcome) -> tuple[str, int]:
    return outcome.turn.conversation, outcome.turn.number


def _name(outcome: Outcome) -> str:
    return f"{escape(outcome.turn.conversation)}, turn {outcome.turn.number}"


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
