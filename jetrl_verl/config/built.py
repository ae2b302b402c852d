# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer's model on the meta device: the driver asks it what a worker asks of the model that it trains."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from jetrl_verl.formats.catalog import UNQUANTIZED
from jetrl_verl.models import UnsupportedLayer, family
from jetrl_verl.models.adapters import adapted_linears
from jetrl_verl.models.modules import check_operations_of, check_scaling, linears_of

from .options import JetConfig
from .support.row import Get, UnsupportedConfiguration
from .support.scopes import MODEL

_OTHERS = ("attn_implementation", "_attn_implementation", "dtype", "torch_dtype", "pad_token_id", "quantization_config")
"""Fields that change no module, and of which the driver may lack what they name, or verl sets them itself."""


@contextmanager
def _on_meta() -> Iterator[None]:
    """Modules are made on the meta device, as is the norm of fla that transformers asks for on the current GPU."""
    current_device = torch.cuda.current_device
    torch.cuda.current_device = lambda: "meta"
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.cuda.current_device = current_device


def build(path: str, config: Mapping[str, Any]) -> nn.Module:
    """A language model of the class of transformers that verl takes: modules and shapes, no weights.

    Args:
        path: of the model, for messages. config: its configuration, as the trainer has it.

    Raises:
        UnsupportedConfiguration: its class does not build it.
    """
    try:
        built = AutoConfig.for_model(config["model_type"], attn_implementation="eager")
        # As verl does with overrides, so that they are not validated together.
        for name in config.keys() - set(_OTHERS):
            # A part has what config.json says of it: mappings are not overridden.
            part = built.sub_configs.get(name)
            setattr(built, name, config[name] if part is None else part(**config[name]))
        vision = type(built) in AutoModelForImageTextToText._model_mapping
        with _on_meta():
            return (AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_config(built)
    except Exception as error:  # whatever a class raises about its configuration
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedConfiguration(
            f"the model {path} cannot be built from its configuration ({reason}), so every worker would stop. Set "
            f"{MODEL}.path or {MODEL}.override_config to a configuration that can."
        ) from None


def check_built(options: JetConfig, path: str, config: Mapping[str, Any], role: str = "actor") -> None:
    """Ask a model what its worker asks: linear layers, and of the actor its class in vLLM, shared operations and QuRL's
    factor.

    Args:
        path, config: as of :func:`build`. role: ``actor``, ``ref`` or ``critic``.

    Raises:
        Unsupported: a layer that a worker would refuse.
        UnsupportedConfiguration: as :func:`build`.
    """
    model, actor = build(path, config), role == "actor"
    trained = [type(model).__name__]
    if actor and (names := config.get("architectures") or trained) != trained:
        reason = f"vLLM builds the architecture {', '.join(names)} of its config.json, and the trainer {trained[0]}"
        raise UnsupportedLayer(reason, "model_type")
    if getattr(options, "train" if actor else role) != UNQUANTIZED:
        list(linears_of(model))
    if actor and options.operations == "shared":
        check_operations_of(model)
    if actor and options.invariant_scaling != 1:
        check_scaling((name for name, _ in model.named_parameters()), family(model.config))


def check_adapters(get: Get, path: str, config: Mapping[str, Any]) -> None:
    """Give a model the adapters of a job (``model.lora_rank`` above 0) and ask what its worker asks of them.

    Args:
        path, config: as of :func:`build`.

    Raises:
        UnsupportedLayer: an adapter that a worker would refuse.
        UnsupportedConfiguration: as :func:`build`; peft finds no module of these names.
    """
    from peft import LoraConfig, get_peft_model

    saved = get(f"{MODEL}.lora_adapter_path")
    if saved is not None and "://" in saved:
        return
    model = build(path, config)
    try:
        if saved is not None:
            lora = LoraConfig.from_pretrained(saved)
        else:
            names = {name: get(f"{MODEL}.{name}") for name in ("target_modules", "exclude_modules")}
            lora = LoraConfig(r=get(f"{MODEL}.lora_rank"), **names)
        with _on_meta():
            adapted = get_peft_model(model, lora)
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        remedy = f"{MODEL}.target_modules or {MODEL}.exclude_modules to layers that the model has"
        if saved is not None:
            remedy = f"{MODEL}.lora_adapter_path to an adapter of this model"
        raise UnsupportedConfiguration(
            f"the model {path} cannot get its LoRA adapters ({reason}), so every worker would stop. Set {remedy}."
        ) from None
    list(adapted_linears(adapted))
