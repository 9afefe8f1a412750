"""What a demo run showed: as data, and as tables for people. Pure, but for printing."""

from __future__ import annotations

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

_STATES = ("free", "cached", "held", "quarantined")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcomes with sharing, those of the first requests once more without, and the cache in between.

    `notes` are what a reader must know: skipped conversations, unreadable lines, workers that died.
    """

    model: str
    outcomes: tuple[Outcome, ...]
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
        return tuple(outcome for outcome in (*self.outcomes, *self.unshared) if outcome.error)

    @property
    def compared(self) -> tuple[tuple[Outcome, Outcome], ...]:
        """Return the requests that ran both ways, with sharing first."""
        by_turn = {_key(outcome): outcome for outcome in self.outcomes}
        return tuple((by_turn[_key(outcome)], outcome) for outcome in self.unshared)

    @property
    def identical(self) -> bool | None:
        """Whether every compared output is the same token for token; None when none was compared."""
        if not self.unshared:
            return None
        return all(not a.error and not b.error and a.tokens == b.tokens for a, b in self.compared)


def as_data(report: Report) -> dict[str, Any]:
    """Return the report as JSON-ready data."""
    unshared = {_key(outcome): outcome for outcome in report.unshared}
    return {
        "model": report.model,
        "requests": [_request_data(outcome, unshared.get(_key(outcome))) for outcome in report.outcomes],
        "identical_without_sharing": report.identical,
        "compared_requests": len(report.unshared),
        "hit_ratio": report.hit_ratio,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "ttft_ms": {
            "median": _median([outcome.ttft_ms for outcome in report.outcomes if not outcome.error]),
            "compared_with_sharing": _median([shared.ttft_ms for shared, _ in report.compared]),
            "compared_without_sharing": _median([alone.ttft_ms for _, alone in report.compared]),
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
    caption = "TTFT: time to first token in ms, with everything running at once; unshared: the same without sharing"
    table = Table(title="requests", caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for column in ("turn", "worker", "prompt", "cached", "", "TTFT", "tokens/s"):
        table.add_column(column, justify="left" if column in ("turn", "worker") else "right", no_wrap=True)
    if report.unshared:
        table.add_column("unshared", justify="right", no_wrap=True)
        table.add_column("same", justify="right", no_wrap=True)
    unshared = {_key(outcome): outcome for outcome in report.unshared}
    for outcome in report.outcomes:
        cells = _request_cells(outcome)
        other = unshared.get(_key(outcome))
        if other is not None:
            cells += [f"{other.ttft_ms:,.0f}", "[green]yes[/]" if other.tokens == outcome.tokens else "[red]no[/]"]
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
        f"{outcome.cached_tokens / prompt:.0%}",
        f"{outcome.ttft_ms:,.0f}",
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
        shared = statistics.median(with_sharing.ttft_ms for with_sharing, _ in report.compared)
        alone = statistics.median(without.ttft_ms for _, without in report.compared)
        ratio = f" ({alone / shared:.1f} times)" if shared else ""
        table.add_row("median time to first token", f"{shared:,.0f} ms with sharing, {alone:,.0f} ms without{ratio}")
        verdict = "[green]identical[/]" if report.identical else "[red]DIFFERENT[/]"
        table.add_row("output without sharing", f"{verdict} ({len(report.compared)} requests compared, greedy)")
    states = ", ".join(f"{getattr(cache, f'{state}_blocks'):,} {state}" for state in _STATES)
    table.add_row("blocks", f"{states} of {cache.num_blocks:,}; {cache.evicted_blocks:,} evicted")
    return table


def _request_data(outcome: Outcome, unshared: Outcome | None) -> dict[str, Any]:
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
    if unshared is not None:
        data["ttft_ms_without_sharing"] = unshared.ttft_ms
        data["output_token_ids_without_sharing"] = list(unshared.tokens)
    return data


def _key(outcome: Outcome) -> tuple[str, int]:
    return outcome.turn.conversation, outcome.turn.number


def _name(outcome: Outcome) -> str:
    return f"{escape(outcome.turn.conversation)}, turn {outcome.turn.number}"


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
