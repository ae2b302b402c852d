# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine in the driver, before Ray starts: versions, GPUs, the model folder and the data files.

What is not supported is a row of ``support/machine.py``. Remote paths, and hub names without a network, are left to
verl.
"""

import json
import os
from collections.abc import Mapping
from glob import glob, has_magic
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from packaging.version import InvalidVersion, Version

from jetrl_verl.formats.catalog import FLOW, UNQUANTIZED, CacheTraits, cache_traits
from jetrl_verl.patches.attention_name import JETRL_ATTENTION

from .options import JetConfig, UnsupportedConfiguration
from .support.limits import MIN_CAPABILITY, PINS, SHARED_CAPABILITY
from .support.scopes import ATTENTION, MODEL, OPTIMIZERS, REPLICAS, ULYSSES, ULYSSES_OF_THE_CRITIC
from .support.table import explained, refusal, refuse, row


def check_environment(config: DictConfig) -> None:
    """Raise ``UnsupportedConfiguration`` (one sentence) if this machine cannot run a composed config.

    A config without a ``jetrl`` node passes.
    """
    if OmegaConf.select(config, "jetrl") is None:
        return
    options = JetConfig.from_node(config.jetrl)
    check_versions(options.precision)
    check_patches(options.precision)
    check_gpu(options.precision)
    for key in OPTIMIZERS:
        check_optimizer(key, OmegaConf.select(config, key), options.precision)
    if options.operations == "shared" and (gap := no_shared_operations()):
        refuse(gap[0], what=gap[1])

    tensor_parallel = OmegaConf.select(config, "actor_rollout_ref.rollout.tensor_model_parallel_size") or 1
    path = OmegaConf.select(config, "actor_rollout_ref.model.path")
    shared = options.operations == "shared"
    # The reference policy is the actor's model and may be in FP8 where the actor is not.
    format_name = FLOW if options.ref != UNQUANTIZED else options.rollout
    overrides = model_overrides(config)
    check_model(path, options, tensor_parallel, shared, overrides, format_name)
    if (cache := cache_traits(options.kv_cache)).quantized:
        check_cache(path, cache)
    for key in REPLICAS:
        check_replicas(path, key, OmegaConf.select(config, key) or 1)
    for key in ULYSSES:
        check_ulysses(path, key, OmegaConf.select(config, key) or 1, options.precision)
    of_critic = OmegaConf.select(config, "critic.model.path")
    for key in ULYSSES_OF_THE_CRITIC:
        check_ulysses(of_critic, key, OmegaConf.select(config, key) or 1, options.precision)
    if OmegaConf.select(config, ATTENTION) == JETRL_ATTENTION:
        check_attention(path, overrides)
    if options.critic != UNQUANTIZED:
        check_model(OmegaConf.select(config, "critic.model.path"), options, 1)

    if OmegaConf.select(config, "actor_rollout_ref.model.use_fused_kernels"):
        check_vocabulary(path)

    if OmegaConf.select(config, "data.custom_cls.path") is None:
        for key in ("data.train_files", "data.val_files"):
            check_data(key, OmegaConf.select(config, key))


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, None without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_pinned(package: str, version: str) -> bool:
    """Whether a version is of the release in ``PINS``; one that cannot be read is not."""
    wanted = Version(PINS[package]).release
    try:
        return Version(version).release[: len(wanted)] == wanted
    except InvalidVersion:
        return False


def check_versions(precision: str) -> None:
    """Compare the installed packages with ``PINS``."""
    for package, pin in PINS.items():
        installed = installed_version(package)
        if installed is None:
            what, remedy = f"an environment without {package}", f"Set up {package} {pin}"
            refuse("missing_package", precision=precision, what=what, remedy=remedy)
        if not is_pinned(package, installed):
            why, remedy = f"it works with {package} {pin}", f"Set up {package} {pin}, or precision=bf16"
            refuse("version", precision=precision, what=f"{package} {installed}", why=why, remedy=remedy)


def check_optimizer(key: str, module: str | None, precision: str) -> None:
    """Refuse an optimizer whose package is not installed: a worker would only find out after loading the model."""
    package = (module or "torch").partition(".")[0]
    if find_spec(package) is None:
        why, remedy = f"{package} is not installed", f"Install {package}"
        refuse("optimizer_package", precision=precision, key=key, value=module, why=why, remedy=remedy)


def check_patches(precision: str) -> None:
    """Refuse a modified verl or vLLM that a required patch cannot be applied to."""
    from jetrl_verl.patches import installed_states
    from jetrl_verl.patches.patch import PATCHED, STOCK

    for patch, state in installed_states():
        if patch.needed and state not in (STOCK, PATCHED):
            mismatch = patch.mismatch(state).rpartition(". Install ")[0]
            remedy = f"Set up {patch.pinned}, or precision=bf16"
            refuse("patch", precision=precision, what=f"the installed {patch.project}", why=mismatch, remedy=remedy)


def check_gpu(precision: str) -> None:
    """Refuse a visible GPU without FP8; a driver that sees none (a head node, the CPU platform) passes."""
    import torch
    from verl.utils.device import is_npu_available

    if is_npu_available:
        refuse("npu", precision=precision)
    if not torch.cuda.is_available():
        return
    if torch.version.hip is not None:
        refuse("rocm", precision=precision)
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < MIN_CAPABILITY:
            refuse("gpu_without_fp8", precision=precision, what=_describe_gpu(index))


def _describe_gpu(index: int) -> str:
    import torch

    return gpu_words(f"GPU {index}, {torch.cuda.get_device_name(index)}", torch.cuda.get_device_capability(index))


def gpu_words(gpu: str, capability: tuple[int, int]) -> str:
    """A GPU as the X of a message."""
    return f"{gpu}, of compute capability {capability[0]}.{capability[1]},"


def on_cpu() -> bool:
    """Whether verl was asked to run without a GPU (cpu_platform.py)."""
    return os.environ.get("VERL_PLATFORM") == "cpu"


def no_shared_operations() -> tuple[str, str] | None:
    """Row of the table that says why the GPUs of this process cannot run the shared operations, and the X of its
    message; None if they can, or if it sees none.
    """
    import torch

    if on_cpu() or not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        if tuple(torch.cuda.get_device_capability(index)) != SHARED_CAPABILITY:
            return "gpu_other_than_hopper", _describe_gpu(index)
    # Looked up as a file: importing the library is slow and may touch a GPU.
    vllm = find_spec("vllm")
    if vllm is None or not list(Path(vllm.origin).parent.glob("vllm_flash_attn/_vllm_fa3_C*")):
        return "no_flash_attention_3", ""
    return None


def check_cache(path: str | None, cache: CacheTraits) -> None:
    """Refuse a quantized KV cache on a GPU, or of a model, for which there is no kernel; after :func:`check_model`."""
    gap = no_shared_operations()
    if gap is not None and gap[0] == "gpu_other_than_hopper":
        refuse("gpu_of_an_fp8_cache", what=gap[1])
    model = read_model(path)
    if model is not None and (message := cache_message(model, str(path), cache)):
        raise UnsupportedConfiguration(message)


def cache_message(model: Mapping[str, Any], path: str, cache: CacheTraits) -> str:
    """Why a quantized KV cache has no kernel for a model; empty where it has."""
    from jetrl_verl.models import family

    decoder, heads = family(model), model["num_attention_heads"]
    group = heads // (model.get("num_key_value_heads") or heads)
    head_dim, most = decoder.head_dim(model), cache.most_query_heads
    for why, met in (
        (f"its heads are of {head_dim}, and a scale is for {cache.head_dim}", head_dim != cache.head_dim),
        (f"a KV head has {group} query heads, and the kernel computes {most}", group > most),
        ("its layers attend to windows", decoder.slides(model)),
    ):
        if met:
            return refusal("model_of_an_fp8_cache", what=f"the model {path}", why=why)
    return ""


def why_not_shared() -> str:
    """:func:`no_shared_operations` as a clause; empty if the shared operations can run here."""
    gap = no_shared_operations()
    return row(gap[0]).clause(what=gap[1]) if gap else ""


def model_overrides(config: DictConfig) -> dict[str, Any]:
    """A job's overrides of the trainer's copy of the model's configuration, as verl reads them."""
    overrides = OmegaConf.select(config, f"{MODEL}.override_config") or {}
    overrides = OmegaConf.to_container(OmegaConf.create(overrides), resolve=True)
    return overrides.get("model_config", overrides)


