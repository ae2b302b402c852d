# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of the driver's machine before Ray starts: versions, patches, optimizers, models and data files.

What is not supported is a row of ``support/machine.py``; what the workers' machines are, ``workers`` asks.
"""

from importlib.util import find_spec

from packaging.version import InvalidVersion, Version

from .attention import check_attention_package
from .data import find_media
from .job import Job
from .model import check_models
from .support.limits import PINS, RELEASES
from .support.row import Get
from .support.scopes import OPTIMIZERS
from .support.table import refuse


def check_environment(job: Job, get: Get) -> None:
    """Raise ``UnsupportedConfiguration`` (one sentence) if this machine cannot run a job of a composed config."""
    check_versions(job)
    check_patches(job)
    for key in OPTIMIZERS:
        check_optimizer(job, key, get(key))
    check_attention_package(job.options.precision, get)
    check_models(job, get)
    if media := find_media(get, images=False):
        refuse("videos", precision=job.options.precision, what=media)
    # A dataset class of the user's reads images as it likes.
    if job.images and get("data.custom_cls.path") is None and find_spec("qwen_vl_utils") is None:
        refuse("image_package", precision=job.options.precision, what="samples with images without qwen-vl-utils")


def is_pinned(package: str, version: str) -> bool:
    """Whether a version is of ``RELEASES``; one that cannot be read is not."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return False
    return any(release[: len(wanted)] == wanted for wanted in (Version(pin).release for pin in RELEASES[package]))


def check_versions(job: Job) -> None:
    """Compare the installed packages with ``PINS``."""
    precision = job.options.precision
    for package, pin in PINS.items():
        installed = job.versions[package]
        if installed is None:
            what, remedy = f"an environment without {package}", f"Set up {package} {pin}"
            refuse("missing_package", precision=precision, what=what, remedy=remedy)
        if not is_pinned(package, installed):
            why = f"it works with {package} {pin} (docs/upgrade.md says what others change)"
            remedy = f"Set up {package} {pin}, or precision=bf16"
            refuse("version", precision=precision, what=f"{package} {installed}", why=why, remedy=remedy)


def check_optimizer(job: Job, key: str, module: str | None) -> None:
    """Refuse an optimizer whose package is not installed: a worker would only find out after loading the model."""
    package = (module or "torch").partition(".")[0]
    if find_spec(package) is None:
        why, remedy = f"{package} is not installed", f"Install {package}"
        refuse("optimizer_package", precision=job.options.precision, key=key, value=module, why=why, remedy=remedy)


def check_patches(job: Job) -> None:
    """Refuse a modified verl or vLLM that a required patch cannot be applied to."""
    from jetrl_verl.patches import installed_states
    from jetrl_verl.patches.patch import PATCHED, STOCK

    for patch, state in installed_states():
        if patch.needed and state not in (STOCK, PATCHED):
            mismatch = patch.mismatch(state).rpartition(". Install ")[0]
            remedy = f"Set up {patch.pinned}, or precision=bf16"
            what = f"the installed {patch.project}"
            refuse("patch", precision=job.options.precision, what=what, why=mismatch, remedy=remedy)
