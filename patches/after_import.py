# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Call a function when a module is there: at once, or right after its first import in this process."""

import importlib.abc
import importlib.util
import sys
import traceback
from collections.abc import Callable

from jetrl_verl.patches.patch import PatchError


class _AfterImport(importlib.abc.MetaPathFinder):
    """Call ``then`` right after the first import of ``module`` in this process; then get out of the way."""

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
                    # Announced and not raised: whoever imports the module may never have heard of this plugin. What
                    # depends on the call finds out by itself: a flag is unknown then, a hook has no place.
                    announce()

            spec.loader.exec_module = execute_then_call
        return spec


def when_imported(module: str, name: str, then: Callable[[], None]) -> None:
    """``then()`` now if ``module`` is imported, else right after its import.

    Args:
        module: by its full name. name: of the call; a second one of the same name for a module that is not imported
            yet does nothing. then: raises to the caller if it is called now; later its ``PatchError`` stops the import
            and other errors are printed.

    A module that is just being imported is left to a later call.
    """
    if module in sys.modules:
        if not getattr(sys.modules[module].__spec__, "_initializing", False):
            then()
    elif not any(isinstance(finder, _AfterImport) and finder.is_for(module, name) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(module, name, then))


def announce() -> None:
    """Print the exception that is being handled, since verl logs a plugin's failure at DEBUG only."""
    print("jetrl_verl: the verl plugin failed to load, so `precision=` will not work:", file=sys.stderr)
    traceback.print_exc()
