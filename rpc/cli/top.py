"""`radixpool top`: what a manager does right now, drawn again every second."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import click
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from radixpool.rpc.cli.json_printer import plain
from radixpool.rpc.cli.options import address_option, json_option, operator_client
from radixpool.rpc.cli.table_printer import STATE_STYLES
from radixpool.rpc.client import Client
from radixpool.rpc.errors import ManagerUnavailable
from radixpool.rpc.inspection import Stats

_BAR_WIDTH = 60
_HISTORY = 60
_SPARKS = "▁▂▃▄▅▆▇█"
_STATES = ("held", "quarantined", "cached", "free")


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two looks, a second; `hit_ratio` is None when no prompt token was asked for."""

    seconds: float
    requests_per_s: float
    refused_per_s: float
    tokens_per_s: float
    hit_ratio: float | None
    committed_blocks_per_s: float
    evicted_blocks_per_s: float


def rates_between(before: Stats, after: Stats) -> Rates | None:
    """Return what happened between two looks by the manager's own clock; None when it was restarted between them."""
    seconds = (after.service.uptime_ms - before.service.uptime_ms) / 1000
    if before.incarnation != after.incarnation or seconds <= 0:
        return None
    old, new = before.cache, after.cache
    asked, hit = new.queried_tokens - old.queried_tokens, new.hit_tokens - old.hit_tokens
    return Rates(
        seconds,
        requests_per_s=(new.admitted_requests - old.admitted_requests) / seconds,
        refused_per_s=(new.refused_requests - old.refused_requests) / seconds,
        tokens_per_s=asked / seconds,
        hit_ratio=hit / asked if asked else None,
        committed_blocks_per_s=(new.committed_blocks - old.committed_blocks) / seconds,
        evicted_blocks_per_s=(new.evicted_blocks - old.evicted_blocks) / seconds,
    )


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="Stop after so many looks.  [default: never]")
@address_option
@json_option
def top(address: str, as_json: bool, interval: float, count: int | None) -> None:
    """Watch a manager: requests, hit ratio and block states, again every second.

    Ctrl-C ends it. Rates are of the last interval. In a pipe, or with --json, there is one line a look. A manager that
    goes away is waited for; one that never answered is an error. A look costs the manager less than a request.

    \b
    Examples:
      radixpool top
      radixpool top --interval 5 --json >usage.jsonl
    """
    with operator_client(address) as client:
        looks = _looks(client, interval, count)
        if as_json:
            for stats, rates in looks:
                click.echo(json.dumps({"stats": plain(stats), "rates": plain(rates)}, ensure_ascii=False))
                sys.stdout.flush()
        elif Console().is_terminal:
            _draw(looks, address)
        else:
            for stats, rates in looks:
                click.echo(_line(stats, rates) if stats else "no answer")
                sys.stdout.flush()


def _looks(client: Client, interval: float, count: int | None) -> Iterator[tuple[Stats | None, Rates | None]]:
    """Yield the counters and what changed since the look before; None where nobody answers after the first look."""
    before: Stats | None = client.stats()
    yield before, None
    made = 1
    while count is None or made < count:
        time.sleep(interval)
        made += 1
        try:
            stats = client.stats()
        except ManagerUnavailable:
            yield None, None
            continue
        yield stats, rates_between(before, stats) if before else None
        before = stats


def _draw(looks: Iterator[tuple[Stats | None, Rates | None]], address: str) -> None:
    ratios: deque[float | None] = deque(maxlen=_HISTORY)
    last: Stats | None = None
    with Live(auto_refresh=False, screen=True) as live:
        for stats, rates in looks:
            if stats is not None:
                last = stats
                ratios.append(rates.hit_ratio if rates else None)
            assert last is not None, "the first look has an answer"
            live.update(screen(address, last, rates, ratios, answered=stats is not None), refresh=True)


def screen(address: str, stats: Stats, rates: Rates | None, ratios: Iterable[float | None], *, answered: bool) -> Group:
    """Return what a terminal shows; `ratios` are the hit ratios of the last intervals, oldest first."""
    head = Text.from_markup(f"[bold]{escape(address)}[/]  {_state(stats)}")
    trouble = Text("nobody answers; waiting", style="bold red") if not answered else Text()
    history = Text.assemble("hit ratio  ", (sparkline(ratios), "green"))
    return Group(head, trouble, _bar(stats), Text(), _rates_table(stats, rates), Text(), history, *_tenants(stats))


