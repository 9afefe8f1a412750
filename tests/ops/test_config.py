"""Configuration: defaults, precedence, errors that name everything, and files that read back as what they say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from radixpool.rpc.config import (
    ConfigError,
    KvEventsConfig,
    ServeConfig,
    ServerConfig,
    config_flags,
    load_config,
    render_markdown,
    render_toml,
)
from radixpool.rpc.config.checks import check_together
from radixpool.rpc.config.load import MAX_FILE_BYTES, OPTIONS
from radixpool.rpc.config.option import Option
from radixpool.rpc.manager.launch import ManagerService

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Any]:
    def write(text: str) -> Path:
        path = tmp_path / "radixpool.toml"
        path.write_text(text)
        return path

    return write


def test_defaults_are_a_usable_configuration() -> None:
    config = load_config()
    assert config == ServeConfig()
    for item in OPTIONS.values():
        assert item.accept(item.default, where=item.key) == item.default


def test_file_overrides_defaults_and_flags_override_the_file(write: Any) -> None:
    path = write("[cache]\nnum_blocks = 100\nblock_size = 32\n[server]\ndrain_timeout_s = 3\n")
    config = load_config(path, flags={"cache.num_blocks": 200})
    assert (config.cache.num_blocks, config.cache.block_size, config.cache.policy) == (200, 32, "lru")
    assert config.server.drain_timeout_s == 3.0
    assert type(config.server.drain_timeout_s) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cache]\nnum_blocks = 0", "cache.num_blocks must be an integer from 1 to 2147483647, got 0"),
        ("[cache]\nnum_blocks = true", "cache.num_blocks must be an integer from 1 to 2147483647, got True"),
        ("[cache]\nnum_blocks = 1.5", "cache.num_blocks must be an integer from 1 to 2147483647, got 1.5"),
        ("[cache]\nnum_blocks = '9'", "cache.num_blocks must be an integer from 1 to 2147483647, got '9'"),
        ("[server]\ndrain_timeout_s = nan", "server.drain_timeout_s must be a number from 0.0 to 3600.0, got nan"),
        ("[server]\ndrain_timeout_s = inf", "server.drain_timeout_s must be a number from 0.0 to 3600.0, got inf"),
        ("[cache]\nnum_block = 5", "unknown key cache.num_block; did you mean cache.num_blocks?"),
        ("[cash]\nnum_blocks = 5", r"unknown section \[cash\]; did you mean cache?"),
        ("num_blocks = 5", r"unknown section \[num_blocks\]; known: cache, directory"),
        ("cache = 5", r"cache must be a section \[cache\], got 5"),
        ("[[cache]]\nnum_blocks = 5", r"cache must be a section \[cache\], got \["),
        ("[logs]\nlevel = 'loud'", "logs.level must be one of debug, info, warning, error, got 'loud'"),
        ("[server]\nlisten = 'nowhere'", "server.listen is 'nowhere': address must be unix:/path or HOST:PORT"),
        ("[metrics]\nlisten = 'unix:/x'", "metrics.listen is 'unix:/x': a unix socket cannot be scraped"),
        ("[cache]\npolicy = 'magic'", "cache.policy is 'magic': policy: unknown eviction policy 'magic'; there are: "),
        ("[kv_events]\nendpoint = 'udp://x'", "kv_events.endpoint is 'udp://x': a ZMQ endpoint is tcp://HOST:PORT or"),
        ("[cache\n", "not TOML: "),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_error_that_names_file_key_limit_and_value(write: Any, text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError, match=f"^{path}: {message}"):
        load_config(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "huge.toml").write_text("#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match=f"at most {MAX_FILE_BYTES} bytes"):
        load_config(tmp_path / "huge.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[security]\ntls_cert = 'a'", "needs all of .*; missing: security.tls_key, security.tls_client_ca"),
        ("[server]\nlisten = '0.0.0.0:7300'", "server.listen is '0.0.0.0:7300', which other machines can reach: that"),
        ("[server]\nlisten = 'pool.example:7300'", "server.listen is 'pool.example:7300', which other machines"),
        ("[metrics]\nlisten = '[::]:9400'", r"metrics.listen is '\[::\]:9400', which other machines can reach"),
        (
            "[server]\nlisten = '0.0.0.0:7300'\n[security]\ntls_cert='a'\ntls_key='b'\ntls_client_ca='c'",
            "needs security.credentials",
        ),
        ("[kv_events]\nendpoint = 'tcp://*:5557'", "kv_events.endpoint is 'tcp://\\*:5557', which other machines can"),
        ("[kv_events]\nreplay_endpoint = 'ipc:///x'", "kv_events.replay_endpoint needs kv_events.endpoint"),
        ("[kv_events]\nendpoint = 'ipc:///x'\nreplay_endpoint = 'ipc:///x'", "must differ from"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(write: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(text))


def test_what_is_exposed_on_purpose_is_accepted(write: Any) -> None:
    load_config(write("[kv_events]\nendpoint = 'tcp://*:5557'\nallow_remote = true"))
    tls = "[security]\ntls_cert='a'\ntls_key='b'\ntls_client_ca='c'\ncredentials='d'\n"
    load_config(write(tls + "[server]\nlisten = '0.0.0.0:7300'\n[metrics]\nlisten = '0.0.0.0:9400'"))


def value_of(item: Option) -> st.SearchStrategy[Any]:
    if item.choices:
        return st.sampled_from(item.choices)
    if item.kind is bool:
        return st.booleans()
    if item.kind is str:
        return st.just("") if item.check else st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    assert item.low is not None
    assert item.high is not None
    if item.kind is int:
        return st.integers(int(item.low), int(item.high))
    return st.floats(item.low, item.high)


@st.composite
def configurations(draw: st.DrawFn) -> ServeConfig:
    config = ServeConfig()
    for section in fields(config):
        part = getattr(config, section.name)
        values = {item.name: draw(value_of(OPTIONS[f"{section.name}.{item.name}"])) for item in fields(part)}
        config = replace(config, **{section.name: replace(part, **values)})
    config = replace(config, cache=replace(config.cache, policy="lru"))
    return replace(config, security=ServeConfig().security)


@given(configurations())
def test_what_is_printed_reads_back_as_the_same_configuration(
    tmp_path_factory: pytest.TempPathFactory, config: ServeConfig
) -> None:
    check_together(config)
    path = tmp_path_factory.mktemp("config") / "printed.toml"
    path.write_text(render_toml(config))
    assert load_config(path) == config


@click.command()
@config_flags
@click.option("--own", default="o")
def command(config: ServeConfig, own: str) -> None:
    click.echo(f"{config.cache.num_blocks} {config.kv_events.allow_remote} {config.server.listen} {own}")


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(command, arguments, env=environment)


def test_flags_become_the_configuration(write: Any) -> None:
    path = write("[cache]\nnum_blocks = 7\n[server]\nlisten = '127.0.0.1:1'\n[kv_events]\nallow_remote = true\n")
    assert run("--config", str(path), "--own", "x").output == "7 True 127.0.0.1:1 x\n"
    flags = ("--num-blocks", "8", "--no-kv-events-allow-remote", "--listen", "127.0.0.1:2")
    assert run("--config", str(path), *flags).output == "8 False 127.0.0.1:2 o\n"


def test_environment_stands_between_flag_and_file(write: Any) -> None:
    path = write("[server]\nlisten = '127.0.0.1:1'\n")
    assert "127.0.0.1:3" in run("--config", str(path), RADIXPOOL_ADDRESS="127.0.0.1:3").output
    assert "127.0.0.1:4" in run("--listen", "127.0.0.1:4", RADIXPOOL_ADDRESS="127.0.0.1:3").output


def test_a_bad_flag_is_named_as_a_flag() -> None:
    result = run("--num-blocks", "0")
    assert result.exit_code == 2
    assert "--num-blocks must be an integer from 1 to 2147483647, got 0" in result.output


def test_print_config_prints_a_file_and_does_not_run(write: Any, tmp_path: Path) -> None:
    result = run("--num-blocks", "9", "--print-config")
    path = tmp_path / "again.toml"
    path.write_text(result.output)
    assert load_config(path).cache.num_blocks == 9


def test_help_has_every_flag_with_its_default() -> None:
    text = " ".join(run("--help").output.split())
    for item in OPTIONS.values():
        assert item.flag in text


def test_flags_are_unique() -> None:
    assert len({item.flag for item in OPTIONS.values()}) == len(OPTIONS)


def test_the_example_file_is_the_default_configuration() -> None:
    assert (ROOT / "examples" / "radixpool.toml").read_text() == render_toml(ServeConfig())


def test_the_operations_guide_has_the_reference_of_all_options() -> None:
    assert render_markdown() in (ROOT / "docs" / "operations.md").read_text()


def test_kv_events_without_their_packages_are_refused_before_anything_listens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    monkeypatch.delitem(sys.modules, "radixpool.rpc.kv_events.publisher", raising=False)
    config = ServeConfig(
        server=ServerConfig(listen=f"unix:{tmp_path}/m.sock"), kv_events=KvEventsConfig(endpoint="tcp://127.0.0.1:0")
    )
    with pytest.raises(ValueError, match=r"needs msgpack: pip install 'radixpool\[events\]'"):
        ManagerService(config)
    assert list(tmp_path.iterdir()) == []
