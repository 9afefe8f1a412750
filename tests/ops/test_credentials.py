"""The credential file: what it may hold, who it recognises, and that changes count."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from radixpool.rpc.errors import Unauthenticated
from radixpool.rpc.security.cli import command
from radixpool.rpc.security.credentials import CredentialFile
from radixpool.rpc.security.identity import Role
from radixpool.rpc.security.tokens import NewToken, new_token, token_id_of

NOW = datetime(2026, 6, 1, tzinfo=UTC).timestamp()
LATER = "2026-06-02T00:00:00Z"
EARLIER = "2026-05-31T23:59:59Z"


def entry(token: NewToken, **overrides: str) -> str:
    values = {
        "id": f'"{token.token_id}"',
        "sha256": f'"{token.sha256}"',
        "name": '"frontend-1"',
        "roles": '["frontend"]',
        "tenant": '"acme"',
        "expires": LATER,
    } | overrides
    return "[[token]]\n" + "".join(f"{key} = {value}\n" for key, value in values.items() if value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "credentials.toml"


@pytest.fixture
def store(path: Path) -> Callable[..., CredentialFile]:
    def make(text: str, clock: Callable[[], float] = lambda: NOW) -> CredentialFile:
        path.write_text(text)
        path.chmod(0o600)
        return CredentialFile(path, wall_clock=clock)

    return make


def test_a_token_gives_name_role_tenant_and_expiry(store: Callable[..., CredentialFile]) -> None:
    token = new_token()
    identity = store(entry(token)).by_token(token.secret)
    assert (identity.name, identity.roles, identity.tenant) == ("frontend-1", {Role.FRONTEND}, "acme")
    assert identity.expires_at == NOW + 86_400


def test_what_is_not_the_token_is_refused(store: Callable[..., CredentialFile]) -> None:
    token, other = new_token(), new_token()
    credentials = store(entry(token))
    swapped = f"rpt_{token.token_id}_{other.secret.rpartition('_')[2]}"
    wrong = [other.secret, swapped, "", "rpt_", token.secret[:-1], token.secret + "0", token.secret.upper(), "é" * 85]
    for presented in wrong:
        with pytest.raises(Unauthenticated) as caught:
            credentials.by_token(presented)
        assert not presented or presented not in str(caught.value)


def test_right_wrong_and_unknown_secrets_take_the_same_comparison(
    store: Callable[..., CredentialFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    token, unknown = new_token(), new_token()
    credentials = store(entry(token))
    compared = []
    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or original(a, b))
    credentials.by_token(token.secret)
    for presented in (unknown.secret, f"rpt_{token.token_id}_{'0' * 64}"):
        with pytest.raises(Unauthenticated, match="the bearer token is not known"):
            credentials.by_token(presented)
    assert compared == [(32, 32)] * 3


def test_an_unknown_id_with_the_all_zero_digest_is_nobody(
    store: Callable[..., CredentialFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    from radixpool.rpc.security import credentials as module

    monkeypatch.setattr(module, "token_digest", lambda _token: bytes(32))
    with pytest.raises(Unauthenticated):
        store(entry(new_token())).by_token(new_token().secret)


def test_an_expired_token_is_refused_by_name(store: Callable[..., CredentialFile]) -> None:
    token = new_token()
    with pytest.raises(Unauthenticated, match="the token of 'frontend-1' has expired"):
        store(entry(token, expires=EARLIER)).by_token(token.secret)


def test_a_token_expires_while_the_manager_runs(store: Callable[..., CredentialFile]) -> None:
    token, now = new_token(), [NOW]
    credentials = store(entry(token), lambda: now[0])
    identity = credentials.by_token(token.secret)
    now[0] = NOW + 86_399
    assert not credentials.is_expired(identity)
    now[0] = NOW + 86_400
    assert credentials.is_expired(identity)


def test_taking_a_token_out_of_the_file_revokes_it(store: Callable[..., CredentialFile], path: Path) -> None:
    first, second, now = new_token(), new_token(), [NOW]
    credentials = store(entry(first), lambda: now[0])
    credentials.by_token(first.secret)
    path.write_text(entry(second))
    now[0] += 1.0
    with pytest.raises(Unauthenticated):
        credentials.by_token(first.secret)
    assert credentials.by_token(second.secret).tenant == "acme"


def test_open_streams_end_when_their_own_credential_is_taken_out_or_changed(
    store: Callable[..., CredentialFile], path: Path
) -> None:
    first, second, now = new_token(), new_token(), [NOW]
    credentials = store(entry(first) + entry(second), lambda: now[0])
    gone, kept = credentials.by_token(first.secret), credentials.by_token(second.secret)
    path.write_text(entry(second))
    now[0] += 1.0
    assert credentials.is_expired(gone), "two tokens of one name are two credentials"
    assert not credentials.is_expired(kept)
    path.write_text(entry(second, tenant='"rival"'))
    now[0] += 1.0
    assert credentials.is_expired(kept)


@pytest.mark.parametrize("breakage", ["text", "missing", "mode"])
def test_a_broken_change_leaves_the_last_good_file_in_force(
    store: Callable[..., CredentialFile], path: Path, breakage: str
) -> None:
    token, now = new_token(), [NOW]
    credentials = store(entry(token), lambda: now[0])
    if breakage == "text":
        path.write_text("not toml [")
    elif breakage == "missing":
        path.unlink()
    else:
        path.write_text(entry(new_token()))
        path.chmod(0o666)
    now[0] += 1.0
    assert credentials.by_token(token.secret).name == "frontend-1"
    path.write_text(entry(new_token()))
    path.chmod(0o600)
    os.utime(path, ns=(1, 1))
    now[0] += 1.0
    with pytest.raises(Unauthenticated):
        credentials.by_token(token.secret)


def test_certificates_are_known_by_their_names(store: Callable[..., CredentialFile]) -> None:
    text = '[[certificate]]\nsan = "spiffe://pool/worker"\nname = "w"\nroles = ["worker"]\nexpires = "never"\n'
    credentials = store(text)
    assert credentials.knows_certificates
    assert credentials.by_certificate(["other", "spiffe://pool/worker"]).roles == {Role.WORKER}
    with pytest.raises(Unauthenticated, match="no name of the client certificate is known"):
        credentials.by_certificate(["spiffe://pool/worker2"])
    assert not store("").knows_certificates


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"id": '"xyz"'}, "token 1: id must be 16 lower-case hex digits, got 'xyz'"),
        ({"sha256": '"abc"'}, "token 1: sha256 must be 64 hex digits, got 3 characters"),
        ({"name": '""'}, "token 1: name must be a string of 1 to 512 characters, got 0 characters"),
        ({"name": "5"}, "token 1: name must be a string of 1 to 512 characters, got int"),
        ({"roles": "[]"}, "token 1: roles must be a list of frontend, worker, pool_holder, operator, subscriber, got "),
        ({"roles": '["root"]'}, r"token 1: roles must be a list of .*, got \['root'\]"),
        ({"roles": '["frontend", "worker"]'}, "frontend cannot stand beside others"),
        ({"roles": '["worker"]'}, "tenant is for the role frontend only"),
        ({"tenant": ""}, "tenant is needed for the role frontend"),
        ({"expires": ""}, 'expires must be a date-time with an offset or "never", got None'),
        ({"expires": "2027-01-01T00:00:00"}, "expires must be a date-time with an offset"),
        ({"expires": '"soon"'}, "expires must be a date-time with an offset"),
        ({"admin": "true"}, "token 1: unknown key admin"),
    ],
)
def test_a_bad_entry_is_named(store: Callable[..., CredentialFile], overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        store(entry(new_token(), **overrides))


def test_bad_files_are_named(store: Callable[..., CredentialFile], path: Path, tmp_path: Path) -> None:
    token = new_token()
    with pytest.raises(ValueError, match="stands twice"):
        store(entry(token) + entry(token))
    with pytest.raises(ValueError, match="unknown table tokens; known: token, certificate"):
        store("[[tokens]]\n")
    with pytest.raises(ValueError, match="not TOML"):
        store("[")
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        CredentialFile(tmp_path / "none.toml")
    path.write_text(entry(token))
    path.chmod(0o620)
    with pytest.raises(ValueError, match="must be writable by its owner alone, its mode is 0620"):
        CredentialFile(path)


def test_the_command_makes_a_token_that_its_own_entry_recognises(store: Callable[..., CredentialFile]) -> None:
    made = CliRunner().invoke(command, ["new", "--name", 'a "b"\n\x7f', "--role", "frontend", "--tenant", "ü"])
    assert made.exit_code == 0
    secret = made.stdout.strip()
    assert token_id_of(secret)
    assert secret not in made.stderr
    identity = store(made.stderr, lambda: datetime.now(UTC).timestamp()).by_token(secret)
    assert (identity.name, identity.tenant) == ('a "b"\n\x7f', "ü")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--role", "frontend"],
        ["--role", "worker", "--tenant", "acme"],
        ["--role", "frontend", "--role", "worker", "--tenant", "acme"],
        ["--role", "root"],
        ["--role", "worker", "--days", "0"],
    ],
)
def test_the_command_refuses_what_the_file_would(arguments: list[str]) -> None:
    assert CliRunner().invoke(command, ["new", "--name", "x", *arguments]).exit_code == 2


def test_tokens_do_not_repeat() -> None:
    assert len({new_token().secret for _ in range(100)}) == 100
