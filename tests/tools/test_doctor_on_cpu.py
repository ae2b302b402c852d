# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl doctor``: one finding with its fix for each fault; a broken library does not stop the report."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import jetrl_verl
from jetrl_verl.cli import app
from jetrl_verl.tools import bytecode
from jetrl_verl.tools.doctor import asked, self_check
from jetrl_verl.tools.doctor import diagnosis as doctor
from jetrl_verl.tools.doctor.diagnosis import NOTE, OK, WRONG, Finding

GPU = {"name": "NVIDIA H200", "capability": [9, 0], "free": 140 * 2**30, "total": 141 * 2**30}
HOPPER = {
    "platform": "sm90",
    "operations": {"quantize_1x128": "triton", "gemm_nt": "vllm_cutlass, else triton"},
    "last": {"quantize_1x128": "triton", "gemm_nt": "triton"},
    "unavailable": {},
    "elsewhere": ["reference"],
}
HEALTHY = {
    "kernels": {"cuda": "13.0", "gpus": [GPU], "devices": {"cuda:0": HOPPER}, "slow_launches": ""},
    "self_check": {
        "cuda:0": {
            "platform": "sm90",
            "outcomes": [
                *(("linears", name, backend, "") for name in ("FProp", "WGrad") for backend in ("native", "triton")),
                *(("mixtures of experts", name, "native", "") for name in ("grouped FProp", "grouped WGrad")),
                ("mixtures of experts", "combine", "triton", ""),
            ],
        }
    },
    "verl": {"findings": [("plugin in verl", OK, "loaded"), ("patches", OK, "all fit")]},
    "vllm": {"findings": [("plugin in vLLM", OK, "registered")]},
    "ray": {"findings": [("plugin in Ray workers", OK, "as here")]},
}


@pytest.fixture(autouse=True)
def no_filters(monkeypatch):
    for name in ("VLLM_PLUGINS", "VERL_USE_EXTERNAL_PLUGINS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu_machine(monkeypatch):
    """Answers of a healthy machine with one H200, for a test to change."""
    answers = json.loads(json.dumps(HEALTHY))
    installed = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: "0.24.0" if name == "vllm" else installed(name))
    monkeypatch.setattr(doctor, "nvidia_smi", lambda: [("NVIDIA H200", "580.95")])
    monkeypatch.setattr(doctor, "ask", lambda name: answers[name])
    return answers


def wrong(findings) -> list[Finding]:
    failures = [finding for finding in findings if finding.state == WRONG]
    assert all(finding.fix and "\n" not in finding.fix for finding in failures)
    assert all(not finding.fix for finding in findings if finding.state != WRONG)
    return failures


def only(findings) -> Finding:
    (finding,) = wrong(findings)
    return finding


def test_a_gpu_without_the_shared_operations_is_a_note_in_the_verdict(gpu_machine):
    gpu_machine["kernels"]["gap"] = "GPU 0, NVIDIA L40S, has compute capability 8.9, and FlashAttention 3 needs 9.0"
    findings = doctor.diagnose()
    (finding,) = (finding for finding in findings if finding.subject == doctor.SHARED)
    assert (
        finding.state == doctor.NOTE
        and "jet_fp8_exact, bf16_shared and jet_fp8 of a mixture are refused" in finding.detail
    )
    assert doctor.verdict(findings) == "This machine runs every precision but jet_fp8_exact and bf16_shared on 1 GPU."


def test_a_healthy_gpu_machine_runs_every_precision(gpu_machine):
    findings = doctor.diagnose()
    assert wrong(findings) == []
    assert doctor.verdict(findings) == "This machine runs every precision on 1 GPU."
    assert not any(finding.subject == doctor.SHARED for finding in findings)
    shown = [finding.detail for finding in findings if finding.subject == "kernels, sm90" and finding.state == OK]
    assert shown == ["triton: quantize_1x128", "vllm_cutlass, else triton: gemm_nt"]
    assert Finding("Triton launches", OK, "direct") in findings


def test_real_processes_diagnose_this_machine():
    findings = {finding.subject: finding for finding in doctor.diagnose(ray=False)}
    for subject in ("verl", "vllm", "torch", "transformers", "jetrl-verl", "plugin in verl", "plugin in vLLM"):
        assert findings[subject].state == OK, findings[subject]
    assert any(subject.startswith("kernels, ") for subject in findings)
    assert "plugin in Ray workers" not in findings


