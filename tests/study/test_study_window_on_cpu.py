# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The study's window: many runs over several GPUs, their failures and hangs, the deadline, and the scores after it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from recipe_cases import ROOT
from study_cases import FAKE, RUNS, judge_that, save, train

from benchmarks.study import evaluate, warm_up, window
from benchmarks.study import run as study
from benchmarks.study.warm_up import StudyError


@pytest.fixture(autouse=True)
def _look_often(monkeypatch) -> None:
    """A window looks at its runs every second; here that would be most of the time."""
    monkeypatch.setattr(window, "_POLL_SECONDS", 0.05)


def test_the_queue_begins_with_what_a_verdict_needs(tmp_path):
    runs = window.queue(tmp_path)
    core = window.core(runs)
    assert runs[: len(core)] == core and runs[0].name == "bf16-seed1"
    assert [run.seed for run in core] == [1] * (len(core) // 2) + [2] * (len(core) // 2)
    assert {(run.label, run.seed) for run in runs} == {(label, seed) for label in RUNS for seed in RUNS[label]["seeds"]}
    assert len(runs) == len(set(runs))


TRAIN = (
    "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
    "from benchmarks.study import run as study; from rich.console import Console;"
    "label, seed, prepared, out, fake, behaviour = sys.argv[2:]; run = study.run_of(label, int(seed), Path(out));"
    "job = study.job_of(run, Path(prepared), 'cpu', 4, (), (sys.executable, fake, 'train', behaviour));"
    "sys.exit(study.train_run(run, job, Console()))"
)


def open_window(prepared: Path, out: Path, behaviour: dict[str, str], slots: int, **options):
    """A window of two GPUs whose runs are the stand-in's, and the (process, GPU) of every start."""
    started = []

    def command_of(run: study.StudyRun) -> list[str]:
        words = [run.label, str(run.seed), str(prepared), str(out), str(FAKE), behaviour.get(run.name, "succeed")]
        return [sys.executable, "-c", TRAIN, str(ROOT), *words]

    def start(command, gpu, log):
        others = sum(g == gpu and process.poll() is None for process, g in started)
        assert others < slots
        process = window.start_on(command, gpu, log)
        started.append((process, gpu))
        return process

    options = {"seconds": 120, "pause_seconds": 0, "least_seconds": 0} | options
    return window.Window(["0", "1"], slots, start=start, command_of=command_of, say=print, **options), started


@pytest.mark.slow
def test_a_window_trains_what_is_left_and_starts_again_what_failed(prepared, tmp_path, capsys):
    runs = window.queue(tmp_path)[:4]
    behaviour = {runs[1].name: "die_once", runs[2].name: f"fail:{runs[2].precision}"}
    opened, started = open_window(prepared, tmp_path, behaviour, slots=2)
    assert opened.train(runs, tmp_path / "window") == [runs[2]]
    assert len(started) == 7 and [gpu for _, gpu in started[:4]] == ["0", "1", "0", "1"]
    assert [window.rollouts_of(run) for run in runs] == [4, 4, 2, 4]
    assert f"{runs[2].name} ended with status 1" in capsys.readouterr().out
    assert "layer 3 differs" in (tmp_path / f"window/{runs[2].name}.log").read_text()

    opened, started = open_window(prepared, tmp_path, {}, slots=2)
    assert opened.train(runs[:2], tmp_path / "window") == [] and not started


@pytest.mark.slow
def test_a_window_ends_when_its_time_is_over_and_keeps_what_was_logged(prepared, tmp_path, monkeypatch):
    runs = window.queue(tmp_path)[:2]
    opened, started = open_window(prepared, tmp_path, {runs[1].name: "hang"}, slots=1)

    def end_when_one_has_finished_and_one_hangs(seconds):
        if window.is_finished(runs[0]) and window.rollouts_of(runs[1]) == 2:
            opened.seconds = 0
        time.sleep(seconds)

    monkeypatch.setattr(window, "time", Clock(end_when_one_has_finished_and_one_hangs))
    assert opened.train(runs, tmp_path / "window") == [runs[1]]
    assert opened.seconds == 0 and all(process.poll() is not None for process, _ in started)
    assert window.rollouts_of(runs[1]) == 2


class Clock:
    """The module ``time`` with another ``sleep``."""

    def __init__(self, sleep):
        self.sleep = sleep

    def __getattr__(self, name):
        return getattr(time, name)


@pytest.mark.slow
def test_a_run_that_logs_nothing_any_more_is_ended_and_started_again(prepared, tmp_path, capsys):
    run = window.queue(tmp_path)[0]
    opened, started = open_window(prepared, tmp_path, {run.name: "hang"}, slots=1, quiet_seconds=3)
    assert opened.train([run], tmp_path / "window") == [run]
    assert len(started) == 3 and capsys.readouterr().out.count("logs nothing and is ended, 2 rollouts") == 3
    assert len(list(run.paths.folder.glob("run.*.log"))) == 2  # and what it said stays


def test_a_run_that_never_logs_and_hears_nothing_is_killed(prepared, tmp_path, capsys, monkeypatch):
    run = window.queue(tmp_path)[0]
    monkeypatch.setattr(window, "_GRACE_SECONDS", 1)
    opened, started = open_window(prepared, tmp_path, {}, slots=1, start_seconds=3, least_seconds=600)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    opened.command_of = lambda run: [sys.executable, "-c", deaf]
    assert opened.train([run], tmp_path / "window") == [run]
    assert [process.poll() for process, _ in started] == [-9]  # too little time is left for another attempt
    assert "logs nothing and is ended, 0 rollouts" in capsys.readouterr().out


def test_a_start_that_fails_costs_nobody_else(prepared, tmp_path, capsys):
    runs = window.queue(tmp_path)[:2]
    opened, started = open_window(prepared, tmp_path, {}, slots=1)
    start, refused = opened.start, []

    def refuse_once(command, gpu, log):
        if log.stem == runs[0].name and not refused:
            refused.append(gpu)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(command, gpu, log)

    opened.start = refuse_once
    assert opened.train(runs, tmp_path / "window") == []
    assert refused and "cannot be started: [Errno 11]" in capsys.readouterr().out


def test_ending_a_command_ends_what_has_a_session_of_its_own(tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    parent = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True);"
        "print(p.pid, flush=True); p.wait()"
    )
    process = window.start_on([sys.executable, "-c", parent, deaf], "0", tmp_path / "log")
    while len((tmp_path / "log").read_text().split()) < 2:
        time.sleep(0.1)
    children = psutil.Process(process.pid).children()
    window.kill(process)
    assert len(children) == 1 and process.poll() is not None
    assert not psutil.wait_procs(children, 10)[1]


