# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""pytest plugin of test_patch_into_on_cpu.py: the plugin replaced no function of the checkout at run time."""

import importlib
import os


def pytest_sessionfinish(session) -> None:
    from patch_home import current

    from jetrl_verl.patches import all_patches

    for patch in all_patches():
        patch.apply()
        function = current(patch)
        module = importlib.import_module(patch.module)
        if hasattr(function, "_jetrl_stock") or not module.__file__.startswith(os.environ["JETRL_TEST_CHECKOUT"]):
            print(f"not left alone: {patch.replaces} in {module.__file__}")
            session.exitstatus = 1
        else:
            print(f"left alone: {patch.replaces}")