def test_libraries_that_fail_or_crash_on_import_are_one_finding_each(tmp_path):
    fails, crashes = "raise ImportError('libcudart.so.13: cannot open')", "import os; os.abort()"
    for name, text in {"torch": fails, "verl": crashes, "vllm": fails, "ray": crashes}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "jetrl_verl.cli", "doctor", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert run.returncode == 1, run.stderr
    report = json.loads(run.stdout)
    details = {finding["subject"]: finding["detail"] for finding in report["findings"] if finding["state"] == WRONG}
    assert report["ok"] is False and set(details) == {
        "kernels",
        "plugin in verl",
        "plugin in vLLM",
        "plugin in Ray workers",
    }
    for subject in ("kernels", "plugin in vLLM"):
        assert "ImportError: libcudart.so.13: cannot open" in details[subject]
    for subject in ("plugin in verl", "plugin in Ray workers"):
        assert "SIGABRT" in details[subject]


def test_a_process_that_never_answers_is_ended(monkeypatch, tmp_path):
    (tmp_path / "ray.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(asked, "ANSWER_SECONDS", 3.0)
    assert doctor.ask("ray") == {"error": "no answer within 3 s"}


def test_a_failed_check_is_its_own_finding(gpu_machine):
    del gpu_machine["kernels"]["devices"]["cuda:0"]["last"]
    assert "KeyError" in only(doctor.diagnose()).detail


@pytest.mark.parametrize(
    ("package", "version"), [("verl", "0.9.0"), ("torch", "2.12.0+cu130"), ("vllm", None), ("vllm", "unknown")]
)
def test_an_unpinned_version_names_the_one_to_install(package, version, monkeypatch):
    installed = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: version if name == package else installed(name))
    finding = only(doctor.check_packages())
    assert finding.subject == package and f"install {package} {doctor.PINS[package]}" in finding.fix
    assert (version or "not installed") in finding.detail


def test_absent_flash_attn_is_no_fault(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    (finding,) = [finding for finding in doctor.check_packages() if finding.subject == "flash-attn"]
    assert finding.state == NOTE and "jetrl_varlen" in finding.detail


def test_a_gpu_without_fp8_is_refused(gpu_machine):
    gpu_machine["kernels"]["gpus"][0] |= {"name": "NVIDIA A100", "capability": [8, 0]}
    gpu_machine["kernels"]["devices"] = {"cuda:0": {"refused": "no FP8"}}
    finding = only(doctor.diagnose())
    assert finding.subject == "GPU 0" and "A100" in finding.detail and "precision=bf16" in finding.fix


def test_an_occupied_gpu_is_wrong(gpu_machine):
    gpu_machine["kernels"]["gpus"][0]["free"] = 60 * 2**30
    finding = only(doctor.diagnose())
    assert finding.detail == "60.0 GiB of 141.0 GiB free" and "gpu_memory_utilization" in finding.fix


def test_a_gpu_that_torch_does_not_see_is_wrong(gpu_machine):
    gpu_machine["kernels"] |= {"gpus": [], "devices": {"cpu": HOPPER | {"platform": "cpu"}}}
    finding = only(doctor.diagnose())
    assert "torch finds no GPU" in finding.detail and "CUDA 13.0" in finding.fix


def test_the_cpu_build_of_vllm_on_a_gpu_machine_is_wrong(gpu_machine, monkeypatch):
    installed = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: "0.24.0+cpu" if name == "vllm" else installed(name))
    assert "make setup STACK=gpu" in only(doctor.diagnose()).fix


def test_triton_needs_a_compiler(gpu_machine, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert only(doctor.diagnose()).subject == "C compiler"


def test_a_better_backend_that_cannot_run_is_a_note_with_its_reason(gpu_machine):
    gpu_machine["kernels"]["devices"]["cuda:0"]["unavailable"] = {"vllm_cutlass": "ImportError: vllm._C"}
    findings = doctor.diagnose()
    assert wrong(findings) == []
    kernels = [finding for finding in findings if finding.subject == "kernels, sm90"]
    assert "triton: quantize_1x128, gemm_nt" in [finding.detail for finding in kernels]
    assert "vllm_cutlass is not used: ImportError: vllm._C" in [finding.detail for finding in kernels]


def test_an_operation_without_any_backend_is_wrong(gpu_machine):
    gpu_machine["kernels"]["devices"]["cuda:0"]["unavailable"] = {"triton": "ImportError: no triton"}
    assert {f.subject for f in wrong(doctor.diagnose())} == {"quantize_1x128 on cuda:0", "gemm_nt on cuda:0"}


def test_an_unavailable_backend_reports_its_own_error(monkeypatch):
    from importlib import import_module

    from jetrl_verl.kernels import dispatch

    assert self_check.why_not("reference") == ""
    monkeypatch.setitem(dispatch._unavailable, "reference", lambda: import_module("jetrl_verl.no_such_module"))
    assert self_check.why_not("reference") == "ModuleNotFoundError: No module named 'jetrl_verl.no_such_module'"


def metadata_folder(folder, version):
    info = folder / f"jetrl_verl-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jetrl-verl\nVersion: {version}\n")
    return folder


