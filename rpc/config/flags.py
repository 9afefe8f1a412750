"""Make the command-line flags of `radixpool serve` from the options, so that file and flags cannot differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from radixpool.rpc.config.errors import ConfigError
from radixpool.rpc.config.load import OPTIONS, load_config
from radixpool.rpc.config.option import Option, Value
from radixpool.rpc.config.render import render_toml


def config_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a click command `--config`, `--print-config` and a flag per option; it is called with `config=ServeConfig`.

    A configuration that cannot be used ends the command with a usage error (exit status 2).
    """

    @wraps(command)
    def run(*arguments: Any, config_file: Path | None, print_config: bool, **values: Any) -> Any:
        flags = {key: values.pop(_parameter(item)) for key, item in OPTIONS.items()}
        given: dict[str, Value] = {key: value for key, value in flags.items() if value is not None}
        try:
            config = load_config(config_file, flags=given)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        if print_config:
            click.echo(render_toml(config), nl=False)
            return None
        return command(*arguments, config=config, **values)

    decorated: Callable[..., Any] = run
    for item in reversed(OPTIONS.values()):
        decorated = _flag(item)(decorated)
    decorated = click.option(
        "--print-config", is_flag=True, help="Print the resulting configuration as a TOML file, and exit."
    )(decorated)
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="TOML file of options; flags override it.",
    )(decorated)


def _parameter(item: Option) -> str:
    return f"{item.section}__{item.name}"


def _flag(item: Option) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    names = (f"{item.flag}/{item.flag.replace('--', '--no-', 1)}",) if item.kind is bool else (item.flag,)
    default = "" if item.default == "" else f"  [default: {item.default}]"
    return click.option(
        *names,
        _parameter(item),
        type=None if item.kind is bool else item.kind,
        default=None,
        envvar=item.env or None,
        show_envvar=bool(item.env),
        metavar=None if item.kind is bool else _metavar(item),
        help=f"{item.help}{default}",
    )


def _metavar(item: Option) -> str:
    if item.choices:
        return f"[{'|'.join(item.choices)}]"
    if item.kind is float:
        return "SECONDS" if item.name.endswith("_s") else "NUMBER"
    return "N" if item.kind is int else "TEXT"
