# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a job's models in the driver and checks that the job can run them; the rows are in ``support/machine.py``.

A remote path is read through verl's own copy. A hub name without a network is left to the workers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl_verl.formats.catalog import UNQUANTIZED, CacheTraits, traits_of
from jetrl_verl.inputs import load_json, reading
from jetrl_verl.patches.attention_name import JETRL_ATTENTION

from . import hopper_kernels
from .installed import on_cpu
from .support.limits import CUTS_AT_PAGES
from .support.row import Get, UnsupportedConfiguration, shown
from .support.scopes import (
    ACTOR,
    ADAPTERS,
    ATTENTION,
    BUCKET,
    CRITIC_MODEL,
    MODEL,
    REPLICAS,
    ROLLOUT,
    ROTARY,
    ULYSSES,
    ULYSSES_OF_THE_CRITIC,
    VLLM,
    attention_key,
)
from .support.table import explained, refusal, refuse
from .vllm_plugins import replacements

if TYPE_CHECKING:
    from jetrl_verl.models import Family

    from .job import Job

OF_ONE_SIDE = frozenset(
    {
        *("_attn_implementation", "attn_implementation", "experts_implementation", "dtype", "torch_dtype", "use_cache"),
        *("output_attentions", "output_hidden_states", "return_dict", "initializer_range", "chunk_size_feed_forward"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "num_labels", "problem_type"),
        *("_name_or_path", "name_or_path", "transformers_version", "auto_map", "quantization_config"),
    }
)
"""Fields of a model's configuration that change no number of its forward, or that the precision sets; any other one is
the same on both sides."""

REACHES = ("verl.utils.fs:copy_to_local",)
"""What this file calls as verl's workers do, which then find its copy; scripts/reach.py watches it."""


@dataclass(frozen=True)
class ModelFiles:
    """A model that the driver can read.

    Attributes:
        path: as configured; messages name it. folder: with its files; None for a hub name.
        config: its configuration, with the defaults of a type that we know.
    """

    path: str
    folder: Path | None
    config: Mapping[str, Any]

    def changed(self, fields: Mapping[str, Any]) -> "ModelFiles":
        """The model with other fields of its configuration."""
        return replace(self, config={**self.config, **fields})

    @property
    def family(self) -> "Family":
        """Of its decoder."""
        # Not at the top: the checks of versions have to run where importing torch fails.
        from jetrl_verl.models import family

        return family(self.config)

    def read(self, field: str, default: Any = None) -> Any:
        """A field of its decoder's configuration."""
        from jetrl_verl.models.families.base import read

        return read(self.config, field, default)


def read_model(path: str | None) -> ModelFiles | None:
    """The model at ``path``; None for a remote path, and for a hub name of which the hub has no answer.

    Raises:
        UnsupportedConfiguration: a local folder that is missing, or whose ``config.json`` cannot be read.
    """
    return None if path is None or "://" in str(path) else _read(str(path), str(path), f"{MODEL}.path")


def copy_model(path: str | None, key: str) -> ModelFiles | None:
    """As :func:`read_model`, but a remote path is copied first, as the workers do, which then find the copy.

    verl's ``use_shm`` would copy it once more, into this machine's memory, to no use here.

    Args:
        key: of the configuration, for messages.
    """
    if path is None:
        return None
    from verl.utils.fs import copy_to_local

    try:
        local = copy_to_local(path)
        why = "" if "://" not in path or Path(local).is_dir() else f"verl's copy left no folder at {local}"
    except Exception as error:  # whatever a file system raises
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    if why:
        raise UnsupportedConfiguration(
            f"the model {path} cannot be copied to the driver's machine ({why}). Set {key} to a path that can."
        )
    return _read(path, local, key)


