# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Each row of the table of support has its effect, with its message, and the documentation says what the table says."""

import ast
import copy
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf
from support_models import MIXTURE, MODEL_CONFIG, MODELS

from jetrl_verl.config import JetConfig, UnsupportedConfiguration, check_config, environment
from jetrl_verl.config.check import reader
from jetrl_verl.config.operations import resolve_operations
from jetrl_verl.config.support.commands import COMMAND_ROWS
from jetrl_verl.config.support.document import BEGIN, END, document, readme_block
from jetrl_verl.config.support.general import ULYSSES
from jetrl_verl.config.support.machine import MACHINE_ROWS
from jetrl_verl.config.support.operations import SHARED_ROWS
from jetrl_verl.config.support.options import OPTION_ROWS
from jetrl_verl.config.support.scopes import ATTENTION, AUTO, MODEL, VLLM
from jetrl_verl.config.support.table import COMPOSITION_ROWS, TABLE, row, stock_because
from jetrl_verl.config.support.workers import WORKER_ROWS
from jetrl_verl.formats.catalog import QUANTIZED_CACHES

ROOT = Path(__file__).parents[2]
SHAPE = re.compile(r"[^.]\S.* is not supported with .+\. Set .+\.")


@cache
def composed(*overrides: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", overrides=list(overrides))


def changed(overrides: tuple[str, ...], settings: dict):
    config = copy.deepcopy(composed(*overrides))
    for key, value in settings.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


SETTINGS = [(each, key) for each in (*OPTION_ROWS, *COMPOSITION_ROWS) for key in each.keys]


@pytest.mark.parametrize(("tried", "key"), SETTINGS, ids=[f"{each.name}-{key}" for each, key in SETTINGS])
def test_a_setting_of_a_row_is_refused_with_its_message(tried, key):
    check_config(changed(tried.scope.example, {}))
    config = changed(tried.scope.example, {**tried.beside, key: tried.example})
    with pytest.raises(UnsupportedConfiguration) as refused:
        check_config(config)
    get = reader(config)
    words = {"key": key} if tried.wrong is None else next(met for met in tried.met(get) if met["key"] == key)
    assert str(refused.value) == tried.message(get, **words)
    assert SHAPE.fullmatch(str(refused.value)) and "{key}" not in str(refused.value)
    assert (key if "{key}" in tried.what else words["value"]) in str(refused.value)


@pytest.mark.parametrize("tried", SHARED_ROWS, ids=lambda tried: tried.name)
def test_what_the_shared_operations_cannot_do_makes_auto_stock(tried, capsys):
    (key,) = tried.keys
    config = changed(("precision=jet_fp8",), {"jetrl.operations": "auto", key: tried.example})
    check_config(config)
    (clause,) = stock_because(reader(config))
    resolve_operations(config)
    assert config.jetrl.operations == "stock" and f"auto is stock, since {clause}." in capsys.readouterr().err
    check_config(config)


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

    def build(changes=None, capability=(9, 0), flash_attention=True) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        library.touch() if flash_attention else library.unlink(missing_ok=True)
        (tmp_path / "config.json").write_text(json.dumps({**MODEL_CONFIG, **(changes or {})}))
        return str(tmp_path)

    return build


(FP8,) = QUANTIZED_CACHES
OPTIONS = JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="shared")
SKIPPING = {"no_layer_fits": {"hidden_size": 192, "head_dim": 96, "intermediate_size": 576}}
MACHINES = {
    "gpu_without_fp8": {"capability": (8, 0)},
    "gpu_other_than_hopper": {"capability": (8, 9)},
    "no_flash_attention_3": {"flash_attention": False},
}
ELSEWHERE = {
    "layer_shard_shape": "test_environment_on_cpu.py::test_the_largest_rollout_that_fits_is_named",
    "expert_shard_shape": "",
    "patch": "",
    "rollout_ranks_of_the_heads": (
        "test_environment_on_cpu.py::test_a_rollout_over_which_no_heads_can_be_dealt_is_refused"
    ),
    "version": "test_environment_on_cpu.py::test_another_version_is_named_beside_the_pin",
    "missing_package": "test_environment_on_cpu.py::test_a_missing_package_is_named",
    "optimizer_package": "test_environment_on_cpu.py::test_an_optimizer_whose_package_is_not_installed_is_named",
    "npu": "",
    "rocm": "",
    **dict.fromkeys(
        ("mixture_of_another_format", "mixture_with_stock_operations", "mixture_with_bf16_backward"),
        "test_environment_on_cpu.py::test_a_mixture_of_experts_is_checked",
    ),
    "mixture_over_replicas": "test_environment_on_cpu.py::test_a_mixture_over_the_replicas_of_one_server_is_refused",
    "fused_kernels_of_a_padded_vocabulary": "",
    "ulysses_of_the_heads": "",
    "gpu_of_an_fp8_cache": "",
    "model_of_an_fp8_cache": "",
    "varlen_sliding_window": "",
    "varlen_dropout": "",
    **{each.name: "" for each in TABLE if each.scope is AUTO},
}
"""Rows with a test of their own, below or in the file named."""


