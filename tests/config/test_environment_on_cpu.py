# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks right before a job starts: versions, models, data."""

import json
import shutil
from dataclasses import replace
from importlib import metadata

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf
from safetensors.numpy import save_file
from support_models import MODEL_CONFIG

from jetrl_verl.config.composition import reader
from jetrl_verl.config.data import find_media
from jetrl_verl.config.environment import check_environment, check_optimizer, check_versions
from jetrl_verl.config.job import Job
from jetrl_verl.config.model import check_bucket, check_model, check_replicas, copy_model, read_model
from jetrl_verl.config.options import JetConfig
from jetrl_verl.config.support.limits import PINS
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.config.support.scopes import REPLICAS

OPTIONS = JetConfig(precision="jet_fp8", train="fp8", rollout="fp8")
EXACT = JetConfig(precision="jet_fp8_exact", train="fp8", rollout="fp8", operations="shared")
SKIP = JetConfig(precision="jet_fp8", train="fp8", rollout="fp8", unfit_layers="skip")
BUCKET_KEY = "checkpoint_engine.update_weights_bucket_megabytes"


@pytest.fixture
def model_folder(tmp_path):
    """Callable that writes a model folder with some keys of its config changed (``None`` removes one)."""

    def write(**changes):
        config = {**MODEL_CONFIG, "architectures": ["Qwen3ForCausalLM"], **changes}
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        save_file({"weight": np.zeros((4, 4), np.float32)}, tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1 + 1"]}), path)
    return path


def refusal(function, *arguments) -> str:
    with pytest.raises(UnsupportedConfiguration) as refused:
        function(*arguments)
    message = str(refused.value)
    assert message.endswith(".") and "\n" not in message
    return message


def check(path, options, ranks=1, overrides=None, roles=("actor",)) -> None:
    """Check the model at ``path`` for a job of ``options`` and a rollout of that many ranks."""
    if (model := read_model(str(path))) is not None:
        check_model(Job(options, rollout_ranks=ranks), model.changed(overrides or {}), roles)


def check_job(config) -> None:
    """The driver's check of a composed config."""
    check_environment(Job.of(config.jetrl), reader(config))


def job_with(**versions) -> Job:
    return Job(OPTIONS, versions={name: metadata.version(name) for name in PINS} | versions)


def test_this_environment_is_the_pinned_one():
    check_versions(job_with())


@pytest.mark.parametrize(
    ("package", "version", "works_with"),
    [
        ("verl", "0.9.0", "verl 0.9.1"),
        ("vllm", "0.23.1", "vllm 0.24.0 or 0.29.0"),
        ("torch", "2.12.0+cu130", "torch 2.11 or 2.13"),
        ("transformers", "5.11.1", "transformers 5.9 or 5.10"),
        ("vllm", "unknown", "vllm 0.24.0 or 0.29.0"),
    ],
)
def test_another_version_is_refused_with_the_pinned_one(package, version, works_with):
    assert refusal(check_versions, job_with(**{package: version})) == (
        f"{package} {version} is not supported with precision=jet_fp8: it works with {works_with} "
        f"(docs/upgrade.md says what others change). Set up {works_with}, or precision=bf16."
    )


def test_a_missing_package_is_named():
    assert (
        refusal(check_versions, job_with(verl=None))
        == "an environment without verl is not supported with precision=jet_fp8. Set up verl 0.9.1."
    )


def test_an_optimizer_whose_package_is_not_installed_is_named():
    key, job = "critic.optim.optimizer_impl", Job(OPTIONS)
    check_optimizer(job, key, "torch.optim")
    check_optimizer(job, key, None)
    assert refusal(check_optimizer, job, key, "no_such_package.optim") == (
        "critic.optim.optimizer_impl=no_such_package.optim is not supported with precision=jet_fp8: no_such_package is "
        "not installed. Install no_such_package."
    )


def test_missing_fields_have_their_default(model_folder):
    # Qwen3's default head_dim is 128, not hidden_size / heads = 64.
    check(model_folder(head_dim=None), OPTIONS, 2)


@pytest.mark.parametrize(
    ("changes", "tensor_parallel", "reason", "largest"),
    [
        ({"head_dim": 64}, 2, "layer self_attn.k_proj has shards of shape [64, 256]", 1),
        ({"intermediate_size": 512}, 8, "layer mlp.gate_proj has shards of shape [64, 256]", 4),
        # Qwen2.5-72B, whose MLP has 231 blocks.
        ({"intermediate_size": 29568}, 8, "layer mlp.gate_proj has shards of shape [3696, 256]", 1),
        # Two GPUs would do for six, where four would be more.
        ({"intermediate_size": 1024, "num_attention_heads": 12}, 6, "layer mlp.gate_proj has shards of", 2),
    ],
)
def test_the_largest_rollout_that_fits_is_named(model_folder, changes, tensor_parallel, reason, largest):
    folder = str(model_folder(**{"num_attention_heads": 8, "num_key_value_heads": 2} | changes))
    message = refusal(check, folder, OPTIONS, tensor_parallel)
    assert message.startswith(f"the model {folder} is not supported with precision=jet_fp8: {reason}")
    assert f"multiples of 128, as they are over {largest}. Set " in message
    assert "Set a smaller actor_rollout_ref.rollout.tensor_model_parallel_size, or jetrl.unfit_layers=skip" in message
    check(folder, OPTIONS, largest)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "ranks", "largest"),
    [(28, 4, 512, 8, 4), (4, 2, 512, 8, 4), (6, 4, 768, 6, 2), (28, 4, 256, 8, 2), (4, 2, 576, 8, 4)],
)
def test_a_rollout_whose_ranks_do_not_divide_the_heads_is_refused(model_folder, heads, kv_heads, inner, ranks, largest):
    """Also without quantized layers. The MLP of the last case fits at no size, which is a refusal of its own."""
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner}
    folder = str(model_folder(**fields))
    message = refusal(check, folder, OPTIONS, ranks)
    assert message == (
        f"the model {folder} is not supported with precision=jet_fp8: its {heads} heads over {kv_heads} key heads are "
        f"not divided by {ranks} ranks of the rollout, as they are by {largest}. Set a smaller "
        "actor_rollout_ref.rollout.tensor_model_parallel_size."
    )
    plain = JetConfig("bf16_shared", train="bf16", rollout="bf16", operations="shared")
    assert "ranks of the rollout" in refusal(check, folder, plain, ranks)
    if inner != 576:
        check(folder, OPTIONS, largest)