def _read(path: str, local: str, key: str) -> ModelFiles | None:
    folder = Path(local).expanduser()
    if folder.is_dir():
        config_file = folder / "config.json"
    elif folder.is_absolute() or local.startswith((".", "~")):
        raise UnsupportedConfiguration(f"the model folder {path} does not exist. Set {key} to a folder that does.")
    else:
        config_file, folder = _hub_config(local), None
        if config_file is None:
            return None

    from transformers import AutoConfig

    from jetrl_verl.models import model_types

    remedy = f"Set {key} to a complete Hugging Face folder"
    with reading(config_file, "model config", remedy, UnsupportedConfiguration):
        model = load_json(config_file)
        if model.get("model_type") in model_types():
            # What config.json leaves out takes the default of its class (Qwen3's head_dim, for one).
            model = AutoConfig.from_pretrained(config_file.parent).to_dict()
    return ModelFiles(path, folder, model)


@cache
def _hub_config(name: str) -> Path | None:
    """``config.json`` of a hub model, cached or downloaded, as verl would; ``None`` where the hub has no answer.

    Asked once per process: without a network a question takes the hub's client 25 seconds.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=5))
    except (HfHubHTTPError, OSError, ValueError):
        # No network, no such model, not a hub name: verl says so itself when it loads the model.
        return None


def overrides_of_trainer(get: Get, node: str = MODEL) -> dict[str, Any]:
    """A job's overrides of the trainer's copy of the configuration of the model at ``node``, as verl reads them."""
    overrides = get(f"{node}.override_config") or {}
    return overrides.get("model_config", overrides)


def overrides_of_both(get: Get) -> dict[str, Any]:
    """A job's overrides of the model's configuration that the rollout gets as well: the trainer's, but
    :data:`OF_ONE_SIDE`."""
    return {name: value for name, value in overrides_of_trainer(get).items() if name not in OF_ONE_SIDE}


def fields_of_one_side(config: Mapping[str, Any], trained: Mapping[str, Any], get: Get) -> Iterator[str]:
    """Messages about fields of the model's configuration that the trainer and the rollout would have different.

    Args:
        config: as ``config.json`` has it. trained: as the trainer has it.
    """
    key = f"{VLLM}.hf_overrides"
    own = get(key) or {}
    rollout = {**config, **overrides_of_both(get), **own}
    for name in sorted((rollout.keys() | trained.keys()) - OF_ONE_SIDE):
        sides = trained.get(name), rollout.get(name)
        if sides[0] == sides[1]:
            continue
        what, remedy = f"{MODEL}.hf_config_path={get(f'{MODEL}.hf_config_path')}", f"Set {MODEL}.hf_config_path=null"
        if name in own:
            what = f"{key}.{name}={shown(own[name])}"
            setting = f"{MODEL}.override_config.{name}, which both sides get,"
            if name in ROTARY or isinstance(own[name], Mapping):
                setting = f"{name} in config.json of a copy of the model"
            remedy = f"Set {setting} instead"
        why = f"{name} would be {shown(sides[0])} in the trainer and {shown(sides[1])} in the rollout"
        yield refusal("field_of_one_side", precision=get("jetrl.precision"), what=what, why=why, remedy=remedy)


def trained_models(get: Get) -> tuple[str, ...]:
    """Nodes of the models that the trainer builds: the actor's, which is the reference policy's too, and a critic's."""
    enabled = get("critic.enable")
    critic = get("algorithm.adv_estimator") == "gae" if enabled is None else enabled
    return (MODEL, CRITIC_MODEL) if critic else (MODEL,)


def as_trained(model: ModelFiles, get: Get) -> ModelFiles:
    """The model with the configuration that verl's trainer builds: of ``hf_config_path``, with the overrides."""
    key = f"{MODEL}.hf_config_path"
    configured = copy_model(get(key), key) or model
    return replace(model, config=configured.config).changed(overrides_of_trainer(get))


