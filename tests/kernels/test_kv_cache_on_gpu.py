# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 KV cache on a GPU: bytes of the reference, and the bits of FlashAttention 3 over the dequantized tokens.

A difference in the last bit of an FP32 sum shows in about one of 2^16 BF16 results; most cases have more.
"""

from functools import partial

import pytest
import torch
from kv_cache_heads import SCALES, assert_seen, every_maximum, every_number

from jetrl_verl import kernels, reference
from jetrl_verl.kernels import dispatch, vllm_kernels
from jetrl_verl.kernels.decode_attention import CLUSTERS, chunk_attention, native_decode_attention
from jetrl_verl.kernels.native import Plan
from jetrl_verl.sync.operations_probe import stated_operations

SCALE = 128**-0.5
pytestmark = pytest.mark.usefixtures("native_library")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


def plain(x: torch.Tensor) -> torch.Tensor:
    return x


def outliers(x: torch.Tensor) -> torch.Tensor:
    """One channel 100 times larger in some tokens."""
    x[::3, :, 9] *= 100
    return x


def of_every_size(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0 ** (torch.arange(len(x), device=x.device) % 61 - 40)[:, None, None].to(x.dtype)


class Requests:
    """Tokens of requests in an FP8 cache of scattered pages, and dequantized in a BF16 cache like vLLM's,
    ``[blocks, 2, block size, KV heads, 128]``."""

    def __init__(self, lengths, group=4, kv_heads=8, block_size=16, seed=0, change=plain):
        lengths = [int(n) for n in lengths]
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.longest, total = max(lengths), sum(lengths)
        pages = [-(-n // block_size) for n in lengths]
        numbers = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed)).to(torch.int32).split(pages)
        self.table = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True).cuda()
        owner = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), self.lengths.long())
        self.starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
        place = torch.arange(total, device="cuda") - self.starts[:-1].long()[owner]
        slots = self.table[owner, place // block_size].long() * block_size + place % block_size
        self.q = normal(len(lengths), group * kv_heads, 128, seed=seed + 1)
        self.k, self.v = (change(normal(total, kv_heads, 128, seed=seed + i)) for i in (2, 3))
        self.cache = torch.full(
            reference.cache_shape(sum(pages), block_size, kv_heads), 255, dtype=torch.uint8, device="cuda"
        )
        kernels.write_kv(self.k, self.v, self.cache, slots)
        _, *self.seen = kernels.quantize_kv(self.k, self.v)
        self.bf16 = torch.zeros(sum(pages), 2, block_size, kv_heads, 128, dtype=torch.bfloat16, device="cuda")
        for i, x in enumerate(self.seen):
            self.bf16[slots // block_size, i, slots % block_size] = x

    def flash_attention(self, q: torch.Tensor) -> torch.Tensor:
        """As vLLM's backend calls it for a decode step, with one split."""
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        keys, values = self.bf16.unbind(1)
        return flash_attn_varlen_func(
            q,
            keys,
            values,
            max_seqlen_q=1,
            cu_seqlens_q=torch.arange(len(q) + 1, dtype=torch.int32, device="cuda"),
            max_seqlen_k=self.longest,
            seqused_k=self.lengths,
            block_table=self.table,
            softmax_scale=SCALE,
            causal=True,
            num_splits=1,
            fa_version=3,
        )

    def decode(self, backend: str = "native", **plan) -> torch.Tensor:
        out = torch.full_like(self.q, torch.nan)
        run = dispatch.implementation("decode_attention", backend)
        run(self.q, self.cache, self.lengths, self.table, SCALE, out, **plan)
        return out

    def on_the_host(self) -> torch.Tensor:
        """The FP32 reference on the CPU, where the sanitizer does not watch it."""
        out = torch.empty(self.q.shape, dtype=torch.bfloat16)
        call = self.q.cpu(), self.cache.cpu(), self.lengths.cpu(), self.table.cpu(), SCALE, out
        dispatch.implementation("decode_attention", "reference")(*call)
        return out.float()

    def by_clusters(self, cluster: int) -> torch.Tensor:
        return self.decode(plan=Plan(cluster=cluster))


def different(got: torch.Tensor, want: torch.Tensor) -> int:
    return int((got.view(torch.int16) != want.view(torch.int16)).sum())


