# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's driver with a fake trainer: progress, report, failures, and no process left."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from jetrl_verl.cli import app
from jetrl_verl.tools import launch
from jetrl_verl.tools.demo import cache, run
from jetrl_verl.tools.demo.policy import POLICIES
from jetrl_verl.tools.demo.run import DemoOptions, run_demo, summary_lines
from jetrl_verl.tools.launch import RunPaths, build_environment
from jetrl_verl.tools.process_tree import ProcessTree
from jetrl_verl.tools.report import Run

FAKE = (sys.executable, str(Path(__file__).with_name("fake_trainer.py")))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A cache that always hits, and a short grace for daemons that ignore SIGTERM."""
    monkeypatch.setattr(launch, "ProcessTree", partial(ProcessTree, grace=1.0))
    entry = cache.Prepared(tmp_path / "entry", {"parameters": 1234})
    monkeypatch.setattr(cache, "find", lambda recipe, folder: entry)
    return entry


def run_fake(
    behaviour: str, out: Path, *overrides: str, steps: int = 3, baseline: bool = False
) -> tuple[int, str, Path]:
    """Exit status, console output and run folder of the driver with the fake trainer."""
    options = DemoOptions("jet_fp8", steps, out, out / "cache", "cpu", overrides=overrides, baseline=baseline)
    with redirect_stdout(io.StringIO()) as screen:
        status = run_demo(options, trainer=(*FAKE, behaviour))
    (folder,) = out.glob("jet_fp8-*")
    return status, screen.getvalue(), folder


def assert_nothing_is_left(folder: Path) -> None:
    daemon = int((folder / "daemon.pid").read_text())
    assert not psutil.pid_exists(daemon) or psutil.Process(daemon).status() == psutil.STATUS_ZOMBIE
    assert not Path("/dev/shm", (folder / "segment").read_text()).exists()
    alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    mine = [p for p in alive if "fake_trainer" in " ".join(p.cmdline())]
    assert mine == []


def test_a_successful_run_shows_progress_and_writes_a_report(prepared, tmp_path):
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
    assert "held-out accuracy of jetrl/addition: 40.0% before, 70.0% after 3 steps" in screen
    assert lines[-1] == f"report: {folder / 'report.html'}"
    assert all((folder / name).is_file() for name in ("report.html", "report.png", "demo.png"))
    assert_nothing_is_left(folder)
    assert set(Path("/tmp").glob("jetrl-*")) == temporary_before


FAKE_BASELINE = """
import json, sys
request = json.load(open(sys.argv[1]))
with open(request["out"], "w") as out:
    for step, folder in request["policies"]:
        print(json.dumps({"step": step, "data": {"rollout_corr/k3_kl": step * 1e-5}}), file=out)
"""


def test_fp8_rollout_is_measured_on_the_policies_of_the_run(prepared, tmp_path, monkeypatch):
    prepared.policy.mkdir(parents=True)
    monkeypatch.setattr(run, "BASELINE", (sys.executable, "-c", FAKE_BASELINE))
    status, screen, folder = run_fake("succeed", tmp_path, steps=11, baseline=True)
    assert status == 0
    policies = dict(json.loads((folder / "fp8_rollout" / "request.json").read_text())["policies"])
    assert list(policies) == [1, 3, 5, 7, 9, 11] and policies[1] == str(prepared.policy)
    assert Path(policies[11]).relative_to(folder) == Path("checkpoints/global_step_10/actor/huggingface")
    assert screen.splitlines()[-2] == (
        "k3_kl of rollout and trainer: mean 1.0e-04; fp8_rollout on the same policies: 1.0e-05 to 1.1e-04"
    )
    assert "fp8_rollout on the same policies" in (folder / "report.html").read_text()
    assert not (folder / "checkpoints").exists()


def test_a_failed_baseline_fails_the_demo_and_names_its_log(prepared, tmp_path, monkeypatch):
    prepared.policy.mkdir(parents=True)
    monkeypatch.setattr(run, "BASELINE", (sys.executable, "-c", "raise ValueError('no such format')"))
    status, screen, folder = run_fake("succeed", tmp_path, baseline=True)
    assert status == 1 and "ValueError: no such format" in screen
    assert f"full log: {folder / 'fp8_rollout' / 'run.log'}" in screen


@pytest.mark.parametrize("value", ["True", "true"])
def test_a_run_that_only_validates_is_a_success(prepared, tmp_path, value):
    status, screen, folder = run_fake("succeed", tmp_path, f"trainer.val_only={value}", baseline=True)
    assert status == 0 and "held-out accuracy of jetrl/addition: 40.0% before" in screen
    assert not (folder / "fp8_rollout").exists()


def test_the_summary_names_every_validation_set_and_an_exact_zero():
    gsm8k, math = "val-core/openai/gsm8k/acc/mean@1", "val-core/MATH-500/acc/mean@1"
    both = Run("", [(5, {gsm8k: 0.9, math: 0.4}), (10, {gsm8k: 0.2, math: 0.41})])
    assert list(summary_lines(both, None)) == [
        "held-out accuracy of MATH-500: 40.0% after 5 steps, 41.0% after 10 steps",
        "held-out accuracy of openai/gsm8k: 90.0% after 5 steps, 20.0% after 10 steps",
    ]
    assert list(summary_lines(Run("", [(0, {math: None})]), None)) == []
    exact = Run("", [(0, {}), (1, {"rollout_corr/k3_kl": 0.0}), (2, {"rollout_corr/k3_kl": 0.0})])
    assert list(summary_lines(exact, None)) == ["k3_kl of rollout and trainer: exactly 0 in all 2 steps"]


def test_a_failed_run_shows_its_error_and_logs(prepared, tmp_path):
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
from functools import partial
from jetrl_verl.tools import launch
from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo.policy import POLICIES
from jetrl_verl.tools.demo.run import DemoOptions, run_demo
out = Path(sys.argv[1])
launch.ProcessTree = partial(launch.ProcessTree, grace=2.0)
cache.find = lambda recipe, folder: cache.Prepared(out, {})
sys.exit(run_demo(DemoOptions("jet_fp8", 3, out, out, "cpu", baseline=False), trainer=sys.argv[2:]))
"""


