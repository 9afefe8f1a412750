"""`radixpool completion`: let a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_VARIABLE = "_RADIXPOOL_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that lets SHELL complete commands and options.

    \b
    For this shell:       eval "$(radixpool completion bash)"
    For good, with bash:  radixpool completion bash >~/.local/share/bash-completion/completions/radixpool
    with zsh:             radixpool completion zsh >"${fpath[1]}/_radixpool"
    with fish:            radixpool completion fish >~/.config/fish/completions/radixpool.fish
    """
    script = get_completion_class(shell)
    assert script is not None, "click knows every shell of the choice"
    click.echo(script(context.find_root().command, {}, "radixpool", _VARIABLE).source())
