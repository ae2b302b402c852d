# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Packaged YAML files are parsed once in a session: half of composing a config is reading verl's thirty files again."""

import copy
from collections.abc import Iterator
from functools import wraps
from typing import Any

import pytest
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """Composing gets copies, so nobody sees what another test changed. A folder of a test's own is read each time."""
    kept: dict[tuple[str, str], Any] = {}
    own = ImportlibResourcesConfigSource.load_config

    @wraps(own)
    def load_config(self: ImportlibResourcesConfigSource, config_path: str) -> Any:
        key = self.path, config_path
        if key not in kept:
            kept[key] = own(self, config_path)
        return copy.deepcopy(kept[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImportlibResourcesConfigSource, "load_config", load_config)
        yield
