"""Whatever stands in a configuration or credential file, the answer is a usable object or one ValueError."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from radixpool.rpc.config import ConfigError, ServeConfig, load_config
from radixpool.rpc.config import load as load_module
from radixpool.rpc.config.load import OPTIONS
from radixpool.rpc.security import credentials as credentials_module
from radixpool.rpc.security.identity import Identity, Role
from radixpool.rpc.security.tokens import new_token

# What tomllib can return.
SCALARS = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=20),
    st.just(datetime(2030, 1, 1, tzinfo=UTC)),
    st.just(datetime(2030, 1, 1)),
    st.just(date(2030, 1, 1)),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({key.partition(".")[2] for key in OPTIONS})
SECTIONS = sorted({key.partition(".")[0] for key in OPTIONS})


def near(names: list[str]) -> st.SearchStrategy[str]:
    return st.sampled_from(names) | st.text(max_size=8)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(near(SECTIONS), st.dictionaries(near(NAMES), VALUES, max_size=4) | VALUES, max_size=4))
def test_any_configuration_is_usable_or_one_error(document: dict[str, Any]) -> None:
    original = load_module._parse
    load_module._parse = lambda _path: document
    try:
        assert isinstance(load_config("radixpool.toml"), ServeConfig)
    except ConfigError as error:
        assert len(str(error).splitlines()) >= 1
    finally:
        load_module._parse = original


ENTRY_KEYS = ["id", "sha256", "name", "roles", "tenant", "expires", "san"]
GOOD = new_token()
GOOD_ENTRY = {"id": GOOD.token_id, "sha256": GOOD.sha256, "name": "n", "roles": ["worker"], "expires": "never"}
ROLES = st.lists(st.sampled_from([role.value for role in Role]) | st.text(max_size=3) | st.integers(), max_size=3)
ENTRIES = st.dictionaries(near(ENTRY_KEYS), VALUES | ROLES, max_size=7) | st.fixed_dictionaries(
    {key: st.just(value) | VALUES for key, value in GOOD_ENTRY.items()}
)
DOCUMENTS = st.dictionaries(near(["token", "certificate"]), st.lists(ENTRIES | VALUES, max_size=3) | VALUES, max_size=3)


@settings(max_examples=80, deadline=None)
@given(DOCUMENTS)
def test_any_credential_file_gives_sound_identities_or_one_error(document: dict[str, Any]) -> None:
    try:
        found = credentials_module._parse(document, Path("credentials.toml"))
    except ValueError as error:
        assert str(error).startswith("credentials.toml")
        return
    identities = [identity for _digest, identity in found.tokens.values()] + list(found.certificates.values())
    for identity in identities:
        assert isinstance(identity, Identity)
        assert identity.roles
        assert (identity.tenant is None) == (Role.FRONTEND not in identity.roles)