def test_skip_accepts_unfit_layers(model_folder):
    check(model_folder(intermediate_size=576), SKIP, 1)


def test_every_shape_fits_without_quantization(model_folder):
    options = JetConfig("bf16_shared", train="bf16", rollout="bf16", operations="shared")
    folder = str(model_folder(intermediate_size=576, hidden_size=192))
    check(folder, options, 2)
    fp8_ref = replace(options, ref="fp8")
    assert "multiples of 128" in refusal(check, folder, fp8_ref, 1, None, ("actor", "ref"))
    # vLLM's class computes something other than Hugging Face's, in BF16 too.
    folder = str(model_folder(model_type="qwen2"))
    assert "ignores head_dim" in refusal(check, folder, options)


def test_the_model_is_checked_as_the_trainer_changes_it(model_folder):
    folder = str(model_folder(attention_dropout=0.1))
    silent = {"attention_dropout": 0.0}
    check(folder, EXACT, overrides=silent)
    assert "do not cover the activation gelu" in refusal(check, folder, EXACT, 1, {"hidden_act": "gelu"} | silent)
    check(model_folder(hidden_act="gelu"), EXACT, overrides={"hidden_act": "silu"})


def test_an_fp8_cache_of_an_unknown_architecture_is_refused(compose, model_folder):
    overrides = ("precision=fp8_rollout", "jetrl.kv_cache=fp8")
    job = compose(*overrides, f"actor_rollout_ref.model.path={model_folder(model_type='gpt2')}")
    assert "model_type 'gpt2' is none of" in refusal(check_job, job)


