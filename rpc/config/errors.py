"""What is wrong with a configuration, said in one line."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names where it stands, the option, the limit and the value."""
