# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Scores the final weights of every run in one BF16 vLLM engine, on the held-out data and with the reward of the job.

Run it as a program with a file that says what to score (:class:`Request`). Data set, chat template, lengths and reward
come from the composed configuration of a run, through verl's own functions, so a response is graded as in training. The
engine starts once, from the policy before training, and loads the weights of each run in place: runs differ only in
weights, not in kernels, batches or a restart. A response longer than the job allows is cut, as in training.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jetrl_verl.config.support.table import refusal
from jetrl_verl.tools.compare import CompareError
from jetrl_verl.tools.provenance import provenance

BEFORE = "before training"
"""Name of the row of the policy before training."""

_PACKAGES = ("verl", "vllm", "torch", "transformers")
_MARK = "evaluated "


@dataclass(frozen=True)
class Request:
    """What to score.

    Attributes:
        config: composed configuration of one run (Hydra's ``config.yaml``); runs differ only in the precision.
        checkpoints: run -> its final checkpoint, in any layout that ``jetrl export`` reads.
        before: whether to score the policy before training too.
        temperatures: 0 is greedy. samples: responses to a problem, one if greedy.
        out: receives ``<name>.json`` of each run, with ``settings``, ``build`` (tools/provenance.py) and ``scores``
            (temperature -> problem -> sample).
        seed: of the sampling, and of the choice of problems if ``data.val_max_samples`` leaves some out; the same for
            every run.
    """

    config: str
    checkpoints: dict[str, str]
    before: bool
    temperatures: tuple[float, ...]
    samples: int
    out: str
    seed: int = 1

    def settings(self, config: Any) -> dict[str, Any]:
        """What two evaluations must share to be comparable; ``config`` is the loaded configuration."""
        limit = config.data.get("val_max_samples", -1)
        return {
            "model": str(config.actor_rollout_ref.model.path),
            "data": _data_files(config),
            **({"val_max_samples": limit} if limit > 0 else {}),
            "temperatures": list(self.temperatures),
            "samples": self.samples,
            "seed": self.seed,
            "dtype": "bfloat16",
            "max_response_length": config.data.max_response_length,
            "versions": {name: metadata.version(name) for name in _PACKAGES},
        }


def load_config(path: str | Path) -> Any:
    """The composed configuration of a run, checked for what the evaluation needs.

    Raises:
        CompareError: the reward comes from a reward model, or there is no such file.
    """
    from omegaconf import OmegaConf

    if not Path(path).is_file():
        raise CompareError(
            f"The job did not write its composed configuration to {path}. Give a command that passes its last words on "
            "to verl, and do not set hydra.output_subdir=null."
        )
    config = OmegaConf.load(path)
    if OmegaConf.select(config, "reward.reward_model.enable") or OmegaConf.select(config, "reward_model.enable"):
        raise CompareError(refusal("reward_model_of_compare"))
    return config


def _data_files(config: Any) -> list[str]:
    from omegaconf import ListConfig

    files = config.data.val_files
    return [str(file) for file in files] if isinstance(files, list | ListConfig) else [str(files)]


def file_of(out: str | Path, name: str) -> Path:
    """Where the scores of ``name`` are written."""
    return Path(out) / f"{name.replace(' ', '_')}.json"


class Judge:
    """The job's held-out problems and its reward function.

    Attributes:
        prompts: token ids of each problem's prompt, as verl's agent loop makes them.
    """

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
        """Grade ``responses`` (problem -> sample -> token ids) as verl's validation does: ``acc`` where the reward
        function gives it, else the reward.
        """

        async def grade() -> list[dict[str, Any]]:
            items = [(problem, ids) for problem, samples in enumerate(responses) for ids in samples]
            return await asyncio.gather(*(self._manager.run_single(self._item(*item)) for item in items))

        graded = iter(self._manager.loop.run_until_complete(grade()))
        return [[_accuracy_of(next(graded)) for _ in samples] for samples in responses]

    def _item(self, problem: int, response: Sequence[int]) -> Any:
        """One response in the form that verl's reward managers read."""
        import copy

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


