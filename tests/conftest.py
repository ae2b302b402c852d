# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Environment, options and time limits of all tests. Files ``*_on_gpu.py`` are collected on a GPU alone; tests
marked ``slow`` and end-to-end tests run if ``--tests`` asks for them."""

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# Helpers that tests of several folders share; recipes are run from the checkout, they are not installed.
_TESTS = Path(__file__).parent
_HELPERS = ("reference", "kernels", "emulator", "train", "tools", "recipes")
sys.path[:0] = [str(_TESTS / name) for name in _HELPERS] + [str(_TESTS)]
sys.path += [str(_TESTS.parent), str(_TESTS.parent / "scripts")]

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
CHOICES = {
    "quick": {(False, False)},
    "e2e": {(False, True)},
    "no-e2e": {(False, False), (True, False)},
    "slow-e2e": {(False, True), (True, True)},
    "all": {(False, False), (True, False), (False, True), (True, True)},
}
"""Value of ``--tests`` -> the tests that run, as (marked slow, end to end)."""
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
    parser.addoption("--tests", choices=tuple(CHOICES), default="quick", help="which tests by their marks")
    parser.addoption("--part", default="1/1", help="I/N: of the chosen tests each N-th, from the I-th on")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: minutes long, run by `make test-all`")
    config.addinivalue_line("markers", "timeout(seconds): limit after which a test counts as hung (pytest-timeout)")
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = CHOICES[config.getoption("tests")]
    selected: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        selected[(item.get_closest_marker("slow") is not None, _is_end_to_end(item.path)) in chosen].append(item)
    config.hook.pytest_deselected(items=selected[False])
    items[:] = sorted(selected[True], key=lambda item: _is_end_to_end(item.path))  # stable
    part, parts = map(int, config.getoption("part").split("/"))
    if parts > 1:
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part - 1])
        items[:] = items[part - 1 :: parts]
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SECONDS_E2E if _is_end_to_end(item.path) else _SECONDS))


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A vLLM engine leaves its process group in this process, where the next module could not create one."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    if "vllm" in sys.modules:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    if distributed.is_initialized():
        distributed.destroy_process_group()


class _NoExtension:
    """Placeholder for a removed base. A class keeps the ``__new__`` slot of a former base (verl's extension has one);
    without a placeholder the slot calls ``object.__new__``, which takes no arguments."""

    def __new__(cls, **_):
        return super().__new__(cls)


@pytest.fixture(scope="module", autouse=True)
def no_worker_keeps_an_extension() -> Iterator[None]:
    """vLLM appends a worker extension to the bases of its worker class for the life of the process; the next module's
    engine may have another extension or a subclass of that worker."""
    yield
    module = sys.modules.get("vllm.v1.worker.cpu_worker") or sys.modules.get("vllm.v1.worker.gpu_worker")
    if module is not None:
        worker = getattr(module, "CPUWorker", None) or module.Worker
        own = tuple(base for base in worker.__bases__ if base.__module__.startswith("vllm."))
        if own != worker.__bases__:
            worker.__bases__ = (*own, _NoExtension)


@pytest.fixture(scope="module")
def cpu_platform() -> Iterator[None]:
    """verl on its opt-in CPU platform for one module, whatever platform this process resolved before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        for name in ("VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR"):
            patch.delenv(name, raising=False)  # remembered, so that what install() sets is undone
        import verl.utils.distributed as distributed
        from verl.plugin.platform import platform_manager

        from jetrl_verl import cpu_platform

        stock = distributed.initialize_global_process_group_ray
        patch.setattr(distributed, "initialize_global_process_group_ray", stock)
        patch.setattr(platform_manager, "_current_platform", None)
        cpu_platform.install()
        yield


@pytest.fixture
def one_process_group(tmp_path) -> Iterator[None]:
    """torch's process group of this process alone."""
    import torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def own_trainer(cpu_platform, monkeypatch):
    """verl's trainer module; hooks that a test registers are removed afterwards."""
    from verl.trainer.ppo.v1 import trainer_base

    from jetrl_verl.patches import batch_hooks

    registries = (
        batch_hooks.AFTER_OLD_LOG_PROBS,
        batch_hooks.AFTER_FAILED_UPDATES,
        batch_hooks.AFTER_ADVANTAGES,
        batch_hooks.ADVANTAGE_METRICS,
        batch_hooks.DEBUG_METRICS,
    )
    for hooks in registries:
        for name in list(hooks):
            monkeypatch.delitem(hooks, name)
    yield trainer_base
    for hooks in registries:
        hooks.clear()
