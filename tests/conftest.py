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
"""What holds for every test: the environment, which files need a GPU, in which order, and for how long.

- Files named ``*_on_gpu.py`` need a GPU. Without one they are not even collected, so importing what only a GPU machine
  has is fine there. ``--gpu=never`` (``make test``) leaves them out on any machine; ``--gpu=only`` (``make test-gpu``)
  runs exactly them and is an error without a GPU, so that a GPU run never passes by running nothing.
- End-to-end tests (``tests/e2e``, files named ``*end_to_end*``) run last: whatever they would find in minutes, a unit
  test should say in seconds.
- A test that hangs (two processes and a collective are enough) fails by itself; ``@pytest.mark.timeout`` overrides.
"""

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# Before torch, Ray and vLLM are imported anywhere. One thread a process, since engine tests run several of them on two
# cores; no test may reach a model hub or a usage server.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_MODE": "disabled",
}.items():
    os.environ.setdefault(_name, _value)

_E2E = Path(__file__).parent / "e2e"
_SECONDS = 300
_SECONDS_E2E = 1500


@cache
def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def _is_end_to_end(path: Path) -> bool:
    return _E2E in path.parents or "end_to_end" in path.name


def _needs_gpu(path: Path) -> bool:
    return path.name.endswith("_on_gpu.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu",
        choices=("auto", "never", "only"),
        default="auto",
        help="files named *_on_gpu.py: run where there is a GPU (auto), never, or only them",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout(seconds): after how long the test counts as hung (pytest-timeout)")
    if config.getoption("gpu") == "only" and not _cuda_is_available():
        raise pytest.UsageError(
            "the GPU tests need an NVIDIA GPU and torch finds none; run `make test` on this machine"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not (collection_path.is_file() and collection_path.name.startswith("test_")):
        return None
    mode = config.getoption("gpu")
    if _needs_gpu(collection_path):
        return True if mode == "never" or not _cuda_is_available() else None
    return True if mode == "only" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _is_end_to_end(item.path))  # stable: the rest keeps its order
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SECONDS_E2E if _is_end_to_end(item.path) else _SECONDS))


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A vLLM engine in this process leaves the process group that it made, and the next module could not make one."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    if "vllm" in sys.modules:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def cpu_platform() -> Iterator[None]:
    """verl on its opt-in CPU platform for one module, whatever platform this process resolved before or will after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        for name in ("VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR"):
            patch.delenv(name, raising=False)  # remembered, so that what install() sets is undone
        import verl.utils.distributed as distributed
        from verl.plugin.platform import platform_manager

        from jetrl_verl.patches import cpu

        stock = distributed.initialize_global_process_group_ray
        patch.setattr(distributed, "initialize_global_process_group_ray", stock)
        patch.setattr(platform_manager, "_current_platform", None)
        cpu.install()
        yield


@pytest.fixture
def own_trainer(cpu_platform, monkeypatch):
    """verl's trainer module, whatever a test puts into it taken out again."""
    from verl.trainer.ppo.v1 import trainer_base

    from jetrl_verl.patches import advantages

    for name in ("calculate_debug_metrics", "compute_advantage_for_multi_trajectories"):
        monkeypatch.setattr(trainer_base, name, getattr(trainer_base, name))
    monkeypatch.setattr(trainer_base.PPOTrainer, "_compute_advantage", trainer_base.PPOTrainer._compute_advantage)
    monkeypatch.setattr(advantages, "_hooks", {})
    return trainer_base
