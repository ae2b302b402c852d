# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that only a GPU runs: they name what the package has, and their parts that a CPU can run do."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model

from jetrl_verl.tools.bench.timeline import Kernel

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
    assert len(files) > 20
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


def test_the_gated_mlp_runs_in_one_step_and_module_by_module():
    from benchmarks import gated_mlp_on_gpu as benchmark

    torch.manual_seed(0)
    weights = [0.05 * torch.randn(n, k, dtype=torch.bfloat16) for n, k in ((256, 128), (256, 128), (128, 256))]
    x, dy = torch.randn(2, 9, 128, dtype=torch.bfloat16)
    results = {}
    for name, together in (("bf16", None), ("one by one", False), ("one step", True)):
        mlp = benchmark.make(name != "bf16", weights)
        results[name] = benchmark.step(mlp, x.clone().requires_grad_(), dy, together)
    assert all(torch.equal(a, b) for a, b in zip(results["one by one"], results["one step"], strict=True))
    for found, expected in zip(results["one step"], results["bf16"], strict=True):
        assert 0 < (found - expected).float().norm() < 0.1 * expected.float().norm()


def test_vllms_kernels_stand_in_for_the_models_own():
    """Attention and the head need a GPU."""
    from benchmarks.mismatch import vllm_operations

    model = tiny_model("qwen3").to(torch.bfloat16)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        stock = model(ids, use_cache=False).logits
        for name in ("norm", "silu", "rotary"):
            with vllm_operations(model, {name}):
                found = model(ids, use_cache=False).logits
            assert (found - stock).float().norm() < 0.02 * stock.float().norm(), name
        assert torch.equal(model(ids, use_cache=False).logits, stock), "they were put back"


@pytest.mark.parametrize("sample", ["sample", "_sample"])
def test_kernels_behind_the_last_layer_are_those_between_logits_and_tokens(sample, monkeypatch):
    """Of both model runners; a GPU that runs each call as one kernel of 2 us."""
    from benchmarks import behind_last_layer as benchmark

    ran: list[str] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: ran.append("spin_kernel"))
    monkeypatch.setattr(benchmark, "recorded", lambda work: (work(), kernels_of(ran))[1])
    model = SimpleNamespace(compute_logits=lambda: ran.append("head"))
    runner = SimpleNamespace(model=model)

    def drawn():
        if sample == "sample":  # this runner computes logits inside
            model.compute_logits()
        ran.append("draw")

    setattr(runner, sample, drawn)
    stock = model.compute_logits, drawn

    def generate():
        for _ in range(9):
            ran.append("layers")
            if sample == "_sample":
                model.compute_logits()
            getattr(runner, sample)()

    found = benchmark.kernels_behind(runner, generate, steps=4)
    assert found["shares"] == [{"name": name, "count": 1, "us": 2} for name in ("head", "draw")]
    assert found["layers"] == [{"name": "layers", "count": 1, "us": 2}]
    assert found["span_us"] == 4 and found["step_us"] == 10
    assert (model.compute_logits, getattr(runner, sample)) == stock


def kernels_of(names: list[str]) -> list[Kernel]:
    return [Kernel(name, 2 * place, 2 * place + 2) for place, name in enumerate(names)]