def check_models(job: "Job", get: Get) -> None:
    """Check the models of a job, of which remote ones are copied: files, shapes, operations, ranks, attention."""
    from jetrl_verl.models import model_types

    if (model := copy_model(get(f"{MODEL}.path"), f"{MODEL}.path")) is not None:
        config, model = model.config, as_trained(model, get)
        for message in fields_of_one_side(config, model.config, get):
            raise UnsupportedConfiguration(message)
        trusted = any(get(f"{node}.trust_remote_code") for node in (MODEL, VLLM))
        if trusted and set(model.config.get("auto_map") or ()) - {"AutoTokenizer"}:
            refuse(
                "models_own_code", precision=job.options.precision, what=f"the model {model.path} with code of its own"
            )
        check_model(job, model, ("actor", "ref") if job.quantizes("ref") else ("actor",))
        check_images(job, model)
        if ADAPTERS.applies(get):
            from .built import check_adapters

            with explained(model.path, job.options.precision):
                check_adapters(get, model.path, model.config)
        if job.shared:
            for words in replacements(model.config):
                refuse("vllm_plugins", **words)
            check_kernels(model)
        if job.cache.quantized and (message := cache_message(model, job.cache)):
            raise UnsupportedConfiguration(message)
        if on_cpu():
            check_bucket(job, model)
        if not job.images:
            check_wrap_policy(model, get)
        check_prompt_cuts(job, model, get)
        for key in REPLICAS:
            check_replicas(model, key, get(key) or 1)
        for key in ULYSSES:
            check_ulysses(job, model, key, get(key) or 1)
        if get(ATTENTION) == JETRL_ATTENTION:
            check_attention(model)
        if get(f"{MODEL}.use_fused_kernels"):
            check_vocabulary(model, get(f"{MODEL}.tokenizer_path"))
    ulysses = {key: ranks for key in ULYSSES_OF_THE_CRITIC if (ranks := get(key) or 1) > 1}
    varlen = get(attention_key(CRITIC_MODEL)) == JETRL_ATTENTION
    varlen = varlen and CRITIC_MODEL in trained_models(get)
    if not (ulysses or varlen or job.quantizes("critic")):
        return
    if (critic := copy_model(get("critic.model.path"), "critic.model.path")) is not None:
        for key, ranks in ulysses.items():
            check_ulysses(job, critic, key, ranks)
        if job.quantizes("critic"):
            check_model(job, critic, ("critic",))
        if varlen and critic.config["model_type"] in model_types():
            check_attention(critic.changed(overrides_of_trainer(get, CRITIC_MODEL)), CRITIC_MODEL)


def check_model(job: "Job", model: ModelFiles, roles: tuple[str, ...] = ("actor",)) -> None:
    """Check a model: its weight files open, it is unquantized, its shapes fit, and its operations are covered.

    Args:
        roles: ``actor``, ``ref`` or ``critic``; the actor alone runs the shared operations.
    """
    if model.folder is not None:
        _check_weight_files(model.folder)
    from .built import check_built

    options, shared = job.options, job.shared and "actor" in roles
    exported = model.folder is not None and (model.folder / "hf_quant_config.json").exists()
    if model.config.get("quantization_config") or exported:
        refuse("quantized_checkpoint", precision=options.precision, what=f"the model {model.path}")
    with explained(model.path, options.precision):
        for role in roles:
            job.plans(model.config, role)
        decoder = model.family
        if shared:
            decoder.check_operations(model.config)
        for role in roles:
            check_built(options, model.path, model.config, role)
    if decoder.experts is not None and options.train != UNQUANTIZED:
        if not shared:
            refuse("mixture_with_stock_operations", what=f"the mixture of experts {model.path}")
        if options.backward == UNQUANTIZED:
            refuse("mixture_with_bf16_backward", what=f"the mixture of experts {model.path}")


