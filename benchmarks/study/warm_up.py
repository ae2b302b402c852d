# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The study's data and its policy: a Qwen3 of 28M parameters trained until it solves two of five problems.

Run it once, before any run: ``python3 -m benchmarks.study.warm_up --out DIR``. It writes ``DIR/{train,validation,test}
.parquet``, ``DIR/policy`` (a Hugging Face folder in BF16, 57 MB, small enough to carry between machines) and
``DIR/study.json``, which the other programs read. A finished folder is not changed. An interrupted warm-up resumes from
``DIR/warm_up.pt`` and takes the same steps as without the interruption: the number of a step determines its batch.
``--tiny`` makes a policy of a million parameters for short chains, in two minutes on a CPU.

Supervised on worked solutions alone, FP32 weights and AdamW, BF16 autocast on a GPU. It stops at a target instead of
after a number of steps, whose outcome would differ between machines. The target is the accuracy at temperature 1 on the
problems of the validation split, one sample each; stopping at the first crossing favours lucky samples, by at most 3
points. Sampling takes seconds, so it starts only when the mean probability of a whole worked solution, which needs one
forward, comes near the target. This is a lower bound, since other words may lead to the same answer, and a close one:
0.41 where 0.40 of the samples were right.

The policy is the exponential average of the weights over about 50 steps, not the last of them. At a constant learning
rate the last weights jitter around their mean. RL, at a hundredth of that rate, may first of all remove this jitter,
and that gain would say nothing about RL (docs/log/study.md, fourth window).

Every linear layer is a multiple of the FP8 block and the head dimension is 128, so each precision quantizes the same
seven linears of a layer and ``jet_fp8_exact`` covers every operation.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

from benchmarks.study import task
from jetrl_verl.tools import ToolError
from jetrl_verl.tools.demo.policy import PolicyConfig, build_model, build_tokenizer, save_policy
from jetrl_verl.tools.demo.warmup import encode, sampled_scores, solution_probability
from jetrl_verl.tools.launch import DEVICES, choose_device
from jetrl_verl.tools.provenance import provenance


class StudyError(ToolError):
    """The study cannot continue, and the user can fix the reason; the message says how."""


@dataclass(frozen=True)
class StudyConfig:
    """Everything that decides what the prepared folder holds.

    Attributes:
        policy: shape of the policy. levels: lengths of the chains, in equal shares.
        train, validation, test: problems of the RL run, of its curves, and of the verdict.
        target: sampled accuracy at which the warm-up stops; with ``levels`` the knob of difficulty.
        average: decay per step of the exponential average of the weights.
        max_steps: steps after which not having reached it is a failure.
        batch_size, lr, ramp_steps: of AdamW; the learning rate is constant after the ramp.
        check_every: steps between looks at the accuracy; save_every: between resumable states.
    """

    policy: PolicyConfig = field(
        default_factory=lambda: PolicyConfig(
            hidden_size=512, layers=8, heads=4, kv_heads=2, intermediate_size=1792, max_positions=1024
        )
    )
    levels: tuple[int, ...] = (6, 12, 18, 24)
    train: int = 8192
    validation: int = 256
    test: int = 2048
    target: float = 0.4
    average: float = 0.98
    max_steps: int = 6000
    batch_size: int = 128
    lr: float = 1e-3
    ramp_steps: int = 100
    check_every: int = 10
    save_every: int = 200
    seed: int = 7


TINY = StudyConfig(
    policy=PolicyConfig(), levels=(1, 2), train=64, validation=16, test=16, target=0.02, average=0.9, max_steps=800,
    batch_size=32, lr=2e-3, ramp_steps=20, check_every=20, save_every=100,
)  # fmt: skip
"""For a CPU and for tests: shows that everything runs, learns next to nothing."""


START = (0.3, 0.5)
"""Accuracies that runs may start from. Below, GRPO has little signal; above, BF16 may leave nothing to learn."""

_SAMPLE_FROM = 0.5
"""Share of the target that the probability of whole solutions must reach before the accuracy is sampled."""