MIXTURE = dict(
    model_type="qwen3_moe", architectures=None, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256
)


def test_a_mixture_of_experts_is_checked(model_folder):
    folder = str(model_folder(**MIXTURE))
    check(folder, EXACT, 1)
    check(folder, EXACT, 2)
    check(folder, JetConfig("fp8_rollout", train="bf16", rollout="fp8"), 1)
    assert refusal(check, folder, OPTIONS, 1) == (
        f"the mixture of experts {folder} is not supported with jetrl.operations=stock: the two sides would send "
        "tokens to different experts. Set jetrl.operations=shared, or precision=fp8_rollout."
    )
    backward = JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="shared", backward="bf16")
    assert refusal(check, folder, backward) == (
        f"the mixture of experts {folder} is not supported with jetrl.backward=bf16: the gradients of experts are FP8 "
        "products. Set jetrl.backward=fp8."
    )
    int8 = JetConfig("int8_rollout", train="bf16", rollout="int8")
    assert refusal(check, folder, int8).endswith(
        "and linear layers are in int8. Set precision=jet_fp8, fp8_rollout or bf16."
    )
    assert "mlp.experts.down_proj has shards of shape [256, 64]" in refusal(check, folder, EXACT, 4)


@pytest.mark.parametrize("key", REPLICAS)
def test_a_mixture_over_data_parallel_ranks_is_refused(model_folder, key):
    check_replicas(read_model(str(model_folder())), key, 2)
    folder = str(model_folder(**MIXTURE))
    check_replicas(read_model(folder), key, 1)
    assert refusal(check_replicas, read_model(folder), key, 2) == (
        f"the mixture of experts {folder} is not supported with {key}=2: vLLM deals experts over the replicas of one "
        f"server, and here they are whole on every rank. Set it to 1, which starts a server for each replica."
    )


@pytest.mark.parametrize(
    ("changes", "tensor", "needed"),
    [
        ({"vocab_size": 200_000}, "the embedding", 98),  # 2 bytes an element
        ({"intermediate_size": 600 * 1024}, "mlp.gate_proj of a layer", 150),  # 1 byte
    ],
)
def test_a_bucket_smaller_than_a_tensor_is_refused_with_the_number_that_fits(model_folder, changes, tensor, needed):
    model = read_model(str(model_folder(**changes)))
    message = refusal(check_bucket, Job(OPTIONS, bucket_megabytes=needed - 1), model)
    assert f"{tensor} of the model {model.path}, {needed} MiB, is not supported with" in message
    assert message.endswith(f"Set actor_rollout_ref.rollout.{BUCKET_KEY}={needed} or more.")
    check_bucket(Job(OPTIONS, bucket_megabytes=needed), model)


def test_a_missing_model_folder_is_refused(tmp_path):
    assert "does not exist. Set actor_rollout_ref.model.p" in refusal(check, tmp_path / "none", OPTIONS, 1)
    assert "does not exist. Set actor_rollout_ref.model.p" in refusal(check, "~/no/such/model", OPTIONS, 1)


def test_a_weight_index_with_a_missing_file_is_refused(model_folder):
    folder = model_folder()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    assert "model-2.safetensors is not a readable weight file" in refusal(check, folder, OPTIONS, 1)
    index.write_text("{}")
    assert "is not a readable weight index" in refusal(check, folder, OPTIONS, 1)


def test_a_model_folder_without_weights_is_refused(model_folder):
    folder = model_folder()
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refusal(check, folder, OPTIONS, 1)


def test_a_hub_name_is_checked_by_its_config(model_folder, monkeypatch):
    folder = model_folder(model_type="mixtral")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file, **_: str(folder / file))
    assert "the model mistralai/Mixtral-8x7B-v0.1 is not supported with precision=jet_fp8" in refusal(
        check, "mistralai/Mixtral-8x7B-v0.1", OPTIONS
    )


def test_without_a_network_a_hub_name_is_not_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    check("Qwen/Qwen3-8B", OPTIONS, 1)
    check("not/a/hub/name", OPTIONS, 1)


