# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Entry point of ``verl.plugins``: what makes the bare flag ``precision=jet_fp8`` known to stock verl.

verl loads this module at the end of ``verl/__init__.py``, in every process that imports verl: the driver, each Ray
actor, each vLLM worker. So it imports nothing and does cheap things only: it asks to be called when Hydra is imported
(verl itself imports Hydra only where it composes or instantiates a config) and when verl's log-probabilities are, and
it installs the CPU platform where it was asked for.

verl logs a plugin that fails to load at DEBUG only. A flag that then does nothing, or a worker that trains in BF16,
would be the worst outcome, so a failure here is announced on stderr before it is raised.
"""

import importlib.abc
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable


class _AfterImport(importlib.abc.MetaPathFinder):
    """Call ``then`` right after the first import of ``module`` in this process; then get out of the way."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module = module
        self._then = then

    def waits_for(self, module: str) -> bool:
        return self._module == module

    def find_spec(self, name, path=None, target=None):
        if not self.waits_for(name):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_call(module) -> None:
                execute(module)
                try:
                    self._then()
                except Exception:
                    # Announced and not raised: whoever imports Hydra here may never have heard of this plugin, and
                    # a flag that is set fails at composition, since the group is unknown then.
                    _announce()

            spec.loader.exec_module = execute_then_call
        return spec


def _after_import(module: str, then: Callable[[], None]) -> None:
    """``then()`` now if ``module`` has been imported, else right after its import."""
    if module in sys.modules:
        then()
    elif not any(isinstance(finder, _AfterImport) and finder.waits_for(module) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(module, then))


def _register_with_hydra() -> None:
    from jetrl_verl.config.hydra_plugin import register

    register()


def _install_log_probs() -> None:
    from jetrl_verl.patches import log_probs

    log_probs.install()


def _install() -> None:
    _after_import("hydra", _register_with_hydra)
    _after_import("verl.utils.torch_functional", _install_log_probs)

    if os.environ.get("VERL_PLATFORM") == "cpu":
        from jetrl_verl.patches import cpu

        cpu.install()


def _announce() -> None:
    print("jetrl_verl: the verl plugin failed to load, so `precision=` will not work:", file=sys.stderr)
    traceback.print_exc()


try:
    _install()
except Exception:
    _announce()
    raise
