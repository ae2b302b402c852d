# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""List what of verl, vLLM, Ray and Hydra we replace, override or use by a private name, with a hash of each source.

``reach.json`` has one list for each supported version of a project. ``--update`` writes those of the installed
versions; a test compares them with the tree and with the installed packages. ``--against vllm=FOLDER`` compares other
sources with the nearest supported version: what an upgrade costs. Everything is read with ``ast`` and nothing is
imported, so releases for another platform can be read too. Kinds of use:

* *replaced*: a function that a patch replaces, or an attribute of an upstream module that we assign;
* *overridden*: a method or attribute of our class that its upstream base class has too;
* *inherited*: an attribute of ``self`` that comes from the upstream base class;
* *private*: a name with a leading underscore, or from a module with one, that is imported or reached from an import;
* *private* or *used*: named by the file's constant ``REACHES``, see :data:`TABLE`.

The source does not show the class of a value. A file that reads a private name of an upstream instance, or a public one
that may change, therefore lists it in ``REACHES``. :func:`unlisted` finds private names that are not listed.
"""

import argparse
import ast
import importlib.util
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jetrl_verl.patches.patch import installed_release  # noqa: E402
from jetrl_verl.patches.source import find, fingerprint, names_bound_by, statements  # noqa: E402
from jetrl_verl.sources import source_files  # noqa: E402

PROJECTS = ("verl", "vllm", "ray", "hydra")
STORED = Path(__file__).with_name("reach.json")
TABLE = "REACHES"
"""Constant of our files: places ``module:name`` that the file depends on through values."""

ELSEWHERE = {
    "_attn_implementation": "transformers.configuration_utils:PreTrainedConfig",
    "_backward_hooks": "torch.nn.modules.module:Module",
    "_backward_pre_hooks": "torch.nn.modules.module:Module",
    "_buffers": "torch.nn.modules.module:Module",
    "_contiguities": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_dim_group_names": "torch.distributed.device_mesh:DeviceMesh",
    "_forward_hooks": "torch.nn.modules.module:Module",
    "_forward_pre_hooks": "torch.nn.modules.module:Module",
    "_fqns": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_handle": "torch.distributed.fsdp._common_utils:_FSDPState",
    "_initializing": "importlib._bootstrap:ModuleSpec",
    "_is_padding_mask": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_local_tensor": "torch.distributed.tensor:DTensor",
    "_name_or_path": "transformers.configuration_utils:PreTrainedConfig",
    "_no_split_modules": "transformers.modeling_utils:PreTrainedModel",
    "_non_persistent_buffers_set": "torch.nn.modules.module:Module",
    "_numels": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_numels_with_padding": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_param_extensions": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_parameters": "torch.nn.modules.module:Module",
    "_schema": "torch._ops:OpOverload",
    "_shapes": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_sharded_size": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_shared_param_infos": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_spec": "torch.distributed.tensor:DTensor",
    "_version": "torch:Tensor",
}
"""Private names of instances outside :data:`PROJECTS`, and the class of each."""

_OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Public in spite of the underscore."""
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


