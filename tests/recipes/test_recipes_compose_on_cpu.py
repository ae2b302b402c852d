# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The script of every recipe composes under every precision into a config that verl accepts."""

import json
from dataclasses import replace

import numpy as np
import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf
from recipe_cases import RECIPES
from safetensors.numpy import save_file
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from jetrl_verl.config.job import Job
from jetrl_verl.config.model import check_model, read_model
from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools.memory.shapes import KNOWN

PAPER = (
    {"DATASET": "gsm8k_math"},
    {"DATASET": "gsm8k_math", "RESPONSE": "16k"},
    {"DATASET": "deepmath", "RESPONSE": "16k"},
)
VARIANTS = {
    "gsm8k/run_qwen3_8b.sh": ({},),
    "async/run_qwen3_8b.sh": ({},),
    "dapo/run_qwen2_5_7b.sh": ({},),
    "dapo/run_qwen2_5_32b.sh": ({}, {"NNODES": "16"}),
    "deepscaler/run_r1_distill_qwen_1_5b.sh": ({"STAGE": "8k"}, {"STAGE": "16k"}, {"STAGE": "24k"}),
    "qwen3_moe/run_qwen3_30b_a3b_base.sh": ({}, {"TP": "2"}),
    "qwen3_5/run_qwen3_5_4b.sh": ({},),
    "qwen3_5/run_qwen3_5_27b.sh": ({}, {"TP": "2", "SP": "2"}),
    "qwen3_5/run_qwen3_5_35b_a3b.sh": ({}, {"TP": "4"}),
    "jetrl_paper/run_llama3_1_8b.sh": PAPER,
    "jetrl_paper/run_qwen2_5_7b.sh": PAPER,
    "jetrl_paper/run_qwen3_8b_base.sh": PAPER,
}
CASES = [(script, settings) for script, variants in VARIANTS.items() for settings in variants]
IDS = ["-".join([script.removesuffix(".sh"), *settings.values()]) for script, settings in CASES]


