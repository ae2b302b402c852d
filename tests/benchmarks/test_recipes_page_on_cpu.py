# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""docs/recipes_on_gpu.md holds what the record gives, and a row for each run that benchmarks/recipes.py defines."""

import copy
import json

import pytest

from benchmarks import pages, recipes_page
from benchmarks.recipes import RECIPES, chosen

RECORD = json.loads(recipes_page.RECORD.read_text())
SHIPPED = json.loads(recipes_page.SHIPPED.read_text())


def rows(record) -> dict[tuple[str, str], dict[str, str]]:
    """(recipe, precision) -> cells of the first table by their column."""
    lines = [line.strip("| ").split(" | ") for line in recipes_page.tables(record).split("\n\n")[1].splitlines()]
    head, _, *found = [[cell.strip() for cell in line] for line in lines]
    return {(line[0], line[1].strip("`")): dict(zip(head, line, strict=False)) for line in found}


def test_the_page_is_what_the_record_gives():
    page, given = recipes_page.PAGE.read_text(), recipes_page.page(RECORD, SHIPPED)
    assert pages.written(page) == given
    assert pages.with_written(page, given) == page


def test_a_run_with_its_scripts_own_numbers_says_of_which_batch_and_gpus():
    lines = [line.strip("| ").split(" | ") for line in recipes_page.shipped_table(SHIPPED).splitlines()]
    head, _, *found = [[cell.strip() for cell in line] for line in lines]
    assert len(found) == len(SHIPPED["runs"]) > 0
    for cells, run in zip((dict(zip(head, line, strict=True)) for line in found), SHIPPED["runs"], strict=True):
        assert (cells["GPUs"], cells["prompts"]) == (str(run["gpus"]), f"{SHIPPED['prompts']} of 1024")
        assert float(cells["a GPU's peak GiB"]) == pytest.approx(max(run["gpu_peak_gib"]), rel=5e-3)
        assert float(cells["step"]) == pytest.approx(run["step_s"], rel=5e-3)
        assert cells["cut to"].startswith("all layers, FP32 AdamW") == (run["gpus"] >= 4)


def test_every_run_that_is_defined_has_a_row_and_one_without_a_record_says_so():
    found = rows(RECORD)
    assert list(found) == chosen([]) and len(found) == sum(len(each.precisions) for each in RECIPES.values())
    recorded = {(run["recipe"], run["precision"]) for run in RECORD["runs"]}
    for name, cells in found.items():
        assert (cells["steps"] == recipes_page.NOT_RUN) == (name not in recorded), name


def test_a_row_has_the_figures_of_its_run():
    run = next(run for run in RECORD["runs"] if (run["recipe"], run["precision"]) == ("gsm8k", "jet_fp8"))
    cells = rows(RECORD)["gsm8k", "jet_fp8"]
    assert (cells["steps"], cells["k3_kl"], cells["commit"]) == ("3", "**0**", run["build"]["commit"][:7])
    for figure, column in recipes_page.PHASES.items():
        assert float(cells[column]) == pytest.approx(run[figure], rel=5e-3), column
    assert cells["cut to"] == "8 of 36 layers, 8-bit AdamW, no offload" and cells["GPU"] == "H200"


def changed(**fields) -> dict:
    """The record with other fields of its first run."""
    record = copy.deepcopy(RECORD)
    record["runs"][0] |= fields
    return record


def test_a_run_that_failed_or_was_ended_says_so_and_one_of_changed_sources_too():
    name = RECORD["runs"][0]["recipe"], RECORD["runs"][0]["precision"]
    failed = {"status": 1, "errors": ["/somewhere/else: no"], "k3_kl": None, "steps": 0}
    assert rows(changed(**failed))[name]["steps"] == "0 of 3, failed, status 1"
    assert "/somewhere" not in recipes_page.tables(changed(**failed))
    assert rows(changed(status=124, steps=2))[name]["steps"] == "2 of 3, time was up"
    dirty = RECORD["runs"][0]["build"] | {"dirty": True}
    assert rows(changed(build=dirty))[name]["commit"].endswith("with changes")


def test_what_a_run_was_cut_to_is_that_of_its_words_and_of_its_shape():
    name = RECORD["runs"][0]["recipe"], RECORD["runs"][0]["precision"]
    words = [word.replace("param_offload=False", "param_offload=True") for word in RECORD["runs"][0]["words"]]
    words = [word for word in words if "AdamW8bit" not in word]
    assert rows(changed(words=words))[name]["cut to"] == "8 of 36 layers, FP32 AdamW, param offload"
    whole = rows(RECORD | {"whole": True, "runs": []})[name]["cut to"]
    assert whole == "all layers, 8-bit AdamW, param and optimizer offload"
    assert rows(RECORD)["qwen3_moe", "bf16"]["cut to"].startswith("`qwen3_moe_3b` for `qwen3_30b_a3b`, ")


@pytest.mark.parametrize(
    ("record", "said"),
    [(RECORD | {"tiny": True}, "tiny models on a CPU"), (changed(recipe="gsm9k"), "gsm9k:jet_fp8 is recorded")],
)
def test_what_is_no_run_of_these_is_refused(record, said):
    with pytest.raises(ValueError, match=said):
        recipes_page.tables(record)


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="has no <!-- records:begin -->"):
        pages.with_written("# A page\n", "rows")
