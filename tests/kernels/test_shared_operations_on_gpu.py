# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The shared operations on a GPU: right, and the same in every bit for any batch, chunking and entry point."""

import operator_calls
import pytest
import reference_operations as reference
import torch
from reference_operations import EPS, ROUNDING
from tensors import merged_heads, packed, same_bytes

from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch
from jetrl_verl.reference import cache_shape
from jetrl_verl.sync.operations_probe import stated_operations

COUNTS = [1, 2, 3, 7, 16, 17, 64, 65, 100, 128, 129, 257, 1000, 4096]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16().cuda()


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("k", [128, 256, 1536, 4096, 5120])
def test_norms_do_not_depend_on_the_batch_or_fusion(k, unit_offset):
    x, residual, of_norm = normal(4097, k), normal(4097, k, seed=1), (normal(k, seed=2), EPS, unit_offset)
    whole, rstd = torch.ops.jetrl.rms_norm(x, *of_norm)
    expected = reference.rms_norm(x.double(), of_norm[0].double(), EPS, unit_offset)
    assert (whole.double() - expected).norm() <= ROUNDING / 2 * expected.norm()
    # After the sum of squares every step is rounded by itself, 1 + weight too: no instruction fuses two of them.
    factor = of_norm[0].float() + 1 if unit_offset else of_norm[0].float()
    assert torch.equal(whole, (x.float() * rstd[:, None] * factor).bfloat16())
    y, total = kernels.add_rms_norm(x, residual, *of_norm)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, kernels.rms_norm(x + residual, *of_norm))
    for count in COUNTS:
        rows = torch.randperm(4097, device="cuda")[:count]
        assert torch.equal(kernels.rms_norm(x[rows], *of_norm), whole[rows])
        assert torch.equal(kernels.add_rms_norm(x[rows], residual[rows], *of_norm)[0], y[rows])


@pytest.mark.parametrize(("k", "columns"), [(2048, 151936), (4096, 32000), (896, 99)])
def test_logits_and_log_probs_do_not_depend_on_the_batch(k, columns):
    hidden, weight = normal(1025, k), normal(columns, k, seed=1)
    whole = kernels.logits(hidden, weight)
    expected = hidden[:64].double() @ weight.double().t()
    # The tensor core adds 16 products at a time and cuts the sum to FP32: less than one step of 2^-23 each time.
    assert (whole[:64] - expected).norm() <= k / 16 * 2**-24 * expected.norm()
    tokens = torch.arange(1025, device="cuda")[:, None] % columns
    temperature = torch.linspace(0.4, 1.6, 1025).cuda()
    of_all = kernels.log_probs(whole, tokens, temperature)
    exact = reference.log_probs(whole[:64].double(), tokens[:64], temperature[:64])
    assert (of_all[:64] - exact).abs().max() <= 1e-5 * exact.abs().max()
    for count in COUNTS:
        rows = torch.randperm(1025, device="cuda")[:count]
        some = kernels.logits(hidden[rows], weight)
        assert torch.equal(some, whole[rows])
        assert torch.equal(kernels.log_probs(some, tokens[rows], temperature[rows]), of_all[rows])


def test_router_logits_do_not_depend_on_the_tile():
    """Few columns use other tiles; a column has the same bits as among many."""
    hidden, weight = normal(10000, 2048), normal(128, 2048, seed=1)
    whole = kernels.logits(hidden, weight)
    among_many = kernels.logits(hidden[:300], torch.cat([weight, normal(2000, 2048, seed=2)]))
    assert torch.equal(among_many[:, :128], whole[:300])
    for count in [*COUNTS, 511, 512, 513, 8192, 8193]:
        rows = torch.randperm(10000, device="cuda")[:count]
        assert torch.equal(kernels.logits(hidden[rows], weight), whole[rows]), count


@pytest.mark.parametrize("rows", [1, 63, 300])
@pytest.mark.parametrize("sizes", [(75968, 75968), (37984,) * 4, (1, 151900, 35)], ids=str)
def test_vocabulary_shards_match_the_whole_vocabulary(rows, sizes):
    """Over tensor-parallel ranks, whatever the other columns of a rank."""
    hidden, weight = normal(rows, 2048), normal(151936, 2048, seed=1)
    whole = kernels.logits(hidden, weight)
    assert torch.equal(torch.cat([kernels.logits(hidden, shard) for shard in weight.split(sizes)], dim=-1), whole)


