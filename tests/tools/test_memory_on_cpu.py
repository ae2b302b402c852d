# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl memory``: terms against hand-computed values, phases of a job, settings that cost exactness."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support_models import MODELS, refused_value
from typer.testing import CliRunner

from jetrl_verl.cli import app
from jetrl_verl.config.composition import reader
from jetrl_verl.config.support.row import shown
from jetrl_verl.config.support.scopes import EXACT, MODEL, SHARED
from jetrl_verl.config.support.table import TABLE
from jetrl_verl.inputs import UserError
from jetrl_verl.reference.delta_net import state_shape
from jetrl_verl.tools.memory import run, terms
from jetrl_verl.tools.memory.shapes import KNOWN, find_config, model_of
from jetrl_verl.tools.memory.terms import GIB, PRECISIONS, phases_of

RECIPE = Path(__file__).parents[2] / "recipes/gsm8k/run_qwen3_8b.sh"
EIGHT = model_of("qwen3-8b", KNOWN["qwen3-8b"])
MIXTURE = model_of("qwen3-30b-a3b", KNOWN["qwen3-30b-a3b"])
SMALL = (
    "actor_rollout_ref.model.path=qwen3-8b",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "algorithm.adv_estimator=grpo",
)
LAYER = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
"""Parameters of a layer of Qwen3-8B: q, k and v; o; gate, up and down."""

HEAD = 151936 * 4096


@pytest.fixture(scope="module")
def small():
    return run.compose(SMALL)


