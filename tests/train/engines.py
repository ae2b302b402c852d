# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's engine from its registry with a precision's engine config, as workers build it; its steps and weight syncs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from streams import Arrived
from tensordict import NonTensorStack, TensorDict

from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.patches.attention_name import JETRL_ATTENTION


def build(
    folder: str,
    role: str = "actor",
    *,
    tokenizer: bool = False,
    optimizer: dict[str, Any] | None = None,
    strategy: str = "fsdp2",
    attention: str = JETRL_ATTENTION,
    ulysses: int = 1,
    fsdp_size: int = -1,
    rollout_ranks: int = 1,
    images: bool = False,
    checkpointing: bool | str = True,
    sharding: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **options,
):
    """Initialized engine on the model in ``folder``; call it on every rank.

    Args:
        role: as in ``JetWorkerEngineConfig``; ``"critic"`` is a value model.
        tokenizer: whether the folder's tokenizer is loaded.
        optimizer: further fields of ``FSDPOptimizerConfig``. strategy: ``fsdp``, which is FSDP1, or ``fsdp2``.
        attention: ``override_config.attn_implementation``.
        ulysses: ranks that share the tokens of a micro-batch.
        fsdp_size: ranks that share the weights; -1: all, else there are replicas (HSDP).
        rollout_ranks: tensor-parallel size of the rollout. images: whether samples may have some.
        checkpointing: whether the backward recomputes each layer, verl's default, or ``jetrl.checkpointing``.
        sharding: further fields of verl's engine config. model: further fields of ``HFModelConfig``.
        options: fields of ``JetConfig`` that differ from ``precision=jet_fp8``; ``precision="bf16"`` is verl's engine.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from jetrl_verl.targets.configs import JetWorkerEngineConfig

    kind = "value_model" if role == "critic" else "language_model"
    fields = {"precision": "jet_fp8", "train": "fp8", "rollout": "fp8"} | options
    if isinstance(checkpointing, str):
        fields["checkpointing"] = checkpointing
    common = dict(strategy=strategy, use_torch_compile=False, fsdp_size=fsdp_size)
    common["ulysses_sequence_parallel_size"] = ulysses
    # As in verl's YAML; its dataclass has True.
    common |= {"use_no_sync_for_gradient_accumulation": False} | (sharding or {})
    stock = fields["precision"] == "bf16"
    schedule = {"lr": 1e-3, "lr_warmup_steps": 0, "total_training_steps": 10} | (optimizer or {})
    engine = EngineRegistry.new(
        model_type=kind,
        backend=strategy,
        model_config=HFModelConfig(
            path=folder,
            model_type=kind,
            load_tokenizer=tokenizer,
            enable_gradient_checkpointing=bool(checkpointing),
            override_config={"attn_implementation": attention},
            **(model or {}),
        ),
        engine_config=FSDPEngineConfig(**common)
        if stock
        else JetWorkerEngineConfig(
            **common, jetrl=Job(JetConfig(**fields), rollout_ranks=rollout_ranks, images=images), jetrl_role=role
        ),
        optimizer_config=FSDPOptimizerConfig(**schedule),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


SEQUENCES, TOKENS = 4, 24


def tokens(seed: int, longest: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, 64, (SEQUENCES, longest), generator=torch.Generator().manual_seed(seed))


def batch(
    seed: int,
    lengths: tuple[int, ...] = (TOKENS,) * SEQUENCES,
    packed: bool = True,
    pixels: torch.Tensor | None = None,
    micro_batches: int = 2,
    temperature: float = 1.0,
) -> TensorDict:
    """The ``seed``'s sequences in verl's jagged form.

    Args:
        packed: whether micro-batches are packed, else padded.
        pixels: of an image of four tokens in the first sequence, for :func:`tiny_models.tiny_config`.
    """
    from verl.utils import tensordict_utils as tu

    def jagged(rows: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(rows, lengths)], layout=torch.jagged)

    ids = tokens(seed, longest := max(TOKENS, *lengths))
    positions = torch.arange(longest).expand(SEQUENCES, -1)
    mask = (positions > 0).long()  # the first token has no predecessor
    data = TensorDict(
        {"input_ids": jagged(ids), "position_ids": jagged(positions), "loss_mask": jagged(mask)}, batch_size=SEQUENCES
    )
    if pixels is not None:
        ids, rows = ids.clamp(max=59), positions.expand(4, SEQUENCES, -1).transpose(0, 1).clone()
        ids[0, 1:7] = torch.tensor([60, 62, 62, 62, 62, 61])
        rows[0, 1:, 2:6] = torch.tensor([[2, 2, 2, 2], [2, 2, 3, 3], [2, 3, 2, 3]])
        rows[0, 1:, 6:] -= 2
        data["input_ids"] = jagged(ids)
        offsets = data["input_ids"].offsets()
        data["position_ids"] = torch.nested.nested_tensor_from_jagged(torch.cat(list(rows), 1), offsets, jagged_dim=2)
        image = dict(pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]]))
        data["multi_modal_inputs"] = NonTensorStack(image, *({} for _ in range(SEQUENCES - 1)))
    settings = dict(micro_batch_size_per_gpu=SEQUENCES // micro_batches, use_remove_padding=packed)
    tu.assign_non_tensor(data, temperature=temperature, use_dynamic_bsz=False, **settings)
    return data


def train(engine, seed: int, **form) -> float | None:
    """One optimizer step on the mean negative log-likelihood of the ``seed``'s sequences; the gradient's norm.

    None on ranks that do not report: the first of those that share tokens does.
    """
    from functools import partial

    from verl.workers.utils.losses import sft_loss

    with engine.train_mode():
        return engine.train_batch(batch(seed, **form), partial(sft_loss, None)).get("metrics", {}).get("grad_norm")


def outputs(engine, seed: int, name: str = "log_probs", **form) -> torch.Tensor:
    """An output of the engine for the ``seed``'s tokens that have a successor, FP32."""
    with engine.eval_mode():
        rows = engine.infer_batch(batch(seed, **form))["model_output"][name]
    return torch.cat([row[:-1] for row in rows.float().unbind()])


def quantized(model: torch.nn.Module) -> list[JetLinear | JetExperts]:
    """Modules of a model that quantize weights."""
    return [module for module in model.modules() if isinstance(module, JetLinear | JetExperts)]


def sent(engine) -> Arrived:
    """A weight sync's tensors by name, and its statement."""
    stream, _ = engine.get_per_tensor_param()
    return Arrived(stream)


@contextmanager
def gathers_counted() -> Iterator[dict[int, int]]:
    """Identity of each FSDP2 parameter group -> its all-gathers inside the context."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    counts: dict[int, int] = {}
    stock = FSDPParamGroup._to_unsharded

    def counted(self):
        if not self.is_unsharded:
            counts[id(self)] = counts.get(id(self), 0) + 1
        return stock(self)

    with mock.patch.object(FSDPParamGroup, "_to_unsharded", counted):
        yield counts


def merge_checkpoint(actor: Path, target: Path) -> None:
    """verl's own merger on the folder of a checkpoint's actor."""
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(actor), "--target_dir", str(target)]
    subprocess.run(command, check=True, env={**os.environ, "VERL_PLATFORM": "cpu"})
