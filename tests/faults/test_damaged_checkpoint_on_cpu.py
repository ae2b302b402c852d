# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint damaged by a full disk or a lost machine is refused by name; corrupted weights are never loaded.

verl's FSDP checkpoint manager writes the checkpoints in this process."""

import contextlib
import resource
import shutil
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from patch_home import home
from tiny_models import tiny_model

from jetrl_verl.checkpoint.validation import (
    KEPT_SCALES,
    DamagedCheckpointError,
    UnwrittenCheckpointError,
    check_checkpoint,
    check_resume,
    drop_other_world_sizes,
    explained,
    resume_folder,
)
from jetrl_verl.config import environment, workers
from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig
from jetrl_verl.patches.checkpoint_tracker import TRACKER, TRACKER_FILE
from jetrl_verl.targets.job import JetCallback

FILES = ("model", "optim", "extra_state")


@pytest.fixture(scope="module")
def saved(cpu_platform, tmp_path_factory) -> Path:
    """``default_local_dir`` with checkpoints of steps 1 and 2, as one rank writes them."""
    from torch.distributed.fsdp import fully_shard
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    folder = tmp_path_factory.mktemp("checkpoints")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        model = fully_shard(tiny_model("qwen3", num_hidden_layers=1))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
        optimizer.step()
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        manager = FSDPCheckpointManager(model, optimizer, schedule)
        for step in (1, 2):
            manager.save_checkpoint(str(folder / f"global_step_{step}" / "actor"), global_step=step)
            torch.save({"position": step}, folder / f"global_step_{step}" / "data.pt")
            torch.save({"scales": torch.ones(9, 1)}, folder / f"global_step_{step}" / "actor" / KEPT_SCALES)
    finally:
        torch.distributed.destroy_process_group()
    (folder / "store").unlink(missing_ok=True)
    (folder / TRACKER_FILE).write_text("2")
    return folder


