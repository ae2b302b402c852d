# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Report what another verl or vLLM would cost: `make upgrade-check VERL=0.9.1 VLLM=0.33.0`; default: the newest.

Downloads the wheels, unpacks their Python files into build/upgrade/ and runs `scripts/reach.py --against`. A value with
a slash is the path of a checkout. .venv stays as it is, and nothing of another release is imported.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "upgrade"


def unpacked(pip: str, project: str, version: str) -> tuple[str, Path]:
    """Download a project and unpack its Python files. Returns its version, or a checkout's path, and their folder."""
    if "/" in version:
        return version, Path(version).expanduser().resolve() / project
    wheels = TARGET / "wheels"
    asked = f"{project}=={version}" if version else project
    words = ["download", "-q", "--no-deps", "--only-binary=:all:", "--dest", wheels / (version or "newest"), asked]
    if subprocess.run([pip, "-m", "pip", *words]).returncode:
        sys.exit(f"upgrade-check: {asked} could not be downloaded; name a published version.")
    files = sorted((wheels / (version or "newest")).glob(f"{project}-*.whl"), key=lambda file: file.stat().st_mtime)
    version = files[-1].name.split("-")[1]
    folder = TARGET / f"{project}-{version}"
    with zipfile.ZipFile(files[-1]) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
    return version, folder / project


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pip", default=sys.executable, help="an interpreter that has pip")
    parser.add_argument("--verl", default="", help="version or checkout; the newest without")
    parser.add_argument("--vllm", default="", help="version or checkout; the newest without")
    options = parser.parse_args()
    releases = {project: unpacked(options.pip, project, getattr(options, project)) for project in ("verl", "vllm")}
    print("against", ", ".join(f"{project} {version}" for project, (version, _) in releases.items()), flush=True)
    folders = [f"{project}={folder}" for project, (_, folder) in releases.items()]
    # Status 1 means that something changed: a result, not a failure.
    status = subprocess.run([sys.executable, ROOT / "scripts" / "reach.py", "--against", *folders], cwd=ROOT)
    return 0 if status.returncode in (0, 1) else status.returncode


if __name__ == "__main__":
    sys.exit(main())