def check_model(
    path: str | None,
    options: JetConfig,
    tensor_parallel: int,
    shared_operations: bool = False,
    overrides: Mapping[str, Any] | None = None,
    format_name: str = FLOW,
) -> None:
    """Check a model: ``config.json`` and weight files open, it is unquantized, and its shapes fit.

    Args:
        path: what verl loads: a folder, a hub name, or a remote path. Of a hub name only ``config.json`` is read.
        options: decides whether a layer that does not fit stops the run.
        tensor_parallel: ranks over which the rollout splits each layer.
        shared_operations: whether the model is to run them, and so must be one that they cover.
        overrides: what the trainer changes in its copy of the configuration.
        format_name: of its linear layers.
    """
    model = read_model(path)
    if model is None:
        return
    folder = Path(path).expanduser()
    if folder.is_dir():
        _check_weight_files(folder)

    # Not at the top: the checks of versions have to run where importing torch fails.
    from jetrl_verl.models import family
    from jetrl_verl.models.plan import plan_linears

    if model.get("quantization_config"):
        refuse("quantized_checkpoint", precision=options.precision, what=f"the model {path}")
    with explained(path, options.precision):
        plan_linears(model, tensor_parallel, unfit_layers=options.unfit_layers, format_name=format_name)
        decoder = family(model)
        if shared_operations:
            decoder.check_operations(decoder.as_trained(model, overrides or {}))
    if decoder.experts is not None and options.train == FLOW:
        if not shared_operations:
            refuse("mixture_with_stock_operations", what=f"the mixture of experts {path}")
        if options.backward != FLOW:
            refuse("mixture_with_bf16_backward", what=f"the mixture of experts {path}")


