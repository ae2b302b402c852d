# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``jetrl`` command: arguments of the subcommands, each of which imports its module when called."""

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.inputs import UserError
from jetrl_verl.patches.patch import PatchError

_UsageError: type[Exception] = typer.BadParameter.__base__
"""Click's, which typer brings under a name of its own."""


class _Commands(TyperGroup):
    """Ends every command alike: a refusal is one sentence on stderr, and a bug keeps its traceback."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except _UsageError as error:
            reason, name = error.format_message().rstrip("."), context.invoked_subcommand or ""
            raise _failed(f"{reason}. Nothing was run; see `jetrl {name} --help`.", 2) from None
        except (UserError, PatchError) as error:
            # Status 1 of `jetrl diff` says that a log-probability differs.
            raise _failed(error, 2 if context.invoked_subcommand == "diff" else 1) from None


def _failed(sentence: object, status: int) -> typer.Exit:
    text = " ".join(str(sentence).split()).rstrip(".")
    Console(stderr=True).print(f"error: {text}.", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(status)


app = typer.Typer(
    name="jetrl", help="One FP8 precision flow for rollout and training in verl.", no_args_is_help=True, cls=_Commands
)


def _positive(text: str | float) -> float:
    """A finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise typer.BadParameter(f"{text} is not a finite number above 0.")
    return number


def _not_negative(text: str | float) -> float:
    """A finite number of at least 0."""
    return 0.0 if float(text) == 0 else _positive(text)


def _counts(words: str) -> tuple[int, ...]:
    """Whole numbers of at least 0 with commas between them."""
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", words):
        raise typer.BadParameter(f"{words!r} is not a list of whole numbers with commas.", param_hint="--seeds")
    return tuple(map(int, words.split(",")))


@app.callback()
def _root() -> None:
    pass  # typer keeps `jetrl <subcommand>` with a callback


