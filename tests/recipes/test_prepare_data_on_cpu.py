# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data preparation on one record of every raw format: the rows that verl reads, and refusals of unusable files."""

import gzip
import importlib
import json
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from recipe_cases import RAW_RECORDS

from recipes.common import sources
from recipes.common.prepare import SCHEMA, PrepareError, prepare

RECIPES = ("gsm8k", "dapo", "deepscaler", "jetrl_paper", "qwen3_moe", "qwen3_5")

EXPECTED = {
    # source -> raw record, data_source, end of the prompt, ground truth
    "GSM8K_TRAIN": ("gsm8k", "openai/gsm8k", 'output the final answer after "####".', "5000"),
    "GSM8K_TEST": ("gsm8k", "openai/gsm8k", 'output the final answer after "####".', "5000"),
    "MATH_TRAIN": ("math", "DigitalLearningGmbH/MATH-lighteval", "within \\boxed{}.", "\\frac{3}{4}"),
    "MATH_500": ("math_500", "HuggingFaceH4/MATH-500", "within \\boxed{}.", "2"),
    "DEEPMATH": ("deepmath", "zwhe99/DeepMath-103K", "within \\boxed{}.", "\\dfrac{1}{2}"),
    "DAPO_MATH": ("dapo", "math_dapo", 'on its own line after "Answer:".', "34"),
    "DAPO_AIME_2024": ("dapo", "aime_2024", 'on its own line after "Answer:".', "34"),
    "DEEPSCALER": ("deepscaler", "agentica-org/DeepScaleR-Preview-Dataset", "within \\boxed{}.", "4\\pi"),
    "AIME_2024": ("aime_2024", "HuggingFaceH4/aime_2024", "within \\boxed{}.", "204"),
}


def splits(recipe: str) -> dict[str, sources.Source]:
    return importlib.import_module(f"recipes.{recipe}.prepare_data").SPLITS


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_json(path, records):
    path.write_text(json.dumps(records, indent=1))
    return path


def write_gzip(path, records):
    path.write_bytes(gzip.compress(b"".join(json.dumps(record).encode() + b"\n" for record in records)))
    return path


def write_parquet(path, records):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def write_folder(path, records):
    path.mkdir()
    for i, record in enumerate(records):
        write_parquet(path / f"train-{i:05}-of-{len(records):05}.parquet", [record])
    return path


FORMATS = {
    "a.jsonl": write_jsonl,
    "a.json": write_json,
    "a.jsonl.gz": write_gzip,
    "a.parquet": write_parquet,
    "folder": write_folder,
}


def rows(path) -> list[dict]:
    return pyarrow.parquet.read_table(path).to_pylist()


def test_every_source_is_tested_and_used():
    named = {name for name, value in vars(sources).items() if isinstance(value, sources.Source)}
    assert named == set(EXPECTED)
    used = [source for recipe in RECIPES for source in splits(recipe).values()]
    assert all(getattr(sources, name) in used for name in named)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("file", FORMATS)
def test_every_source_is_read_from_every_raw_format(tmp_path, name, file):
    record, data_source, instruction, truth = EXPECTED[name]
    raw = FORMATS[file](tmp_path / file, [RAW_RECORDS[record]])
    source = getattr(sources, name)
    assert prepare(source, tmp_path / "out" / "split.parquet", raw) == 1
    (row,) = rows(tmp_path / "out" / "split.parquet")
    ((role, content),) = [turn.values() for turn in row.pop("prompt")]
    assert role == "user" and content.endswith(instruction)
    question = RAW_RECORDS[record].get("question") or RAW_RECORDS[record].get("problem")
    assert question is None or content.startswith(question)
    assert row == {
        "data_source": data_source,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": source.split, "index": 0},
    }


def test_preparation_keeps_the_order_and_is_reproducible(tmp_path):
    records = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(2500)]
    raw = write_jsonl(tmp_path / "train.jsonl", records)
    outputs = [tmp_path / name / "train.parquet" for name in ("first", "second")]
    for output in outputs:
        prepare(sources.GSM8K_TRAIN, output, raw)
    first, second = (output.read_bytes() for output in outputs)
    assert first == second
    assert [row["reward_model"]["ground_truth"] for row in rows(outputs[0])] == [str(i) for i in range(2500)]
    assert [row["extra_info"]["index"] for row in rows(outputs[0])] == list(range(2500))
    assert {path.name for path in outputs[0].parent.iterdir()} == {"train.parquet"}


