# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``prepared``: data and policy of the study, as small as they get."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """Folder of ``benchmarks.study.warm_up``; tests leave it as it is."""
    from study_cases import SMALL, warm_up

    folder = tmp_path_factory.mktemp("study") / "prepared"
    warm_up.prepare(SMALL, folder, "cpu")
    return folder