def test_each_row_about_the_machine_is_proved():
    assert {*MODELS, *SKIPPING, *MACHINES, *ELSEWHERE} == {each.name for each in MACHINE_ROWS}


@pytest.mark.parametrize("name", [*MODELS, *SKIPPING])
def test_a_model_is_refused_by_its_row(machine, name, capsys):
    options = JetConfig("jet_fp8", train="fp8", rollout="fp8", unfit_layers="skip" if name in SKIPPING else "stop")
    path = machine()
    environment.check_model(path, options, 1, shared_operations=True)
    machine({**MODELS, **SKIPPING}[name])
    refused = pytest.raises(UnsupportedConfiguration)
    if row(name).scope.stock:
        environment.check_model(path, options, 1)
    with refused as caught:
        environment.check_model(path, options, 1, shared_operations=row(name).scope.stock)
    message = str(caught.value)
    error = message.partition(": ")[2].partition(". Set ")[0]
    assert message == row(name).message(path=path, error=error, **{"jetrl.precision": "jet_fp8"})
    assert SHAPE.fullmatch(message)
    if row(name).scope.stock:
        config = changed(("precision=jet_fp8",), {"jetrl.operations": "auto", f"{MODEL}.path": path})
        resolve_operations(config)
        assert config.jetrl.operations == "stock" and error in capsys.readouterr().err


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_refused_by_its_row(machine, name):
    path = machine(**MACHINES[name])
    config = OmegaConf.create({"jetrl": OPTIONS.as_dict()})
    with pytest.raises(UnsupportedConfiguration) as refused:
        environment.check_environment(config)
    capability = ".".join(map(str, MACHINES[name].get("capability", (9, 0))))
    words = {"gpu": "GPU 0, A GPU", "capability": capability, "jetrl.precision": "jet_fp8"}
    assert str(refused.value) == row(name).message(**words)
    if row(name).scope.stock:
        config = changed(("precision=jet_fp8",), {"jetrl.operations": "auto", f"{MODEL}.path": path})
        resolve_operations(config)
        assert config.jetrl.operations == "stock"


def test_experts_that_fit_over_fewer_ranks_are_refused_with_their_number(machine):
    options = JetConfig("jet_fp8", train="fp8", rollout="fp8")
    path = machine(MIXTURE | {"num_key_value_heads": 4, "moe_intermediate_size": 256})
    environment.check_model(path, options, 2, shared_operations=True)
    with pytest.raises(UnsupportedConfiguration) as refused:
        environment.check_model(path, options, 4, shared_operations=True)
    error = str(refused.value).partition(": ")[2].partition(". Set ")[0]
    words = {"path": path, "error": error, "largest": 2, "jetrl.precision": "jet_fp8"}
    assert str(refused.value) == row("expert_shard_shape").message(**words) and "unfit_layers" not in str(refused.value)


def test_a_fork_into_which_a_needed_patch_does_not_fit_is_refused_by_its_row(monkeypatch):
    from jetrl_verl import patches
    from jetrl_verl.patches.patch import CHANGED

    needed = next(patch for patch, _ in patches.installed_states() if patch.needed)
    monkeypatch.setattr(patches, "installed_states", lambda: [(needed, CHANGED)])
    with pytest.raises(UnsupportedConfiguration) as refused:
        environment.check_patches("jet_fp8")
    assert SHAPE.fullmatch(str(refused.value)) and needed.replaces in str(refused.value)
    assert f"Set up {needed.project} {needed.version}, or precision=bf16." in str(refused.value)


def test_other_accelerators_are_refused_by_their_rows(machine, monkeypatch):
    machine()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(UnsupportedConfiguration) as rocm:
        environment.check_gpu("jet_fp8")
    monkeypatch.setattr("verl.utils.device.is_npu_available", True)
    with pytest.raises(UnsupportedConfiguration) as npu:
        environment.check_gpu("jet_fp8")
    words = {"jetrl.precision": "jet_fp8"}
    assert [str(rocm.value), str(npu.value)] == [row(name).message(**words) for name in ("rocm", "npu")]