class Sources:
    """Python packages in folders: finds modules and resolves names."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> "Module | None":
        """The module of that full name; None if there is no such file."""
        if name not in self._modules:
            top, _, rest = name.partition(".")
            module = None
            if top in self.folders:
                base = self.folders[top].joinpath(*rest.split(".")) if rest else self.folders[top]
                for file in (base.with_suffix(".py"), base / "__init__.py"):
                    if file.is_file():
                        module = Module(name, file)
                        break
            self._modules[name] = module
        return self._modules[name]

    def resolve(self, full_name: str, depth: int = 0) -> tuple["Module", str] | None:
        """Module that defines ``package.module.Class.attribute``, and the name there.

        Follows imports, also those of our functions that import a name and return it (``rollout/vllm_compat.py``).
        """
        parts = full_name.split(".")
        for cut in range(len(parts), 0, -1):
            module = self.module(".".join(parts[:cut]))
            if module is None:
                continue
            if cut == len(parts):
                return module, ""
            name, rest = parts[cut], parts[cut + 1 :]
            node = find(module.tree, name)
            if (imported := self._returned(module, node)) is not None:
                return self.resolve(".".join([imported, *rest]), depth + 1)
            if node is not None:
                return module, ".".join([name, *rest])
            if depth > 8:
                return None
            if name in module.imports:
                return self.resolve(".".join([module.imports[name], *rest]), depth + 1)
            for star in module.stars:
                resolved = self.resolve(".".join([star, name, *rest]), depth + 1)
                if resolved is not None:
                    return resolved
            return None
        return None

    def _returned(self, module: "Module", node: ast.stmt | None) -> str | None:
        """Full name of what one of our variables holds, if it is set to the result of such a function."""
        ours = module.name.partition(".")[0] not in PROJECTS
        if not (ours and isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and not node.value.args):
            return None
        dotted = _dotted(node.value.func)
        resolved = None if dotted is None else self.resolve(module.meaning(dotted))
        function = None if resolved is None else find(resolved[0].tree, resolved[1])
        returns = [inner for inner in ast.walk(function or ast.Pass()) if isinstance(inner, ast.Return)]
        name = _dotted(returns[0].value) if returns else None
        return None if name is None else resolved[0].imports.get(name)

    def ancestors(self, module: "Module", node: ast.ClassDef) -> list[tuple["Module", ast.ClassDef]]:
        """The class and its base classes, nearest first."""
        classes = [(module, node)]
        for base in node.bases:
            dotted = _dotted(base.value if isinstance(base, ast.Subscript) else base)
            resolved = None if dotted is None else self.resolve(module.meaning(dotted))
            definition = None if resolved is None else find(resolved[0].tree, resolved[1])
            if isinstance(definition, ast.ClassDef) and definition is not node:
                classes += [entry for entry in self.ancestors(resolved[0], definition) if entry not in classes]
        return classes

    def hash_of(self, place: str) -> str | None:
        """Hash of ``module:name``, also of an attribute set on ``self`` in its class. None if it is gone."""
        module_name, _, name = place.partition(":")
        module = self.module(module_name)
        if module is None:
            return None
        if not name:
            return fingerprint(module.tree)
        node = find(module.tree, name)
        if node is None and "." in name:
            holder, _, attribute = name.rpartition(".")
            holder_node = find(module.tree, holder)
            set_by = [] if holder_node is None else _set_on_self(holder_node).get(attribute, [])
            node = ast.Module(set_by, []) if set_by else None
        return None if node is None else fingerprint(node)


class Module:
    """One parsed file."""

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self.package = name if file.name == "__init__.py" else name.rpartition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.file.read_text())

    @cached_property
    def _imported(self) -> tuple[dict[str, str], list[str]]:
        names, stars = {}, []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                parts = self.package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
                base = base if node.level else node.module
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(base)
                    else:
                        names[alias.asname or alias.name] = f"{base}.{alias.name}"
        return names, stars

    @property
    def imports(self) -> dict[str, str]:
        """Name to full name, for imports anywhere in the file."""
        return self._imported[0]

    @property
    def stars(self) -> list[str]:
        return self._imported[1]

    @cached_property
    def table(self) -> tuple[str, ...]:
        """The file's :data:`TABLE`."""
        node = find(self.tree, TABLE)
        return () if node is None else ast.literal_eval(node.value)

    def meaning(self, dotted: str) -> str:
        """Full name of what ``a.b`` means in this file."""
        name, dot, rest = dotted.partition(".")
        return f"{self.imports.get(name, f'{self.name}.{name}')}{dot}{rest}"


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


@cache
def _set_on_self(node: ast.ClassDef) -> dict[str, list[ast.stmt]]:
    set_by: dict[str, list[ast.stmt]] = defaultdict(list)
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and _dotted(target.value) == "self":
                    set_by[target.attr].append(statement)
    return set_by


def _names_of_class(node: ast.ClassDef) -> set[str]:
    return {name for statement in statements(node) for name in names_bound_by(statement)} | set(_set_on_self(node))


def _private(full_name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in full_name.split("."))