def _accuracy_of(result: dict[str, Any]) -> float:
    return float(result.get("reward_extra_info", {}).get("acc", result["reward_score"]))


class SeededWorker:
    """Worker extension of the engine. vLLM's seed per request is slow, and not supported on a CPU."""

    def seed_sampling(self, seed: int) -> None:
        """Start the stream of random numbers again from ``seed``."""
        import torch

        torch.manual_seed(seed)


class Engine:
    """One vLLM engine in BF16 whose weights are replaced in place."""

    def __init__(self, config: Any, prompts: Sequence[Sequence[int]]) -> None:
        from omegaconf import OmegaConf
        from vllm import LLM

        rollout = config.actor_rollout_ref.rollout
        self._response = config.data.max_response_length
        self._llm = LLM(
            config.actor_rollout_ref.model.path,
            tokenizer=config.actor_rollout_ref.model.get("tokenizer_path"),
            trust_remote_code=bool(config.actor_rollout_ref.model.get("trust_remote_code", False)),
            dtype="bfloat16",
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            # A job that sets the size of its cache shares the GPU, so the free memory is not its own.
            kv_cache_memory_bytes=OmegaConf.select(rollout, "engine_kwargs.vllm.kv_cache_memory_bytes"),
            enforce_eager=bool(rollout.enforce_eager),
            max_model_len=max(map(len, prompts)) + self._response,
            seed=0,
            worker_extension_cls="jetrl_verl.tools.compare.evaluate.SeededWorker",
        )

    def load(self, folder: Path) -> None:
        """Load the weights of a BF16 Hugging Face folder and drop the prefix cache of the weights before."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self._llm.reset_prefix_cache()

    def answer(
        self, prompts: Sequence[Sequence[int]], temperature: float, samples: int, seed: int
    ) -> list[list[list[int]]]:
        """Token ids of ``samples`` responses to each prompt, end of turn included; one where greedy.

        Equal weights give equal tokens.
        """
        from vllm import SamplingParams

        self._llm.collective_rpc("seed_sampling", args=(seed,))
        sampling = SamplingParams(
            n=samples if temperature else 1,
            temperature=temperature,
            max_tokens=self._response,
            detokenize=False,
        )
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(requests, sampling, use_tqdm=False)
        return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def evaluate(request: Request) -> None:
    """Score what ``request`` names and write one file per run.

    Raises:
        CompareError: the job cannot be scored, or some checkpoints cannot; all other checkpoints are scored first.
    """
    from jetrl_verl.checkpoint.export import ExportError, ExportOptions, export

    config = load_config(request.config)
    # verl draws the problems of data.val_max_samples with it, and the file has the seed of its run.
    config.data.seed = request.seed
    settings = request.settings(config)
    judge = Judge(config.copy())
    engine = Engine(config, judge.prompts)
    out = Path(request.out)
    out.mkdir(parents=True, exist_ok=True)

    def score(name: str) -> None:
        scores = {
            str(temperature): judge.scores(engine.answer(judge.prompts, temperature, request.samples, request.seed))
            for temperature in request.temperatures
        }
        file = file_of(out, name)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps({"settings": settings, "build": provenance(), "scores": scores}))
        unfinished.rename(file)
        print(f"{_MARK}{name}", flush=True)

    if request.before:
        score(BEFORE)
    damaged = []
    for name, checkpoint in request.checkpoints.items():
        folder = out / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            export(Path(checkpoint), folder, ExportOptions("bf16"))
            engine.load(folder)
        except (ExportError, OSError) as error:
            print(f"{name} is not scored: {error}", flush=True)
            damaged.append(name)
        else:
            score(name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if damaged:
        raise CompareError(f"{', '.join(damaged)} could not be scored. The lines above say why.")


def main(path: str) -> None:
    """Entry of the program; ``path`` names a JSON file with the fields of a request."""
    # With the scheduler in another process, timing decides which requests are in the first batches.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    evaluate(Request(**json.loads(Path(path).read_text())))


def write_request(request: Request, path: Path) -> None:
    """Write what :func:`main` reads."""
    path.write_text(json.dumps(asdict(request), indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
