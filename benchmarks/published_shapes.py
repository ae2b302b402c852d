# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Models of a published shape with random weights, and raw data in a published format: what a recipe needs, made here.

    python3 -m benchmarks.published_shapes model qwen3_8b FOLDER [--layers 8] [--ends 1024] [--tiny]
    python3 -m benchmarks.published_shapes data gsm8k FOLDER [--rows 64]

A model has the dimensions, heads, rotary settings and vocabulary of its namesake, and as many tokens: entries of the
vocabulary without a token are part of what has to agree between trainer and rollout. The tokenizer writes text byte by
byte (no merges were learnt), and its other tokens decode to words that no encoder produces, so a prompt is three to
four times as long as the namesake's and a random policy's response is text. Chat markup and special tokens are the
family's. A random policy hardly ever ends a response, so all responses have the length that the job allows. With
``--ends N`` every N-th token of the vocabulary ends one (``eos_token_id`` of ``generation_config.json``, a list): their
lengths then spread about N as those of a policy that answers do.

Data are made-up problems in the raw format of each data set, for ``recipes/*/prepare_data.py --local-dir``.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

NARROW = dict(hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=1, vocab_size=1024)
"""A layer as thin as the formats allow, with heads of 128. Three widths, as in real layers: what is equally wide goes
through a weight sync together."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<｜User｜>' if message.role == 'user' else '<｜Assistant｜>' }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION_SPECIAL = (
    *QWEN_SPECIAL,
    *(f"<|{place}_{end}|>" for place in ("object_ref", "box", "quad", "vision") for end in ("start", "end")),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
R1_SPECIAL = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>")
LLAMA_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")


@dataclass(frozen=True)
class Published:
    """A model's published configuration.

    Attributes:
        config: name of its class in transformers. fields: what its ``config.json`` says of shapes and positions.
        words, tokens: entries of the tokenizer without and with special ones; ``special`` come right after the words.
        bos, eos, pad: of ``special``. chat: template, None where the published tokenizer has none.
        tower: what ``config.json`` says of the vision tower, and ``fields`` are then the text's; None without one.
        processor: whether the processor of images is written, without which verl takes no model of the family.
    """

    config: str
    fields: dict[str, Any]
    words: int
    tokens: int
    special: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str
    chat: str | None
    tower: dict[str, Any] | None = None
    processor: bool = False


def _qwen3(**fields: Any) -> Published:
    heads = dict(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    positions = dict(max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6)
    every = {"vocab_size": 151936, **heads, **positions, **fields}
    return Published("Qwen3Config", every, 151643, 151669, QWEN_SPECIAL, None, "<|im_end|>", "<|endoftext|>", CHATML)


def _qwen3_moe(**fields: Any) -> Published:
    """128 experts, 8 a token, 3/8 of the hidden size wide; twice the hidden size in the heads of q."""
    experts = dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1)
    dense = _qwen3(**experts, tie_word_embeddings=False, router_aux_loss_coef=0.001, **fields)
    return Published(**{**vars(dense), "config": "Qwen3MoeConfig"})


def _qwen2_5(eos: str, **fields: Any) -> Published:
    every = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, **fields}
    return Published("Qwen2Config", every, 151643, 151665, QWEN_SPECIAL, None, eos, "<|endoftext|>", CHATML)


def _qwen3_5(tower: dict[str, Any], **fields: Any) -> Published:
    """Three layers with a delta net, then one with attention; rotary over a quarter of heads of 256."""
    heads = dict(num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4, head_dim=256)
    linear = dict(linear_num_key_heads=16, linear_num_value_heads=32, full_attention_interval=4)
    linear |= dict(linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4)
    rotary = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
    rotary |= dict(mrope_section=[11, 11, 10], mrope_interleaved=True)
    every = {"vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, **heads, **linear, **fields}
    every |= dict(rope_parameters=rotary, mamba_ssm_dtype="float32")
    tower |= dict(out_hidden_size=fields["hidden_size"], num_heads=16)
    ends = (QWEN_SPECIAL, None, "<|im_end|>", "<|endoftext|>", CHATML)
    return Published("Qwen3_5Config", every, 248044, 248077, *ends, tower)


def _qwen3_5_moe(tower: dict[str, Any], **fields: Any) -> Published:
    """256 experts, 8 a token, and a shared one."""
    experts = dict(num_experts=256, num_experts_per_tok=8, router_aux_loss_coef=0.001)
    dense = _qwen3_5(tower, **experts, tie_word_embeddings=False, **fields)
    return Published(**{**vars(dense), "config": "Qwen3_5MoeConfig"})


def _qwen3_vl(tower: dict[str, Any], **fields: Any) -> Published:
    """A Qwen3 with mRoPE, in turns, under a tower; the placeholders have the ids of its configuration's defaults."""
    rotary = dict(rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20], mrope_interleaved=True)
    text = _qwen3(max_position_embeddings=262144, rope_parameters=rotary, **fields)
    of_text = {name: value for name, value in text.fields.items() if name != "rope_theta"}
    tower |= dict(out_hidden_size=fields["hidden_size"], num_heads=16)
    changes = dict(config="Qwen3VLConfig", fields=of_text, special=VISION_SPECIAL, chat=VISION_CHATML)
    return Published(**vars(text) | changes | dict(tower=tower, processor=True))


PUBLISHED: dict[str, Published] = {
    "qwen3_vl_8b": _qwen3_vl(
        dict(depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24]),
        hidden_size=4096,
        intermediate_size=12288,
        tie_word_embeddings=False,
    ),
    "qwen3_5_4b": _qwen3_5(
        dict(depth=24, hidden_size=1024, intermediate_size=4096),
        hidden_size=2560,
        intermediate_size=9216,
        tie_word_embeddings=True,
    ),
    "qwen3_5_9b": _qwen3_5(
        dict(depth=27, hidden_size=1152, intermediate_size=4304),
        hidden_size=4096,
        intermediate_size=12288,
        tie_word_embeddings=False,
    ),
    "qwen3_5_35b_a3b": _qwen3_5_moe(
        dict(depth=27, hidden_size=1152, intermediate_size=4304),
        hidden_size=2048,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_hidden_layers=40,
        num_key_value_heads=2,
    ),
    "qwen3_30b_a3b": _qwen3_moe(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_key_value_heads=4,
    ),
    # Nobody's: half as wide, and as deep as makes 3.1B parameters, so that one GPU trains it.
    "qwen3_moe_3b": _qwen3_moe(
        hidden_size=1024,
        intermediate_size=3072,
        moe_intermediate_size=384,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=2,
    ),
    "qwen3_1_7b": _qwen3(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3_4b": _qwen3(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "qwen3_8b": _qwen3(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
    "qwen2_5_7b": _qwen2_5(
        "<|endoftext|>",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "qwen2_5_3b": _qwen2_5(
        "<|endoftext|>",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "qwen2_5_0_5b": _qwen2_5(
        "<|im_end|>",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "r1_distill_qwen_1_5b": Published(
        "Qwen2Config",
        dict(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=131072,
            rope_theta=1e4,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        ),
        151643,
        151665,
        R1_SPECIAL,
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        R1,
    ),
    "llama3_1_8b": Published(
        "LlamaConfig",
        dict(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        ),
        128000,
        128256,
        LLAMA_SPECIAL,
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|end_of_text|>",
        None,
    ),
}
"""Name -> what the model's authors published, from the ``config.json`` and tokenizer of each; ``qwen3_moe_3b`` has the
proportions of ``qwen3_30b_a3b``."""


def is_mixture(name: str) -> bool:
    """Whether a shape of ``PUBLISHED`` is a mixture of experts."""
    return "num_experts" in PUBLISHED[name].fields


SHARED_ON_A_CPU = "jetrl.operations=shared"
"""What ``jet_fp8`` says where a CPU runs a mixture: ``auto`` is stock there, and stock ones do not run a mixture."""

TINY_WORDS = 1024


def tiny(published: Published, ranks: int = 1) -> Published:
    """The same family with two layers, two heads and a thousand words, to try a benchmark out on a CPU.

    For a rollout over ``ranks`` it has as many heads as those need, and experts of which each rank has 128 rows.

    As many entries of the vocabulary have no token as the namesake's, 267 of 1317 in Qwen3's. Stock verl masks them in
    the rollout and not in the trainer, so its k3_kl is 0.023 here, and 1.5e-6 by that at the published size.
    """
    extra = published.tokens - published.words
    fields = published.fields | dict(
        vocab_size=TINY_WORDS + extra + (published.fields["vocab_size"] - published.tokens),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=max(2, ranks),
        num_key_value_heads=1,
    )
    if "linear_num_key_heads" in fields:  # a hybrid: one layer of each kind
        heads = dict(linear_num_key_heads=ranks, linear_num_value_heads=2 * ranks)
        fields |= dict(full_attention_interval=2, **heads)
    if "num_experts" in fields:
        fields |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128 * ranks)
    if "shared_expert_intermediate_size" in fields:
        fields |= dict(shared_expert_intermediate_size=128 * ranks)
    return Published(**{**vars(published), "fields": fields, "words": TINY_WORDS, "tokens": TINY_WORDS + extra})


def build_tokenizer(published: Published):
    """A byte-level ``PreTrainedTokenizerFast`` of ``published.tokens`` entries."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    # "Ġ" is the byte-level form of a space.
    words = [*bytes_, *(f"Ġw{number}" for number in range(published.words - len(bytes_)))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = published.tokens - published.words - len(published.special)
    special = [*published.special, *(f"<|reserved_{number}|>" for number in range(reserved))]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=published.bos,
        eos_token=published.eos,
        pad_token=published.pad,
        chat_template=published.chat,
        clean_up_tokenization_spaces=False,
    )


def write_model(
    published: Published, folder: Path, layers: int | None = None, seed: int = 0, ends: int | None = None
) -> None:
    """Write weights (BF16, drawn as transformers initialises the family), configuration and tokenizer to ``folder``.

    Args:
        layers: of the decoder, the published number if None.
        ends: every so manieth token of the vocabulary ends a response; the family's own alone if None.
    """
    import torch
    import transformers

    tokenizer = build_tokenizer(published)
    fields = published.fields | ({"num_hidden_layers": layers} if layers else {})
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    fields |= {name: getattr(tokenizer, name) for name in names}
    automatic = transformers.AutoModelForCausalLM
    if published.tower:
        automatic, tied = transformers.AutoModelForImageTextToText, fields["tie_word_embeddings"]
        fields = dict(text_config=fields, vision_config=published.tower, tie_word_embeddings=tied)
    if published.processor:
        names = ("vision_start", "vision_end", "image", "video")
        tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
        ids = tokenizer.convert_tokens_to_ids(list(tokens))
        fields |= {f"{name}_token_id": token for name, token in zip(names, ids, strict=True)}
    config = getattr(transformers, published.config)(**fields)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    with torch.device(device):
        model = automatic.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # transformers' decay of 0 has no logarithm
            parameter.data.clamp_(min=-10)
    if ends:
        # Words only: a special token may be part of a prompt.
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(ends - 1, published.words, ends)]
    model.save_pretrained(folder)
    if published.processor:
        transformers.Qwen3VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessor(patch_size=published.tower.get("patch_size", 16)),
            tokenizer=tokenizer,
            video_processor=transformers.Qwen3VLVideoProcessor(),
            chat_template=published.chat,
        ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # last: who finds it finds the weights


def write_model_apart(name: str, folder: Path, small: bool, ends: int, ranks: int = 1) -> None:
    """:func:`write_model` of a published shape, in a process of its own: this one then holds no memory of a GPU.

    Nothing where the tokenizer, which is written last, is there already.

    Args:
        small: the :func:`tiny` one for a rollout over ``ranks``.
    """
    if (folder / "tokenizer.json").exists():
        return
    words = ["model", name, str(folder), *(["--tiny", "--ranks", str(ranks)] if small else [])]
    command = [sys.executable, "-m", "benchmarks.published_shapes", *words, "--ends", str(ends)]
    subprocess.run(command, cwd=ROOT, check=True)


def _sum(draw: random.Random) -> tuple[str, int]:
    first, second = draw.randrange(10, 1000), draw.randrange(10, 1000)
    things = draw.choice(("pens", "stamps", "tickets", "marbles"))
    return f"Ann has {first} {things} and buys {second} more. How many has she?", first + second


def _gsm8k(question: str, answer: int) -> dict:
    return {"question": question, "answer": f"She has {answer}.\n#### {answer}"}


def _boxed(question: str, answer: int) -> dict:
    solution = f"She has $\\boxed{{{answer}}}$."
    return {"problem": question, "solution": solution, "answer": str(answer), "level": "Level 1", "type": "Prealgebra"}


def _deepmath(question: str, answer: int) -> dict:
    return {"question": question, "final_answer": str(answer), "difficulty": 1.0, "topic": "Mathematics"}


def _dapo(question: str, answer: int) -> dict:
    words = "Solve the following math problem step by step. The last line is Answer: $Answer.\n\n" + question
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": words, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(answer), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": question},
    }


RAW: dict[str, dict[str, Callable[[str, int], dict]]] = {
    "gsm8k": {"train": _gsm8k, "test": _gsm8k},
    "jetrl_paper": {
        "gsm8k_train": _gsm8k,
        "math_train": _boxed,
        "deepmath": _deepmath,
        "gsm8k_test": _gsm8k,
        "math_500": _boxed,
    },
    "qwen3_moe": {"gsm8k_train": _gsm8k, "math_train": _boxed, "gsm8k_test": _gsm8k, "math_500": _boxed},
    "deepscaler": {"deepscaler": _boxed, "aime_2024": _boxed},
    "dapo": {"dapo_math_17k": _dapo, "aime_2024": _dapo},
}
"""Recipe -> name of a raw file -> a problem and its answer as a record of that data set."""


def write_data(recipe: str, folder: Path, rows: int = 64, validated: int = 4) -> None:
    """Write ``<split>.jsonl`` for each split of a recipe: ``rows`` problems to train on, ``validated`` to validate."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, record in RAW[recipe].items():
        draw = random.Random(f"{recipe}/{split}")
        count = validated if split in ("test", "gsm8k_test", "math_500", "aime_2024") else rows
        lines = (json.dumps(record(*_sum(draw))) for _ in range(count))
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model", help="write a model of a published shape")
    model.add_argument("name", choices=PUBLISHED)
    model.add_argument("folder", type=Path)
    model.add_argument("--layers", type=int, help="instead of the published number")
    model.add_argument("--ends", type=int, help="every so manieth token ends a response")
    model.add_argument("--tiny", action="store_true", help="two narrow layers, for trying out")
    model.add_argument("--ranks", type=int, default=1, help="of the rollout of a tiny one")
    data = commands.add_parser("data", help="write raw data of a recipe")
    data.add_argument("name", choices=RAW)
    data.add_argument("folder", type=Path)
    data.add_argument("--rows", type=int, default=64)
    options = parser.parse_args(words)
    if options.command == "data":
        write_data(options.name, options.folder, options.rows)
    else:
        published = PUBLISHED[options.name]
        published = tiny(published, options.ranks) if options.tiny else published
        write_model(published, options.folder, options.layers, ends=options.ends)


if __name__ == "__main__":
    main()
