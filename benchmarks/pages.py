# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The part of a page in docs/ that a program writes: what stands between two marks. All else is written by hand."""

BEGIN, END = "<!-- records:begin -->", "<!-- records:end -->"


def written(page: str) -> str:
    """What stands between the marks."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def with_written(page: str, rows: str) -> str:
    """The page with ``rows`` between its marks.

    Raises:
        ValueError: it has no marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}; put both marks where the tables go.")
    return f"{before}{BEGIN}\n{rows}\n{END}{behind}"
