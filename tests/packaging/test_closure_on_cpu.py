# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Entry points and ``_target_``s reach every module: the package has only what a driver, worker or command imports."""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from test_direction_on_cpu import NAME, ROOT, modules_of, names_in

TARGET = re.compile(rf"^\s*_target_: {NAME}\.([\w.]+)\s*$", re.MULTILINE)


def entry_points() -> list[str]:
    """Modules that ``pyproject.toml`` names: the command, verl's plugin and vLLM's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    return [value.partition(":")[0].removeprefix(f"{NAME}.") for group in groups for value in group.values()]


def targets(package: Path) -> list[str]:
    """Classes that the YAML files of the package name as ``_target_``."""
    return [target for file in sorted(package.rglob("*.yaml")) for target in TARGET.findall(file.read_text())]


def closure(package: Path, roots: Iterable[str]) -> set[str]:
    """Modules of ``package`` that the roots import, directly or not, also inside functions and by name.

    ``import_module(f"{package}.{name}")`` reaches the modules there whose name is a string in a file that is reached;
    in a file that lists a folder, by ``iter_modules`` or ``glob``, it reaches all of them.

    Args:
        package: folder of ``jetrl_verl``. roots: names below the package, of modules or of something in them.
    """
    modules = modules_of(package)
    reached, by_prefix, strings = set(), set(), set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name in reached:
            continue
        reached.add(name)
        todo.append(name.rpartition(".")[0])  # importing a module imports the package around it
        tree = ast.parse(modules[name].read_text())
        inside = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
        full = [NAME, *filter(None, inside.split("."))]
        names = {*names_in(tree, full), *imported_below_itself(tree, ".".join(full))}
        own = {imported.removeprefix(f"{NAME}.") for imported in names if imported.startswith(f"{NAME}.")}
        listing = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)} & {"iter_modules", "glob"}
        prefixes = {imported.removesuffix("*") for imported in own if imported.endswith("*")}
        todo += [imported for imported in own if not imported.endswith("*")]
        todo += [module for module in modules for prefix in prefixes if listing and module.startswith(prefix)]
        by_prefix |= prefixes
        strings |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        todo += [
            module
            for module in modules.keys() - reached
            for prefix in by_prefix
            if module.startswith(prefix) and module.removeprefix(prefix) in strings
        ]
    return reached


def imported_below_itself(tree: ast.AST, package: str) -> Iterator[str]:
    """``package.*`` for each f-string that begins with ``{__name__}.``, as ``import_module`` gets them; below the whole
    package for one that begins with ``{jetrl_verl.__name__}.``, as a program of ``python -m``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and len(node.values) > 1:
            first, second = node.values[:2]
            begins = ast.unparse(first.value) if isinstance(first, ast.FormattedValue) else ""
            below = {"__name__": package, f"{NAME}.__name__": NAME}.get(begins)
            if below and isinstance(second, ast.Constant) and second.value.startswith("."):
                yield f"{below}.{second.value[1:] or '*'}"


def test_entry_points_and_targets_reach_every_module():
    package = ROOT / NAME
    assert len(entry_points()) == 3
    unreached = modules_of(package).keys() - closure(package, [*entry_points(), *targets(package)])
    assert sorted(unreached) == []


def test_every_target_exists():
    modules, names = modules_of(ROOT / NAME), set(targets(ROOT / NAME))
    assert len(names) >= 3
    for name in names:
        module, _, target = name.rpartition(".")
        bound = {
            getattr(node, "name", None) or alias
            for node in ast.parse(modules[module].read_text()).body
            for alias in [None, *(alias.asname or alias.name for alias in getattr(node, "names", ()))]
        }
        assert target in bound, name


def test_a_module_that_nothing_imports_is_listed(tmp_path):
    files = {
        "__init__.py": "",
        "cli.py": "def run():\n    from jetrl_verl.tools import work\n    from importlib import import_module\n"
        "    import_module('jetrl_verl.sync')\n    return import_module(f'jetrl_verl.formats.{work.FORMAT}')",
        "tools/__init__.py": "",
        "tools/work.py": "FORMAT = 'int8'",
        "tools/forgotten.py": "from jetrl_verl.tools import work",
        "formats/__init__.py": "",
        "formats/int8.py": "",
        "formats/mx.py": "",
        "sync.py": "[import_module(f'jetrl_verl.families.{module}') for module in iter_modules(path)]",
        "families/__init__.py": "",
        "families/qwen.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    unreached = modules_of(tmp_path).keys() - closure(tmp_path, ["cli"])
    assert unreached == {"tools.forgotten", "formats.mx"}
