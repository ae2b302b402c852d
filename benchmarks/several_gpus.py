# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's job over several GPUs: FSDP2, FSDP1, HSDP, offload, a tensor-parallel rollout, resume on another number.

    python benchmarks/several_gpus.py --gpus 2 --out benchmarks/results/several_gpus_2.json
    python benchmarks/several_gpus.py --gpus 2 --out several_gpus.json --arrangements fsdp2,tp2 --precisions jet_fp8

Each arrangement is a run of real verl and vLLM, three steps of the demo's task with a policy of 1.4 billion random
parameters, so that memory and the weight sync have a size. Per run: exit status, syncs at which the contract held,
k3_kl, seconds of verl's phase ``update_weights`` and, in it, of our stream, of a rollout worker's loading and of its
contract check, megabytes on the wire and on verl's own, peak memory of a trainer. ``resume`` saves on all GPUs, has
``jetrl reshard`` cut the checkpoint for half of them and goes on there. Three to five minutes a run, most of it
start-up; exit status 1 if one failed.
"""

import argparse
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl.checkpoint.reshard import ReshardError, reshard
from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo.policy import PolicyConfig, build_model, build_tokenizer, save_policy
from jetrl_verl.tools.demo.run import DemoOptions, run_demo
from jetrl_verl.tools.launch import RunPaths
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.tools.report import load_run

POLICY = PolicyConfig(hidden_size=2048, layers=28, heads=16, kv_heads=8, intermediate_size=6144, max_positions=1024)
STEPS = 3
FSDP = "actor_rollout_ref.actor.fsdp_config"
ARRANGEMENTS: dict[str, list[str]] = {
    "fsdp2": [],
    "fsdp1": ["actor_rollout_ref.actor.strategy=fsdp"],
    "hsdp": [f"{FSDP}.fsdp_size={{half}}"],
    "offload": [f"{FSDP}.param_offload=True", f"{FSDP}.optimizer_offload=True"],
    "tp2": ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
}
"""Name -> overrides; ``{half}`` is half of the GPUs."""

MEMORY = (
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "++actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=4000000000",
)
"""A KV cache of its own size rather than a share of what is free, so that peak memory compares."""

RESUME = "resume"
SYNC = re.compile(r"loaded in ([\d.]+) s, contract of \d+ quantized and \d+ BF16 tensors held in ([\d.]+) s")
"""What a rollout worker logs of each weight sync."""

console = Console(width=150)


@dataclass(frozen=True)
class Job:
    """What every run shares."""

    out: Path
    policy: Path
    gpus: int
    device: str

    def run(
        self, name: str, precision: str, gpus: int, overrides: list[str], steps: int = STEPS
    ) -> tuple[int, RunPaths]:
        """Exit status and files of one run."""
        sequences = 256
        shared = [
            f"trainer.n_gpus_per_node={gpus}",
            f"actor_rollout_ref.model.path={self.policy}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={sequences // 4 // gpus}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={sequences // gpus}",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            *([f"ray_kwargs.ray_init.num_gpus={gpus}"] if self.device == "cpu" else MEMORY),
        ]
        folder = self.out / name / precision
        options = DemoOptions(
            precision,
            steps,
            folder,
            Path("outputs/cache"),  # the demo's, for its data
            self.device,
            "dense",
            (*shared, *(o.format(half=max(1, gpus // 2)) for o in overrides)),
        )
        with (self.out / f"{name}-{precision}.log").open("w") as log:
            status = run_demo(options, Console(file=log, width=200), cache.Recipe())
        return status, RunPaths(max(folder.iterdir(), key=lambda path: path.stat().st_mtime))


def facts(status: int, paths: RunPaths) -> dict:
    """What a run's log and metrics say."""
    logged = paths.metrics.exists() and paths.metrics.stat().st_size > 0
    records = load_run(paths.folder).records if logged else []
    steps = [data for _, data in records if "actor/grad_norm" in data]

    def of(key: str, of_values=statistics.median) -> float | None:
        values = [data[key] for data in steps if key in data]
        return of_values(values) if values else None

    syncs = [(float(loaded), float(checked)) for loaded, checked in SYNC.findall(paths.log.read_text(errors="replace"))]
    return {
        "status": status,
        "steps": len(steps),
        "contracts_held": len(syncs),
        "k3_kl": of("rollout_corr/k3_kl", statistics.mean),
        "update_weights_s": of("timing_s/update_weights"),
        "stream_s": of("actor/jetrl/sync_seconds"),
        "loaded_s": statistics.median(loaded for loaded, _ in syncs) if syncs else None,
        "checked_s": statistics.median(checked for _, checked in syncs) if syncs else None,
        "wire_mb": of("actor/jetrl/sync_megabytes"),
        "stock_wire_mb": of("actor/jetrl/sync_stock_megabytes"),
        "peak_gib": of("actor/perf/max_memory_allocated_gb", max),
        "step_s": of("timing_s/step"),
    }


