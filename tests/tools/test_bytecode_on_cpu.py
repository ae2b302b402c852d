# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Missing bytecode is detected, also in a partly imported package, and can be compiled."""

import os
import subprocess
import sys

import pytest

from jetrl_verl.tools import bytecode
from jetrl_verl.tools.doctor import diagnosis as doctor


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
