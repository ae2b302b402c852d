# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of support about the machine and the model; test_refusals_on_cpu.py has those about settings."""

import ast
import json
from pathlib import Path

import pytest
import support_page
import torch
from omegaconf import OmegaConf
from support_models import MIXTURE, MODEL_CONFIG, MODELS
from test_refusals_on_cpu import SENTENCE, changed

from jetrl_verl.config import JetConfig, UnsupportedConfiguration, environment, operations
from jetrl_verl.config.operations import resolve_operations
from jetrl_verl.config.support.machine import MACHINE_ROWS, MODEL_ROWS
from jetrl_verl.config.support.options import OPTION_ROWS
from jetrl_verl.config.support.scopes import ATTENTION, AUTO, MODEL, SHARED, ULYSSES
from jetrl_verl.config.support.table import COMPOSITION_ROWS, TABLE, refusal, row
from jetrl_verl.config.support.workers import COMMAND_ROWS, WORKER_ROWS
from jetrl_verl.formats.catalog import QUANTIZED_CACHES
from jetrl_verl.sources import source_files

ROOT = Path(__file__).parents[2]
(FP8,) = QUANTIZED_CACHES
OPTIONS = JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="shared")
STOCK = ("precision=jet_fp8", "jetrl.operations=stock")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A Hopper machine with a model folder; callable (changes of config.json, capability, files of vLLM) -> path."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A GPU")
    monkeypatch.setattr(environment, "_check_weight_files", lambda folder: None)
    library = tmp_path / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    library.parent.mkdir(parents=True)
    spec = type("Spec", (), {"origin": str(tmp_path / "vllm" / "__init__.py")})
    monkeypatch.setattr(environment, "find_spec", lambda name: spec)
    operations._say.cache_clear()

    def build(changes=None, capability=(9, 0), flash_attention=True) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        library.touch() if flash_attention else library.unlink(missing_ok=True)
        (tmp_path / "config.json").write_text(json.dumps({**MODEL_CONFIG, **(changes or {})}))
        return str(tmp_path)

    return build


def refused(check, *args, **kwargs) -> str:
    """The sentence with which a check refuses."""
    with pytest.raises(UnsupportedConfiguration) as caught:
        check(*args, **kwargs)
    assert SENTENCE.fullmatch(str(caught.value))
    return str(caught.value)


def reason(message: str) -> str:
    return message.partition(": ")[2].partition(". Set ")[0]


SKIPPING = {"no_layer_fits": {"hidden_size": 192, "head_dim": 96, "intermediate_size": 576}}
MACHINES = {
    "gpu_without_fp8": ({"capability": (8, 0)}, "GPU 0, A GPU, of compute capability 8.0,"),
    "gpu_other_than_hopper": ({"capability": (8, 9)}, "GPU 0, A GPU, of compute capability 8.9,"),
    "no_flash_attention_3": ({"flash_attention": False}, ""),
}
ELSEWHERE = {
    *("version", "missing_package", "optimizer_package", "rollout_ranks_of_the_heads", "layer_shard_shape"),
    *("mixture_of_another_format", "mixture_with_stock_operations", "mixture_with_bf16_backward"),
    "mixture_over_replicas",
}
"""Rows that test_environment_on_cpu.py tests."""
BELOW = {
    *("npu", "rocm", "patch", "expert_shard_shape", "fused_kernels_of_a_padded_vocabulary", "ulysses_of_the_heads"),
    *("gpu_of_an_fp8_cache", "model_of_an_fp8_cache", "varlen_sliding_window", "varlen_dropout"),
    *(name for name, entry in TABLE.items() if entry.scope is AUTO),
}


def test_each_row_about_the_machine_is_tested():
    assert {*MODELS, *SKIPPING, *MACHINES, *ELSEWHERE, *BELOW} == {*MACHINE_ROWS, *MODEL_ROWS}


