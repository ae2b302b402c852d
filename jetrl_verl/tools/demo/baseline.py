# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The mismatch that ``precision=fp8_rollout`` has on the policies of a run: ``python -m ... REQUEST``.

One vLLM engine samples from each policy in turn; the BF16 trainer scores the same tokens. Nothing is trained."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PRECISION = "fp8_rollout"
METRIC = "rollout_corr/k3_kl"


@dataclass(frozen=True)
class BaselineRequest:
    """What to measure.

    Attributes:
        policies: [(step, Hugging Face folder)], all of one architecture. prompts: verl's parquet file.
        limit: how many prompts. response: most tokens of a response.
        out: file that receives a line per policy, in the format of verl's ``file`` tracker.
    """

    policies: list[tuple[int, str]]
    prompts: str
    limit: int
    response: int
    out: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def measure(request: BaselineRequest) -> Iterator[tuple[int, float]]:
    """(step, k3_kl) of each policy: the mean over tokens of ``exp(d) - 1 - d``, ``d = log pi_train - log pi_rollout``.

    Raises:
        UserError: the precision does not support the model.
    """
    import torch

    from jetrl_verl.tools.diff.measures import Mismatch
    from jetrl_verl.tools.diff.prompts import read_prompts
    from jetrl_verl.tools.diff.recording import Recording
    from jetrl_verl.tools.diff.rollout import generate, load_weights, start_engine
    from jetrl_verl.tools.diff.run import compose_engine
    from jetrl_verl.tools.diff.trainer import Trainer

    first = Path(request.policies[0][1])
    cuda = torch.cuda.is_available()
    prompts = read_prompts(first, Path(request.prompts), request.limit)
    settings = compose_engine(first, PRECISION)
    changes = {"max_model_len": prompts.positions, "enforce_eager": True, "enable_prefix_caching": False}
    engine = settings.request(first, prompts, request.response, 1.0, **changes)
    llm, runner = start_engine(engine)
    for step, folder in request.policies:
        load_weights(runner, folder, settings.job)
        recording = generate(llm, engine)
        trainer = Trainer(folder, settings.job, prompts, 1.0, torch.device("cuda" if cuda else "cpu"))
        train = []
        for i in range(0, len(prompts.ids), 32):  # attention over a packed micro-batch is quadratic in its tokens
            part = Recording(recording.prompts[i : i + 32], recording.responses[i : i + 32], torch.empty(0))
            train.append(trainer.log_probs(part, lambda operation, output: output))
        yield step, Mismatch.of(torch.cat(train), recording.log_probs).k3_kl


def main(path: str) -> None:
    # The engine runs in this process, since its weights are replaced for each policy.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    request = BaselineRequest(**json.loads(Path(path).read_text()))
    with Path(request.out).open("w", buffering=1) as out:
        for step, k3_kl in measure(request):
            out.write(json.dumps({"step": step, "data": {METRIC: k3_kl}}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
