# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""300 sets of overrides from verl's own scripts under ``jet_fp8_exact``, in the driver."""

import re

import pytest
import ray
from hydra.errors import HydraException
from verl_overrides import SENTENCE, draws, driver_says, write_inputs

import jetrl_verl.patches

ACCEPTED_SHARE = 0.4
REMEDY = re.compile(r".*\. Set ([\w.]+)=([^\s,]+?)(?:,.*|\.)")


def cures(message: str, words: list[str]) -> bool:
    """Whether a set is no longer refused for the same reason once its user does what the sentence says."""
    if (remedy := REMEDY.fullmatch(message)) is None:
        return True
    key, value = remedy.groups()
    others = [word for word in words if word.lstrip("+").partition("=")[0] != key]
    try:
        return driver_says([*others, f"{'++' if '.' in key else ''}{key}={value}"]) != message
    except HydraException:
        return True  # what is left of the set is another engine's


@pytest.mark.usefixtures("compose")
def test_sets_of_overrides_run_or_are_refused_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # resume_mode=auto looks for checkpoints/ here
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(ray, "init", ray.init)  # the driver wraps it
    states = list(jetrl_verl.patches.installed_states())  # half of the driver's time, and the same for every set
    monkeypatch.setattr(jetrl_verl.patches, "installed_states", lambda: states)

    inputs, accepted, bad = write_inputs(tmp_path), 0, []
    for draw in (sets := draws()):
        words = ["precision=jet_fp8_exact", *inputs, *draw.words]
        try:
            message = driver_says(words)
        except HydraException as error:
            # verl's own: its scripts name an engine that it does not have.
            with pytest.raises(type(error), match=re.escape(str(error).splitlines()[0])):
                driver_says(["precision=bf16", *words[1:]])
            continue
        accepted += not message
        named = any(word.partition("=")[0].rpartition(".")[2] in message for word in draw.words)
        if message and not (not draw.harmless and named and SENTENCE.fullmatch(message) and cures(message, words)):
            bad.append((draw.words, message))
    assert not bad
    assert accepted >= ACCEPTED_SHARE * len(sets)