def resume(job: Job, precision: str) -> dict:
    """One step on all GPUs, saved; resharded for half of them; the second step there."""
    folder, half = job.out / "checkpoints" / precision, max(1, job.gpus // 2)
    where = [f"trainer.default_local_dir={folder}", "trainer.save_freq=1"]
    status, _ = job.run("saved", precision, job.gpus, where, steps=1)
    if status != 0:
        return {"status": status}
    started = time.monotonic()
    try:
        reshard(folder / "global_step_1", half)
    except ReshardError as error:
        return {"status": 1, "sentence": str(error)}
    seconds = time.monotonic() - started
    found = facts(*job.run(RESUME, precision, half, [*where, "trainer.resume_mode=auto"], steps=2))
    sentence = f"from {job.gpus} to {half} GPUs in {seconds:.1f} s; {found['steps']} step after it"
    return found | {"status": found["status"] or int(found["steps"] != 1), "sentence": sentence}


def print_report(result: dict) -> None:
    columns = ("status", "steps", "contracts_held", "k3_kl", "update_weights_s", "stream_s", "loaded_s", "checked_s")
    columns += ("wire_mb", "stock_wire_mb", "peak_gib", "step_s")
    table = Table(title=f"{result['gpus']} GPUs", box=SIMPLE_HEAD)
    for heading in ("arrangement", "precision", *columns):
        table.add_column(heading.replace("_", " "), justify="right")
    for run in result["runs"]:
        values = (run.get(column) for column in columns)
        cells = (
            "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value) for value in values
        )
        table.add_row(run["arrangement"], run["precision"], *cells)
    console.print(table)
    for run in result["runs"]:
        if run.get("sentence"):
            console.print(f"{run['arrangement']} {run['precision']}: {run['sentence']}", highlight=False, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes; logs go beside it")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--arrangements", default=",".join([*ARRANGEMENTS, RESUME]))
    parser.add_argument("--precisions", default="jet_fp8,bf16")
    parser.add_argument("--tiny", action="store_true", help="the demo's own policy on a CPU, to try this script out")
    options = parser.parse_args()
    unknown = set(options.arrangements.split(",")) - {*ARRANGEMENTS, RESUME}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join([*ARRANGEMENTS, RESUME])}")

    folder = options.out.resolve().with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, policy = build_tokenizer(), folder / "policy"
    save_policy(build_model(PolicyConfig() if options.tiny else POLICY, tokenizer), tokenizer, policy)
    job = Job(folder, policy, options.gpus, "cpu" if options.tiny else "cuda")
    result: dict = {"build": provenance(), "gpus": options.gpus, "runs": []}
    for name in options.arrangements.split(","):
        for precision in options.precisions.split(","):
            if name == RESUME:
                if precision == "bf16":
                    continue  # stock verl, which loads what it finds
                found = resume(job, precision)
            else:
                found = facts(*job.run(name, precision, options.gpus, ARRANGEMENTS[name]))
                if found["contracts_held"] < STEPS and precision != "bf16":
                    found["status"] = found["status"] or 1
            result["runs"].append({"arrangement": name, "precision": precision, **found})
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_report(result)
    return int(any(run["status"] != 0 for run in result["runs"]))


if __name__ == "__main__":
    sys.exit(main())
