# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What is installed in this process's environment, and whether verl runs on its CPU."""

import os
from importlib import metadata


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, None without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def on_cpu() -> bool:
    """Whether verl was asked to run without a GPU (cpu_platform.py)."""
    return os.environ.get("VERL_PLATFORM") == "cpu"
