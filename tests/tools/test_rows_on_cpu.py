# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of a comparison: parsing, splitting and file names."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from jetrl_verl.inputs import UserError
from jetrl_verl.tools.rows import parse_row, split_rows


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("jet_fp8", ()),
        ("jet_fp8+jetrl.kv_cache=fp8+data.seed=4", ("jetrl.kv_cache=fp8", "data.seed=4")),
        ("jet_fp8+++a.b=1e-6++c=/x/y_z.parquet", ("++a.b=1e-6", "+c=/x/y_z.parquet")),
        ("jet_fp8+trainer.logger=[console,file]+clip=x", ("trainer.logger=[console,file]", "clip=x")),
    ],
)
def test_a_row_is_a_precision_and_overrides_of_hydra(text, settings):
    row = parse_row(text, ["jet_fp8"])
    assert (str(row), row.name, row.settings) == (text, "jet_fp8", settings)
    OverridesParser.create().parse_overrides(list(row.settings))


@pytest.mark.parametrize("text", ["jet_fp9", "", "jet_fp8+", "jet_fp8+a", "jet_fp8+a=x|y", "jet_fp8+a=1++a=2"])
def test_an_invalid_row_is_refused(text):
    with pytest.raises(UserError):
        parse_row(text, ["jet_fp8"])


def test_a_list_is_split_where_a_row_ends():
    assert split_rows("bf16,jet_fp8+a=[1,2]+b=3,fp8_rollout") == ("bf16", "jet_fp8+a=[1,2]+b=3", "fp8_rollout")


def test_every_row_has_its_own_valid_file_name():
    texts = ["a", "a+b=c", "a+b.c=d", "a+b=c.d", "a+b=c-d", "a+b=c_d", "a+b=c/d", "a+b=c:d", "a++b=c", "a+b=[1,2]"]
    texts += ["a+b=" + "x" * 200, "a+b=" + "x" * 199 + "y", "a+b=c+d=e", "a+b=c-d-e"]
    slugs = [parse_row(text, ["a"]).slug for text in texts]
    assert len(set(slugs)) == len(texts) and slugs[2] == "a-b.c-d"
    assert all(slug.replace("-", "").replace(".", "").replace("_", "").isalnum() for slug in slugs)
    assert max(map(len, slugs)) < 140