@pytest.mark.parametrize("name", [*MODELS, *SKIPPING])
def test_a_model_is_refused_by_its_row(machine, name, capsys):
    options = JetConfig("jet_fp8", train="fp8", rollout="fp8", unfit_layers="skip" if name in SKIPPING else "stop")
    path, entry = machine(), row(name)
    environment.check_model(path, options, 1, shared_operations=True)
    machine({**MODELS, **SKIPPING}[name])
    if entry.scope is SHARED:
        environment.check_model(path, options, 1)
    message = refused(environment.check_model, path, options, 1, shared_operations=entry.scope is SHARED)
    assert message == refusal(name, precision="jet_fp8", what=f"the model {path}", why=reason(message))
    if entry.scope is SHARED:
        config = changed(("precision=jet_fp8",), {"jetrl.operations": "auto", f"{MODEL}.path": path})
        resolve_operations(config)
        assert config.jetrl.operations == "stock" and reason(message) in capsys.readouterr().err


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_refused_by_its_row(machine, name):
    properties, what = MACHINES[name]
    path = machine(**properties)
    config = OmegaConf.create({"jetrl": OPTIONS.as_dict()})
    assert refused(environment.check_environment, config) == refusal(name, precision="jet_fp8", what=what)
    if row(name).scope is SHARED:
        config = changed(("precision=jet_fp8",), {"jetrl.operations": "auto", f"{MODEL}.path": path})
        resolve_operations(config)
        assert config.jetrl.operations == "stock"


def test_experts_that_fit_over_fewer_ranks_are_refused_with_their_number(machine):
    path = machine(MIXTURE | {"num_key_value_heads": 4, "moe_intermediate_size": 256})
    environment.check_model(path, OPTIONS, 2, shared_operations=True)
    message = refused(environment.check_model, path, OPTIONS, 4, shared_operations=True)
    assert message.startswith(f"the model {path} is not supported with precision=jet_fp8: ")
    remedy = "Set a smaller actor_rollout_ref.rollout.tensor_model_parallel_size, or precision=bf16."
    assert message.endswith(f", as they are over 2. {remedy}")


def test_a_fork_without_the_patched_function_is_refused(monkeypatch):
    from jetrl_verl import patches
    from jetrl_verl.patches.patch import CHANGED

    needed = next(patch for patch, _ in patches.installed_states() if patch.needed)
    monkeypatch.setattr(patches, "installed_states", lambda: [(needed, CHANGED)])
    message = refused(environment.check_patches, "jet_fp8")
    assert needed.replaces in message
    assert message.endswith(f" Set up {needed.pinned}, or precision=bf16.")


def test_other_accelerators_are_refused(machine, monkeypatch):
    machine()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert refused(environment.check_gpu, "jet_fp8") == refusal("rocm", precision="jet_fp8")
    monkeypatch.setattr("verl.utils.device.is_npu_available", True)
    assert refused(environment.check_gpu, "jet_fp8") == refusal("npu", precision="jet_fp8")


def test_fused_kernels_of_a_padded_vocabulary_are_refused(machine, monkeypatch):
    from transformers import AutoTokenizer

    path = machine()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: range(128))
    environment.check_vocabulary(path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: range(100))
    assert refused(environment.check_vocabulary, path) == (
        f"{MODEL}.use_fused_kernels=true is not supported with the 28 entries of its vocabulary without a token: "
        f"{path} would leave them unmasked in the trainer alone. Set {MODEL}.use_fused_kernels=false."
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_dim": 64}, "its heads are of 64, and a scale is for 128"),
        (
            {"num_attention_heads": 32, "num_key_value_heads": 2},
            "a KV head has 16 query heads, and the kernel computes 8",
        ),
        (MODELS["sliding_window"], "its layers attend to windows"),
    ],
)
def test_an_fp8_cache_of_a_model_without_a_kernel_is_refused(machine, changes, why):
    environment.check_cache(machine(), FP8)
    environment.check_cache(machine({"num_attention_heads": 16}), FP8)
    path = machine(changes)
    assert refused(environment.check_cache, path, FP8) == refusal(
        "model_of_an_fp8_cache", what=f"the model {path}", why=why
    )


def test_an_fp8_cache_on_another_gpu_is_refused(machine):
    path = machine(capability=(8, 9))
    options = JetConfig("fp8_rollout", train="bf16", rollout="fp8", kv_cache="fp8")
    config = OmegaConf.create({"jetrl": options.as_dict(), "actor_rollout_ref": {"model": {"path": path}}})
    what = MACHINES["gpu_other_than_hopper"][1]
    assert refused(environment.check_environment, config) == refusal("gpu_of_an_fp8_cache", what=what)


