"""Check the protos with buf: lint, and no change that breaks clients of the released wire.

    python scripts/buf.py              # lint, then compare with protos/released.binpb
    python scripts/buf.py --release    # take the present protos as released

buf comes from npm, into .npm/ of the repository.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

from protos import PROTOS, ROOT, include_arguments, proto_files

VERSION = "1.75.0"
RELEASED = PROTOS / "released.binpb"
CONFIG = PROTOS / "buf.yaml"
NPM_PREFIX = ROOT / ".npm"


def write_image(path: Path, *extra: str) -> None:
    """Write the descriptors of all protos, imports included."""
    arguments = ["protoc", *include_arguments(), "--include_imports", *extra, f"--descriptor_set_out={path}"]
    if protoc.main([*arguments, *proto_files()]) != 0:
        raise SystemExit("protoc failed")


def find_buf() -> Path:
    """Return the path of buf, installed first if need be."""
    buf = NPM_PREFIX / "node_modules" / ".bin" / "buf"
    if not buf.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit("buf is installed by npm, which is not on this machine")
        command = [npm, "install", "--prefix", str(NPM_PREFIX), "--no-save", "--no-audit", "--no-fund", "--silent"]
        subprocess.run([*command, f"@bufbuild/buf@{VERSION}"], check=True)
    return buf


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="store_true", help="take the present protos as released")
    if parser.parse_args().release:
        write_image(RELEASED)
        return 0
    buf = find_buf()
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "image.binpb"
        write_image(image, "--include_source_info")
        checks = (["lint", str(image)], ["breaking", str(image), "--against", str(RELEASED)])
        results = [subprocess.run([buf, *check, "--config", str(CONFIG)], check=False).returncode for check in checks]
    return int(any(results))


if __name__ == "__main__":
    sys.exit(main())
