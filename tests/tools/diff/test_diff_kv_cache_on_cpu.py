# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff`` with ``jetrl.kv_cache=fp8``: equal where both sides have the cache, and a kind of its own where the
rollout alone has it."""

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tiny_models import save_policy
from vllm_engine import CACHE

from jetrl_verl import kernels
from jetrl_verl.tools.diff import rollout, run
from jetrl_verl.tools.diff.operations import Operation
from jetrl_verl.tools.diff.run import DiffOptions, run_diff

RESPONSE = 8
CACHED = [Operation(layer, name) for layer in range(2) for name in ("k_cache", "v_cache")]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"), "qwen3")


@pytest.fixture
def compared(policy, tmp_path, cpu_platform, monkeypatch):
    """Callable precision -> (status, report, what was printed, recording): the command with engines in this process,
    of which the second alone is started; what it samples stands for the first."""
    from vllm.distributed import cleanup_dist_env_and_memory

    for name, value in run.engine_environment(cuda=False).items():
        monkeypatch.setenv(name, value)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": [3 + i] * (9 + 7 * i)}) for i in range(2)))
    answers = [[5 + i, 7, 9, 4, 8, 6, 5, 10] for i in range(2)]
    recordings = []

    def engine(request, *args):
        if not recordings:
            arguments = request.arguments | {"max_num_seqs": 2, "enable_prefix_caching": False} | CACHE
            with torch.compiler.set_stance("force_eager"):
                recordings.append(rollout.run(replace(request, responses=answers, arguments=arguments)))
            cleanup_dist_env_and_memory()
        return recordings[0]

    def compare(precision):
        monkeypatch.setattr(run, "run_engine", engine)
        options = DiffOptions(policy, (precision,), prompts, 2, RESPONSE, 1.0, tmp_path, ("jetrl.kv_cache=fp8",))
        console = Console(record=True, width=120)
        status = run_diff(options, console)
        (report,) = json.loads((tmp_path / "report.json").read_text())["precisions"]
        return status, report, console.export_text(), recordings[0]

    return compare


def own(report, kind) -> list[float]:
    return [row["own"]["share"] for row in report["operations"] if row["kind"] == kind]


def test_both_sides_have_the_cache(compared):
    status, report, said, recording = compared("jet_fp8_exact")
    assert status == 0 and report["equal"] and report["first_difference"] is None
    assert report["options"]["kv_cache"] == "fp8"
    assert own(report, "kv_cache") == [0.0] * 4
    assert "precision=jet_fp8_exact jetrl.kv_cache=fp8: 16 log-probabilities equal in all 32 bits" in said
    # What was recorded is on the cache's grid and not what went in.
    for operation in CACHED:
        seen = recording.outputs[operation].unflatten(1, (-1, 128))
        assert torch.equal(kernels.quantize_kv(seen, seen)[1], seen)
        source = "k_rotary" if operation.name == "k_cache" else "v_proj"
        assert not torch.equal(recording.outputs[Operation(operation.layer, source)], recording.outputs[operation])


def test_the_rollout_alone_has_the_cache(compared):
    status, report, said, _ = compared("fp8_rollout")
    assert status == 1 and not report["equal"]
    # E4M3 changes nearly every number.
    assert min(own(report, "kv_cache")) > 0.5
    assert report["kinds"]["kv_cache"]["alone"]["k3_kl"] > 0
    assert report["all_corrected"]["differing"] == 0
    assert "kv_cache" in said and "precision=fp8_rollout jetrl.kv_cache=fp8: log-probabilities" in said
