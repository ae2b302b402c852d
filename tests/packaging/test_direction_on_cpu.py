# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which package may import which: one table, every file of the package, no import cycle.

Imports count anywhere in a file, and so do strings that name a module (``"jetrl_verl.x.y:attribute"``)."""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from jetrl_verl.sources import source_files

ROOT = Path(__file__).resolve().parents[2]
NAME = "jetrl_verl"

# Usable and testable without verl, vLLM, Ray or Hydra.
NUMERICS = {"reference", "kernels", "formats", "models", "nn"}

# Package or top-level module -> the packages, or single modules of them, that it may import. Rows name earlier rows
# alone, so no two packages can import each other. `jetrl_verl` itself, which has the version, is open to all.
DIRECTION: dict[str, set[str]] = {
    "sources": set(),
    "inputs": set(),
    "reference": set(),
    "kernels": {"reference"},
    "formats": {"reference", "kernels"},
    "models": {"reference", "kernels", "formats"},
    "nn": {"reference", "kernels", "formats", "models"},
    "sync": NUMERICS,
    # Replaced functions of verl and vLLM import nothing else: `jetrl patch` writes them into a checkout.
    "patches": set(),
    "metrics": {*NUMERICS, "sync", "patches"},
    "config": {"sources", "inputs", "reference", "formats", "models", "patches"},
    "algorithms": {*NUMERICS, "metrics", "patches", "config"},
    "checkpoint": {*NUMERICS, "inputs", "sync", "patches", "config", "algorithms"},
    "train": {*NUMERICS, "sync", "metrics", "patches", "config", "algorithms", "checkpoint"},
    "rollout": {*NUMERICS, "sync", "metrics", "patches", "config"},
    # Classes that `_target_` names in YAML files.
    "targets": {*NUMERICS, "sync", "metrics", "patches", "config", "algorithms", "checkpoint", "train", "rollout"},
    "tools": {
        *(*NUMERICS, "sync", "metrics", "patches", "config", "algorithms", "checkpoint", "train", "rollout"),
        *("sources", "inputs"),
    },
    # Entry points of verl and the shell.
    "cpu_platform": {"patches"},
    "plugin": {"patches", "config", "sync", "train", "cpu_platform"},
    "cli": {"inputs", "config", "checkpoint", "patches", "tools"},
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
    "doctor": {"bytecode", "provenance"},
    "patch": set(),
    "memory": {"launch"},
    "diff": {"launch", "provenance"},
    "demo": {"process_tree", "report", "progress", "launch", "provenance", "diff"},
    "compare": {"process_tree", "report", "progress", "launch", "provenance", "rows", "demo"},
}

# What the numerics may not import; one module binds kernels of vLLM's wheel.
FRAMEWORKS = {"verl", "vllm", "ray", "hydra", "omegaconf", "transformers"}
BINDINGS = {"kernels.vllm_kernels": {"vllm"}}

# Modules that may import vLLM's internals, and what of vLLM every other module may import: the engine's own interface
# and the registration of plugins and quantization methods.
OF_VLLM = {"rollout.vllm_compat", "kernels.vllm_kernels"}
FREE_OF_VLLM = {"vllm", "vllm.LLM", "vllm.SamplingParams", "vllm.plugins.load_general_plugins"} | {
    f"vllm.model_executor.layers.quantization.{name}"
    for name in (
        "QUANTIZATION_METHODS",
        "QuantizationConfig",
        "get_quantization_config",
        "register_quantization_config",
    )
}


# --- the walker ------------------------------------------------------------------------------------------------------

MODULE = re.compile(rf"{NAME}((?:\.\w+)+)\.?(?::[\w.]*)?")
"""A string that names a module of the package; the group is the path below it."""


def modules_of(package: Path) -> dict[str, Path]:
    """Name without ``jetrl_verl.`` -> file, of every module."""
    names = ((file.removesuffix(".py").split("/"), path) for file, path in source_files(package).items())
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in names}


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
            if match := MODULE.fullmatch(node.value):
                yield NAME + match[1]
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
    """Imports of each module of ``package``: ``own``, modules of the package, and ``others``."""
    modules = modules_of(package)
    imports = {}
    for module, path in modules.items():
        inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = set(names_in(ast.parse(path.read_text()), [NAME, *filter(None, inside.split("."))]))
        own: set[str] = set()
        for name in (name.removeprefix(f"{NAME}.") for name in names if name.startswith(f"{NAME}.")):
            if name.endswith("*"):
                own |= {other for other in modules if other.startswith(name[:-1])}
                continue
            while name not in modules and name:
                name = name.rpartition(".")[0]
            own.add(name)
        others = {name for name in names if name.split(".")[0] != NAME}
        imports[module] = {"own": own - {module, ""}, "others": others}
    return imports


def cycles(edges: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """Sets of nodes that all reach each other."""
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
        for module, imported in imports.items()
        for other in imported
        if other.split(".")[0] != module.split(".")[0]
        and not any(f"{other}.".startswith(f"{allowed}.") for allowed in table[module.split(".")[0]])
    }


# --- the package -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imports() -> dict[str, dict[str, set[str]]]:
    return imports_of(ROOT / NAME)


@pytest.fixture(scope="module")
def own(imports) -> dict[str, set[str]]:
    return {module: names["own"] for module, names in imports.items()}


def packages_in(folder: Path) -> set[str]:
    """Names of the packages and modules directly in ``folder``."""
    return {module.split(".")[0] for module in modules_of(folder) if module}


def test_the_tables_list_every_package_and_have_no_cycle(own):
    assert own[""] == set(), "jetrl_verl/__init__.py is imported by all and must import no module of the package"
    for table, folder in ((DIRECTION, ROOT / NAME), (TOOLS, ROOT / NAME / "tools")):
        assert set(table) == packages_in(folder)
        for row, (name, allowed) in enumerate(table.items()):
            assert {entry.split(".")[0] for entry in allowed} <= set(list(table)[:row]), name


def test_packages_import_only_what_the_table_allows(own):
    assert against(DIRECTION, {module: imported for module, imported in own.items() if module}) == set()


def test_commands_import_only_what_their_table_allows(own):
    prefix = "tools."
    inside = {
        module.removeprefix(prefix): {name.removeprefix(prefix) for name in imported if name.startswith(prefix)}
        for module, imported in own.items()
        if module.startswith(prefix)
    }
    assert own["tools"] == set() and against(TOOLS, inside) == set()


def test_no_import_cycles(own):
    assert cycles(own) == set()


@pytest.mark.parametrize("package", sorted(NUMERICS))
def test_numerics_import_no_framework(imports, package):
    for module in (module for module in imports if module.split(".")[0] == package):
        others = {name.split(".")[0] for name in imports[module]["others"]}
        assert others & FRAMEWORKS <= BINDINGS.get(module, set()), module


def test_vllms_internals_are_imported_in_two_places_alone(imports):
    internal = {
        module: names
        for module, entry in imports.items()
        if (names := {name for name in entry["others"] if name.split(".")[0] == "vllm"} - FREE_OF_VLLM)
    }
    assert set(internal) == OF_VLLM, {module: names for module, names in internal.items() if module not in OF_VLLM}


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
        "from ..train.engine import Engine",
        "def late():\n    from jetrl_verl.train import engine",
        "if TYPE_CHECKING:\n    from jetrl_verl.train.engine import Engine",
        "importlib.import_module('..train.engine', __package__)",
        "PATHS = {'engine': 'jetrl_verl.train.engine:Engine'}",
        "import_module(f'..train.{name}', __name__)",
    ],
)
def test_the_walker_sees_every_form_of_import(tree, line):
    folder = tree({"__init__.py": "", "kernels/late.py": line, "train/__init__.py": "", "train/engine.py": ""})
    assert "train.engine" in imports_of(folder)["kernels.late"]["own"]


def test_the_walker_ignores_strings_that_are_no_import(tree):
    text = '"""See jetrl_verl.train.engine."""\nimport_module("os.path")\nWORDS = "jetrl_verl: failed", "jetrl_verl"\n'
    folder = tree({"__init__.py": "", "kernels/late.py": text, "train/engine.py": ""})
    assert imports_of(folder)["kernels.late"] == {"own": set(), "others": {"os.path"}}


def test_cycles_are_detected():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert cycles(edges) == {frozenset("abc"), frozenset("fg")}
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


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


def test_a_module_that_nothing_imports_is_listed(tree):
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
    package = tree(files)
    assert modules_of(package).keys() - closure(package, ["cli"]) == {"tools.forgotten", "formats.mx"}
