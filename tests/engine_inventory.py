# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Inventory of a live vLLM engine and of its process, by full names of classes and functions."""

import sys
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

PACKAGE = "jetrl_verl"


def name_of(thing: Any) -> str:
    """Full name of a class or function, of an object's class, or of what a bound method is defined as."""
    if isinstance(thing, types.MethodType):
        thing = thing.__func__
    if not isinstance(thing, type | types.FunctionType):
        thing = type(thing)
    return f"{thing.__module__}.{thing.__qualname__}"


def inventory(worker: Any) -> dict[str, Any]:
    """Everything in the engine that a plugin could have replaced, read from the live objects.

    Args:
        worker: vLLM's worker of an engine in this process.
    """
    runner, model = worker.model_runner, worker.get_model()
    modules = list(model.modules())
    attentions = [module for module in modules if hasattr(module, "attn_backend")]
    backends = {module.get_attn_backend() for module in attentions}
    return {
        "worker": [name_of(kind) for kind in type(worker).__mro__],
        "model runner": [name_of(kind) for kind in type(runner).__mro__],
        "quantization": name_of(worker.vllm_config.quant_config),
        "modules": _counted(modules),
        "forwards": _counted(module._forward_method for module in modules if hasattr(module, "_forward_method")),
        "linear methods": _counted(module.quant_method for module in modules if hasattr(module, "quant_method")),
        "attention": _counted(module.impl for module in attentions),
        "attention backend": sorted(map(name_of, backends)),
        "attention metadata": sorted(name_of(backend.get_builder_cls()) for backend in backends),
        "built attention metadata": sorted(
            name_of(group.get_metadata_builder()) for groups in runner.attn_groups for group in groups
        ),
        "sampler": name_of(runner.sampler),
        "hooks": _counted(hook for module in modules for hook in _hooks(module)),
        "own methods": sorted(
            f"{name_of(owner)}.{name}"
            for owner in (worker, runner, model, runner.sampler)
            for name, value in vars(owner).items()
            if isinstance(value, types.FunctionType | types.MethodType)
        ),
    }


def registries() -> dict[str, list[str]]:
    """What is registered for every engine of this process, and names in vLLM that this project replaced."""
    from torch.nn.modules import module as torch_module
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers import quantization
    from vllm.v1.attention.backends import registry

    return {
        "global hooks of torch": sorted(
            f"{table}: {name_of(hook)}"
            for table, hooks in vars(torch_module).items()
            if table.startswith("_global_") and isinstance(hooks, dict)
            for hook in hooks.values()
        ),
        "layers": sorted(f"{name}: {name_of(kind)}" for name, kind in custom_op.op_registry_oot.items()),
        "attention backends": sorted(f"{name}: {path}" for name, path in registry._ATTN_OVERRIDES.items()),
        "quantization methods": sorted(
            f"{name}: {kind.__module__}" for name, kind in quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.items()
        ),
        "names in vLLM from this package": sorted(_patched_names()),
    }


def _counted(things: Any) -> dict[str, int]:
    return dict(sorted(Counter(map(name_of, things)).items()))


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            yield from hooks.values()


def _patched_names() -> Iterator[str]:
    """Attributes of vLLM's modules and classes that were defined in this project."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != "vllm" or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if _is_own(value):
                yield f"{name}.{attribute}"
            elif isinstance(value, type) and value.__module__ == name:
                yield from (f"{name}.{attribute}.{own}" for own, inner in dict(vars(value)).items() if _is_own(inner))


def _is_own(value: Any) -> bool:
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        value = value.__func__
    return isinstance(value, type | types.FunctionType) and str(value.__module__).partition(".")[0] == PACKAGE
