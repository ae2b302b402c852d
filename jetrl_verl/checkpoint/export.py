# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Exports a trained policy: BF16 in Hugging Face's layout, block FP8 as stock vLLM reads it.

The FP8 qdata come from ``quantize_stream``, which also feeds the weight sync, so every byte is the rollout's.
The digest is the contract check's: it equals the ``live digest`` that an unsharded rollout logged at its last sync.

Tensors are streamed: inputs are mapped, and memory holds one output file. Outputs are renamed into place when complete.

Invariant scaling (algorithms/invariant_scaling.py) is part of the master weights. The BF16 folder is exported without
it, in FP32 before the one rounding; the FP8 folder with it, or its qdata would not be the rollout's.
"""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from jetrl_verl import formats, kernels
from jetrl_verl.algorithms.invariant_scaling import FOLDED, unfolded
from jetrl_verl.checkpoint.validation import latest_step, no_trainer_state
from jetrl_verl.config.composition import parse
from jetrl_verl.config.job import Job
from jetrl_verl.config.model import check_model, read_model, weight_files
from jetrl_verl.config.support.table import model_refusal
from jetrl_verl.formats import UNQUANTIZED
from jetrl_verl.formats.format import QuantizedWeight
from jetrl_verl.formats.sums import row_sums
from jetrl_verl.inputs import UserError, check_new_folder, load_json, new_folder, reading, writing
from jetrl_verl.models import family, model_types
from jetrl_verl.models.adapters import factors_of, is_factor, stock_name
from jetrl_verl.models.families.base import Experts, Family, place
from jetrl_verl.models.plan import LinearPlan, UnsupportedLayer, plan_of
from jetrl_verl.sync.quantize import as_tensors, quantize_stream

_EXPORTED = tuple(name for name, traits in formats.FORMATS.items() if traits.exports)
FORMATS = (UNQUANTIZED, *_EXPORTED, "both")
FACTS = "jetrl_export.json"
SHARD_BYTES = 4 * 2**30

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


@dataclass(frozen=True)
class ExportOptions:
    """How the FP8 folder is made; use what the run used, or the qdata is not the rollout's.

    Attributes:
        format: ``bf16``, ``fp8`` or ``both``.
        scale_rule, unfit_layers: ``jetrl.scale_rule`` and ``jetrl.unfit_layers`` of the run.
        tensor_parallel: the rollout's ``tensor_model_parallel_size``; with ``unfit_layers=skip`` it decides which
            layers were quantized.
    """

    format: str = "both"
    scale_rule: str = "fp32"
    unfit_layers: str = "stop"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"--format {self.format} is not a choice; use one of {', '.join(FORMATS)}.")
        self.job()

    @property
    def number_format(self) -> str:
        """Format of a quantized folder; of ``both``, the first that stock engines read."""
        return self.format if self.format in _EXPORTED else _EXPORTED[0]

    def job(self) -> Job:
        """The rollout that the folder is for: training's requirements, as of a mixture, do not apply to it."""
        options = {"precision": "fp8_rollout", "train": formats.UNQUANTIZED, "rollout": self.number_format}
        options |= {"scale_rule": self.scale_rule, "unfit_layers": self.unfit_layers}
        return Job(parse(options), rollout_ranks=self.tensor_parallel)


