# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Scores the final weights of every run in one BF16 vLLM engine, on the held-out data and with the reward of the job.

A program whose argument is the JSON file of a :class:`Request`. Prompts, lengths and reward come from verl's own code.
"""

import asyncio
import copy
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl_verl.config.support.table import refusal
from jetrl_verl.inputs import UserError, reading
from jetrl_verl.rollout.arguments import HYBRID
from jetrl_verl.tools.provenance import provenance


@dataclass(frozen=True)
class Request:
    """What to score.

    ``config``: composed configuration of one run, Hydra's ``config.yaml``. ``policies``: name -> checkpoint in a layout
    that ``jetrl export`` reads (None: the policy before training, which comes first), JSON file that receives the
    scores. ``seed``: of the sampling and the choice of problems.
    """

    config: str
    policies: dict[str, tuple[str | None, str]]
    temperature: float
    samples: int
    seed: int = 1


def load_config(path: str | Path) -> Any:
    """The composed configuration of a run. ``UserError`` if it is missing or the reward comes from a model."""
    from omegaconf import OmegaConf

    if not Path(path).is_file():
        raise UserError(
            f"The job did not write its composed configuration to {path}. Give a command that passes its last words on "
            "to verl, and do not set hydra.output_subdir=null."
        )
    with reading(path, "composed configuration of a run", "Delete the folder of the run and start again"):
        config = OmegaConf.load(path)
    if OmegaConf.select(config, "reward.reward_model.enable") or OmegaConf.select(config, "reward_model.enable"):
        raise UserError(refusal("reward_model_of_compare"))
    return config


class Judge:
    """Held-out problems and reward function of the job; ``prompts`` are token ids as verl's agent loop makes them."""

    def __init__(self, config: Any) -> None:
        from verl.experimental.reward_loop.reward_loop import migrate_legacy_reward_impl
        from verl.trainer.ppo.reward import load_reward_manager
        from verl.trainer.ppo.utils import create_rl_dataset
        from verl.utils import hf_tokenizer
        from verl.utils.fs import copy_to_local

        config = migrate_legacy_reward_impl(config)
        model = config.actor_rollout_ref.model
        trust = bool(model.get("trust_remote_code", False))
        self.tokenizer = hf_tokenizer(copy_to_local(model.get("tokenizer_path") or model.path), trust_remote_code=trust)
        if model.get("custom_chat_template") is not None:
            self.tokenizer.chat_template = model.custom_chat_template
        limit = config.data.get("val_max_samples", -1)
        dataset = create_rl_dataset(config.data.val_files, config.data, self.tokenizer, None, False, limit)
        self.rows = [dataset[i] for i in range(len(dataset))]
        template = dict(config.data.get("apply_chat_template_kwargs") or {})
        self.prompts = [
            self.tokenizer.apply_chat_template(
                row["raw_prompt"], add_generation_prompt=True, tokenize=True, return_dict=False, **template
            )
            for row in self.rows
        ]
        self._manager = load_reward_manager(config, self.tokenizer)

    def scores(self, responses: Sequence[Sequence[Sequence[int]]]) -> list[list[float]]:
        """Grade ``responses`` (problem -> sample -> token ids) as verl does: ``acc`` if given, else the reward."""

        async def grade() -> list[dict[str, Any]]:
            items = [(problem, ids) for problem, samples in enumerate(responses) for ids in samples]
            return await asyncio.gather(*(self._manager.run_single(self._item(*item)) for item in items))

        results = self._manager.loop.run_until_complete(grade())
        scores = iter([float(r.get("reward_extra_info", {}).get("acc", r["reward_score"])) for r in results])
        return [[next(scores) for _ in samples] for samples in responses]

    def _item(self, problem: int, response: Sequence[int]) -> Any:
        """One response in the form that verl's reward managers read."""
        import numpy as np
        import torch
        from verl.protocol import DataProto

        prompt = torch.tensor([self.prompts[problem]])
        ids = torch.tensor([list(response)])
        # Reward managers write into extra_info.
        row = copy.deepcopy({key: value for key, value in self.rows[problem].items() if key != "dummy_tensor"})
        others = {key: np.array([value, None], dtype=object)[:1] for key, value in row.items()}
        mask = torch.ones(1, prompt.shape[1] + ids.shape[1], dtype=torch.long)
        return DataProto.from_dict({"prompts": prompt, "responses": ids, "attention_mask": mask}, others)