@pytest.mark.parametrize("change", [plain, outliers, of_every_size])
@pytest.mark.parametrize("in_part", [False, True])
def test_bytes_match_the_reference(change, in_part):
    k, v = change(normal(777, 8, 128)), change(normal(777, 8, 128, seed=1))
    k[5, 0, 0], v[6, 1, 1], k[7] = float("inf"), float("nan"), 0
    if in_part:
        k, v = torch.cat([k, v], dim=1).split([8, 8], dim=1)
    got = dispatch.implementation("quantize_kv", "triton")(k, v)
    want = dispatch.implementation("quantize_kv", "reference")(k.cpu(), v.cpu())
    for mine, theirs in zip(got, want, strict=True):
        as_integers = torch.uint8 if mine.itemsize == 1 else torch.int16
        if as_integers == torch.int16:
            mine, theirs = mine.nan_to_num(7), theirs.nan_to_num(7)
        assert torch.equal(mine.view(as_integers).cpu(), theirs.view(as_integers))
    back = dispatch.implementation("dequantize_kv", "triton")(*got[:4])
    alone = dispatch.implementation("quantize_dequantize_kv", "triton")(k, v)
    for found in (back, alone):
        assert all(different(a.nan_to_num(7), b.nan_to_num(7)) == 0 for a, b in zip(found, got[4:], strict=True))
    slots = torch.randperm(1024, device="cuda")[:777]
    slots[3] = -1
    caches = []
    for device, backend in (("cuda", "triton"), ("cpu", "reference")):
        caches.append(torch.zeros(reference.cache_shape(32, 32, 8), dtype=torch.uint8, device=device))
        call = (x.to(device) for x in (k, v, caches[-1], slots))
        dispatch.implementation("write_kv", backend)(*call)
    assert torch.equal(caches[0].cpu(), caches[1])


@pytest.mark.parametrize("keep", [True, False])
def test_every_bf16_value_scale_and_maximum_matches_the_reference(keep):
    """12 million values; the interpreter does not have the GPU's instruction for sums of BF16."""
    heads = torch.cat([*map(every_number, SCALES), every_maximum()])
    name = "quantize_kv" if keep else "quantize_dequantize_kv"
    k, v = dispatch.implementation(name, "triton")(heads.cuda(), heads.neg().cuda())[-2:]
    assert_seen(k, heads)
    assert_seen(v, heads.neg())


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
def test_query_heads_of_a_kv_head(group):
    requests = Requests(torch.randint(1, 900, (96,)), group=group, seed=group)
    assert different(requests.decode(), requests.flash_attention(requests.q)) == 0


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_page_sizes(block_size):
    requests = Requests(torch.randint(1, 900, (64,)), block_size=block_size, seed=block_size)
    assert different(requests.decode(), requests.flash_attention(requests.q)) == 0


@pytest.mark.parametrize("change", [plain, outliers, of_every_size])
@pytest.mark.parametrize("lengths", [[1], [127, 128, 129], [4096] * 8, [16384], [1, 5000, 17, 32768, 2048]])
def test_lengths(lengths, change):
    requests = Requests(lengths, change=change)
    assert different(requests.decode(), requests.flash_attention(requests.q)) == 0


def test_many_requests():
    """2,048 requests of 32 heads: 8.4 million results."""
    requests = Requests(torch.randint(1, 700, (2048,)), seed=17)
    assert different(requests.decode(), requests.flash_attention(requests.q)) == 0


@pytest.mark.parametrize("cluster", CLUSTERS[1:])
@pytest.mark.parametrize("change", [plain, of_every_size])
@pytest.mark.parametrize("lengths", [[1], [128], [127, 129, 300, 1], [4096] * 8, [16384], [1, 5000, 17, 32768, 2048]])
def test_clusters_match_a_single_block(lengths, change, cluster):
    requests = Requests(lengths, change=change)
    want = requests.by_clusters(1)
    for _ in range(5):
        assert different(requests.by_clusters(cluster), want) == 0


@pytest.mark.parametrize("cluster", CLUSTERS[1:])
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (2, 48), (4, 64), (5, 32), (7, 256), (8, 16)])
def test_shapes_by_clusters(group, block_size, cluster):
    requests = Requests(torch.randint(1, 3000, (40,)), group=group, block_size=block_size, seed=group)
    got = requests.by_clusters(cluster)
    assert different(got, requests.by_clusters(1)) == 0
    assert different(got, requests.flash_attention(requests.q)) == 0


@pytest.mark.parametrize("cluster", CLUSTERS[1:])
def test_many_more_clusters_than_run_at_once(cluster):
    requests = Requests(torch.randint(1, 700, (1024,)), seed=cluster)
    assert different(requests.by_clusters(cluster), requests.flash_attention(requests.q)) == 0


