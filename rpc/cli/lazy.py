"""A command group that imports a command when it is called, so that the others start fast and without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import click

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.directory.errors import DirectoryInUse
from radixpool.rpc.errors import AddressInUse, AddressUnavailable, ManagerUnavailable, Unauthenticated

_NOBODY_THERE: Final = ("Connection refused", "No such file or directory")
EXIT_OPERATING_ERROR: Final = 1
EXIT_UNAVAILABLE: Final = 3
EXIT_ADDRESS: Final = 4


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command lives (`module:attribute`) and what the list of commands says of it.

    `environment` is set before the import, where it is not set already.
    """

    target: str
    summary: str
    environment: tuple[tuple[str, str], ...] = ()


class OperatingError(click.ClickException):
    """An error of the service, shown as one line on stderr."""

    exit_code = EXIT_OPERATING_ERROR


class UnavailableError(OperatingError):
    """Nobody answers."""

    exit_code = EXIT_UNAVAILABLE


class ListenError(OperatingError):
    """The address is taken or cannot be listened on, or the directory is taken."""

    exit_code = EXIT_ADDRESS


def _shown(error: RadixPoolError) -> OperatingError:
    if isinstance(error, ManagerUnavailable):
        hint = "; is `radixpool serve` running there? see --address" if str(error).endswith(_NOBODY_THERE) else ""
        return UnavailableError(f"{error}{hint}")
    if isinstance(error, AddressInUse | AddressUnavailable | DirectoryInUse):
        return ListenError(str(error))
    if isinstance(error, Unauthenticated):
        return OperatingError(f"{error} (RADIXPOOL_TOKEN or RADIXPOOL_TOKEN_FILE)")
    return OperatingError(str(error))


class LazyGroup(click.Group):
    """Commands by name; each is imported when it is looked up."""

    def __init__(self, *args: Any, lazy_commands: dict[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy_commands = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they were given."""
        return list(self._lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, None when there is none of that name."""
        lazy = self._lazy_commands.get(cmd_name)
        if lazy is None:
            return None
        for variable, value in lazy.environment:
            os.environ.setdefault(variable, value)
        module, _, attribute = lazy.target.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command), lazy.target
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.summary) for name, lazy in self._lazy_commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error of the service ends it with one line and an exit code."""
        try:
            return super().invoke(ctx)
        except RadixPoolError as error:
            raise _shown(error) from error
