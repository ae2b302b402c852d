# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which package may import which: one table, every file of the package, no circle of files.

An import counts wherever it stands: at the top of a file, inside a function, relative, under ``TYPE_CHECKING``. So does
a string that names a module of ours (``"jetrl_verl.kernels.native"``, ``"jetrl_verl.x.y:attribute"``), since such
strings end in ``import_module``, in vLLM's arguments or in a command line. ``import_module`` of a name that is put
together at run time counts as an import of every module that the fixed part of the name leads to.

``_target_`` in a YAML file does not count: the file only says which class verl builds, Hydra resolves the name in the
worker that builds it, and nothing of ``config`` is loaded or tested with that class. A test below holds that every such
name exists.
"""

import ast
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NAME = "jetrl_verl"

# Package or top-level module -> the packages, or single modules of them, that it may import. Rows name earlier rows
# alone, so no two packages can import each other. `jetrl_verl` itself, which has the version, is open to all.
DIRECTION: dict[str, set[str]] = {
    "reference": set(),
    "kernels": {"reference"},
    "formats": {"reference", "kernels"},
    "models": {"reference", "kernels", "formats"},
    "nn": {"reference", "kernels", "formats", "models"},
    "sync": {"reference", "kernels", "formats", "models", "nn"},
    # Replaced functions of verl and vLLM need nothing of ours: `jetrl patch` writes them into a checkout.
    "patches": set(),
    "metrics": {"reference", "kernels", "formats", "models", "nn", "sync", "patches"},
    "config": {"reference", "formats", "models", "patches"},
    "algorithms": {"reference", "kernels", "formats", "models", "nn", "metrics", "patches", "config"},
    "checkpoint": {"reference", "kernels", "formats", "models", "nn", "sync", "patches", "config", "algorithms"},
    "train": {
        *("reference", "kernels", "formats", "models", "nn", "sync", "metrics", "patches", "config", "algorithms"),
        "checkpoint",
    },
    "rollout": {"reference", "kernels", "formats", "models", "nn", "sync", "metrics", "patches", "config"},
    # What `_target_` in YAML files names, by which verl enters the package.
    "targets": {
        *("reference", "kernels", "formats", "models", "nn", "sync", "metrics", "patches", "config", "algorithms"),
        *("checkpoint", "train", "rollout"),
    },
    "tools": {
        *("reference", "kernels", "formats", "models", "nn", "sync", "metrics", "patches", "config", "algorithms"),
        *("checkpoint", "train", "rollout"),
    },
    # What verl and the shell start.
    "cpu_platform": {"patches"},
    "plugin": {"patches", "config", "train", "cpu_platform"},
    "cli": {"config", "checkpoint", "patches", "tools"},
}

# The same inside tools/, whose packages are commands.
TOOLS: dict[str, set[str]] = {
    "process_tree": set(),
    "commit": set(),
    "bytecode": set(),
    "provenance": {"commit"},
    "rows": set(),
    "report": {"provenance"},
    "progress": {"report"},
    "launch": {"process_tree", "progress", "provenance"},
    "doctor": {"bytecode"},
    "patch": set(),
    "bench": {"provenance"},
    "advise": {"launch", "provenance"},
    "diff": {"launch", "provenance"},
    "demo": {"process_tree", "report", "progress", "launch", "provenance"},
    "compare": {"process_tree", "report", "progress", "launch", "provenance", "rows", "demo"},
}

# What must stay usable and testable without verl, vLLM, Ray or Hydra; one module binds kernels of vLLM's wheel.
WITHOUT_FRAMEWORKS = ("reference", "kernels", "formats", "models", "nn")
FRAMEWORKS = {"verl", "vllm", "ray", "hydra", "omegaconf", "transformers"}
BINDINGS = {"kernels.vllm_kernels": {"vllm"}}

# Imports against the tables, and circles, that are still to be removed. An entry that is no longer true fails.
REMAINING_IMPORTS: set[tuple[str, str]] = set()
REMAINING_CIRCLES: set[frozenset[str]] = set()


# --- the walker ------------------------------------------------------------------------------------------------------

OURS = re.compile(rf"{NAME}((?:\.\w+)+)\.?(?::[\w.]*)?")
"""A string that names a module of ours; the group is the path below the package."""


def modules_of(package: Path) -> dict[str, Path]:
    """Name without ``jetrl_verl.`` -> file, of every module, also below links to folders (``patches``)."""
    found = {}
    for folder, _, files in os.walk(package, followlinks=True):
        for file in files:
            if file.endswith(".py"):
                parts = (Path(folder) / file).relative_to(package).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = Path(folder) / file
    return found


def names_in(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Full names of what a file imports or names as a string; one that ends in ``.*`` stands for all that begin so.

    Args:
        tree: the parsed file. package: full name of the package that the file is in, in parts.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if found := OURS.fullmatch(node.value):
                yield NAME + found[1]
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield from _imported_by_name(node.args[0], package)


def _imported_by_name(argument: ast.expr, package: list[str]) -> Iterator[str]:
    """What ``import_module(argument)`` loads; nothing for a variable, whose strings count where they are written."""
    whole = isinstance(argument, ast.Constant)
    start = argument.values[0] if isinstance(argument, ast.JoinedStr) and argument.values else argument
    if isinstance(start, ast.Constant) and isinstance(start.value, str):
        name = start.value
        if level := len(name) - len(name.lstrip(".")):
            name = ".".join([*package[: len(package) - level + 1], name.lstrip(".")])
        yield name if whole else f"{name.rpartition('.')[0]}.*"


def imports_of(package: Path) -> dict[str, dict[str, set[str]]]:
    """Of each module of ``package``: ``ours``, the modules of the package that it imports, and ``others``."""
    modules = modules_of(package)
    found = {}
    for module, path in modules.items():
        inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = set(names_in(ast.parse(path.read_text()), [NAME, *filter(None, inside.split("."))]))
        ours: set[str] = set()
        for name in (name.removeprefix(f"{NAME}.") for name in names if name.startswith(f"{NAME}.")):
            if name.endswith("*"):
                ours |= {other for other in modules if other.startswith(name[:-1])}
                continue
            while name not in modules and name:
                name = name.rpartition(".")[0]
            ours.add(name)
        others = {name for name in names if name.split(".")[0] != NAME}
        found[module] = {"ours": ours - {module, ""}, "others": others}
    return found


def between_packages(imports: Mapping[str, Iterable[str]], packages: Iterable[str]) -> dict[str, set[str]]:
    """Package -> the packages that modules of it import, nested ones by their full names.

    A module belongs to the package that it lies in, and to no package around that one: ``config`` may import
    ``config.support``, and then ``config.support`` none of ``config``'s own modules.

    Args:
        imports: module -> modules. packages: of the modules, those that are packages.
    """
    packages = set(packages)

    def holder(module: str) -> str:
        return module if module in packages else module.rpartition(".")[0]

    found: dict[str, set[str]] = {}
    for module, others in imports.items():
        found.setdefault(holder(module), set()).update(map(holder, others))
    return {package: others - {package} for package, others in found.items()}


def circles(edges: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """Sets of more than one node of which each reaches each other."""
    reach = {}
    for node in edges:
        seen, todo = set(), list(edges[node])
        while todo:
            if (other := todo.pop()) not in seen:
                seen.add(other)
                todo += edges.get(other, ())
        reach[node] = seen
    return {
        frozenset({node, *(other for other in seen if node in reach.get(other, ()))})
        for node, seen in reach.items()
        if node in seen
    }


def against(table: Mapping[str, set[str]], imports: Mapping[str, Iterable[str]]) -> set[tuple[str, str]]:
    """Pairs of modules ``(importing, imported)`` that ``table`` does not allow; a row of the table may name modules."""
    return {
        (module, other)
        for module, found in imports.items()
        for other in found
        if other.split(".")[0] != module.split(".")[0]
        and not any(f"{other}.".startswith(f"{allowed}.") for allowed in table[module.split(".")[0]])
    }


# --- the package -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imports() -> dict[str, dict[str, set[str]]]:
    return imports_of(ROOT / NAME)


@pytest.fixture(scope="module")
def ours(imports) -> dict[str, set[str]]:
    return {module: found["ours"] for module, found in imports.items()}


def packages_in(folder: Path) -> set[str]:
    """Names of the packages and modules directly in ``folder``."""
    return {module.split(".")[0] for module in modules_of(folder) if module}


def test_the_tables_know_every_package_and_point_one_way(ours):
    assert ours[""] == set(), "jetrl_verl/__init__.py is imported by all and must import nothing of ours"
    for table, folder in ((DIRECTION, ROOT / NAME), (TOOLS, ROOT / NAME / "tools")):
        assert set(table) == packages_in(folder)
        for row, (name, allowed) in enumerate(table.items()):
            assert {entry.split(".")[0] for entry in allowed} <= set(list(table)[:row]), name


def test_packages_import_only_what_the_table_allows(ours):
    assert against(DIRECTION, {module: found for module, found in ours.items() if module}) == REMAINING_IMPORTS


def test_commands_import_only_what_their_table_allows(ours):
    prefix = "tools."
    inside = {
        module.removeprefix(prefix): {name.removeprefix(prefix) for name in found if name.startswith(prefix)}
        for module, found in ours.items()
        if module.startswith(prefix)
    }
    assert ours["tools"] == set() and against(TOOLS, inside) == set()


def test_no_files_import_each_other_in_a_circle(ours):
    assert circles(ours) == REMAINING_CIRCLES


def test_no_packages_import_each_other_at_any_depth(ours):
    packages = {name for name, path in modules_of(ROOT / NAME).items() if path.name == "__init__.py"}
    assert {"config.support", "models.families", "kernels.device", "tools.bench"} <= packages
    assert circles(between_packages(ours, packages)) == set()


@pytest.mark.parametrize("package", WITHOUT_FRAMEWORKS)
def test_what_computes_imports_no_framework(imports, package):
    for module in (module for module in imports if module.split(".")[0] == package):
        found = {name.split(".")[0] for name in imports[module]["others"]}
        assert found & FRAMEWORKS <= BINDINGS.get(module, set()), module


def test_every_target_in_a_yaml_file_exists():
    def targets(node: object) -> Iterator[str]:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ()):
            if key == "_target_" and str(value).startswith(f"{NAME}."):
                yield value
            yield from targets(value)

    files = sorted((ROOT / NAME).rglob("*.yaml"))
    found = {target for file in files for target in targets(yaml.safe_load(file.read_text()))}
    assert found
    for target in found:
        module, _, name = target.rpartition(".")
        assert hasattr(importlib.import_module(module), name), target


# --- the walker, tested ----------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """A function that writes files, name -> text, below a package ``jetrl_verl`` and returns its folder."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            file = tmp_path / NAME / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / NAME

    return write


