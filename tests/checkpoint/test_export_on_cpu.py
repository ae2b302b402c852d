# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An export has the rollout's qdata byte for byte, under the names that vLLM and transformers read."""

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from jetrl_verl.algorithms.invariant_scaling import FOLDED, fold
from jetrl_verl.checkpoint import export as checkpoint_export
from jetrl_verl.checkpoint.export import ExportOptions, export
from jetrl_verl.cli import app
from jetrl_verl.inputs import UserError
from jetrl_verl.models import family as model_family
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.sync.quantize import as_tensors, quantize_stream
from jetrl_verl.tools.demo.policy import build_tokenizer

WORLD = 2


def trainer():
    """FP32 master weights with biases."""
    return tiny_model("qwen2", seed=1, hidden_size=256, intermediate_size=256)


def save_folder(model, folder: Path) -> Path:
    """A Hugging Face folder with tokenizer and generation config."""
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=3).save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not part.keys() & stored.keys()
        stored |= part
    return stored


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor per expert and projection, as in published checkpoints of mixtures."""
    split = {}
    for name, tensor in tensors.items():
        prefix, _, parameter = name.partition(".mlp.experts.")
        scales = "_scale_inv" if parameter.endswith("_scale_inv") else ""
        if not parameter:
            split[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            halves = (
                zip(("gate_proj", "up_proj"), matrix.chunk(2)) if "gate_up" in parameter else [("down_proj", matrix)]
            )
            for projection, half in halves:
                split[f"{prefix}.mlp.experts.{expert}.{projection}.weight{scales}"] = half
    return split


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape, name
        assert torch.equal(actual[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """(the trainer's model, the folder it was saved to)."""
    model = trainer()
    return model, save_folder(model, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def exported(policy, tmp_path_factory):
    _, folder = policy
    out = tmp_path_factory.mktemp("exported") / "out"
    return export(folder, out, ExportOptions()), out


@pytest.mark.parametrize("rule", ["fp32", "pow2"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe"])
def test_qdata_equal_those_of_a_weight_sync(family, rule, tmp_path):
    model = tiny_model(family, seed=2)
    save_folder(model, tmp_path / "policy")
    (written,) = export(tmp_path / "policy", tmp_path / "out", ExportOptions("fp8", scale_rule=rule))
    sent = dict(as_tensors(quantize_stream(model.state_dict().items(), plan_linears(model.config), rule)))
    same(tensors(tmp_path / "out"), one_by_one(sent))
    assert written.quantized == {"qwen3_5": 19, "qwen3_5_moe": 19 + 3 * 8 * 3}.get(family, 14)
    assert json.loads((tmp_path / "out" / "jetrl_export.json").read_text())["scale_rule"] == rule


def test_the_bf16_folder_holds_the_rounded_master_weights(policy, exported):
    model, _ = policy
    loaded = AutoModelForCausalLM.from_pretrained(exported[1] / "bf16", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    same(loaded.state_dict(), {name: tensor.bfloat16() for name, tensor in model.state_dict().items()})


def test_the_quantization_config_has_vllms_fields(exported):
    config = json.loads((exported[1] / "fp8" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    assert "quantization_config" not in json.loads((exported[1] / "bf16" / "config.json").read_text())


def test_tokenizer_and_generation_config_are_copied_and_no_other_weights(policy, exported):
    _, folder = policy
    for name in ("bf16", "fp8"):
        out = exported[1] / name
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (out / file).read_bytes() == (folder / file).read_bytes()
        assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
        assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def _save_rank(rank: int, store: str, actor: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))  # as verl builds it
    model = trainer()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.save(model.state_dict(), Path(actor) / f"model_world_size_{WORLD}_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def run_folder(policy, tmp_path_factory):
    """``checkpoints`` of a run on two ranks in verl's layout: FP32 shards, config and tokenizer."""
    model, _ = policy
    root = tmp_path_factory.mktemp("checkpoints")
    actor = root / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    torch.multiprocessing.spawn(_save_rank, (str(root / "store"), str(actor)), nprocs=WORLD)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))
    save_folder(model, actor / "huggingface")
    (actor / "huggingface" / "model.safetensors").unlink()
    (root / "latest_checkpointed_iteration.txt").write_text("3\n")
    return root


def test_a_sharded_checkpoint_exports_the_same_tensors_as_the_full_model(run_folder, exported, tmp_path):
    export(run_folder / "global_step_3" / "actor", tmp_path / "out", ExportOptions())
    for name in ("bf16", "fp8"):
        same(tensors(tmp_path / "out" / name), tensors(exported[1] / name))
        for file in ("tokenizer.json", "generation_config.json"):
            assert (tmp_path / "out" / name / file).is_file()


@pytest.mark.parametrize("below", ["", "global_step_3", "global_step_3/actor"])
def test_a_checkpoint_is_found_from_any_of_its_folders(run_folder, below):
    assert checkpoint_export.find_checkpoint(run_folder / below) == run_folder / "global_step_3" / "actor"


def test_merging_maps_the_shards(run_folder, monkeypatch):
    """Every loaded shard lies in a mapped file."""
    loaded = []
    stock = torch.load

    def spy(*arguments, **options):
        state = stock(*arguments, **options)
        loaded.extend(tensor._local_tensor for tensor in state.values())
        return state

    monkeypatch.setattr(torch, "load", spy)
    for _ in checkpoint_export._read_fsdp(run_folder / "global_step_3" / "actor"):
        pass
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "model_world_size_" in line]
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    assert loaded and all(any(a <= tensor.data_ptr() < b for a, b in ranges) for tensor in loaded)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_bf16_folder_is_without_invariant_scaling(family, tmp_path):
    """The policy is untrained, so the BF16 folder must hold its original BF16 weights."""
    model = tiny_model(family, seed=1).bfloat16().float()
    before = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    fold(model.named_parameters(), 1.5, model_family({"model_type": family}))
    setattr(model.config, FOLDED, 1.5)
    save_folder(model, tmp_path / "huggingface")
    (tmp_path / "huggingface" / "model.safetensors").unlink()
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    torch.save(model.state_dict(), tmp_path / "model_world_size_1_rank_0.pt")

    export(tmp_path, tmp_path / "out", ExportOptions())
    same(tensors(tmp_path / "out" / "bf16"), one_by_one(before))
    same(
        tensors(tmp_path / "out" / "fp8"),
        one_by_one(dict(as_tensors(quantize_stream(model.state_dict().items(), plan_linears(model.config), "fp32")))),
    )
    stated = [json.loads((tmp_path / "out" / name / "config.json").read_text()).get(FOLDED) for name in ("bf16", "fp8")]
    assert stated == [None, 1.5]


def test_memory_holds_one_output_file_and_one_tensor(tmp_path, monkeypatch):
    """And the index names every tensor, a weight and its scales in one file."""
    config = tiny_config("llama", hidden_size=1024, intermediate_size=2816, num_attention_heads=8, num_hidden_layers=8)
    shape = plan_linears(config)
    (tmp_path / "policy").mkdir()
    config.save_pretrained(tmp_path / "policy")
    weights = {"model.embed_tokens.weight": torch.randn(64, 1024), "lm_head.weight": torch.randn(64, 1024)}
    for layer in range(8):
        for plan in shape.values():
            weights[f"model.layers.{layer}.{plan.suffix}.weight"] = torch.randn(plan.n, plan.k).bfloat16()
    save_file(weights, tmp_path / "policy" / "model.safetensors")
    size = sum(tensor.nbytes for tensor in weights.values())
    del weights

    shard, seen, live = 8 * 2**20, [], []
    save, read, quantize = (
        getattr(checkpoint_export, n) for n in ("save_file", "_read_safetensors", "quantize_stream")
    )

    def watched(stream):
        def watch(*arguments):
            for name, tensor in stream(*arguments):
                seen.append(weakref.ref(getattr(tensor, "qdata", tensor)))
                yield name, tensor
                del tensor

        return watch

    def save_and_measure(*arguments, **options):
        live.append(sum(tensor.nbytes for tensor in (reference() for reference in seen) if tensor is not None))
        save(*arguments, **options)

    monkeypatch.setattr(checkpoint_export, "save_file", save_and_measure)
    monkeypatch.setattr(checkpoint_export, "_read_safetensors", watched(read))
    monkeypatch.setattr(checkpoint_export, "quantize_stream", watched(quantize))
    (written,) = export(tmp_path / "policy", tmp_path / "out", ExportOptions("fp8"), shard)
    assert written.files == len(live) > 10
    largest = 2816 * 1024
    assert max(live) <= shard + 3 * largest < size / 10  # a file, a BF16 weight and its qdata

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.bytes
    for name, file in index["weight_map"].items():
        assert file.endswith(f"-of-{written.files:05d}.safetensors")
        if name.endswith("_scale_inv"):
            assert index["weight_map"][name.removesuffix("_scale_inv")] == file
    assert tensors(tmp_path / "out").keys() == index["weight_map"].keys()


def test_an_output_of_several_files_loads_as_one_model(policy, exported, tmp_path):
    _, folder = policy
    (written,) = export(folder, tmp_path / "out", ExportOptions("bf16"), shard_bytes=100_000)
    assert written.files > 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    same(loaded.state_dict(), tensors(exported[1] / "bf16"))


def test_an_input_of_several_files_is_read_through_its_index(policy, exported, tmp_path):
    _, folder = policy
    export(folder, tmp_path / "sharded", ExportOptions("bf16"), shard_bytes=100_000)
    export(tmp_path / "sharded", tmp_path / "out", ExportOptions("fp8"))
    same(tensors(tmp_path / "out"), tensors(exported[1] / "fp8"))


def test_a_tied_embedding_is_written_once_and_stays_tied(tmp_path):
    model = tiny_model("qwen3", tie_word_embeddings=True)
    save_folder(model, tmp_path / "policy")
    weights = tensors(tmp_path / "policy")
    # A gathered FSDP state dict has both names.
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, tmp_path / "both.safetensors")
    (tmp_path / "both.safetensors").rename(tmp_path / "policy" / "model.safetensors")
    export(tmp_path / "policy", tmp_path / "out", ExportOptions())
    for name in ("bf16", "fp8"):
        assert "lm_head.weight" not in tensors(tmp_path / "out" / name)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "bf16")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight.bfloat16(), model.lm_head.weight.bfloat16())


def test_skipped_layers_stay_bf16_and_are_named(tmp_path):
    model = tiny_model("llama", hidden_size=256, intermediate_size=192)
    save_folder(model, tmp_path / "policy")
    with pytest.raises(UserError, match=r"mlp.gate_proj has shards of shape \[192, 256\].*unfit_layers=skip"):
        export(tmp_path / "policy", tmp_path / "out", ExportOptions("fp8"))
    (written,) = export(tmp_path / "policy", tmp_path / "out", ExportOptions("fp8", unfit_layers="skip"))
    assert written.quantized == 8
    stored = tensors(tmp_path / "out")
    skipped = [f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down")]
    assert all(stored[f"{name}.weight"].dtype == torch.bfloat16 for name in skipped)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head", *skipped]


def test_the_rollouts_tensor_parallel_size_decides_which_layers_fit(tmp_path):
    save_folder(tiny_model("llama", hidden_size=256, intermediate_size=384), tmp_path / "policy")
    (whole,) = export(tmp_path / "policy", tmp_path / "tp1", ExportOptions("fp8"))
    options = ExportOptions("fp8", unfit_layers="skip", tensor_parallel=2)
    (split,) = export(tmp_path / "policy", tmp_path / "tp2", options)
    assert (whole.quantized, split.quantized) == (14, 8)  # 384 columns on two ranks are 192 each


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_weights(folder: Path, change) -> None:
    weights = tensors(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors")


def layers(number: int) -> dict:
    return {"num_hidden_layers": number, "layer_types": ["full_attention"] * number}


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
        (lambda f: edit_config(f, quantization_config={"quant_method": "fp8"}), "quantized already"),
        (lambda f: edit_config(f, model_type="gpt2"), "model_type 'gpt2' is none of"),
        (lambda f: edit_config(f, **layers(1)), "belongs to a layer that config.json does not have"),
        (lambda f: edit_config(f, **layers(3)), r"layers\.2\.\S+ is not in the checkpoint \(7 missing\)"),
        (lambda f: edit_config(f, intermediate_size=384), r"has shape \[256, 256\] and config.json says \[256, 384\]"),
        (lambda f: edit_weights(f, lambda w: w.pop(Q)), rf"{Q} is not in the checkpoint \(1 missing\)"),
        (lambda f: edit_weights(f, lambda w: w[Q].view(-1)[5:6].fill_(float("nan"))), rf"{Q} holds Inf or NaN"),
        (lambda f: edit_config(f, tie_word_embeddings=True), "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_a_refused_export_gives_one_sentence_and_writes_nothing(policy, damage, sentence, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(policy[1], folder)
    damage(folder)
    with pytest.raises(UserError, match=sentence) as error:
        export(folder, tmp_path / "out", ExportOptions())
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    assert {path.name for path in tmp_path.iterdir()} <= {"policy"}


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_a_quantized_checkpoint_is_never_cast(exported, format, tmp_path):
    with pytest.raises(UserError, match="quantized already|already quantized"):
        export(exported[1] / "fp8", tmp_path / "out", ExportOptions(format))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "model_world_size_2_rank_1.pt").unlink(), "FileNotFoundError.*rank_1.pt"),
        (lambda f: (f / "model_world_size_2_rank_0.pt").unlink(), "FileNotFoundError: model_world_size_2_rank_0.pt"),
        (lambda f: [file.unlink() for file in f.glob("*.pt")], "holds no trainer state"),
    ],
)
def test_a_damaged_sharded_checkpoint_gives_one_sentence(run_folder, damage, sentence, tmp_path):
    actor = tmp_path / "actor"
    shutil.copytree(run_folder / "global_step_3" / "actor", actor)
    damage(actor)
    with pytest.raises(UserError, match=sentence) as error:
        export(actor, tmp_path / "out", ExportOptions())
    assert ("every rank's model_world_size" in str(error.value)) == ("trainer state" not in sentence)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_with_files_is_refused(policy, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is not an empty folder"):
        export(policy[1], tmp_path / "out", ExportOptions())
    assert (tmp_path / "out" / "thesis.tex").read_text() == "x"


def test_the_command_prints_what_it_wrote_and_how_to_serve_it(policy, tmp_path):
    result = CliRunner().invoke(app, ["export", str(policy[1]), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out' / 'bf16'}: 1 file")
    assert lines[1].startswith(f"{tmp_path / 'out' / 'fp8'}: 1 file") and lines[1].endswith("14 layers in FP8")
    digest = json.loads((tmp_path / "out" / "fp8" / "jetrl_export.json").read_text())["digest"]
    assert lines[2].startswith(f"digest {digest}:")
    assert lines[3].endswith(f"VLLM_USE_DEEP_GEMM=0 vllm serve {tmp_path / 'out' / 'fp8'}")


def test_the_command_does_not_name_a_log_for_a_sharded_rollouts_digest(policy, tmp_path):
    """Each of its workers logs the sum of its own shard."""
    words = ["export", str(policy[1]), str(tmp_path / "out"), "--tensor-parallel", "2", "--unfit-layers", "skip"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    digest = json.loads((tmp_path / "out" / "fp8" / "jetrl_export.json").read_text())["digest"]
    assert f"digest {digest}" in result.stdout.splitlines()
