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
actor, each vLLM worker. So it imports nothing and does two cheap things: it asks to be called when Hydra is imported
(verl itself imports Hydra only where it composes or instantiates a config), and it installs the CPU platform where it
was asked for.

verl logs a plugin that fails to load at DEBUG only. A flag that then does nothing, or a worker that trains in BF16,
would be the worst outcome, so a failure here is announced on stderr before it is raised.
"""

import importlib.abc
import importlib.util
import os
import sys
import traceback


class _AfterHydraImport(importlib.abc.MetaPathFinder):
    """Register with Hydra right after its first import in this process; then get out of the way."""

    def find_spec(self, name, path=None, target=None):
        if name != "hydra":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("hydra")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_register(module) -> None:
                execute(module)
                try:
                    _register_with_hydra()
                except Exception:
                    # Announced and not raised: whoever imports Hydra here may never have heard of this plugin, and
                    # a flag that is set fails at composition, since the group is unknown then.
                    _announce()

            spec.loader.exec_module = execute_then_register
        return spec


def _register_with_hydra() -> None:
    from jetrl_verl.config.hydra_plugin import register

    register()


def _install() -> None:
    if "hydra" in sys.modules:
        _register_with_hydra()
    elif not any(isinstance(finder, _AfterHydraImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterHydraImport())

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