@pytest.mark.parametrize(
    "line",
    [
        "import jetrl_verl.train.engine",
        "from jetrl_verl.train import engine",
        "from jetrl_verl.train.engine import Engine as E",
        "from ..train import engine",
        "from ..train.engine import Engine",
        "def late():\n    from jetrl_verl.train import engine",
        "if TYPE_CHECKING:\n    from jetrl_verl.train.engine import Engine",
        "import_module('jetrl_verl.train.engine')",
        "importlib.import_module('..train.engine', __package__)",
        "PATHS = {'engine': 'jetrl_verl.train.engine:Engine'}",
        "TARGET = 'jetrl_verl.train.engine.Engine'",
        "import_module(f'jetrl_verl.train.{name}')",
        "import_module(f'..train.{name}', __name__)",
    ],
)
def test_the_walker_sees_every_form_of_import(tree, line):
    folder = tree({"__init__.py": "", "kernels/late.py": line, "train/__init__.py": "", "train/engine.py": ""})
    assert "train.engine" in imports_of(folder)["kernels.late"]["ours"]


def test_the_walker_leaves_out_what_is_no_import(tree):
    text = '"""See jetrl_verl.train.engine for why."""\nimport os.path\nWORDS = "jetrl_verl: failed", "jetrl_verl"\n'
    folder = tree({"__init__.py": "", "kernels/late.py": text, "train/engine.py": ""})
    assert imports_of(folder)["kernels.late"] == {"ours": set(), "others": {"os.path"}}