@pytest.fixture(scope="module")
def compose():
    """Callable ``(overrides) -> DictConfig`` of verl's primary config."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        yield lambda overrides=(): hydra_compose("ppo_trainer", list(overrides))


@pytest.fixture(scope="module")
def stock(compose):
    return compose()


@pytest.fixture
def recipe_words(words, tmp_path):
    """Callable ``(script, precision, settings, *arguments) -> overrides``; a later stage finds the one before it."""

    def run(script: str, precision: str, settings: dict[str, str], *arguments: str) -> list[str]:
        for stage in ("8k_{}/global_step_1040", "16k_{}/global_step_480"):
            folder = stage.format(precision).replace("_", "-", 1)
            (tmp_path / f"out/jetrl_deepscaler/r1_distill_qwen_1_5b_{folder}/actor/huggingface").mkdir(
                parents=True, exist_ok=True
            )
        return words(script, *arguments, PRECISION=precision, **settings)

    return run


def test_every_recipe_is_composed():
    scripts = {str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/run_*.sh")}
    assert scripts == set(VARIANTS)


UNDER = [
    pytest.param(script, settings, precision, id=f"{name}-{precision}")
    for (script, settings), name in zip(CASES, IDS, strict=True)
    for precision in PRECISIONS
    if settings == VARIANTS[script][0] or precision in ("jet_fp8", "jet_fp8_exact", "bf16_shared")
]
"""A script's first variant under every precision, the others under the main ones: the words of a precision are the same
for all of them (test_precisions_differ_in_nothing_else)."""


@pytest.mark.parametrize(("script", "settings", "precision"), UNDER)
def test_every_recipe_composes_under_every_precision(recipe_words, compose, stock, script, settings, precision):
    config = compose(recipe_words(script, precision, settings))
    assert OmegaConf.select(config, "jetrl.precision") == (None if precision == "bf16" else precision)
    assert config.trainer.use_v1
    # verl still composes the keys of the trainer before v1 and migrates or ignores them without a word.
    for node in ("reward_model", "custom_reward_function", "sandbox_fusion"):
        assert config[node] == stock[node]
    assert config.algorithm.filter_groups.max_num_gen_batches == 0
    # What verl checks before it starts Ray, and the config classes that its workers build.
    validate_config(config, need_reference_policy(config), use_critic=False)
    for node in (config.actor_rollout_ref.rollout, config.algorithm):
        omega_conf_to_dataclass(node)
    rollout = config.actor_rollout_ref.rollout
    length = rollout.prompt_length + rollout.response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= length, "one sequence must fit a micro-batch"


@pytest.mark.parametrize(("script", "settings"), CASES, ids=IDS)
def test_precisions_differ_in_nothing_else(recipe_words, script, settings):
    runs = {precision: recipe_words(script, precision, settings) for precision in PRECISIONS}
    assert {tuple(word.replace(precision, "P") for word in run) for precision, run in runs.items()} == {
        tuple(word.replace("jet_fp8", "P") for word in runs["jet_fp8"])
    }
    # Apart from the flag the name is in paths and in the experiment's name alone.
    for precision, run in runs.items():
        named = {word.partition("=")[0] for word in run if word.partition("=")[2].find(precision) >= 0}
        assert named <= {
            "precision",
            "trainer.experiment_name",
            "trainer.default_local_dir",
            "actor_rollout_ref.model.path",
        }


def published(path: str) -> dict:
    """The configuration of a published model by its name on the hub."""
    return KNOWN[path.partition("/")[2].lower().removesuffix("-base")]


@pytest.mark.parametrize("script", VARIANTS)
def test_a_rollout_shard_of_every_layer_fits_the_fp8_blocks(recipe_words, compose, script):
    model = None
    for settings in VARIANTS[script]:
        config = compose(recipe_words(script, "jet_fp8", settings))
        # A stage that goes on from another one's checkpoint has its model.
        model = model or published(config.actor_rollout_ref.model.path)
        plans = plan_linears(model, config.actor_rollout_ref.rollout.tensor_model_parallel_size)
        left_out = {name for name, plan in plans.items() if not plan.quantized}
        assert left_out <= {"linear_attn.in_proj_b", "linear_attn.in_proj_a", "mlp.shared_expert_gate"}


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "bf16"])
@pytest.mark.parametrize(
    ("script", "name", "largest"),
    [
        ("qwen3_moe/run_qwen3_30b_a3b_base.sh", "Qwen/Qwen3-30B-A3B-Base", 2),
        ("qwen3_5/run_qwen3_5_35b_a3b.sh", "Qwen/Qwen3.5-35B-A3B", 4),
    ],
)
def test_a_mixture_is_supported_by_the_fp8_flow_and_refused_elsewhere(
    recipe_words, compose, tmp_path, precision, script, name, largest
):
    """As the driver does before it starts Ray: with the model's folder in hand."""
    (tmp_path / "config.json").write_text(json.dumps(published(name)))
    save_file({"any": np.zeros(1)}, tmp_path / "model.safetensors")
    config = compose(recipe_words(script, precision, {"MODEL_PATH": str(tmp_path)}))
    job = Job.of(config.jetrl)
    assert job.shared == (precision in ("jet_fp8", "jet_fp8_exact", "bf16_shared"))

    def check(ranks: int) -> None:
        check_model(replace(job, rollout_ranks=ranks), read_model(str(tmp_path)))

    if job.options.rollout != "fp8":
        with pytest.raises(UnsupportedConfiguration, match="experts are products of the FP8 flow alone"):
            check(1)
        return
    for ranks in (1, 2, largest):
        check(ranks)
    width = {2: 192, 4: 64}[largest]
    with pytest.raises(UnsupportedConfiguration) as refused:
        check(2 * largest)
    assert f"mlp.experts.down_proj has shards of shape [2048, {width}]" in str(refused.value)
    assert f"as they are over {largest}. Set a smaller" in str(refused.value)


