# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A patch: a function of verl or vLLM and its replacement, as data.

* :meth:`Patch.apply` puts the replacement into the imported module, at run time.
* :meth:`Patch.written_into` writes the replacement's source into a file, for ``jetrl patch --into DIR``.

Both first compare the function's source with the pinned one. A replacement whose first parameter is called ``stock``
receives the function that it replaces; in a checkout that function is renamed to ``_stock_<name>``. Constants,
functions, classes and imports that the replacement uses go with it. Standard library only.
"""

import ast
import builtins
import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from jetrl_verl.patches.source import find, fingerprint, names_bound_by

STOCK, PATCHED, CHANGED, GONE = "stock", "patched", "changed", "gone"
"""States of a function: as pinned; the replacement; neither; missing."""

VERSIONS = {"verl": ("0.9.1",), "vllm": ("0.24.0", "0.29.0")}
"""Versions whose functions are known by hash."""

_MARK = "_jetrl_patch"


def installed_release(project: str) -> str | None:
    """Version of an installed project without the name of its build, ``0.24.0`` of ``0.24.0+cpu``; None without it."""
    try:
        return re.split(r"[^\d.]", metadata.version(project))[0]
    except metadata.PackageNotFoundError:
        return None


class PatchError(RuntimeError):
    """A required patch does not fit the installed source, or a checkout."""


@dataclass(frozen=True)
class Patch:
    """One function of another project and its replacement.

    Attributes:
        replaces: ``module:function`` or ``module:Class.method``.
        sha256: version of the project (:data:`VERSIONS`) to the hash of its source, see :func:`source.fingerprint`. A
            version that is left out needs no patch there, or another one.
        by: the replacement, a function at the top of a module of ``patches/``.
        symptom: what happens without the patch. upstream: status there. until: when the patch can go.
        needed: whether a run stops if the patch does not fit, because results or start depend on it; otherwise it
            continues with a warning, slower or with fewer metrics.
    """

    replaces: str
    sha256: dict[str, str]
    by: Callable[..., Any]
    symptom: str
    upstream: str
    until: str
    needed: bool

    @property
    def module(self) -> str:
        """Full name of the module that defines the function."""
        return self.replaces.partition(":")[0]

    @property
    def function(self) -> str:
        """``function`` or ``Class.method``."""
        return self.replaces.partition(":")[2]

    @property
    def project(self) -> str:
        """``verl`` or ``vllm``."""
        return self.module.partition(".")[0]

    @property
    def pinned(self) -> str:
        """The project and its versions, in words."""
        return f"{self.project} {' or '.join(self.sha256)}"

    @property
    def applies(self) -> bool:
        """Whether the patch is for the installed version. A version that is not known is compared with each patch."""
        release = installed_release(self.project)
        return release in self.sha256 or release not in VERSIONS[self.project]

    @property
    def file(self) -> str:
        """File in this tree that defines the replacement."""
        return f"patches/{self.by.__module__.rpartition('.')[2]}.py"

    @property
    def path(self) -> str:
        """File of the module, relative to the folder of the project's package."""
        return f"{self.module.replace('.', '/')}.py"

    # --- at run time -------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Put the replacement into the imported module, and wherever the function was imported from it by name.

        Idempotent. Nothing is done for a version that the patch is not for, or if the function is the replacement
        already, written by ``jetrl patch``.

        Raises:
            PatchError: the source is neither and the patch is ``needed``; otherwise warns.
        """
        if not self.applies:
            return
        module = importlib.import_module(self.module)
        holder, name = self._place(module)
        function = None if holder is None else inspect.getattr_static(holder, name, None)
        if getattr(function, _MARK, None) != self.replaces:
            state = GONE if function is None else self.state_in(Path(module.__file__).read_text())
            if state == PATCHED:
                return
            if state != STOCK:
                return self._refuse(self.mismatch(state))
            function = self._made_from(function)
            setattr(holder, name, function)
            for helper in self._text.names:
                if not helper.startswith("_"):
                    # As in a checkout: code that registers hooks looks there.
                    vars(module).setdefault(helper, getattr(sys.modules[self.by.__module__], helper))
        if holder is module:
            self._replace_imports(name, function)

    def _place(self, module: ModuleType) -> tuple[Any, str]:
        holder, _, name = self.function.rpartition(".")
        return (getattr(module, holder, None) if holder else module), name

    def _made_from(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        new = self.by
        if self.wraps and inspect.iscoroutinefunction(stock):
            # Ray checks whether an actor's method is a coroutine before it calls it.
            @functools.wraps(stock)
            async def new(*args: Any, **kwargs: Any) -> Any:
                return await self.by(stock, *args, **kwargs)

        elif self.wraps:

            @functools.wraps(stock)
            def new(*args: Any, **kwargs: Any) -> Any:
                return self.by(stock, *args, **kwargs)

        setattr(new, _MARK, self.replaces)
        new._jetrl_stock = stock
        return new

    def _replace_imports(self, name: str, new: Callable[..., Any]) -> None:
        for module in list(sys.modules.values()):
            inside = getattr(module, "__name__", "").partition(".")[0] == self.project
            if inside and vars(module).get(name) is new._jetrl_stock:
                setattr(module, name, new)

    def mismatch(self, state: str) -> str:
        """One sentence about a function that is ``changed`` or ``gone``."""
        what = "is missing" if state == GONE else f"is neither that of {self.pinned} nor our replacement"
        return (
            f"{self.replaces} of the installed {self.project} {what}, so {self.file} is not applied: {self.symptom}. "
            f"Install {self.pinned}."
        )

    def _refuse(self, sentence: str) -> None:
        if self.needed:
            raise PatchError(sentence)
        warnings.warn(f"jetrl_verl: {sentence}", stacklevel=3)

    # --- in source ---------------------------------------------------------------------------------------------------

    @property
    def wraps(self) -> bool:
        """Whether the replacement calls the function that it replaces."""
        return next(iter(inspect.signature(self.by).parameters), None) == "stock"

    def state_in(self, text: str) -> str:
        """``STOCK``, ``PATCHED``, ``CHANGED`` or ``GONE``, of the module's source ``text``."""
        tree = ast.parse(text)
        function = find(tree, self.function)
        if function is None:
            return GONE
        if fingerprint(function) in self.sha256.values():
            return STOCK
        stock = find(tree, self._stock_name) if self.wraps else None
        wanted = {self.function: self._text.function} | self._text.helpers
        same = all(_is_same(find(tree, name), source) for name, source in wanted.items())
        kept = not self.wraps or (stock is not None and fingerprint(stock) in self.sha256.values())
        return PATCHED if same and kept else CHANGED

    def written_into(self, text: str) -> str:
        """The module's source with the replacement in it; unchanged if it is there already.

        Raises:
            PatchError: the source is not the pinned one, or defines a name that the replacement adds.
        """
        state = self.state_in(text)
        if state == PATCHED:
            return text
        if state != STOCK:
            raise PatchError(self.mismatch(state).replace("installed ", ""))
        tree = ast.parse(text)
        lines = text.splitlines(keepends=True)
        target = find(tree, self.function)
        # A wrapped function keeps its decorators under its new name.
        if target.decorator_list and not self.wraps:
            raise PatchError(f"{self.replaces} has decorators, which `jetrl patch` does not support.")
        method = "." in self.function
        replacement = _indented(self._text.function, target.col_offset)
        # From the end of the file to its beginning, so that line numbers stay.
        if self.wraps:
            lines.insert(target.end_lineno, ("\n" if method else "\n\n") + replacement)
            head = lines[target.lineno - 1]
            lines[target.lineno - 1] = head.replace(f"def {target.name}", f"def _stock_{target.name}", 1)
        else:
            lines[target.lineno - 1 : target.end_lineno] = [replacement]
        new = [source for name, source in self._text.helpers.items() if not self._is_there(tree, name, source)]
        if new:
            holder = next(node for node in tree.body if node.lineno <= target.lineno <= node.end_lineno)
            first = min([holder.lineno, *(decorator.lineno for decorator in getattr(holder, "decorator_list", []))])
            lines.insert(first - 1, "".join(f"{source}\n\n" for source in new))
        imports = self._imports_missing_in(tree)
        if imports:
            header = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            lines.insert(header[-1].end_lineno if header else 0, "".join(f"{line}\n" for line in imports))
        return "".join(lines)

    @property
    def _stock_name(self) -> str:
        holder, dot, name = self.function.rpartition(".")
        return f"{holder}{dot}_stock_{name}"

    @functools.cached_property
    def _text(self) -> "_Text":
        return _Text.of(self)

    def _is_there(self, tree: ast.Module, name: str, source: str) -> bool:
        there = find(tree, name)
        if there is not None and not _is_same(there, source):
            raise PatchError(f"{self.path} defines {name} already, which {self.file} adds; rename it there.")
        return there is not None

    def _imports_missing_in(self, tree: ast.Module) -> list[str]:
        there = dict(_imports(tree))
        for name, statement in self._text.imports.items():
            if there.get(name, statement) != statement:
                raise PatchError(f"{self.path} says `{there[name]}` and {self.file} `{statement}`; use one of the two.")
        return sorted(statement for name, statement in self._text.imports.items() if name not in there)