def main_of(monkeypatch, tmp_path, prepared, scored, train_all, missing=()) -> int | str:
    """Exit status of the program with ``train_all`` for ``Window.train``; ``scored`` gets the lengths it scores."""
    words = ["--minutes", "10", "--scoring", "5", "--device", "cpu"]
    words += ["--prepared", prepared, "--out", tmp_path, "bf16-seed1"]
    monkeypatch.setattr(sys, "argv", ["window", *map(str, words), "jet_fp8-seed1"])
    monkeypatch.setattr(window.Window, "train", train_all)
    monkeypatch.setattr(window, "score", lambda out, rollouts, *_: scored.append(rollouts) or list(missing))
    with pytest.raises(SystemExit) as ended:
        window.main()
    return ended.value.code


def test_a_window_makes_the_policy_that_is_missing(tmp_path):
    prepared, log = tmp_path / "prepared", tmp_path / "warm_up.log"
    with pytest.raises(StudyError, match="Run `python3 -m benchmarks.study.warm_up"):
        window.make_policy(prepared, "0", "cpu", 60, log, None, print)
    started: list = []

    def make(program: str, seconds: float = 60) -> None:
        def start(command, gpu, log):
            started.append((command[2:5], gpu))
            return window.start_on([sys.executable, "-c", program, command[4]], gpu, log)

        window.make_policy(prepared, "1", "cuda", seconds, log, start, print)

    with pytest.raises(StudyError, match=f"status 3. See {log}"):
        make("import sys; print('no room'); sys.exit(3)")
    assert "no room" in log.read_text()
    with pytest.raises(StudyError, match="took more than 1 s"):
        make("import time; time.sleep(600)", 1)
    facts = {"config": warm_up._stated(warm_up.StudyConfig()), "accuracy": {"6": 0.7, "12": 0.1}}
    writes = f"import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(); text = {json.dumps(facts)!r}\n"
    make(writes + "(p / 'study.json').write_text(text)")
    assert started == [(["benchmarks.study.warm_up", "--out", str(prepared)], "1")] * 3
    make("it is there")
    assert len(started) == 3

    facts["accuracy"]["12"] = 0.84
    (prepared / "study.json").write_text(json.dumps(facts))
    with pytest.raises(StudyError, match="is 0.77, not 0.3 to 0.5. Change `target`"):
        make("it is there")
    del facts["config"]["average"], facts["accuracy"]
    (prepared / "study.json").write_text(json.dumps(facts))
    with pytest.raises(StudyError, match="another configuration of the warm-up. Set another --prepared"):
        make("it is there")

    def fails(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with pytest.raises(StudyError, match="cannot be started"):
        window.make_policy(tmp_path / "another", "0", "cuda", 60, log, fails, print)


def test_what_is_kept_for_the_scores_grows_with_their_number():
    one, two = window.scoring_minutes(14, 1), window.scoring_minutes(14, 2)
    assert one - two == pytest.approx(7 * window._SCORE_SECONDS / 60) and window.scoring_minutes(1, 1) < two


def test_the_program_scores_whatever_happened_in_training(prepared, tmp_path, monkeypatch, capsys):
    def finish(*names):
        def train_them(self, runs, logs):
            for run in runs:
                if run.name in names:
                    train(run.label, run.seed, prepared, tmp_path)

        return train_them

    def break_down(self, runs, logs):
        save(runs[0], 40, 60)
        save(runs[1], 40)
        raise RuntimeError("unforeseen")

    scored: list = []
    status = main_of(monkeypatch, tmp_path, prepared, scored, finish())
    assert "No row with several seeds has saved 40" in status and not scored
    assert main_of(monkeypatch, tmp_path, prepared, scored, break_down) == 1 and scored.pop() == 40
    told = capsys.readouterr()
    assert "unforeseen" in told.err and "not finished: bf16-seed1" in told.out
    both = ("bf16-seed1", "jet_fp8-seed1")
    assert main_of(monkeypatch, tmp_path, prepared, scored, finish(*both), missing=["jet_fp8-seed1"]) == 1
    assert main_of(monkeypatch, tmp_path, prepared, scored, finish(*both)) == 0
    assert scored == [None, None]


def finish_all(*runs):
    for run in runs:
        run.paths.folder.mkdir(parents=True, exist_ok=True)
        run.state.write_text(json.dumps({"finished": True, "at": 0.0}))


def test_the_length_at_which_runs_are_compared(tmp_path):
    runs = window.queue(tmp_path)[:3]
    for run, lengths in zip(runs, ((20, 40, 60, 80), (20, 40, 50), (20,))):
        save(run, *lengths)
    assert window.common_rollouts(runs[:1], 80) == 80
    assert window.common_rollouts(runs, 80) == window.length_of(tmp_path, runs, 80) == 50  # the third is left out
    assert window.common_rollouts(runs[2:], 80) is None
    (runs[2].checkpoints / "global_step_40/actor").mkdir(parents=True)  # the run was stopped in the middle of it
    with pytest.raises(StudyError, match="has saved 40 rollouts"):
        window.length_of(tmp_path, runs[2:], 80)
    alone = [run for run in window.queue(tmp_path) if run not in window.core(window.queue(tmp_path))]
    assert window.length_of(tmp_path, alone, 80) is None
    finish_all(*runs)
    assert window.length_of(tmp_path, [*runs, *alone], 80) is None
    assert window.length_of(tmp_path, runs, 4) is None, "a trial is not cut"


def log_rewards(run, reward_of, rollouts=range(81), name="metrics.jsonl"):
    run.paths.folder.mkdir(parents=True, exist_ok=True)
    lines = [{"step": n, "data": {"critic/score/mean": reward_of(n)} if n else {}} for n in rollouts]
    (run.paths.folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_are_compared_while_bf16_had_something_left_to_learn(tmp_path):
    runs = window.queue(tmp_path)
    control = [run for run in runs if run.label == "bf16"]
    assert len(control) == 2 and window.rollouts_with_room(control, 80) == 80, "nothing is known"
    log_rewards(control[0], lambda n: 0.80 + n / 1000)
    log_rewards(control[1], lambda n: 0.82 + n / 1000)  # mean of rollouts 31 to 40: 0.8455, of 41 to 50: 0.8555
    assert window.rollouts_with_room(control, 80) == window.rollouts_with_room(control, 45) == 40
    assert window.rollouts_with_room(control[:1], 80) == 50
    assert window.rollouts_with_room(control, 30) == 30
    for run in control:
        save(run, *range(10, 81, 10))
    finish_all(*control)
    assert window.length_of(tmp_path, control, 80) == 40
    last = runs[-1]  # trained on another day, without BF16: cut as the others were
    assert last not in control and window.length_of(tmp_path, [last], 80) == 40
    log_rewards(control[1], lambda n: 0.95)
    assert window.length_of(tmp_path, control, 80) == 20, "the fewest, though there is no room even there"
    for run in control:
        log_rewards(run, lambda n: 0.7)
    assert window.length_of(tmp_path, control, 80) is None


def test_rewards_of_a_training_that_was_killed_count(tmp_path):
    """Its earlier attempt waits in a file of its own; the last one has logged rollouts 51 to 80 alone, or nothing."""
    control = [run for run in window.queue(tmp_path) if run.label == "bf16"]
    for run in control:
        log_rewards(run, lambda n: 0.95, range(51, 81))
    assert window.rollouts_with_room(control, 80) == 20
    for run in control:
        log_rewards(run, lambda n: 0.7, range(52), "metrics.earlier.jsonl")
        assert window.rollouts_of(run) == 80
    assert window.rollouts_with_room(control, 80) == 50
    control[0].paths.metrics.unlink()
    assert window.rollouts_of(control[0]) == 51


def test_what_an_engine_failed_at_another_scores_on_another_gpu_and_last(prepared, tmp_path, capsys, monkeypatch):
    names = [f"{label}-seed1" for label in ("bf16", "fp8_rollout", "jet_fp8")]
    for name in names:
        assert train(name.removesuffix("-seed1"), 1, prepared, tmp_path) == 0
    monkeypatch.setattr(window, "_PAUSE_SECONDS", 0)
    started, words = [], ["--out", str(tmp_path)]

    def start(command, gpu, log):
        started.append((gpu, command[1:]))
        if len(started) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        if gpu == "1":
            return subprocess.Popen(["false"])
        evaluate.evaluate(tmp_path, 1, "cpu", (sys.executable, str(FAKE), "judge"), names=command[3:])
        return subprocess.Popen(["true"])

    assert window.score(tmp_path, None, ["0", "1", "2"], 600, start, print, ["evaluate"]) == []
    rest = names[1:] + names[:1]
    assert started == [("0", [*words, *names]), ("1", [*words, *rest]), ("2", [*words, *rest])]
    told = capsys.readouterr().out
    assert "no engine on GPU 0: [Errno 11]" in told and told.count(f"without a score: {', '.join(names)};") == 2
    engines = (tmp_path / "evaluation").glob("*.json")
    assert len(list(engines)) == 4


def test_runs_with_several_seeds_are_scored_one_seed_after_the_other(prepared, tmp_path):
    for label, seed in (("bf16", 1), ("bf16", 2), ("jet_fp8", 1), ("jet_fp8", 3), ("qurl_int8", 1)):
        assert train(label, seed, prepared, tmp_path) == 0
    asked = []

    def start(command, gpu, log):
        asked.extend(command[3:])
        return subprocess.Popen(["false"])

    window.score(tmp_path, None, ["0"], 0, start, lambda line: None, ["evaluate"])
    assert asked == ["bf16-seed1", "jet_fp8-seed1", "bf16-seed2", "jet_fp8-seed3", "qurl_int8-seed1"]


def test_several_engines_score_a_share_each(prepared, tmp_path):
    names = [f"{label}-seed1" for label in ("bf16", "fp8_rollout", "jet_fp8")]
    for name in names:
        assert train(name.removesuffix("-seed1"), 1, prepared, tmp_path) == 0
    shares = {}

    def start(command, gpu, log):
        shares[gpu] = command[3:]
        evaluate.evaluate(tmp_path, 1, "cpu", (sys.executable, str(FAKE), "judge"), names=command[3:])
        return subprocess.Popen(["true"])

    assert window.score(tmp_path, None, ["0", "1"], 600, start, print, ["evaluate"], engines=5) == []
    assert shares == {"0": [names[0], names[2]], "1": [names[1]]}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--engines", "0"), "--engines must be at least 1"),
        (("--gpus", "0,"), "--gpus must be numbers with commas"),
        (("--minutes", "2"), "the scores take 2.[0-9] minutes"),
        (("bf16-seed7",), "bf16-seed7 is not a run"),
    ],
)
def test_words_that_cannot_work_are_refused_in_one_sentence(prepared, tmp_path, monkeypatch, words, sentence):
    known = ["--minutes", "10", "--device", "cpu", "--prepared", str(prepared), "--out", str(tmp_path), "bf16-seed1"]
    monkeypatch.setattr(sys, "argv", ["window", *known, *words])
    with pytest.raises(SystemExit, match=sentence):
        window.main()


