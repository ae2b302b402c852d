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
"""Right after ``ray.init``, ask one worker on each node whether it has this plugin in the driver's version.

Ray workers need not run the driver's interpreter: verl's ``uv run`` examples hand Ray a ``py_executable``, and a
cluster's nodes have environments of their own. A worker without the plugin would fail minutes later, or, where only
the entry point is missing, train in BF16 without a word. So the driver of a non-bf16 run asks first, before any actor
takes a GPU.

``ray.init`` itself is wrapped, because verl calls it inside ``run_ppo`` and the running module is ``__main__``, of
which no importable copy exists to patch. On a cluster that the process has already joined, the question is asked at
once.

Gone when verl reports plugins that its workers lack (no upstream issue asks for it so far).
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jetrl_verl

_TIMEOUT_S = 600.0
"""A worker's first start may install its environment (``uv run``); longer than this, the cluster has no room for it."""


def install() -> None:
    """Wrap ``ray.init``; doing it twice changes nothing. Exits the process where a worker lacks the plugin."""
    import ray

    if ray.is_initialized():
        check_workers()
        return
    if getattr(ray.init, "_jetrl_wrapped", False):
        return
    original = ray.init

    @functools.wraps(original)
    def init_then_check(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        check_workers()
        return context

    init_then_check._jetrl_wrapped = True
    ray.init = init_then_check


def check_workers() -> None:
    """Start one worker per living node in the job's runtime environment; exit with one sentence unless all have us."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = ray.remote(num_cpus=0, max_retries=0)(_probe())
    answers = {}
    for node in ray.nodes():
        if node["Alive"]:
            pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answers[node["NodeManagerAddress"]] = probe.options(scheduling_strategy=pinned).remote()
    for address, answer in answers.items():
        try:
            found, interpreter = ray.get(answer, timeout=_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            sys.exit(f"jetrl_verl: no Ray worker started on {address} within {_TIMEOUT_S:.0f} s; check `ray status`.")
        if found != jetrl_verl.__version__:
            has = "does not have the plugin installed" if found is None else f"has jetrl-verl {found}"
            sys.exit(
                f"jetrl_verl: the driver runs jetrl-verl {jetrl_verl.__version__}, but the Ray workers' interpreter "
                f"{interpreter} on {address} {has}; install the same version there: `uv pip install jetrl-verl` in "
                "that environment, or `uv run --with jetrl-verl ...` as both the command and "
                "ray_kwargs.ray_init.runtime_env.py_executable."
            )


def _probe() -> Callable[[], tuple[str | None, str]]:
    """The question, as a nested function: Ray ships those by value, so a worker without this package can run it."""

    def plugin_version() -> tuple[str | None, str]:
        import sys
        from importlib import metadata

        # The entry point, not the package, is what verl loads: a package that is merely importable would do nothing.
        for entry_point in metadata.entry_points(group="verl.plugins"):
            if entry_point.name == "jetrl" and entry_point.dist is not None:
                return entry_point.dist.version, sys.executable
        return None, sys.executable

    return plugin_version