def test_log_probs_do_not_depend_on_removed_padding():
    padded = normal(65, 32064, seed=2).float()
    tokens = torch.arange(65, device="cuda")[:, None] * 400
    for used in (32000, 31999):
        cut = padded[:, :used]
        expected = kernels.log_probs(cut.contiguous(), tokens, torch.ones(65, device="cuda"))
        assert torch.equal(kernels.log_probs(cut, tokens, torch.ones(65, device="cuda")), expected)


def test_unused_vocabulary_is_masked_in_place_under_autograd():
    hidden, weight = normal(2, 5, 128).requires_grad_(), normal(40, 128, seed=1).requires_grad_()
    logits = kernels.logits(hidden, weight)
    logits[..., 33:] = -1e30
    logits[..., :33].sum().backward()
    assert hidden.grad is not None and weight.grad[33:].abs().max() == 0


OF_HEADS = [(128, 128, False), (64, 64, False), (256, 64, True), (256, 256, False)]
"""Features of a head, rotated ones, unit offset of its norm: of most models, small ones, Qwen3.5; all of a wide one."""


@pytest.mark.parametrize(("width", "rotary_dim", "_"), OF_HEADS)
def test_rotary_and_activation_do_not_depend_on_the_batch(width, rotary_dim, _):
    table = kernels.rotary_table(rotary_dim, 8192, {"rope_theta": 1e6}).cuda()
    qkv, both = normal(4097, 48, width), normal(4097, 2 * 3072)
    positions = torch.arange(4097, device="cuda").flip(0) // 2
    q, k, _ = qkv.split([32, 8, 8], dim=1)
    rotated, active = kernels.rotary(q, k, table, positions), kernels.silu_mul(*both.chunk(2, -1))
    assert torch.equal(active, kernels.silu_mul(*(half.contiguous() for half in both.chunk(2, -1))))
    copied = kernels.rotary(q.contiguous(), k.contiguous(), table, positions.to(torch.int32))
    # A product of BF16 values is exact in FP32 and a sum of two of them is rounded once: the CPU has the same bits.
    on_cpu = kernels.rotary(q.cpu(), k.cpu(), table.cpu(), positions.cpu())
    for got, copy, other in zip(rotated, copied, on_cpu, strict=True):
        assert got.is_contiguous() and torch.equal(got, copy) and torch.equal(got.cpu(), other)
    for count in COUNTS:
        some = torch.randperm(4097, device="cuda")[:count]
        got_some = kernels.rotary(q[some], k[some], table, positions[some])
        assert all(torch.equal(x, whole[some]) for x, whole in zip(got_some, rotated, strict=True))
        assert torch.equal(kernels.silu_mul(*both[some].chunk(2, -1)), active[some])


def test_positions_outside_the_table_give_nan():
    table = kernels.rotary_table(128, 64, {"rope_theta": 1e6}).cuda()
    positions = torch.tensor([63, 64, -1, 2**40, 0], device="cuda")
    for x in kernels.rotary(normal(5, 4, 128), normal(5, 2, 128), table, positions):
        assert x[1:4].isnan().all() and x[::4].isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (16, 2), (5, 1)])
def test_heads_of_a_merged_projection_match_a_copy(heads, kv_heads):
    """The trainer normalizes contiguous heads, the rollout those of the merged projection."""
    weight = normal(128, seed=2)
    for tokens in (1, 2, 16, 333, 4097):
        qkv = normal(tokens, (heads + 2 * kv_heads) * 128)
        for x in qkv.split([heads * 128, kv_heads * 128, kv_heads * 128], dim=-1):
            x = x.unflatten(-1, (-1, 128))
            got = kernels.rms_norm(x, weight, EPS)
            assert got.is_contiguous() and torch.equal(got, kernels.rms_norm(x.contiguous(), weight, EPS))
    odd = normal(64, heads * 128 + 4)[:, 4:].unflatten(-1, (-1, 128))
    assert torch.equal(kernels.rms_norm(odd, weight, EPS), kernels.rms_norm(odd.contiguous(), weight, EPS))


