# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What verl builds at its start is frozen, garbage and what an earlier start built are not."""

import gc
import importlib
import weakref
from types import SimpleNamespace

import pytest
from patch_home import current, home

from jetrl_verl.patches.frozen_heap import DRIVER, ENGINE

STARTS = ((DRIVER, ("_setup", "on_init_end")), (ENGINE, ("_build_model_optimizer", "to")))
"""Each patch with the methods that a start calls."""


class Node:
    """An object of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("patch, methods", STARTS, ids=["driver", "engine"])
def test_a_start_freezes_what_it_built_and_leaves_no_garbage(cpu_platform, monkeypatch, patch, methods):
    home(patch)
    if patch is ENGINE:
        monkeypatch.setattr(importlib.import_module(patch.module), "FSDPCheckpointManager", lambda **_: None)
    built, gone = [], []

    def build(*_, **__) -> None:
        built[:] = [Node()]
        gone.append(weakref.ref(Node()))

    names = ("module", "optimizer", "lr_scheduler", "checkpoint_config", "_is_offload_param", "_is_offload_optimizer")
    model = SimpleNamespace(get_processor=lambda: None, trust_remote_code=False)
    start = SimpleNamespace(**dict.fromkeys(names), **dict.fromkeys(methods, build), model_config=model)
    thresholds = gc.get_threshold()
    try:
        for _ in range(2):
            gone += map(weakref.ref, built)
            current(patch)(start)
            assert not any(node() for node in gone) and not any(item is built[0] for item in gc.get_objects())
        assert gc.get_threshold()[:2] == thresholds[:2] and gc.get_threshold()[2] > thresholds[2]
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
