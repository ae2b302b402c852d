# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``compose`` and ``stock``: verl's primary config with and without the plugin; ``model``."""

import json

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.config_repository import ConfigRepository
from hydra_files import parsed_once  # noqa: F401  (for every test of this folder)
from omegaconf import DictConfig
from support_models import MODEL_CONFIG

from jetrl_verl.config import attention, composition
from jetrl_verl.config import model as model_module


@pytest.fixture(autouse=True)
def flash_attention(monkeypatch):
    """flash-attn is installed in the driver's environment, so that the plugin writes no attention."""
    monkeypatch.setattr(attention, "no_flash_attention", lambda *alternatives: "")


@pytest.fixture
def compose():
    """Callable ``(*overrides, config_name="ppo_trainer", hydra=False) -> DictConfig``."""
    with initialize_config_module("verl.trainer.config", version_base=None):

        def _compose(*overrides: str, config_name: str = "ppo_trainer", hydra: bool = False) -> DictConfig:
            return hydra_compose(config_name, overrides=list(overrides), return_hydra_config=hydra)

        yield _compose


@pytest.fixture
def stock(compose, monkeypatch):
    """``compose`` without the plugin's entry in the defaults list, its only addition to a stock config."""

    def _compose(*overrides: str, **options) -> DictConfig:
        with monkeypatch.context() as patched:
            patched.setattr(
                "jetrl_verl.config.hydra_plugin.JetConfigRepository.load_config", ConfigRepository.load_config
            )
            return compose(*overrides, **options)

    return _compose


@pytest.fixture
def model(monkeypatch, tmp_path):
    """A model folder without weights, in a driver that has said nothing; callable (changes of config.json) -> path."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(model_module, "_check_weight_files", lambda folder: None)
    composition._say.cache_clear()

    def build(changes=None) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**MODEL_CONFIG, **(changes or {})}))
        return str(tmp_path)

    return build