@dataclass(frozen=True)
class Exported:
    """An exported folder: number of weight files, their bytes, number of FP8 tensors, digest, and the digest with a
    vision tower, which a run with images logs."""

    folder: Path
    files: int
    bytes: int
    quantized: int
    digest: int
    image_digest: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to read, any number of times.

    Attributes:
        source: folder with the weights. config_folder: folder with configuration, tokenizer and other files.
        tensors: starts a stream of (Hugging Face name, full tensor).
        masters: whether these are the trainer's FP32 weights, from which invariant scaling can be taken out.
    """

    source: Path
    config_folder: Path
    tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    masters: bool

    @property
    def config(self) -> dict[str, Any]:
        """The parsed ``config.json``."""
        file = self.config_folder / "config.json"
        with reading(file, "model config", "Copy the checkpoint again"):
            config = load_json(file)
            config["model_type"]  # every model has one
            return config


def export(checkpoint: Path, out: Path, options: ExportOptions, shard_bytes: int = SHARD_BYTES) -> list[Exported]:
    """Write ``out`` (one format) or ``out/bf16`` and ``out/fp8`` (both) from a checkpoint.

    Args:
        checkpoint: a verl FSDP checkpoint (its root, ``global_step_N`` or ``global_step_N/actor``) or a Hugging Face
            folder with safetensors.
        out: a folder that does not exist yet, or is empty.
        options: format, and the run's options that determine the qdata.
        shard_bytes: size of a weight file, which is also the memory used besides one tensor.

    Raises:
        UserError: one sentence; ``out`` is then unchanged.
    """
    check_new_folder(out, "OUT")
    source = find_checkpoint(checkpoint)
    names = (UNQUANTIZED, options.number_format) if options.format == "both" else (options.format,)
    plans = _plan(source, options) if names != (UNQUANTIZED,) else {}
    opened = _open(source)
    if opened.config.get("quantization_config"):
        raise UserError(f"{source} is already quantized (quantization_config); name the trained BF16 or FP32 weights.")

    written = []
    with writing(out, "OUT"), new_folder(out) as building:
        for name in names:
            below = name if len(names) > 1 else ""
            (building / below).mkdir(exist_ok=True)
            exported = _write(opened, building / below, plans if name != UNQUANTIZED else {}, options, shard_bytes)
            written.append(replace(exported, folder=out / below))
    return written


# --- reading ---------------------------------------------------------------------------------------------------------


def find_checkpoint(path: Path) -> Path:
    """The folder of ``path`` that holds a model: of a run's checkpoints the latest, of a step its actor."""
    path = latest_step(path)
    if (path / "actor").is_dir():
        path = path / "actor"
    if (path / "fsdp_config.json").is_file() or (path / "config.json").is_file():
        if (path / "fsdp_config.json").is_file() and not any(path.glob("model_world_size_*.pt")):
            raise UserError(no_trainer_state(path))
        return path
    raise UserError(
        f"{path} is neither a verl FSDP checkpoint (fsdp_config.json) nor a Hugging Face folder (config.json); "
        "name global_step_N of a run, or a model folder."
    )


def _open(source: Path) -> Checkpoint:
    if not (source / "fsdp_config.json").is_file():
        return Checkpoint(source, source, lambda: _read_safetensors(source), masters=False)
    return Checkpoint(source, source / "huggingface", lambda: _read_fsdp(source), masters=True)


def _plan(source: Path, options: ExportOptions) -> dict[str, LinearPlan]:
    """Which layers are quantized. Raises, before anything large is read, if the FP8 flow cannot run the model."""
    from transformers import AutoConfig

    folder = source / "huggingface" if (source / "fsdp_config.json").is_file() else source
    try:
        if folder is source:
            check_model(options.job(), read_model(str(folder.absolute())))
        with reading(folder / "config.json", "model config", "Copy the checkpoint again"):
            config = AutoConfig.from_pretrained(folder)
        return options.job().plans(config)
    except UnsupportedLayer as error:
        raise UserError(model_refusal(error, str(folder), options.job().options.precision)) from None


def _read_safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a Hugging Face folder, mapped."""
    files = weight_files(folder)
    if not files:
        raise UserError(f"{folder} holds no *.safetensors; save the model with safetensors first.")
    for file in files:
        with reading(file, "weight file", "Copy the folder again"):
            tensors = safe_open(file, framework="pt")
        with tensors:
            for name in tensors.keys():  # noqa: SIM118  a handle, not a mapping
                with reading(file, "weight file", "Copy the folder again"):
                    tensor = tensors.get_tensor(name)
                yield name, tensor


def _read_fsdp(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a verl FSDP checkpoint, merged from mapped shards."""
    try:
        yield from _merged(folder)
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"verl's model merger cannot read {folder} ({reason}); every rank's model_world_size_*_rank_*.pt must be "
            "there, complete, next to huggingface/."
        ) from None


