"""Configuration of `radixpool serve`: one declaration per option, from which file, flags, checks and docs are made.

Precedence: flag, then file, then default. A file is TOML; whatever it holds that is not an option is an error.
"""

from radixpool.rpc.config.errors import ConfigError
from radixpool.rpc.config.flags import config_flags
from radixpool.rpc.config.load import load_config
from radixpool.rpc.config.render import render_markdown, render_toml
from radixpool.rpc.config.schema import (
    CacheConfig,
    DirectoryConfig,
    KvEventsConfig,
    LogsConfig,
    MetricsConfig,
    SecurityConfig,
    ServeConfig,
    ServerConfig,
)

__all__ = [
    "CacheConfig",
    "ConfigError",
    "DirectoryConfig",
    "KvEventsConfig",
    "LogsConfig",
    "MetricsConfig",
    "SecurityConfig",
    "ServeConfig",
    "ServerConfig",
    "config_flags",
    "load_config",
    "render_markdown",
    "render_toml",
]
