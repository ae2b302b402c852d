# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Call a function as soon as a module is imported in this process."""

import importlib.abc
import importlib.util
import sys
import traceback
from collections.abc import Callable

from jetrl_verl.patches.patch import PatchError


class _AfterImport(importlib.abc.MetaPathFinder):
    """Call ``then`` right after the first import of ``module``, then leave ``sys.meta_path``."""

    def __init__(self, module: str, name: str, then: Callable[[], None]) -> None:
        self._module, self._name, self._then = module, name, then

    def is_for(self, module: str, name: str) -> bool:
        return (self._module, self._name) == (module, name)

    def find_spec(self, name, path=None, target=None):
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_call(module) -> None:
                execute(module)
                try:
                    self._then()
                except PatchError:
                    raise
                except Exception:
                    # Printed, not raised: the importing code may not use this plugin. A run that does stops later, at
                    # an unknown flag.
                    announce()

            spec.loader.exec_module = execute_then_call
        return spec


def when_imported(module: str, name: str, then: Callable[[], None]) -> None:
    """Call ``then()`` now if ``module`` is imported, else right after its import.

    Args:
        module: full name. name: of the call; a second pending call of the same name is ignored.
        then: called now, its errors reach the caller; called later, ``PatchError`` stops the import and other errors
            are printed.

    Does nothing while the module is being imported.
    """
    if module in sys.modules:
        if not getattr(sys.modules[module].__spec__, "_initializing", False):
            then()
    elif not any(isinstance(finder, _AfterImport) and finder.is_for(module, name) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(module, name, then))


def announce() -> None:
    """Print the current exception: verl logs a plugin's failure at DEBUG only."""
    print("jetrl_verl: the verl plugin failed to load, so `precision=` will not work:", file=sys.stderr)
    traceback.print_exc()