REACHES = (
    "verl.model_merger.fsdp_model_merger:FSDPModelMerger._calculate_shard_configuration",
    "verl.model_merger.fsdp_model_merger:FSDPModelMerger._extract_device_mesh_info",
    "verl.model_merger.fsdp_model_merger:FSDPModelMerger._merge_by_placement",
)
"""What this file uses of verl through values; scripts/reach.py watches it."""


def _merged(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """verl's model merger, tensor by tensor and without its cast to BF16; LoRA adapters are merged."""
    from torch.distributed.tensor import DTensor
    from torch.utils.serialization import config as loading
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger, merge_non_dtensor_shards

    world = load_json(folder / "fsdp_config.json")["world_size"]

    def shard(rank: int) -> dict[str, torch.Tensor]:
        file = folder / f"model_world_size_{world}_rank_{rank}.pt"
        if not file.is_file():
            raise FileNotFoundError(file.name)
        with loading.patch({"load.mmap": True}):
            return torch.load(file, map_location="cpu", weights_only=False)

    first = shard(0)
    with contextlib.redirect_stdout(io.StringIO()):  # the merger prints its settings
        merger = FSDPModelMerger(
            ModelMergerConfig("merge", "fsdp", local_dir=str(folder), hf_model_config_path=str(folder / "huggingface"))
        )
    count, _ = merger._calculate_shard_configuration(*merger._extract_device_mesh_info(first, world))
    shards = [first, *(shard(rank) for rank in range(1, count))]
    keys = {stock_name(name): name for name in sorted(first)}

    def whole(name: str) -> torch.Tensor:
        parts = [state[keys[name]] for state in shards]
        if isinstance(parts[0], DTensor):
            # The mesh's last dimension shards; the ones before it replicate.
            return merger._merge_by_placement([part._local_tensor for part in parts], parts[0].placements[-1])
        return merge_non_dtensor_shards(name, parts)

    if keys and all(map(is_factor, keys)):
        raise UserError(
            f"{folder} holds LoRA adapters without the model's weights (actor.checkpoint.save_lora_only); export a "
            "checkpoint of a run without that setting."
        )
    settings = load_json(folder / "lora_train_meta.json") if any(map(is_factor, keys)) else {}
    for name in keys:
        factors = factors_of(name)
        if factors[0] in keys:
            scale = settings["lora_alpha"] / settings["r"]
            yield name, kernels.merge_adapter(*(whole(one).bfloat16() for one in (name, *factors)), scale)
        elif not is_factor(name):
            yield name, whole(name)


# --- writing ---------------------------------------------------------------------------------------------------------


def _write(
    checkpoint: Checkpoint, folder: Path, plans: Mapping[str, LinearPlan], options: ExportOptions, shard_bytes: int
) -> Exported:
    """Write one folder: layers of ``plans`` in FP8, the rest in BF16."""
    config = checkpoint.config
    decoder = _decoder(config)
    weights, mixture, names = checkpoint.tensors(), decoder.experts, []
    if mixture is not None:
        weights, plans = one_by_one(weights, mixture), _of_each_expert(plans, mixture)
    if plans:
        for layer, kind in enumerate(decoder.kinds(config)):
            absent = set(decoder.projections) - set(kind.projections)
            names += [f"{decoder.layers}.{layer}.{suffix}.weight" for suffix in plans if suffix not in absent]
    elif checkpoint.masters and FOLDED in config:
        weights = unfolded(weights, config.pop(FOLDED), decoder)
    digest = _Digest(decoder, bool(config.get("tie_word_embeddings")))
    weights = _checked(weights, names, plans, digest.tied)
    stream = digest.of(quantize_stream(weights, plans, options.scale_rule))
    files, size, quantized = _save(stream, folder, shard_bytes)

    if mixture is not None:
        # transformers 5 writes another name; earlier releases read the published one.
        config.get("text_config", config).setdefault(mixture.count[0], mixture.number(config))
    for part in (config, config.get("text_config"), config.get("vision_config")):
        if part is not None:
            part["dtype"] = "bfloat16"
            part.pop("torch_dtype", None)  # the older name of the same key
    if plans:
        kept = [name.removesuffix(".weight") for name in names if not plan_of(name, plans).quantized]
        if mixture is not None:
            kept += [f"{decoder.layers}.{layer}.{mixture.router}" for layer in range(len(decoder.kinds(config)))]
        kept += digest.of_the_tower
        config["quantization_config"] = formats.get(options.number_format).huggingface_config(["lm_head", *kept])
        facts = {"source": str(checkpoint.source.resolve()), "digest": f"{digest.value:#018x}", **asdict(options)}
        (folder / FACTS).write_text(json.dumps(facts, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for file in sorted(checkpoint.config_folder.iterdir()):
        is_weight = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not is_weight and file.name not in ("config.json", FACTS):
            shutil.copyfile(file, folder / file.name)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors makes them readable by the owner only
    return Exported(folder, files, size, quantized, digest.value, (digest.value + digest.tower) % 2**64)


def _decoder(config: Mapping[str, Any]) -> Family:
    """The model's family; one with the usual names for an unknown type, of which no layer is quantized."""
    model_type = config["model_type"]
    return family(config) if model_type in model_types() else Family(model_type)


def one_by_one(weights: Iterable[tuple[str, torch.Tensor]], mixture: Experts) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream with fused experts split as in published checkpoints: one tensor per expert and projection."""
    gate, up, down = mixture.each
    for name, tensor in weights:
        location = place(name)
        if location is None or location.module not in (mixture.gate_up, mixture.down):
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor):
            prefix = f"{location.layer}.{mixture.module}.{expert}"
            if location.module == mixture.down:
                yield f"{prefix}.{down}.weight", matrix
            else:
                for projection, half in zip((gate, up), matrix.chunk(2), strict=True):
                    yield f"{prefix}.{projection}.weight", half


def _of_each_expert(plans: Mapping[str, LinearPlan], mixture: Experts) -> dict[str, LinearPlan]:
    """Plans by the names of :func:`one_by_one`; shard shapes, unused here, stay those of fused experts."""
    split: dict[str, LinearPlan] = {}
    gate, up, down = mixture.each
    for suffix, plan in plans.items():
        if plan.experts == 1:
            split[suffix] = plan
            continue
        of_one = {down: plan.n} if suffix == mixture.down else {gate: plan.n // 2, up: plan.n // 2}
        for expert in range(plan.experts):
            for projection, n in of_one.items():
                name = f"{mixture.module}.{expert}.{projection}"
                split[name] = replace(plan, suffix=name, n=n, experts=1)
    return split


class _Digest:
    """Sum of the contract's sums over a stream, modulo 2^64, as an unsharded rollout logs it.

    Attributes:
        tied: names of the head and the embedding if they are one tensor, else empty.
        value: the sum without a vision tower, which a rollout of text does not have. tower: the tower's.
        of_the_tower: modules of a vision tower with a matrix.
    """

    def __init__(self, decoder: Family, tied: bool) -> None:
        self.value, self.tower, self.of_the_tower = 0, 0, []
        self.tied = (f"{decoder.head}.weight", f"{decoder.embedding}.weight") if tied else ()
        self._tower = f"{decoder.tower}."

    def of(
        self, stream: Iterable[tuple[str, torch.Tensor | QuantizedWeight]]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield ``stream`` and add up its sums."""
        for name, value in stream:
            if isinstance(value, QuantizedWeight):
                self._add(value.format.sums(value))
            elif name.startswith(self._tower):
                self.of_the_tower += [name.removesuffix(".weight")] if value.ndim == 2 else []
                self.tower = (self.tower + int(row_sums(value).sum().item())) % 2**64
            else:
                # Trainer and rollout count a tied embedding under both of its names.
                self._add(row_sums(value), times=1 + (name in self.tied))
            yield name, value

    def _add(self, sums: torch.Tensor, times: int = 1) -> None:
        self.value = (self.value + times * int(sums.sum().item())) % 2**64


def _checked(
    weights: Iterable[tuple[str, torch.Tensor]],
    expected: Iterable[str],
    plans: Mapping[str, LinearPlan],
    tied: tuple[str, ...],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream without the head of a tied embedding. Raises if tensors do not match ``config.json``.

    Args:
        tied: names of the head and the embedding if they are one tensor, else empty.
    """
    missing = set(expected)
    shared: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{name} holds Inf or NaN; export an earlier checkpoint of the run.")
        plan = plan_of(name, plans) if name.endswith(".weight") else None
        if plan is not None:
            if name not in missing:
                raise UserError(f"{name} belongs to a layer that config.json does not have; copy the folder again.")
            if tuple(tensor.shape) != (plan.n, plan.k):
                raise UserError(
                    f"{name} has shape {list(tensor.shape)} and config.json says [{plan.n}, {plan.k}]; the weights and "
                    "the configuration do not belong together."
                )
            missing.remove(name)
        if name in tied:
            shared[name] = tensor
            if len(shared) == 2 and not torch.equal(*(one.bfloat16() for one in shared.values())):
                head, embedding = tied
                raise UserError(
                    f"{head} differs from {embedding}, which config.json ties; set tie_word_embeddings to false."
                )
            if name == tied[0]:
                continue
        yield name, tensor
    missing |= set(tied[1:]) - shared.keys()
    if missing:
        raise UserError(f"{min(missing)} is not in the checkpoint ({len(missing)} missing); copy the folder again.")


def _save(
    weights: Iterable[tuple[str, torch.Tensor | QuantizedWeight]], folder: Path, shard_bytes: int
) -> tuple[int, int, int]:
    """Write a stream as safetensors of about ``shard_bytes``; returns the number of files, bytes and FP8 weights."""
    shard: dict[str, torch.Tensor] = {}
    buffered = size = quantized = 0
    parts: list[list[str]] = []

    def flush() -> None:
        try:
            save_file(shard, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        except SafetensorError as error:  # of a full disk, for one
            raise OSError(str(error)) from None
        parts.append(list(shard))
        shard.clear()

    for weight in weights:
        tensors = dict(as_tensors([weight]))
        weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if shard and buffered + weight_bytes > shard_bytes:
            flush()
            buffered = 0
        shard |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        buffered += weight_bytes
        size += weight_bytes
        quantized += isinstance(weight[1], QuantizedWeight)
    flush()
    if len(parts) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return 1, size, quantized
    weight_map = {}
    for number, names in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return len(parts), size, quantized


def run_export(checkpoint: Path, out: Path, options: ExportOptions) -> None:
    """The command: export, then print what was written and how to serve it. Raises ``UserError``."""
    for exported in export(checkpoint, out, options):
        layers = f", {exported.quantized} layers in FP8" if exported.quantized else ""
        files = f"{exported.files} {'file' if exported.files == 1 else 'files'}"
        print(f"{exported.folder}: {files}, {decimal(exported.bytes)}{layers}")
        if exported.quantized:
            # With several workers, each logs the sum of its shard.
            logged = ""
            if options.tensor_parallel == 1:
                logged = ": the live digest in the log of the run's last weight sync"
                if exported.image_digest != exported.digest:
                    logged += f", or {exported.image_digest:#018x} of a run with images"
            print(f"digest {exported.digest:#018x}{logged}")
            # DeepGEMM, vLLM's default, rounds scales to powers of two at load and requantizes.
            print(f"serve these qdata as they are: VLLM_USE_DEEP_GEMM=0 vllm serve {exported.folder}")
