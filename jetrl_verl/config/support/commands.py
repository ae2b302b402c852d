# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows about the commands of ``jetrl``, which read a job's configuration or model without running the job."""

from .row import DRIVER, Row, Scope

_A_COMMAND = Scope("jetrl {command}", "`jetrl diff`, `jetrl memory`", lambda get: False)
_COMPARE = Scope("jetrl compare", "`jetrl compare`", lambda get: False)

COMMAND_ROWS: tuple[Row, ...] = (
    Row(
        "model_of_a_command",
        "models of a type that has no family",
        _A_COMMAND,
        "{error}",
        "Set a model of one of these types",
        what="the model {path}",
        found=DRIVER,
        listed=False,
    ),
    Row(
        "reward_model_of_compare",
        "a reward model",
        _COMPARE,
        "it scores with a reward function",
        "Set reward.custom_reward_function, or use data with a rule",
        what="a reward model",
        found=DRIVER,
        listed=False,
    ),
)
