"""`radixpool token`: make bearer tokens for the credential file."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import click

from radixpool.rpc.security.credentials import MAX_FIELD_CHARS
from radixpool.rpc.security.identity import Role
from radixpool.rpc.security.tokens import new_token

DEFAULT_DAYS = 90


@click.group()
def command() -> None:
    """Make bearer tokens for a manager's --credentials file."""


@command.command("new", short_help="Make a token and its entry for the file.")
@click.option("--name", required=True, help="Who bears it; shown in logs.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    required=True,
    type=click.Choice([role.value for role in Role]),
    help="What it may be; give it again for several.",
)
@click.option("--tenant", help="The tenant all of a frontend's requests belong to.")
@click.option(
    "--days", type=click.IntRange(1, 36_500), default=DEFAULT_DAYS, show_default=True, help="How long it is valid."
)
def new(name: str, roles: tuple[str, ...], tenant: str | None, days: int) -> None:
    """Print a new token on standard output, and the entry for the credential file on standard error.

    The token is shown this once; the file keeps only its hash.

    \b
    Examples:
      radixpool token new --name frontend-7 --role frontend --tenant acme >frontend-7.token 2>>credentials.toml
      radixpool token new --name gpu-3 --role worker --role pool_holder --days 30
    """
    if ("frontend" in roles) != (tenant is not None) or ("frontend" in roles and len(roles) > 1):
        raise click.UsageError("the role frontend needs --tenant and stands alone; the other roles take no tenant")
    if not 0 < len(name) <= MAX_FIELD_CHARS or len(tenant or "") > MAX_FIELD_CHARS:
        raise click.UsageError(f"--name and --tenant have at most {MAX_FIELD_CHARS} characters")
    token = new_token()
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    lines = ["[[token]]", f'id = "{token.token_id}"', f'sha256 = "{token.sha256}"', f"name = {_toml(name)}"]
    lines.append(f"roles = {json.dumps(sorted(set(roles)))}")
    if tenant is not None:
        lines.append(f"tenant = {_toml(tenant)}")
    lines.append(f"expires = {expires.isoformat().replace('+00:00', 'Z')}")
    click.echo("\n".join(lines) + "\n", err=True)
    click.echo(token.secret)


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
