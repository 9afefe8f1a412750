"""The log of interned keys: torn entries vanish, space comes back, a full disk refuses and loses nothing."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from radixpool.rpc.directory import interned
from radixpool.rpc.directory.errors import DirectoryDamaged
from radixpool.rpc.directory.interned import InternLog

SEED = b"s" * 16


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    InternLog.create(tmp_path / "log", seed=SEED)
    return tmp_path / "log"


def test_numbers_stay_across_lives_and_zero_is_never_given(log_path: Path) -> None:
    log = InternLog(log_path, seed=SEED)
    assert [log.number_of(key) for key in (b"a", b"b", b"a", b"")] == [1, 2, 1, 3]
    log.close()
    again = InternLog(log_path, seed=SEED)
    assert dict(again.by_number) == {1: b"a", 2: b"b", 3: b""}
    assert again.number_of(b"c") == 4
    again.close()


def test_an_entry_torn_at_any_byte_is_overwritten(log_path: Path) -> None:
    log = InternLog(log_path, seed=SEED)
    log.number_of(b"first")
    before = log_path.stat().st_size
    log.number_of(b"second")
    log.close()
    whole = log_path.read_bytes()
    for end in range(before, len(whole)):
        log_path.write_bytes(whole[:end])
        torn = InternLog(log_path, seed=SEED)
        assert dict(torn.by_number) == {1: b"first"}
        torn.number_of(b"x")
        torn.close()
        later = InternLog(log_path, seed=SEED)
        assert dict(later.by_number) == {1: b"first", 2: b"x"}
        later.close()


@pytest.mark.parametrize("content", [b"", b"short", b"RPKEYS01" + b"t" * 16, b"XXKEYS01" + SEED])
def test_a_log_of_another_blocks_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(DirectoryDamaged, match="does not belong"):
        InternLog(tmp_path / "log", seed=SEED)


def test_compaction_gives_space_back_and_no_number_twice(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interned, "COMPACT_MIN_BYTES", 200)
    log = InternLog(log_path, seed=SEED)
    for i in range(20):
        assert not log.wants_compaction or i > 3
        log.number_of(b"key %d" % i)
    assert log.wants_compaction
    size = log_path.stat().st_size
    log.compact({3, 7})
    assert log_path.stat().st_size < size
    assert not log.wants_compaction
    assert log.number_of(b"key 2") == 3
    assert log.number_of(b"key 0") == 21
    log.close()
    again = InternLog(log_path, seed=SEED)
    assert dict(again.by_number) == {3: b"key 2", 7: b"key 6", 20: b"key 19", 21: b"key 0"}
    again.close()


def test_a_full_disk_refuses_a_new_key_and_keeps_the_others(
    log_path: Path, limit_files: Callable[[int], list[str]]
) -> None:
    """A file size limit stands in for a full disk: the write is cut short first, then fails."""
    script = textwrap.dedent(
        """
        import signal, sys
        from pathlib import Path
        from radixpool.rpc.directory.errors import DirectoryNoSpace
        from radixpool.rpc.directory.interned import InternLog
        log = InternLog(Path(sys.argv[1]), seed=b"s" * 16)
        known = []
        while True:
            key = b"key %d" % len(known)
            try:
                log.number_of(key)
            except DirectoryNoSpace as error:
                assert "cannot be written" in str(error)
                break
            known.append(key)
        log.compact(range(1, len(known) + 1))  # cannot be written either: the old log stays in use
        assert [log.number_of(key) for key in known] == list(range(1, len(known) + 1))
        print(len(known))
        """
    )
    command = [*limit_files(500), sys.executable, "-c", script, str(log_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    log = InternLog(log_path, seed=SEED)
    assert len(log.by_number) == int(ran.stdout) > 10
    assert log.number_of(b"once there is room") == len(log.by_number)
    log.close()
    assert [file.name for file in log_path.parent.iterdir()] == ["log"]


def test_closing_twice_is_harmless(log_path: Path) -> None:
    log = InternLog(log_path, seed=SEED)
    descriptors = Path("/proc/self/fd")
    open_before = len(list(descriptors.iterdir()))
    log.close()
    log.close()
    assert len(list(descriptors.iterdir())) == open_before - 1
