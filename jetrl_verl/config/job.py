# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a run is, as one frozen object. ``composition.resolve`` makes it on the driver; workers, trainer, rollout and
tools rebuild it from the ``jetrl`` node. Imports neither torch nor verl nor vLLM.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from jetrl_verl.formats.catalog import UNQUANTIZED, CacheTraits, cache_traits

from .options import JetConfig

if TYPE_CHECKING:
    from jetrl_verl.models.plan import LinearPlan

ROLLOUT_OPTIONS = ("precision", "scale_rule", "unfit_layers", "contract_check", "operations", "reduction", "kv_cache")
"""Options that travel to vLLM, inside its ``quantization_config``."""


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        options: of the run; ``operations`` is ``stock`` or ``shared``.
        inexact: why the log-probabilities of the two sides of FP8 training differ, a sentence with the remedy each.
        rollout_ranks: tensor-parallel size of the rollout; with a model's shapes it decides which layers fit.
        versions: installed release of each pinned package, on the driver.
        flash_attention: whether a model of the trainer runs flash-attn.
        bucket_megabytes: of the weight sync's transport, in MiB.
        overrides: fields of the model's configuration that the job overrides in both, trainer and rollout.
        images: whether samples may have images, so that the vision tower runs, is trained and sent.
    """

    options: JetConfig
    inexact: tuple[str, ...] = ()
    rollout_ranks: int = 1
    versions: Mapping[str, str | None] = field(default_factory=dict)
    flash_attention: bool = False
    bucket_megabytes: int = 2048
    overrides: Mapping[str, Any] = field(default_factory=dict)
    images: bool = False

    @classmethod
    def of(cls, node: "Mapping[str, Any] | Job | None") -> "Job":
        """The job of a resolved ``jetrl`` node; nothing is validated again. A ``Job`` is returned as it is.

        Raises:
            ValueError: there is no node, or ``composition.resolve`` never read it.
        """
        if isinstance(node, Job):
            return node
        # If each process decided on `auto`, the two sides could differ.
        if node is None or "job" not in node or "auto" in (node["operations"], node["backward"]):
            raise ValueError(
                "the jetrl node is absent or was not resolved; call jetrl_verl.config.composition.resolve first."
            )
        options = JetConfig(**{option.name: node[option.name] for option in fields(JetConfig)})
        facts = OmegaConf.to_container(OmegaConf.create(dict(node["job"])))
        return cls(options, **(facts | {"inexact": tuple(facts["inexact"])}))

    def as_dict(self) -> dict[str, Any]:
        """The ``jetrl`` node: the options, and the rest under ``job``, as plain Python values."""
        facts = {**asdict(self), "inexact": list(self.inexact)}
        return {**facts.pop("options"), "job": facts}

    @property
    def shared(self) -> bool:
        """Whether the actor and the rollout run the shared operations."""
        return self.options.operations == "shared"

    @property
    def exact(self) -> bool:
        """Whether the run stops where a log-probability of the two sides differs in a bit."""
        return self.options.precision == "jet_fp8_exact"

    @property
    def bit_equal(self) -> bool:
        """Whether the log-probabilities of all tokens that the current policy samples agree in every bit."""
        return self.shared and self.options.train != UNQUANTIZED and not self.inexact

    @property
    def cache(self) -> CacheTraits:
        """The rollout's KV cache."""
        return cache_traits(self.options.kv_cache)

    def quantizes(self, role: str) -> bool:
        """Whether the linear layers of the ``actor``, ``ref`` or ``critic`` run in the format of the flow."""
        return getattr(self.options, "train" if role == "actor" else role) != UNQUANTIZED

    def plans(self, model: Any, role: str = "actor") -> "dict[str, LinearPlan]":
        """Which linear layers of a model are quantized; the actor's are those of the rollout. See ``plan_linears``.

        Args:
            model: Hugging Face configuration, object or mapping. role: ``actor``, ``ref`` or ``critic``.
        """
        from jetrl_verl.models.plan import plan_linears

        return plan_linears(
            model,
            1 if role == "critic" else self.rollout_ranks,
            unfit_layers=self.options.unfit_layers,
            format_name=self.options.rollout if role == "actor" else getattr(self.options, role),
        )

    def for_vllm(self) -> dict[str, Any]:
        """What vLLM's quantization method reads, as plain values."""
        return {name: getattr(self.options, name) for name in ROLLOUT_OPTIONS}

    def facts(self) -> dict[str, str]:
        """What runs, for reports: the precision is a preset, whose options the user may have changed."""
        names = ("precision", "train", "rollout", "operations")
        inexact = {"exactness is OFF": " ".join(self.inexact)} if self.inexact else {}
        return {name: getattr(self.options, name) for name in names} | inexact
