# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`jetrl bench gemm` on the CPU: real operands and checks, stand-ins for the GPU's contenders, a clock that ticks."""

import hashlib
import json
import math
import sys
import types
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from bench_fakes import fake_machine
from rich.console import Console

from jetrl_verl import kernels
from jetrl_verl.kernels import native
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.bench import BenchError, contenders, deep_gemm, gemm, shapes
from jetrl_verl.tools.bench.contenders import CONTENDERS, Contender, Refused, draw
from jetrl_verl.tools.bench.gemm import GemmOptions, run_gemm
from jetrl_verl.tools.bench.shapes import Problem, problems

CPU = torch.device("cpu")
COMPILE_ALL = deep_gemm.compile_all
TINY = {"tiny": {"qkv": (384, 256), "down": (256, 512)}}


def reference(problem, x):
    """The contract's own product; it adds where the problem asks for it, as the native kernel does."""
    options = {"b_block_scaled": problem.b_block_scaled, "out_dtype": contenders.DTYPES[problem.out]}

    def call():
        product = kernels.gemm_nt(x.a, x.b, **options)
        return product if x.start is None else x.start + product

    return call


def half(problem, x):
    """Half of the rows are never written."""

    def call():
        out = contenders._poisoned(problem, x)
        rows = problem.m // 2
        out[:rows] = reference(problem, x)()[:rows]
        return out

    return call


def raising(problem, x):
    raise RuntimeError("no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")