def check_bucket(job: "Job", model: ModelFiles) -> None:
    """Refuse a bucket of the weight sync that is smaller than a tensor of the model.

    On GPUs verl sends such a tensor from where it lies (CUDA IPC); the stacks of smaller ones fit (sync/wire.py).
    """
    plans = job.plans(model.config)
    sizes = {"the embedding": 2 * model.read("vocab_size") * plans[model.family.q].k}
    for name, plan in plans.items():
        element_bytes = traits_of(plan.format_name).element_bytes if plan.quantized else 2
        sizes[f"{name} of a layer"] = int(plan.experts * plan.n * plan.k * element_bytes)
    name, size = max(sizes.items(), key=lambda item: item[1])
    needed = -(-size // 2**20)
    if needed > job.bucket_megabytes:
        what = f"{name} of the model {model.path}, {needed} MiB,"
        scope, remedy = f"{BUCKET}={job.bucket_megabytes}", f"Set {BUCKET}={needed} or more"
        refuse("tensor_of_the_bucket", what=what, scope=scope, remedy=remedy)


def cache_message(model: ModelFiles, cache: CacheTraits) -> str:
    """Why a quantized KV cache has no kernel for a model; empty where it has."""
    decoder, heads = model.family, model.read("num_attention_heads")
    group = heads // model.read("num_key_value_heads", heads)
    head_dim, most = decoder.head_dim(model.config), cache.most_query_heads
    for why, met in (
        (f"its heads are of {head_dim}, and a scale is for {cache.head_dim}", head_dim != cache.head_dim),
        (f"a KV head has {group} query heads, and the kernel computes {most}", group > most),
        ("its layers attend to windows", decoder.slides(model.config)),
    ):
        if met:
            return refusal("model_of_an_fp8_cache", what=f"the model {model.path}", why=why)
    return ""


def check_wrap_policy(model: ModelFiles, get: Get) -> None:
    """Refuse what makes FSDP1 flatten a vision tower, which is frozen, together with weights that are trained."""
    node = f"{ACTOR}.fsdp_config"
    if not model.family.tower or get(f"{ACTOR}.strategy") != "fsdp" or get(f"{node}.use_orig_params"):
        return
    for name in ("disable", "min_num_params", "transformer_layer_cls_to_wrap"):
        if value := get(key := f"{node}.wrap_policy.{name}"):
            scope = f"{ACTOR}.strategy=fsdp and the model {model.path}"
            refuse("wrap_policy_of_a_tower", key=key, value=shown(value), scope=scope)


def check_images(job: "Job", model: ModelFiles) -> None:
    """Refuse images in a model that does not run them, text in one that runs it with shared operations alone, and both
    where verl cannot build the processor that it needs for them."""
    from transformers.utils import is_torchvision_available

    decoder = model.family
    if job.images and not decoder.tower:
        refuse("images_of_text_models", scope=f"the model {model.path}", why="it has no vision tower")
    # Of a hybrid verl needs no processor for text.
    if decoder.tower and (job.images or decoder.delta_net is None) and not is_torchvision_available():
        refuse("vision_package", precision=job.options.precision, what=f"the model {model.path} without torchvision")
    if not (job.images or job.shared or decoder.stock_text):
        refuse("text_of_stock_operations", what=f"text alone with the model {model.path}")


def check_replicas(model: ModelFiles, key: str, replicas: int) -> None:
    """Refuse a mixture of experts in one server of several data-parallel replicas: vLLM deals its experts over them."""
    if replicas > 1 and model.family.experts is not None:
        refuse("mixture_over_replicas", what=f"the mixture of experts {model.path}", scope=f"{key}={replicas}")


def check_prompt_cuts(job: "Job", model: ModelFiles, get: Get) -> None:
    """Refuse steps of fewer tokens than a hybrid's page where vLLM cuts cached prompts at ends of pages."""
    from jetrl_verl.models.families.base import page_tokens

    decoder, key = model.family, f"{ROLLOUT}.max_num_batched_tokens"
    prefixes = f"{ROLLOUT}.enable_prefix_caching"
    cuts = get(prefixes) and get(f"{ROLLOUT}.enable_chunked_prefill")
    if decoder.delta_net is None or not cuts or not (job.versions["vllm"] or "").startswith(CUTS_AT_PAGES):
        return
    state, of_chunk = decoder.delta_net.state_bytes(model.config)
    heads = max(job.rollout_ranks, model.read("num_key_value_heads"))
    of_token = 2 * job.cache.head_bytes(heads * decoder.head_dim(model.config))
    multiple = get(f"{VLLM}.block_size") or (128 if on_cpu() else 16)
    tokens = page_tokens(state + of_chunk * job.shared, of_token, multiple)
    if get(key) < tokens:
        what, why = f"{key}={get(key)}", f"a page of the model {model.path} has {tokens} tokens"
        refuse("page_of_states", what=what, why=why, remedy=f"Set {key}={tokens}, or {prefixes}=false")


def check_ulysses(job: "Job", model: ModelFiles, key: str, ranks: int) -> None:
    """Refuse a number of ranks over which the model's heads cannot be dealt, as verl's workers would."""
    from jetrl_verl.models import Family, model_types

    # A critic may be of any type.
    decoder = model.family if model.config["model_type"] in model_types() else Family("")
    if not decoder.divides_heads(model.config, ranks):
        why = f"its {decoder.heads_of(model.config)} are not divided by that many ranks"
        what = f"{key}={ranks} with the model {model.path}"
        remedy = f"Set {key} to a divisor of both, or of the heads and a multiple of the key heads"
        refuse("ulysses_of_the_heads", precision=job.options.precision, what=what, why=why, remedy=remedy)


def check_kernels(model: ModelFiles) -> None:
    """Refuse a model with an operation that only the Hopper kernels compute, where the driver's package lacks them."""
    if model.family.delta_net is not None and not on_cpu() and not hopper_kernels.in_this_package():
        # A mixture has no stock operations under an FP8 trainer.
        remedy = "" if model.family.experts is None else "Set precision=fp8_rollout, or precision=bf16"
        what = f"the model {model.path}, of which most layers are delta nets,"
        refuse("delta_net_without_kernels", what=what, remedy=remedy)


def check_attention(model: ModelFiles, node: str = MODEL) -> None:
    """Refuse what ``attn_implementation=jetrl_varlen`` does not do of the model at ``node``, as the trainer has it."""
    remedy = "" if node == MODEL else f"Set {attention_key(node)}=sdpa"
    decoder = model.family
    if decoder.slides(model.config):
        refuse("varlen_sliding_window", what=f"the model {model.path}, whose layers attend to windows,", remedy=remedy)
    if rate := model.read("attention_dropout", 0.0):
        refuse("varlen_dropout", what=f"the model {model.path} with attention_dropout={rate}", remedy=remedy)
    if (chunk := model.read("attention_chunk_size")) is not None:
        refuse("varlen_model", what=f"the model {model.path} with attention_chunk_size={chunk}", remedy=remedy)
    if not (on_cpu() or decoder.has_varlen_kernel(model.config)):
        what = f"the model {model.path} with heads of {decoder.head_dim(model.config)}"
        refuse("varlen_model", what=what, remedy=remedy)


def check_vocabulary(model: ModelFiles, tokenizer: str | None = None) -> None:
    """Refuse ``model.use_fused_kernels`` for a model whose vocabulary is larger than its tokenizer, or the one at
    the path ``tokenizer``.

    The fused kernel computes log-probabilities without lm_head's module, which is where the trainer masks the entries
    that the rollout masks.
    """
    folder = tokenizer or model.folder
    if folder is None or "://" in str(folder):
        return
    from transformers import AutoTokenizer

    padding = model.read("vocab_size") - len(AutoTokenizer.from_pretrained(folder))
    if padding > 0:
        refuse("fused_kernels_of_a_padded_vocabulary", **padding_words(padding, model.path))


def padding_words(entries: int, path: str | None) -> dict[str, str]:
    """Words of the message for a model with ``entries`` of its vocabulary that nothing samples."""
    scope = f"the {entries} entries of its vocabulary that nothing samples"
    return {"scope": scope, "why": f"{path} would leave them unmasked in the trainer alone"}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a model folder, those of its index where it has one; empty without any.

    Raises:
        UnsupportedConfiguration: the index cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    with reading(index, "weight index", "Copy the model folder again", UnsupportedConfiguration):
        return [folder / name for name in sorted(set(load_json(index)["weight_map"].values()))]


def _check_weight_files(folder: Path) -> None:
    files = weight_files(folder)
    if not files and not list(folder.glob("*.bin")):
        raise UnsupportedConfiguration(
            f"the model folder {folder} holds no weights (*.safetensors). Set "
            "actor_rollout_ref.model.path to a complete folder."
        )
    from safetensors import safe_open

    for file in files:
        with (
            reading(file, "weight file", "Copy the model folder again", UnsupportedConfiguration),
            safe_open(file, framework="numpy"),
        ):
            pass
