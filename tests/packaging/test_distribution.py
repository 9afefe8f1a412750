"""What a user installs: one top-level package with real files, rebuilt from the sdist, importable without torch."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PARTS = ("radix", "kernels", "rpc")

pytestmark = pytest.mark.xdist_group("packaging")


def build(source: Path, out: Path, kind: str) -> Path:
    """Build one distribution without an isolated environment, so that nothing is downloaded."""
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def tracked_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks: the build must not depend on anything lying about in the work tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=True, text=True).stdout
    copy = tmp_path_factory.mktemp("src") / "radixpool"
    for name in filter(None, listed.split("\0")):
        source, target = REPO / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.exists():
            target.write_bytes(source.read_bytes())
    return copy


@pytest.fixture(scope="module")
def sdist(tracked_copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tracked_copy, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel is built from the unpacked sdist, which proves that the sdist is complete."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build(source, tmp_path_factory.mktemp("wheel"), "wheel")


def test_what_the_container_copies_is_enough_to_install(tracked_copy: Path, wheel: Path, tmp_path: Path) -> None:
    """The image is built from a few paths, so that nothing that lies about in the work tree gets into it."""
    steps = (REPO / "examples" / "Containerfile").read_text(encoding="utf-8")
    names = [name for line in re.findall(r"^COPY (?!--)(.*) \S+$", steps, re.MULTILINE) for name in line.split()]
    source = tmp_path / "src"
    source.mkdir()
    for name in names:
        if (tracked_copy / name).is_dir():
            shutil.copytree(tracked_copy / name, source / name, symlinks=True)
        else:
            shutil.copyfile(tracked_copy / name, source / name)
    assert {"constraints.txt", "pyproject.toml"} <= set(names)
    built = build(source, tmp_path / "out", "wheel")
    with zipfile.ZipFile(built) as one, zipfile.ZipFile(wheel) as other:
        assert set(one.namelist()) == set(other.namelist())


def package_files() -> set[str]:
    """The names that the wheel must hold: every tracked module, type marker and data file of the package."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, check=True, text=True).stdout.split()
    parts = {f"radixpool/{name}" for name in listed if name.startswith(tuple(f"{part}/" for part in PARTS))}
    own = {name.removeprefix("src/") for name in listed if name.startswith("src/radixpool/")}
    links = {f"radixpool/{part}" for part in PARTS}
    return {name for name in (parts | own) - links if not name.endswith(".md")}


def test_wheel_has_one_top_level_package_with_real_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    tops = {name.split("/")[0] for name in entries if ".dist-info/" not in name}
    assert tops == {"radixpool"}
    assert package_files() <= set(entries)
    is_link = 0o120000
    assert not [name for name, entry in entries.items() if (entry.external_attr >> 16) & 0o170000 == is_link]


def test_installed_wheel_works_without_torch(wheel: Path, tmp_path: Path) -> None:
    """The manager, the client and the command line start from the wheel alone, with torch and triton not importable."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    program = f"""
import sys
sys.path.insert(0, {str(site)!r})
for name in ("torch", "triton", "transformers"):
    sys.modules[name] = None
import radixpool, radixpool.radix, radixpool.rpc.client, radixpool.rpc.manager, radixpool.rpc.cli
assert radixpool.__file__.startswith({str(site)!r}), radixpool.__file__
from click.testing import CliRunner
result = CliRunner().invoke(radixpool.rpc.cli.main, ["--help"])
assert result.exit_code == 0, result.output
for command in ("serve", "pool", "worker", "demo", "stats", "inspect", "check"):
    assert command in result.output, command
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_dependencies_are_as_new_as_the_generated_code_asks_for() -> None:
    """It refuses to be imported with an older grpcio or protobuf than it was generated for."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.match(r"[\w-]+", line)[0]: line for line in project["dependencies"]}
    folder = REPO / "src" / "radixpool" / "v1"
    stub = (folder / "cache_pb2_grpc.py").read_text(encoding="utf-8")
    (grpc,) = re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stub)
    message = (folder / "cache_pb2.py").read_text(encoding="utf-8")
    ((major, minor, patch),) = re.findall(r"PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", message)
    assert required["protobuf"] == f"protobuf>={major}.{minor}.{patch}"
    for name in ("grpcio", "grpcio-status", "grpcio-health-checking", "grpcio-reflection"):
        assert required[name] == f"{name}>={grpc}"


def test_version_is_the_same_everywhere(wheel: Path) -> None:
    import radixpool

    assert wheel.name.split("-")[1] == radixpool.__version__
    assert f"## {radixpool.__version__}" in (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
