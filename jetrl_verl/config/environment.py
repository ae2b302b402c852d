# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What a precision needs of this machine, checked in the driver right before the job starts, before Ray and any GPU.

Versions, the GPU's FP8 support, the model folder (readable, dense, shapes that fit) and the data files. Each refusal
is one sentence. A path that is not on this machine (a hub name that is not cached, a remote file system) is left to
verl.
"""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from packaging.version import InvalidVersion, Version

from jetrl_verl.numerics.formats import BLOCK

from .options import JetConfig, UnsupportedConfiguration

PINS = {"verl": "0.9.1", "vllm": "0.24.0", "torch": "2.11", "transformers": "5.9"}
"""Releases whose internals this project was written against; a shorter pin leaves the rest of the version free."""

MIN_CAPABILITY = (8, 9)
"""First CUDA compute capability whose tensor cores multiply E4M3."""

_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_REMOTE = ("hdfs://", "s3://", "gs://", "http://", "https://")


def check_environment(config: DictConfig) -> None:
    """Raise ``UnsupportedConfiguration`` (one sentence) if this machine cannot run ``config``; no-op without
    ``jetrl``.
    """
    if OmegaConf.select(config, "jetrl") is None:
        return
    options = JetConfig.from_node(config.jetrl)
    check_versions(options.precision)
    check_gpu(options.precision)

    rollout = "actor_rollout_ref.rollout"
    tensor_parallel = OmegaConf.select(config, f"{rollout}.engine_kwargs.vllm.tensor_parallel_size")
    if tensor_parallel is None:
        tensor_parallel = OmegaConf.select(config, f"{rollout}.tensor_model_parallel_size") or 1
    check_model(OmegaConf.select(config, "actor_rollout_ref.model.path"), options, int(tensor_parallel))
    if options.critic == "fp8":
        check_model(OmegaConf.select(config, "critic.model.path"), options, 1)

    if OmegaConf.select(config, "data.custom_cls.path") is None:
        for key in ("data.train_files", "data.val_files"):
            check_data(key, OmegaConf.select(config, key))


def check_versions(precision: str) -> None:
    """Compare the installed packages with ``PINS``."""
    for package, pin in PINS.items():
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise UnsupportedConfiguration(
                f"precision={precision} needs {package} {pin}, which is not installed; install {package} {pin}."
            ) from None
        try:
            release = Version(installed).release
        except InvalidVersion:
            release = ()
        wanted = Version(pin).release
        if release[: len(wanted)] != wanted:
            raise UnsupportedConfiguration(
                f"precision={precision} works with {package} {pin} and found {package} {installed}; "
                f"install {package} {pin} or use precision=bf16."
            )


def check_gpu(precision: str) -> None:
    """Refuse a visible GPU without FP8; a driver that sees none (a head node, the CPU platform) passes."""
    import torch

    if not torch.cuda.is_available():
        return
    if torch.version.hip is not None:
        raise UnsupportedConfiguration(f"precision={precision} runs on NVIDIA GPUs, not on ROCm; use precision=bf16.")
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < MIN_CAPABILITY:
            raise UnsupportedConfiguration(
                f"precision={precision} needs FP8 tensor cores (compute capability 8.9 or newer), and GPU {index}, "
                f"{torch.cuda.get_device_name(index)}, has {capability[0]}.{capability[1]}; use precision=bf16."
            )


def check_model(path: str | None, options: JetConfig, tensor_parallel: int) -> None:
    """Check the model at ``path``: its ``config.json``, that it is dense and unquantised, its shapes and its weight
    files.

    Args:
        path: what verl loads: a folder, a hub name, or a remote path. A hub name is checked by its cached
            ``config.json``.
        options: decides whether a shape that does not fit stops the run.
        tensor_parallel: ranks over which the rollout splits each layer.
    """
    if path is None or str(path).startswith(_REMOTE):
        return
    folder = Path(path).expanduser()
    if folder.is_dir():
        config_file = folder / "config.json"
        _check_weight_files(folder)
    elif folder.is_absolute() or str(path).startswith((".", "~")):
        raise UnsupportedConfiguration(f"the model folder {path} does not exist; check the model path.")
    else:
        cached = _cached_config(str(path))
        if cached is None:
            return
        config_file = cached

    try:
        model = json.loads(config_file.read_text())
        if not isinstance(model, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError) as error:
        raise UnsupportedConfiguration(
            f"{config_file} is not a readable model config ({type(error).__name__}); point the model path at a "
            "complete Hugging Face folder."
        ) from None

    _check_architecture(path, model, options)
    if options.unfit_layers == "stop":
        for name, rows, columns in linear_shapes(model, tensor_parallel):
            if rows % BLOCK or columns % BLOCK:
                raise UnsupportedConfiguration(
                    f"layer {name} of {path} is {rows} x {columns} (out x in) on each of {tensor_parallel} "
                    f"tensor-parallel ranks, and FP8 blocks need multiples of {BLOCK}; use another tensor-parallel "
                    "size, or jetrl.unfit_layers=skip to keep such layers in BF16 on both sides."
                )


def linear_shapes(model: dict[str, Any], tensor_parallel: int) -> Iterator[tuple[str, int, int]]:
    """``(name, out, in)`` of the linear layers of one decoder block as one tensor-parallel rank of vLLM holds them.

    Read from the keys that Llama-shaped configs share; a model without them yields nothing, and the engine checks its
    modules when it builds them. Key and value heads fewer than ranks are replicated, as in vLLM.
    """
    try:
        hidden, heads, inner = (model[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    except KeyError:
        return
    key_value_heads = model.get("num_key_value_heads") or heads
    head_dim = model.get("head_dim") or hidden // heads
    queries = heads * head_dim // tensor_parallel
    keys = max(1, key_value_heads // tensor_parallel) * head_dim
    inner //= tensor_parallel
    block = "model.layers.*"
    yield f"{block}.self_attn.q_proj", queries, hidden
    yield f"{block}.self_attn.k_proj", keys, hidden
    yield f"{block}.self_attn.v_proj", keys, hidden
    yield f"{block}.self_attn.o_proj", hidden, queries
    yield f"{block}.mlp.gate_proj", inner, hidden
    yield f"{block}.mlp.up_proj", inner, hidden
    yield f"{block}.mlp.down_proj", hidden, inner


def check_data(key: str, files: Any) -> None:
    """Check that each local ``.parquet`` file of ``data.train_files`` or ``data.val_files`` opens."""
    if files is None:
        return
    import pyarrow
    import pyarrow.parquet

    for name in files if isinstance(files, list | tuple | ListConfig) else [files]:
        if str(name).startswith(_REMOTE):
            continue
        path = Path(name).expanduser()
        if not path.exists():
            raise UnsupportedConfiguration(f"the data file {name} ({key}) does not exist; check the path.")
        if path.suffix != ".parquet":
            continue
        try:
            pyarrow.parquet.ParquetFile(path).close()
        except (pyarrow.ArrowException, OSError) as error:
            raise UnsupportedConfiguration(
                f"the data file {name} ({key}) is not a readable parquet file ({type(error).__name__}); write it again."
            ) from None


def _check_architecture(path: str, model: dict[str, Any], options: JetConfig) -> None:
    precision = options.precision
    for part in (model, model.get("text_config") or {}):
        for key in _EXPERT_COUNTS:
            if isinstance(part.get(key), int) and part[key] > 1:
                raise UnsupportedConfiguration(
                    f"precision={precision} covers dense models, and {path} is a mixture of experts "
                    f"({key}={part[key]}); use a dense model or precision=bf16."
                )
    for key in ("vision_config", "audio_config"):
        if model.get(key):
            raise UnsupportedConfiguration(
                f"precision={precision} covers text models, and {path} has a {key}; use a text model or precision=bf16."
            )
    if model.get("quantization_config"):
        raise UnsupportedConfiguration(
            f"precision={precision} quantises the weights itself, and {path} is already quantised "
            "(quantization_config); use the BF16 checkpoint."
        )


def _check_weight_files(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UnsupportedConfiguration(
                f"{index} is not a readable weight index ({type(error).__name__}); copy the model folder again."
            ) from None
    if not files and not list(folder.glob("*.bin")):
        raise UnsupportedConfiguration(
            f"the model folder {folder} holds no weights (*.safetensors); point the model path at a complete folder."
        )
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise UnsupportedConfiguration(
                f"the weight file {file} is missing or damaged ({type(error).__name__}); copy the model folder again."
            ) from None


def _cached_config(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
