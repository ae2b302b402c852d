# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Adds our groups to verl's primary configs, and checks each composed config.

A subclass of Hydra's config repository appends ``- precision: bf16`` to the defaults list of verl's PPO primary config
as it is loaded. It recognizes that config by its defaults (one places a config at ``actor_rollout_ref.actor``), also in
a recipe or a user's copy. The group comes after verl's values and before those of the recipe and the command line.

A subclass of the config loader resolves each composed config (``composition``), under ``--cfg job``, in a run and in
``hydra.compose`` alike. (A Hydra 1.3 callback has no such hook, and exceptions in callbacks become warnings.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import hydra._internal.hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import GroupDefault
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from .options import PRECISIONS
from .support.row import UnsupportedConfiguration

GROUP = "precision"
DEFAULTS = {GROUP: "bf16", "clip": "fixed", "correction": "fixed"}
"""Groups of this package and the choices that leave verl as it is, in the order in which they apply."""

_ACTOR_PACKAGE = "actor_rollout_ref.actor"
_checked: ContextVar[bool] = ContextVar("jetrl_checked", default=True)


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside, a composed config is neither refused nor resolved: for tools that list all that it does not support."""
    token = _checked.set(False)
    try:
        yield
    finally:
        _checked.reset(token)


class PrecisionSearchPath(SearchPathPlugin):
    """Let Hydra find ``precision/*.yaml`` in this package."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="jetrl_verl", path="pkg://jetrl_verl.config")


class JetConfigRepository(ConfigRepository):
    """Hydra's repository of config files, with our groups in the defaults of verl's PPO primary config."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        loaded = super().load_config(config_path)
        if loaded is None or not loaded.defaults_list:
            return loaded
        groups = [default for default in loaded.defaults_list if isinstance(default, GroupDefault)]
        places_actor = any(group.package == _ACTOR_PACKAGE and not group.override for group in groups)
        named = {group.group for group in groups}
        added = [GroupDefault(group=group, value=value) for group, value in DEFAULTS.items() if group not in named]
        if places_actor and added:
            # Hydra wants `override` entries at the end; what is not one comes after `_self_`, to win over the file.
            overrides = [default for default in loaded.defaults_list if default.is_override()]
            others = [default for default in loaded.defaults_list if not default.is_override()]
            loaded.defaults_list = [*others, *added, *overrides]
        return loaded


class JetConfigLoader(ConfigLoaderImpl):
    """Hydra's config loader over ``JetConfigRepository``, which resolves the composed config."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = JetConfigRepository(config_search_path)

    def load_configuration(self, *args: Any, **kwargs: Any) -> DictConfig:
        try:
            config = super().load_configuration(*args, **kwargs)
        except MissingConfigException as error:
            if error.missing_cfg_file is None or not error.missing_cfg_file.startswith(f"{GROUP}/"):
                raise
            chosen = error.missing_cfg_file.removeprefix(f"{GROUP}/")
            raise ConfigCompositionException(
                f"precision={chosen} is not a precision. Set one of {', '.join(PRECISIONS)}."
            ) from None
        if "jetrl" in config and _checked.get():
            from .composition import resolve

            try:
                resolve(config)
            except UnsupportedConfiguration as refusal:
                raise ConfigCompositionException(str(refusal)) from None
        return config


def register() -> None:
    """Make Hydra use the classes above in this process. Doing it twice changes nothing."""
    Plugins.instance().register(PrecisionSearchPath)
    hydra._internal.hydra.ConfigLoaderImpl = JetConfigLoader
