# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The package's own files, however it is installed: ``patches/`` is a link in a checkout, a folder in a wheel."""

import os
from hashlib import sha256
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def source_files(package: Path = PACKAGE, suffixes: tuple[str, ...] = (".py",)) -> dict[str, Path]:
    """Files of a package with one of the suffixes, sorted by their path below it with ``/``; links are followed."""
    files = (Path(folder) / name for folder, _, names in os.walk(package, followlinks=True) for name in names)
    return {path.relative_to(package).as_posix(): path for path in sorted(files) if path.suffix in suffixes}


def sources_sha256(package: Path = PACKAGE) -> str:
    """SHA-256 of names and contents of the package's Python and YAML files; the same in every kind of installation."""
    digest = sha256()
    for name, path in source_files(package, (".py", ".yaml")).items():
        digest.update(f"{name}\0{sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