@pytest.fixture
def checkpoints(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def file_of(checkpoints: Path, name: str, step: int = 2) -> Path:
    folder = checkpoints / f"global_step_{step}"
    others = {"data": folder / "data.pt", "int8_scales": folder / "actor" / KEPT_SCALES}
    return others.get(name, folder / "actor" / f"{name}_world_size_1_rank_0.pt")


def check(checkpoints: Path, step: int = 2) -> None:
    check_checkpoint(checkpoints / f"global_step_{step}" / "actor", rank=0, world_size=1)


def test_a_complete_checkpoint_passes(checkpoints):
    check(checkpoints)
    check_checkpoint("hdfs://somewhere/global_step_2/actor", rank=0, world_size=1)


@pytest.mark.parametrize("name", [*FILES, "data", "int8_scales"])
@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused_with_the_previous_checkpoint_as_remedy(checkpoints, name, part):
    file = file_of(checkpoints, name)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(DamagedCheckpointError) as refusal:
        check(checkpoints)
    assert str(file) in str(refusal.value)
    assert f"trainer.resume_from_path={checkpoints / 'global_step_1'}" in str(refusal.value)
    check(checkpoints, step=1)


def test_corrupted_bytes_that_torch_loads_are_refused(checkpoints):
    """One page of the weights reads back as zeros, as after a crash before it reached the disk."""
    file = file_of(checkpoints, "model")
    intact = torch.load(file, weights_only=False)
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    page = largest.header_offset + largest.file_size // 2
    content = bytearray(file.read_bytes())
    content[page : page + 4096] = bytes(4096)
    file.write_bytes(content)
    loaded = torch.load(file, weights_only=False)
    assert any(not torch.equal(loaded[name].to_local(), intact[name].to_local()) for name in intact), (
        "torch verifies checksums itself now; this patch can go"
    )
    with pytest.raises(DamagedCheckpointError, match="model_world_size_1_rank_0.pt is damaged .the checksum of"):
        check(checkpoints)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(checkpoints, name):
    shutil.copy(file_of(checkpoints, name), file_of(checkpoints, name).with_name(f"{name}_world_size_1_rank_7.pt"))
    file_of(checkpoints, name).unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{name}_world_size_1_rank_0.pt is missing"):
        check(checkpoints)


def test_contents_that_were_never_saved_are_not_required(checkpoints):
    file_of(checkpoints, "optim").unlink()
    check(checkpoints)


def test_another_number_of_ranks_is_refused(checkpoints):
    step = checkpoints / "global_step_2"
    with pytest.raises(DamagedCheckpointError, match=f"by 1 rank and this run has 2.*jetrl reshard {step} --gpus 2"):
        check_checkpoint(step / "actor", rank=0, world_size=2)


def resuming(checkpoints: Path, **trainer) -> DictConfig:
    """The configuration of a run on two hosts with one GPU each."""
    stock = {"resume_mode": "auto", "default_local_dir": str(checkpoints), "resume_from_path": None}
    return OmegaConf.create({"trainer": stock | {"n_gpus_per_node": 1, "nnodes": 2} | trainer})


def test_the_driver_refuses_another_number_of_ranks_before_anything_starts(checkpoints):
    """A trainer refuses it too, but only after it has loaded its model."""
    sentence = f"{checkpoints / 'global_step_2' / 'actor'} was written by 1 rank and this run has 2"
    with pytest.raises(DamagedCheckpointError, match=sentence):
        check_resume(resuming(checkpoints))
    step_1 = str(checkpoints / "global_step_1")
    with pytest.raises(DamagedCheckpointError, match="global_step_1/actor was written by 1 rank and this run has 4"):
        check_resume(resuming(checkpoints, resume_mode="resume_path", resume_from_path=step_1, nnodes=4))
    check_resume(resuming(checkpoints, nnodes=1))
    check_resume(resuming(checkpoints, resume_mode="resume_path", resume_from_path=step_1, nnodes=1))
    for content in FILES:
        shutil.copy(
            file_of(checkpoints, content), file_of(checkpoints, content).with_name(f"{content}_world_size_2_rank_0.pt")
        )
    check_resume(resuming(checkpoints))  # rewritten for two


def test_the_driver_accepts_checkpoints_it_cannot_see(checkpoints, tmp_path):
    for elsewhere in (tmp_path / "nothing_yet", "hdfs://cluster/run"):
        check_resume(resuming(elsewhere))
        check_resume(resuming(elsewhere, resume_mode="resume_path", resume_from_path=f"{elsewhere}/global_step_3"))
    check_resume(resuming(checkpoints, resume_mode="disable"))
    assert resume_folder(resuming(checkpoints)) == checkpoints / "global_step_2"
    shutil.rmtree(checkpoints / "global_step_2" / "actor")  # on the trainer's hosts
    check_resume(resuming(checkpoints))
    check_resume(OmegaConf.create({"data": {}}))


def test_the_driver_refuses_a_damaged_tracker(checkpoints):
    (checkpoints / TRACKER_FILE).write_text("")
    with pytest.raises(DamagedCheckpointError, match="as after a full disk"):
        check_resume(resuming(checkpoints, nnodes=1))
    check_resume(resuming(checkpoints, resume_mode="disable"))


@pytest.mark.parametrize(
    ("gone", "load_contents", "sentence"),
    [
        (FILES, ["hf_model"], "holds no trainer state .* start from the model folder .*/actor/huggingface, or set"),
        (FILES, None, "holds no trainer state"),
        (("optim",), None, r"not hold optimizer, .* Set actor_rollout_ref.*load_contents=\[model,extra\]"),
        (("optim", "extra_state"), ["model", "extra"], r"not hold extra, .* Set .*load_contents=\[model\]"),
        ((), ["hf_model"], r"without its weights .* Set .*load_contents=\[model,optimizer,extra\]"),
        (("optim",), ["model", "extra"], None),
        (("data",), None, None),
    ],
)
def test_the_driver_refuses_a_step_without_what_a_resume_loads(checkpoints, gone, load_contents, sentence, capsys):
    for content in gone:
        file_of(checkpoints, content).unlink()
    (checkpoints / "global_step_2" / "actor" / "huggingface" / "model.safetensors").touch()
    node = {"actor": {"checkpoint": {"load_contents": load_contents}}}
    config = OmegaConf.merge(resuming(checkpoints, nnodes=1), {"actor_rollout_ref": node})
    with contextlib.nullcontext() if sentence is None else pytest.raises(DamagedCheckpointError, match=sentence):
        check_resume(config)
    assert ("has no data.pt" in capsys.readouterr().err) == ("data" in gone)


def test_a_refused_resume_exits_with_one_sentence(checkpoints, monkeypatch):
    """Hydra would turn the exception into a warning and start the job."""
    monkeypatch.setattr(workers, "install", lambda *_: None)
    monkeypatch.setattr(environment, "check_environment", lambda *_: None)
    node = Job(JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="shared")).as_dict()
    config = OmegaConf.merge(resuming(checkpoints), {"jetrl": node})
    with pytest.raises(SystemExit, match="^jetrl_verl: the checkpoint .* was written by 1 rank and this run has 2\\. "):
        JetCallback().on_job_start(config)
    folded = checkpoints / "global_step_2" / "actor" / "huggingface" / "config.json"
    folded.write_text('{"jetrl_invariant_scaling": 1.5}')
    config = OmegaConf.merge(resuming(checkpoints, nnodes=1), {"jetrl": node})
    with pytest.raises(SystemExit, match=r"trained with jetrl.invariant_scaling=1\.5, is not .* Set .*scaling=1\.5\.$"):
        JetCallback().on_job_start(config)


def test_a_save_removes_shards_of_another_number_of_ranks(checkpoints):
    """A run that reaches this step again on other GPUs; a resume could otherwise load the older policy."""
    actor = checkpoints / "global_step_2" / "actor"
    written = {file.name for file in actor.iterdir()}
    for content in ("model", "optim", "extra_state"):
        for rank in range(10):
            shutil.copy(file_of(checkpoints, content), actor / f"{content}_world_size_10_rank_{rank}.pt")
    drop_other_world_sizes(actor, 1)
    assert {file.name for file in actor.iterdir()} == written
    drop_other_world_sizes("hdfs://elsewhere", 1)