class _Batches:
    """Encoded batch of each step, a function of the step's number alone."""

    def __init__(self, config: StudyConfig, tokenizer):
        self._config, self._tokenizer = config, tokenizer

    def __len__(self) -> int:
        return self._config.max_steps

    def __getitem__(self, step: int):
        config = self._config
        drawn = task.problems("warmup", config.batch_size, config.levels, f"{config.seed} {step}")
        return encode(drawn, self._tokenizer)


class WarmUp:
    """The supervised training: a model, its optimizer and the number of steps taken.

    Args:
        config: what to train on and how long.
        device: torch device.
    """

    def __init__(self, config: StudyConfig, device: str):
        import torch
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        self.config, self.device, self.step = config, torch.device(device), 0
        self.tokenizer = build_tokenizer()
        self.model = build_model(config.policy, self.tokenizer).to(self.device)
        self._average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(config.average))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)

    def train(self, steps: int) -> Iterator[float]:
        """Take steps until ``steps`` have been taken in all; yields each one's loss (mean over tokens, nat)."""
        import torch
        from torch.utils.data import DataLoader

        on_gpu = self.device.type == "cuda"
        batches = DataLoader(
            _Batches(self.config, self.tokenizer),
            batch_size=None,
            sampler=range(self.step, steps),
            num_workers=8 if on_gpu else 0,
            pin_memory=on_gpu,
        )
        self.model.train()
        for ids, labels in batches:
            for group in self._optimizer.param_groups:
                group["lr"] = self.config.lr * min(1.0, (self.step + 1) / self.config.ramp_steps)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
                loss = self.model(
                    input_ids=ids.to(self.device, non_blocking=True), labels=labels.to(self.device, non_blocking=True)
                ).loss
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
            self._average.update_parameters(self.model)
            self.step += 1
            yield loss.item()

    def policy(self):
        """A copy of the averaged model on the same device, with the BF16 weights that are saved."""
        import torch

        policy = deepcopy(self._average.module).eval()
        for parameter in policy.parameters():
            # Not the module: its rotary frequencies stay FP32, as in every process that loads the policy. In BF16 they
            # turn a head by 0.4 rad at position 300.
            parameter.data = parameter.data.to(torch.bfloat16)
        return policy

    def estimate(self, policy) -> dict[int, float]:
        """Level -> mean probability that ``policy`` gives the whole worked solution of a validation problem."""
        return {
            level: solution_probability(policy, ids, labels)
            for level, (ids, labels) in zip(self.config.levels, self._encoded)
        }

    def accuracy(self, policy) -> dict[int, float]:
        """Level -> accuracy of ``policy`` at temperature 1, one sample for each validation problem, from one seed."""
        levels, scores = self.config.levels, sampled_scores(policy, self.tokenizer, self._problems)
        return {level: fmean(scores[i :: len(levels)]) for i, level in enumerate(levels)}

    @cached_property
    def _problems(self) -> list[task.Problem]:
        return task.problems("validation", self.config.validation, self.config.levels, self.config.seed)

    @cached_property
    def _encoded(self) -> list[tuple]:
        """Ids and labels of each level."""
        count = len(self.config.levels)
        encoded = (encode(self._problems[i::count], self.tokenizer) for i in range(count))
        return [(ids.to(self.device), labels.to(self.device)) for ids, labels in encoded]

    def save(self, path: Path) -> None:
        """Write what :meth:`load` reads; an interruption leaves the file before."""
        import torch

        unfinished = path.with_suffix(".part")
        state = {"config": asdict(self.config), "step": self.step}
        parts = {"model": self.model, "average": self._average, "optimizer": self._optimizer}
        torch.save(state | {name: part.state_dict() for name, part in parts.items()}, unfinished)
        unfinished.rename(path)

    def load(self, path: Path) -> None:
        """Go on where :meth:`save` was called.

        Raises:
            StudyError: the file has another configuration.
        """
        import torch

        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["config"] != asdict(self.config):
            raise StudyError(f"{path} has another configuration. Delete it, or set another --out.")
        self.model.load_state_dict(state["model"])
        self._average.load_state_dict(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def read_facts(folder: Path) -> dict:
    """Contents of a prepared folder's ``study.json``.

    Raises:
        StudyError: the folder is incomplete.
    """
    file = folder / "study.json"
    if not file.is_file():
        raise StudyError(f"{file} does not exist. Run `python3 -m benchmarks.study.warm_up --out {folder}` first.")
    return json.loads(file.read_text())


def write_data(config: StudyConfig, folder: Path) -> None:
    """Write the three splits of the RL runs; disjoint from each other and from the warm-up's problems."""
    for split in ("train", "validation", "test"):
        rows = task.problems(split, getattr(config, split), config.levels, config.seed)
        task.write_parquet(rows, split, folder / f"{split}.parquet")


def _listed(found: Mapping[int, float]) -> str:
    return f"{fmean(found.values()):.3f} ({' '.join(f'{level}:{value:.2f}' for level, value in found.items())})"


def _facts_of(folder: Path, config: StudyConfig, option: str) -> dict:
    """As :func:`read_facts`; ``folder``, the value of ``option``, must have the configuration ``config``."""
    facts = read_facts(folder)
    if facts["config"] != _stated(config):
        raise StudyError(f"{folder} has another configuration of the warm-up. Set another {option}.")
    return facts


def check_start(folder: Path, config: StudyConfig) -> None:
    """Refuse a policy that runs must not start from.

    Raises:
        StudyError: ``folder`` is incomplete or has another configuration, or its policy is too good or too bad.
    """
    accuracy = fmean(_facts_of(folder, config, "--prepared")["accuracy"].values())
    if not START[0] <= accuracy <= START[1]:
        raise StudyError(
            f"The accuracy of the policy in {folder} is {accuracy:.2f}, not {START[0]} to {START[1]}. Change `target` "
            "or `levels` of the warm-up, and set another --prepared."
        )


def _stated(config: StudyConfig) -> dict:
    return json.loads(json.dumps(asdict(config)))


def train_until_right(training: WarmUp, state: Path) -> tuple:
    """Train until the policy reaches the target; returns the policy, and level -> accuracy.

    Writes ``state`` for :meth:`WarmUp.load` from time to time.

    Raises:
        StudyError: it did not reach it within ``max_steps``.
    """
    config = training.config
    for loss in training.train(config.max_steps):
        step = training.step
        if step % config.check_every == 0:
            policy = training.policy()
            whole = training.estimate(policy)
            words = [f"step {step} loss {loss:.4f} whole solutions {_listed(whole)}"]
            sampling = fmean(whole.values()) >= _SAMPLE_FROM * config.target
            if sampling:
                found = training.accuracy(policy)
                words.append(f"accuracy {_listed(found)}")
            print(*words, flush=True)
            if sampling and fmean(found.values()) >= config.target:
                return policy, found
        if step % config.save_every == 0:
            training.save(state)
    raise StudyError(
        f"The warm-up did not reach an accuracy of {config.target} in {config.max_steps} steps. Lower the target or "
        "the levels, or set more steps."
    )


def prepare(config: StudyConfig, out: Path, device: str) -> dict:
    """Fill ``out`` unless it is complete; returns the contents of its ``study.json``.

    Raises:
        StudyError: the folder has another configuration, or the target was not reached.
    """
    facts_file = out / "study.json"
    if facts_file.is_file():
        facts = _facts_of(out, config, "--out")
        print(f"{out} is complete")
        return facts
    out.mkdir(parents=True, exist_ok=True)
    write_data(config, out)

    started, state, training = time.monotonic(), out / "warm_up.pt", WarmUp(config, device)
    if state.is_file():
        training.load(state)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    print(f"{parameters:,} parameters, from step {training.step} until an accuracy of {config.target}", flush=True)
    policy, accuracy = train_until_right(training, state)
    save_policy(policy.cpu(), training.tokenizer, out / "policy")
    facts = {
        "build": provenance(),
        "config": _stated(config),
        "parameters": parameters,
        "steps": training.step,
        "seconds": round(time.monotonic() - started, 1),
        "accuracy": accuracy,
    }
    facts_file.write_text(json.dumps(facts, indent=1))
    state.unlink(missing_ok=True)
    return facts


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/study/prepared"))
    parser.add_argument("--device", choices=DEVICES, default="auto", help="cpu is for --tiny")
    parser.add_argument("--tiny", action="store_true", help="a policy of a million parameters for chains of 1 or 2")
    words = parser.parse_args()
    try:
        prepare(TINY if words.tiny else StudyConfig(), words.out, choose_device(words.device))
    except ToolError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
