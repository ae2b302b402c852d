# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``words``: the overrides that a recipe's script passes to verl.

The script runs with an interpreter that prints its arguments instead of training."""

import os
import subprocess
from collections.abc import Callable

import pytest
from hydra_files import parsed_once  # noqa: F401  (for every test of this folder)
from recipe_cases import PRINTER, RECIPES, SETTINGS


@pytest.fixture
def words(tmp_path, monkeypatch) -> Callable[..., list[str]]:
    """Callable ``(script, *arguments, status=0, **settings) -> overrides`` that the script passes to verl.

    With ``status`` other than 0, the stderr of a script that must end with it.
    """
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    python = tmp_path / "python"
    python.write_text(PRINTER)
    python.chmod(0o755)
    fixed = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "METRICS": str(tmp_path / "out" / "metrics.jsonl")}

    def run(script: str, *arguments: str, status: int = 0, **settings: str):
        command = ["bash", str(RECIPES / script), *arguments]
        ended = subprocess.run(command, env={**os.environ, **fixed, **settings}, capture_output=True, text=True)
        assert ended.returncode == status, ended.stderr
        if status:
            return ended.stderr
        module, *overrides = ended.stdout.rstrip("\0").split("\0")
        assert module == "verl.trainer.main_ppo"
        return overrides

    return run