def test_only_dapo_drops_repeated_problems(tmp_path):
    def dapo(i: int) -> dict:
        turn = {**RAW_RECORDS["dapo"]["prompt"][0], "content": f"problem {i}"}
        return {**RAW_RECORDS["dapo"], "prompt": [turn], "reward_model": {"ground_truth": str(i), "style": ""}}

    raw = write_parquet(tmp_path / "raw.parquet", [dapo(i % 3) for i in range(9)])
    assert prepare(sources.DAPO_MATH, tmp_path / "dapo.parquet", raw) == 3
    assert [row["reward_model"]["ground_truth"] for row in rows(tmp_path / "dapo.parquet")] == ["0", "1", "2"]
    assert [row["extra_info"]["index"] for row in rows(tmp_path / "dapo.parquet")] == [0, 1, 2]
    raw = write_jsonl(tmp_path / "raw.jsonl", [RAW_RECORDS["gsm8k"]] * 2)
    assert prepare(sources.GSM8K_TRAIN, tmp_path / "gsm8k.parquet", raw) == 2


@pytest.mark.parametrize(
    ("source", "record", "complaint"),
    [
        ("GSM8K_TRAIN", {"question": "1+1?", "answer": "two"}, "has no '#### <number>' in its answer"),
        ("MATH_TRAIN", {"problem": "1+1?", "solution": "It is 2."}, "has no \\boxed{} in its solution"),
        ("MATH_TRAIN", {"problem": "1+1?", "solution": "\\fbox{2}"}, "has no \\boxed{} in its solution"),
        ("DEEPSCALER", {"problem": "1+1?", "answer": ""}, "has no answer in its column 'answer'"),
        ("DEEPSCALER", {"problem": "1+1?", "answer": ["2"]}, "has no answer in its column 'answer'"),
        ("DAPO_MATH", {"prompt": "1+1?", "reward_model": {}}, "is not one user turn with a reward_model.ground_truth"),
    ],
)
def test_an_invalid_record_is_named(tmp_path, source, record, complaint):
    raw = write_jsonl(tmp_path / "raw.jsonl", [record])
    source = getattr(sources, source)
    with pytest.raises(PrepareError) as refused:
        prepare(source, tmp_path / "out.parquet", raw)
    assert str(refused.value) == f"record 0 of {raw} {complaint}; give a raw file of {source.hub}"
    assert not (tmp_path / "out.parquet").exists()


def refusal(raw, output) -> str:
    with pytest.raises(PrepareError) as refused:
        prepare(sources.GSM8K_TRAIN, output, raw)
    sentence = str(refused.value)
    assert "\n" not in sentence and ";" in sentence, "what is wrong; what to do"
    return sentence


def test_an_unusable_raw_file_is_refused(tmp_path):
    output = tmp_path / "out.parquet"
    assert refusal(tmp_path / "none.jsonl", output).endswith("none.jsonl does not exist; check the path")

    (tmp_path / "data.csv").write_text("a,b\n")
    assert "data.csv is none of .parquet, .jsonl, .json, " in refusal(tmp_path / "data.csv", output)
    (tmp_path / "empty").mkdir()
    assert "empty is none of .parquet, .jsonl, .json, " in refusal(tmp_path / "empty", output)

    other = write_jsonl(tmp_path / "other.jsonl", [RAW_RECORDS["math"]])
    assert "has no column 'question' but problem, level, type, solution; give a raw" in refusal(other, output)

    (tmp_path / "torn.jsonl").write_text('{"question": "1?", "answ')
    assert "torn.jsonl cannot be read (" in refusal(tmp_path / "torn.jsonl", output)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    assert "torn.parquet cannot be read (" in refusal(tmp_path / "torn.parquet", output)
    (tmp_path / "nothing.jsonl").write_text("")
    refusal(tmp_path / "nothing.jsonl", output)

    own = write_parquet(tmp_path / "train.parquet", [RAW_RECORDS["gsm8k"]])
    assert refusal(own, own).endswith("would be replaced by its own result; choose another folder with --out")
    assert rows(own) == [RAW_RECORDS["gsm8k"]]


