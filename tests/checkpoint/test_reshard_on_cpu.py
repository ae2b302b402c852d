# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint rewritten for M ranks equals the one that M ranks would have written.

Most tests build DTensors on meshes without processes; the last one runs verl's checkpoint manager on real ranks.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from two_processes import joined, run_in_processes
from typer.testing import CliRunner

from jetrl_verl.checkpoint import reshard as module
from jetrl_verl.checkpoint.reshard import random_states, reshard, rows_of, rows_of_rank
from jetrl_verl.checkpoint.validation import check_checkpoint
from jetrl_verl.cli import app
from jetrl_verl.inputs import UserError

CONTENTS = ("model", "optim", "extra_state")
SHAPES = {"embed": (67, 16), "norm": (5,), "spare": (3, 2, 2), "one": (1, 7)}


def mesh_of(ranks: int, rank: int, replicas: int = 1, device: str = "cpu") -> DeviceMesh:
    """The mesh of verl's ``create_device_mesh``, without processes."""
    order, names = torch.arange(ranks), ("fsdp",)
    if replicas > 1:
        order, names = order.view(replicas, -1), ("ddp", "fsdp")
    return DeviceMesh(device, order, mesh_dim_names=names, _init_backend=False, _rank=rank)


def chunk(whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    pieces = torch.chunk(whole, ranks)
    return pieces[rank] if rank < len(pieces) else whole[:0]


def sharded(whole: torch.Tensor, mesh: DeviceMesh, rank: int, dim: int = 0) -> DTensor:
    placements = (*[Replicate()] * (mesh.ndim - 1), Shard(dim))
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    local = chunk(whole, mesh.shape[-1], rank % mesh.shape[-1]).clone()
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def wholes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def files(ranks: int, rank: int, replicas: int = 1, device: str = "cpu") -> dict[str, object]:
    """The states that verl writes on one rank for a model of ``SHAPES`` and a buffer, after a step of AdamW."""
    mesh = mesh_of(ranks, rank, replicas, device)
    model = torch.nn.Linear(1, 1).state_dict()  # for its class and its attribute _metadata
    model.clear()
    model.update({name: sharded(whole, mesh, rank) for name, whole in wholes().items()})
    model["table"] = torch.arange(6.0)
    moments = {
        i: {"step": torch.tensor(7.0), "exp_avg": sharded(-w, mesh, rank), "exp_avg_sq": sharded(w**2, mesh, rank)}
        for i, w in enumerate(wholes().values())
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "params": list(moments)}
    rng = {"cpu": torch.Generator().manual_seed(rank).get_state(), "numpy": rank, "random": rank}
    return {
        "model": model,
        "optim": {"state": moments, "param_groups": [group]},
        "extra_state": {"lr_scheduler": {"last_epoch": 7}, "rng": rng},
    }


def save(step: Path, ranks: int, replicas: int = 1, role: str = "actor", device: str = "cpu") -> Path:
    """``step`` with one role's checkpoint of ``ranks`` ranks."""
    folder = step / role
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text("{}")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    for rank in range(ranks):
        for content, state in files(ranks, rank, replicas, device).items():
            torch.save(state, folder / f"{content}_world_size_{ranks}_rank_{rank}.pt")
    torch.save({"position": 3}, step / "data.pt")
    return step


@pytest.fixture
def step(tmp_path) -> Path:
    """A checkpoint of two ranks."""
    return save(tmp_path / "run" / "global_step_3", 2)


def load(folder: Path, content: str, ranks: int, rank: int):
    return torch.load(folder / f"{content}_world_size_{ranks}_rank_{rank}.pt", weights_only=False)


def same(actual: object, expected: object) -> None:
    """Assert equal values, types, placements, meshes and coordinates, recursively."""
    assert type(actual) is type(expected)
    if isinstance(expected, DTensor):
        assert actual.device_mesh == expected.device_mesh and actual.placements == expected.placements
        assert actual.device_mesh.get_coordinate() == expected.device_mesh.get_coordinate()
        assert actual._spec.tensor_meta == expected._spec.tensor_meta
        assert actual.requires_grad == expected.requires_grad
        same(actual._local_tensor, expected._local_tensor)
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected) and actual.stride() == expected.stride()
    elif isinstance(expected, dict):
        assert list(actual) == list(expected) and vars_of(actual) == vars_of(expected)
        for key, value in expected.items():
            same(actual[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for value, other in zip(actual, expected):
            same(value, other)
    else:
        assert actual == expected


def meshes(state: object) -> list[DeviceMesh]:
    if isinstance(state, DTensor):
        return [state.device_mesh]
    return [mesh for value in state.values() for mesh in meshes(value)] if isinstance(state, dict) else []


def vars_of(mapping: dict) -> dict:
    return getattr(mapping, "__dict__", {})


def digests(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.parametrize(
    ("before", "after", "replicas", "device"),
    [(2, 3, 1, "cpu"), (3, 1, 1, "cpu"), (1, 4, 1, "cpu"), (5, 8, 1, "cuda"), (8, 2, 1, "cpu"), (6, 4, 2, "cpu")],
    ids=["uneven", "to-one", "from-one", "empty-shards", "from-empty-shards", "hsdp"],
)
def test_files_equal_those_that_the_new_number_of_ranks_writes(before, after, replicas, device, tmp_path):
    step = save(tmp_path / "global_step_3", before, replicas, device=device)
    (written,) = reshard(step, after)
    assert (written.before, written.after, written.replicas, written.files) == (before, after, replicas, 3 * after)
    for rank in range(after):
        expected = files(after, rank, device=device)
        for content in ("model", "optim"):
            state = load(step / "actor", content, after, rank)
            same(state, expected[content])
            assert len({id(mesh) for mesh in meshes(state)}) == 1
        assert load(step / "actor", "extra_state", after, rank)["lr_scheduler"] == {"last_epoch": 7}
        check_checkpoint(step / "actor", rank, after)


def test_in_place_resharding_rewrites_all_roles_and_keeps_old_files(step):
    save(step, 4, role="critic")
    before = digests(step)
    written = reshard(step / "actor", 3)  # the whole step: a run with a critic resumes both
    assert [role.folder.name for role in written] == ["actor", "critic"]
    after = digests(step)
    assert {name: after[name] for name in before} == before
    names = {f"{role}/{c}_world_size_3_rank_{r}.pt" for role in ("actor", "critic") for c in CONTENTS for r in range(3)}
    assert set(after) - set(before) == names and not any(step.rglob(".*"))
    for rank in range(2):
        check_checkpoint(step / "actor", rank, 2)


def test_out_holds_everything_that_a_resume_needs(step, tmp_path):
    (step / "actor" / "jetrl_calibrated_clip.json").write_text("{}")
    before = digests(step.parent)
    (written,) = reshard(step, 3, tmp_path / "new" / "run")
    assert written.folder == tmp_path / "new" / "run" / "global_step_3" / "actor"
    assert digests(step.parent) == before
    written_files = digests(tmp_path / "new")
    assert written_files["run/global_step_3/data.pt"] == before["global_step_3/data.pt"]
    assert {name.removeprefix("run/") for name in written_files} == {
        "latest_checkpointed_iteration.txt",
        "global_step_3/data.pt",
        "global_step_3/actor/huggingface/config.json",
        "global_step_3/actor/fsdp_config.json",
        "global_step_3/actor/jetrl_calibrated_clip.json",
        *(f"global_step_3/actor/{content}_world_size_3_rank_{rank}.pt" for content in CONTENTS for rank in range(3)),
    }
    assert (tmp_path / "new" / "run" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert json.loads((written.folder / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": 3}
    check_checkpoint(written.folder, 0, 3)


def test_the_latest_step_of_a_run_is_taken(step):
    save(step.with_name("global_step_6"), 2)
    (step.parent / "latest_checkpointed_iteration.txt").write_text("6\n")
    (written,) = reshard(step.parent, 1)
    assert written.folder == step.with_name("global_step_6") / "actor"


def test_contents_that_were_not_saved_are_not_written(step):
    for file in (step / "actor").glob("optim_*"):
        file.unlink()
    (written,) = reshard(step, 3)
    assert written.files == 6 and not list((step / "actor").glob("optim_*"))


def test_old_files_are_mapped_and_new_files_hold_only_their_rows(tmp_path, monkeypatch):
    loaded = []
    stock = torch.load

    def spy(*arguments, **options):
        state = stock(*arguments, **options)
        loaded.extend(value._local_tensor for value in state.values() if isinstance(value, DTensor))
        return state

    monkeypatch.setattr(torch, "load", spy)
    monkeypatch.setitem(SHAPES, "embed", (6700, 64))
    step = save(tmp_path / "global_step_3", 2)
    (written,) = reshard(step, 4)
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "_world_size_2_" in line
    ]
    assert loaded and all(any(a <= tensor.data_ptr() < b for a, b in ranges) for tensor in loaded if len(tensor))
    assert written.bytes < 1.2 * 3 * 6700 * 64 * 4, "a view would save its whole storage"


def test_random_states_are_kept_or_derived():
    old = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        old.append({"cpu": torch.get_rng_state(), "numpy": None, "random": None, "cuda": torch.zeros(16).byte()})
    states = [random_states(old, rank) for rank in range(6)]
    assert states[0] == old[0] and states[1] == old[1]
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager as Manager

    kept, draws = Manager.get_rng_state(), []
    for rank in range(2, 6):
        Manager.load_rng_state(states[rank])
        again = random_states(old, rank)
        assert torch.equal(again["cpu"], states[rank]["cpu"]) and again["random"] == states[rank]["random"]
        assert states[rank]["cuda"].dtype == torch.uint8 and states[rank]["cuda"].numel() == 16
        draws.append((torch.rand(1).item(), module.np.random.rand(), module.random.random()))
    Manager.load_rng_state(kept)
    assert all(len(set(values)) == 4 for values in zip(*draws))
    strange = [{**state, "cuda": torch.zeros(3).byte()} for state in old]
    assert "cuda" not in random_states(strange, 2)


@pytest.mark.parametrize("after", [1, 4, 5])
def test_8_bit_moments_keep_their_qdata_or_become_fp32(after):
    from torchao.optim.subclass_8bit import OptimState8bit

    shards = [OptimState8bit.zeros((32, 384), block_size=256) for _ in range(2)]
    for shard in shards:
        shard.codes.random_(0, 256)
        shard.scale.uniform_(0.1, 1.0)
    whole = torch.cat([shard.dequantize() for shard in shards])
    like = torch.empty(64, 384, device="meta")
    for rank in range(after):
        begin, end = rows_of_rank(64, after, rank)
        rows = rows_of(shards, begin, end, like)
        assert isinstance(rows, OptimState8bit) == (begin % 2 == end % 2 == 0), "two rows of 384 are three blocks"
        if isinstance(rows, OptimState8bit):
            assert rows.block_size == 256 and rows.signed == shards[0].signed
            assert torch.equal(rows.codes, torch.cat([shard.codes for shard in shards])[begin:end])
            rows = rows.dequantize()
        assert rows.dtype == torch.float32 and torch.equal(rows, whole[begin:end])
    mixed = rows_of([shards[0], whole[32:]], 30, 34, like)
    assert torch.equal(mixed, whole[30:34])


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["reshard", *words])
    assert result.exit_code == 1 and result.stdout == ""
    return result.stderr.strip()


def damage(step: Path, what: str) -> None:
    folder = step / "actor"
    if what == "fsdp1":
        (folder / "fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 2}')
    elif what == "missing rank":
        for content in CONTENTS:
            (folder / f"{content}_world_size_2_rank_1.pt").unlink()
    elif what in ("no model", "no state"):
        for file in folder.glob("model_*" if what == "no model" else "*.pt"):
            file.unlink()
    elif what == "truncated":
        file = folder / "optim_world_size_2_rank_1.pt"
        file.write_bytes(file.read_bytes()[:-100])
    elif what == "other rows":
        shutil.copy(folder / "model_world_size_2_rank_0.pt", folder / "model_world_size_2_rank_1.pt")
    else:
        state = load(folder, "optim", 2, 1)
        if what == "other step":
            state["state"][0]["step"] += 1
        elif what == "other keys":
            del state["state"][3]
        elif what == "other dimension":
            for other in range(2):
                first = load(folder, "optim", 2, other)
                first["state"][0]["exp_avg"] = sharded(torch.zeros(67, 16), mesh_of(2, other), other, dim=1)
                torch.save(first, folder / f"optim_world_size_2_rank_{other}.pt")
            return
        elif what == "plain":
            state["state"][0]["exp_avg"] = torch.zeros(67, 16)
        torch.save(state, folder / "optim_world_size_2_rank_1.pt")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (
            "fsdp1",
            "written under FSDP1, whose optimizer states cannot be sharded again; resume with 2 GPUs, or merge it",
        ),
        ("missing rank", "_world_size_2_rank_1.pt is missing; there is no earlier checkpoint"),
        ("no model", "lacks model_world_size_2_rank_*.pt, which fsdp_config.json names"),
        ("no state", "holds no trainer state"),
        ("truncated", "optim_world_size_2_rank_1.pt is damaged ("),
        ("other rows", "the shards of model['embed'] do not add up to its 67 rows"),
        ("other step", "hold different values at optim['state'][0]['step']; it is inconsistent."),
        ("other keys", "hold different keys at optim['state']; it is inconsistent."),
        ("other dimension", "optim['state'][0]['exp_avg'] is placed as (Shard(dim=1),); only FSDP2's sharding"),
        ("plain", "hold different types at optim['state'][0]['exp_avg']; it is inconsistent."),
    ],
)
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out"])
def test_a_refused_checkpoint_gives_one_sentence_and_writes_nothing(what, sentence, in_place, step, tmp_path):
    damage(step, what)
    before = digests(tmp_path)
    message = refused(str(step), "--gpus", "3", *([] if in_place else ["--out", str(tmp_path / "out")]))
    assert message.startswith("error: ") and sentence in message and "\n" not in message
    assert digests(tmp_path) == before and not any(tmp_path.rglob(".*"))


def test_invalid_arguments_give_one_sentence(step, tmp_path):
    assert f"{step / 'actor'} was written by 2 ranks already; resume it as it is." in refused(str(step), "--gpus", "2")
    (tmp_path / "global_step_9").mkdir()
    assert "holds no checkpoint of verl's FSDP engines" in refused(str(tmp_path / "global_step_9"), "--gpus", "3")
    reshard(step, 3)
    assert "holds files of 3 ranks already; resume with 3 GPUs, or remove" in refused(str(step), "--gpus", "3")


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out"])
def test_a_failed_write_leaves_no_files(in_place, step, tmp_path, monkeypatch):
    stock, before = torch.save, digests(tmp_path)

    def full(state, file):
        if "optim_world_size_3_rank_1" in str(file):
            raise OSError(28, "No space left on device")
        stock(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="could not be written .*No space left on device"):
        reshard(step, 3, None if in_place else tmp_path / "out")
    assert digests(tmp_path) == before and not any(tmp_path.rglob(".*"))


def test_a_full_disk_is_reported_before_writing(step, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(UserError, match="the new files need .* kB and the disk of .* has 1 bytes? left; make room"):
        reshard(step, 3)


def test_the_command_prints_what_it_wrote_and_how_to_resume(tmp_path):
    step = save(tmp_path / "global_step_3", 4, replicas=2)
    result = CliRunner().invoke(app, ["reshard", str(step), "--gpus", "3"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{step / 'actor'}: 4 ranks -> 3, 9 files, ")
    assert lines[1] == (
        "resume with trainer.n_gpus_per_node times trainer.nnodes = 3, fsdp_config.fsdp_size=-1 "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={step}"
    )


# --- verl's manager on real ranks ------------------------------------------------------------------------------------


def trainee(world: int, seed: int):
    """(verl's checkpoint manager, model, optimizer, schedule) under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    model = tiny_model("qwen3", seed, vocab_size=67, num_hidden_layers=1)
    model.spare = torch.nn.Parameter(torch.randn(4, 3))  # empty on the last of three ranks
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=["fsdp"])
    fully_shard(model.model.layers[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return FSDPCheckpointManager(model, optimizer, schedule), model, optimizer, schedule


def train(model, optimizer, schedule, seed: int) -> None:
    """A step on the same tokens on all ranks."""
    tokens = torch.randint(0, 67, (2, 12), generator=torch.Generator().manual_seed(seed))
    logits = model(tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss = loss + model.spare.square().sum()
    loss.backward()
    update(optimizer, schedule)


def update(optimizer, schedule) -> None:
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def give_gradients(model) -> None:
    """The same gradients in every bit, independent of the sharding."""
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        whole, mesh = torch.randn(parameter.shape, generator=generator), parameter.device_mesh
        parameter.grad = sharded(whole, mesh, mesh.get_local_rank())


def whole_state(model, optimizer, schedule) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        assert len(state) == 3
        for name, tensor in state.items():
            tensors[f"{name}.{index}"] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    tensors["lr"] = torch.tensor(schedule.get_last_lr())
    tensors["epoch"] = torch.tensor(schedule.last_epoch)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def saves(rank: int, run: str) -> None:
    manager, *trained = trainee(2, 0)
    torch.manual_seed(40 + rank)
    train(*trained, seed=1)
    train(*trained, seed=2)
    manager.save_checkpoint(f"{run}/global_step_2/actor", global_step=2)
    seen = {"drawn": torch.rand(4), "saved": whole_state(*trained)}
    give_gradients(trained[0])
    update(*trained[1:])
    seen["given"] = whole_state(*trained)
    train(*trained, seed=3)
    seen["trained"] = whole_state(*trained)
    torch.save(seen, f"{run}/seen{rank}.pt")


def resumes(rank: int, run: str, world: int) -> None:
    manager, *trained = trainee(world, 1)
    seen = torch.load(f"{run}/seen{min(rank, 1)}.pt")
    folder = f"{run}/global_step_2/actor"
    check_checkpoint(folder, rank, world)
    manager.load_checkpoint(folder)
    assert torch.equal(torch.rand(4), seen["drawn"]) == (rank < 2)

    def same_as(expected: dict[str, torch.Tensor], rounded: bool) -> None:
        actual = whole_state(*trained)
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            if rounded:  # the model's update is 1e-3 / 4
                torch.testing.assert_close(
                    actual[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
            else:
                assert torch.equal(actual[name], tensor), name

    same_as(seen["saved"], rounded=False)
    give_gradients(trained[0])
    update(*trained[1:])
    same_as(seen["given"], rounded=False)
    train(*trained, seed=3)
    same_as(seen["trained"], rounded=True)


def saves_and_resumes(rank: int, run: str) -> None:
    """Two of three processes train and save; then all three resume, then one alone."""
    if rank < 2:
        with joined(rank, 2, f"{run}/two"):
            saves(rank, run)
    if rank == 0:
        for world in (1, 3):
            reshard(f"{run}/global_step_2", world)
    with joined(rank, 3, f"{run}/three"):
        resumes(rank, run, 3)
    if rank == 0:
        with joined(0, 1, f"{run}/one"):
            resumes(0, run, 1)


def test_verl_saves_on_two_ranks_and_resumes_on_three_and_on_one(tmp_path, cpu_platform):
    run_in_processes(3, saves_and_resumes, str(tmp_path))