def test_the_walker_sees_frameworks_that_are_imported_by_name(tree):
    folder = tree({"__init__.py": "", "kernels/late.py": "import_module('vllm.attention')\nfrom verl import utils"})
    assert imports_of(folder)["kernels.late"]["others"] == {"vllm.attention", "verl.utils"}


def test_the_walker_follows_a_link_to_a_folder(tree, tmp_path):
    folder = tree({"__init__.py": "", "train/engine.py": ""})
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "fix.py").write_text("from jetrl_verl.train import engine\n")
    (folder / "patches").symlink_to("../patches", target_is_directory=True)
    assert imports_of(folder)["patches.fix"]["ours"] == {"train.engine"}


def test_circles_are_found_through_any_number_of_files():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert circles(edges) == {frozenset("abc"), frozenset("fg")}
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


def test_nested_packages_that_import_each_other_are_found():
    edges = {"a.low": set(), "a.top": {"a.in.x"}, "a.in.x": {"a.low"}, "a.in": set(), "b": {"a.top"}, "a": set()}
    packages = ("a", "a.in")
    assert circles(between_packages(edges, packages)) == {frozenset({"a", "a.in"})}
    edges["a.in.x"] = {"a.in"}
    assert between_packages(edges, packages) == {"a": {"a.in"}, "a.in": set(), "": {"a"}}
    assert circles(between_packages(edges, packages)) == set()


def test_a_row_may_allow_a_package_or_one_of_its_modules():
    table = {"low": set(), "high": {"low.leaf"}, "top": {"low", "high"}}
    imports = {"high.a": {"low.leaf", "low.other", "high.b"}, "top": {"low.other", "high.a"}, "low.leaf": {"top"}}
    assert against(table, imports) == {("high.a", "low.other"), ("low.leaf", "top")}
