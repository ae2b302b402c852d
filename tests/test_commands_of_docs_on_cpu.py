# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every command on a page exists and its arguments parse; none is run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from jetrl_verl.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [*map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md")), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.md")]
ELSEWHERE = ("examples/", "verl.", "tests/faults")
"""Of a verl checkout; a folder of tests."""

BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`((?:jetrl|python3? -m|python3? [\w/]+\.py|make|bash|benchmarks/\w+\.(?:sh|py)) [^`]*)`")


def commands(text: str) -> Iterator[str]:
    """Commands of a page, without comments."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.sub(r"(^|\s)#.*", "", line).strip():
                yield command
    yield from (" ".join(command.split()) for command in INLINE.findall(BLOCK.sub("", text)))


SHOWN = sorted({(path.relative_to(ROOT).as_posix(), line) for path in PAGES for line in commands(path.read_text())})


def words_of(line: str) -> list[str]:
    """Words of a command without leading variable assignments and ``...``."""
    # <placeholder> is no redirection; {a,b} means its first alternative.
    line = re.sub(r"<[^>]*>", "PLACEHOLDER", re.sub(r"\{([^,}]*),[^}]*\}", r"\1", line)).replace("[part ...]", "")
    words = [word for word in shlex.split(line) if word != "..."]
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    return words


def check(line: str) -> None:
    """Raise ``AssertionError`` unless the command exists and accepts its arguments."""
    first, *rest = words_of(line)
    if first == "jetrl":
        parse(rest)
    elif first == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest[0] in targets, f"the Makefile has no target {rest[0]}"
    elif first in ("python", "python3", "bash") or first.startswith("benchmarks/"):
        if first.startswith("python") and rest[0] == "-m":
            module, rest = rest[1].replace("PLACEHOLDER", "gsm8k"), rest[2:]
            if module == "pytest" or module.startswith(ELSEWHERE):
                return
            candidates = [ROOT / f"{module.replace('.', '/')}{end}" for end in (".py", "/__main__.py")]
        else:
            name, rest = (rest[0], rest[1:]) if not first.startswith("benchmarks/") else (first, rest)
            if name.startswith(ELSEWHERE[0]):
                return
            candidates = [ROOT / name]
        files = [file for file in candidates if file.is_file()]
        assert files, f"there is no {candidates[0].relative_to(ROOT)}"
        accepts(files[0], rest)


def accepts(file: Path, words: list[str]) -> None:
    """Raise unless the source of a program, or of the module that a script starts, names each option."""
    text = file.read_text()
    for module in re.findall(r"-m (benchmarks\.\w+)", text) if file.suffix == ".sh" else ():
        text += (ROOT / f"{module.replace('.', '/')}.py").read_text()
    # prepare_data.py of a recipe takes its arguments from the common module.
    text += (ROOT / "recipes/common/prepare.py").read_text() if file.name == "prepare_data.py" else ""
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert option == "--help" or f'"{option}"' in text, f"{file.relative_to(ROOT)} has no {option}"


def parse(words: list[str]) -> None:
    """Raise ``AssertionError`` if `jetrl` does not accept the arguments; files need not exist."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words:
            return
        assert words[0] in command.commands, f"there is no jetrl {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    # A mention of the command alone has no arguments.
    if not words and any(parameter.required for parameter in command.params):
        return
    try:
        command.make_context(command.name, list(words))
    except typer.BadParameter as error:
        assert "does not exist" in str(error), str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from None


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=lambda value: value)
def test_command_of_a_page_exists_and_parses(page, line):
    check(line)


def test_commands_of_each_kind_are_found():
    assert {"jetrl", "make", "bash", "python3", "python"} <= {words_of(line)[0] for _, line in SHOWN}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("jetrl nothing", "there is no jetrl nothing"),
        ("jetrl memory --nothing 1", "No such option|no such option"),
        ("make nothing", "no target nothing"),
        ("python -m benchmarks.nothing", "there is no benchmarks/nothing.py"),
        ("python3 -m benchmarks.steps --nothing", "has no --nothing"),
        ("bash recipes/nothing.sh", "there is no recipes/nothing.sh"),
    ],
)
def test_missing_command_is_reported(line, message):
    with pytest.raises(AssertionError, match=message):
        check(line)