def test_fused_kernels_of_a_padded_vocabulary_are_refused_by_their_row(machine, monkeypatch):
    from transformers import AutoTokenizer

    path = machine()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: range(100))
    with pytest.raises(UnsupportedConfiguration) as refused:
        environment.check_vocabulary(path)
    words = {"key": f"{MODEL}.use_fused_kernels", "entries": 28, "path": path}
    assert str(refused.value) == row("fused_kernels_of_a_padded_vocabulary").message(**words)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"head_dim": 64}, "its heads are of 64, and a scale is for 128"),
        (
            {"num_attention_heads": 32, "num_key_value_heads": 2},
            "a KV head has 16 query heads, and the kernel computes 8",
        ),
        (MODELS["sliding_window"], "its layers attend to windows"),
    ],
)
def test_an_fp8_cache_of_a_model_without_a_kernel_is_refused_by_its_row(machine, changes, error):
    environment.check_cache(machine(), FP8)
    environment.check_cache(machine({"num_attention_heads": 16}), FP8)
    with pytest.raises(UnsupportedConfiguration) as refused:
        environment.check_cache(path := machine(changes), FP8)
    expected = row("model_of_an_fp8_cache").message(path=path, error=error)
    assert str(refused.value) == expected and SHAPE.fullmatch(expected)


def test_an_fp8_cache_on_another_gpu_is_refused_by_its_row(machine):
    path = machine(capability=(8, 9))
    options = JetConfig("fp8_rollout", train="bf16", rollout="fp8", kv_cache="fp8")
    config = OmegaConf.create({"jetrl": options.as_dict(), "actor_rollout_ref": {"model": {"path": path}}})
    with pytest.raises(UnsupportedConfiguration) as refused:
        environment.check_environment(config)
    words = {"gpu": "GPU 0, A GPU", "capability": "8.9"}
    assert str(refused.value) == row("gpu_of_an_fp8_cache").message(**words)


@pytest.mark.parametrize("key", ULYSSES)
def test_ranks_that_do_not_divide_the_heads_are_refused_by_their_row(machine, key):
    path = machine({"num_attention_heads": 12, "num_key_value_heads": 2})
    for ranks in (1, 2, 4, 6, 12):
        environment.check_ulysses(path, key, ranks, "jet_fp8")
    for ranks in (3, 5, 8):
        settings = {f"{MODEL}.path": path, key: ranks, "data.train_files": [], "data.val_files": []}
        with pytest.raises(UnsupportedConfiguration) as refused:
            environment.check_environment(changed(("precision=jet_fp8", "jetrl.operations=stock"), settings))
        words = {"path": path, "key": key, "value": ranks, "heads": 12, "kv_heads": 2}
        expected = row("ulysses_of_the_heads").message(**words, **{"jetrl.precision": "jet_fp8"})
        assert str(refused.value) == expected and SHAPE.fullmatch(expected)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("varlen_sliding_window", MODELS["sliding_window"], {}),
        ("varlen_dropout", MODELS["attention_dropout"], {"rate": 0.1}),
    ],
)
def test_what_our_attention_does_not_do_of_a_model_is_refused_by_its_row(machine, monkeypatch, name, changes, words):
    for check in ("check_versions", "check_patches", "check_gpu", "check_data"):
        monkeypatch.setattr(environment, check, lambda *_: None)
    path, settings = machine(changes), row(name).scope.example

    def check(*further: str) -> None:
        environment.check_environment(changed((*settings, *further), {f"{MODEL}.path": path}))

    with pytest.raises(UnsupportedConfiguration) as refused:
        check()
    assert str(refused.value) == row(name).message(path=path, **words) and SHAPE.fullmatch(str(refused.value))
    check(f"{ATTENTION}=sdpa")
    if "attention_dropout" in changes:
        check(f"+{MODEL}.override_config.attention_dropout=0.0")
    machine()
    check()


@pytest.mark.parametrize("attention", [None, "flash_attention_2", "jetrl_varlen"])
def test_ulysses_is_supported_where_ranks_exchange_tokens(attention):
    word = () if attention is None else (f"+{ATTENTION}={attention}",)
    (actor, *_) = row("ulysses_without_exchange").keys
    check_config(changed(("precision=jet_fp8", "jetrl.operations=stock", *word), {actor: 2}))


@pytest.mark.parametrize("name", [each.name for each in TABLE if each.scope is AUTO])
def test_what_the_driver_cannot_know_makes_auto_stock_and_refuses_nothing(machine, monkeypatch, name, capsys):
    settings = {f"{MODEL}.path": machine()}
    if name == "cpu":
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    elif name == "no_gpu_in_the_driver":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif name == "remote_model":
        settings = {f"{MODEL}.path": "hdfs://model"}
    else:
        settings[f"{MODEL}.override_config"] = {"rope_theta": 1e6}
    words = {"path": "hdfs://model", "where": f"{MODEL}.override_config", "field": "rope_theta"}
    config = changed(("precision=jet_fp8",), {"jetrl.operations": "auto", **settings})
    from jetrl_verl.config import operations

    operations._say.cache_clear()
    resolve_operations(config)
    assert config.jetrl.operations == "stock"
    assert f"auto is stock, since {row(name).message(**words)}" in capsys.readouterr().err
    config = changed(("precision=jet_fp8",), {"jetrl.operations": "shared", **settings})
    check_config(config)
    resolve_operations(config)
    assert config.jetrl.operations == "shared"


