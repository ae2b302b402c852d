# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The entry point: cheap in every process that imports verl, active as soon as Hydra is, printed if it fails."""

import subprocess
import sys
from pathlib import Path


def python(script: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "", "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_loading_the_plugin_imports_no_framework():
    run = python(
        "import sys; before = set(sys.modules); import jetrl_verl.plugin; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'verl', 'vllm', 'hydra', 'omegaconf', 'ray')])"
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_hydra_has_the_flag_in_either_order_of_import():
    check = (
        "import hydra._internal.hydra as h; from hydra.core.plugins import Plugins; "
        "names = list(Plugins.instance().class_name_to_class); "
        "print(h.ConfigLoaderImpl.__name__, sum('PrecisionSearchPath' in name for name in names))"
    )
    for first in ("import jetrl_verl.plugin", "import hydra, jetrl_verl.plugin"):
        run = python(f"{first}; {check}")
        assert run.stdout.strip() == "JetConfigLoader 1", run.stderr


def test_verls_engine_registers_one_attention_and_imports_no_kernels():
    """The attention itself is imported by the first model that selects it."""
    run = python(
        "import sys, verl\n"
        "from transformers import AttentionInterface, AttentionMaskInterface\n"
        "tables = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping\n"
        "stock = [dict(table) for table in tables]\n"
        "import verl.workers.engine.fsdp.transformer_impl\n"
        "for table, before in zip(tables, stock):\n"
        "    print({name for name in table if table[name] is not before.get(name)})\n"
        "packages = [f'jetrl_verl.{name}' for name in ('kernels', 'models', 'nn')]\n"
        "print([name for name in packages if name in sys.modules])\n",
        PYTHONPATH=str(Path(__file__).parents[2]),
    )
    name = {"jetrl_varlen"}
    assert run.stdout.strip().splitlines()[-3:] == [str(name), str(name), "[]"], run.stderr


def test_a_failure_to_load_is_printed():
    run = python(
        "import sys, types\n"
        "cpu = types.ModuleType('jetrl_verl.cpu_platform')\n"
        "cpu.install = lambda: 1 / 0\n"
        "import jetrl_verl\n"
        "sys.modules['jetrl_verl.cpu_platform'] = jetrl_verl.cpu_platform = cpu\n"
        "import jetrl_verl.plugin\n",
        VERL_PLATFORM="cpu",
    )
    assert run.returncode == 1
    assert "jetrl_verl: the verl plugin failed to load, so `precision=` will not work:" in run.stderr
    assert "ZeroDivisionError" in run.stderr


def test_a_failure_does_not_stop_other_users_of_hydra():
    run = python(
        "import sys, types\n"
        "import jetrl_verl.plugin\n"
        "broken = types.ModuleType('jetrl_verl.config.hydra_plugin')\n"
        "broken.register = lambda: 1 / 0\n"
        "sys.modules['jetrl_verl.config.hydra_plugin'] = broken\n"
        "import hydra\n"
        "print(hydra.__version__[:2])\n"
    )
    assert (run.returncode, run.stdout.strip()) == (0, "1."), run.stderr
    assert "the verl plugin failed to load" in run.stderr and "ZeroDivisionError" in run.stderr


def test_a_vllm_process_survives_a_failure_of_the_plugin():
    run = python(
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "from jetrl_verl.rollout.register import register\n"
        "register()\n"
        "print('alive')\n"
    )
    assert (run.returncode, run.stdout.strip()) == (0, "alive"), run.stderr
    assert "the vLLM plugin failed to load" in run.stderr