def test_two_installed_versions_are_named_with_their_paths(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(metadata_folder(tmp_path / "old", "0.0.9")))
    finding = only(doctor.check_installation())
    assert "installed in 2 versions" in finding.detail and f"0.0.9 in {tmp_path / 'old'}" in finding.detail
    assert "pip uninstall jetrl-verl" in finding.fix


def test_metadata_of_another_version_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(jetrl_verl, "__version__", "0.2.0")
    finding = only(doctor.check_installation())
    assert "is version 0.2.0, its metadata says" in finding.detail


def test_code_without_metadata_is_not_installed(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "distributions", lambda name: iter(()))
    assert "importable but not installed" in only(doctor.check_installation()).detail


@pytest.mark.parametrize(
    ("check", "variable"), [(asked.check_vllm, "VLLM_PLUGINS"), (asked.check_verl, "VERL_USE_EXTERNAL_PLUGINS")]
)
def test_a_filter_that_excludes_the_plugin_is_named(check, variable, monkeypatch):
    monkeypatch.setenv(variable, "other")
    finding = only(check())
    assert finding.subject == variable and f"unset {variable}" in finding.fix


@pytest.mark.parametrize("check", [asked.check_verl, asked.check_vllm])
def test_missing_entry_points_are_wrong(check, monkeypatch):
    monkeypatch.setattr(asked.metadata, "entry_points", lambda **selection: ())
    finding = only(check())
    assert "no entry point" in finding.detail and "pip install -e" in finding.fix


def test_a_plugin_that_a_process_did_not_load_is_wrong(monkeypatch):
    import ray
    from hydra._internal import config_loader_impl, hydra

    def refused() -> None:
        raise SystemExit("jetrl_verl: the workers have jetrl-verl 0.0.9; install it")

    monkeypatch.setattr(asked, "_load_error", lambda group: "ImportError: x")
    monkeypatch.setattr(asked, "QUANT_METHOD", "jetrl_none")
    assert only(asked.check_vllm()).detail == "quantization=jetrl_none is unknown: ImportError: x"
    monkeypatch.delitem(sys.modules, "jetrl_verl.plugin", raising=False)
    assert only(asked.check_verl()).detail == "ImportError: x"
    monkeypatch.setitem(sys.modules, "jetrl_verl.plugin", sys)
    monkeypatch.setattr(hydra, "ConfigLoaderImpl", config_loader_impl.ConfigLoaderImpl)
    assert "Hydra does not know the group precision" in only(asked.check_verl()).detail
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr("jetrl_verl.config.workers.check_workers", refused)
    refusal = Finding("plugin in Ray workers", WRONG, "the workers have jetrl-verl 0.0.9", "install it")
    assert only(asked.check_ray()) == refusal


def test_small_or_absent_shared_memory_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: doctor.shutil._ntuple_diskusage(2**26, 0, 2**26))
    finding = only(doctor.check_shared_memory())
    assert "0.1 GiB free, 2.0 GiB are needed" in finding.detail and "--shm-size" in finding.fix
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "none")
    assert only(doctor.check_shared_memory()).detail == "absent"


