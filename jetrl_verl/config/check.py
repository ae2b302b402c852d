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
"""What a precision cannot serve, found in the composed config alone: no file, no GPU and no import of verl.

Each rule names the key as the user typed it, says what is unsupported and what to use. It runs at every composition,
so the user reads it at the command line, also under ``--cfg job``. What depends on the machine is in ``environment``.
"""

from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from jetrl_verl.algorithms.refusals import clip_rules, correction_rules, loss_rules

from .options import JetConfig, UnsupportedConfiguration
from .vllm_arguments import vllm_arguments

_ENGINE_TARGET = "jetrl_verl.config.JetFSDPEngineConfig"
_ROLLOUT_TARGET = "jetrl_verl.config.JetRolloutConfig"
_BF16 = ("bfloat16", "bf16", "torch.bfloat16")

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
_VLLM = f"{ROLLOUT}.engine_kwargs.vllm"

Get = Callable[[str], Any]

_ONLY_STOCK: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    # Modules of the trainer's model, or its whole forward, that other code takes over.
    (f"{MODEL}.use_fused_kernels", (False,), "false"),
    (f"{MODEL}.hf_config_path", (), "null"),  # the trainer's model would be another than vLLM's
    (f"{MODEL}.use_liger", (False,), "false"),
    (f"{MODEL}.tiled_mlp.enabled", (False,), "false"),
    (f"{ACTOR}.use_prefix_grouper", (False,), "false"),
    (f"{ACTOR}.ulysses_sequence_parallel_size", (1,), "1"),
    (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", (1,), "1"),
    ("distillation.enabled", (False,), "false"),
    # Kernels that are not the one both sides call.
    (f"{_VLLM}.attention_backend", ("FLASH_ATTN", "flash_attn"), "FLASH_ATTN"),
    (f"{_VLLM}.attention_config", ({},), "the default"),
    (f"{_VLLM}.decode_context_parallel_size", (1,), "1"),
    (f"{_VLLM}.prefill_context_parallel_size", (1,), "1"),
    (f"{_VLLM}.model_impl", ("auto", "vllm"), "auto"),
    # The shared log-probability is that of the whole softmax at the sampling temperature. Under these the rollout
    # samples from, or is to report, another distribution, and importance weights would be wrong without a word.
    (f"{ROLLOUT}.top_p", (1,), "1"),
    (f"{ROLLOUT}.top_k", (-1,), "-1"),
    (f"{ROLLOUT}.repetition_penalty", (1,), "1"),
    (f"{ROLLOUT}.logprobs_mode", ("processed_logprobs",), "processed_logprobs"),
    (f"{_VLLM}.logprobs_mode", ("processed_logprobs",), "processed_logprobs"),
    (f"{_VLLM}.logits_processors", ([],), "[]"),
)
"""Keys with the values beside which the shared operations can run, and the one to recommend; absent is fine too."""


def check_config(config: DictConfig) -> None:
    """Raise ``UnsupportedConfiguration`` (one sentence) if a composed config cannot run under its ``jetrl`` node.

    A config without that node (``precision=bf16``, or stock verl) passes: it is verl's alone.
    """
    if OmegaConf.select(config, "jetrl") is None:
        return
    options = JetConfig.from_node(config.jetrl)

    get = reader(config)
    for rule in (_training, _model, _rollout, _trainer, _targets, _shared, _exact, _algorithm):
        for complaint in rule(options, get):
            raise UnsupportedConfiguration(f"precision={options.precision} {complaint}.")

    vllm_arguments(options, get(f"{ROLLOUT}.engine_kwargs.vllm"))


def reader(config: DictConfig) -> Get:
    """Callable that reads a composed config."""

    def get(key: str) -> Any:
        """Value at a dotted path as plain Python; ``None`` where a part is absent or still ``???``."""
        value = OmegaConf.select(config, key)
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value

    return get


def only_stock(get: Get) -> Iterator[tuple[str, str]]:
    """What a config asks for that the shared operations cannot do: ``key=value``, and the value to use instead.

    What they can do, but not with equal log-probabilities on both sides, is ``_exact``'s.
    """
    for key, fine, use in _ONLY_STOCK:
        value = get(key)
        if value is not None and value not in fine:
            yield f"{key}={str(value).lower() if isinstance(value, bool) else value}", use
    temperature = get(f"{ROLLOUT}.temperature")
    if temperature is not None and float(temperature) <= 0:
        yield f"{ROLLOUT}.temperature={temperature}", "a positive one"