@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (8, 8)])
def test_decode_equals_the_trainers_whole_sequences(heads):
    """Every token of four sequences as a separate decode step, and the sequences packed."""
    (query_heads, kv_heads), lengths = heads, [900, 1, 333, 64]
    requests = Requests(lengths, query_heads // kv_heads, kv_heads)
    q = normal(sum(lengths), query_heads, 128, seed=5)
    whole = kernels.attention_fp8(q, requests.k, requests.v, requests.starts, max(lengths), SCALE)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    held = (torch.arange(sum(lengths), device="cuda") - requests.starts[:-1].long()[owner] + 1).to(torch.int32)
    steps = kernels.decode_attention(q, requests.cache, held, requests.table[owner].contiguous(), SCALE)
    assert different(steps, whole) == 0


@pytest.mark.parametrize("fresh", [[300, 1, 200, 64], [1, 1, 1, 1], [900, 1, 333, 1]])
def test_chunks_equal_the_trainers_whole_sequences(fresh):
    lengths = [900, 1, 333, 64]
    requests = Requests(lengths)
    q = normal(sum(lengths), 32, 128, seed=5)
    whole = kernels.attention_fp8(q, requests.k, requests.v, requests.starts, max(lengths), SCALE)
    last = torch.cat([torch.arange(end - n, end) for end, n in zip(requests.starts[1:].tolist(), fresh, strict=True)])
    cu_queries = torch.tensor([0, *fresh]).cumsum(0).to(torch.int32).cuda()
    out = torch.empty(sum(fresh), 32, 128, dtype=torch.bfloat16, device="cuda")
    chunk_attention(
        q[last], requests.cache, cu_queries, max(fresh), requests.lengths, lengths, requests.table, SCALE, out
    )
    assert different(out, whole[last]) == 0


def test_the_path_without_the_library_matches():
    requests = Requests(torch.randint(1, 900, (64,)))
    assert different(requests.decode("flash_attention_3"), requests.decode()) == 0


@pytest.mark.parametrize("plan", [None, *(Plan(cluster=c) for c in CLUSTERS)])
def test_in_a_cuda_graph_with_padded_requests(plan):
    requests = Requests([700, 2500, 5, 1])
    out = torch.empty_like(requests.q)
    lengths = requests.lengths.clone()
    call = (requests.q, requests.cache, lengths, requests.table, SCALE, out)
    native_decode_attention(*call, plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native_decode_attention(*call, plan=plan)
    for held in ([700, 2500, 0, 0], [1, 129, 5, 0], [0, 2049, 0, 1]):
        requests.lengths.copy_(torch.tensor(held))
        lengths.copy_(requests.lengths)
        out.fill_(torch.nan)
        graph.replay()
        some = torch.tensor(held) > 0
        assert different(out[some], requests.by_clusters(1)[some]) == 0 and (out[~some] == 0).all()


@pytest.mark.parametrize("backend", ["native", "flash_attention_3"])
def test_the_rollout_cache_probe_passes(backend):
    device = torch.device("cuda")
    with dispatch.override_backend("decode_attention", backend):
        rollout = stated_operations(device, "shared", "fp8", rollout=True)
    assert rollout == stated_operations(device, "shared", "fp8")


def test_gradients_match_attention_over_quantized_keys_and_values():
    lengths = (513, 40)
    cu, tokens = torch.tensor([0, 513, 553], dtype=torch.int32).cuda(), sum(lengths)
    q, k, v = (normal(tokens, heads, 128, seed=heads) for heads in (32, 8, 8))
    _, *seen = kernels.quantize_kv(k, v)
    gradient, found = normal(tokens, 32, 128, seed=9), []
    recomputed = partial(kernels.attention_fp8, keep_fp8=False)
    cases = (((q, k, v), kernels.attention_fp8), ((q, k, v), recomputed), ((q, *seen), kernels.attention))
    for operands, attend in cases:
        operands = [x.clone().requires_grad_() for x in operands]
        attend(*operands, cu, max(lengths), SCALE).backward(gradient)
        found.append([x.grad for x in operands])
    *ours, theirs = found
    assert all((a - b).norm() <= 2**-8 * b.norm() for mine in ours for a, b in zip(mine, theirs, strict=True))


def test_small_calls_for_the_sanitizer():
    assert vllm_kernels.no_flash_attention_3() is None
    for lengths, group, block_size in (([300, 1, 16], 4, 16), ([129], 8, 64)):
        requests = Requests(lengths, group, 2, block_size)
        want = requests.on_the_host()
        for cluster in CLUSTERS:
            off = (requests.by_clusters(cluster).cpu() - want).abs().amax((1, 2))
            assert (off < 2**-6 * want.abs().amax((1, 2))).all()
