# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""csrc/ compiles for sm_90a where there is an nvcc: no spills, no serialized matrix instructions, few registers."""

import re
from pathlib import Path

import build_csrc
import pytest
from hopper import disassembled

ROOT = Path(__file__).parents[2]


def needs_nvcc(test):
    """Slow: the first of these tests compiles the library, which takes minutes."""
    no_nvcc = pytest.mark.skipif(build_csrc.find_nvcc() is None, reason="no nvcc: csrc/ is not compiled")
    return pytest.mark.slow(pytest.mark.timeout(900)(no_nvcc(test)))


GROUPED = {"sm90_grouped_fprop": 4, "sm90_grouped_wgrad": 4, "sm90_grouped_decode": 3}
GEMMS = {"sm90_fprop_1x128_128x128": 12, "sm90_wgrad_1x128_1x128": 8, "sm90_decode_fprop": 16} | GROUPED
OF_QDATA = {"sm90_relayout_128x1": 2, "sm90_silu_mul_backward": 2, "sm90_transpose_128x128": 1}
ATTENTION = {"sm90_decode_attention": 1, "sm90_decode_attention_cluster": 6, "sm90_decode_attention_bf16": 6}
KERNELS = GEMMS | OF_QDATA | ATTENTION
WAITS = {"sm90_decode_fprop": 2, "sm90_grouped_decode": 4}
"""Kernel -> number of its waits for the previous kernel."""


@pytest.fixture(scope="module")
def library() -> Path:
    """The installed library; the next run reuses it."""
    return build_csrc.build(build_csrc.TARGET, ROOT / "build" / "csrc")


def report_of(kernel: str) -> str:
    return (ROOT / "build" / "csrc" / "libjetrl_sm90" / f"{kernel}.ptxas.txt").read_text()


@needs_nvcc
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_variant_spills_or_serializes_its_matrix_instructions(library, kernel):
    report = report_of(kernel)
    assert len(re.findall(r"Compiling entry function .* for 'sm_90a'", report)) == KERNELS[kernel]
    assert report.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == KERNELS[kernel]
    assert build_csrc.complaints(report) == []


@pytest.fixture(scope="module")
def functions(library) -> dict[str, str]:
    """Name -> machine code of every kernel."""
    code = disassembled(library)
    return {function.split()[0]: function for function in re.split(r"Function : ", code)[1:]}