@pytest.mark.parametrize(("width", "rotary_dim", "unit_offset"), OF_HEADS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 4), (16, 8), (5, 1)])
def test_norm_rotary_matches_norm_then_rotary(heads, kv_heads, width, rotary_dim, unit_offset):
    """In the trainer's layout, contiguous heads, and the rollout's, a merged projection, whose every second head may be
    a gate; gradients too."""
    table = kernels.rotary_table(rotary_dim, 8192, {"rope_theta": 1e6}).cuda()
    weights = normal(width, seed=2), normal(width, seed=3)
    for tokens in (1, 2, 16, 333, 4097):
        positions = torch.arange(tokens, device="cuda").flip(0)
        q, k, _ = normal(tokens, 2 * heads + 2 * kv_heads, width).split([2 * heads, kv_heads, kv_heads], dim=1)
        merged = q[:, ::2], k
        normed = (kernels.rms_norm(x, w, EPS, unit_offset) for x, w in zip(merged, weights, strict=True))
        want = kernels.rotary(*normed, table, positions)
        for heads_of in (merged, [x.contiguous() for x in merged]):
            rotated = kernels.norm_rotary(*heads_of, *weights, EPS, table, positions, unit_offset)
            for x, y in zip(rotated, want, strict=True):
                assert x.is_contiguous() and torch.equal(x, y)
    gradients = []
    for one in (True, False):
        leaves = [x.clone().requires_grad_() for x in (*merged, *weights)]
        q, k, q_weight, k_weight = leaves
        if one:
            y = torch.cat(kernels.norm_rotary(q, k, q_weight, k_weight, EPS, table, positions, unit_offset), dim=1)
        else:
            normed = (kernels.rms_norm(x, w, EPS, unit_offset) for x, w in ((q, q_weight), (k, k_weight)))
            y = torch.cat(kernels.rotary(*normed, table, positions), dim=1)
        y.backward(normal(*y.shape, seed=9))
        gradients.append([x.grad for x in leaves])
    assert all(torch.equal(actual, desired) for actual, desired in zip(*gradients, strict=True))


def heads_for_a_cache(
    tokens: int, heads: int, kv_heads: int, slots: int, width=128, rotary_dim=128, unit_offset=False
) -> tuple[tuple, torch.Tensor]:
    """A merged projection's heads, the other operands up to the positions, and slots: scattered, some -1, and none for
    the last token, which is padding."""
    qkv = merged_heads(tokens, heads, kv_heads, width, "cuda")
    table = kernels.rotary_table(rotary_dim, 8192, {"rope_theta": 1e6}).cuda()
    of_tokens = torch.randperm(slots, device="cuda")[:tokens]
    of_tokens[2::5] = -1
    positions = torch.randint(0, 8192, (tokens,), device="cuda")
    weights = normal(width, seed=2), normal(width, seed=3)
    return (*qkv, *weights, EPS, table, positions, unit_offset), of_tokens[: tokens - (tokens > 2)]


OF_CACHES = [(32, 4), (32, 8), (16, 8), (7, 1), (1, 1)]


