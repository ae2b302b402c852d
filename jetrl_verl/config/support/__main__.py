# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints docs/support.md; with ``--readme`` the block of README."""

import sys

from .document import document, readme_block

if __name__ == "__main__":
    sys.stdout.write(readme_block() + "\n" if sys.argv[1:] == ["--readme"] else document())