@needs_nvcc
def test_the_machine_code_has_fp8_matrix_instructions_and_no_device_wide_fence(functions):
    """A release to the cluster would become a fence in the main loop (sm90.cuh)."""
    assert len(functions) == sum(KERNELS.values())
    for name, function in functions.items():
        assert not re.search(r"\b(LDL|STL)\b", function), name
        if any(kernel in name for kernel in OF_QDATA):
            assert not re.search("QGMMA|MEMBAR|ACQBULK|PREEXIT", function), name
            continue
        if any(kernel in name for kernel in ATTENTION):
            # 8 for the scores of a unit of 16 keys, two units at once; for the output 2 a unit, in a cluster 1, eight
            # units at once. An FP8 cache has another copy for the first block or large scales, except with turns.
            match = re.search(r"CacheILi(\d)ELi(\d)", name) if "cluster" in name else None
            cluster, turns = (int(match[1]), int(match[2])) if match else (1, 1)
            bf16 = "Bf16Cache" in name
            products = 2 * 8 + (2 if cluster == 1 else 1) * 8 * (1 if bf16 or turns > 1 else 2)
            assert len(re.findall(r"HMMA\.16816\.F32\.BF16", function)) == products, name
            # Operands of a BF16 cache are loaded by one instruction each, values transposed. In a cluster so are an FP8
            # cache's bytes, 32 keys an instruction.
            matrices = re.findall(r"LDSM\.16\.(M\w+)\.4", function)
            assert matrices.count("M88") == 16 * bf16, name
            assert matrices.count("MT88") == (products - 16 if bf16 else 4 * (cluster > 1)), name
            copies = re.findall(r"UBLKCP\.S\.(\w)", function)
            assert copies.count("G") == (0 if bf16 else 1), name
            assert copies.count("S") == cluster - 1, name
            # 16 bytes a lane: of values of BF16 four units at once, of FP8, in a cluster, eight; of keys of BF16 two.
            by_lanes = 16 * bf16 + 32 // cluster * (bf16 or cluster > 1)
            assert len(re.findall(r"LDGSTS\.E\.BYPASS\.\S*128", function)) == by_lanes, name
            assert "MUFU.EX2" in function, name
            # FlashAttention's arithmetic flushes subnormals.
            assert not re.search(r"\b(FMUL|FADD|FFMA|FMNMX)(?!\.FTZ)", function), name
            # A block sends what it has written itself: a fence of the block is enough.
            assert re.findall(r"MEMBAR\S*", function) == ["MEMBAR.ALL.CTA"] * (cluster > 1), name
            assert not re.search("QGMMA|ACQBULK|PREEXIT", function), name
            continue
        chained = re.findall(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3 R\d+, gdesc\[UR\d+\], (RZ|R\d+)", function)
        assert chained, name
        # One chain: the first of four starts from zero, the others continue.
        assert [start == "RZ" for _, start in chained] == [True, False, False, False] * (len(chained) // 4), name
        # Before the copy engine stores: the block's own fence, once per chunk of the first block and of the last tile.
        fences = re.findall(r"MEMBAR\S*", function)
        assert fences == ["MEMBAR.ALL.CTA"] * len(fences), name
        block = int(re.search(r"ILi(\d+)", name)[1])
        chunks = block // 128 if block % 128 == 0 else 1
        assert len(fences) == (2 * chunks if "sm90_fpropI" in name else 0), name
        # In the decode kernels the threads that copy X wait for the previous kernel to end; in the experts' all wait
        # where it writes the segments, and so does a block without a tile. No kernel lets the next one start early.
        waits = [count for kernel, count in WAITS.items() if kernel in name]
        assert function.count("ACQBULK") == sum(waits), name
        assert "PREEXIT" not in function, name


def decoded(function: str) -> list[tuple[str, int]]:
    """Operation, without its predicate, and control bits of each instruction.

    The upper 64 bits of an instruction hold from bit 41 on: its stall count (4 bits), a hint (1), which of six
    scoreboards its result and the release of its operands signal (3 each, 7: none), and a mask of those that it waits
    for (6).
    """
    instructions = re.findall(
        r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+)[^;]*;\s*/\* 0x\w{16} \*/\s+/\* 0x(\w{16}) \*/", function
    )
    return [(operation, int(word, 16) >> 41) for operation, word in instructions]


def stopped_chains(function: str) -> int:
    """Number of chains of four wgmma that wait in between for a read of shared memory."""
    reads, in_chain, stopped = [False] * 6, 0, set()  # whether a scoreboard is a read's; how many wgmma were issued
    for operation, control in decoded(function):
        waits = [board for board in range(6) if control >> 11 >> board & 1]
        if in_chain % 4 and any(reads[board] for board in waits):
            stopped.add(in_chain // 4)
        for board in waits:
            reads[board] = False
        for board in (control >> 5 & 7, control >> 8 & 7):
            if board < 6:
                reads[board] = operation.startswith("LDS")
        in_chain += operation.startswith("QGMMA")
    assert in_chain and in_chain % 4 == 0
    return len(stopped)


def instruction(text: str, control: int) -> str:
    """As cuobjdump prints it, with these control bits."""
    return f"        /*0010*/  {text} ;  /* 0x0000000000000000 */\n        /* 0x{control << 41:016x} */\n"


def test_a_chain_that_waits_for_shared_memory_is_counted():
    signals, waits, neither = 7 << 8 | 1 << 5, 7 << 8 | 7 << 5 | 2 << 11, 7 << 8 | 7 << 5  # scoreboard 1 of six
    read, multiply = "LDS R4, [R2+0x100]", "@P1 FMUL R5, R4, R3"
    wgmma = instruction("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24", neither)
    before = instruction(read, signals) + instruction(multiply, waits) + 4 * wgmma
    inside = instruction(read, signals) + wgmma + instruction(multiply, waits) + 3 * wgmma
    after = instruction(read, signals) + 4 * wgmma + instruction(multiply, waits)
    other = instruction("LDC R4, c[0x0][0x210]", signals) + wgmma + instruction(multiply, waits) + 3 * wgmma
    assert [stopped_chains(code) for code in (before, inside, after, other)] == [0, 1, 0, 0]
    assert stopped_chains(inside + before + inside) == 2


@needs_nvcc
@pytest.mark.parametrize(
    ("kernel", "variants"), [("sm90_decode_fprop", 16), ("sm90_wgrad.*Lb1E", 4), ("sm90_grouped_decode", 3)]
)
def test_a_chain_that_has_begun_does_not_wait_for_shared_memory(functions, kernel, variants):
    """ptxas may move products of scales between the wgmma of a chain, as it does in FProp and in WGrad with BF16 output
    (docs/log.md, 2026-11-23)."""
    chosen = {name: stopped_chains(code) for name, code in functions.items() if re.search(kernel, name)}
    assert len(chosen) == variants
    assert not any(chosen.values()), chosen


def asked_early(function: str) -> int:
    """Number of barrier waits with 16 or more FMAs between the query and the branch on its result."""
    early, since = 0, None  # FMAs since the open query
    for operation, _ in decoded(function):
        if operation.startswith("SYNCS.PHASECHK"):
            since = 0
        elif operation.startswith("BRA"):
            early += since is not None and since >= 16
            since = None
        elif operation == "FFMA" and since is not None:
            since += 1
    return early


def test_a_barrier_query_after_the_fmas_is_not_early():
    fmas = 20 * instruction("FFMA R4, R5, R6, R4", 0)
    question = instruction("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4+0x38838], R24", 0)
    branch = instruction("@!P1 BRA `(.L_x_1)", 0)
    assert asked_early(4 * (question + fmas + branch)) == 4
    assert asked_early(4 * (fmas + question + branch)) == 0
    assert asked_early(4 * (question + branch + fmas + branch)) == 0


@needs_nvcc
@pytest.mark.parametrize(
    ("columns", "of_ranks", "grouped", "stages"),
    [
        *((256, 0, 0, 4), (192, 0, 0, 4), (128, 0, 0, 5), (64, 0, 0, 8), (128, 1, 0, 5), (64, 1, 0, 8)),
        *((256, 0, 1, 4), (128, 0, 1, 5)),
    ],
)
def test_fprop_queries_the_next_k_block_before_it_promotes(functions, columns, of_ranks, grouped, stages):
    """Otherwise an H200 needs 3% longer (docs/log.md, 2026-11-23). No lane loops around a call of the copy engine."""
    shape = rf"FpropShapeILi{columns}ELi\dELb{of_ranks}ELb{grouped}E"
    chosen = [code for name, code in functions.items() if re.search(shape, name)]
    assert len(chosen) == 2
    for code in chosen:
        assert asked_early(code) == stages
        assert "UTMALDG" in code and not re.search(r"BRA\.U\.ANY|BRA\.ANY", code)


@needs_nvcc
@pytest.mark.parametrize(
    ("kernel", "most"),
    [("sm90_relayout_128x1", [48, 64]), ("sm90_silu_mul_backward", [64, 64]), ("sm90_transpose_128x128", [64])],
)
def test_qdata_kernels_leave_registers_for_other_blocks(library, kernel, most):
    registers = sorted(int(number) for number in re.findall(r"Used (\d+) registers", report_of(kernel)))
    assert all(map(int.__le__, registers, most)), registers


@needs_nvcc
def test_the_library_registers_its_operators_without_a_gpu(library):
    import torch

    from jetrl_verl.kernels import native

    torch.ops.load_library(str(library))
    assert native.mismatch("jetrl_native") is None
    for name in native._ARGUMENTS:
        assert getattr(torch.ops.jetrl_native, name).default._schema.is_mutable


def test_a_library_with_other_operators_is_a_mismatch():
    import torch

    from jetrl_verl.kernels import native

    assert "jetrl_native_nothing.fprop is not in it" in native.mismatch("jetrl_native_nothing")
    old = torch.library.Library("jetrl_native_old", "DEF")
    old.define("fprop(Tensor x, Tensor w) -> ()")
    assert re.search(r"jetrl_native_old.fprop accepts x w\): run `python scripts", native.mismatch("jetrl_native_old"))


@pytest.mark.parametrize(
    "line",
    [
        "    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        "    0 bytes stack frame, 12 bytes spill stores, 12 bytes spill loads",
        "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
        "ptxas warning : setmaxnreg ignored to maintain minimum register requirement",
    ],
)
def test_ptxas_reports_of_slow_kernels_are_complaints(line):
    clean = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 168 registers\n"
    assert build_csrc.complaints(clean + line) == [line.strip()]


def test_sources_that_do_not_rename_operators_are_not_built(tmp_path, monkeypatch):
    monkeypatch.setattr(build_csrc, "find_nvcc", lambda: "nvcc")
    (tmp_path / "binding.cpp").write_text("STABLE_TORCH_LIBRARY(jetrl_native, library) {}")
    with pytest.raises(SystemExit, match="binding.cpp does not rename its operators; copy this tree's there"):
        build_csrc.build(tmp_path, tmp_path, csrc=tmp_path, operators="before")


@pytest.mark.parametrize("words", [["--csrc", "elsewhere"], ["--operators", "before"]])
def test_csrc_and_operators_must_be_set_together(words, monkeypatch, capsys):
    monkeypatch.setattr(build_csrc.sys, "argv", ["build_csrc.py", *words])
    with pytest.raises(SystemExit):
        build_csrc.main()
    assert "--csrc and --operators go together" in capsys.readouterr().err


def test_the_fingerprint_covers_operators_and_path(tmp_path, monkeypatch):
    monkeypatch.setattr(build_csrc, "_run", lambda command: "nvcc 13.0")
    keys = {
        build_csrc.fingerprint(build_csrc.CSRC, folder / "lib.so", operators, False, "nvcc", "2.11")
        for folder in (tmp_path, tmp_path / "another")
        for operators in ("jetrl_native", "before")
    }
    assert len(keys) == 4


def test_a_build_without_nvcc_raises(monkeypatch, tmp_path):
    monkeypatch.setattr(build_csrc, "find_nvcc", lambda: None)
    with pytest.raises(SystemExit, match="no nvcc on the PATH"):
        build_csrc.build(tmp_path, tmp_path)


def test_the_package_runs_without_the_library(monkeypatch, tmp_path):
    import torch

    from jetrl_verl.kernels import dispatch, native
    from jetrl_verl.reference import FP8_DTYPE, GemmCall, QuantizedTensor

    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "libjetrl_sm90.so")
    native.unavailable.cache_clear()
    q = QuantizedTensor(torch.zeros(128, 128).to(FP8_DTYPE), torch.ones(128, 1))
    call = GemmCall.by_tokens(q, q)
    assert not dispatch.supports("wgrad", "native", call)
    sentence = "not built: install a wheel.*or run `python scripts/build_csrc.py`.*use backend triton"
    with pytest.raises(ValueError, match=sentence):
        dispatch.implementation("wgrad", "native")(call)
    native.unavailable.cache_clear()