def test_names_of_rows_are_unique():
    assert len({each.name for each in TABLE}) == len(TABLE)


# --- one table, and nobody beside it ---------------------------------------------------------------------------------

PACKAGE = ROOT / "jetrl_verl"
REFUSES = ("refuse", "_refuse", "refusal", "_message")
RAISES = ("UnsupportedLayer", "UnsupportedOperation")


def modules() -> list[Path]:
    """Every module of the package but those of the table."""
    found = [Path(folder, file) for folder, _, files in os.walk(PACKAGE, followlinks=True) for file in files]
    return [path for path in found if path.suffix == ".py" and PACKAGE / "config" / "support" not in path.parents]


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string in a file that is no docstring; of an f-string its fixed parts, `*` for the rest."""
    inside = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def sentences(tree: ast.AST) -> list[tuple[int, str]]:
    return [(line, text) for line, text in texts(tree) if re.search(r"\b(not|un)\s?supported\b", text)]


def test_no_sentence_of_what_is_not_supported_stands_outside_of_the_table():
    assert len(modules()) > 150
    found = {str(path.relative_to(ROOT)): sentences(ast.parse(path.read_text())) for path in modules()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('raise ValueError(f"{x} is not supported with {y}. Set {z}.")', 1),
        ('raise ValueError("X is not "\n    f"supported with {y}")', 1),
        ('message = "layers are not supported"\nraise ValueError(message)', 1),
        ('def f():\n    """What is not supported with y."""', 0),
        ('raise ValueError("expected BF16, got FP16")', 0),
    ],
)
def test_such_a_sentence_is_found_however_it_is_put_together(code, found):
    assert len(sentences(ast.parse(code))) == found


def asked_rows() -> dict[str, set[str]]:
    """Row -> files outside of the table that look it up or raise it by its name as a literal."""
    names, found = {each.name for each in TABLE}, {}
    for path in modules():
        tree = ast.parse(path.read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            called = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
            literal = [each.value for each in call.args if isinstance(each, ast.Constant)]
            if called in REFUSES and literal:
                assert literal[0] in names, f"{path}: {literal[0]}"
            if called in RAISES and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
                assert call.args[1].value in names, f"{path}: {call.args[1].value}"
        for _, text in texts(tree):
            found.setdefault(text, set()).add(str(path.relative_to(PACKAGE)))
    return {name: found[name] for name in names & found.keys()}


def test_each_row_of_a_worker_or_a_command_is_raised_where_it_is_seen():
    """By the rows' names; tests/rollout and tests/train bring them about."""
    asked = asked_rows()
    packages = {"train", "rollout", "algorithms", "targets", "nn", "config", "tools"}
    for each in (*WORKER_ROWS, *COMMAND_ROWS):
        assert {path.split("/")[0] for path in asked.get(each.name, set())} & packages, each.name


def test_every_error_of_a_model_names_a_row():
    """Also where the name is not a literal: each is brought about in :func:`test_a_model_is_refused_by_its_row`."""
    for path in (PACKAGE / "models").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in RAISES:
                assert len(node.args) == 2, f"{path}:{node.lineno}"


JSON_FORMS = [
    ("fusions_of_reductions", "compilation_config", {"pass_config": {"enable_sp": True}}),
    ("attention_config", "attention_config", {"flash_attn_version": 2}),
    ("speculation", "speculative_config", {"method": "ngram"}),
]


@pytest.mark.parametrize(("name", "argument", "value"), JSON_FORMS)
def test_an_argument_of_vllm_given_as_json_is_read_like_the_mapping(name, argument, value):
    scope = row(name).scope.example
    messages = []
    for form in (value, json.dumps(value)):
        config = changed(scope, {f"{VLLM}.{argument}": form})
        (words,) = row(name).met(reader(config))
        with pytest.raises(UnsupportedConfiguration) as refused:
            check_config(config)
        messages += [str(refused.value), row(name).message(reader(config), **words)]
    assert len(set(messages)) == 1 and f"{VLLM}.{argument}" in messages[0]
    for harmless in ({}, "{}", None):
        check_config(changed(scope, {f"{VLLM}.{argument}": harmless}))


def test_the_documentation_is_the_table():
    assert (ROOT / "docs" / "support.md").read_text() == document()
    readme = (ROOT / "README.md").read_text()
    assert readme[readme.index(BEGIN) : readme.index(END) + len(END)] == readme_block()