def jetrl_memory(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["memory", *words])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("model", "billions"),
    [("qwen3-0.6b", 0.6), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("qwen3-14b", 14.8),
     ("qwen3-32b", 32.8), ("qwen3-30b-a3b", 30.5), ("qwen2.5-1.5b", 1.54), ("qwen2.5-7b", 7.6), ("qwen2.5-32b", 32.8),
     ("llama-3.1-8b", 8.03), ("deepseek-r1-distill-qwen-1.5b", 1.78), ("qwen3.5-0.8b", 0.75), ("qwen3.5-2b", 1.88),
     ("qwen3.5-4b", 4.2), ("qwen3.5-9b", 8.95), ("qwen3.5-27b", 26.9),
     ("qwen2.5-0.5b", 0.494), ("llama-3.2-1b", 1.24)],
)  # fmt: skip
def test_known_models_have_the_published_number_of_parameters(model, billions):
    assert model_of(model, KNOWN[model]).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_model_is_found_by_hub_name_and_by_folder(tmp_path):
    assert find_config("Qwen/Qwen3-8B-Base") == find_config("/models/qwen3-8b") == KNOWN["qwen3-8b"]
    config = {key: value for key, value in KNOWN["qwen3-4b"].items() if key != "head_dim"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    four = model_of("folder", find_config(str(tmp_path)))
    assert four.parameters == model_of("known", KNOWN["qwen3-4b"]).parameters and four.kv_bytes() == 2 * 36 * 1024 * 2
    with pytest.raises(UserError, match="Qwen3-8B-GGUF is not known here"):
        find_config("Qwen/Qwen3-8B-GGUF")
    with pytest.raises(UserError, match="not supported with jetrl memory: .* Set a model of one of these types"):
        model_of("m", {"model_type": "mixtral"})


def test_parameters_and_keys_and_values_of_an_8b_model():
    assert (EIGHT.layer, EIGHT.quantized, EIGHT.head) == (LAYER, 36 * LAYER, HEAD)
    assert EIGHT.parameters == 36 * LAYER + 2 * HEAD
    assert EIGHT.kv_bytes() == 2 * 36 * 8 * 128 * 2 and EIGHT.kv_bytes("fp8") == 2 * 36 * 8 * (128 + 1)


def test_states_and_keys_and_values_of_a_hybrid():
    """24 of 32 layers have states, FP32 of 32 heads of 128 x 128 and 3 BF16 inputs, and with shared operations 64 BF16
    rows of k and of u, 64 sums and an unused row; 8 have keys and values."""
    nine = model_of("qwen3.5-9b", KNOWN["qwen3.5-9b"])
    assert (nine.recurrent, nine.state_bytes) == (24, 4 * 32 * 128 * 128 + 2 * 3 * 8192)
    assert nine.chunk_bytes == 32 * (2 * 64 * 128 * 2 + 2 * 64 * 4)
    assert nine.kv_bytes() == 2 * 8 * 4 * 256 * 2
    mlp = 3 * 4096 * 12288
    full, linear = 4096 * (8192 + 2 * 1024 + 4096), 4096 * (8192 + 4096 + 4096)
    assert nine.quantized == 8 * full + 24 * linear + 32 * mlp
    assert nine.layer == linear + mlp + 4096 * 64 + 4 * 8192, "with b, a and the convolution"
    assert nine.mixing == 2 * 8192 + 3 * 4096, "of a delta net"


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    ("name", "tp", "page_tokens", "shared"),
    [
        ("qwen3.5-4b", 1, 528, False),
        ("qwen3.5-27b", 4, 784, False),
        ("qwen3.5-27b", 8, 400, False),
        ("qwen3.5-4b", 2, 784, True),
        ("qwen3.5-27b", 1, 1184, True),
        ("qwen3.5-27b", 8, 592, True),
    ],
)
def test_a_hybrids_request_takes_what_vllm_counts(name, tp, page_tokens, shared, prefix_caching):
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    text, tokens, mode = KNOWN[name]["text_config"], 2560, "align" if prefix_caching else "none"
    engine = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
        model_config=SimpleNamespace(max_model_len=tokens),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    heads = max(1, text["num_key_value_heads"] // tp)
    attention = FullAttentionSpec(block_size=page_tokens, num_kv_heads=heads, head_size=256, dtype=torch.bfloat16)
    of_heads = text["linear_num_key_heads"], text["linear_num_value_heads"], 128, 128, 4
    conv, state = MambaStateShapeCalculator.gated_delta_net_state_shape(tp, *of_heads)
    delta_net = MambaSpec(
        shapes=(conv, state_shape(state[0]) if shared else state),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=page_tokens,
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode=mode,
    )
    layers = text["num_hidden_layers"] // 4
    of_rank = layers * (3 * delta_net.max_memory_usage_bytes(engine) + attention.max_memory_usage_bytes(engine))
    of_request = model_of(name, KNOWN[name], tp).request_bytes(tokens, prefix_caching=prefix_caching, shared=shared)
    assert of_request == tp * of_rank


def test_a_frozen_tower_has_weights_alone(small):
    """A part of the model that stock verl trains, and has in its rollout."""
    four = model_of("qwen3.5-4b", KNOWN["qwen3.5-4b"])
    blocks = 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096 + 9 * 1024 + 4096)
    patches, merger = 1024 * (2 * 3 * 16 * 16 + 1 + 2304), 2 * 1024 + 4096 * 4097 + 2560 * 4097
    assert four.tower == blocks + patches + merger
    shard = 4 * four.parameters / 8
    frozen = {"FP32 weights": shard + four.tower / 2, "optimizer moments": 2 * shard}
    assert terms.state(four, 8) == frozen
    stock, ours = (phases_of(reader(small), four, PRECISIONS[i], 139.8)["update"] for i in (0, -1))
    assert stock["optimizer moments"] - ours["optimizer moments"] == four.tower
    assert stock["FP32 weights"] == ours["FP32 weights"]


def test_terms_of_an_update_over_eight_gpus():
    shard, tokens = 4 * EIGHT.parameters / 8, 16384
    update = terms.update(EIGHT, 8, tokens)
    assert update == {
        "FP32 weights": shard,
        "optimizer moments": 2 * shard,
        "gradients": shard,
        "activations": 36 * tokens * 2 * 4096,
        "gathered weights": 2 * (2 * LAYER + HEAD),
        "logits": 8 * 151936 * tokens,
    }
    shared = terms.update(EIGHT, 8, tokens, shared=True)
    assert update | {"logits": 2 * 151936 * tokens + 5 * GIB} == shared, "4 GiB of logits kept, 1 GiB of a chunk"
    assert terms.update_logits(EIGHT, 1024, shared=True) == 10 * 151936 * 1024, "one chunk, kept whole"
    assert terms.update(EIGHT, 8, tokens, eight_bit=True)["optimizer moments"] == 2 * shard * 0.255
    activations = terms.update(EIGHT, 8, tokens, checkpointing=False)["activations"]
    assert activations == 36 * tokens * 2 * (5 * 4096 + 2 * (4096 + 1024) + 3 * 12288)
    step = terms.update(EIGHT, 1, 256)
    assert step["optimizer step"] == step["gradients"] == 4 * EIGHT.parameters and "logits" not in step