@pytest.mark.parametrize("key", ULYSSES)
def test_ulysses_ranks_that_do_not_divide_the_heads_are_refused(machine, key):
    path = machine({"num_attention_heads": 12, "num_key_value_heads": 2})
    for ranks in (1, 2, 4, 6, 12):
        environment.check_ulysses(path, key, ranks, "jet_fp8")
    for ranks in (3, 5, 8):
        settings = {f"{MODEL}.path": path, key: ranks, "data.train_files": [], "data.val_files": []}
        message = refused(environment.check_environment, changed(STOCK, settings))
        assert message.startswith(f"{key}={ranks} with the model {path} is not supported with precision=jet_fp8: ")
        assert "its 12 heads over 2 key heads" in message


@pytest.mark.parametrize("name", ["varlen_sliding_window", "varlen_dropout"])
def test_a_model_that_varlen_attention_does_not_support_is_refused(machine, monkeypatch, name):
    for check in ("check_versions", "check_patches", "check_gpu", "check_data"):
        monkeypatch.setattr(environment, check, lambda *_: None)
    slides = name == "varlen_sliding_window"
    path, settings = (
        machine(MODELS["sliding_window" if slides else "attention_dropout"]),
        (*STOCK, f"+{ATTENTION}=jetrl_varlen"),
    )

    def check(*further: str) -> None:
        environment.check_environment(changed((*settings, *further), {f"{MODEL}.path": path}))

    why = ", whose layers attend to windows," if slides else " with attention_dropout=0.1"
    assert refused(check) == refusal(name, what=f"the model {path}{why}")
    check(f"{ATTENTION}=sdpa")
    if not slides:
        check(f"+{MODEL}.override_config.attention_dropout=0.0")
    machine()
    check()


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if entry.scope is AUTO])
def test_auto_is_stock_where_the_driver_cannot_check_the_workers(machine, monkeypatch, name, capsys):
    settings, why = {f"{MODEL}.path": machine()}, ""
    if name == "cpu":
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    elif name == "no_gpu_in_the_driver":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif name == "remote_model":
        settings = {f"{MODEL}.path": "hdfs://model"}
        why = "the configuration of the model hdfs://model cannot be read from here"
    else:
        settings[f"{MODEL}.override_config"] = {"rope_theta": 1e6}
        why = f"{MODEL}.override_config overrides rope_theta of the model"
    config = changed(("precision=jet_fp8",), {"jetrl.operations": "auto", **settings})
    resolve_operations(config)
    assert config.jetrl.operations == "stock"
    assert f"auto is stock, since {refusal(name, why=why)}" in capsys.readouterr().err
    config = changed(("precision=jet_fp8",), {"jetrl.operations": "shared", **settings})
    resolve_operations(config)
    assert config.jetrl.operations == "shared"


# --- one table --------------------------------------------------------------------------------------------------------

PACKAGE = ROOT / "jetrl_verl"


def modules() -> list[Path]:
    """Every module of the package outside config/, which has the table."""
    return [path for name, path in source_files().items() if not name.startswith("config/")]


WORDS = {None, "precision", "key", "value", "what", "scope", "why", "remedy"}
"""Arguments of ``refusal``; None stands for ``**words``."""


def test_code_refuses_by_existing_rows_and_uses_each():
    used = set()
    assert len(TABLE) == sum(
        map(len, (OPTION_ROWS, COMPOSITION_ROWS, MACHINE_ROWS, MODEL_ROWS, WORKER_ROWS, COMMAND_ROWS))
    )
    for path in (*modules(), *PACKAGE.glob("config/*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            called = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
            place = {"refuse": 0, "refusal": 0, "UnsupportedLayer": 1, "UnsupportedOperation": 1}.get(called)
            if place is not None and path.parent.name != "support":
                assert len(call.args) > place, f"{path}:{call.lineno} names no row"
                used |= {node.value for node in [call.args[place]] if isinstance(node, ast.Constant)}
                if place == 0:
                    assert {keyword.arg for keyword in call.keywords} <= WORDS, f"{path}:{call.lineno}"
    assert {*WORKER_ROWS, *COMMAND_ROWS} <= used <= TABLE.keys()


def test_the_page_of_support_is_generated_from_the_table():
    assert support_page.PAGE.read_text() == support_page.document(), "run python scripts/support_page.py"
