# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of a comparison: what their text means, and that no two of them share a file."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.tools import ToolError
from jetrl_verl.tools.rows import Row, parse_row, split_rows


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("jet_fp8", ()),
        ("jet_fp8+jetrl.kv_cache=fp8", ("jetrl.kv_cache=fp8",)),
        ("fp8_rollout+jetrl.kv_cache=fp8+data.seed=4", ("jetrl.kv_cache=fp8", "data.seed=4")),
        ("bf16+++a.b=1e-6++c=/x/y_z.parquet", ("++a.b=1e-6", "+c=/x/y_z.parquet")),
        ("jet_fp8+trainer.logger=[console,file]+clip=calibrated", ("trainer.logger=[console,file]", "clip=calibrated")),
    ],
)
def test_a_row_is_a_precision_and_what_is_set_beside_it(text, settings):
    row = parse_row(text, PRECISIONS)
    assert (str(row), row.name, row.settings) == (text, text.partition("+")[0], settings)
    # Hydra reads each of them as it stands.
    OverridesParser.create().parse_overrides(list(row.settings))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("jet_fp9", "Choose from bf16"),
        ("", "is not a row"),
        ("jet_fp8+", "is not a row"),
        ("jet_fp8+jetrl.kv_cache", "is not a row"),
        ("jet_fp8+a='x y'", "no other character"),
        ("jet_fp8+a=x|y", "no other character"),
        ("jet_fp8+a=1+a=2", "sets a twice"),
        ("jet_fp8+a=1++a=2", "sets a twice"),
    ],
)
def test_a_text_that_is_no_row_is_refused_with_one_sentence(text, words):
    with pytest.raises(ToolError, match=words):
        parse_row(text, PRECISIONS)


def test_a_list_is_split_where_a_row_ends():
    assert split_rows("bf16,jet_fp8+a=[1,2]+b=3,fp8_rollout") == ("bf16", "jet_fp8+a=[1,2]+b=3", "fp8_rollout")


def test_no_two_rows_share_a_file_and_every_name_is_a_file_name():
    texts = ["a", "a+b=c", "a+b.c=d", "a+b=c.d", "a+b=c-d", "a+b=c_d", "a+b=c/d", "a+b=c:d", "a++b=c", "a+b=[1,2]"]
    texts += ["a+b=" + "x" * 200, "a+b=" + "x" * 199 + "y", "a+b=c+d=e", "a+b=c-d-e"]
    slugs = [parse_row(text, ["a"]).slug for text in texts]
    assert len(set(slugs)) == len(texts)
    assert all(slug.replace("-", "").replace(".", "").replace("_", "").isalnum() for slug in slugs)
    assert max(map(len, slugs)) < 140
    assert Row("fp8_rollout", ("jetrl.kv_cache=fp8",)).slug == "fp8_rollout-jetrl.kv_cache-fp8"
    assert Row("jet_fp8").slug == "jet_fp8"
