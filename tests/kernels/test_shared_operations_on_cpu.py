# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Each shared operation on the CPU: value, gradient, and independence of a row from the batch."""

import math

import pytest
import reference_operations as reference
import torch
from reference_operations import EPS, ROUNDING, check_gradient
from tensors import normal, packed

from jetrl_verl import kernels
from jetrl_verl.reference import cache_shape

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALE = 128**-0.5
CASES = reference.cases("cpu")


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    check_gradient(CASES[name])


@pytest.mark.parametrize("lengths", [(1,), (5, 123, 1), (64, 64)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (4, 2), (3, 3)])
def test_gradient_of_attention(lengths, heads, kv_heads):
    cu, tokens = packed(*lengths), sum(lengths)
    case = (
        lambda q, k, v: kernels.attention(q, k, v, cu, max(lengths), SCALE),
        lambda q, k, v: reference.attention(q, k, v, cu, SCALE),
        (normal(tokens, heads, 128), normal(tokens, kv_heads, 128, seed=1), normal(tokens, kv_heads, 128, seed=2)),
    )
    check_gradient(case)


def test_a_norm_with_unit_offset_has_the_bits_of_transformers():
    """In rows whose sum of squares torch rounds to the exact one, which are most."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    x, module = normal(512, 256), Qwen3_5RMSNorm(256, EPS).bfloat16()
    module.weight.data = normal(256, seed=1) * torch.exp2(torch.arange(256).float() / -8).bfloat16()
    y, rstd = torch.ops.jetrl.rms_norm(x, module.weight.data, EPS, True)
    same = rstd == (x.float().pow(2).mean(-1) + EPS).rsqrt()
    assert same.float().mean() > 0.5 and torch.equal(y[same], module(x)[same])
    assert not torch.equal(y, kernels.rms_norm(x, module.weight.data + 1, EPS))


HEADS = [(128, 128, False), (64, 64, False), (256, 64, True)]
"""Features of a head, rotated ones, unit offset of its norm: of most models, small ones, Qwen3.5."""


@pytest.mark.parametrize(("width", "rotated", "unit_offset"), HEADS)
def test_norm_rotary_equals_norm_then_rotary_with_gradients(width, rotated, unit_offset):
    """Queries are every second part of a wider tensor, as of a gated projection."""
    table, positions = kernels.rotary_table(rotated, 64, ROPE), torch.randint(0, 64, (33,))
    inputs = normal(33, 3, 2 * width), normal(33, 2, width), normal(width, seed=2), normal(width, seed=3)

    def one_by_one(q, k, q_weight, k_weight):
        q, k = (kernels.rms_norm(x, w, EPS, unit_offset) for x, w in ((q, q_weight), (k, k_weight)))
        return kernels.rotary(q, k, table, positions)

    results, gradients = [], []
    for function in (one_by_one, lambda *x: kernels.norm_rotary(*x, EPS, table, positions, unit_offset)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = torch.cat(function(leaves[0][..., :width], *leaves[1:]), dim=1)
        y.backward(normal(*y.shape, seed=9))
        with torch.no_grad():
            assert torch.equal(y, torch.cat(function(leaves[0][..., :width], *leaves[1:]), dim=1))
        results.append(y)
        gradients.append([x.grad for x in leaves])
    assert torch.equal(*results)
    assert all(torch.equal(actual, desired) for actual, desired in zip(*gradients, strict=True))
    with pytest.raises(ValueError, match=r"norm_rotary: k_weight has shape \(32,\), expected "):
        kernels.norm_rotary(inputs[1], *inputs[1:3], inputs[3][:32], EPS, table, positions)


def heads_for_a_cache(width=128, rotated=128, unit_offset=False) -> tuple[tuple, torch.Tensor]:
    """Operands of seven tokens, and slots of six of them, one of which is not stored."""
    q, k, v = normal(7, 5, width).split([3, 1, 1], dim=1)
    weights, table = (normal(width, seed=2), normal(width, seed=3)), kernels.rotary_table(rotated, 64, ROPE)
    slots = torch.tensor([40, 3, -1, 47, 0, 17])
    return (q, k, v, *weights, EPS, table, torch.tensor([63, 0, 5, 5, 62, 5, 1]), unit_offset), slots


@pytest.mark.parametrize(("width", "rotated", "unit_offset"), HEADS)
def test_norm_rotary_write_equals_norm_rotary_then_write(width, rotated, unit_offset):
    """A BF16 cache as in vLLM on the CPU, and an FP8 one; other slots keep their contents."""
    (q, k, v, *others), slots = heads_for_a_cache(width, rotated, unit_offset)
    q_want, k_want = kernels.norm_rotary(q, k, *others)
    stored = slots >= 0
    pages = normal(3, 1, 16, 2 * width)
    keys, values = (part.transpose(1, 2) for part in pages.chunk(2, dim=-1))
    want = keys.flatten(0, 1).clone(), values.flatten(0, 1).clone()
    for cache, x in zip(want, (k_want, v), strict=True):
        cache[slots[stored]] = kernels.cache_form(x[:6][stored])
    with torch.no_grad():
        assert torch.equal(kernels.norm_rotary_write(q, k, v, *others, keys, values, slots), q_want)
    assert torch.equal(keys.flatten(0, 1), want[0]) and torch.equal(values.flatten(0, 1), want[1])
    if width != 128:
        return
    caches = [torch.full(cache_shape(3, 16, 1), 9, dtype=torch.uint8) for _ in range(2)]
    with torch.no_grad():
        kernels.write_kv(k_want, v, caches[0], slots)
        assert torch.equal(kernels.norm_rotary_write_fp8(q, k, v, *others, caches[1], slots), q_want)
    assert torch.equal(*caches) and (caches[0] != 9).any()


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(v=normal(7, 2, 128)), ValueError, r"values \(7, 2, 128\) and slots \(6,\) do not fit"),
        (dict(slots=torch.arange(8)), ValueError, r"slots \(8,\) do not fit; pass \[N, heads, D\] twice"),
        (dict(v=normal(7, 1, 128).float()), TypeError, "v is torch.float32"),
        (dict(k_weight=normal(64)), ValueError, r"k_weight has shape \(64,\)"),
        (dict(keys=normal(3, 16, 2, 128)), ValueError, r"pages of keys \(3, 16, 2, 128\) and values \(3, 16, 1, 128\)"),
        (dict(keys=normal(3, 1, 16, 128).transpose(1, 2)), ValueError, "of the same strides with contiguous features"),
        (dict(cache=torch.zeros(3, 1, 1, 4096, dtype=torch.uint8)), ValueError, "is not contiguous uint8"),
        (dict(cache=torch.zeros(cache_shape(3, 16, 2), dtype=torch.uint8)), ValueError, "as the cache's"),
    ],
)
def test_norm_rotary_write_raises_for_mismatched_operands(change, error, sentence):
    (q, k, v, q_weight, k_weight, *others), slots = heads_for_a_cache()
    given = dict(q=q, k=k, v=v, q_weight=q_weight, k_weight=k_weight)
    pages = dict(keys=normal(3, 16, 1, 128), values=normal(3, 16, 1, 128))
    fp8 = "cache" in change
    if fp8:
        pages = dict(cache=change["cache"])
    for arguments in (given, pages):
        arguments.update({name: change[name] for name in arguments.keys() & change.keys()})
    run = kernels.norm_rotary_write_fp8 if fp8 else kernels.norm_rotary_write
    with torch.no_grad(), pytest.raises(error, match=sentence):
        run(*given.values(), *others, *pages.values(), change.get("slots", slots))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (
            dict(positions=torch.tensor([0, 64])),
            IndexError,
            "positions from 0 to 64 leave the table of 64; use shorter",
        ),
        (dict(positions=torch.tensor([-1, 3])), IndexError, "positions from -1 to 3 leave the table of 64"),
        (dict(positions=torch.tensor([0.0, 1.0])), TypeError, "positions are torch.float32, expected torch.int64"),
        (dict(positions=torch.arange(3)), ValueError, r"do not fit positions \(3,\) and a table of width 128"),
        (dict(positions=torch.zeros(2, 1, dtype=torch.int64)), ValueError, r"do not fit positions \(2, 1\)"),
        (dict(k=normal(2, 1, 64)), ValueError, r"k \(2, 1, 64\) do not fit"),
        (dict(k=normal(2, 1, 256)), ValueError, r"k \(2, 1, 256\) do not fit"),
    ],
)
def test_rotary_raises_for_mismatched_operands(change, error, sentence):
    inputs = dict(q=normal(2, 3, 128), k=normal(2, 1, 128), table=kernels.rotary_table(128, 64, ROPE))
    with pytest.raises(error, match=sentence):
        kernels.rotary(**inputs | dict(positions=torch.arange(2)) | change)


def test_log_probs_are_rounded_once():
    x = normal(64, 1000).float() * 8
    tokens, temperature = torch.randint(0, 1000, (64, 3)), torch.full((64,), 0.7)
    expected = reference.log_probs(x.double(), tokens, temperature)
    got = kernels.log_probs(x, tokens, temperature)
    spacing = torch.nextafter(got.abs(), torch.tensor(torch.inf)) - got.abs()
    # Half of it by the one rounding; the terms of the sum are 2^-32 apart.
    assert ((got - expected).abs() <= 0.5 * spacing + 1000 * 2**-33).all()


def test_attention_over_several_key_blocks_with_values_far_apart():
    q, k, v = (normal(2300, heads, 128, seed=heads) for heads in (2, 1, 1))
    v = v * torch.exp2(torch.randint(-30, 20, (2300, 1, 1)).float()).bfloat16()
    cu = packed(2300)
    expected = reference.attention(q.double(), k.double(), v.double(), cu, SCALE)
    got = kernels.attention(q, k, v, cu, 2300, SCALE)
    assert ((got.double() - expected).abs() <= ROUNDING * expected.abs().amax(-1, keepdim=True)).all()


def rows_and_functions():
    """Name, rows of input (first dimension) and the operation on them."""
    weight, head = normal(256, seed=3), normal(99, 256, seed=4)
    table = kernels.rotary_table(128, 8192, ROPE)
    tokens = torch.arange(4097) % 99
    yield "rms_norm", normal(4097, 256), lambda x, rows: kernels.rms_norm(x, weight, EPS)
    yield "add_rms_norm", normal(4097, 256), lambda x, rows: torch.cat(kernels.add_rms_norm(x, x.flip(-1), weight, EPS))
    yield "qk_norm", normal(4097, 2, 128), lambda x, rows: kernels.rms_norm(x, weight[:128], EPS)
    yield (
        "rotary",
        normal(4097, 3, 128),
        lambda x, rows: torch.cat(kernels.rotary(x[:, :2], x[:, 2:], table, rows), dim=1),
    )
    yield "silu_mul", normal(4097, 130), lambda x, rows: kernels.silu_mul(*x.chunk(2, -1))
    yield "sigmoid_mul", normal(4097, 2, 256), lambda x, rows: kernels.sigmoid_mul(*x.chunk(2, -1))
    yield "logits", normal(4097, 256), lambda x, rows: kernels.logits(x, head)
    yield (
        "log_probs",
        kernels.logits(normal(4097, 256), head),
        lambda x, rows: kernels.log_probs(x, tokens[rows, None], 0.5 + rows / 4097),
    )


@pytest.mark.parametrize(
    ("name", "x", "function"), list(rows_and_functions()), ids=lambda value: value if type(value) is str else ""
)
def test_a_row_does_not_depend_on_the_batch(name, x, function):
    rows = torch.arange(len(x))
    whole = function(x, rows)
    parts = 2 if name == "add_rms_norm" else 1
    generator = torch.Generator().manual_seed(0)
    for count in [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 257, 1000, 4096]:
        chosen = torch.randperm(len(x), generator=generator)[:count]
        expected = whole.unflatten(0, (parts, -1))[:, chosen].flatten(0, 1)
        assert torch.equal(function(x[chosen], chosen), expected), count


@pytest.mark.parametrize("operation", ["rms_norm", "logits"])
def test_the_order_of_a_contraction_does_not_matter(operation):
    """Stronger than invariance to the batch, and the reason for it: no sum is rounded."""
    x, w = normal(50, 1000), normal(50, 1000, seed=5)
    order = torch.randperm(1000)
    if operation == "logits":
        assert torch.equal(kernels.logits(x[:, order], w[:, order]), kernels.logits(x, w))
    else:
        assert torch.equal(kernels.rms_norm(x[:, order], w[0, order], EPS), kernels.rms_norm(x, w[0], EPS)[:, order])


def test_results_do_not_depend_on_the_number_of_threads():
    x, head, weight = normal(257, 512), normal(300, 512, seed=1), normal(512, seed=2)
    q, k, v = (normal(257, heads, 128, seed=heads) for heads in (4, 2, 2))

    def run() -> list[torch.Tensor]:
        logits = kernels.logits(x, head)
        return [
            kernels.rms_norm(x, weight, EPS),
            kernels.silu_mul(x, x.flip(-1)),
            kernels.attention(q, k, v, packed(200, 57), 200, SCALE),
            logits,
            kernels.gated_delta_rule(
                kernels.causal_conv1d(x, head[:4].t(), packed(200, 57)),
                logits[:, :2],
                logits[:, 2:4],
                head[5, :2],
                head[6, :2],
                packed(200, 57),
            ),
            kernels.log_probs(logits, torch.zeros(257, 1, dtype=torch.int64), torch.ones(257)),
        ]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(3)
        three = run()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


class Cache:
    """A paged cache of one layer with blocks in random order and NaN in unwritten slots."""

    def __init__(self, requests: int, longest: int, kv_heads: int, block: int = 16) -> None:
        per_request = -(-longest // block)
        self.table = torch.randperm(requests * per_request).view(requests, per_request)
        shape = (requests * per_request, kv_heads, block, 128)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(2))

    def write(self, request: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        positions = torch.arange(start, start + len(k))
        blocks, offsets = self.table[request][positions // 16], positions % 16
        self.keys[blocks, :, offsets] = kernels.cache_form(k)
        self.values[blocks, :, offsets] = kernels.cache_form(v)


@pytest.mark.parametrize("lengths", [(70, 1, 33, 128), (1100,)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_decode_and_chunked_prefill_equal_whole_sequences(lengths, chunk):
    """A rollout's calls, chunk by chunk with all requests in one, against the trainer's packed batch."""
    chunk = max(chunk, max(lengths) // 32)
    q, k, v = (normal(sum(lengths), heads, 128, seed=heads) for heads in (4, 2, 2))
    cu = packed(*lengths)
    whole = kernels.attention(q, k, v, cu, max(lengths), SCALE)
    cache = Cache(len(lengths), max(lengths), 2)
    for start in range(0, max(lengths), chunk):
        live = [r for r, length in enumerate(lengths) if length > start]
        spans = [slice(int(cu[r]) + start, int(cu[r]) + min(start + chunk, lengths[r])) for r in live]
        for r, span in zip(live, spans, strict=True):
            cache.write(r, start, k[span], v[span])
        fresh = torch.tensor([0] + [span.stop - span.start for span in spans])
        seq_lens = torch.tensor([span.stop for span in spans]) - cu[live]
        got = kernels.paged_attention(
            torch.cat([q[span] for span in spans]), cache.keys, cache.values, fresh.cumsum(0), seq_lens,
            cache.table[live], SCALE,
        )  # fmt: skip
        assert torch.equal(got, torch.cat([whole[span] for span in spans]))


def test_inf_and_nan_stay_in_their_rows():
    x = normal(4, 256)
    x[1, 5], x[2, 6] = torch.nan, torch.inf
    for y in (kernels.rms_norm(x, normal(256), EPS), kernels.silu_mul(x, x), kernels.logits(x, normal(9, 256))):
        assert y[0].isfinite().all() and y[3].isfinite().all()
        assert not y[1].isfinite().all() and not y[2].isfinite().all()
    logits = torch.zeros(3, 5)
    logits[1, 2] = torch.nan
    log_probs = kernels.log_probs(logits, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3))
    assert log_probs[1].isnan() and log_probs[0] == log_probs[2] == torch.tensor(-math.log(5))
    q, k, v = (normal(6, 1, 128, seed=s) for s in range(3))
    k[4, 0, 0] = torch.nan
    out = kernels.attention(q, k, v, packed(3, 3), 3, SCALE)
    assert out[:4].isfinite().all() and out[4:].isnan().all()


def test_zeros_and_large_values():
    zeros = torch.zeros(3, 256).bfloat16()
    assert torch.equal(kernels.rms_norm(zeros, normal(256), EPS), zeros)
    large = torch.full((3, 256), 3e38).bfloat16()
    assert torch.equal(kernels.rms_norm(large, torch.ones(256), EPS), torch.ones(3, 256).bfloat16())
    gate = torch.tensor([-torch.inf, -3e38, -100.0, 0.0, 100.0, 3e38]).bfloat16()
    assert torch.equal(
        kernels.silu_mul(gate, torch.ones(6).bfloat16())[[0, 1, 3, 4, 5]], gate.clamp(min=0)[[0, 1, 3, 4, 5]]
    )
    q, v = zeros[:, :128].unsqueeze(1), normal(3, 1, 128)
    means = v.double().cumsum(0) / torch.arange(1, 4)[:, None, None]
    assert torch.equal(kernels.attention(q, q, v, packed(3), 3, SCALE), means.bfloat16())


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min * 2.0**-64])
def test_masked_logits_do_not_change_log_probs(hidden):
    """Masked with minus infinity, as in the rollout, and with a very low number, as in the trainer."""
    logits = normal(20, 90).float() * 3
    tokens, temperature = torch.randint(0, 90, (20, 1)), torch.full((20,), 0.6)
    padded = torch.cat([logits, torch.full((20, 6), hidden)], dim=-1)
    assert torch.equal(kernels.log_probs(padded, tokens, temperature), kernels.log_probs(logits, tokens, temperature))


@pytest.mark.parametrize("parameters", [ROPE, LLAMA3], ids=["default", "llama3"])
def test_the_rotary_table_matches_hugging_face(parameters):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=128, max_position_embeddings=8192, rope_parameters=dict(parameters))
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(8192)[None])
    expected = torch.cat([cos[0, :, :64], sin[0, :, :64]], dim=-1)
    table = kernels.rotary_table(128, 8192, parameters)
    assert table.dtype == torch.bfloat16 and table.shape == (8192, 128)
    # FP32 angles are off by up to 8192 * 2^-24 of a turn's radian.
    assert (table.float() - expected).abs().max() <= 2**-9 + 8192 * 2**-23
    assert torch.equal(kernels.rotary_table(128, 1500, parameters), table[:1500])


def test_unknown_rotary_scaling_raises():
    with pytest.raises(ValueError, match="expected a rope_type of default, llama3, got yarn"):
        kernels.rotary_table(128, 8, {"rope_type": "yarn", "rope_theta": 1e4})


def test_another_head_dimension_raises():
    q = normal(4, 1, 96)
    with pytest.raises(ValueError, match="expected heads of 64 or 128 or 256, got heads of 96"):
        kernels.attention(q, q, q, packed(4), 4, 0.125)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: kernels.rms_norm(x, x[0], EPS), "rms_norm: x"),
        (lambda x: kernels.add_rms_norm(x.bfloat16(), x, x[0], EPS), "add_rms_norm: residual"),
        (lambda x: kernels.silu_mul(x.bfloat16(), x), "silu_mul: up"),
        (lambda x: kernels.sigmoid_mul(x.bfloat16(), x), "sigmoid_mul: gate"),
        (lambda x: kernels.logits(x, x), "logits: hidden"),
        (lambda x: kernels.rotary(x.bfloat16(), x, x, x), "rotary: k"),
    ],
)
def test_activations_of_another_type_raise(call, name):
    with pytest.raises(TypeError, match=f"{name} is torch.float32, expected torch.bfloat16; cast it where it is made"):
        call(torch.randn(2, 128))


def test_bf16_logits_raise():
    with pytest.raises(TypeError, match="logits are torch.bfloat16"):
        kernels.log_probs(normal(2, 8), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2))


def test_operands_are_not_broadcast():
    """A CPU would expand them; a GPU kernel would read past the smaller operand."""
    x, weight = torch.ones(4, 256).bfloat16(), torch.ones(256).bfloat16()
    scores, tokens = torch.zeros(4, 16), torch.zeros(4, 1, dtype=torch.int64)
    for call in (
        lambda: kernels.rms_norm(x, weight[:128], 1e-6),
        lambda: kernels.add_rms_norm(x, x[:1], weight, 1e-6),
        lambda: kernels.rms_norm_quantize_1x128(x, weight[:128], 1e-6, "fp32"),
        lambda: kernels.add_rms_norm_quantize_1x128(x, x[:1], weight, 1e-6, "fp32", with_normed=True),
        lambda: kernels.logits(x[:, :128], x),
        lambda: kernels.causal_conv1d(x, x.t()[:128], packed(4)),
        lambda: kernels.causal_conv1d_update(x, x.t(), x[None], *[packed(4)] * 3),
        lambda: kernels.gated_rms_norm(x.unflatten(1, (2, 128)), x[:, None, :128], weight[:128], 1e-6),
        lambda: kernels.log_probs(scores, tokens, torch.ones(1)),
        lambda: kernels.log_probs(scores, tokens[:1], torch.ones(4)),
        lambda: kernels.silu_mul(x, x[:1]),
        lambda: kernels.silu_mul_quantize(x, x[:1], "fp32"),
        lambda: kernels.silu_mul_backward_quantize(x[:1], x, x, "fp32"),
    ):
        with pytest.raises(ValueError, match=r"has shape \(.*\), expected \(.*\); nothing is broadcast"):
            call()
