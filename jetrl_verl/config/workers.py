# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Asks one Ray worker on each node, right after ``ray.init``, whether it can run the job: plugin, versions, GPUs.

Workers may run another interpreter than the driver (``py_executable``, other nodes). One without the plugin would fail
minutes later, or train in BF16 without a word. ``ray.init`` is wrapped because verl calls it inside ``run_ppo``, whose
running module, ``__main__``, cannot be patched.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jetrl_verl
from jetrl_verl.sources import sources_sha256

from .attention import FLASH_ATTENTION
from .hopper_kernels import CAPABILITY, missing
from .installed import installed_version, on_cpu
from .job import Job
from .support.limits import MIN_CAPABILITY, PINS, SHARED_CAPABILITY
from .support.table import refusal

_TIMEOUT_S = 600.0
"""A worker's first start may install its environment (``uv run``)."""


def install(job: Job | None = None) -> None:
    """Wrap ``ray.init``; doing it twice changes nothing. Exits the process where a worker does not fit.

    Args:
        job: says what GPUs it needs, and what a node without the Hopper kernels costs it; None as for
            :func:`complaint_about`, and for no word about kernels.
    """
    import ray

    if ray.is_initialized():
        check_workers(job)
        return
    if getattr(ray.init, "_jetrl_wrapped", False):
        return
    original = ray.init

    @functools.wraps(original)
    def init_then_check(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        check_workers(job)
        return context

    init_then_check._jetrl_wrapped = True
    ray.init = init_then_check


def check_workers(job: Job | None = None) -> None:
    """Start one worker per living node in the job's runtime environment; exit with one sentence unless all fit.

    Where they do, one line on stderr names the nodes with Hopper GPUs and without the kernels for them.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = ray.remote(num_cpus=0, max_retries=0)(_probe())
    answers = {}
    for node in ray.nodes():
        if node["Alive"]:
            pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answer = probe.options(scheduling_strategy=pinned).remote()
            answers[node["NodeManagerAddress"]] = answer, node["Resources"]
    replies = {}
    for address, (answer, resources) in answers.items():
        try:
            reply = replies[address] = ray.get(answer, timeout=_TIMEOUT_S)
            if not resources.get("GPU"):  # whatever is in that machine, Ray places no worker of verl's on it
                reply["capabilities"] = []
            complaint = complaint_about(reply, job) or gpu_complaint(reply, resources, job)
        except ray.exceptions.GetTimeoutError:
            complaint = f"no Ray worker started there within {_TIMEOUT_S:.0f} s; check `ray status`"
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            complaint = f"a Ray worker could not start there ({type(error).__name__}: {reason}); check py_executable"
        if complaint:
            sys.exit(f"jetrl_verl: node {address}: {complaint}.")
    if job is not None and (line := missing(job.options, without_kernels(replies))):
        print(line, file=sys.stderr, flush=True)


def without_kernels(answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Nodes that have a Hopper GPU and lack the kernels for it.

    Args:
        answers: address of a node -> answer of :func:`_probe`'s function there.
    """
    return [
        address
        for address, answer in answers.items()
        if CAPABILITY in map(tuple, answer["capabilities"]) and not answer["kernels"]
    ]


def complaint_about(answer: dict[str, Any], job: Job | None = None) -> str:
    """What keeps a worker's environment from this job, and what to do; empty if nothing does.

    Args:
        answer: of a worker on the node, see :func:`answer_here`.
        job: None asks for what this process has installed, as ``jetrl doctor`` does.
    """
    where = f"the Ray workers' interpreter {answer['interpreter']}"
    mine = jetrl_verl.__version__
    if answer["plugin"] != mine:
        has = "does not have the plugin installed" if answer["plugin"] is None else f"has jetrl-verl {answer['plugin']}"
        return (
            f"the driver runs jetrl-verl {mine}, but {where} {has}; install the driver's version in that environment: "
            "`uv pip install -e /path/to/jetrl_verl`, or `uv run --with-editable /path/to/jetrl_verl ...` as both the "
            "command and ray_kwargs.ray_init.runtime_env.py_executable"
        )
    source = sources_sha256()[:12]
    if answer["source"] != source:
        return (
            f"the driver runs jetrl-verl {mine} with source {source}, but {where} has source {answer['source']} of "
            "that version; install the driver's in that environment"
        )
    versions = {package: installed_version(package) for package in PINS} if job is None else job.versions
    for package, version in versions.items():
        if answer["versions"].get(package) != version:
            return (
                f"the driver runs {package} {version}, but {where} has {answer['versions'].get(package)}; "
                "install the same version on every node"
            )
    if not answer["vllm_plugin"]:
        return f"{where} lacks the entry point that vLLM loads the plugin by; install jetrl_verl there again"
    names = answer["vllm_plugins_filter"]
    if names is not None and "jetrl" not in [name.strip() for name in names.split(",")]:
        return f"VLLM_PLUGINS={names} keeps vLLM from loading the plugin; unset it, or add jetrl to it"
    return ""


def gpu_complaint(answer: dict[str, Any], resources: Mapping[str, float], job: Job | None = None) -> str:
    """What keeps a node's GPUs from this job, and what to do; empty where Ray gives out none, or verl runs on CPUs.

    Args:
        answer: as in :func:`complaint_about`. resources: of the node, as Ray names them.
        job: None asks for what ``jet_fp8`` needs with stock operations.
    """
    precision = "jet_fp8" if job is None else job.options.precision
    if resources.get("NPU"):
        return refusal("npu", precision=precision).removesuffix(".")
    if on_cpu() or not resources.get("GPU"):
        return ""
    if any(name.startswith("accelerator_type:AMD") for name in resources):
        return refusal("rocm", precision=precision).removesuffix(".")
    for capability in map(tuple, answer["capabilities"]):
        gpu = f"a GPU of compute capability {capability[0]}.{capability[1]}"
        if capability < MIN_CAPABILITY:
            return refusal("gpu_without_fp8", precision=precision, what=gpu).removesuffix(".")
        if job is not None and job.shared and capability != SHARED_CAPABILITY:
            return refusal("gpu_other_than_hopper", what=gpu).removesuffix(".")
        if job is not None and job.cache.quantized and capability != SHARED_CAPABILITY:
            return refusal("gpu_of_an_fp8_cache", what=gpu).removesuffix(".")
    if job is not None and job.shared and not answer["flash_attention_3"]:
        return refusal("no_flash_attention_3").removesuffix(".")
    if job is not None and job.flash_attention and not answer["flash_attn"]:
        why = "it is installed in the driver's environment, and not there"
        return refusal("attention_package", precision=precision, what=FLASH_ATTENTION, why=why).removesuffix(".")
    return ""


def answer_here() -> dict[str, Any]:
    """The answer of this process."""
    return _probe()()


def _probe() -> Callable[[], dict[str, Any]]:
    """The question, as a nested function: Ray ships those by value, so a worker without this package can run it."""

    def describe_worker() -> dict[str, Any]:
        import importlib.util
        import os
        import sys
        from importlib import metadata
        from pathlib import Path

        def source_sum() -> str | None:
            """Two checkouts may call themselves one version, and PYTHONPATH may shadow what is installed."""
            try:
                from jetrl_verl.sources import sources_sha256
            except ImportError:  # no package, or one from before this module
                return None
            return sources_sha256()[:12]

        def kernels_are_there() -> bool:
            """Whether the package has the library of csrc/."""
            spec = importlib.util.find_spec("jetrl_verl")
            return spec is not None and (Path(spec.origin).parent / "kernels" / "libjetrl_sm90.so").is_file()

        def flash_attention_3_is_there() -> bool:
            """Looked up as a file: importing the library is slow and may touch a GPU."""
            spec = importlib.util.find_spec("vllm")
            return spec is not None and any(Path(spec.origin).parent.glob("vllm_flash_attn/_vllm_fa3_C*"))

        def version(package: str) -> str | None:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                return None

        def entry_point(group: str) -> metadata.EntryPoint | None:
            return next(iter(metadata.entry_points(group=group, name="jetrl")), None)

        # The entry point, not the package, is what verl loads: a package that is merely importable would do nothing.
        verl_plugin = entry_point("verl.plugins")
        try:
            # Asked of the driver's library, since the question must not take a GPU.
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            capabilities = sorted({tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles})
        except Exception:
            capabilities = []
        return {
            "interpreter": sys.executable,
            "source": source_sum(),
            "plugin": None if verl_plugin is None or verl_plugin.dist is None else verl_plugin.dist.version,
            "versions": {package: version(package) for package in ("verl", "vllm", "torch", "transformers")},
            "vllm_plugin": entry_point("vllm.general_plugins") is not None,
            "vllm_plugins_filter": os.environ.get("VLLM_PLUGINS"),
            "capabilities": capabilities,
            "flash_attention_3": flash_attention_3_is_there(),
            "flash_attn": bool(version("flash-attn") or version("kernels")),
            "kernels": kernels_are_there(),
        }

    return describe_worker