def test_results_that_layers_keep(small):
    """Of attention and of products but the last one, in all layers or in as many as leave a tenth of a GPU free."""
    results = 36 * (2 * (4096 + 2 * 1024 + 4096 + 4096 + 2 * 12288) + 4 * 32)
    assert EIGHT.results == results and terms.layer_results(EIGHT, 10) == 10 * results

    def update(value: str, gib: float = 1000, **model) -> dict[str, float]:
        changed = {"jetrl.checkpointing": value} | {f"actor_rollout_ref.model.{key}": on for key, on in model.items()}
        get = reader(small)
        return phases_of(lambda key: changed.get(key, get(key)), EIGHT, PRECISIONS[-1], gib)["update"]

    full, selective = update("full"), update("selective")
    tokens = full["activations"] / (36 * 2 * 4096)
    assert selective["activations"] - full["activations"] == tokens * results
    assert update("auto") == selective and update("auto", 30) == full
    assert update("auto", enable_activation_offload=True) == full
    some = (sum(full.values()) + tokens * results / 2) / 0.9
    assert update("auto", some / GIB)["activations"] == pytest.approx(full["activations"] + tokens * results / 2)


def test_terms_of_an_update_of_a_mixture():
    layer = 128 * 3 * 2048 * 768 + 2048 * 128 + 2048 * (4096 + 2 * 512) + 4096 * 2048
    assert MIXTURE.layer == layer and MIXTURE.quantized == 48 * (layer - 2048 * 128), "the router is not quantized"
    assert terms.update(MIXTURE, 8, 16384)["gathered weights"] == 2 * (2 * layer + 151936 * 2048) + 8 * layer
    rows = 64 * 8 + 127 * 128
    update = terms.update(MIXTURE, 64, 64, kept=3.0)
    assert update["expert rows"] == rows * (4 * 2048 + 13 * 768) and update["gathered weights"] == 3 + 8 * layer


def test_a_mixture_with_a_shared_expert():
    """40 layers; router, the shared expert's gate, b, a and the convolution are not quantized."""
    model = model_of("qwen3.5-35b-a3b", KNOWN["qwen3.5-35b-a3b"], tp=4)
    second, full, linear = 257 * 3 * 2048 * 512, 2048 * (8192 + 2 * 512 + 4096), 2048 * (8192 + 4096 + 4096)
    assert model.quantized == 40 * second + 10 * full + 30 * linear
    assert model.layer == second + linear + 2048 * (256 + 1 + 64) + 4 * 8192
    assert (model.inner, model.expert_width) == (9 * 512, 512) and 34e9 < model.parameters < 36e9
    rows = 64 * 8 + 127 * 256
    assert terms.expert_rows(model, 64) == rows * (4 * 2048 + 13 * 512)
    eight = model_of("qwen3.5-35b-a3b", KNOWN["qwen3.5-35b-a3b"], tp=8)
    assert eight.quantized == 0, "experts are 64 wide on a rank"


def test_terms_of_weights_that_stay_gathered():
    assert terms.kept_weights(EIGHT, "bf16") == 2 * EIGHT.parameters
    assert terms.kept_weights(EIGHT, "fp8") == 2 * EIGHT.parameters + 2 * EIGHT.quantized
    assert terms.kept_weights(EIGHT, "fp8", quantized_backward=False) == 2 * EIGHT.parameters + EIGHT.quantized
    assert terms.kept_weights(MIXTURE, "fp8") == 2 * MIXTURE.parameters + MIXTURE.quantized


