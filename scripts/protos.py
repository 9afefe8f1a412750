"""Generate src/radixpool/v1 from protos/radixpool/v1, or prove that the committed code is what they generate.

python scripts/protos.py            # write
python scripts/protos.py --check    # exit 1 and name the files that differ
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from google.rpc import code_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = Path("radixpool/v1")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def proto_files() -> list[str]:
    """Return the paths of every source of the package, relative to protos/."""
    return sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).glob("*.proto"))


def include_arguments() -> list[str]:
    """Return where protoc finds our sources, google.protobuf and google.rpc."""
    google_rpc = Path(code_pb2.__file__).parent.parent.parent
    well_known = Path(str(files("grpc_tools"))) / "_proto"
    return [f"-I{PROTOS}", f"-I{well_known}", f"-I{google_rpc}"]


def generate(target: Path) -> None:
    """Write the generated modules under `target`."""
    plugins = [
        f"--plugin=protoc-gen-{name}={Path(sys.executable).parent / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    outputs = [
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--mypy_grpc_out=quiet:{target}",
    ]
    arguments = ["protoc", *include_arguments(), *plugins, *outputs, *proto_files()]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def generated_files(folder: Path) -> dict[str, bytes]:
    """Return name -> content of the generated modules in `folder`."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIXES)}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the committed code differs")
    check = parser.parse_args().check
    committed_folder = ROOT / "src" / PACKAGE
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = generated_files(Path(scratch) / PACKAGE)
    committed = generated_files(committed_folder)
    different = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if check:
        for name in different:
            print(f"src/{PACKAGE}/{name} is not what protos/ generates; run `make protos`", file=sys.stderr)
        return 1 if different else 0
    for name in committed.keys() - fresh.keys():
        (committed_folder / name).unlink()
    for name, content in fresh.items():
        (committed_folder / name).write_bytes(content)
    print(f"{len(fresh)} files in src/{PACKAGE}, {len(different)} changed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