def test_without_an_earlier_checkpoint_the_remedy_is_a_fresh_start(checkpoints):
    shutil.rmtree(checkpoints / "global_step_1")
    file_of(checkpoints, "model").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="no earlier checkpoint; start again with trainer.resume"):
        check(checkpoints)


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Writes beyond ``size`` bytes of a file fail, as on a full disk."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("room", ["for the weights", "for nothing"])
def test_a_full_disk_leaves_the_previous_checkpoint_in_use(trainer, checkpoints, room):
    """verl's trainer saves step 3: the error is raised, the tracker stays at 2, and step 3 is refused."""
    contents = {name: torch.load(file_of(checkpoints, name), weights_only=False) for name in FILES}

    def save(folder: str, remote: None, step: int, max_ckpt_to_keep: None) -> None:
        Path(folder).mkdir(parents=True)
        for name in FILES:
            torch.save(contents[name], file_of(checkpoints, name, step))

    instance = object.__new__(type("Trainer", (trainer.PPOTrainer,), {"on_step_end": None, "on_sample_end": None}))
    instance.config = OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(checkpoints), "default_hdfs_dir": None},
            "actor_rollout_ref": {"actor": {}},
        }
    )
    instance.global_steps, instance.use_critic, instance.trainer_mode = 3, False, "sync"
    instance.actor_rollout_wg = SimpleNamespace(save_checkpoint=save)
    instance.train_dataloader = SimpleNamespace(state_dict=dict)
    size = file_of(checkpoints, "model").stat().st_size
    most = size + 1000 if room == "for the weights" else 1000
    with files_of_at_most(most), pytest.raises((OSError, RuntimeError)):
        instance._save_checkpoint()
    assert trainer.find_latest_ckpt_path(str(checkpoints)) == str(checkpoints / "global_step_2")
    check(checkpoints)
    with pytest.raises(DamagedCheckpointError):
        check(checkpoints, step=3)


def test_a_failed_write_names_the_folder_and_the_free_space(checkpoints):
    """torch.save's error on a full disk says ``unexpected pos``; the raised one names the remedy."""
    folder = checkpoints / "global_step_3" / "actor"
    weights = torch.load(file_of(checkpoints, "model"), weights_only=False)
    failure = pytest.raises(UnwrittenCheckpointError, match="MiB left. Make room")
    with files_of_at_most(1000), failure as caught, explained(folder):
        folder.mkdir(parents=True)
        torch.save(weights, folder / "model.pt")
    assert str(folder) in str(caught.value) and isinstance(caught.value.__cause__, (OSError, RuntimeError))


DISK_ERRORS = [
    OSError(28, "No space left on device"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
    RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed"),
    RuntimeError("[enforce fail at inline_container.cc:747] . open file failed with strerror: Is a directory"),
]
OTHER_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"),
    RuntimeError("The size of tensor a (4) must match the size of tensor b (3) at non-singleton dimension 0"),
]


@pytest.mark.parametrize("error", [*DISK_ERRORS, *OTHER_ERRORS], ids=str)
def test_disk_errors_alone_are_explained(tmp_path, error):
    with pytest.raises(Exception) as caught, explained(tmp_path / "actor"):
        raise error
    if error in OTHER_ERRORS:
        assert caught.value is error
        return
    assert isinstance(caught.value, UnwrittenCheckpointError) and caught.value.__cause__ is error
    assert "MiB left. Make room" in str(caught.value) and str(error) in str(caught.value)


@pytest.fixture
def trainer(cpu_platform, monkeypatch):
    from verl.trainer.ppo.v1 import trainer_base

    monkeypatch.setattr(trainer_base, "find_latest_ckpt_path", trainer_base.find_latest_ckpt_path)
    TRACKER.apply()
    once = trainer_base.find_latest_ckpt_path
    TRACKER.apply()
    assert trainer_base.find_latest_ckpt_path is once
    return trainer_base


def test_the_latest_checkpoint_is_found_as_in_stock_verl(trainer, checkpoints, tmp_path):
    assert trainer.find_latest_ckpt_path(str(checkpoints)) == str(checkpoints / "global_step_2")
    assert trainer.find_latest_ckpt_path(str(tmp_path)) is None, "no tracker: a first start"


@pytest.mark.parametrize("text", ["", "2\x00\x00", "two"])
def test_a_tracker_without_a_step_is_refused(trainer, checkpoints, text):
    (checkpoints / TRACKER_FILE).write_text(text)
    remedy = "and not a step.*newest complete checkpoint into it, of 1, 2 in"
    with pytest.raises(home(TRACKER).DamagedCheckpointError, match=remedy):
        trainer.find_latest_ckpt_path(str(checkpoints))


def test_a_tracker_with_a_missing_checkpoint_is_refused(trainer, checkpoints):
    shutil.rmtree(checkpoints / "global_step_2")
    with pytest.raises(home(TRACKER).DamagedCheckpointError, match="says step 2, whose checkpoint is gone"):
        trainer.find_latest_ckpt_path(str(checkpoints))