def test_the_rest_of_the_rollouts_share_is_its_cache():
    rollout = terms.rollout(EIGHT, "fp8", 40 * GIB, 256, 8192, 2)
    weights = (2 * EIGHT.parameters - EIGHT.quantized) / 2
    work = 8 * 151936 * 256 + 8192 * (3 * 12288 + 4 * 4096)
    assert rollout == {"vLLM weights": weights, "vLLM work space": work, "KV cache": 40 * GIB - weights - work}
    assert terms.rollout(EIGHT, "bf16", GIB, 256, 8192, 1)["KV cache"] == 0


def test_each_phase_has_what_is_not_offloaded(small):
    base = reader(small)

    def phases(**settings):
        settings = {f"actor_rollout_ref.{key.replace('__', '.')}": value for key, value in settings.items()}
        return phases_of(lambda key: settings[key] if key in settings else base(key), EIGHT, PRECISIONS[-1], 139.8)

    plain = phases()
    shard = 4 * EIGHT.parameters / 8
    assert all(phase["CUDA contexts"] == 3.7 * GIB and phase["FP32 weights"] == shard for phase in plain.values())
    assert plain["sync"]["sync bucket"] == 2 * GIB and plain["sync"]["gathered weights"] == 2 * HEAD
    assert plain["old log-probs"]["logits"] == GIB and "vLLM weights" not in plain["update"]
    offloaded = phases(actor__fsdp_config__param_offload=True, actor__fsdp_config__optimizer_offload=True)
    assert not {"FP32 weights", "optimizer moments"} & offloaded["rollout"].keys()
    assert offloaded["update"] == plain["update"]
    scoring = offloaded["old log-probs"]
    assert scoring["FP32 weights"] == shard and "optimizer moments" not in scoring
    awake = phases(rollout__free_cache_engine=False, actor__use_kl_loss=True)
    assert awake["update"]["vLLM weights"] == plain["rollout"]["vLLM weights"]
    assert {phase["reference policy"] for phase in awake.values()} == {shard}


def test_gpus_of_the_rollouts_own_hold_no_trainer(small):
    base = reader(small)
    settings = {"trainer.v1.trainer_mode": "separate_async", "actor_rollout_ref.rollout.nnodes": 1}
    settings |= {"actor_rollout_ref.rollout.n_gpus_per_node": 4, "actor_rollout_ref.rollout.free_cache_engine": False}

    def phases(hybrid: bool):
        own = settings | {"actor_rollout_ref.hybrid_engine": hybrid}
        return phases_of(lambda key: own[key] if key in own else base(key), EIGHT, PRECISIONS[-1], 139.8)

    shared, apart = phases(True), phases(False)
    assert apart["rollout"].keys() == {"CUDA contexts", "vLLM weights", "vLLM work space", "KV cache"}
    assert {name: shared["rollout"][name] for name in apart["rollout"]} == apart["rollout"]
    assert "vLLM weights" in shared["update"] and "vLLM weights" not in apart["update"]
    assert apart["sync"] == apart["rollout"] | {"sync bucket": 2 * GIB, "arriving weights": 4 * HEAD}
    settings["actor_rollout_ref.rollout.free_cache_engine"] = True
    sync = phases(False)["sync"]
    assert sync.keys() == {"CUDA contexts", "FP32 weights", "optimizer moments", "gathered weights"}
    assert sync["gathered weights"] == 4 * HEAD


def test_a_recipe_is_counted_and_fits():
    status, output = jetrl_memory("--script", str(RECIPE), "--gpus", "4")
    assert status == 0, output
    assert "Qwen/Qwen3-8B: 8.19B parameters, 4 GPUs of 139.8 GiB, rollout TP 1, micro-batches of 24576" in output
    assert "Every precision fits." in output and "No setting costs exactness." in output
    assert all(precision.name in output for precision in PRECISIONS)
    assert run.words_of_script(RECIPE, ["a.b='x y'"])[-1] == "a.b='x y'"


