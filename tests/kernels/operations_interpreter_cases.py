# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The shared operations under Triton's interpreter (test_interpreted_on_cpu.py): FP32 results to FP32 accuracy, BF16
results to one step, since the interpreter truncates to BF16."""

import sys

import pytest
import reference_operations as reference
import torch
import triton
import triton.language as tl
from backends import triton_kernels
from slow import mostly_slow
from tensors import SCALES, assert_seen, every_maximum, every_number, merged_heads, normal, same_bytes

from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch
from jetrl_verl.kernels.block_sums import reference_block_sums
from jetrl_verl.kernels.draw import _chosen as reference_chosen
from jetrl_verl.kernels.draw import _chosen_place, reference_draw
from jetrl_verl.kernels.kv_cache import _quantize_kernel
from jetrl_verl.kernels.logits import MANY_ROWS, TILES, triton_logits_by
from jetrl_verl.kernels.rms_norm import _are_heads_in_place
from jetrl_verl.reference import cache_shape, dequantize_heads, quantize_heads

log_probs = sys.modules["jetrl_verl.kernels.log_probs"]  # the package's attribute is the function
EPS = 1e-6
BF16_STEP, FP32_STEPS = 2**-7, 2**-20


def assert_close(got: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= relative * want.abs() + relative * 2**-6).all()


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("shape", [(128,), (1, 128), (9, 131), (3, 5, 256), (2, 2048), (0, 64)])
def test_rms_norm(shape, unit_offset):
    x, residual, weight = normal(*shape), normal(*shape, seed=1), normal(shape[-1], seed=2)
    y, rstd = triton_kernels.rms_norm(x, weight, EPS, unit_offset)
    assert_close(y, reference.rms_norm(x.double(), weight.double(), EPS, unit_offset), BF16_STEP)
    assert_close(rstd, (x.double().square().mean(-1) + EPS).rsqrt(), FP32_STEPS)
    y, total = triton_kernels.add_rms_norm(x, residual, weight, EPS, unit_offset)
    assert_close(total, x.double() + residual.double(), BF16_STEP)
    assert_close(y, reference.rms_norm(total.double(), weight.double(), EPS, unit_offset), BF16_STEP)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("shape", [(1, 128), (33, 131), (0, 64)])
def test_sum_of_ranks(ranks, shape):
    parts = [normal(*shape, seed=rank) * 2.0 ** (rank % 5) for rank in range(ranks)]
    exact = torch.stack(parts).double().sum(dim=0)
    assert_close(triton_kernels.sum_of_ranks(parts), exact, BF16_STEP)


@pytest.mark.parametrize("shape", [(128, 256), (33, 131), (1, 300)])
@pytest.mark.parametrize("rank", [1, 8, 33])
def test_merge_adapter(shape, rank):
    weight, a, b = normal(*shape), normal(rank, shape[1], seed=1), normal(shape[0], rank, seed=2)
    exact = weight.double() + 0.3 * (b.double() @ a.double())
    got = triton_kernels.merge_adapter(weight, a, b, 0.3)
    assert ((got.double() - exact).abs() <= BF16_STEP * exact.abs() + 1e-5 * rank).all()
    assert_close(kernels.merge_adapter(weight, a, b, 0.3), got.double(), BF16_STEP)


@pytest.mark.parametrize("shapes", [[(256, 384)], [(128, 128)] * 5, [(384, 128), (0, 128), (128, 512), (256, 256)]])
def test_block_sums(shapes):
    generator = torch.Generator().manual_seed(len(shapes))
    matrices = [torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8) for shape in shapes]
    matrices.append(torch.randint(-128, 128, (128, 512), generator=generator, dtype=torch.int8)[:, 128:384])
    constants = torch.randint(-(2**63), 2**63 - 1, (2048,), generator=generator)
    got = triton_kernels.block_sums(matrices, constants)
    assert got.dtype == torch.int64 and torch.equal(got, reference_block_sums(matrices, constants))
    assert torch.equal(
        triton_kernels.block_sums(matrices[:1], constants), reference_block_sums(matrices[:1], constants)
    )
    words = [int.from_bytes(bytes(row[:8].view(torch.uint8).tolist()), "little") for row in matrices[-1][:2]]
    alone = matrices[-1].clone().zero_()
    alone[:2, :8] = matrices[-1][:2, :8]
    want = (words[0] * int(constants[0]) + words[1] * int(constants[16])) % 2**64
    assert [int(value) % 2**64 for value in triton_kernels.block_sums([alone], constants)] == [want, 0]


@pytest.mark.parametrize("shape", [(1, 128), (9, 131), (1203, 128), (3, 5, 256), (2, 4096), (0, 64)])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_gradient_of_rms_norm(shape, unit_offset):
    x, dy, weight = normal(*shape), normal(*shape, seed=1), normal(shape[-1], seed=2)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    reference.rms_norm(*exact, EPS, unit_offset).backward(dy.double())
    rstd = (x.float().square().mean(-1) + EPS).rsqrt()
    dx, dw = triton_kernels.rms_norm_backward(dy, x, weight, rstd, unit_offset)
    assert_close(dx, exact[0].grad, BF16_STEP)
    assert dw.dtype == torch.float32
    error = (dw - exact[1].grad).abs().max()
    assert error <= 1e-5 * exact[1].grad.abs().max()


def test_rms_norm_of_unaligned_and_strided_rows():
    x, weight = normal(7, 3 * 129)[:, 129 : 2 * 129], normal(129, seed=2)
    y, _ = triton_kernels.rms_norm(x, weight, EPS)
    assert_close(y, reference.rms_norm(x.double(), weight.double(), EPS), BF16_STEP)


@pytest.mark.parametrize("tokens", [0, 1, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 2), (1, 1)])
def test_heads_are_normalized_in_place(tokens, heads, kv_heads):
    qkv, weight = normal(tokens, (heads + 2 * kv_heads) * 128), normal(128, seed=2)
    for x in qkv.split([heads * 128, kv_heads * 128, kv_heads * 128], dim=-1):
        x = x.unflatten(-1, (-1, 128))
        assert _are_heads_in_place(x) or tokens < 2 or x.is_contiguous()
        for got, want in zip(
            triton_kernels.rms_norm(x, weight, EPS), triton_kernels.rms_norm(x.clone(), weight, EPS), strict=True
        ):
            assert got.is_contiguous() and torch.equal(got, want)


@pytest.mark.parametrize(
    "x",
    [
        normal(3, 4 * 128 + 4)[:, 4:].unflatten(1, (4, 128)),  # from no 16-byte boundary
        normal(3, 4 * 128 + 4)[:, :-4].unflatten(1, (4, 128)),  # tokens apart by no whole loads
        normal(3, 128, 4).mT,
        normal(3, 8 * 12)[:, : 4 * 12].unflatten(1, (4, 12)),
    ],
    ids=["start", "stride", "transposed", "narrow"],
)
def test_misaligned_heads_are_copied(x):
    assert not _are_heads_in_place(x)
    weight = normal(x.shape[-1], seed=2)
    copied = triton_kernels.rms_norm(x.contiguous(), weight, EPS)
    assert all(torch.equal(a, b) for a, b in zip(triton_kernels.rms_norm(x, weight, EPS), copied, strict=True))


TABLES = {width: kernels.rotary_table(width, 64, {"rope_theta": 1e4}) for width in (64, 128)}
TABLE = TABLES[128]
HEADS = [(128, 128, False), (64, 64, True), (256, 64, True), (128, 64, False)]
"""Features of a head, rotated ones, unit offset of its norm."""


@pytest.mark.parametrize(("width", "rotated", "_"), HEADS)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(1, 1, 1), (9, 3, 3), (3, 32, 8), (4, 7, 1), (0, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rotary_and_back(tokens, heads, kv_heads, dtype, width, rotated, _):
    """Views of a wider tensor and contiguous rows, queries with keys and alone, positions in any order."""
    positions, table = torch.randint(0, 64, (tokens,), dtype=dtype), TABLES[rotated]
    qkv = normal(tokens, heads + 2 * kv_heads, width)
    q, k, _ = qkv.split([heads, kv_heads, kv_heads], dim=1)
    turned = triton_kernels.rotary(q, k, table, positions, False)
    for got, want in zip(turned, reference.rotary(q.double(), k.double(), table, positions), strict=True):
        assert got.is_contiguous()
        assert_close(got, want, BF16_STEP)
    back = triton_kernels.rotary(*turned, table, positions, True)
    for got, want in zip(back, (q, k), strict=True):
        assert tokens == 0 or (got.double() - want.double()).norm() <= 2 * BF16_STEP * want.double().norm()
    apart = triton_kernels.rotary(q.contiguous(), q, table, positions, False)
    assert torch.equal(apart[0], turned[0]) and torch.equal(apart[1], turned[0])


@pytest.mark.parametrize(("width", "rotated", "unit_offset"), HEADS)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(1, 1, 1), (5, 3, 3), (2, 9, 5), (0, 2, 2)])
def test_norm_rotary_matches_norm_then_rotary(tokens, heads, kv_heads, width, rotated, unit_offset):
    """Heads of a merged projection, every second one of it, of a contiguous tensor, and some off 16-byte boundaries."""
    positions, table = torch.randint(0, 64, (tokens,)), TABLES[rotated]
    weights, rows = (normal(width, seed=2), normal(width, seed=3)), normal(tokens, (heads + 3 * kv_heads) * width + 4)
    merged = rows[:, :-4].unflatten(-1, (-1, width)), rows[:, 4:].unflatten(-1, (-1, width))
    for qkv in (merged[0].contiguous(), *merged):
        q, k, _ = qkv.split([heads, 2 * kv_heads, kv_heads], dim=1)
        k = k[:, ::2]
        *got, q_rstd, k_rstd = triton_kernels.norm_rotary(q, k, *weights, EPS, table, positions, unit_offset)
        q, q_want = triton_kernels.rms_norm(q, weights[0], EPS, unit_offset)
        k, k_want = triton_kernels.rms_norm(k, weights[1], EPS, unit_offset)
        assert torch.equal(q_rstd, q_want) and torch.equal(k_rstd, k_want)
        for x, want in zip(got, triton_kernels.rotary(q, k, table, positions, False), strict=True):
            assert x.is_contiguous() and torch.equal(x, want)


def test_positions_outside_the_table_give_nan():
    """The rows around the table are finite, so reading them would show."""
    table, positions = torch.ones(66, 128).bfloat16(), torch.tensor([63, 64, -1, 2**40, 0])
    table[1:-1] = TABLE
    q, k = normal(5, 3, 128), normal(5, 1, 128)
    for inverse in (False, True):
        got = triton_kernels.rotary(q, k, table[1:-1], positions, inverse)
        inside = triton_kernels.rotary(q[::4], k[::4], TABLE, positions[::4], inverse)
        for x, want in zip(got, inside, strict=True):
            assert x[1:4].isnan().all() and torch.equal(x[::4], want)
    weights = (normal(128, seed=2), normal(128, seed=3))
    got = triton_kernels.norm_rotary(q, k, *weights, EPS, table[1:-1], positions)
    inside = triton_kernels.norm_rotary(q[::4], k[::4], *weights, EPS, TABLE, positions[::4])
    for x, want in zip(got[:2], inside[:2], strict=True):
        assert x[1:4].isnan().all() and torch.equal(x[::4], want)


@pytest.mark.parametrize("shape", [(1, 1), (9, 131), (2, 3, 1500), (0, 8)])
def test_silu_mul_and_its_gradient(shape):
    both = normal(*shape[:-1], 2 * shape[-1]) * 3
    gate, up = both.chunk(2, dim=-1)
    dy = normal(*shape, seed=5)
    exact = [x.double().requires_grad_() for x in (gate, up)]
    expected = reference.silu_mul(*exact)
    expected.backward(dy.double())
    assert_close(triton_kernels.silu_mul(gate, up), expected.detach(), BF16_STEP)
    for got, x in zip(triton_kernels.silu_mul_backward(dy, gate, up), exact, strict=True):
        assert_close(got, x.grad, BF16_STEP)


@pytest.mark.parametrize("shape", [(1, 1, 128), (9, 3, 256), (0, 2, 128)])
def test_sigmoid_mul_and_its_gradient(shape):
    x, gate = (normal(*shape[:-1], 2 * shape[-1]) * 3).chunk(2, dim=-1)
    dy = normal(shape[0], shape[1] * shape[2], seed=5)
    exact = [x.double().requires_grad_() for x in (x, gate)]
    expected = reference.sigmoid_mul(*exact)
    expected.backward(dy.double())
    assert_close(triton_kernels.sigmoid_mul(x, gate), expected.detach(), BF16_STEP)
    for got, want in zip(triton_kernels.sigmoid_mul_backward(dy, x, gate), exact, strict=True):
        assert_close(got, want.grad, BF16_STEP)


LOGITS = [(1, 128, 99), (70, 200, 130), (131, 64, 530), (600, 64, 20), (9, 64, 600), (0, 64, 8)]
"""Sizes of routers and of vocabularies."""


@pytest.mark.parametrize(("rows", "k", "columns"), LOGITS)
def test_logits(rows, k, columns):
    hidden, weight = normal(rows, k), normal(columns, k, seed=1)
    got = triton_kernels.logits(hidden, weight)
    expected = hidden.double() @ weight.double().t()
    assert got.dtype == torch.float32 and got.shape == expected.shape
    assert (got - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("tile", [TILES[512], MANY_ROWS])
@pytest.mark.parametrize(("k", "offset"), [(200, 0), (200, 1), (204, 0)])
def test_logits_of_several_tiles_a_program(tile, k, offset):
    """Edges in rows, columns and K; operands or rows that do not start at a multiple of 16 bytes."""
    hidden, weight = normal(300, k), normal(1000 * k + offset, seed=1)[offset:].view(1000, k)
    expected = hidden.double() @ weight.double().t()
    got = triton_logits_by(hidden, weight, tile)
    assert (got - expected).norm() <= 1e-6 * expected.norm()


def test_logits_of_a_batch_are_no_view():
    got = triton_kernels.logits(normal(2, 3, 64), normal(40, 64, seed=1))
    assert got.shape == (2, 3, 40) and not got._is_view()


@pytest.mark.parametrize("columns", [1, 99, 4096, 9001])
def test_log_probs(columns):
    logits = normal(6, columns + 3).float()[:, :columns] * 6
    logits[:, columns // 2 + 1 :] = -torch.inf
    tokens = torch.randint(0, columns // 2 + 1, (6, 2))
    temperature = torch.tensor([0.3, 0.7, 1.0, 1.0, 1.5, 2.0])
    got = triton_kernels.log_probs(logits, tokens, temperature)
    expected = reference.log_probs(logits.double(), tokens, temperature)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())


@pytest.mark.parametrize(("columns", "asked"), [(1, 1), (99, 2), (9001, 1)])
def test_gradient_of_log_probs(columns, asked):
    logits = normal(5, columns + 3).float()[:, :columns] * 6
    logits[:, columns // 2 + 1 :] = -torch.inf
    tokens = torch.randint(0, columns // 2 + 1, (5, asked))
    temperature = torch.tensor([0.3, 0.7, 1.0, 1.5, 2.0])
    gradient = normal(5, asked, seed=3).float()
    exact = logits.double().requires_grad_()
    reference.log_probs(exact, tokens, temperature).backward(gradient.double())
    got = triton_kernels.log_probs_backward(gradient, logits, tokens, temperature)
    assert got.dtype == torch.float32
    assert_close(got, exact.grad, 2**-16)


def test_log_probs_of_a_row_with_nan_is_nan():
    logits = torch.zeros(2, 50)
    logits[1, 7] = torch.nan
    got = triton_kernels.log_probs(logits, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2))
    assert got[0].isfinite() and got[1].isnan()


@pytest.mark.parametrize("columns", [1, 99, 4096, 4097, 9001])
def test_drawn_tokens_with_log_probs_and_ranks(columns):
    """Tokens of the reference, log-probabilities of the trainer, ranks of a sort."""
    rows = 8
    logits = normal(rows, columns + 3).float()[:, :columns] * 3
    logits[:, columns // 2 + 1 :: 2] = -torch.inf
    logits[3, : columns // 2] = -torch.inf
    temperature = torch.tensor([0.3, 0.7, 1.0, 2.0]).repeat(rows // 4)
    seeds = torch.randint(-(2**63), 2**63 - 1, (2, rows), generator=torch.Generator().manual_seed(columns))
    tokens, normalized = triton_kernels.draw(logits, temperature, *seeds)
    expected, _ = reference_draw(logits, temperature, *seeds)
    assert torch.equal(tokens, expected)
    got, ranks = triton_kernels.drawn_log_probs(logits, tokens, temperature, normalized)
    assert torch.equal(got, triton_kernels.log_probs(logits, tokens[:, None], temperature))
    assert got.isfinite().all()
    assert torch.equal(ranks, (logits >= logits.gather(1, tokens[:, None])).sum(dim=1))
    assert (ranks >= 1).all() and (columns < 99 or (ranks > 1).any())


def test_draw_of_many_rows_in_several_groups(monkeypatch):
    """More rows than one group, with a remainder, in two chunks."""
    monkeypatch.setattr(log_probs, "ROWS_TOGETHER", 16)
    logits, rows = normal(40, 4100).float() * 3, 40
    seeds = torch.randint(-(2**63), 2**63 - 1, (2, rows), generator=torch.Generator().manual_seed(0))
    tokens, normalized = triton_kernels.draw(logits, torch.ones(rows), *seeds)
    assert torch.equal(tokens, reference_draw(logits, torch.ones(rows), *seeds)[0])
    got, ranks = triton_kernels.drawn_log_probs(logits, tokens, torch.ones(rows), normalized)
    assert (got[:, 0] - logits.log_softmax(1).gather(1, tokens[:, None])[:, 0]).abs().max() < 1e-5
    assert torch.equal(ranks, (logits >= logits.gather(1, tokens[:, None])).sum(dim=1))
    for some in (slice(7, 8), slice(30, 40)):
        again, of = triton_kernels.draw(logits[some], torch.ones(rows)[some], *seeds[:, some])
        assert torch.equal(again, tokens[some])
        assert torch.equal(of.log_sum, normalized.log_sum[some])


def test_a_chunk_without_a_token_is_never_drawn_from():
    logits = torch.full((16, 3 * 4096), -torch.inf)
    logits[:, 4100], logits[:, 9000] = 0.0, -2.0
    tokens, normalized = triton_kernels.draw(logits, torch.ones(16), torch.arange(16), torch.arange(16))
    assert set(tokens.tolist()) == {4100, 9000}
    got, ranks = triton_kernels.drawn_log_probs(logits, tokens, torch.ones(16), normalized)
    exact = torch.tensor([0.0, -2.0]).log_softmax(0)[(tokens == 9000).long()]
    assert (got[:, 0] - exact).abs().max() < 1e-6
    assert torch.equal(ranks, 1 + (tokens == 9000).long())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_softmax_gives_a_token_and_nan(value):
    logits = normal(3, 5000).float()
    logits[1] = value
    logits[2, 4500] = value if value != -torch.inf else torch.nan
    tokens, normalized = triton_kernels.draw(logits, torch.ones(3), torch.arange(3), torch.arange(3))
    got, _ = triton_kernels.drawn_log_probs(logits, tokens, torch.ones(3), normalized)
    assert got[0].isfinite() and got[1:].isnan().all()
    assert ((tokens >= 0) & (tokens < 5000)).all()


def test_tiny_shares_are_drawn_at_their_place():
    """Shares of 1e-12, below the FP32 resolution of one column."""
    mass = torch.tensor([1.0, 1e-12, 3.0, 0.0]).double()
    for share, place in ((0.0, 0), (0.2499, 0), (0.25 + 1e-13, 1), (0.2501, 2), (1.0, 2)):
        assert chosen(mass, share) == place


@triton.jit
def _chosen_kernel(mass_ptr, share_ptr, out_ptr, SIZE: tl.constexpr):
    tl.store(out_ptr, _chosen_place(tl.load(mass_ptr + tl.arange(0, SIZE)), tl.load(share_ptr), SIZE))


def chosen(mass: torch.Tensor, share: float) -> int:
    out = torch.zeros(1, dtype=torch.int64)
    _chosen_kernel[(1,)](mass, torch.tensor([share], dtype=torch.float64), out, SIZE=len(mass))
    assert int(reference_chosen(mass[None], torch.tensor([share]).double())) == int(out)
    return int(out)


def test_log_probs_of_an_expanded_token_matrix():
    logits = normal(3, 5000).float()
    tokens = torch.arange(5000).expand(3, 5000)
    got = triton_kernels.log_probs(logits, tokens, torch.ones(3))
    assert torch.equal(got, triton_kernels.log_probs(logits, tokens.contiguous(), torch.ones(3)))
    assert (got.exp().sum(dim=1) - 1).abs().max() < 1e-5


def caches(x: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values with outliers, zeros, values below the smallest scale, Inf and NaN."""
    k, v = x.clone(), x.flip(0) * 3
    k[:, :, 7] *= 100
    v[0, 0] = 0
    k[1, 0] *= 2.0**-70
    v[2, 0, 5], k[3, 0, 3] = float("inf"), float("nan")
    return [k, v]


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bitwise, with all NaN equal."""
    if got.is_floating_point():
        got, want = got.float().nan_to_num(12345.0), want.float().nan_to_num(12345.0)
    return got.shape == want.shape and torch.equal(got, want)


@pytest.mark.parametrize(("tokens", "heads"), [(5, 1), (9, 3), (40, 2)])
@pytest.mark.parametrize("in_part", [False, True])
def test_quantize_and_dequantize_kv(tokens, heads, in_part):
    k, v = caches(normal(tokens, heads, 128))
    if in_part:  # of one merged projection
        k, v = torch.cat([k, v], dim=1).split([heads, heads], dim=1)
    got, want = triton_kernels.quantize_kv(k, v), dispatch.implementation("quantize_kv", "reference")(k, v)
    for actual, desired in zip(got, want, strict=True):
        assert actual.dtype == desired.dtype
        assert same(*(x.view(torch.uint8) if x.itemsize == 1 else x for x in (actual, desired)))
    for seen in (triton_kernels.dequantize_kv(*got[:4]), triton_kernels.quantize_dequantize_kv(k, v)):
        assert all(same(a, b) for a, b in zip(seen, want[4:], strict=True))


def check_dequantized(heads: torch.Tensor) -> None:
    """Programs of 512 heads instead of 16, with which the interpreter takes minutes."""
    got, unused = [torch.empty_like(heads) for _ in range(2)], [torch.empty(0, dtype=torch.uint8)] * 4
    call = (heads, heads.neg(), *unused, *got, len(heads), *(64, 64) * 2)
    _quantize_kernel[(-(-len(heads) // 512), 2)](*call, HEADS=1, ROWS=512, KEEP=False)
    assert_seen(got[0], heads)
    assert_seen(got[1], heads.neg())


@pytest.mark.parametrize("first", mostly_slow(SCALES[::23], fast=(SCALES[0], 6, SCALES[::23][-1])))
def test_every_bf16_value_at_every_scale_matches_the_reference(first):
    for exponent in range(first, first + 23):
        check_dequantized(every_number(exponent))


def test_heads_of_every_maximum_match_the_reference():
    check_dequantized(every_maximum())


@pytest.mark.parametrize("keep", [True, False])
def test_heads_at_odd_addresses_and_strides(keep):
    """At an odd address, with odd strides between tokens and between features."""
    rows = normal(9, 515)
    odd = rows[:, 1:257].unflatten(1, (2, 128)), rows[:, 257:513].unflatten(1, (128, 2)).transpose(1, 2)
    quantize = triton_kernels.quantize_kv if keep else triton_kernels.quantize_dequantize_kv
    want = dispatch.implementation("quantize_kv", "reference")(*odd)
    assert all(same(a.float(), b.float()) for a, b in zip(quantize(*odd), want[-6 if keep else -2 :], strict=True))
    at_an_odd_address = rows.flatten()[1 : 1 + 9 * 256].view(9, 2, 128)
    assert at_an_odd_address.data_ptr() % 4 and at_an_odd_address.is_contiguous()
    got = triton_kernels.quantize_dequantize_kv(at_an_odd_address, at_an_odd_address)
    assert same(got[0], dequantize_heads(quantize_heads(at_an_odd_address)))


@pytest.mark.parametrize("block_size", [16, 48])
def test_write_and_read_kv(block_size):
    k, v = caches(normal(70, 2, 128))
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(1))[:70]
    slots[11] = -1
    written = [torch.zeros(cache_shape(6, block_size, 2), dtype=torch.uint8) for _ in range(2)]
    triton_kernels.write_kv(k, v, written[0], slots)
    dispatch.implementation("write_kv", "reference")(k, v, written[1], slots)
    assert torch.equal(*written)
    table = torch.tensor([[5, 0, 2], [1, 3, 4]], dtype=torch.int32)
    lengths = torch.tensor([block_size + 3, 2 * block_size], dtype=torch.int32)
    cu = torch.tensor([0, *lengths.tolist()]).cumsum(0).to(torch.int32)
    call = (written[0], table, lengths, cu, int(cu[-1]), int(lengths.max()))
    got, want = triton_kernels.read_kv(*call), dispatch.implementation("read_kv", "reference")(*call)
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


WRITES = [(1, 1, 1, 16), (9, 3, 3, 48), (3, 32, 4, 16), (21, 7, 1, 32), (0, 2, 2, 16)]
"""Tokens, heads of queries, of keys and values, tokens of a page."""


def write_slots(tokens: int, pages: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions, and scattered slots, some -1; of several tokens the last one has no slot."""
    chance = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(pages * block_size, generator=chance)[:tokens]
    slots[2::5] = -1
    return torch.randint(0, 64, (tokens,), generator=chance), slots[: tokens - (tokens > 2)]


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "block_size"), WRITES)
@pytest.mark.parametrize(
    ("order", "heads_of"),
    [((0, 1, 2, 3, 4), HEADS[0]), ((0, 1, 3, 2, 4), HEADS[0]), ((0, 1, 3, 2, 4), HEADS[2])],
    ids=["NHD", "HND", "in part"],
)
def test_norm_rotary_write_matches_norm_rotary_and_a_copy(tokens, heads, kv_heads, block_size, order, heads_of):
    """In both of vLLM's layouts; slots without a token keep their contents."""
    width, rotated, unit_offset = heads_of
    (q, k, v), (positions, slots) = merged_heads(tokens, heads, kv_heads, width), write_slots(tokens, 4, block_size)
    call = q, k, v, normal(width, seed=2), normal(width, seed=3), EPS, TABLES[rotated], positions, unit_offset
    q_want, k_want, *_ = triton_kernels.norm_rotary(q, k, *call[3:])
    shape = (4, 2, block_size, kv_heads, width)
    want, got = (normal(*(shape[i] for i in order), seed=4).permute(*order) for _ in range(2))
    assert want.shape == shape
    stored = slots >= 0
    for part, x in zip(want.unbind(1), (k_want, v), strict=True):
        part[slots[stored] // block_size, slots[stored] % block_size] = x[: len(slots)][stored]
    out = triton_kernels.norm_rotary_write(*call, *got.unbind(1), slots)
    assert out.is_contiguous() and same_bytes(out, q_want)
    assert same_bytes(got, want)


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "block_size"), WRITES)
def test_norm_rotary_write_fp8_matches_norm_rotary_and_write_kv(tokens, heads, kv_heads, block_size):
    (q, k, v), (positions, slots) = merged_heads(tokens, heads, kv_heads), write_slots(tokens, 4, block_size)
    weights = normal(128, seed=2), normal(128, seed=3)
    q_want, k_want, *_ = triton_kernels.norm_rotary(q, k, *weights, EPS, TABLE, positions)
    got, *caches = (torch.full(cache_shape(4, block_size, kv_heads), 7, dtype=torch.uint8) for _ in range(3))
    out = triton_kernels.norm_rotary_write_fp8(q, k, v, *weights, EPS, TABLE, positions, False, got, slots)
    assert out.is_contiguous() and same_bytes(out, q_want)
    for want, backend in zip(caches, ("triton", "reference"), strict=True):
        count = len(slots)
        dispatch.implementation("write_kv", backend)(k_want[:count], v[:count], want, slots)
        assert torch.equal(got, want)
