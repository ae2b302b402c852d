# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The engine alone is the run's engine: its arguments, its prompts in their order, its sampling."""

import argparse
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from benchmarks import engine_alone, verl_step
from benchmarks.published_shapes import PUBLISHED, tiny, write_data, write_model
from jetrl_verl.rollout.arguments import WORKER
from jetrl_verl.tools.launch import RunPaths
from jetrl_verl.tools.rows import parse_row
from recipes.common.prepare import prepare
from recipes.gsm8k.prepare_data import SPLITS

SEQUENCES, STEPS = 32, 3


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """Folder with a model and as many prompts as the steps need."""
    folder = tmp_path_factory.mktemp("job")
    write_model(tiny(PUBLISHED["qwen3_4b"], ranks=2), folder / "model")
    write_data("gsm8k", folder / "raw", rows=SEQUENCES // 4 * 2)  # two epochs
    (folder / "data").mkdir()
    for name, source in SPLITS.items():
        prepare(source, folder / "data" / f"{name}.parquet", folder / "raw" / f"{name}.jsonl")
    return folder


def config_of(job: Path, row: str, tmp_path: Path, **options):
    """A row's configuration as the engine alone reads it, from the file that Hydra leaves."""
    chosen = {"model": "qwen3_4b", "response": 8, "sequences": SEQUENCES, "steps": STEPS, "memory": 0.3, "tiny": True}
    chosen |= {"set": [], "gpus": 1, "tp": 1, **options}
    paths = RunPaths(tmp_path / "run")
    row = parse_row(row, verl_step.ROWS)
    words = verl_step.words_of(row, argparse.Namespace(**chosen), job / "model", job / "data", paths)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    paths.config.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, paths.config)
    return engine_alone.load(paths.config)


@pytest.mark.parametrize(
    ("row", "quantization", "worker"),
    [
        ("bf16", None, "auto"),
        ("fp8_rollout", "jetrl_fp8", "auto"),
        ("fp8_rollout+jetrl.kv_cache=fp8", "jetrl_fp8", WORKER),
        ("jet_fp8_exact", "jetrl_fp8", WORKER),
    ],
)
def test_arguments_are_those_that_verl_gives_vllm(job, row, quantization, worker, tmp_path):
    """Settings away from vLLM's and verl's defaults reach them, too."""
    rollout = "actor_rollout_ref.rollout"
    words = ["enable_prefix_caching=False", "max_num_batched_tokens=777", "enforce_eager=False", "seed=11"]
    words = [f"{rollout}.{word}" for word in words]
    words += [f"{rollout}.cudagraph_capture_sizes=[1,8]", f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes=4096"]
    found = engine_alone.engine_arguments(config_of(job, row, tmp_path, set=words, gpus=4, tp=2))
    assert (found.quantization, found.worker_cls) == (quantization, worker)
    assert found.model == str(job / "model") and found.tensor_parallel_size == 2
    assert (found.max_model_len, found.max_num_seqs, found.max_num_batched_tokens) == (520, SEQUENCES, 777)
    assert (found.gpu_memory_utilization, found.kv_cache_memory_bytes, found.seed) == (0.3, 4096, 11)
    assert not found.enforce_eager and not found.enable_prefix_caching and found.enable_chunked_prefill
    assert found.compilation_config.cudagraph_capture_sizes == [1, 8]
    assert (found.logprobs_mode, found.load_format, found.enable_sleep_mode) == ("processed_logprobs", "dummy", False)


def test_verls_own_fp8_rollout_keeps_its_quantization(job, tmp_path, monkeypatch):
    """verl patches vLLM then, in this process and by a variable in its workers."""
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    patched = []
    monkeypatch.setattr(vllm_async_server, "apply_vllm_quant_patches", lambda: patched.append(True))
    monkeypatch.setenv("VERL_VLLM_FP8_QUANT_ENABLED", "0")
    found = engine_alone.engine_arguments(config_of(job, "verl_fp8", tmp_path))
    assert found.quantization == "fp8" and patched and os.environ["VERL_VLLM_FP8_QUANT_ENABLED"] == "1"
    assert found.hf_overrides["quantization_config"]["weight_block_size"] == [128, 128]


@pytest.mark.parametrize(("shuffle", "workers"), [(True, 0), (True, 2), (False, 2)])
def test_prompts_are_those_of_verls_steps(job, tmp_path, shuffle, workers):
    """Against verl's own loader, which with workers draws another order, and agent loop, over the end of an epoch."""
    import asyncio

    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.dataset.rl_dataset import collate_fn

    config = config_of(job, "bf16", tmp_path, set=[f"data.shuffle={shuffle}", f"data.dataloader_num_workers={workers}"])
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    dataset = create_rl_dataset(config.data.train_files, config.data, model.tokenizer, model.processor)
    loader = StatefulDataLoader(
        dataset,
        batch_size=config.data.train_batch_size,
        num_workers=config.data["dataloader_num_workers"],
        drop_last=True,
        collate_fn=collate_fn,
        sampler=create_rl_sampler(config.data, dataset),
    )

    async def expected() -> list[list[list[int]]]:
        loop = SingleTurnAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=None,
            tokenizer=model.tokenizer,
            processor=model.processor,
            dataset_cls=type(dataset),
            data_config=DictConfigWrap(config.data),
            hf_model_type=model.hf_config.model_type,
        )
        batches = [batch for _ in range(2) for batch in loader]
        return [[await loop.ct_build_initial_tokens(list(row)) for row in batch["raw_prompt"]] for batch in batches]

    found = list(engine_alone.prompts_of(config, STEPS))
    assert found == asyncio.run(expected())[:STEPS]
    assert len(found) == STEPS and all(len(batch) == SEQUENCES // 4 for batch in found)
    assert (sorted(found[0]) == sorted(found[2])) is not shuffle  # the second epoch


def test_sampling_is_the_runs(job, tmp_path):
    words = ["actor_rollout_ref.rollout.temperature=0.7", "actor_rollout_ref.rollout.top_k=20"]
    config = config_of(job, "bf16", tmp_path, set=words)
    sampling = engine_alone.sampling_of(config, [0] * 100)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.logprobs) == (0.7, 20, 1.0, 0)
    assert (sampling.max_tokens, sampling.ignore_eos) == (8, True)
    assert engine_alone.sampling_of(config, [0] * 100, 2).max_tokens == 2
    assert engine_alone.sampling_of(config, [0] * 515).max_tokens == 5


