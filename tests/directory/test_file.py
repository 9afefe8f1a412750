"""The files: locks, damage, other geometries, reset, full and unwritable disks."""

import contextlib
import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from radixpool.rpc.directory import BlockDirectory, DirectoryDamaged, DirectoryError, DirectoryInUse, layout, reset

Open = Callable[..., BlockDirectory]
Store = Callable[..., None]
Limit = Callable[[int], list[str]]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def stored_blocks(directory: BlockDirectory) -> list[int]:
    return directory.scan().loose.blocks.tolist()


def test_a_new_directory_says_so_and_only_its_owner_can_read_it(opened: Open, path: Path) -> None:
    directory = opened()
    assert directory.started_empty_because == "it is new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_every_life_has_a_greater_incarnation_and_keeps_the_rest(opened: Open, store: Store) -> None:
    directory = opened()
    assert (directory.incarnation, directory.generation, directory.pool_id) == (1, 0, layout.NO_POOL)
    directory.set_pool(b"p" * 16)
    directory.set_generation(3)
    store(directory, 1)
    again = opened()
    assert again.started_empty_because is None
    assert (again.incarnation, again.generation, again.pool_id) == (2, 3, b"p" * 16)
    assert stored_blocks(again) == [1]


@pytest.mark.parametrize(
    ("other", "reason"),
    [({"block_size": 8}, "its block size is 4, not 8"), ({"num_blocks": 33}, "it is for 32 blocks, not 33")],
)
def test_another_geometry_starts_empty_and_says_why(
    opened: Open, store: Store, path: Path, other: dict[str, int], reason: str
) -> None:
    store(opened(), 1)
    directory = opened(**other)
    assert directory.started_empty_because == reason
    assert stored_blocks(directory) == []
    assert directory.incarnation == 2
    assert len(list(path.iterdir())) == 3, "nothing of the former one is left over"


def test_a_directory_of_another_version_starts_empty_and_says_so(
    opened: Open, store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as former:
        former.setattr(layout, "VERSION", layout.VERSION - 1)
        store(opened(), 1)
    directory = opened()
    assert directory.started_empty_because == f"its format is version {layout.VERSION - 1}, not {layout.VERSION}"
    assert stored_blocks(directory) == []
    assert directory.incarnation == 2


@pytest.mark.parametrize(
    ("at", "message"),
    [(0, "magic"), (8, "checksum"), (13, "checksum"), (40, "checksum")],
)
def test_a_damaged_header_is_refused_by_name_until_reset(
    opened: Open, store: Store, path: Path, at: int, message: str
) -> None:
    directory = opened()
    store(directory, 1)
    directory.close()
    with (path / "blocks").open("r+b") as file:
        file.seek(at)
        file.write(b"\xee")
    before = (path / "blocks").read_bytes()
    with pytest.raises(DirectoryDamaged, match=f"{message}.*--reset-directory"):
        opened()
    assert (path / "blocks").read_bytes() == before
    reset(path)
    assert opened().started_empty_because == "it is new"


@pytest.mark.parametrize("size", [0, 100, layout.HEADER_BYTES, layout.RECORDS_OFFSET + 7])
def test_a_truncated_file_is_refused_by_name(opened: Open, path: Path, size: int) -> None:
    opened().close()
    os.truncate(path / "blocks", size)
    with pytest.raises(DirectoryDamaged, match="bytes, got"):
        opened()


def test_a_missing_log_is_damage(opened: Open, path: Path) -> None:
    opened().close()
    next(path.glob("interned.*")).unlink()
    with pytest.raises(DirectoryDamaged, match="is missing"):
        opened()


def test_what_a_manager_left_that_died_while_making_files_is_removed(opened: Open, store: Store, path: Path) -> None:
    directory = opened()
    store(directory, 1)
    directory.close()
    for name in ("blocks.new", "interned." + "0" * 32, "interned." + "1" * 32 + ".new"):
        (path / name).write_bytes(b"half")
    assert stored_blocks(opened()) == [1]
    assert len(list(path.glob("interned.*"))) == 1


def test_two_managers_cannot_open_one_directory_in_100_tries(opened: Open, store: Store, path: Path) -> None:
    directory = opened()
    store(directory, 1)
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from radixpool.rpc.directory import BlockDirectory, DirectoryInUse, reset
        path = Path(sys.argv[1])
        refused = 0
        for _ in range(25):
            try:
                BlockDirectory.open(path, num_blocks=32, block_size=4)
            except DirectoryInUse as error:
                assert f"process {sys.argv[2]}" in str(error), error
                refused += 1
            try:
                reset(path)
            except DirectoryInUse:
                refused += 1
        print(refused)
        """
    )

    def intrude(_: int) -> str:
        arguments = [sys.executable, "-c", script, str(path), str(os.getpid())]
        return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(intrude, range(2))) == ["50", "50"]
    assert stored_blocks(directory) == [1]
    directory.close()
    assert stored_blocks(opened()) == [1]


def test_of_many_that_start_at_once_exactly_one_gets_the_directory(path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from radixpool.rpc.directory import BlockDirectory, DirectoryInUse
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            directory = BlockDirectory.open(Path(sys.argv[1]), num_blocks=32, block_size=4)
            print("got it", flush=True)
        except DirectoryInUse:
            print("refused", flush=True)
        sys.stdin.readline()
        """
    )
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(4)
        ]
        answers = []
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.stdout.readline().strip() for process in processes]
        for process in processes:
            process.communicate("\n")
    assert sorted(answers) == ["got it", "refused", "refused", "refused"]