def here(name, make, **options):
    return Contender(name, lambda: None, make, **options)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """In 16 rows of products as small as these, one large channel has all of the norm: a draw in a hundred has its 16
    elements rounded to BF16 by more than the limit, which is made for products of thousands of columns."""
    torch.manual_seed(0)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the command with the given contenders; its exit status, JSON and output."""
    for module in (shapes, gemm):
        monkeypatch.setattr(module, "MODELS", TINY)

    def run(*present, **options):
        table = {"bf16": CONTENDERS["bf16"]} | {contender.name: contender for contender in present}
        monkeypatch.setattr(gemm, "CONTENDERS", table)
        out = tmp_path / "results" / "gemm.json"
        defaults = {"models": ["tiny"], "tokens": [128], "batches": [1, 4], "contenders": list(table), "out": out}
        console = Console(width=160, record=True)
        status = run_gemm(GemmOptions(**(defaults | options)), console, fake_machine())
        return status, json.loads(out.read_text()), console.export_text()

    return run


def test_right_results_give_status_0_a_table_and_a_json(bench):
    status, found, text = bench(here("native", reference), here("triton", reference))
    assert status == 0 and found["wrong"] == []
    assert len(found["records"]) == 2 * (1 + 1 + 3 + 2)
    for record in found["records"]:
        assert (
            record["bits"]["native"] == {"triton": True} and record["error"]["native"] < gemm.MOST_ERROR[record["out"]]
        )
        assert record["us"]["native"] == {"median": 1.0, "low": 1.0, "high": 1.0}  # one tick
        assert record["percent_of_floor"]["native"] == pytest.approx(100 * record["floor_us"])
    assert found["copy_bandwidth"] == 4e12 and found["versions"]["torch"]
    for words in ("FProp: us, % of floor", "fp32+=", "bits: native equals triton at 14 of 14 shapes"):
        assert words in text
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:6] == ["decode", "native", "triton", "4", "1.000", "1.000"] for row in rows)


def test_bf16_is_judged_by_the_product_of_the_unquantized_operands(bench):
    status, found, text = bench(here("native", reference))
    bf16 = [record["error"]["bf16"] for record in found["records"] if "bf16" in record["error"]]
    assert status == 0 and bf16 and max(bf16) < gemm.MOST_ERROR["bf16"]
    # torch has no BF16 product with an FP32 result on a CPU: named, and not ours to answer for
    left_out = [record["out"] for record in found["records"] if "bf16" in record["refused"]]
    assert set(left_out) == {"fp32", "fp32+="} and "left out of 2: bf16: raises NotImplementedError" in text


def test_rows_that_nobody_wrote_are_wrong_results(bench):
    status, found, text = bench(here("native", reference), here("cublaslt", half), what=["fprop"])
    assert status == 1
    assert found["wrong"] == [
        f"cublaslt: fprop tiny {layer}" for layer in ("qkv 128 x 384 x 256", "down 128 x 256 x 512")
    ]
    assert math.isnan(found["records"][0]["error"]["cublaslt"]) and "WRONG cublaslt: fprop tiny qkv" in text


def test_another_packages_contender_that_raises_is_named_and_ours_fails_the_command(bench):
    status, found, text = bench(here("native", reference), here("vllm_cutlass", raising), what=["fprop"])
    assert status == 0 and "vllm_cutlass" not in found["records"][0]["us"]
    assert "left out of 2: vllm_cutlass: raises RuntimeError: no kernel image is available\n" in text
    status, found, _ = bench(here("native", raising), what=["fprop"])
    assert status == 1 and found["wrong"][0] == "native: fprop tiny qkv 128 x 384 x 256"


def test_an_absent_contender_is_reported_with_its_reason(bench):
    gone = Contender("torchao", lambda: "torchao is not installed", raising)
    status, found, text = bench(here("native", reference), gone, what=["decode"])
    assert status == 0 and found["absent"] == {"torchao": "torchao is not installed"}
    assert "absent: torchao: torchao is not installed" in text


@pytest.mark.parametrize("below", ["", "below.json"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(bench, monkeypatch, tmp_path, below):
    monkeypatch.setattr(gemm, "measure", None)
    out = tmp_path / ("file" if below else "folder") / below
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(BenchError, match=rf"^--out {out} cannot be written \(.*\); name a file.$"):
        bench(here("native", reference), out=out)


def test_where_no_contender_is_left_nothing_is_timed_and_no_file_left(bench, monkeypatch, tmp_path):
    gone = Contender("torchao", lambda: "torchao is not installed", raising)
    with pytest.raises(BenchError, match=r"no contender can run here \(torchao: torchao is not installed\); choose"):
        bench(gone, contenders=["torchao"])

    def fail(problems):
        raise AssertionError("cuda_home is not None")

    monkeypatch.setattr(deep_gemm, "compile_all", fail)
    with pytest.raises(BenchError, match=r"no contender can run here \(deep_gemm: its compilation raises Assertion"):
        bench(here("deep_gemm", reference), contenders=["deep_gemm"])
    assert not list((tmp_path / "results").iterdir())


def test_where_every_shape_is_refused_nothing_was_timed(bench):
    def refuse(problem, x):
        raise Refused("does not support this shape")

    with pytest.raises(BenchError, match="nothing was timed, for the reasons above; choose other contenders or shapes"):
        bench(here("vllm_cutlass", refuse), contenders=["vllm_cutlass"], what=["wgrad"])


def test_what_only_one_bit_tells_apart_is_reported_and_not_an_error(bench):
    def off(problem, x):
        def call():
            out = reference(problem, x)()
            bits = out.view(torch.int16 if out.dtype == torch.bfloat16 else torch.int32)
            bits[0, 0] ^= 1
            return out

        return call

    status, found, text = bench(here("native", off), here("triton", reference), here("deep_gemm", off), what=["fprop"])
    assert status == 0
    assert found["records"][0]["bits"]["native"] == {"triton": False, "deep_gemm": True}
    assert "bits: native equals triton at 0 of 2 shapes" in text


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch):
    monkeypatch.setattr(deep_gemm, "compile_all", lambda problems: 12.0)


def test_deep_gemm_is_compiled_before_anything_is_timed(bench, monkeypatch):
    compiled = []
    monkeypatch.setattr(deep_gemm, "compile_all", lambda problems: compiled.extend(problems) or 12.0)
    status, found, text = bench(here("deep_gemm", reference), what=["fprop", "decode"])
    assert status == 0 and len(compiled) == 6 and found["deep_gemm_compile_s"] == 12.0
    assert "DeepGEMM compiled for 12 s" in text


def test_deep_gemm_that_does_not_compile_is_absent(bench, monkeypatch):
    def fail(problems):
        raise AssertionError("cuda_home is not None\nmore")

    monkeypatch.setattr(deep_gemm, "compile_all", fail)
    status, found, _ = bench(here("native", reference), here("deep_gemm", reference), what=["fprop"])
    assert status == 0 and "deep_gemm" not in found["records"][0]["us"]
    assert found["absent"] == {"deep_gemm": "its compilation raises AssertionError: cuda_home is not None"}


def test_a_sustained_run_times_the_chosen_shape_alone(bench):
    status, found, text = bench(
        here("native", reference), what=["decode"], sustained=1e-6, sustained_shape="fprop/tiny/qkv/128"
    )
    steady = found["sustained"]
    assert status == 0 and set(steady["us"]) == {"bf16", "native"} and (steady["m"], steady["n"]) == (128, 384)
    assert "sustained, 1e-06 s each" in text


def test_what_was_found_is_kept_when_a_run_is_cut_off(bench, monkeypatch, tmp_path):
    real, seen = gemm.measure, []

    def cut_off(*args):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(args)
        return real(*args)

    monkeypatch.setattr(gemm, "measure", cut_off)
    with pytest.raises(KeyboardInterrupt):
        bench(here("native", reference))
    assert len(json.loads((tmp_path / "results" / "gemm.json").read_text())["records"]) == 3


def test_full_means_every_model_count_and_batch():
    options = replace(GemmOptions(), contenders=("native",)).full()
    assert (options.tokens, options.batches) == (shapes.TOKENS, shapes.DECODE) and len(options.models) == 4
    assert options.contenders == ("native",)


def test_the_default_fits_a_short_session():
    todo = problems(GemmOptions.models, GemmOptions.what, GemmOptions.tokens, GemmOptions.batches)
    assert len(todo) == 4 * (2 + 2 + 3 * 2 + 6)


def test_an_unknown_contender_is_refused():
    with pytest.raises(BenchError, match="no contender 'cutlas'; choose from bf16, native, triton, vllm_cutlass"):
        gemm.present(["cutlas"])


def test_this_machine_lacks_the_gpus_contenders_and_says_why():
    present, absent = gemm.present(["bf16", "native", "vllm_cutlass", "deep_gemm", "cublaslt"])
    assert [contender.name for contender in present] == ["bf16"]
    assert absent["deep_gemm"] == "no DeepGEMM, by itself or in a vLLM wheel"
    assert set(absent) == {"native", "vllm_cutlass", "deep_gemm", "cublaslt"}


@pytest.mark.parametrize("what", ["fprop", "dgrad", "wgrad"])
def test_operands_are_those_of_a_training_step(what):
    problem = Problem(what, "tiny", "qkv", 128, 384, 256, "fp32" if what == "wgrad" else "bf16")
    x = draw(problem, CPU)
    assert x.left.shape == (128, 256) and x.right.shape == (384, 256)
    assert x.a.qdata.shape == (128, 256) and x.b.qdata.shape == (384, 256)
    # dY and X of WGrad, W of DGrad are stored the other way round
    stored = {"fprop": (True, True), "dgrad": (True, False), "wgrad": (False, False)}[what]
    assert (x.left.is_contiguous(), x.right.is_contiguous()) == stored
    product = x.left.double() @ x.right.t().double()
    quantized = kernels.gemm_nt(x.a, x.b, b_block_scaled=problem.b_block_scaled).double()
    assert (quantized - product).norm() / product.norm() < 0.06


def test_copies_share_no_memory_and_keep_strides():
    x = draw(Problem("wgrad", "tiny", "qkv", 128, 384, 256), CPU)
    qdata, values = x.copy(True), x.copy(False)
    for own, other in ((qdata.a.qdata, x.a.qdata), (qdata.b.scales, x.b.scales), (values.left, x.left)):
        assert own.data_ptr() != other.data_ptr() and own.stride() == other.stride()
        assert torch.equal(own.view(torch.uint8), other.view(torch.uint8)) if own.is_contiguous() else True
    assert qdata.left is x.left and values.a is x.a


def test_bf16_adds_into_the_buffer_itself_as_a_trainer_does(monkeypatch):
    """torch has the call on a GPU alone, so its arguments are looked at and its schema asked."""
    problem = Problem("wgrad", "tiny", "qkv", 128, 384, 256, "fp32+=")
    x = draw(problem, CPU)
    call = CONTENDERS["bf16"].make(problem, x)
    assert call.func is torch.addmm and call.keywords["out"] is call.args[0]
    assert torch.equal(call.args[0], x.start) and call.args[0] is not x.start
    arguments = [argument.name for argument in torch.ops.aten.addmm.dtype_out._schema.arguments]
    assert arguments == ["self", "mat1", "mat2", "out_dtype", "beta", "alpha", "out"]


def test_a_backend_that_adds_to_nothing_refuses_to():
    problem = Problem("wgrad", "tiny", "qkv", 128, 384, 256, "fp32+=")
    for name in ("vllm_cutlass", "cublaslt"):
        with pytest.raises(Refused, match="adds to no output"):
            CONTENDERS[name].make(problem, draw(problem, CPU))


@pytest.fixture
def vllm_deep_gemm(monkeypatch):
    """vLLM's wrapper as far as it is called, computing with the contract's product; the calls it got."""
    calls = []

    def fp8_gemm_nt(a, b, out, *, c, recipe, is_deep_gemm_e8m0_used):
        calls.append((recipe, c is not None, is_deep_gemm_e8m0_used))
        a, b = QuantizedTensor(*a), QuantizedTensor(*b)
        block_scaled = recipe == (1, 128, 128)
        product = kernels.gemm_nt(a, b, b_block_scaled=block_scaled, out_dtype=out.dtype)
        out.copy_(product) if c is None else out.copy_(c + product)

    def aligned(scales):
        rows = -(-scales.shape[0] // 4) * 4
        out = torch.empty_strided(scales.shape, (1, rows))
        return out.copy_(scales)

    module = types.ModuleType("vllm.utils.deep_gemm")
    module.fp8_gemm_nt, module.get_col_major_tma_aligned_tensor = fp8_gemm_nt, aligned
    monkeypatch.setitem(sys.modules, "vllm.utils.deep_gemm", module)
    return calls


@pytest.mark.parametrize(
    ("what", "out", "call"),
    [
        ("fprop", "bf16", ((1, 128, 128), False, False)),
        ("dgrad", "bf16", ((1, 128, 128), False, False)),
        ("wgrad", "fp32", ((1, 1, 128), True, False)),
        ("wgrad", "fp32+=", ((1, 1, 128), True, False)),
    ],
)
def test_deep_gemm_is_called_with_its_recipe_and_computes_the_product_however_often(vllm_deep_gemm, what, out, call):
    problem = Problem(what, "tiny", "qkv", 128, 384, 256, out)
    x = draw(problem, CPU)
    run = CONTENDERS["deep_gemm"].make(problem, x)
    want = reference(problem, x)()
    assert torch.equal(run(), want) and vllm_deep_gemm == [call]
    assert torch.equal(run(), want) is (out != "fp32+=")  # which has been added to twice now


def test_deep_gemm_has_no_bf16_weight_gradient(vllm_deep_gemm):
    problem = Problem("wgrad", "tiny", "qkv", 128, 384, 256)
    with pytest.raises(Refused, match="writes FP32 only"):
        CONTENDERS["deep_gemm"].make(problem, draw(problem, CPU))


def test_every_deep_gemm_kernel_is_compiled_once():
    todo = problems(["qwen3-8b"], ["fprop", "dgrad", "wgrad"], [4096], [])
    jobs = deep_gemm.jobs_of(todo)
    # FProp and DGrad of o are one shape; the two FP32 outputs of WGrad are one kernel, its BF16 output none
    assert len(jobs) == len(set(jobs)) == 7 + 4
    assert all(rows == 4096 for rows, _, _, block_scaled in jobs if block_scaled)


class Pool:
    """A pool that runs its jobs here."""

    def __init__(self, processes, mp_context):
        self.processes = processes

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, job):
        made = Future()
        try:
            made.set_result(function(job))
        except RuntimeError as error:
            made.set_exception(error)
        return made


@pytest.mark.parametrize("failing", [1, 4])
def test_one_shape_that_does_not_compile_leaves_the_others(monkeypatch, failing):
    todo, done = problems(["qwen3-8b"], ["fprop"], [4096], []), []

    def compile_one(job):
        done.append(job)
        if len(done) <= failing:
            raise RuntimeError(f"no kernel for {job}")

    monkeypatch.setattr(deep_gemm, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(deep_gemm, "_compile_one", compile_one)
    if failing == len(todo):
        with pytest.raises(RuntimeError, match=r"no kernel for \(4096, 4096, 4096, True\)"):
            COMPILE_ALL(todo)
    else:
        assert COMPILE_ALL(todo) >= 0
    assert done == deep_gemm.jobs_of(todo)


@pytest.fixture
def another_build(monkeypatch):
    """torch.ops.jetrl_other: operators like the library's, on a CPU, whose products are twice what they should be."""
    library = torch.library.Library("jetrl_other", "DEF")
    tensors = {"bias": "Tensor? bias"} | {name: f"Tensor(a!) {name}" for name in ("y", "dw")}
    numbers = {name: f"int {name}" for name in ("block", "cluster")}
    flags = {name: f"bool {name}" for name in ("static_weight", "accumulate", "pow2")}
    kinds = tensors | numbers | flags
    for name, words in native._ARGUMENTS.items():
        library.define(f"{name}({', '.join(kinds.get(word, f'Tensor {word}') for word in words.split())}) -> ()")

    def double(x, x_scales, w, w_scales, bias, y, *plan):
        a, b = QuantizedTensor(x, x_scales), QuantizedTensor(w, w_scales)
        y.copy_(2 * kernels.gemm_nt(a, b, b_block_scaled=True, bias=bias))

    for name in ("fprop", "decode"):
        library.impl(name, double, "CPU")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    return library