def _state(stats: Stats) -> str:
    service = stats.service
    return (
        f"up {timedelta(seconds=service.uptime_ms // 1000)}, generation {stats.generation}, "
        f"{service.num_clients:,} clients, {service.open_sessions:,} sessions, {stats.cache.num_sequences:,} sequences"
    )


def _bar(stats: Stats) -> Group:
    bar, legend, drawn, seen = Text(), Text(), 0, 0
    for state in _STATES:
        blocks = getattr(stats.cache, f"{state}_blocks")
        seen += blocks
        end = round(_BAR_WIDTH * seen / stats.cache.num_blocks)
        bar.append("█" * (end - drawn), STATE_STYLES[state])
        drawn = end
        legend.append(f"{state} {blocks:,} ({blocks / stats.cache.num_blocks:.1%})  ", STATE_STYLES[state])
    return Group(bar, legend)


def _rates_table(stats: Stats, rates: Rates | None) -> Table:
    cache = stats.cache
    table = Table("", "now", "in all", box=None, pad_edge=False)
    for name, now, total in (
        ("requests", rates and f"{rates.requests_per_s:,.1f}/s", f"{cache.admitted_requests:,}"),
        ("refused", rates and f"{rates.refused_per_s:,.1f}/s", f"{cache.refused_requests:,}"),
        ("prompt tokens", rates and f"{rates.tokens_per_s:,.0f}/s", f"{cache.queried_tokens:,}"),
        ("hit ratio", rates and percent(rates.hit_ratio), percent(cache.hit_ratio if cache.queried_tokens else None)),
        ("blocks committed", rates and f"{rates.committed_blocks_per_s:,.0f}/s", f"{cache.committed_blocks:,}"),
        ("blocks evicted", rates and f"{rates.evicted_blocks_per_s:,.0f}/s", f"{cache.evicted_blocks:,}"),
        ("leases expired", "", f"{stats.service.expired_leases:,}"),
        ("requests fenced", "", f"{stats.service.fenced_requests:,}"),
    ):
        table.add_row(name, now or "", total)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _tenants(stats: Stats) -> list[Table]:
    if not stats.tenants:
        return []
    table = Table("tenant", "used", "cached", "guaranteed", "at most", box=None, pad_edge=False)
    for usage in stats.tenants:
        most = "" if usage.max_blocks is None else f"{usage.max_blocks:,}"
        counts = (usage.used_blocks, usage.cached_blocks, usage.guaranteed_blocks)
        table.add_row(escape(usage.tenant), *(f"{count:,}" for count in counts), most)
    return [table]


def _line(stats: Stats, rates: Rates | None) -> str:
    cache = stats.cache
    blocks = ", ".join(f"{state} {getattr(cache, f'{state}_blocks')}" for state in _STATES)
    if rates is None:
        return f"{blocks}; hit ratio {percent(cache.hit_ratio if cache.queried_tokens else None)} in all"
    return (
        f"{blocks}; {rates.requests_per_s:.1f} requests/s, {rates.refused_per_s:.1f} refused/s, "
        f"{rates.tokens_per_s:.0f} tokens/s, hit ratio {percent(rates.hit_ratio)}, "
        f"{rates.evicted_blocks_per_s:.0f} blocks evicted/s"
    )


def percent(ratio: float | None) -> str:
    """Return a ratio as text.

    >>> percent(0.4567), percent(None)
    ('45.7%', '-')
    """
    return "-" if ratio is None else f"{ratio:.1%}"


def sparkline(ratios: Iterable[float | None]) -> str:
    """Return ratios from 0 to 1 as a line of bars; a gap where there is none.

    >>> sparkline([0.0, 0.5, None, 1.0])
    '▁▅ █'
    """
    top_spark = len(_SPARKS) - 1
    return "".join(" " if ratio is None else _SPARKS[round(ratio * top_spark)] for ratio in ratios)