@pytest.mark.parametrize(("seconds", "quiet"), [(2, 600), (600, 2)])
def test_scoring_ends_in_time_and_so_does_an_engine_that_hangs(prepared, tmp_path, seconds, quiet, monkeypatch):
    assert train("bf16", 1, prepared, tmp_path) == 0
    save(study.run_of("bf16", 1, tmp_path), 60)
    monkeypatch.setattr(window, "_PAUSE_SECONDS", 0)
    started = []

    def start(command, gpu, log):
        started.append((gpu, command, subprocess.Popen(["sleep", "600"])))
        return started[-1][2]

    missing = window.score(tmp_path, 60, ["0", "1"], seconds, start, print, ["evaluate"], quiet_seconds=quiet)
    assert missing == ["bf16-seed1"]
    assert [gpu for gpu, _, _ in started] == (["0"] if seconds == 2 else ["0", "1", "0"])
    assert started[0][1] == ["evaluate", "--out", str(tmp_path), "--rollouts", "60", "bf16-seed1"]
    assert all(process.poll() is not None for _, _, process in started)


def test_a_score_is_there_before_its_engine_ends(prepared, tmp_path):
    for label in ("bf16", "jet_fp8"):
        assert train(label, 1, prepared, tmp_path) == 0
    waits = judge_that(
        "judge(names[:1], True); there = Path(r.out).parent / f'{names[0]}.json'; until = time.time() + 30\n"
        "while not there.is_file() and time.time() < until: time.sleep(0.1)\n"
        "judge(names[1:], False); sys.exit(0 if there.is_file() else 4)"
    )
    names = ["jet_fp8-seed1", "bf16-seed1"]  # in the order that was asked for
    assert evaluate.evaluate(tmp_path, 1, "cpu", waits, names=names) == names


def test_two_windows_do_not_train_the_same_runs(tmp_path):
    refused = pytest.raises(StudyError, match="Another window is running")
    with window.only_one(tmp_path), refused, window.only_one(tmp_path):
        pass
    with window.only_one(tmp_path):
        pass


def test_more_runs_than_threads_are_refused():
    window.check_threads(21, 1268, {"kernel.pid_max": 32768, "ulimit -u": -1})
    with pytest.raises(StudyError, match=r"need about 32,800 threads and kernel.pid_max allows 32,768"):
        window.check_threads(21, 1300, {"ulimit -u": 127000, "kernel.pid_max": 32768})
    window.check_threads(1)