@pytest.fixture
def built(monkeypatch, tmp_path):
    """A file for a library; the kernels seem to run here, and whatever is loaded in a process of its own loads."""
    monkeypatch.setattr(native, "unavailable", lambda: None)
    monkeypatch.setattr(contenders.subprocess, "run", lambda *_, **__: types.SimpleNamespace(returncode=0))
    (tmp_path / "libother.so").write_bytes(b"a library")
    return tmp_path / "libother.so"


def test_another_build_is_a_contender_whose_operators_are_its_own(bench, another_build, built):
    beside = {"jetrl_other": built}
    status, found, text = bench(here("native", reference), what=["fprop"], beside=beside)
    errors = [record["error"] for record in found["records"]]
    assert all(error["jetrl_other"] == pytest.approx(1, abs=0.01) and error["native"] < 3e-3 for error in errors)
    assert status == 1 and "WRONG jetrl_other: fprop tiny qkv" in text
    assert "bits: jetrl_other equals native at 0 of 2 shapes" in text
    assert found["beside"] == {"jetrl_other": hashlib.sha256(b"a library").hexdigest()}
    assert native._operators is torch.ops.jetrl_native


def test_another_build_that_raises_fails_the_command_as_ours_do(bench, another_build, built, monkeypatch):
    monkeypatch.setattr(contenders, "_native", raising)
    status, found, _ = bench(here("native", reference), what=["fprop"], beside={"jetrl_other": built})
    assert status == 1 and found["wrong"][0].startswith("jetrl_other: fprop tiny")


def test_another_build_is_refused_where_the_kernels_cannot_run(bench, tmp_path):
    with pytest.raises(
        BenchError, match="--beside other: .*native kernels are for Hopper|--beside other: .* not built"
    ):
        bench(here("native", reference), beside={"other": tmp_path / "libother.so"})


def test_a_library_that_would_end_the_process_is_tried_in_another_one(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: None)
    with pytest.raises(BenchError, match="--beside other: .*libother.so does not load here: OSError"):
        bench(here("native", reference), beside={"other": tmp_path / "libother.so"})


def test_a_library_whose_operators_have_a_name_that_is_taken_is_refused(bench, built, monkeypatch):
    monkeypatch.setattr(contenders.subprocess, "run", lambda *_, **__: types.SimpleNamespace(returncode=-11, stderr=""))
    with pytest.raises(BenchError, match="operators have the name of others; build it with --operators other"):
        bench(here("native", reference), beside={"other": built})


def test_a_library_with_other_operators_is_refused(bench, built, monkeypatch):
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    with pytest.raises(BenchError, match="--beside other: libother.so comes from another version of the kernels"):
        bench(here("native", reference), beside={"other": built})
