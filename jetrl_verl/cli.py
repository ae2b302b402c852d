# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The ``jetrl`` command. Each subcommand parses its arguments here and imports what does the work when it is called."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(name="jetrl", help="One FP8 precision flow for rollout and training in verl.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    # With a callback typer keeps `jetrl <subcommand>` even while there is a single subcommand.
    pass


@app.command(context_settings={"allow_extra_args": True})
def demo(
    context: typer.Context,
    precision: Annotated[str, typer.Option(help="bf16, fp8_rollout, fp8_rollout_tis or jet_fp8")] = "jet_fp8",
    steps: Annotated[int, typer.Option(help="GRPO steps")] = 20,
    out: Annotated[Path, typer.Option(help="folder that receives one folder per run")] = Path("outputs/demo"),
    cache: Annotated[Path, typer.Option(help="folder for data and warmed-up policy")] = Path("outputs/cache"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Train a small policy with real verl and vLLM and write a report.

    Further arguments are passed to verl as Hydra overrides, e.g. `jetrl demo trainer.test_freq=5`.
    """
    from jetrl_verl.demo import DemoError
    from jetrl_verl.demo.run import DemoOptions, run_demo

    console = Console()
    try:
        options = DemoOptions(precision, steps, out, cache, device, tuple(context.args))
        status = run_demo(options, console)
    except DemoError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        status = 1
    raise typer.Exit(status)


if __name__ == "__main__":
    app()
