# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every operation has one file and one torch operator."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import operator_calls
import pytest
import torch

from jetrl_verl import kernels

FOLDER = Path(kernels.__file__).parent
FILES = sorted(path for path in FOLDER.rglob("*.py") if path.name not in ("operator.py", "quantizing.py"))
"""All but those that declare what other files give them."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def named(node: ast.AST, loops: dict[str, list[str]]) -> list[str]:
    return [node.value] if isinstance(node, ast.Constant) else loops[node.id]


def first_arguments(path: Path, *functions: str) -> set[str]:
    """Strings that the file gives as the first argument to calls of these functions, by name or by a loop over some."""
    loops = {
        node.target.id: [item.value for item in node.iter.elts]
        for node in ast.walk(tree(path))
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple) and isinstance(node.target, ast.Name)
    }
    return {name for call in calls_of(path, *functions) for name in named(call.args[0], loops)}


def calls_of(path: Path, *functions: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
            yield node


def operators(path: Path) -> set[str]:
    """Operators that the file registers."""
    both_forms = {name.value for call in calls_of(path, "Quantizing") for name in call.args[:2]}
    schemas = first_arguments(path, "operator", "dispatched")
    return both_forms | {schema.partition("(")[0] for schema in schemas}


def launches(path: Path) -> Iterator[ast.Call]:
    """Calls of kernels: Triton's ``kernel[grid](...)``, the library's, and vLLM's."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        of_triton = isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name) and node.args
        if of_triton or called.startswith(("native.operators().", "vllm_kernels.flash")):
            yield node


def test_an_operation_is_declared_by_one_file():
    files = defaultdict(list)
    for path in FILES:
        for name in operators(path):
            files[name].append(path.name)
    assert set(files) == set(kernels.OPERATIONS)
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
    assert all(hasattr(torch.ops.jetrl, name) for name in kernels.OPERATIONS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_operation_is_implemented_chosen_and_registered_in_one_file(path):
    own = operators(path)
    assert first_arguments(path, "implements") == own
    assert first_arguments(path, "lookup", "choose") <= own


def test_files_that_launch_kernels_register_operators():
    launching = [path for path in FILES if any(launches(path))]
    assert len(launching) > 20
    assert [path.name for path in launching if not operators(path)] == []


def test_every_triton_function_uses_the_projects_decorator():
    stock, wrapped = set(), 0
    for path in FILES:
        for node in ast.walk(tree(path)):
            for decorator in getattr(node, "decorator_list", ()):
                called = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
                stock |= {path.name} if called.endswith("triton.jit") else set()
                wrapped += called == "jit"
    assert stock == set() and wrapped > 100


CALLS = operator_calls.calls("cpu")


def test_every_operator_has_a_call():
    assert set(CALLS) == set(kernels.OPERATIONS)


@pytest.mark.parametrize("name", CALLS)
def test_fake_implementations_match_the_real_ones(name):
    """torch's schema check compares inputs with allclose, which FP8 tensors lack, so only this one of its checks."""
    run = getattr(torch.ops.jetrl, name).default
    torch.library.opcheck(run, CALLS[name], test_utils=("test_faketensor",))