def put_in_place(tmp_path, monkeypatch, program: str) -> None:
    """Make ``program`` the engine that is started."""
    module = tmp_path / "benchmarks" / "engine_alone.py"
    module.parent.mkdir(exist_ok=True)
    module.write_text(program)
    monkeypatch.setattr(engine_alone, "python_path", lambda: str(tmp_path))
    monkeypatch.chdir(tmp_path)


def run_of(tmp_path, monkeypatch, program: str, logged: dict) -> dict:
    """What is measured of a run whose engine is ``program``."""
    paths = RunPaths(tmp_path)
    paths.metrics.write_text("".join(json.dumps({"step": step, "data": logged}) + "\n" for step in (1, 2, 3)))
    put_in_place(tmp_path, monkeypatch, program)
    return engine_alone.measured(paths, STEPS, True, float("inf"))


SAYS = """
import json
print("loading")
for step, rate in ((2, 100.0), (3, 300.0)):
    lengths = {"mean": 140.5, "max": 150, "min": 130}
    print("engine alone: " + json.dumps({"step": step, "prompt_length": lengths, "tokens_per_s": rate}), flush=True)
"""
LOGGED = {"prompt_length/mean": 140.5, "prompt_length/max": 150.0, "prompt_length/min": 130.0}


def test_the_rate_is_the_median_of_the_steps(tmp_path, monkeypatch):
    found = run_of(tmp_path, monkeypatch, SAYS, LOGGED)
    assert found["engine_tokens_per_s"] == 200.0 and [each["step"] for each in found["engine_steps"]] == [2, 3]


@pytest.mark.parametrize("name", LOGGED)
def test_an_engine_with_other_prompts_has_no_rate(tmp_path, monkeypatch, name):
    found = run_of(tmp_path, monkeypatch, SAYS, LOGGED | {name: 139.0})
    assert found["engine_status"] == 1 and "engine_tokens_per_s" not in found
    assert found["engine_errors"][0].startswith("step 2: the engine's prompts have ")