@pytest.mark.parametrize("script", VARIANTS)
@pytest.mark.parametrize(
    ("precision", "setting", "attention"),
    [
        ("jet_fp8", {"FAKE_STATUS": "1"}, JETRL_ATTENTION),  # flash-attn is not installed
        ("bf16", {"ATTENTION": "flash_attention_2"}, None),  # verl's own
        ("jet_fp8", {"ATTENTION": "sdpa"}, "sdpa"),
    ],
    ids=["default", "flash-attn", "sdpa"],
)
def test_sequences_are_packed_and_split_over_ranks_unless_attention_is_sdpa(
    recipe_words, compose, script, precision, setting, attention
):
    config = compose(recipe_words(script, precision, VARIANTS[script][0] | setting))
    model = config.actor_rollout_ref.model
    assert (model.override_config or {}).get("attn_implementation") == attention
    assert model.use_remove_padding == (attention != "sdpa")
    ranks = {"dapo/run_qwen2_5_7b.sh": 4, "dapo/run_qwen2_5_32b.sh": 8}.get(script, 1)
    assert config.actor_rollout_ref.actor.ulysses_sequence_parallel_size == (1 if attention == "sdpa" else ranks)
    validate_config(config, need_reference_policy(config), use_critic=False)


@pytest.mark.parametrize("script", VARIANTS)
def test_the_users_overrides_win(recipe_words, compose, script):
    words = ("actor_rollout_ref.rollout.n=3", "trainer.nnodes=2", "trainer.logger=[console]")
    config = compose(recipe_words(script, "jet_fp8", VARIANTS[script][0], *words))
    assert config.actor_rollout_ref.rollout.n == 3 and config.trainer.nnodes == 2
    assert config.trainer.logger == ["console"]


@pytest.mark.parametrize("word", ["precision=bf16", "+precision=bf16", "++precision=bf16", "~precision"])
def test_an_override_of_the_precision_is_refused(words, word):
    error = words("gsm8k/run_qwen3_8b.sh", word, status=1, PRECISION="jet_fp8")
    assert error == f"error: {word} would leave the run named after jet_fp8; set PRECISION=bf16\n"


def test_an_override_with_the_same_precision_is_accepted(recipe_words, compose):
    """It passes the precision of a run to every command both ways."""
    config = compose(recipe_words("gsm8k/run_qwen3_8b.sh", "jet_fp8", {}, "precision=jet_fp8"))
    assert config.jetrl.precision == "jet_fp8" and config.trainer.experiment_name == "qwen3_8b-jet_fp8"


def test_machines_and_the_metrics_file_are_set_by_variables(recipe_words, compose, tmp_path):
    config = compose(recipe_words("gsm8k/run_qwen3_8b.sh", "jet_fp8", {"NNODES": "3", "GPUS_PER_NODE": "4"}))
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (3, 4)
    metrics = str(tmp_path / "out/metrics.jsonl")
    assert config.ray_kwargs.ray_init.runtime_env.env_vars == {"VERL_FILE_LOGGER_PATH": metrics}


def test_paths_with_spaces_are_quoted(recipe_words, compose, tmp_path):
    folders = {"DATA": "/data of mine/gsm8k", "OUT": str(tmp_path / "my out")}
    config = compose(recipe_words("gsm8k/run_qwen3_8b.sh", "bf16", folders))
    assert config.data.train_files == ["/data of mine/gsm8k/train.parquet"]
    assert config.trainer.default_local_dir == str(tmp_path / "my out/jetrl_gsm8k/qwen3_8b-bf16")


@pytest.mark.parametrize("precision", ["bf16", "jet_fp8_exact"])
def test_each_deepscaler_stage_starts_from_the_last_checkpoint_of_the_previous(recipe_words, compose, precision):
    stages = [
        compose(recipe_words("deepscaler/run_r1_distill_qwen_1_5b.sh", precision, {"STAGE": stage}))
        for stage in ("8k", "16k", "24k")
    ]
    for former, later in zip(stages, stages[1:]):
        trainer = former.trainer
        # verl saves after the last step whatever save_freq is (if it is positive), in this folder.
        last = f"{trainer.default_local_dir}/global_step_{trainer.total_training_steps}/actor"
        assert trainer.save_freq > 0
        assert "hf_model" in former.actor_rollout_ref.actor.checkpoint.save_contents
        assert later.actor_rollout_ref.model.path == f"{last}/huggingface"
        assert later.trainer.default_local_dir != trainer.default_local_dir
    assert [stage.data.max_response_length for stage in stages] == [8192, 16384, 24576]
    assert [stage.actor_rollout_ref.rollout.n for stage in stages] == [8, 16, 16]
    assert [stage.trainer.total_training_steps for stage in stages][:2] == [1040, 1520 - 1040]


