# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's driver, with a fake trainer: progress, report, failures, and that nothing it started is left."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from jetrl_verl.cli import app
from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.tools import launch
from jetrl_verl.tools.demo import DemoError, cache, run
from jetrl_verl.tools.demo.policy import build_model, build_tokenizer, save_policy
from jetrl_verl.tools.demo.run import DemoOptions, accuracy_lines, run_demo
from jetrl_verl.tools.launch import RunPaths, build_environment
from jetrl_verl.tools.process_tree import ProcessTree
from jetrl_verl.tools.report import Run

FAKE = (sys.executable, str(Path(__file__).with_name("fake_trainer.py")))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A cache that always hits, since the fake trainer reads none of it, and little patience with deaf daemons."""
    monkeypatch.setattr(launch, "ProcessTree", partial(ProcessTree, grace=1.0))
    entry = cache.Prepared(tmp_path / "entry", {"parameters": 1234})
    monkeypatch.setattr(cache, "find", lambda recipe, folder: entry)
    return entry


def run_fake(behaviour: str, out: Path, steps: int = 3) -> tuple[int, str, Path]:
    """Exit status, console output and run folder of the driver with the fake trainer."""
    screen = io.StringIO()
    options = DemoOptions("jet_fp8", steps, out, out / "cache", device="cpu")
    status = run_demo(options, Console(file=screen, width=200), trainer=(*FAKE, behaviour))
    (folder,) = out.glob("jet_fp8-*")
    return status, screen.getvalue(), folder


def assert_nothing_is_left(folder: Path) -> None:
    daemon = int((folder / "daemon.pid").read_text())
    assert not psutil.pid_exists(daemon) or psutil.Process(daemon).status() == psutil.STATUS_ZOMBIE
    assert not Path("/dev/shm", (folder / "segment").read_text()).exists()
    alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    mine = [p for p in alive if "fake_trainer" in " ".join(p.cmdline())]
    assert mine == []


def test_success_shows_progress_and_ends_with_a_report(prepared, tmp_path):
    temporary_before = set(Path("/tmp").glob("jetrl-*"))
    status, screen, folder = run_fake("succeed", tmp_path)
    assert status == 0
    lines = screen.splitlines()
    assert f"log: {folder / 'run.log'}" in lines[1]
    phases = ("starting Ray", "starting verl's trainer", "loading the actor", "starting vLLM", "measuring held-out")
    positions = [next(i for i, line in enumerate(lines) if phase in line) for phase in phases]
    assert positions == sorted(positions)
    step_lines = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in step_lines] == ["0/3", "1/3", "2/3", "3/3"]
    for text in ("reward 0.500", "k3_kl 1.0e-04", "seconds 3.5"):
        assert text in step_lines[1]
    assert "held-out accuracy: 40.0% before, 70.0% after 3 steps" in screen
    assert lines[-1] == f"report: {folder / 'report.html'}"
    assert (folder / "report.html").is_file() and (folder / "report.png").is_file()
    assert_nothing_is_left(folder)
    assert set(Path("/tmp").glob("jetrl-*")) == temporary_before


def test_the_last_lines_name_every_validation_set_and_say_before_of_step_0_alone():
    gsm8k, math = "val-core/openai/gsm8k/acc/mean@1", "val-core/MATH-500/acc/mean@1"
    both = Run("", [(5, {gsm8k: 0.9, math: 0.4}), (10, {gsm8k: 0.2, math: 0.41})])
    assert list(accuracy_lines(both)) == [
        "held-out accuracy of MATH-500: 40.0% after 5 steps, 41.0% after 10 steps",
        "held-out accuracy of openai/gsm8k: 90.0% after 5 steps, 20.0% after 10 steps",
    ]
    assert list(accuracy_lines(Run("", [(0, {math: 0.4})]))) == ["held-out accuracy: 40.0% before"]
    assert list(accuracy_lines(Run("", [(0, {math: None})]))) == []


def test_failure_shows_the_error_and_the_logs(prepared, tmp_path):
    status, screen, folder = run_fake("fail", tmp_path)
    assert status == 1
    assert "verl ended with status 3 after step 1 of 3" in screen
    assert screen.count("ValueError: layer 3 differs") == 1
    assert "noise" not in screen
    assert f"full log: {folder / 'run.log'}" in screen
    assert (folder / "ray_logs" / "raylet.out").read_text() == "a daemon's own log\n"
    assert not (folder / "report.html").exists()
    assert_nothing_is_left(folder)


def test_ending_before_the_last_step_is_a_failure(prepared, tmp_path):
    status, screen, folder = run_fake("stop_early", tmp_path)
    assert status == 1
    assert "verl ended with status 0 after step 1 of 3" in screen
    assert_nothing_is_left(folder)


DRIVER = """
import sys
from pathlib import Path
from rich.console import Console
from functools import partial
from jetrl_verl.tools import launch
from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo.policy import build_model, build_tokenizer, save_policy
from jetrl_verl.tools.demo.run import DemoOptions, run_demo
out = Path(sys.argv[1])
launch.ProcessTree = partial(launch.ProcessTree, grace=2.0)
cache.find = lambda recipe, folder: cache.Prepared(out, {})
sys.exit(run_demo(DemoOptions("jet_fp8", 3, out, out, device="cpu"), Console(), trainer=sys.argv[2:]))
"""


@pytest.mark.parametrize("number,repeats", [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 5)])
def test_an_interruption_leaves_nothing(tmp_path, number, repeats):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), *FAKE, "hang"], stdout=subprocess.PIPE, text=True
    )
    try:
        for line in driver.stdout:
            if line.startswith("step 1/3"):
                break
        (folder,) = tmp_path.glob("jet_fp8-*")
        daemon = int((folder / "daemon.pid").read_text())
        assert psutil.pid_exists(daemon)
        for _ in range(repeats):
            os.kill(driver.pid, number)
            time.sleep(0.2)
        rest, _ = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert driver.returncode == 128 + number
    assert f"interrupted by {number.name}; everything that was started has ended" in rest
    assert not psutil.pid_exists(daemon)
    assert_nothing_is_left(folder)


def test_processes_of_others_are_left_alone(prepared, tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        run_fake("fail", tmp_path)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("words", "model_type", "experts", "precision", "shared"),
    [
        ((), "qwen3", None, "jet_fp8", False),
        (("--policy", "dense"), "qwen3", None, "jet_fp8", False),
        # `auto` is stock on a CPU, which runs no mixture; jet_fp8_exact is shared everywhere.
        (("--policy", "moe"), "qwen3_moe", 8, "jet_fp8", True),
        (("--policy", "moe"), "qwen3_moe", 8, "jet_fp8_exact", False),
        (("--policy", "moe"), "qwen3_moe", 8, "bf16", False),
    ],
)
def test_the_policy_that_is_named_is_made_kept_and_trained(
    words, model_type, experts, precision, shared, tmp_path, monkeypatch
):
    commands = []

    def save_untrained(recipe, folder, device, report):
        tokenizer = build_tokenizer()
        save_policy(build_model(recipe.policy, tokenizer), tokenizer, folder / "policy")
        return {}

    def watch(command, *_):
        commands.append(command)
        return 1

    monkeypatch.setattr(cache, "_fill", save_untrained)
    monkeypatch.setattr(run, "watch", watch)
    monkeypatch.setattr(run, "last_errors", lambda log: [])
    folders = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    arguments = ["demo", "--device", "cpu", "--steps", "1", "--precision", precision, *words, *folders, "a.b=1"]
    for remark in ("preparing data and policy", "data and policy from"):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1 and remark in result.stdout
        monkeypatch.setattr(run.time, "strftime", lambda _: "later")
    (entry,) = (tmp_path / "cache").iterdir()
    for command in commands:
        assert f"actor_rollout_ref.model.path={entry / 'policy'}" in [word.replace("'", "") for word in command]
        assert command.count("jetrl.operations=shared") == shared and command[-1] == "a.b=1"
    config = json.loads((entry / "policy" / "config.json").read_text())
    assert config["model_type"] == model_type and config.get("num_local_experts", config.get("num_experts")) == experts


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        (["--precision", "fp4"], f"'fp4' is not a precision; choose one of {', '.join(PRECISIONS)}"),
        (["--device", "tpu"], "'tpu' is not a device; choose one of auto, cpu, cuda"),
        (["--policy", "mixture"], "'mixture' is not a policy; choose one of dense, moe"),
        (["--steps", "0"], "--steps 0 trains nothing; ask for at least one step"),
        (["precision=bf16"], "precision=bf16 would leave the run named after jet_fp8; choose it with --precision"),
        (["++precision=bf16"], "++precision=bf16 would leave the run named after jet_fp8; choose it with --precision"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, sentence):
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 1
    assert result.stderr.strip() == f"error: {sentence}"


def test_a_damaged_cache_is_one_sentence(tmp_path, monkeypatch):
    def damaged(recipe, folder):
        raise DemoError("train.parquet is damaged; delete it")

    monkeypatch.setattr(run.cache, "find", damaged)
    arguments = ["demo", "--device", "cpu", "--out", str(tmp_path / "out"), "--cache", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stderr.strip() == "error: train.parquet is damaged; delete it"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["demo", "compare"])
def test_a_gpu_that_is_not_there_is_one_sentence(command, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folders = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    result = CliRunner().invoke(app, [command, "--device", "cuda", *folders])
    assert result.exit_code == 1
    assert result.stderr.strip() == "error: no NVIDIA GPU answers; use --device cpu"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["demo", "compare"])
@pytest.mark.parametrize("option", ["--out", "--cache"])
@pytest.mark.parametrize("below", ["", "below"])
def test_a_folder_that_cannot_be_made_is_one_sentence_before_any_work(command, option, below, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_fill", None)
    (tmp_path / "file").touch()
    folders = {"--out": str(tmp_path / "out"), "--cache": str(tmp_path / "cache")}
    folders[option] = str(tmp_path / "file" / below)
    words = [word for pair in folders.items() for word in pair]
    result = CliRunner().invoke(app, [command, "--device", "cpu", *words])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and folders[option] in result.stderr and result.stderr.count("\n") == 1


def test_environment_keeps_the_run_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    paths = RunPaths(tmp_path)
    environment = build_environment(paths, "cpu")
    assert "RAY_ADDRESS" not in environment and environment["RAY_prestart_worker_first_driver"] == "0"
    assert environment["RAY_memory_monitor_refresh_ms"] == "0"
    assert environment["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "metrics.jsonl")
    assert environment["VERL_PLATFORM"] == "cpu"
    assert "VERL_PLATFORM" not in build_environment(paths, "cuda")


def test_what_a_run_compiles_is_there_for_the_next_one(tmp_path, monkeypatch):
    """Outside of the temporary folder that each run has for itself."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    seen = tmp_path / "seen"
    show = (
        f"import os; print(os.environ['TMPDIR'], os.environ['TORCHINDUCTOR_CACHE_DIR'], file=open({str(seen)!r}, 'a'))"
    )
    for _ in range(2):
        with ProcessTree(
            [sys.executable, "-c", show], build_environment(RunPaths(tmp_path), "cpu"), tmp_path / "log"
        ) as tree:
            for _ in tree.follow():
                pass
    (first, cache), (second, again) = (line.split() for line in seen.read_text().splitlines())
    assert first != second and cache == again and not cache.startswith((first, second))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert build_environment(RunPaths(tmp_path), "cuda")["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