@pytest.mark.parametrize("program", ["raise MemoryError('no room')", "pass", SAYS + "raise MemoryError('no room')"])
def test_an_engine_that_fails_has_no_rate_and_says_why(tmp_path, monkeypatch, program):
    found = run_of(tmp_path, monkeypatch, program, LOGGED)
    assert found["engine_status"] == 1 and "engine_tokens_per_s" not in found
    assert "raise" not in program or found["engine_errors"] == ["MemoryError: no room"]


def test_engines_start_together_and_generate_in_turn(tmp_path):
    """One at a time generates; none while another one starts, or the other way round; a dead one holds up nobody."""
    program = "import sys; from pathlib import Path; from benchmarks.engine_alone import Turn\n"
    program += "print('comes', flush=True); turn = Turn(Path(sys.argv[1])); print('starts', flush=True)\n"
    program += "sys.stdin.readline(); turn.take(); print('generates', flush=True); sys.stdin.readline()"

    def engine() -> subprocess.Popen:
        command, pipe = [sys.executable, "-c", program, str(tmp_path / "turn.lock")], subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, cwd=Path(__file__).parents[2])

    def says_nothing(which: subprocess.Popen) -> bool:
        return not select.select([which.stdout], [], [], 0.5)[0]

    with engine() as first, engine() as second, engine() as third:
        for each in (first, second, third):
            assert each.stdout.readline() + each.stdout.readline() == b"comes\nstarts\n"
        first.stdin.write(b"\n")
        assert says_nothing(first), "two others still start"
        third.kill()
        assert says_nothing(first), "one other still starts"
        second.stdin.write(b"\n")
        (generates,), _, _ = select.select([first.stdout, second.stdout], [], [])
        one, other = (first, second) if generates is first.stdout else (second, first)
        assert one.stdout.readline() == b"generates\n" and says_nothing(other)
        with engine() as late:
            assert late.stdout.readline() == b"comes\n" and says_nothing(late), "it starts when none generates"
            late.kill()
        one.stdin.write(b"\n")
        assert other.stdout.readline() == b"generates\n"
        other.stdin.write(b"\n")


def test_an_engine_takes_its_turn_when_it_has_started_and_ends_before_it_gives_it_back(tmp_path, monkeypatch):
    seen = []

    class Watched(engine_alone.Turn):
        def __init__(self, file: Path) -> None:
            seen.append(f"waits to start: {file.name}")

        def take(self) -> None:
            seen.append("waits to generate")

    def generate(asked, sampling, use_tqdm):
        seen.append("generates")
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])]) for _ in asked]

    core = SimpleNamespace(shutdown=lambda: seen.append("ends"))
    llm = SimpleNamespace(
        generate=generate, reset_prefix_cache=lambda: None, llm_engine=SimpleNamespace(engine_core=core)
    )
    rollout = SimpleNamespace(n=2)
    monkeypatch.setattr(engine_alone, "Turn", Watched)
    monkeypatch.setattr(
        engine_alone, "load", lambda path: SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    )
    monkeypatch.setattr(engine_alone, "prompts_of", lambda config, steps: [[[1, 2]]] * steps)
    monkeypatch.setattr(engine_alone, "start", lambda config: seen.append("starts") or llm)
    monkeypatch.setattr(engine_alone, "replicas", lambda config: 1)
    monkeypatch.setattr(engine_alone, "sampling_of", lambda *_: None)
    engine_alone.measure(tmp_path / "config.yaml", 2, turn=tmp_path / "turn.lock")
    waits = ["waits to start: turn.lock", "starts", "waits to generate"]
    assert seen == [*waits, "generates", "generates", "ends"]


def test_an_engine_of_its_own_program_gets_the_lock_file(tmp_path, monkeypatch):
    says = 'import json, sys\nprint("engine alone: " + json.dumps(sys.argv[1:]))'
    put_in_place(tmp_path, monkeypatch, says)
    config, log, environment = tmp_path / "config.yaml", tmp_path / "log", dict(os.environ)
    status, found = engine_alone.timed_steps(config, log, environment, 2, float("inf"), turn=tmp_path / "turn.lock")
    assert status == 0 and found == [
        [str(tmp_path / "config.yaml"), "--steps", "2", "--turn", str(tmp_path / "turn.lock")]
    ]