def check_replicas(path: str | None, key: str, replicas: int) -> None:
    """Refuse a mixture of experts in one server of several data-parallel replicas: vLLM deals its experts over them."""
    from jetrl_verl.models import family

    model = read_model(path) if replicas > 1 else None
    if model is not None and family(model).experts is not None:
        refuse("mixture_over_replicas", what=f"the mixture of experts {path}", scope=f"{key}={replicas}")


def check_ulysses(path: str | None, key: str, ranks: int, precision: str) -> None:
    """Refuse a number of ranks over which the model's heads cannot be dealt, as verl's workers would."""
    model = read_model(path) if ranks > 1 else None
    if model is None:
        return
    heads = model["num_attention_heads"]
    kv_heads = model.get("num_key_value_heads") or heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        why = f"its {heads} heads over {kv_heads} key heads are not divided by that many ranks"
        what = f"{key}={ranks} with the model {path}"
        remedy = f"Set {key} to a divisor of both, or of the heads and a multiple of the key heads"
        refuse("ulysses_of_the_heads", precision=precision, what=what, why=why, remedy=remedy)


def read_model(path: str | None) -> dict[str, Any] | None:
    """Configuration of the model at ``path``, with the defaults of a type that we know; None where it lies elsewhere.

    Raises:
        UnsupportedConfiguration: a local folder that is missing, or whose ``config.json`` cannot be read.
    """
    if path is None or "://" in str(path):
        return None
    folder = Path(path).expanduser()
    if folder.is_dir():
        config_file = folder / "config.json"
    elif folder.is_absolute() or str(path).startswith((".", "~")):
        raise UnsupportedConfiguration(
            f"the model folder {path} does not exist. Set actor_rollout_ref.model.path to a folder that does."
        )
    else:
        config_file = _hub_config(str(path))
        if config_file is None:
            return None

    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from jetrl_verl.models import model_types

    try:
        model = json.loads(config_file.read_text())
        if model.get("model_type") in model_types():
            # What config.json leaves out takes the default of its class (Qwen3's head_dim, for one).
            model = AutoConfig.from_pretrained(config_file.parent).to_dict()
    except (OSError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UnsupportedConfiguration(
            f"{config_file} is not a readable model config ({type(error).__name__}). Set "
            "actor_rollout_ref.model.path to a complete Hugging Face folder."
        ) from None
    return model


def check_attention(path: str | None, overrides: Mapping[str, Any]) -> None:
    """Refuse what ``attn_implementation=jetrl_varlen`` does not do of a model, where the driver can read it.

    Args:
        path: the model. overrides: what the trainer changes in its copy of the configuration.
    """
    from jetrl_verl.models import family
    from jetrl_verl.models.families.base import read

    if (model := read_model(path)) is None:
        return
    decoder = family(model)
    trained = decoder.as_trained(model, overrides)
    if decoder.slides(trained):
        refuse("varlen_sliding_window", what=f"the model {path}, whose layers attend to windows,")
    if rate := read(trained, "attention_dropout", 0.0):
        refuse("varlen_dropout", what=f"the model {path} with attention_dropout={rate}")


def check_vocabulary(path: str | None) -> None:
    """Refuse ``model.use_fused_kernels`` for a local model whose vocabulary is larger than its tokenizer.

    The fused kernel computes log-probabilities without lm_head's module, which is where the trainer masks the entries
    that the rollout masks.
    """
    folder = Path(path).expanduser() if path is not None else None
    if folder is None or not folder.is_dir():
        return
    from transformers import AutoConfig, AutoTokenizer

    tokens = len(AutoTokenizer.from_pretrained(folder))
    entries = AutoConfig.from_pretrained(folder).vocab_size
    if entries > tokens:
        refuse("fused_kernels_of_a_padded_vocabulary", **padding_words(entries - tokens, path))


def padding_words(entries: int, path: str | None) -> dict[str, str]:
    """Words of the message for a model with ``entries`` of its vocabulary without a token."""
    scope = f"the {entries} entries of its vocabulary without a token"
    return {"scope": scope, "why": f"{path} would leave them unmasked in the trainer alone"}


def check_data(key: str, files: Any) -> None:
    """Check that each local ``.parquet`` file of ``data.train_files`` or ``data.val_files`` opens and yields a row."""
    if files is None:
        return
    import pyarrow
    import pyarrow.parquet

    for name in files if isinstance(files, list | tuple | ListConfig) else [files]:
        if "://" in str(name):
            continue
        for path in _data_files(key, name):
            if path.suffix != ".parquet":
                continue
            try:
                with pyarrow.parquet.ParquetFile(path) as file:
                    # The footer may be whole where the data is not.
                    for _ in file.iter_batches(batch_size=1):
                        break
            except (pyarrow.ArrowException, OSError) as error:
                raise UnsupportedConfiguration(
                    f"the data file {path} ({key}) is not a readable parquet file ({type(error).__name__}). Write "
                    "it again."
                ) from None


def _data_files(key: str, name: Any) -> list[Path]:
    """Local files that ``datasets.load_dataset``, to which verl hands ``name``, finds under it: one, or a pattern's."""
    path = Path(name).expanduser()
    if has_magic(str(path)):
        files = [file for file in map(Path, sorted(glob(str(path), recursive=True))) if file.is_file()]
        if not files:
            raise UnsupportedConfiguration(f"the pattern {name} ({key}) matches no data file. Check the path.")
        return files
    if not path.exists():
        raise UnsupportedConfiguration(f"the data file {name} ({key}) does not exist. Check the path.")
    return [path]


def _check_weight_files(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UnsupportedConfiguration(
                f"{index} is not a readable weight index ({type(error).__name__}). Copy the model folder again."
            ) from None
    if not files and not list(folder.glob("*.bin")):
        raise UnsupportedConfiguration(
            f"the model folder {folder} holds no weights (*.safetensors). Set "
            "actor_rollout_ref.model.path to a complete folder."
        )
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise UnsupportedConfiguration(
                f"the weight file {file} is missing or damaged ({type(error).__name__}). Copy the model folder again."
            ) from None


def _hub_config(name: str) -> Path | None:
    """``config.json`` of a hub model, cached or downloaded, as verl would; ``None`` where the hub has no answer."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=5))
    except (HfHubHTTPError, OSError, ValueError):
        # No network, no such model, not a hub name: verl says so itself when it loads the model.
        return None
