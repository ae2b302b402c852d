# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Find a function in Python source and fingerprint its syntax tree. Nothing is imported or run."""

import ast
import hashlib

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def find(tree: ast.AST, qualified_name: str) -> ast.stmt | None:
    """The statement that defines ``name`` or ``Class.name``, also under ``if`` or ``try``; None if there is none."""
    for name in qualified_name.split("."):
        tree = next((node for node in statements(tree) if name in names_bound_by(node)), None)
        if tree is None:
            return None
    return tree


def statements(tree: ast.AST) -> list[ast.stmt]:
    """Statements of a module or class, including those under ``if``, ``try`` and ``with``."""
    body = []
    for node in getattr(tree, "body", []):
        body.append(node)
        if isinstance(node, ast.If | ast.Try | ast.With):
            inner = [node, *getattr(node, "handlers", [])]
            inner += [ast.Module(part, []) for part in (getattr(node, "orelse", []), getattr(node, "finalbody", []))]
            body += [statement for part in inner for statement in statements(part)]
    return body


def names_bound_by(node: ast.stmt) -> set[str]:
    """Names that a definition or an assignment binds; an import binds none here."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def fingerprint(node: ast.AST) -> str:
    """SHA-256 of the syntax tree without docstrings, comments, layout and the definition's name.

    Independent of the Python version that parses the source.
    """
    return hashlib.sha256(_described(node, own_name=False).encode()).hexdigest()


def _described(value: object, own_name: bool = True) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_described, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = dict(ast.iter_fields(value))
    if isinstance(value, DEFINITIONS):
        if ast.get_docstring(value, clean=False) is not None:
            fields["body"] = value.body[1:]
        if not own_name:
            del fields["name"]
    # Newer Pythons have more fields; they are empty for source that older ones can parse.
    described = (f"{name}={_described(part)}" for name, part in fields.items() if part not in (None, []))
    return f"{type(value).__name__}({','.join(described)})"