def test_without_a_network_the_error_names_the_local_options(tmp_path, monkeypatch):
    def offline(*arguments, **options):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert refusal(None, tmp_path / "out.parquet") == (
        "openai/gsm8k on the hub cannot be read (Couldn't reach 'openai/gsm8k' on the Hub); without a network give raw "
        "files with --local-dir or --local-file"
    )


def test_the_published_split_is_loaded_from_the_hub(tmp_path, monkeypatch):
    calls = []

    def load(*arguments, **options):
        calls.append((arguments, options))
        return datasets.Dataset.from_list([RAW_RECORDS["gsm8k"]])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert prepare(sources.GSM8K_TEST, tmp_path / "test.parquet") == 1
    assert calls == [(("openai/gsm8k", "main"), {"split": "test"})]


@pytest.fixture
def command(monkeypatch, capsys):
    """Callable ``(recipe, *arguments) -> (status, stdout, stderr)`` of a recipe's ``prepare_data.py``."""

    def run(recipe: str, *arguments: str) -> tuple[int, str, str]:
        from recipes.common.prepare import main

        monkeypatch.setattr(sys, "argv", ["prepare_data", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main(recipe, splits(recipe))
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


RAW_OF_SPLIT = {
    "train": "gsm8k",
    "test": "gsm8k",
    "dapo_math_17k": "dapo",
    "deepscaler": "deepscaler",
    "gsm8k_train": "gsm8k",
    "gsm8k_test": "gsm8k",
    "math_train": "math",
    "math_500": "math_500",
    "deepmath": "deepmath",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_verl_reads_the_prepared_data_of_a_recipe(command, tmp_path, recipe, cached_tokenizer):
    """verl concatenates files, so all have one schema."""
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    for name in splits(recipe):
        record = RAW_OF_SPLIT.get(name) or ("dapo" if recipe == "dapo" else "aime_2024")
        write_jsonl(raw / f"{name}.jsonl", [RAW_RECORDS[record]])
    status, output, _ = command(recipe, "--local-dir", raw, "--out", out)
    assert status == 0
    assert output.splitlines() == [f"{out / name}.parquet: 1 problems" for name in splits(recipe)]
    files = [str(out / f"{name}.parquet") for name in splits(recipe)]
    assert all(pyarrow.parquet.read_schema(file).equals(SCHEMA) for file in files)

    config = OmegaConf.create({"max_prompt_length": 1024, "filter_overlong_prompts": True, "cache_dir": str(tmp_path)})
    dataset = RLHFDataset(files, cached_tokenizer, config)
    assert len(dataset) == len(files)
    for row in (dataset[i] for i in range(len(dataset))):
        assert row["raw_prompt"][0]["role"] == "user"
        assert row["data_source"] and row["reward_model"]["ground_truth"]


@pytest.fixture(scope="module")
def cached_tokenizer():
    from jetrl_verl.tools.demo.policy import build_tokenizer

    return build_tokenizer()


def test_one_split_is_prepared_from_one_file(command, tmp_path):
    raw = write_jsonl(tmp_path / "mine.jsonl", [RAW_RECORDS["gsm8k"]])
    status, _, _ = command("gsm8k", "train", "--local-file", f"train={raw}", "--out", tmp_path / "out")
    assert status == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"train.parquet"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("dev",), "dev is not a split of gsm8k; choose from train, test"),
        (("--local-file", "x.jsonl"), "--local-file x.jsonl is not NAME=PATH with a NAME of train, test; write it so"),
        (
            ("--local-file", "dev=x.jsonl"),
            "--local-file dev=x.jsonl is not NAME=PATH with a NAME of train, test; write",
        ),
        (
            ("--local-dir", "/nowhere"),
            "/nowhere holds no train{.parquet,.jsonl,.json,.jsonl.gz,.json.gz} and no folder",
        ),
    ],
)
def test_an_invalid_argument_is_one_sentence(command, tmp_path, arguments, sentence):
    status, output, error = command("gsm8k", "--out", tmp_path, *arguments)
    assert (status, output) == (1, "")
    assert error.startswith(f"error: {sentence}") and error.count("\n") == 1
