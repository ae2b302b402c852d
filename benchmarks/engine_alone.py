# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Measure the rollout of a run without verl: its vLLM engine in a process of its own generates the run's responses.

    python3 -m benchmarks.engine_alone RUN/hydra/.hydra/config.yaml --steps 3    # a run of verl that has ended

*Arguments* are those with which verl starts vLLM, from its own ``launch_server``, stopped where the server would start.
*Prompts* are those of the run's steps, through verl's dataset, sampler and chat template, each repeated as the rollout
samples it; their lengths are printed, to be compared with those that the run logged. *Sampling* is the run's, without
detokenizing.

The first step warms the engine up with a few tokens of each response. Each further step is timed from an empty prefix
cache, as after verl's weight sync. Of several replicas one runs, with its share of the sequences. Weights are vLLM's
dummy ones: their size takes time, not their values.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

WARM_TOKENS = 16
"""Of a response in the first generation, which compiles."""


def load(path: Path) -> Any:
    """A run's composed configuration, all references resolved, as verl's own trainer has it."""
    from omegaconf import OmegaConf

    config = OmegaConf.load(path)
    OmegaConf.resolve(config)
    return config


def replicas(config: Any) -> int:
    """How many engines the rollout has."""
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    return gpus // config.actor_rollout_ref.rollout.tensor_model_parallel_size


def engine_arguments(config: Any) -> argparse.Namespace:
    """vLLM's command line, parsed, as verl's server of the first replica gives it to vLLM."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    class StoppedServer(vLLMHttpServer):
        """verl's server up to the call that starts vLLM; the actor around it needs Ray."""

        def __init__(self) -> None:
            self.config = self._init_config(config.actor_rollout_ref.rollout)
            self.model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
            self._validate_configs()
            self.replica_rank = self.node_rank = 0
            self.nnodes, self.gpus_per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
            self.workers = [None] * self.config.tensor_model_parallel_size
            self._disaggregation_role = "null"

        def _should_profile(self) -> bool:
            return False

        async def run_server(self, args: argparse.Namespace) -> None:
            self.arguments = args

    server = StoppedServer()
    asyncio.run(server.launch_server())
    return server.arguments


def prompts_of(config: Any, steps: int) -> Iterator[list[list[int]]]:
    """Token ids of each step's prompts, in verl's order: its data loader's, which with workers draws another one."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.dataset.rl_dataset import collate_fn
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    limit = config.data.get("train_max_samples", -1)
    dataset = create_rl_dataset(config.data.train_files, config.data, model.tokenizer, model.processor, True, limit)
    builder = create_continuous_token_builder(
        model.tokenizer,
        hf_model_type=model.hf_config.model_type,
        chat_template_kwargs=config.data.get("apply_chat_template_kwargs", {}),
        processor=model.processor,
    )
    loader = StatefulDataLoader(
        dataset,
        config.data.train_batch_size,
        num_workers=config.data.dataloader_num_workers,
        drop_last=True,
        collate_fn=collate_fn,
        sampler=create_rl_sampler(config.data, dataset),
    )
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for batch in itertools.islice(epochs, steps):
        ids = (list(builder.build_initial_tokens(list(row))) for row in batch["raw_prompt"])
        yield [prompt[-config.data.max_prompt_length :] for prompt in ids]


def lengths_of(prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Mean, longest and shortest prompt, by verl's names."""
    lengths = [len(prompt) for prompt in prompts]
    return {"mean": statistics.fmean(lengths), "max": max(lengths), "min": min(lengths)}


def sampling_of(config: Any, prompt: Sequence[int], most: float = float("inf")) -> Any:
    """The run's sampling of one response (agent_loop_tq.py and vllm_async_server.py of verl), ``most`` tokens of it."""
    from vllm import SamplingParams

    rollout, data = config.actor_rollout_ref.rollout, config.data
    room = data.max_prompt_length + data.max_response_length - len(prompt)
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        repetition_penalty=1.0,
        logprobs=0 if rollout.calculate_log_probs else None,
        ignore_eos=rollout.ignore_eos,
        max_tokens=int(min(data.max_response_length, room, most)),
        detokenize=False,
    )


def start(config: Any) -> "LLM":
    """The engine, as verl has it before its first weight sync."""
    from verl.plugin.platform import get_platform
    from verl.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV

    # What verl gives its actors; vLLM reads it when it is imported. What is set already wins, as in verl.
    for name, value in {**PPO_RAY_RUNTIME_ENV["env_vars"], **get_platform().rollout_env_vars()}.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, EngineArgs

    llm = LLM.from_engine_args(EngineArgs.from_cli_args(engine_arguments(config)))
    # Entries of the vocabulary without a token: verl's server masks them in the same way.
    words = {"vocab_size": len(llm.get_tokenizer()), "banned_token_ids": []}
    llm.collective_rpc("monkey_patch_model", kwargs=words)
    return llm


def measure(path: Path, steps: int) -> None:
    """Generate each step's responses and print a line of JSON for each step after the first."""
    config = load(path)
    prompts_of_steps = list(prompts_of(config, steps))  # before the engine, since the loader's workers are forks
    llm, share = start(config), replicas(config)
    for step, prompts in enumerate(prompts_of_steps, start=1):
        sequences = [prompt for prompt in prompts for _ in range(config.actor_rollout_ref.rollout.n)][::share]
        warms_up = step == 1 and steps > 1
        sampling = [sampling_of(config, prompt, WARM_TOKENS if warms_up else float("inf")) for prompt in sequences]
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in sequences], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if not warms_up:
            result = {"step": step, "prompt_length": lengths_of(prompts), "replicas": share}
            print(json.dumps(result | {"tokens_per_s": share * tokens / seconds}), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a run's composed configuration")
    parser.add_argument("--steps", type=int, default=3, help="of the run; the first one warms up")
    options = parser.parse_args(words)
    measure(options.config, options.steps)


if __name__ == "__main__":
    main()
