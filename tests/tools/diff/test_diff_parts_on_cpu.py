# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of ``jetrl diff``: distances, token numbers, prompts from files."""

import json
import math

import pytest
import torch
from tiny_models import tiny_model
from transformers import Qwen3Config

from jetrl_verl.algorithms.invariant_scaling import fold, fold_missing
from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig
from jetrl_verl.inputs import UserError
from jetrl_verl.models import family
from jetrl_verl.tools.demo.policy import build_tokenizer
from jetrl_verl.tools.diff.measures import Mismatch, Spread, ulps
from jetrl_verl.tools.diff.operations import KIND_OF, KINDS, Operation, operations
from jetrl_verl.tools.diff.prompts import BUILT_IN, read_prompts
from jetrl_verl.tools.diff.recording import Recording
from jetrl_verl.tools.diff.trainer import load_master


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ulps_count_representable_numbers(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the first subnormal
    one = torch.ones(1, dtype=dtype)
    above = one * (1 + torch.finfo(dtype).eps)
    below = one * (1 - torch.finfo(dtype).eps / 2)
    assert ulps(one, above).item() == ulps(above, one).item() == ulps(one, below).item() == 1
    assert ulps(-one, -above).item() == 1 and ulps(above, below).item() == 2
    tiny = torch.full((1,), smallest, dtype=dtype)
    assert ulps(tiny, -tiny).item() == 2 and ulps(tiny * 0, -tiny).item() == 1
    assert ulps(tiny * 0, tiny * -0.0).item() == 0
    assert ulps(one, 2 * one).item() == round(1 / torch.finfo(dtype).eps)


def test_a_spread_counts_bits_and_keeps_the_largest_distance():
    a = torch.tensor([1.0, 2.0, 0.0, torch.inf], dtype=torch.bfloat16)
    assert Spread.of(a, a.clone()) == Spread(4, 0, 0)
    b = torch.tensor([1.0, 2.0 + 2 * 2**-6, -0.0, torch.inf], dtype=torch.bfloat16)
    assert Spread.of(a, b) == Spread(4, 2, 2) and Spread.of(a, b).share == 0.5


def test_k3_kl_is_verls_estimator():
    rollout = torch.tensor([-1.0, -2.0, -3.0])
    train = torch.tensor([-1.0, -1.5, -3.25])
    mismatch = Mismatch.of(train, rollout)
    assert (mismatch.tokens, mismatch.differing, mismatch.max, mismatch.p999) == (3, 2, 0.5, 0.5)
    assert mismatch.k3_kl == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 3, rel=1e-12)


@pytest.mark.parametrize("s", [1.5, 1.0])
def test_a_policy_with_a_scaling_factor_is_scaled_as_by_the_trainer(s, tmp_path):
    """The weights carry ``s``, whether or not an earlier stage of training scaled them."""
    model = tiny_model("qwen3").bfloat16().float()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if s != 1:
        fold(expected.items(), s, family(model.config))
    fold_missing(model, 1.5)
    model.save_pretrained(tmp_path)
    job = Job(JetConfig("qurl_fp8", "bf16", "fp8", invariant_scaling=s))
    for name, tensor in load_master(tmp_path, job).named_parameters():
        assert torch.equal(tensor.bfloat16(), expected[name].bfloat16()), name


def test_operations_are_listed_in_the_order_of_computation():
    with_norms, without = (operations([family({"model_type": name})] * 3) for name in ("qwen3", "llama"))
    assert with_norms[:3] == [Operation(None, "embedding"), Operation(0, "input_norm"), Operation(0, "q_proj")]
    assert with_norms[-1] == Operation(None, "sampler") and len(set(with_norms)) == len(with_norms) == 3 * 17 - 1 + 5
    assert [o for o in with_norms if o.name not in ("q_norm", "k_norm")] == without
    assert set(KIND_OF.values()) == set(KINDS)
    assert str(Operation(2, "o_proj")) == "layer 2 o_proj" and str(Operation(None, "lm_head")) == "lm_head"