def test_a_job_that_does_not_fit_names_the_setting_to_change():
    options = ("--model", "qwen3-8b", "--gpus", "1", "--tp", "1", "--gpu-gib", "79.1", "--response-length", "8192")
    status, output = jetrl_memory(*options, "--", "actor_rollout_ref.rollout.gpu_memory_utilization=0.2")
    assert status == 0, output
    assert "update does not fit: 156.3 GiB under bf16" in output and ". Set a smaller ppo_max_token_len" in output
    assert "A sequence of 8704 tokens does not fit the KV cache of bf16, bf16_shared. Set a higher gpu_mem" in output


INEXACT_ROWS = {name: row for name, row in TABLE.items() if row.scope in (SHARED, EXACT)}


@pytest.mark.parametrize("name", [name for name, row in INEXACT_ROWS.items() if row.settings])
def test_a_setting_that_costs_exactness_is_named(name, small, monkeypatch):
    row, base = INEXACT_ROWS[name], reader(small)
    setting = next(iter(row.settings))
    value = refused_value(row, setting)
    monkeypatch.setattr(run, "reader", lambda config: lambda key: value if key == setting else base(key))
    effect = run.STOCK if row.scope is SHARED or setting == "jetrl.operations" else run.INEXACT
    assert (effect, row.message(key=setting, value=shown(value))) in run.costs_of(small, EIGHT, 1)


def test_images_and_adapters_that_cost_exactness_are_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"prompt": [[{"role": "user", "content": "<image>"}]], "images": [[{"bytes": b"PNG"}]]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for model, words, sentence in (
        ("qwen3-vl-8b", (f"data.train_files={tmp_path}/a.parquet",), "jet_fp8_exact is refused: the column images of "),
        ("qwen3-vl-8b", (f"{MODEL}.lora_rank=8",), "FP8 training is refused: .* has an adapter of model.visual"),
        ("qwen3-8b", (f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[nope]"), "FP8 training is refused: .*nope"),
        ("qwen2.5-vl-7b", (f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj]"), "No setting costs exactness"),
        ("qwen3-8b", (f"{MODEL}.lora_rank=8",), "No setting costs exactness"),
        ("qwen3.5-35b-a3b", (f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[o_proj]"), "No setting costs exactness"),
    ):
        config = run.compose([*SMALL, f"{MODEL}.path={model}", *words])
        costs = run.costs_of(config, model_of(model, KNOWN[model]), 1)
        said = [f"{effect}: {message}" for effect, message in costs] or ["No setting costs exactness."]
        assert len(said) == 1 and re.match(sentence, said[0]), (model, said)


@pytest.mark.parametrize("name", [name for name in INEXACT_ROWS if name in MODELS])
def test_a_model_that_costs_exactness_is_named(name, small):
    ((effect, message),) = run.costs_of(small, model_of("m", KNOWN["qwen3-8b"] | MODELS[name]), 1)
    assert effect == run.STOCK and message.endswith(f". {TABLE[name].remedy()}.")


def test_of_adapters_alone_there_are_moments_and_gradients():
    whole, lora = terms.update(EIGHT, 8, 8192), terms.update(EIGHT, 8, 8192, rank=64)
    adapters = 4 * 64 * 36 * (2 * (4096 + 4096) + 2 * (1024 + 4096) + 3 * (4096 + 12288)) / 8
    assert (
        lora["FP32 weights"] - whole["FP32 weights"] == adapters == lora["gradients"] == lora["optimizer moments"] / 2
    )


def test_unsupported_precisions_are_left_out():
    status, output = jetrl_memory("--", *SMALL, "actor_rollout_ref.model.lora.rank=8")
    assert status == 0 and "FP8 training is refused: actor_rollout_ref.model.lora.rank=8" in output
    assert "bf16" in output and "fp8_rollout" not in output
    words = ("actor_rollout_ref.model.use_liger=True", "actor_rollout_ref.rollout.top_p=0.9")
    status, output = jetrl_memory("--", *SMALL, *words)
    assert output.count("jet_fp8 runs stock operations:") == 2 and "bf16_shared" not in output
    seven = model_of("qwen2.5-7b", KNOWN["qwen2.5-7b"])
    assert [effect for effect, _ in run.costs_of(run.compose(SMALL), seven, 8)] == [run.REFUSED]
