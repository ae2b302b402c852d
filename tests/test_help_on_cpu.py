# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`jetrl --help` of every command: help is rendered as markup, where a stray bracket is an error, not text."""

import pytest
import typer
from typer.testing import CliRunner

from jetrl_verl.cli import app


def words_of_commands(command, words=()):
    """Every command below ``command`` as the words that call it, groups included."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from words_of_commands(inner, (*words, name))


COMMANDS = list(words_of_commands(typer.main.get_command(app)))


def test_commands_of_both_levels_are_found():
    assert {(), ("demo",), ("bench",), ("bench", "gemm")} <= set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_rendered(words):
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.exception
    assert "Usage" in result.output
