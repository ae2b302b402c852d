# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks name what the package has."""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def path_of(module: str) -> Path | None:
    """The file of a module of the package."""
    base = ROOT.joinpath(*module.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def names_in(module: str) -> set[str]:
    """What a module has at its top level, submodules included."""
    file = path_of(module)
    found = {child.stem for child in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def absent(tree: ast.Module) -> Iterator[str]:
    """Names that a file imports from the package, or reaches through a module of it, and that are not there.

    A name that any function binds to something else is left out.
    """
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jetrl_verl"):
            for alias in node.names:
                if alias.name not in names_in(node.module):
                    yield f"{node.module}.{alias.name}"
                elif path_of(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module and node.value.id not in bound and node.attr not in names_in(module):
                yield f"{module}.{node.attr}"


def test_every_benchmark_names_what_the_package_has():
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert len(files) > 5
    assert {str(file): list(absent(ast.parse(file.read_text()))) for file in files} == {str(file): [] for file in files}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from jetrl_verl.train import shared_operations; shared_operations.spans", "train.shared_operations.spans"),
        ("from jetrl_verl.nn.linear import JetLinears", "nn.linear.JetLinears"),
        ("from jetrl_verl import kernels; kernels.rotary_embedding()", "kernels.rotary_embedding"),
        ("from jetrl_verl import absent", "absent"),
    ],
)
def test_a_name_that_is_gone_is_seen(line, name):
    assert list(absent(ast.parse(line))) == [f"jetrl_verl.{name}"]


def scripts() -> list[str]:
    files = sorted((ROOT / "benchmarks").glob("*.py"))
    return [file.stem for file in files if '__name__ == "__main__"' in file.read_text()]


@pytest.mark.parametrize("name", scripts())
def test_the_help_of_every_script_is_printed(name):
    words = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_kernels_measures_and_checks_every_operation(monkeypatch, tmp_path):
    """On a CPU with small shapes and without a clock."""
    from benchmarks import kernels as benchmark

    monkeypatch.setattr(benchmark, "microseconds", lambda calls, rounds: dict.fromkeys(calls, 1.0))
    monkeypatch.setattr(benchmark, "MODELS", {"qwen3-30b-a3b": {"qkv": (384, 256)}})
    monkeypatch.setattr(benchmark, "EXPERTS", {"qwen3-30b-a3b": {"down": (256, 128)}})
    monkeypatch.setattr(benchmark, "NUMBER_OF_EXPERTS", 8)
    options = argparse.Namespace(
        models=["qwen3-30b-a3b"], what=benchmark.WHAT, tokens=[256], batches=[1], rounds=1, out=tmp_path / "out.json"
    )
    assert benchmark.run(options, torch.device("cpu")) == 0
    records = json.loads(options.out.read_text())["records"]
    assert {record["what"] for record in records} >= {"fprop", "dgrad", "wgrad", "decode", "grouped", "relayout_128x1"}
    assert all("jetrl" in record["us"] and not record["wrong"] for record in records)

    wrong = benchmark.kernels.gemm_nt
    monkeypatch.setattr(benchmark.kernels, "gemm_nt", lambda *call, **options: wrong(*call, **options) * 1.01)
    assert benchmark.run(options, torch.device("cpu")) == 1, "a wrong result fails the benchmark"