def test_a_stage_without_the_previous_one_is_refused(words, tmp_path):
    error = words("deepscaler/run_r1_distill_qwen_1_5b.sh", status=1, STAGE="16k")
    folder = tmp_path / "out/jetrl_deepscaler/r1_distill_qwen_1_5b_8k-jet_fp8/global_step_1040/actor/huggingface"
    assert error == (
        f"error: stage 8k left no policy in {folder}; run STAGE=8k to its end or name a model with MODEL_PATH\n"
    )
    assert words("deepscaler/run_r1_distill_qwen_1_5b.sh", STAGE="16k", MODEL_PATH="/some/model")


@pytest.mark.parametrize(
    ("script", "settings", "sentence"),
    [
        ("gsm8k/run_qwen3_8b.sh", {"ATTENTION": "fa3"}, "ATTENTION=fa3 is unknown; use jetrl_varlen, "),
        (
            "gsm8k/run_qwen3_8b.sh",
            {"ATTENTION": "flash_attention_2", "FAKE_STATUS": "1"},
            "flash-attn is not installed; ",
        ),
        ("deepscaler/run_r1_distill_qwen_1_5b.sh", {"STAGE": "32k"}, "STAGE=32k is unknown; use 8k, 16k or 24k"),
        ("jetrl_paper/run_qwen2_5_7b.sh", {"DATASET": "math"}, "DATASET=math is unknown; use gsm8k_math or deepmath"),
        ("jetrl_paper/run_qwen2_5_7b.sh", {"RESPONSE": "4k"}, "RESPONSE=4k is unknown; use 8k or 16k"),
    ],
)
def test_an_unknown_setting_is_one_sentence(words, script, settings, sentence):
    error = words(script, status=1, **settings)
    assert error.startswith(f"error: {sentence}") and error.count("\n") == 1


def test_the_base_llama_gets_a_chat_template(recipe_words, compose):
    config = compose(recipe_words("jetrl_paper/run_llama3_1_8b.sh", "jet_fp8", {}))
    from jinja2 import Template

    template = Template(config.actor_rollout_ref.model.custom_chat_template)
    assert template.render(bos_token="<B>", messages=[{"role": "user", "content": "1+1?"}]) == "<B>1+1?"


GRADED = {
    # script -> data_source, a right response, ground truth
    "gsm8k/run_qwen3_8b.sh": ("openai/gsm8k", "so\n#### 72", "72"),
    "dapo/run_qwen2_5_32b.sh": ("math_dapo", "so\nAnswer: 34", "34"),
    "deepscaler/run_r1_distill_qwen_1_5b.sh": ("HuggingFaceH4/aime_2024", "so</think> \\boxed{204}", "204"),
    "jetrl_paper/run_qwen2_5_7b.sh": ("zwhe99/DeepMath-103K", "so \\boxed{0.5}", "\\dfrac{1}{2}"),
}


@pytest.mark.parametrize("script", GRADED)
def test_verl_builds_the_recipes_reward(recipe_words, compose, script):
    """As its reward workers do: the manager by name, the function by path."""
    config = compose(recipe_words(script, "jet_fp8", VARIANTS[script][0]))
    manager = load_reward_manager(config, tokenizer=None)
    data_source, response, truth = GRADED[script]
    score = manager.compute_score(data_source=data_source, solution_str=response, ground_truth=truth)
    if script.startswith("dapo"):
        assert type(manager).__name__ == "DAPORewardManager"
        assert manager.overlong_buffer_cfg.len == 4096 and manager.max_resp_len == config.data.max_response_length
        assert score["acc"] is True  # what filter_groups.metric reads
    else:
        assert type(manager).__name__ == "NaiveRewardManager" and score == 1.0