def test_tokens_are_numbered_by_the_models_inputs(tmp_path):
    recording = Recording([[1, 2, 3], [4]], [[5, 6], [7, 8, 9]], torch.arange(5.0))
    assert recording.sequences == [[1, 2, 3, 5], [4, 7, 8]]
    assert recording.drawn.tolist() == [5, 6, 7, 8, 9]
    # Rows whose logits draw a response token.
    assert recording.drawing.tolist() == [2, 3, 4, 5, 6]
    assert [recording.place(token) for token in (0, 3, 4, 6)] == [(0, 0), (0, 3), (1, 0), (1, 2)]
    recording.outputs = {Operation(1, "o_proj"): torch.ones(7, 2), Operation(None, "embedding"): torch.ones(7, 2)}
    recording.save(tmp_path / "recording.pt")
    again = Recording.load(tmp_path / "recording.pt")
    assert again.outputs.keys() == recording.outputs.keys() and again.sequences == recording.sequences
    assert torch.equal(again.log_probs, recording.log_probs)


@pytest.fixture
def folder(tmp_path):
    tokenizer = build_tokenizer()
    Qwen3Config(vocab_size=len(tokenizer) + 7, max_position_embeddings=64).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_prompts_of_every_form(folder):
    import pyarrow
    import pyarrow.parquet

    tokenizer = build_tokenizer()
    messages = [{"role": "user", "content": "1+2"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    (folder / "a.txt").write_text("1+2\n\n1+2\n1+2\n")
    rows = [{"prompt": "1+2"}, {"prompt": messages}, {"prompt_token_ids": [5, 6, 7]}]
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = pyarrow.table({"prompt": [messages] * 3, "data_source": ["a", "b", "c"]})
    pyarrow.parquet.write_table(table, folder / "c.parquet")
    assert read_prompts(folder, folder / "a.txt", 2).ids == [ids, ids]
    assert read_prompts(folder, folder / "b.jsonl", 9).ids == [ids, ids, [5, 6, 7]]
    assert read_prompts(folder, folder / "c.parquet", 2).ids == [ids, ids]
    pyarrow.parquet.write_table(table.append_column("images", [[[], [], ["c.png"]]]), folder / "d.parquet")
    assert read_prompts(folder, folder / "d.parquet", 2).ids == [ids, ids]
    with pytest.raises(UserError, match="d.parquet has images"):
        read_prompts(folder, folder / "d.parquet", 3)
    built_in = read_prompts(folder, None, 4)
    assert len(built_in.ids) == len(BUILT_IN) == 4
    assert built_in.vocabulary == len(tokenizer) and built_in.positions == 64
    assert built_in.stop == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.jsonl", '{"question": "1+2"}', "a.jsonl is not a readable file of prompts (KeyError: 'prompt'). Give"),
        ("a.txt", "\n", "has no prompt, or an empty one"),
        ("a.jsonl", '{"prompt_token_ids": [100000]}', "token ids outside the model's"),
        ("a.jsonl", '{"prompt_token_ids": []}', "has no prompt, or an empty one; remove empty rows."),
        ("a.jsonl", '{"prompt_token_ids": ["a"]}', "['a'] is not a prompt; give text, chat messages with role and"),
        ("a.jsonl", '{"prompt": "1+2", "images": ["a.png"]}', "a.jsonl has images, which jetrl diff does not compare;"),
        ("a.jsonl", '{"prompt": null}', "None is not a prompt; give text, chat messages"),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}', "template does not accept [{'role': 'user'}] (UndefinedError: "),
    ],
)
def test_unreadable_prompts_are_refused(folder, name, text, sentence):
    (folder / name).write_text(text)
    with pytest.raises(UserError) as refusal:
        read_prompts(folder, folder / name, 4)
    assert sentence in str(refusal.value)


def test_only_chat_messages_need_a_template(folder):
    import pyarrow
    import pyarrow.parquet

    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    messages = [[{"role": "user", "content": "1+2"}]]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": messages}), folder / "a.parquet")
    with pytest.raises(UserError, match=r"no chat template for chat messages; give --prompts lines of text \(.txt\)"):
        read_prompts(folder, folder / "a.parquet", 4)
    (folder / "a.txt").write_text("1+2")
    assert read_prompts(folder, folder / "a.txt", 4).ids == [tokenizer.encode("1+2")]


def test_only_text_needs_a_tokenizer(tmp_path):
    Qwen3Config(vocab_size=64).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the model folder has no tokenizer; give --prompts a .jsonl"):
        read_prompts(tmp_path, None, 4)
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [1, 2]}')
    assert read_prompts(tmp_path, tmp_path / "ids.jsonl", 4).vocabulary == 64