def _training(options: JetConfig, get: Get) -> Iterator[str]:
    roles = [(ACTOR, f"{ACTOR}.fsdp_config"), (REF, f"{REF}.fsdp_config")]
    if options.critic == "fp8":
        roles.append(("critic", "critic.fsdp"))
    for role, engine in roles:
        strategy = get(f"{role}.strategy")
        if strategy not in ("fsdp", "fsdp2"):
            yield f"trains with FSDP, not with {role}.strategy={strategy}; use fsdp or fsdp2 (model_engine=dp)"
        if get(f"{role}.qat.enable") or get(f"{engine}.qat.enable"):
            yield f"excludes quantisation-aware training ({role}.qat.enable); set it to false"
        for key in ("dtype", "mixed_precision.param_dtype"):
            dtype = get(f"{engine}.{key}")
            if dtype is not None and dtype not in _BF16:
                yield f"casts weights and activations to BF16, not to {engine}.{key}={dtype}; use bfloat16"
        if get(f"{engine}.model_dtype") in ("fp16", "float16"):
            yield f"keeps master weights in FP32 or BF16, not {engine}.model_dtype=fp16; use fp32"


def _model(options: JetConfig, get: Get) -> Iterator[str]:
    for key in ("lora_rank", "lora.rank"):
        if (get(f"{MODEL}.{key}") or 0) > 0:
            yield f"trains the full weights, not LoRA adapters; set {MODEL}.{key}=0 or use precision=bf16"
    for key in ("lora_adapter_path", "lora.adapter_path"):
        if get(f"{MODEL}.{key}") is not None:
            yield f"trains the full weights, not LoRA adapters; remove {MODEL}.{key} or use precision=bf16"
    if get(f"{MODEL}.mtp.enable"):
        yield f"does not cover multi-token prediction; set {MODEL}.mtp.enable=false or use precision=bf16"


def _rollout(options: JetConfig, get: Get) -> Iterator[str]:
    for key in ("rollout_is", "rollout_rs"):
        correction = get(f"algorithm.rollout_correction.{key}")
        if correction is not None and not get(f"{ROLLOUT}.calculate_log_probs"):
            # verl leaves the correction out without a word.
            yield (
                f"corrects with the rollout's log-probabilities (algorithm.rollout_correction.{key}={correction}); "
                f"set {ROLLOUT}.calculate_log_probs=true"
            )
    name = get(f"{ROLLOUT}.name")
    if name not in (None, "vllm"):
        yield f"rolls out with vLLM, not with {ROLLOUT}.name={name}; use vllm or precision=bf16"
    for key in ("quantization", "quantization_config_file"):
        if get(f"{ROLLOUT}.{key}") is not None:
            yield (
                f"quantises the rollout itself, so {ROLLOUT}.{key}={get(f'{ROLLOUT}.{key}')} contradicts it; "
                "remove it, or use precision=bf16 for verl's own quantisation"
            )
    if get(f"{ROLLOUT}.qat.enable"):
        yield f"excludes quantisation-aware training ({ROLLOUT}.qat.enable); set it to false"
    if get(f"{ROLLOUT}.dtype") not in _BF16:
        yield f"computes in BF16 between the FP8 GEMMs, not in {ROLLOUT}.dtype={get(f'{ROLLOUT}.dtype')}; use bfloat16"
    if get(f"{ROLLOUT}.load_format") != "dummy":
        yield (
            "fills vLLM's FP8 weights from the trainer before the first rollout and cannot read a BF16 checkpoint into "
            f"them, so {ROLLOUT}.load_format={get(f'{ROLLOUT}.load_format')} is unsupported; use dummy"
        )
    for key, what in (("pipeline_model_parallel_size", "pipeline"), ("expert_parallel_size", "expert")):
        if (get(f"{ROLLOUT}.{key}") or 1) > 1:
            yield f"supports tensor and data parallel rollout, not {what} parallel; set {ROLLOUT}.{key}=1"
    tensor_parallel = get(f"{ROLLOUT}.engine_kwargs.vllm.tensor_parallel_size")
    if tensor_parallel not in (None, get(f"{ROLLOUT}.tensor_model_parallel_size")):
        # The trainer decides by this number which layers fit the rollout's shards.
        yield f"reads the tensor-parallel size from {ROLLOUT}.tensor_model_parallel_size; set {tensor_parallel} there"
    if get(f"{ROLLOUT}.enable_rollout_routing_replay"):
        yield f"covers dense models, which have no router; set {ROLLOUT}.enable_rollout_routing_replay=false"
    if get(f"{ROLLOUT}.disaggregation.enabled"):
        yield f"does not cover split prefill and decode servers; set {ROLLOUT}.disaggregation.enabled=false"
    backend = get(f"{ROLLOUT}.checkpoint_engine.backend")
    if backend != "naive":
        yield f"sends FP8 codes through verl's naive sync, not {ROLLOUT}.checkpoint_engine.backend={backend}; use naive"
    if get(f"{ROLLOUT}.checkpoint_manager_class") is not None:
        yield f"sends FP8 codes through verl's own checkpoint manager; remove {ROLLOUT}.checkpoint_manager_class"

    vllm = get(f"{ROLLOUT}.engine_kwargs.vllm") or {}
    for key, fine, use in (
        ("dtype", ("auto", *_BF16), "bfloat16"),
        ("load_format", ("dummy",), "dummy"),
        ("pipeline_parallel_size", (1,), "1"),
        ("enable_expert_parallel", (False,), "false"),
        ("enable_lora", (False,), "false"),
        ("kv_cache_dtype", ("auto", "bfloat16"), "auto"),
        ("speculative_config", ({},), "no speculative decoding"),
    ):
        if vllm.get(key) is not None and vllm[key] not in fine:
            yield f"does not support {ROLLOUT}.engine_kwargs.vllm.{key}={vllm[key]}; use {use}"


