# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Images in a real vLLM on the CPU: the tower's weights are sent and checked, text in the same steps agrees with the
trainer in all 32 bits, and an image's features, positions and deepstack are the trainer's but for rounding."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import vllm_engine
from PIL import Image
from streams import parts_of_model
from tiny_models import ALL, WITH_TOWER, save_policy

from jetrl_verl import kernels, models
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.train.shared_operations import TokenNumbers, share_operations

pytest.importorskip("torchvision", reason="transformers' processors of images and videos need it")

RULE = "fp32"
OPTIONS = JetConfig("jet_fp8", train="fp8", rollout="fp8", scale_rule=RULE, operations="shared")
TEXTS = ("12+34=46\n12+11", "1", "1<|vision_start|><|image_pad|><|vision_end|>+")
RESPONSE = 24


def log_probs(model, inputs: dict) -> torch.Tensor:
    """Of a sequence's tokens from the second on."""
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    numbers = TokenNumbers(("logits",), None, lambda logits, _: [logits])
    with torch.no_grad():
        logits = model(**inputs, token_numbers=numbers, use_cache=False).logits[0]
    following = inputs["input_ids"][0].roll(-1)[:, None]
    return kernels.log_probs(logits, following, torch.ones(len(following), device=logits.device))[:-1, 0].cpu()


def check(family: str, folder: Path, device: str = "cpu", **engine: Any) -> None:
    """Sync a model on a device twice and generate; ``engine``: further arguments of vLLM's."""
    from transformers import AutoProcessor
    from vllm import SamplingParams

    save_policy(folder, family, max_position_embeddings=256)
    processor = AutoProcessor.from_pretrained(folder)
    trainer = ALL[family][1].from_pretrained(folder, dtype=torch.bfloat16).to(device)
    replace_linears(trainer, plan_linears(trainer.config), scale_rule=RULE)
    share_operations(trainer, images=True)
    chance = numpy.random.RandomState(0)
    images = [Image.fromarray(chance.randint(0, 255, (64, 128, 3), dtype=numpy.uint8)) for _ in range(2)]
    with vllm_engine.cpu_settings():
        llm, worker = vllm_engine.start(
            folder,
            OPTIONS,
            images=True,
            load_format="dummy",
            skip_tokenizer_init=False,
            max_model_len=128,
            block_size=64,
            max_num_batched_tokens=64,
            limit_mm_per_prompt={"image": 1, "video": 0},
            logprobs_mode="processed_logprobs",
            **engine,
        )
        for _ in range(2):  # by vLLM's loaders, then by the map that the first one verified
            weights = trainer.state_dict().items()
            vllm_engine.sync(worker, parts_of_model(trainer, operations="shared", rule=RULE, weights=weights))
        prompts = [{"prompt_token_ids": processor.tokenizer(text)["input_ids"]} for text in TEXTS]
        prompts[-1]["multi_modal_data"] = {"image": images[0]}
        sampling = SamplingParams(max_tokens=RESPONSE, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        (response,) = output.outputs
        sampled = torch.tensor([e[t].logprob for e, t in zip(response.logprobs, response.token_ids, strict=True)])
        ids = torch.tensor([[*output.prompt_token_ids, *response.token_ids]])
        if "image" not in text:
            positions = torch.arange(ids.shape[1]).expand(4, 1, -1)
            assert torch.equal(log_probs(trainer, dict(input_ids=ids, position_ids=positions))[-RESPONSE:], sampled)
            continue
        errors = []
        for image in images:
            features = processor(text=[text], images=[image], return_tensors="pt")
            assert features["input_ids"][0].tolist() == list(output.prompt_token_ids)
            grid, kinds = features["image_grid_thw"], (ids == trainer.config.image_token_id).int()
            mask = torch.ones_like(ids)
            of_mrope, _ = trainer.model.get_rope_index(ids, kinds, image_grid_thw=grid, attention_mask=mask)
            positions = torch.cat([torch.arange(ids.shape[1])[None, None], of_mrope])
            pixels = dict(pixel_values=features["pixel_values"], image_grid_thw=grid)
            inputs = dict(input_ids=ids, position_ids=positions) | pixels
            errors.append((log_probs(trainer, inputs)[-RESPONSE:] - sampled).abs())
        # Of the sampled and of another image, in nats. A router may choose other experts for another rounding.
        right, wrong = (float(error.mean()) for error in errors)
        limit = 0.1 if models.family(trainer.config).experts else 0.05
        assert right < limit and right < wrong / 3, (right, wrong)


@pytest.mark.parametrize("family", WITH_TOWER)
def test_text_is_exact_next_to_images_which_are_close(family, tmp_path, cpu_platform):
    from vllm.distributed import cleanup_dist_env_and_memory

    check(family, tmp_path)
    cleanup_dist_env_and_memory()  # a mixture's engine needs a group that a dense model's has not made