def run_script(begin: list[str], path: Path, script: str) -> None:
    """Run `script`; `begin` limits the size of files."""
    command = [*begin, sys.executable, "-c", textwrap.dedent(script), str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_full_disk_refuses_a_new_directory_and_leaves_nothing(path: Path, limit_files: Limit) -> None:
    run_script(
        limit_files(65536),
        path,
        """
        import sys
        from pathlib import Path
        from radixpool.rpc.directory import BlockDirectory, DirectoryNoSpace
        try:
            BlockDirectory.open(Path(sys.argv[1]), num_blocks=4096, block_size=16)
        except DirectoryNoSpace as error:
            assert "cannot be written" in str(error), error
        else:
            raise SystemExit("opened")
        """,
    )
    assert [file.name for file in path.iterdir()] == ["lock"]


def test_a_full_disk_refuses_another_geometry_and_keeps_the_cache(
    opened: Open, store: Store, path: Path, limit_files: Limit
) -> None:
    directory = opened()
    store(directory, 1)
    directory.close()
    run_script(
        limit_files(65536),
        path,
        """
        import sys
        from pathlib import Path
        from radixpool.rpc.directory import BlockDirectory, DirectoryNoSpace
        try:
            BlockDirectory.open(Path(sys.argv[1]), num_blocks=4096, block_size=16)
        except DirectoryNoSpace:
            pass
        else:
            raise SystemExit("opened")
        """,
    )
    assert stored_blocks(opened()) == [1]


def test_a_full_disk_refuses_a_new_namespace_and_loses_nothing(opened: Open, path: Path, limit_files: Limit) -> None:
    opened().close()
    run_script(
        limit_files(300),
        path,
        """
        import sys
        from pathlib import Path
        from radixpool.radix.namespace import Namespace
        from radixpool.rpc.directory import BlockDirectory, DirectoryNoSpace
        directory = BlockDirectory.open(Path(sys.argv[1]), num_blocks=32, block_size=4)
        old = Namespace(tenant="a")
        directory.prepare(old)
        try:
            directory.prepare(Namespace(tenant="b" * 400))
        except DirectoryNoSpace:
            pass
        else:
            raise SystemExit("prepared")
        directory.prepare(old)
        directory.handed_out([3])
        directory.stored([3], bytes(16), parent=-1, position=0, namespace=old, last_use=1)
        """,
    )
    assert stored_blocks(opened()) == [3]


def test_an_unwritable_directory_is_refused(opened: Open, store: Store, path: Path) -> None:
    directory = opened()
    store(directory, 1)
    directory.close()
    path.chmod(0)
    script = """
        import os, sys
        from pathlib import Path
        from radixpool.rpc.directory import BlockDirectory, DirectoryNoSpace
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write everywhere
        try:
            BlockDirectory.open(Path(sys.argv[1]), num_blocks=32, block_size=4)
        except DirectoryNoSpace as error:
            assert "Permission denied" in str(error), error
        else:
            raise SystemExit("opened")
        """
    path.parent.chmod(0o755)
    run_script([], path, script)
    path.chmod(0o700)
    assert stored_blocks(opened()) == [1]


def test_a_folder_that_others_can_write_to_is_refused(opened: Open, path: Path) -> None:
    path.mkdir(mode=0o700)
    path.chmod(0o770)
    with pytest.raises(DirectoryError, match=r"chmod go-w\), mode 770"):
        opened()
    assert list(path.iterdir()) == []


def test_damage_to_one_copy_of_the_life_brings_no_former_pool_back(opened: Open, path: Path) -> None:
    directory = opened()
    directory.set_pool(b"a" * 16)
    directory.set_pool(b"b" * 16)
    directory.close()
    whole = (path / "blocks").read_bytes()
    for life, writes in (layout.unpack_life(whole), (layout.unpack_life(whole)[0], 1)):
        offset, _ = layout.life_slot(life, writes)
        (path / "blocks").write_bytes(whole[:offset] + b"\xff" + whole[offset + 1 :])
        assert opened().pool_id == b"b" * 16
        opened().close()


def test_a_path_that_is_a_file_is_refused_by_name(path: Path) -> None:
    path.write_text("something else")
    with pytest.raises(Exception, match=r"directory .* exists"):
        BlockDirectory.open(path, num_blocks=32, block_size=4)
    assert path.read_text() == "something else"


def test_closing_gives_every_descriptor_back_and_twice_is_harmless(opened: Open) -> None:
    opened().close()
    before = open_descriptors()
    directory = opened()
    directory.close()
    directory.close()
    assert open_descriptors() == before
    with pytest.raises(DirectoryInUse):
        first = opened()
        BlockDirectory.open(first._files.path, num_blocks=32, block_size=4)