@pytest.mark.parametrize("number,repeats", [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 5)])
def test_an_interrupted_run_leaves_no_process(tmp_path, number, repeats):
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


def test_other_processes_keep_running(prepared, tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        run_fake("fail", tmp_path)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("policy", "precision", "shared"),
    [
        ("dense", "jet_fp8", False),
        ("moe", "jet_fp8", True),
        ("moe", "jet_fp8_exact", False),
        ("moe", "bf16", False),
        ("hybrid", "jet_fp8_exact", False),
    ],
)
def test_the_words_of_a_policy(policy, precision, shared, tmp_path, monkeypatch):
    """On a CPU `auto` is stock, which does not support a mixture. Policies are saved for a measurement of fp8_rollout,
    which a hybrid has not. The user's overrides come last."""
    recipes, commands = [], []
    monkeypatch.setattr(cache, "find", lambda recipe, folder: recipes.append(recipe) or cache.Prepared(tmp_path, {}))
    monkeypatch.setattr(run, "watch", lambda command, *_: commands.append(command) or 1)
    arguments = f"demo --device cpu --precision {precision} --policy {policy} --out {tmp_path / 'out'}".split()
    assert CliRunner().invoke(app, [*arguments, "a.b=1"]).exit_code == 1
    assert recipes[0].policy == POLICIES[policy]
    assert commands[0].count("jetrl.operations=shared") == shared and commands[0][-1] == "a.b=1"
    assert commands[0].count("trainer.save_freq=1") == (policy != "hybrid")


@pytest.mark.parametrize("command", ["demo", "compare"])
def test_a_missing_gpu_is_one_sentence(command, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folders = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    result = CliRunner().invoke(app, [command, "--device", "cuda", *folders])
    assert result.exit_code == 1
    assert result.stderr.strip() == "error: no NVIDIA GPU answers. Set --device cpu."
    assert not list(tmp_path.iterdir())


def test_a_run_never_joins_a_remote_ray_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    paths = RunPaths(tmp_path)
    environment = build_environment(paths, "cpu")
    assert "RAY_ADDRESS" not in environment and environment["RAY_prestart_worker_first_driver"] == "0"
    assert environment["RAY_memory_monitor_refresh_ms"] == "0"
    assert environment["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "metrics.jsonl")
    assert environment["VERL_PLATFORM"] == "cpu"
    assert "VERL_PLATFORM" not in build_environment(paths, "cuda")


def test_compiled_kernels_outlive_the_temporary_folder_of_a_run(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    seen = tmp_path / "seen"
    show = (
        f"import os; print(os.environ['TMPDIR'], os.environ['TORCHINDUCTOR_CACHE_DIR'], file=open({str(seen)!r}, 'w'))"
    )
    environment = build_environment(RunPaths(tmp_path), "cpu")
    with ProcessTree([sys.executable, "-c", show], environment, tmp_path / "log") as tree:
        tree.wait()
    temporary, compiled = seen.read_text().split()
    assert not compiled.startswith(temporary)
