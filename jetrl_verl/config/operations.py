# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Decides ``jetrl.operations=auto``: ``shared`` where the shared operations cover the whole job, else ``stock``.

Once, in the driver, when Hydra composes the config: trainer and vLLM read one word. One line on stderr says which and
why. Only what the operations cannot do makes it ``stock`` (``support/``); what merely parts the last bits does not.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from jetrl_verl.formats.catalog import UNQUANTIZED

from .check import reader
from .environment import model_overrides, on_cpu, read_model, why_not_shared
from .options import JetConfig, UnsupportedConfiguration
from .support.scopes import MODEL, VLLM
from .support.table import model_clause, row, stock_because
from .vllm_arguments import quantization_arguments


def resolve_operations(config: DictConfig) -> None:
    """Replace ``jetrl.operations=auto`` by ``shared`` or ``stock``, and say so.

    Args:
        config: a composed config; one without a ``jetrl`` node passes.
    """
    if OmegaConf.select(config, "jetrl.operations") != "auto":
        return
    reason = _why_stock(config)
    OmegaConf.update(config, "jetrl.operations", "stock" if reason else "shared")
    if reason:
        _say(f"jetrl_verl: jetrl.operations=auto is stock, since {reason}.")
    else:
        _say("jetrl_verl: jetrl.operations=auto is shared, since the shared operations cover the whole job.")


def _why_stock(config: DictConfig) -> str:
    """The first thing that the shared operations do not cover, cheapest checks first; empty if there is none.

    With a remedy only where ``shared`` would be accepted.
    """
    if config.jetrl.train == UNQUANTIZED:
        return row("operations_of_a_baseline").reason
    for clause in stock_because(reader(config)):
        return clause
    if on_cpu():
        return row("cpu").message().removesuffix(".")
    import torch

    if not torch.cuda.is_available():
        return row("no_gpu_in_the_driver").message().removesuffix(".")
    return why_not_shared() or _uncovered_model(config)


def _uncovered_model(config: DictConfig) -> str:
    from jetrl_verl.models import Unsupported, family

    get = reader(config)
    options = JetConfig.from_node(config.jetrl)
    path = get(f"{MODEL}.path")
    trainer = model_overrides(config)
    try:
        model = read_model(path)
        if model is None:
            why = f"the configuration of the model {path} cannot be read from here"
            return row("remote_model").message(why=why).removesuffix(".")
        decoder = family(model)
        rollout = quantization_arguments(options, get(VLLM))
        for message in overridden_fields(model, trainer, rollout["hf_overrides"]):
            return message.removesuffix(".")
        decoder.check_operations(decoder.as_trained(model, trainer))
    except UnsupportedConfiguration as unreadable:
        # Without the remedy, which is for a run that asked for `shared`.
        return str(unreadable).partition(". ")[0]
    except Unsupported as uncovered:
        return model_clause(uncovered, path, options.precision)
    return ""


def overridden_fields(
    model: Mapping[str, Any], trainer: Mapping[str, Any], rollout: Mapping[str, Any]
) -> Iterator[str]:
    """Messages about fields that the shared operations read and that one side overrides.

    Args:
        model: configuration of the model. trainer, rollout: what is overridden in the copy of either side.
    """
    from jetrl_verl.models import family
    from jetrl_verl.models.families.base import SHARED_FIELDS

    dropouts = family(model).dropouts
    for where, overrides in ((f"{MODEL}.override_config", trainer), (f"{VLLM}.hf_overrides", rollout)):
        for key, value in overrides.items():
            # Without dropout the trainer computes what the rollout does.
            silenced = key in dropouts and value == 0
            if key in (*SHARED_FIELDS, *dropouts) and value != model.get(key) and not silenced:
                yield row("overridden_model").message(why=f"{where} overrides {key} of the model")


@cache
def _say(line: str) -> None:
    """Once per process: Hydra composes a config twice before a run."""
    print(line, file=sys.stderr, flush=True)