def collect(folder: Path, sources: Sources) -> dict[str, list[str]]:
    """Each upstream place ``module:name`` that our files use, with its sorted uses ``kind file``.

    Args:
        folder: of our package. sources: packages of the other projects.
    """
    both = Sources({**sources.folders, folder.name: folder})
    uses: dict[str, set[str]] = defaultdict(set)

    def add(full_name: str, use: str) -> None:
        resolved = both.resolve(full_name)
        if resolved is not None and resolved[0].name.partition(".")[0] in PROJECTS:
            # Importing a module is no use; a name in it is.
            if resolved[1] and not resolved[1].endswith("__"):
                uses[f"{resolved[0].name}:{resolved[1]}"].add(use)
        elif full_name.partition(".")[0] in PROJECTS:
            uses[full_name].add(use)  # no Python source, e.g. a compiled module

    for where, module in files_of(folder, both):
        for place in module.table:
            _, _, name = place.partition(":")
            uses[place].add(f"{'private' if _private(name) else 'used'} {where}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                _collect_class(both, module, node, where, uses)
            elif isinstance(node, ast.Assign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    dotted = _dotted(target) if isinstance(target, ast.Attribute) else None
                    if dotted is not None and module.meaning(dotted).partition(".")[0] in PROJECTS:
                        add(module.meaning(dotted), f"replaced {where}")
            elif isinstance(node, ast.Attribute):
                dotted = _dotted(node)
                meaning = "" if dotted is None else module.meaning(dotted)
                if meaning.partition(".")[0] in PROJECTS and _private(meaning):
                    add(meaning, f"private {where}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
                # Target of a patch.
                target, _, _ = node.value.partition(":")
                is_target = where.startswith("patches/") and node.value not in module.table
                if is_target and target.partition(".")[0] in PROJECTS and both.module(target):
                    uses[node.value].add(f"replaced {where}")
        for full_name in module.imports.values():
            if full_name.partition(".")[0] in PROJECTS and _private(full_name):
                add(full_name, f"private {where}")
    return {place: sorted(uses_of_place) for place, uses_of_place in sorted(uses.items())}


def unlisted(folder: Path, listed_uses: Iterable[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Private names that our files read from values without an entry: name to its uses, ``file:line``.

    A name of ``self`` is ours if any of our classes defines it; a name of another value if a class of the same file
    does. Names in :data:`ELSEWHERE` belong to other projects.

    Args:
        folder: of our package. listed_uses: places and their uses, of all supported versions.
    """
    files = list(files_of(folder, Sources({folder.name: folder})))
    made = {where: _attributes_made_in(module.tree) for where, module in files}
    of_self = set().union(*made.values())
    entries = {
        (place.rpartition(":")[2].rpartition(".")[2], use.partition(" ")[2])
        for place, uses in listed_uses
        for use in uses
    }
    missing: dict[str, list[str]] = defaultdict(list)
    for where, module in files:
        for name, value, line in _private_names_asked_for(module):
            defined = of_self if _is_self(value) else made[where]
            if name not in defined and name not in ELSEWHERE and (name, where) not in entries:
                missing[name].append(f"{where}:{line}")
    return dict(missing)


def asked_for(folder: Path) -> set[str]:
    """All private names that our files read from values."""
    modules = (module for _, module in files_of(folder, Sources({folder.name: folder})))
    return {name for module in modules for name, _, _ in _private_names_asked_for(module)}


def files_of(folder: Path, sources: Sources) -> Iterator[tuple[str, Module]]:
    """Our files by path in the package."""
    for path in source_files(folder):
        name = f"{folder.name}.{path.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")
        yield path, sources.module(name)


def _private_names_asked_for(module: Module) -> Iterator[tuple[str, ast.expr, int]]:
    """Name, value and line of each ``value._name`` and ``getattr(value, "_name")`` whose value is not imported."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            name, value = node.attr, node.value
        elif isinstance(node, ast.Call) and _dotted(node.func) in _BY_NAME and isinstance(node.args[1], ast.Constant):
            name, value = node.args[1].value, node.args[0]
        else:
            continue
        root = (_dotted(value) or "").partition(".")[0]
        if _private(name) and name not in _OF_NAMED_TUPLES and root not in module.imports:
            yield name, value, node.lineno


def _is_self(value: ast.expr) -> bool:
    return _dotted(value.func if isinstance(value, ast.Call) else value) in ("self", "cls", "super")


def _attributes_made_in(tree: ast.Module) -> set[str]:
    """Names that a file's classes define or set on ``self``, and attributes of our functions (``_jetrl_``)."""
    made = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            made |= {name for statement in statements(node) for name in names_bound_by(statement)}
        elif isinstance(node, ast.Attribute):
            carried = _is_self(node.value) or node.attr.startswith("_jetrl_")
            made |= {node.attr} if carried and isinstance(node.ctx, ast.Store) else set()
    return made


def _collect_class(both: Sources, module: Module, node: ast.ClassDef, where: str, uses: dict[str, set[str]]) -> None:
    """Overridden and inherited attributes of one of our classes, including our mixins."""
    lineage = both.ancestors(module, node)
    own_classes = [entry for entry in lineage if entry[0].name.partition(".")[0] not in PROJECTS]
    upstream = [entry for entry in lineage if entry[0].name.partition(".")[0] in PROJECTS]
    own = {name for _, definition in own_classes for name in _names_of_class(definition)}
    for other, definition in own_classes if upstream else []:
        file = "/".join(other.file.parts[-2:]) if other is not module else where
        defined = _names_of_class(definition)
        inherited = set()
        for inner in ast.walk(definition):
            if isinstance(inner, ast.Attribute) and _dotted(inner.value) == "self" and inner.attr not in own:
                inherited.add(inner.attr)
        for kind, names in (("overridden", defined), ("inherited", inherited)):
            for name in names - {"__doc__", "__module__"}:
                holder = next((entry for entry in upstream if name in _names_of_class(entry[1])), None)
                if holder is not None:
                    path = _qualified(holder[0].tree, holder[1])
                    uses[f"{holder[0].name}:{path}.{name}"].add(f"{kind} {file}")


def _qualified(tree: ast.Module, node: ast.ClassDef) -> str:
    """``Outer.Inner`` of a class nested in a module's classes."""
    for outer in statements(tree):
        if outer is node:
            return node.name
        if isinstance(outer, ast.ClassDef) and any(inner is node for inner in ast.walk(outer)):
            return f"{outer.name}.{_qualified(outer, node)}"
    return node.name


def installed(projects: tuple[str, ...] = PROJECTS) -> dict[str, Path]:
    """Folders of the installed packages."""
    specs = {project: importlib.util.find_spec(project) for project in projects}
    return {project: Path(spec.origin).parent for project, spec in specs.items() if spec is not None}


def installed_version(project: str) -> str:
    """``project version``, a name of a list in ``reach.json``."""
    return f"{project} {installed_release({'hydra': 'hydra-core'}.get(project, project))}"


def listed(folder: Path, sources: Sources) -> dict[str, dict]:
    """Place to its uses and its hash. Places that only another version has are left out."""
    places = {
        place: {"uses": uses, "sha256": sources.hash_of(place)} for place, uses in collect(folder, sources).items()
    }
    return {place: entry for place, entry in places.items() if entry["sha256"] is not None}


def stored_lists() -> dict[str, dict[str, dict]]:
    """``reach.json``: ``project version`` to place to its uses and its hash."""
    return json.loads(STORED.read_text())


def joined(lists: dict[str, dict[str, dict]], names: Iterable[str]) -> dict[str, dict]:
    """Places of several lists, of one version of a project each."""
    return {place: entry for name in names for place, entry in lists[name].items()}


def nearest(lists: dict[str, dict[str, dict]], sources: Sources) -> list[str]:
    """Name of the list with the fewest differences, for each project among the sources."""

    def differences(name: str) -> int:
        return sum(state != "unchanged" for state in compare(lists[name], sources).values())

    versions = [[name for name in lists if name.partition(" ")[0] == project] for project in sources.folders]
    return [min(names, key=differences) for names in versions]


def compare(stored: dict[str, dict], sources: Sources) -> dict[str, str]:
    """``unchanged``, ``changed`` or ``gone`` for each stored place whose project is among the sources."""
    states = {}
    for place, entry in stored.items():
        if place.partition(".")[0] in sources.folders:
            now = sources.hash_of(place)
            states[place] = "gone" if now is None else "unchanged" if now == entry["sha256"] else "changed"
    return states


def report(stored: dict[str, dict], states: dict[str, str]) -> str:
    """Text: what changed or is gone, by our file; then the counts."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for place, state in states.items():
        for use in stored[place]["uses"] if state != "unchanged" else []:
            kind, _, file = use.partition(" ")
            by_file[file].append(f"  {state:9} {kind:10} {place}")
    lines = [line for file, places in sorted(by_file.items()) for line in (file, *sorted(places), "")]
    for project in PROJECTS:
        counts = Counter(state for place, state in states.items() if place.partition(".")[0] == project)
        if counts:
            states_counted = ", ".join(f"{counts[state]} {state}" for state in ("unchanged", "changed", "gone"))
            lines.append(f"{project}: {states_counted} of {counts.total()}")
    files = len(by_file)
    lines.append(f"{files} {'file' if files == 1 else 'files'} of ours to look at")
    return "\n".join(lines)


def main() -> None:
    """Command line; exit status 1 if something changed or is gone."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="write the installed versions' lists from the tree")
    parser.add_argument("--against", nargs="*", default=[], help="PROJECT=FOLDER of its package, of another version")
    options = parser.parse_args()
    lists = stored_lists()
    if options.update:
        places = listed(ROOT / "jetrl_verl", Sources(installed()))
        for project in installed():
            ours = {place: entry for place, entry in places.items() if place.partition(".")[0] == project}
            lists[installed_version(project)] = ours
        STORED.write_text(json.dumps(dict(sorted(lists.items())), indent=1) + "\n")
        print(f"{len(places)} places in {STORED.name}")
        return
    named = dict(word.split("=", 1) for word in options.against)
    sources = Sources({project: Path(folder) for project, folder in named.items()} or installed())
    names = nearest(lists, sources)
    places = joined(lists, names)
    states = compare(places, sources)
    print(f"compared with {', '.join(names)}", report(places, states), sep="\n\n")
    sys.exit(any(state != "unchanged" for state in states.values()))


if __name__ == "__main__":
    main()