@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "of_heads"),
    [*((*heads, OF_HEADS[0]) for heads in OF_CACHES), (16, 4, OF_HEADS[2]), (14, 2, OF_HEADS[1])],
)
def test_norm_rotary_write_matches_norm_rotary_and_vllms_copy(heads, kv_heads, of_heads, block_size):
    """In both of vLLM's layouts of a cache, for any number of tokens; slots without a token keep their contents."""
    from vllm._custom_ops import reshape_and_cache_flash

    one = torch.ones((), device="cuda")
    for tokens in (1, 2, 16, 333, 4097):
        pages = -(-tokens // block_size) + 2
        (q, k, v, *others), slots = heads_for_a_cache(tokens, heads, kv_heads, pages * block_size, *of_heads)
        q_want, k_want = kernels.norm_rotary(q, k, *others)
        shape = (pages, 2, block_size, kv_heads, of_heads[0])
        for order in ((0, 1, 2, 3, 4), (0, 1, 3, 2, 4)):
            want = normal(*(shape[i] for i in order), seed=4).permute(*order)
            got = want.clone()
            reshape_and_cache_flash(k_want, v.contiguous(), *want.unbind(1), slots, "auto", one, one)
            with torch.no_grad():
                assert same_bytes(kernels.norm_rotary_write(q, k, v, *others, *got.unbind(1), slots), q_want)
            assert same_bytes(got, want)


@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), OF_CACHES)
def test_norm_rotary_write_fp8_matches_norm_rotary_and_write_kv(heads, kv_heads, block_size):
    """With ``write_kv``'s kernel, and with the reference on the CPU."""
    for tokens in (1, 2, 16, 333, 4097):
        pages = -(-tokens // block_size) + 2
        (q, k, v, *others), slots = heads_for_a_cache(tokens, heads, kv_heads, pages * block_size)
        q_want, k_want = kernels.norm_rotary(q, k, *others)
        got, want = (torch.full(cache_shape(pages, block_size, kv_heads), 7, dtype=torch.uint8) for _ in range(2))
        fused, separate = got.cuda(), got.cuda()
        with torch.no_grad():
            assert same_bytes(kernels.norm_rotary_write_fp8(q, k, v, *others, fused, slots), q_want)
            kernels.write_kv(k_want, v, separate, slots)
        count = len(slots)
        run = dispatch.implementation("write_kv", "reference")
        run(k_want[:count].cpu(), v[:count].cpu(), want, slots.cpu())
        assert torch.equal(fused, separate) and torch.equal(fused.cpu(), want)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_captured_write_follows_the_slots_of_its_replay(fp8):
    """As in vLLM's CUDA graphs: one buffer of slots, padded with -1 beyond the requests of a step."""
    tokens, kv_heads = 8, 4
    (*operands,), _ = heads_for_a_cache(tokens, 32, kv_heads, 64)
    slots = torch.full((tokens,), -1, device="cuda")
    if fp8:
        run, pages = kernels.norm_rotary_write_fp8, (torch.zeros(cache_shape(4, 16, kv_heads), dtype=torch.uint8),)
    else:
        run, pages = kernels.norm_rotary_write, tuple(torch.zeros(2, 4, 16, kv_heads, 128, dtype=torch.bfloat16))
    got, want = ([x.cuda() for x in pages] for _ in range(2))
    with torch.no_grad():
        run(*operands, *got, slots)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = run(*operands, *got, slots)
        assert all((x == 0).all() for x in got)
        for step in ([5, -1, 63, 0, -1, -1, -1, -1], [-1, 9, -1, -1, 1, 2, 3, 4]):
            slots.copy_(torch.tensor(step))
            graph.replay()
            assert same_bytes(q, run(*operands, *want, slots))
            assert all(same_bytes(*pair) and (pair[0] != 0).any() for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("head_dim", kernels.HEAD_DIMS)
def test_gradients_of_attention(head_dim):
    lengths, scale = (130, 1, 64), head_dim**-0.5
    cu = packed(*lengths).cuda()
    case = (
        lambda q, k, v: kernels.attention(q, k, v, cu, max(lengths), scale),
        lambda q, k, v: reference.attention(q, k, v, cu.cpu(), scale),
        tuple(normal(sum(lengths), heads, head_dim, seed=heads + i) for i, heads in enumerate((4, 2, 2))),
    )
    reference.check_gradient(case, "cuda", roundings=2)


@pytest.mark.parametrize("shape", [(128, 128), (1000, 896), (2048, 4096)])
@pytest.mark.parametrize("rank", [1, 16, 64])
def test_an_adapter_is_merged_with_the_bits_of_a_cpu(shape, rank):
    weight, a, b = normal(*shape), normal(rank, shape[1], seed=1), normal(shape[0], rank, seed=2)
    got = kernels.merge_adapter(weight, a, b, 0.3)
    assert torch.equal(got.cpu(), kernels.merge_adapter(weight.cpu(), a.cpu(), b.cpu(), 0.3))


@pytest.mark.parametrize("name", reference.cases("cpu"))
def test_gradients_of_the_others(name):
    reference.check_gradient(reference.cases("cuda")[name], "cuda", roundings=2)


def test_the_probe_is_repeatable():
    device = torch.device("cuda")
    assert stated_operations(device, "shared") == stated_operations(device, "shared")


@pytest.fixture(scope="module")
def calls():
    return operator_calls.calls("cuda")


NAMES = sorted(name for name, operation in kernels.OPERATIONS.items() if set(operation.backends) != {"cpu"})


@pytest.mark.parametrize("name", NAMES)
def test_fake_implementations_match_the_real_ones(calls, name):
    run = getattr(torch.ops.jetrl, name).default
    torch.library.opcheck(run, calls[name], test_utils=("test_faketensor",))
