"""`radixpool evict`, `radixpool flush` and `radixpool quota`: what an operator changes in a running manager."""

from __future__ import annotations

from typing import Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixpool.radix import DEFAULT_NAMESPACE, Namespace
from radixpool.rpc import limits
from radixpool.rpc.cli.json_printer import print_json
from radixpool.rpc.cli.options import address_option, json_option, operator_client
from radixpool.rpc.cli.table_printer import namespace_text, ranges
from radixpool.rpc.inspection import FlushMode

_MODES: Final = {mode.name.lower().replace("_", "-"): mode for mode in FlushMode}


@click.command()
@click.argument("num_blocks", type=click.IntRange(1, limits.MAX_EVICTED_BLOCKS))
@click.option("--dry-run", is_flag=True, help="Only say which would go.")
@address_option
@json_option
def evict(address: str, as_json: bool, num_blocks: int, dry_run: bool) -> None:
    """Evict up to NUM_BLOCKS cached blocks, those first that the policy would evict first.

    Blocks that a sequence holds and pinned ones stay.
    """
    with operator_client(address) as client:
        block_ids = client.evict(num_blocks, dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, "block_ids": block_ids})
        return
    named = f": {', '.join(ranges(block_ids))}" if len(block_ids) else ""
    click.echo(f"{'would evict' if dry_run else 'evicted'} {len(block_ids):,} of {num_blocks:,} blocks{named}")


@click.command()
@click.option(
    "--mode",
    type=click.Choice(list(_MODES)),
    required=True,
    help="idle-only refuses while anything is in use; drain frees what nobody holds and leaves the rest findable; "
    "new-generation makes everything unfindable at once and lets holders finish.",
)
@click.option("--model", default="", help="Only the namespace of this model.")
@click.option("--revision", default="", help="Revision of the namespace's model.")
@click.option("--adapter", default="", help="Adapter of the namespace.")
@click.option("--tenant", default="", help="Tenant of the namespace.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_option
@json_option
def flush(address: str, as_json: bool, mode: str, yes: bool, **fields: str) -> None:
    """Make cached content unfindable: all of it, or one namespace without a salt.

    A namespace is exactly what is named, as `radixpool inspect tree` shows it: --model m alone is the namespace of
    model m without a tenant. What is flushed is computed anew by the next request for it.

    \b
    Examples:
      radixpool flush --mode drain
      radixpool flush --mode new-generation --model llama --tenant acme --yes
    """
    namespace = Namespace(fields["model"], fields["revision"], fields["adapter"], tenant=fields["tenant"])
    wanted = None if namespace == DEFAULT_NAMESPACE else namespace
    what = "everything that is cached" if wanted is None else namespace_text(wanted)
    if not yes:
        click.confirm(f"flush {what} ({mode})?", abort=True, err=True)
    with operator_client(address) as client:
        flushed = client.flush(_MODES[mode], namespace=wanted)
    if as_json:
        print_json(flushed)
    else:
        held = "are held and stay findable" if mode == "drain" else "become free when their holders go"
        click.echo(f"freed {flushed.freed_blocks:,} blocks; {flushed.held_blocks:,} {held}")


@click.group()
def quota() -> None:
    """Show and change what tenants may use of the pool."""


@quota.command("list", short_help="Show the quotas and what is used of them.")
@address_option
@json_option
def list_quotas(address: str, as_json: bool) -> None:
    """Show the tenants that have a quota, and what they use of it."""
    with operator_client(address) as client:
        tenants = client.stats().tenants
    if as_json:
        print_json(tenants)
        return
    table = Table("tenant", "guaranteed", "at most", "used", "cached")
    for usage in tenants:
        most = "" if usage.max_blocks is None else f"{usage.max_blocks:,}"
        counts = (f"{usage.guaranteed_blocks:,}", most, f"{usage.used_blocks:,}", f"{usage.cached_blocks:,}")
        table.add_row(escape(usage.tenant), *counts)
    Console().print(table if tenants else "no tenant has a quota: all share the pool")


@quota.command("set", short_help="Give a tenant a share, a maximum, or both.")
@click.argument("tenant")
@click.option("--guaranteed", type=click.IntRange(0), default=0, show_default=True, help="Blocks kept free for it.")
@click.option("--max", "maximum", type=click.IntRange(0), help="Most blocks it may use.  [default: no maximum]")
@address_option
def set_quota(address: str, tenant: str, guaranteed: int, maximum: int | None) -> None:
    """Give TENANT a guaranteed share of the pool and a maximum, in blocks. Evicts nothing by itself."""
    if not guaranteed and maximum is None:
        raise click.UsageError("give --guaranteed, --max or both; `radixpool quota remove` takes a quota away")
    with operator_client(address) as client:
        client.set_quota(tenant, guaranteed_blocks=guaranteed, max_blocks=maximum)


@quota.command("remove", short_help="Take a tenant's quota away.")
@click.argument("tenant")
@address_option
def remove_quota(address: str, tenant: str) -> None:
    """Let TENANT share in what has no quota again."""
    with operator_client(address) as client:
        client.remove_quota(tenant)