def media_of(key: str, files: str | list[str] | None, images: bool = False) -> str:
    """What the driver sees in files of one key."""
    columns = {f"data.{kind}_key": f"{kind}s" for kind in ("image", "video")}
    return find_media({key: files, "data.prompt_key": "prompt", **columns}.get, images=images)


def test_a_missing_data_file_is_refused(parquet, tmp_path):
    media_of("data.train_files", str(parquet))
    media_of("data.train_files", [str(parquet), "hdfs://cluster/train.parquet", "memory://train-*.parquet"])
    media_of("data.val_files", None)
    missing = tmp_path / "none.parquet"
    assert "(data.val_files) does not exist" in refusal(media_of, "data.val_files", [str(parquet), str(missing)])


TEXT = {"prompt": [{"role": "user", "content": "1+1"}], "images": [], "videos": None}


def parts(*kinds: str) -> dict:
    """Fields of a row whose message is a list of parts."""
    return {"prompt": [{"role": "user", "content": [{"type": kind, "text": "1+1"} for kind in kinds]}]}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, ""),
        ({"images": None}, ""),
        ({"images": [{"path": "a.png"}]}, "the column images"),
        ({"videos": ["a.mp4"]}, "the column videos"),
        ({"pictures": ["a.png"]}, ""),
        (parts("text", "text"), ""),
        (parts("text", "image"), "a part of type image in the column prompt"),
        (parts("text", "audio"), "a part of type audio in the column prompt"),
    ],
)
def test_images_and_others_are_seen_in_any_row(tmp_path, monkeypatch, suffix, changes, seen):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file, rows = tmp_path / f"train.{suffix}", 3 * [TEXT | parts("text") if "prompt" in changes else TEXT]
    rows = [*rows, TEXT | changes, *rows]
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = f"{seen} of {file} (data.train_files)" if seen else ""
    of_images = where if "image" in seen else ""
    assert media_of("data.train_files", str(file), images=True) == of_images
    assert media_of("data.train_files", str(file)) == ("" if of_images else where)


def test_a_pattern_that_matches_no_data_file_is_refused(parquet, tmp_path):
    """verl passes its strings to ``load_dataset``, which accepts patterns."""
    import datasets

    deeper = tmp_path / "more" / "train.parquet"
    deeper.parent.mkdir()
    for pattern in (f"{tmp_path}/*.parquet", f"{tmp_path}/**/*.parquet", f"{tmp_path}/[a-t]rain.parquet"):
        media_of("data.train_files", pattern)
        assert len(datasets.load_dataset("parquet", data_files=pattern, cache_dir=str(tmp_path / "cache"))["train"])
    for none in (f"{tmp_path}/*.parque", f"{tmp_path}/mor*", f"{tmp_path}/none/**/*.parquet"):
        sentence = f"the pattern {none} (data.val_files) matches no data file. Check the path."
        assert refusal(media_of, "data.val_files", [str(parquet), none]) == sentence
    deeper.write_bytes(b"PAR1")
    message = refusal(media_of, "data.train_files", f"{tmp_path}/**/*.parquet")
    assert f"{deeper} (data.train_files) is not a readable parquet file" in message


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 half a file", b"col\n1\n", "with 36 zeros before its footer"])
def test_a_damaged_parquet_file_is_refused(parquet, content):
    whole = parquet.read_bytes()
    parquet.write_bytes(whole[:4] + bytes(36) + whole[40:] if isinstance(content, str) else content)
    assert "is not a readable parquet file" in refusal(media_of, "data.train_files", str(parquet))