class SeededWorker:
    """Worker extension of the engine. vLLM's seed per request is slow, and not supported on a CPU."""

    def seed_sampling(self, seed: int) -> None:
        """Restart the stream of random numbers from ``seed``."""
        import torch

        torch.manual_seed(seed)


class Engine:
    """One vLLM engine in BF16 whose weights are replaced in place, so runs differ in nothing else."""

    def __init__(self, config: Any, prompts: Sequence[Sequence[int]]) -> None:
        from omegaconf import OmegaConf
        from vllm import LLM

        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        self._response = config.data.max_response_length
        self._prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        self._llm = LLM(
            model.path,
            tokenizer=model.get("tokenizer_path"),
            trust_remote_code=bool(model.get("trust_remote_code", False)),
            dtype="bfloat16",
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            # A job that sets the size of its cache shares the GPU, so the free memory is not its own.
            kv_cache_memory_bytes=OmegaConf.select(rollout, "engine_kwargs.vllm.kv_cache_memory_bytes"),
            enforce_eager=bool(rollout.enforce_eager),
            enable_prefix_caching=bool(rollout.enable_prefix_caching),
            max_model_len=max(map(len, prompts)) + self._response,
            seed=0,
            worker_extension_cls="jetrl_verl.tools.compare.evaluate.SeededWorker",
            language_model_only=True,  # a vision tower needs a processor, and the problems are text
            **HYBRID,
        )

    def load(self, folder: Path) -> None:
        """Load the weights of a BF16 Hugging Face folder and drop the prefix cache of the weights before."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self._llm.reset_prefix_cache()

    def answer(self, temperature: float, samples: int, seed: int) -> list[list[list[int]]]:
        """Token ids of ``samples`` responses to each prompt, end of turn included. Equal weights give equal tokens."""
        from vllm import SamplingParams

        self._llm.collective_rpc("seed_sampling", args=(seed,))
        sampling = SamplingParams(n=samples, temperature=temperature, max_tokens=self._response, detokenize=False)
        outputs = self._llm.generate(self._prompts, sampling, use_tqdm=False)
        return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def evaluate(request: Request) -> None:
    """Score the policies of ``request``. ``UserError`` if some cannot be scored; all others are scored first."""
    from jetrl_verl.checkpoint.export import ExportOptions, export

    config = load_config(request.config)
    # verl draws the problems of data.val_max_samples with it, and the file has the seed of its run.
    config.data.seed = request.seed
    judge = Judge(config.copy())
    engine = Engine(config, judge.prompts)
    unscored = []
    for name, (checkpoint, file) in request.policies.items():
        weights, unfinished = Path(file).with_suffix(".weights"), Path(file).with_suffix(".part")
        try:
            if checkpoint is not None:
                shutil.rmtree(weights, ignore_errors=True)
                export(Path(checkpoint), weights, ExportOptions("bf16"))
                engine.load(weights)
        except UserError as error:
            print(f"{name} is not scored: {error}", flush=True)
            unscored.append(name)
            continue
        finally:
            shutil.rmtree(weights, ignore_errors=True)
        scores = judge.scores(engine.answer(request.temperature, request.samples, request.seed))
        unfinished.write_text(json.dumps({"build": provenance(), "scores": scores}))
        unfinished.rename(file)
        print(f"{name} is scored", flush=True)
    if unscored:
        raise UserError(f"{', '.join(unscored)} could not be scored. The lines above say why.")


def main(path: str) -> None:
    """Entry of the program; ``path`` is a JSON file with the fields of a request."""
    # With the scheduler in another process, timing decides which requests are in the first batches.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    evaluate(Request(**json.loads(Path(path).read_text())))


if __name__ == "__main__":
    main(sys.argv[1])