@dataclass(frozen=True)
class _Text:
    """A replacement as written into a checkout: its source and what it uses of its module."""

    function: str
    helpers: dict[str, str]
    imports: dict[str, str]
    names: tuple[str, ...]

    @classmethod
    def of(cls, patch: Patch) -> "_Text":
        module = sys.modules[patch.by.__module__]
        text = Path(module.__file__).read_text()
        tree = ast.parse(text)
        node = find(tree, patch.by.__name__)
        available = dict(_imports(tree))
        helpers: dict[str, str] = {}
        imports: dict[str, str] = {}

        def collect(part: ast.AST) -> None:
            local = names_bound_by(part) | {inner.arg for inner in ast.walk(part) if isinstance(inner, ast.arg)}
            within = (inner for inner in ast.walk(part) if isinstance(inner, ast.Import | ast.ImportFrom))
            local |= {alias.asname or alias.name for statement in within for alias in statement.names}
            for inner in ast.walk(part):
                if not isinstance(inner, ast.Name) or inner.id in local | helpers.keys() or hasattr(builtins, inner.id):
                    continue
                if inner.id in available:
                    imports[inner.id] = available[inner.id]
                elif (definition := find(tree, inner.id)) is not None:
                    collect(definition)  # its dependencies come first
                    helpers.setdefault(inner.id, _with_docstring(tree, definition, text))

        collect(node)
        return cls(_renamed(patch, node, text), helpers, imports, tuple(helpers))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and statement of each import at the top of a module."""
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else []:
            start = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            renamed = f" as {alias.asname}" if alias.asname else ""
            # `import torch.distributed` binds torch.
            name = alias.name if start or renamed else alias.name.partition(".")[0]
            yield alias.asname or name, f"{start}import {name}{renamed}"


def _with_docstring(tree: ast.Module, node: ast.stmt, text: str) -> str:
    """Source of a top-level definition, with the docstring below an assignment."""
    following = next((other for other in tree.body if other.lineno > node.lineno), None)
    described = (
        isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    )
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    last = following.end_lineno if described else node.end_lineno
    return "\n".join(text.splitlines()[first - 1 : last]) + "\n"


def _renamed(patch: Patch, node: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> str:
    """The replacement's source under the function's name, calling the renamed function for ``stock``."""
    holder, _, name = patch.function.rpartition(".")
    stock = patch._stock_name
    lines = text.splitlines()
    keywords = "async def " if isinstance(node, ast.AsyncFunctionDef) else "def "
    edits = [(node.lineno, node.col_offset + len(keywords), len(node.name), name)]
    for inner in ast.walk(node):
        if patch.wraps and isinstance(inner, ast.Name) and inner.id == "stock":
            edits.append((inner.lineno, inner.col_offset, len("stock"), stock))
    if patch.wraps:
        arguments = node.args.args
        first = arguments[0]
        end = arguments[1].col_offset if arguments[1:] else first.end_col_offset
        edits.append((first.lineno, first.col_offset, end - first.col_offset, ""))
    for line, column, length, new in sorted(edits, reverse=True):
        lines[line - 1] = lines[line - 1][:column] + new + lines[line - 1][column + length :]
    return "\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n"


def _indented(text: str, columns: int) -> str:
    return "".join(" " * columns + line if line.strip() else line for line in text.splitlines(keepends=True))


def _is_same(node: ast.stmt | None, source: str) -> bool:
    return node is not None and fingerprint(node) == fingerprint(ast.parse(source).body[0])