def test_check_environment_reads_the_composed_config(compose, model_folder, parquet, tmp_path):
    overrides = [
        f"actor_rollout_ref.model.path={model_folder()}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"data.train_files={parquet}",
        f"data.val_files=[{parquet}]",
    ]
    check_job(compose("precision=jet_fp8", *overrides))

    wide = compose("precision=jet_fp8", *overrides, "actor_rollout_ref.rollout.tensor_model_parallel_size=8")
    assert "8 ranks of the rollout" in refusal(check_job, wide)

    exact = ("precision=jet_fp8_exact", *overrides)
    check_job(compose(*exact))
    gelu = tmp_path / "gelu"
    shutil.copytree(model_folder(hidden_act="gelu"), gelu)
    uncovered = compose(*exact, f"actor_rollout_ref.model.path={gelu}")
    assert "do not cover the activation gelu" in refusal(check_job, uncovered)
    model_folder()
    # The critic runs stock operations.
    check_job(compose(*exact, "jetrl.critic=fp8", f"critic.model.path={gelu}"))

    critic = compose("precision=jet_fp8", *overrides, "jetrl.critic=fp8", "critic.model.path=/no/critic")
    assert "/no/critic does not exist" in refusal(check_job, critic)

    data = compose("precision=jet_fp8", *overrides, "data.val_files=/no/test.parquet")
    assert "/no/test.parquet (data.val_files) does not exist" in refusal(check_job, data)


PATH, ONE_GPU = "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"


@pytest.fixture
def hdfs(monkeypatch, tmp_path, tmp_path_factory):
    """A command ``hdfs`` for which ``hdfs://cluster/policy`` is ``tmp_path``; the file that lists its calls."""
    folder = tmp_path_factory.mktemp("hdfs")
    command, calls = folder / "hdfs", folder / "calls"
    command.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n[ "$3" = hdfs://cluster/policy ] && cp -r {tmp_path} "$4"\n')
    command.chmod(0o755)
    monkeypatch.setattr("verl.utils.hdfs_io._HDFS_BIN_PATH", str(command))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return calls


def test_a_remote_model_is_checked_in_the_copy_that_workers_find(compose, hdfs, model_folder, parquet):
    """In a driver without a GPU."""
    from verl.utils.fs import copy_to_local

    model_folder()
    data = [f"data.train_files={parquet}", f"data.val_files={parquet}"]
    words = ["precision=jet_fp8", f"{PATH}=hdfs://cluster/policy", ONE_GPU, *data]
    config = compose(*words)
    assert config.jetrl.operations == "shared" and not hdfs.exists(), "composition copies nothing"
    check_job(config)
    assert copy_to_local("hdfs://cluster/policy", use_shm=False) == str(
        copy_model("hdfs://cluster/policy", PATH).folder
    )
    assert len(hdfs.read_text().splitlines()) == 1


def test_a_remote_model_that_shared_operations_do_not_cover_is_refused(compose, hdfs, model_folder):
    model_folder(hidden_act="gelu")
    message = refusal(check_job, compose("precision=jet_fp8", f"{PATH}=hdfs://cluster/policy", ONE_GPU))
    assert message.startswith("the model hdfs://cluster/policy is not supported with jetrl.operations=shared")
    assert "Set precision=jet_fp8 jetrl.operations=stock" in message


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("hdfs://cluster/none", "verl's copy left no folder at "),
        ("s3://bucket/model", "verl's copy left no folder at s3://bucket/model"),
        ("hdfs://cluster/none/", "AssertionError: Make sure the last char in src is not /"),
        ("/models/qwen3/", "AssertionError: Make sure the last char in src is not /"),
    ],
)
def test_a_model_that_cannot_be_copied_is_refused(hdfs, path, why):
    message = refusal(copy_model, path, PATH)
    assert message.startswith(f"the model {path} cannot be copied to the driver's machine ({why}")
    assert message.endswith(f"). Set {PATH} to a path that can.")


def test_a_crashing_check_stops_the_run(monkeypatch):
    """Hydra would turn the exception into a warning and start the job unchecked."""
    from jetrl_verl.config import environment, workers
    from jetrl_verl.targets.job import JetCallback

    def fail(job, get):
        raise ZeroDivisionError("heads")

    installed = []
    monkeypatch.setattr(workers, "install", lambda *arguments: installed.append(arguments))
    monkeypatch.setattr(environment, "check_environment", fail)
    with pytest.raises(SystemExit, match=r"the checks before the job failed \(ZeroDivisionError: heads\)"):
        JetCallback().on_job_start(OmegaConf.create({"jetrl": Job(EXACT).as_dict()}))
    assert installed == [(Job(EXACT),)]