@app.command(context_settings={"allow_extra_args": True})
def demo(
    context: typer.Context,
    precision: Annotated[str, typer.Option(help=", ".join(PRECISIONS))] = "jet_fp8_exact",
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps")] = 36,
    out: Annotated[Path, typer.Option(help="folder that receives one folder per run")] = Path("outputs/demo"),
    cache: Annotated[Path, typer.Option(help="folder for data and warmed-up policy")] = Path("outputs/cache"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    policy: Annotated[str, typer.Option(help="dense, moe: a mixture of experts, or hybrid: with delta nets")] = "dense",
    baseline: Annotated[bool, typer.Option(help="measure the mismatch of fp8_rollout on the same policies")] = True,
) -> None:
    """Train a small policy with real verl and vLLM and write a report.

    Further arguments are passed to verl as Hydra overrides, e.g. `jetrl demo trainer.test_freq=5`.
    """
    # Before torch is imported: OpenMP threads that spin stall each other on a busy machine, by a factor of ten.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from jetrl_verl.tools.demo.run import DemoOptions, run_demo

    options = DemoOptions(precision, steps, out, cache, device, policy, tuple(context.args), baseline)
    raise typer.Exit(run_demo(options))


@app.command(context_settings={"allow_extra_args": True})
def compare(
    context: typer.Context,
    precisions: Annotated[
        str, typer.Option(help="with commas, each PRECISION[+KEY=VALUE...]; differences are to the first")
    ] = "bf16,fp8_rollout,jet_fp8",
    seeds: Annotated[str, typer.Option(help="with commas; every precision is trained with each")] = "1",
    temperature: Annotated[
        float, typer.Option(parser=_not_negative, metavar="FLOAT", help="of the evaluation; 0 is greedy")
    ] = 0.0,
    samples: Annotated[int, typer.Option(min=1, help="responses to a problem in the evaluation")] = 1,
    out: Annotated[Path, typer.Option(help="the same folder continues a comparison")] = Path("outputs/compare"),
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps of the demo")] = 36,
    cache: Annotated[Path, typer.Option(help="folder for data and warmed-up policy of the demo")] = Path(
        "outputs/cache"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda, for the demo")] = "auto",
) -> None:
    """Train one job under several precisions, score all runs in one BF16 engine, write a table and a page.

    The job is the demo, to which further arguments are Hydra overrides, or any verl command line after `--`, e.g.
    `jetrl compare --precisions bf16,jet_fp8 -- bash run_qwen3_8b.sh`. A finished run is not trained again.
    """
    from jetrl_verl.tools.compare.run import CompareOptions, run_compare
    from jetrl_verl.tools.rows import split_rows

    options = CompareOptions(
        split_rows(precisions), _counts(seeds), out, tuple(context.args), temperature, samples, steps, cache, device
    )
    raise typer.Exit(run_compare(options))


@app.command()
def doctor(
    ray: Annotated[bool, typer.Option(help="start a local Ray and ask its workers for the plugin")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Check what this machine can run and how to fix what is wrong; exit status 1 if something is."""
    from jetrl_verl.tools.doctor.diagnosis import run_doctor

    raise typer.Exit(run_doctor(Console(), ray, as_json))


@app.command(context_settings={"allow_extra_args": True})
def memory(
    context: typer.Context,
    script: Annotated[Path | None, typer.Option(help="a recipe's script; it runs with $PYTHON replaced")] = None,
    model: Annotated[Path | None, typer.Option(help="folder or known name, e.g. qwen3-8b")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="of one host; trainer and rollout share them")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="GPUs of a replica of the rollout")] = None,
    prompt_length: Annotated[int | None, typer.Option(min=1, help="most tokens of a prompt")] = None,
    response_length: Annotated[int | None, typer.Option(min=1, help="most tokens of a response")] = None,
    gpu_gib: Annotated[
        float, typer.Option(parser=_positive, metavar="FLOAT", help="memory of a GPU: H200 139.8, H100 79.1")
    ] = 139.8,
) -> None:
    """Count what a GPU holds in each phase under each precision, and name the settings that cost exactness.

    Of a recipe's `--script`, of verl's overrides after `--`, or of a `--model`, with verl's defaults for the rest.
    """
    from jetrl_verl.tools.launch import quote
    from jetrl_verl.tools.memory.run import run_memory

    options = {
        "actor_rollout_ref.model.path": model,
        "trainer.n_gpus_per_node": gpus,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": tp,
        "data.max_prompt_length": prompt_length,
        "data.max_response_length": response_length,
    }
    overrides = [f"{key}={quote(value)}" for key, value in options.items() if value is not None]
    console = Console()
    if not console.is_terminal:
        console.width = 120  # of a file; rich would cut the table at 80
    run_memory(context.args + overrides, script, gpu_gib, console)


@app.command(context_settings={"allow_extra_args": True})
def diff(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="Hugging Face folder of the policy")],
    precision: Annotated[str, typer.Option(help="with commas: " + ", ".join(PRECISIONS))] = "jet_fp8_exact",
    prompts: Annotated[Path | None, typer.Option(help=".txt, .jsonl or .parquet; built-in ones by default")] = None,
    limit: Annotated[int, typer.Option(min=1, help="prompts taken from it")] = 4,
    response: Annotated[int, typer.Option(min=1, help="most tokens sampled for each prompt")] = 64,
    temperature: Annotated[
        float, typer.Option(parser=_positive, metavar="FLOAT", help="sampling temperature, above 0")
    ] = 1.0,
    sequence: Annotated[Path | None, typer.Option(help="the sequence at which a run has stopped, not prompts")] = None,
    out: Annotated[Path, typer.Option(help="folder for the report and logs")] = Path("outputs/diff"),
) -> None:
    """Compare rollout and trainer operation by operation; exit status 1 if a log-probability differs.

    Further arguments are Hydra overrides of verl's configuration, e.g. `jetrl diff MODEL jetrl.scale_rule=pow2`.
    """
    from jetrl_verl.tools.diff.run import DiffOptions, run_diff

    names = tuple(name.strip() for name in precision.split(",") if name.strip())
    options = DiffOptions(model, names, prompts, limit, response, temperature, out, tuple(context.args), sequence)
    raise typer.Exit(run_diff(options, Console()))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="verl FSDP checkpoint (global_step_N) or Hugging Face folder")],
    out: Annotated[Path, typer.Argument(help="folder to write; must not exist or be empty")],
    format: Annotated[str, typer.Option(help="bf16, fp8 or both (OUT/bf16 and OUT/fp8)")] = "both",
    scale_rule: Annotated[str, typer.Option(help="the run's jetrl.scale_rule: fp32 or pow2")] = "fp32",
    unfit_layers: Annotated[str, typer.Option(help="the run's jetrl.unfit_layers: stop or skip")] = "stop",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="the rollout's tensor_model_parallel_size")] = 1,
) -> None:
    """Write a trained policy as BF16 and as the block-FP8 checkpoint that stock vLLM serves."""
    from jetrl_verl.checkpoint.export import ExportOptions, run_export

    run_export(checkpoint, out, ExportOptions(format, scale_rule, unfit_layers, tensor_parallel))


@app.command()
def reshard(
    checkpoint: Annotated[str, typer.Argument(help="global_step_N of an FSDP2 run, or the folder of all")],
    gpus: Annotated[int, typer.Option(min=1, help="ranks of the resumed run, over all nodes")],
    out: Annotated[
        str | None, typer.Option(help="new trainer.default_local_dir; default: next to the old files")
    ] = None,
) -> None:
    """Rewrite a checkpoint for another number of GPUs; weights, optimizer state, schedule and data position stay."""
    from jetrl_verl.checkpoint.reshard import run_reshard

    run_reshard(checkpoint, gpus, out)


@app.command()
def patch(
    into: Annotated[Path | None, typer.Option(help="checkout of verl or vLLM, or a folder that holds both")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the diff and write nothing")] = False,
) -> None:
    """Write the plugin's patches into a checkout of verl or vLLM and print the diff; without --into, list them.

    The plugin does not replace a function that is patched in the source.
    """
    from jetrl_verl.tools.patch import list_patches, patch_into

    if into is None:
        list_patches(Console())
        return
    typer.echo(patch_into(into, write=not dry_run), nl=False)


if __name__ == "__main__":
    app()
