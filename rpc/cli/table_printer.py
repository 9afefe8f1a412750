"""Results as tables and trees for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from radixpool.radix import Namespace
from radixpool.rpc import inspection

_MAX_RANGES = 4
STATE_STYLES: Final = {"free": "dim", "cached": "green", "held": "yellow", "quarantined": "red"}


def print_stats(stats: inspection.Stats) -> None:
    """Print block states, requests and the process."""
    cache, service = stats.cache, stats.service
    blocks = Table("blocks", "count", "share", title=f"{cache.num_blocks:,} blocks of {cache.block_size} tokens")
    for state in ("free", "cached", "held", "quarantined"):
        count = getattr(cache, f"{state}_blocks")
        blocks.add_row(f"[{STATE_STYLES[state]}]{state}[/]", f"{count:,}", f"{count / cache.num_blocks:.1%}")
    blocks.add_row("pinned", f"{cache.pinned_blocks:,}", f"{cache.pinned_blocks / cache.num_blocks:.1%}")
    counters = _pairs(
        {
            "hit ratio": f"{cache.hit_ratio:.1%} ({cache.hit_tokens:,} of {cache.queried_tokens:,} tokens)",
            "requests": f"{cache.admitted_requests:,} admitted, {cache.refused_requests:,} refused",
            "blocks over time": f"{cache.committed_blocks:,} committed, {cache.evicted_blocks:,} evicted, "
            f"{cache.remapped_blocks:,} remapped",
            "tree": f"{_count(cache.num_nodes, 'node')} in {_count(cache.num_namespaces, 'namespace')}",
            "sequences": f"{cache.num_sequences:,}",
            "clients": f"{service.num_clients:,} registered, {service.open_sessions:,} sessions, "
            f"{service.expired_leases:,} leases expired, {service.fenced_requests:,} requests fenced",
            "uptime": f"{service.uptime_ms / 1000:,.1f} s, generation {stats.generation}",
        }
    )
    console = Console()
    console.print(blocks)
    console.print(counters)


def print_check(report: inspection.CheckReport) -> None:
    """Print the outcome of a check."""
    console = Console()
    for violation in report.violations:
        console.print(f"[red]violated:[/] {escape(violation)}")
    if not report.violations:
        console.print(f"[green]all invariants hold[/] (checked in {report.elapsed_us / 1000:.1f} ms)")


def print_tree(view: inspection.TreeView) -> None:
    """Draw the forest: one tree per namespace, one line per run of blocks."""
    console = Console()
    if not view.nodes:
        flushed = f"; {_count(view.total_nodes, 'flushed run')} of blocks with holders left" if view.total_nodes else ""
        console.print(f"the tree is empty: nothing is committed{flushed}")
        return
    path: list[Tree] = []
    roots: list[Tree] = []
    for node in view.nodes:
        if node.namespace is not None and (not roots or node.level == 0):
            roots.append(Tree(f"[bold]{escape(namespace_text(node.namespace))}[/]"))
        del path[node.level :]
        path.append((path[-1] if path else roots[-1]).add(_one_line(_node_text(node, view.block_size))))
    for root in _merged(roots):
        console.print(root)
    if view.total_nodes > len(view.nodes):
        console.print(f"… {len(view.nodes):,} of {view.total_nodes:,} nodes shown; see --max-nodes")


def print_block(block: inspection.BlockView) -> None:
    """Print one block and who holds it."""
    console = Console()
    rows = {"state": f"[{STATE_STYLES[block.state.value]}]{block.state.value}[/]", "findable": _yes(block.findable)}
    if block.namespace is not None:
        rows["namespace"] = escape(namespace_text(block.namespace))
    if block.block_index is not None:
        rows["place in its prefix"] = f"block {block.block_index:,}"
    if block.last_use is not None:
        rows["last use"] = f"{block.last_use:,} (logical time)"
    rows["holders"] = f"{len(block.holders):,}"
    console.print(_pairs(rows, title=f"block {block.block_id:,}"))
    if block.holders:
        console.print(_sequence_table(block.holders))


def print_sequence(info: inspection.SequenceInfo) -> None:
    """Print one sequence with its block table."""
    rows = {
        "owner": escape(info.client_name),
        "namespace": escape(namespace_text(info.namespace)),
        "tokens": f"{info.num_tokens:,} ({info.cached_tokens:,} were cached, {info.committed_tokens:,} are written)",
        "blocks": f"{info.num_blocks:,}",
        "block table": ", ".join(ranges(info.block_table)) or "empty",
    }
    Console().print(_pairs(rows, title=f"sequence {info.sequence_id}"))


def print_sequences(listing: inspection.SequenceList) -> None:
    """Print live sequences as a table."""
    console = Console()
    console.print(_sequence_table(listing.sequences))
    if listing.total_sequences > len(listing.sequences):
        console.print(f"… {len(listing.sequences):,} of {listing.total_sequences:,} shown")


def print_clients(clients: Iterable[inspection.ClientView]) -> None:
    """Print registered clients as a table."""
    table = Table("client", "role", "sequences", "lease ends in")
    for client in clients:
        seconds = f"{client.lease_remaining_ms / 1000:.1f} s"
        table.add_row(escape(client.name), client.role, f"{client.num_sequences:,}", seconds)
    Console().print(table)


def namespace_text(namespace: Namespace) -> str:
    """Return a namespace in one line.

    >>> namespace_text(Namespace(model="m", tenant="t"))
    'model=m tenant=t'
    >>> namespace_text(Namespace())
    'default namespace'
    """
    fields = ("model", "revision", "adapter", "adapter_generation", "tenant", "cache_salt")
    parts = [f"{name}={getattr(namespace, name)}" for name in fields if getattr(namespace, name)]
    return " ".join(parts) or "default namespace"


def ranges(block_ids: npt.NDArray[np.int32], *, limit: int = _MAX_RANGES) -> list[str]:
    """Return block ids as runs of consecutive ones, at most `limit` of them.

    >>> ranges(np.array([4, 5, 6, 9, 2], dtype=np.int32))
    ['4-6', '9', '2']
    """
    if not len(block_ids):
        return []
    cuts = np.flatnonzero(np.diff(block_ids) != 1) + 1
    runs = np.split(block_ids, cuts[:limit])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:limit]]
    return [*texts, f"{len(cuts) + 1 - limit} more runs"] if len(cuts) >= limit else texts


def _node_text(node: inspection.TreeNode, block_size: int) -> str:
    num_blocks = len(node.block_ids)
    style = STATE_STYLES[node.state.value]
    pinned = " pinned" if node.pinned else ""
    start = node.start_block * block_size
    return (
        f"[{style}]{node.state.value}{pinned}[/] {num_blocks * block_size:,} tokens from {start:,}, "
        f"{_count(num_blocks, 'block')}: {', '.join(ranges(node.block_ids))}; "
        f"holders {node.holders:,}, last use {node.last_use:,}"
    )


def _one_line(markup: str) -> Text:
    """Return a text that is cut at the edge of the terminal instead of wrapped."""
    text = Text.from_markup(markup, overflow="ellipsis")
    text.no_wrap = True
    return text


def _merged(roots: list[Tree]) -> list[Tree]:
    by_label: dict[str, Tree] = {}
    for root in roots:
        first = by_label.setdefault(str(root.label), root)
        if first is not root:
            first.children.extend(root.children)
    return list(by_label.values())


def _sequence_table(sequences: Iterable[inspection.SequenceInfo]) -> Table:
    table = Table("sequence", "owner", "tokens", "cached", "written", "blocks", "namespace")
    for info in sequences:
        counts = (info.num_tokens, info.cached_tokens, info.committed_tokens, info.num_blocks)
        namespace = escape(namespace_text(info.namespace))
        table.add_row(str(info.sequence_id), escape(info.client_name), *(f"{n:,}" for n in counts), namespace)
    return table


def _pairs(rows: dict[str, str], *, title: str | None = None) -> Table:
    table = Table(show_header=False, title=title)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
