# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every command that a page shows exists, and its arguments parse. None runs."""

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
    """What a page shows as a command, without its comment."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.sub(r"(^|\s)#.*", "", line).strip():
                yield command
    yield from (" ".join(found.split()) for found in INLINE.findall(BLOCK.sub("", text)))


SHOWN = sorted({(path.relative_to(ROOT).as_posix(), line) for path in PAGES for line in commands(path.read_text())})


def words_of(line: str) -> list[str]:
    """Words of a command behind the variables that are set for it; what stands for more of them left out."""
    # A placeholder is no redirection; of a word in braces the first alternative is meant.
    line = re.sub(r"<[^>]*>", "PLACEHOLDER", re.sub(r"\{([^,}]*),[^}]*\}", r"\1", line)).replace("[part ...]", "")
    words = [word for word in shlex.split(line) if word != "..."]
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    return words


def check(line: str) -> None:
    """Raise unless the command is there and accepts its words."""
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
            found = [ROOT / f"{module.replace('.', '/')}{end}" for end in (".py", "/__main__.py")]
        else:
            name, rest = (rest[0], rest[1:]) if not first.startswith("benchmarks/") else (first, rest)
            if name.startswith(ELSEWHERE[0]):
                return
            found = [ROOT / name]
        files = [file for file in found if file.is_file()]
        assert files, f"there is no {found[0].relative_to(ROOT)}"
        accepts(files[0], rest)


def accepts(file: Path, words: list[str]) -> None:
    """Raise unless a program's source, or that of the module which a script starts, names each option."""
    text = file.read_text()
    for module in re.findall(r"-m (benchmarks\.\w+)", text) if file.suffix == ".sh" else ():
        text += (ROOT / f"{module.replace('.', '/')}.py").read_text()
    # prepare_data.py of a recipe has its arguments from the common one.
    text += (ROOT / "recipes/common/prepare.py").read_text() if file.name == "prepare_data.py" else ""
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert option == "--help" or f'"{option}"' in text, f"{file.relative_to(ROOT)} has no {option}"


def parse(words: list[str]) -> None:
    """Raise ``AssertionError`` with what is said of words that `jetrl` does not accept; files need not be there."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words:
            return
        assert words[0] in command.commands, f"there is no jetrl {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    # A mention of the command alone names no argument.
    if not words and any(each.required for each in command.params):
        return
    try:
        command.make_context(command.name, list(words))
    except typer.BadParameter as error:
        assert "does not exist" in str(error), str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from None


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=lambda value: value)
def test_a_command_that_a_page_shows_is_there_and_parses(page, line):
    check(line)


def test_commands_of_each_kind_are_found():
    assert {"jetrl", "make", "bash", "python3", "python"} <= {words_of(line)[0] for _, line in SHOWN}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("jetrl nothing", "there is no jetrl nothing"),
        ("jetrl memory --nothing 1", "No such option|no such option"),
        ("make nothing", "no target nothing"),
        ("python -m benchmarks.nothing", "there is no benchmarks/nothing.py"),
        ("python3 -m benchmarks.recipes --nothing", "has no --nothing"),
        ("bash recipes/nothing.sh", "there is no recipes/nothing.sh"),
    ],
)
def test_one_that_is_not_there_is_seen(line, said):
    with pytest.raises(AssertionError, match=said):
        check(line)
