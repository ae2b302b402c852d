# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The entry point in processes that import verl, and ``python -m verl.trainer.main_ppo`` as a user starts it."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import jetrl_verl

RUNNABLE = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]


def main_ppo(tmp_path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # A user's environment: the flag needs no variable of the plugin.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("VERL_", "JETRL_"))}
    return subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
        cwd=tmp_path,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_cfg_job_prints_a_refusal_and_no_traceback(tmp_path):
    refused = main_ppo(tmp_path, "--cfg", "job", "precision=jet_fp8", "model_engine=megatron")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert (
        "model_engine=megatron is not supported with precision=jet_fp8: training runs under FSDP. Set model_engine=dp"
        in refused.stderr
    )
    assert "Traceback" not in refused.stderr


def test_a_damaged_input_stops_the_run_before_ray(tmp_path):
    broken = tmp_path / "train.parquet"
    broken.write_bytes(b"not parquet")
    run = main_ppo(
        tmp_path,
        "precision=jet_fp8",
        *RUNNABLE,
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",  # offline, and so left to the workers
        "critic.enable=False",
        f"data.train_files={broken}",
    )
    assert run.returncode == 1
    assert f"jetrl_verl: the data file {broken} (data.train_files) is not a readable parquet file" in run.stderr
    assert "Traceback" not in run.stderr
    assert "ray init kwargs" not in run.stdout


def bare_interpreter(folder: Path) -> tuple[Path, Path, Path]:
    """A Python that has every package of this environment except this one, like a uv environment before ``--with``; its
    site-packages, and those of this environment."""
    venv.create(folder, with_pip=False)
    (target,) = (folder / "lib").glob("python*/site-packages")
    (source,) = {Path(entry) for entry in sys.path if entry.endswith("site-packages") and Path(entry, "ray").is_dir()}
    for entry in source.iterdir():
        if "jetrl" not in entry.name:
            (target / entry.name).symlink_to(entry)
    return folder / "bin" / "python", target, source


def driver(folder: Path, script: str, interpreter: Path) -> tuple[str, str]:
    """What a driver prints that ends as it starts workers of another interpreter, and its sentence."""
    script = (
        "import ray\n"
        "from jetrl_verl.config import workers\n"
        "workers.install()\n"
        "options = dict(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False)\n"
        f"{script}"
        f"ray.init(**options, runtime_env={{'py_executable': {str(interpreter)!r}}})\n"
        "print('not reached')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1 and "not reached" not in run.stdout, run.stderr
    (sentence,) = (line for line in run.stderr.splitlines() if line.startswith("jetrl_verl:"))
    assert str(interpreter) in sentence
    return run.stdout, sentence


def test_workers_without_the_plugin_stop_the_driver(tmp_path):
    """``ray.init`` as verl's ``uv run`` examples call it: the workers' interpreter is not the driver's."""
    interpreter, *_ = bare_interpreter(tmp_path / "bare")
    same = "workers.install()\nray.init(**options)\nprint('same environment: passed', flush=True)\nray.shutdown()\n"
    printed, sentence = driver(tmp_path, same, interpreter)
    assert "same environment: passed" in printed
    assert "does not have the plugin installed" in sentence and "uv run --with-editable /path/to/jetrl_verl" in sentence


def test_workers_of_another_version_stop_the_driver(tmp_path):
    interpreter, target, source = bare_interpreter(tmp_path / "other")
    package = Path(jetrl_verl.__file__).parent
    shutil.copytree(package, target / "jetrl_verl", ignore=shutil.ignore_patterns("__pycache__"))
    (information,) = source.glob("jetrl_verl-*.dist-info")
    metadata = Path(shutil.copytree(information, target / "jetrl_verl-0.0.9.dist-info"), "METADATA")
    metadata.write_text(metadata.read_text().replace(f"Version: {jetrl_verl.__version__}", "Version: 0.0.9"))
    _, sentence = driver(tmp_path, "", interpreter)
    assert f"the driver runs jetrl-verl {jetrl_verl.__version__}" in sentence
    assert f"{interpreter} has jetrl-verl 0.0.9" in sentence and "; install " in sentence


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