def _trainer(options: JetConfig, get: Get) -> Iterator[str]:
    if not _on(get("trainer.use_v1")):
        yield "needs verl's v1 trainer; remove trainer.use_v1=false"
    mode = get("trainer.v1.trainer_mode")
    if mode not in (None, "sync", "colocate_async"):
        yield f"needs trainer and rollout on the same GPUs, not trainer.v1.trainer_mode={mode}; use sync"
    if not _on(get("actor_rollout_ref.hybrid_engine")) or (get(f"{ROLLOUT}.nnodes") or 0) > 0:
        yield (
            "needs trainer and rollout on the same GPUs; "
            f"set actor_rollout_ref.hybrid_engine=true and {ROLLOUT}.nnodes=0"
        )
    device = get("trainer.device")
    if device not in (None, "cuda", "cpu"):
        yield f"runs on NVIDIA GPUs, not on trainer.device={device}; use cuda"


def _on(switch: Any) -> bool:
    """A switch that is on by default and that verl reads by its truth value."""
    return switch is None or bool(switch)


def _targets(options: JetConfig, get: Get) -> Iterator[str]:
    # The flag works through these keys alone: overridden, it would do nothing and say nothing.
    for node, target in (
        (f"{ACTOR}.fsdp_config", _ENGINE_TARGET),
        (f"{REF}.fsdp_config", _ENGINE_TARGET),
        ("critic.fsdp", _ENGINE_TARGET),
        (ROLLOUT, _ROLLOUT_TARGET),
    ):
        if get(f"{node}._target_") != target:
            yield f"works through {node}._target_={target}; remove {node}._target_={get(f'{node}._target_')}"
    for node in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp", f"{ROLLOUT}.custom"):
        if get(f"{node}.jetrl") is None:
            yield f"works through {node}.jetrl; keep that key when overriding {node}"


def _algorithm(options: JetConfig, get: Get) -> Iterator[str]:
    yield from correction_rules(get)
    yield from loss_rules(get)
    yield from clip_rules(get)


def _shared(options: JetConfig, get: Get) -> Iterator[str]:
    if options.operations != "shared":
        return
    instead = "" if options.precision == "jet_fp8_exact" else ", or jetrl.operations=stock"
    for setting, use in only_stock(get):
        yield f"runs operations shared by rollout and trainer, which do not cover {setting}; use {use}{instead}"


def _exact(options: JetConfig, get: Get) -> Iterator[str]:
    """What the shared operations serve, but not with equal log-probabilities on both sides."""
    if options.precision != "jet_fp8_exact":
        return
    if not get(f"{ROLLOUT}.calculate_log_probs"):
        yield f"compares the rollout's log-probabilities with the trainer's; set {ROLLOUT}.calculate_log_probs=true"
    if (get(f"{ROLLOUT}.tensor_model_parallel_size") or 1) > 1:
        yield (
            "runs the rollout on one GPU per replica, since a reduction over ranks rounds differently; "
            f"set {ROLLOUT}.tensor_model_parallel_size=1"
        )
    mode = get("trainer.v1.trainer_mode")
    if mode not in (None, "sync"):
        yield f"trains on samples of the current policy, not under trainer.v1.trainer_mode={mode}; use sync"
