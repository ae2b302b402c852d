# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/micro_batches.py: verl's own engine of each row takes updates of the size that was asked for."""

import json

import pytest

from benchmarks.micro_batches import PHASES, batch_of, main


def test_each_row_takes_its_turns(tmp_path, capfd):
    words = ["--tiny", "--rows", "bf16,jet_fp8+jetrl.backward=bf16", "--tokens", "64", "128"]
    assert main([str(tmp_path), *words, "--sequences", "4", "--repetitions", "2"]) == 0
    record = json.loads((tmp_path / "micro_batches.json").read_text())
    assert (record["device"], record["sequences"], record["length"], record["tiny"]) == ("CPU", 4, 32, True)
    bf16, jet = record["rows"]["bf16"], record["rows"]["jet_fp8+jetrl.backward=bf16"]
    assert (bf16["quantized_linears"], jet["quantized_linears"]) == (0, 14)
    assert bf16["engine"].startswith("verl.") and jet["engine"].startswith("jetrl_verl.")
    for row in (bf16, jet):
        assert list(row["tokens"]) == ["64", "128"] and row["peak_gib"] is None
        for phases in row["tokens"].values():
            assert [len(phases[phase]) for phase in PHASES] == [2, 2]
            assert min(min(phases[phase]) for phase in PHASES) > 0
    assert "1.00x" in capfd.readouterr().out


def test_a_row_whose_process_dies_is_named(tmp_path, capfd):
    words = ["--tiny", "--rows", "jet_fp8+actor_rollout_ref.actor.optim.lr=fast", "--sequences", "4"]
    assert main([str(tmp_path), *words]) == 1
    said = capfd.readouterr()
    assert "lr=fast ended before it had built its engine; its error stands above." in said.out.replace("\n", " ")
    assert "Traceback" in said.err


def test_a_batch_is_cut_into_micro_batches_of_so_many_tokens():
    from verl.workers.engine.utils import prepare_micro_batches

    data = batch_of(8, 30, 100, 64)
    micro, _ = prepare_micro_batches(data, dp_group=None)
    assert [each["input_ids"].values().shape[0] for each in micro] == [60] * 4
    assert not any(each["loss_mask"].to_padded_tensor(0)[:, 0].any() for each in micro)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rows", "fp16"], "'fp16' is not a row. Choose from bf16, "),
        (["--tokens", "20"], "--tokens 20 is not supported with --length 32. Set --tokens 32 or more."),
        (["--model", "qwen9"], "invalid choice: 'qwen9'"),
        (["--where", "jet_fp8_exact"], "--where jet_fp8_exact is not one of the rows."),
        (["--rows", "bf16_best"], "bf16_best is not run, since Liger's kernels and FlashAttention 3 need a GPU"),
    ],
)
def test_what_it_cannot_take_is_said_before_anything_starts(tmp_path, capsys, words, sentence):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--tiny", *words])
    assert sentence in capsys.readouterr().err and not list(tmp_path.iterdir())
