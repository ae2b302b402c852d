# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The operations that trainer and rollout share, one file each: backends, CPU reference, Triton kernels, binding to
csrc/, autograd function, torch operator. This package has the names in ``__all__`` of each of its files."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Not pkgutil.iter_modules, to which the library of csrc/ in this folder is a module too.
_files = [import_module(f"{__name__}.{file.stem}") for file in sorted(Path(__file__).parent.glob("[!_]*.py"))]
# After all imports: an operation often has the name of its file, which an import sets to the module.
globals().update({name: getattr(file, name) for file in _files for name in getattr(file, "__all__", ())})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