def test_the_command_prints_remedies_and_a_verdict(gpu_machine, monkeypatch):
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and result.stdout.strip().endswith("This machine runs every precision on 1 GPU.")
    refusal = [
        "plugin in Ray workers",
        WRONG,
        "a worker on 10.0.0.2 has jetrl-verl [old]",
        "install the same version there",
    ]
    gpu_machine["ray"]["findings"] = [refusal]
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "plugin in Ray workers: install the same version there" in result.stdout
    assert "[old]" in result.stdout and "1 thing to fix" in result.stdout
    result = CliRunner().invoke(app, ["doctor", "--no-ray", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["ok"] is True
    assert "plugin in Ray workers" not in {finding["subject"] for finding in report["findings"]}


def library(**changes):
    return {"name": "libjetrl_sm90.so", "sha256": "ab" * 32, "error": ""} | changes


def of_library(findings) -> Finding:
    assert findings[0].subject == "Hopper kernels", "the first line"
    return findings[0]


def test_the_kernel_library_is_shown_with_its_checksum(gpu_machine):
    gpu_machine["kernels"]["library"] = library()
    finding = of_library(doctor.diagnose(ray=False))
    assert finding.state == OK and finding.detail == f"libjetrl_sm90.so, SHA-256 {'ab' * 32}"


@pytest.mark.parametrize("gpus", [[GPU], []], ids=["Hopper", "no GPU"])
def test_missing_hopper_kernels_are_a_note_with_the_slowdown(gpu_machine, gpus):
    gpu_machine["kernels"] |= {"library": library(sha256=None), "gpus": gpus}
    finding = of_library(doctor.diagnose(ray=False))
    assert finding.state == NOTE and "make wheel" in finding.detail
    assert ("0.68 of BF16's speed" in finding.detail) == bool(gpus)


def test_a_library_that_does_not_load_is_wrong(gpu_machine):
    gpu_machine["kernels"]["library"] = library(error="libcudart.so.13: cannot open shared object file")
    finding = only(doctor.diagnose(ray=False))
    assert finding.subject == "Hopper kernels" and "libcudart.so.13" in finding.detail and "make wheel" in finding.fix


def of_mixtures(findings) -> list[tuple[str, str]]:
    return [(f.state, f.detail) for f in findings if f.subject.startswith(self_check.MIXTURES)]


def test_kernels_with_the_references_bits_are_listed_by_backend(gpu_machine):
    findings = doctor.diagnose(ray=False)
    (linears,) = (finding for finding in findings if finding.subject == "linears, sm90")
    assert linears.state == OK and linears.detail == "native, triton: FProp, WGrad: the reference's bits"
    assert of_mixtures(findings) == [
        (OK, "native: grouped FProp, grouped WGrad: the reference's bits"),
        (OK, "triton: combine: the reference's bits"),
    ]


def test_a_wrong_or_failing_kernel_is_named_with_its_backend(gpu_machine):
    outcomes = gpu_machine["self_check"]["cuda:0"]["outcomes"]
    outcomes[4][3] = outcomes[5][3] = "3 of 512 numbers are not the reference's"
    outcomes[6][3] = "RuntimeError: no kernel image"
    findings = doctor.diagnose(ray=False)
    assert [(f.subject, f.detail) for f in wrong(findings)] == [
        ("native on cuda:0", "grouped FProp, grouped WGrad: 3 of 512 numbers are not the reference's"),
        ("triton on cuda:0", "combine: RuntimeError: no kernel image"),
    ]
    assert of_mixtures(findings) == []


def test_an_unanswered_self_check_is_wrong_where_torch_works(gpu_machine):
    gpu_machine["self_check"] = {"error": "OutOfMemoryError: CUDA out of memory"}
    assert only(doctor.diagnose(ray=False)).subject == "self-check"
    assert list(doctor.check_self(gpu_machine["self_check"], {"error": "ImportError: torch"})) == []


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package of eight files that was never imported."""
    package = tmp_path / "site" / "verl"
    package.mkdir(parents=True)
    for name in ("__init__", *(f"part{number}" for number in range(7))):
        (package / f"{name}.py").write_text("VALUE = 1\n")
    (package / "template.py").write_text("def {{name}}\n")
    monkeypatch.setattr(sys, "path", [str(package.parent)])
    monkeypatch.setattr(bytecode, "PACKAGES", ("verl",))
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    return package


def test_a_partly_imported_package_still_lacks_bytecode(installed):
    assert bytecode.folders_without() == {installed.parent: ["verl"]}
    environment = {**os.environ, "PYTHONPATH": str(installed.parent), "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, "-c", "import verl.part1"], env=environment, check=True)
    assert list(installed.rglob("*.pyc")) and bytecode.folders_without() == {installed.parent: ["verl"]}


def test_compiling_works_although_python_may_not_write_bytecode(installed, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert bytecode.start_compiling(bytecode.folders_without()).wait(60) is not None
    assert bytecode.folders_without() == {} and bytecode.start_compiling({}) is None


def test_a_read_only_folder_is_not_compiled(installed, monkeypatch):
    monkeypatch.setattr(bytecode.os, "access", lambda folder, how: False)
    missing = bytecode.folders_without()
    assert bytecode.start_compiling(missing) is None and list(missing) == [installed.parent]
    monkeypatch.setattr(sys, "pycache_prefix", str(installed.parents[1] / "elsewhere"))
    assert bytecode.start_compiling(missing).wait(60) is not None


def test_the_doctor_names_missing_bytecode_and_the_command(installed):
    (finding,) = doctor.check_bytecode()
    assert finding.state == doctor.NOTE and f"compileall -q -j 0 {installed.parent}" in finding.detail
    bytecode.start_compiling(bytecode.folders_without()).wait(60)
    assert [finding.state for finding in doctor.check_bytecode()] == [doctor.OK]
