# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The decode kernels over vLLM's BF16 pages and over FP8 pages on a GPU: every bit of FlashAttention 3 with one split.

A difference in the last bit of an FP32 sum shows in about one of 2^16 BF16 results.
"""

import pytest
import torch
from tensors import different, normal, of_every_size, outliers, packed

from jetrl_verl import formats, kernels, reference
from jetrl_verl.kernels import dispatch, native, vllm_kernels
from jetrl_verl.kernels.decode_attention import CLUSTERS, chunk_attention
from jetrl_verl.kernels.native import Plan
from jetrl_verl.sync.operations_probe import stated_operations

SCALE = 128**-0.5
AROUND = [n + more for n in (16, 64, 128, 256, 384, 1024, 4096) for more in (-1, 0, 1)]
"""Lengths around what a page, a stage and a block of keys hold."""
pytestmark = pytest.mark.usefixtures("native_library")


class Requests:
    """Tokens in pages of any order, and in BF16 pages laid out as vLLM's ``[pages, 2, page size, KV heads, 128]``."""

    operation: str
    operands: list[torch.Tensor]
    """The cache, as the operation takes it: anything after a request's tokens."""

    def __init__(self, lengths, group=4, kv_heads=8, page_size=16, seed=0, change=lambda x: x):
        lengths = [int(n) for n in lengths]
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        total, pages = sum(lengths), [-(-n // page_size) for n in lengths]
        numbers = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed)).to(torch.int32).split(pages)
        self.table = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True).cuda()
        owner = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), self.lengths.long())
        self.starts = packed(*lengths).cuda()
        place = torch.arange(total, device="cuda") - self.starts[:-1].long()[owner]
        slots = self.table[owner, place // page_size].long() * page_size + place % page_size
        # In a wider row, as in a merged projection.
        self.q = normal(len(lengths), (group + 2) * kv_heads, 128, seed=seed + 1, device="cuda")[:, : group * kv_heads]
        self.k, self.v = (change(normal(total, kv_heads, 128, seed=seed + i, device="cuda")) for i in (2, 3))
        shape = sum(pages), 2, page_size, kv_heads, 128
        self.pages = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        for i, x in enumerate(self.fill(slots)):
            self.pages[slots // page_size, i, slots % page_size] = x

    def fill(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fills a cache of another form; keys and values as attention reads them."""
        return self.k, self.v

    def call(self, out: torch.Tensor) -> tuple:
        return self.q, *self.operands, self.lengths, self.table, SCALE, out

    def flash_attention(self) -> torch.Tensor:
        """Over zeros instead of NaN: FlashAttention copies large pages whole."""
        out, pages = torch.empty_like(self.q), self.pages.nan_to_num(0).unbind(1)
        vllm_kernels.flash_attention_3_pages(self.q, *pages, self.lengths, self.table, SCALE, out)
        return out

    def decode(self, cluster: int | None = None, backend: str = "native") -> torch.Tensor:
        out, plan = torch.full_like(self.q, torch.nan), {"plan": Plan(cluster=cluster)} if cluster else {}
        dispatch.implementation(self.operation, backend)(*self.call(out), **plan)
        return out

    def on_the_host(self) -> torch.Tensor:
        """The FP32 reference on the CPU, where the sanitizer does not watch it."""
        out = torch.empty(self.q.shape, dtype=torch.bfloat16)
        cache = (x.cpu() if x.dtype == torch.uint8 else kernels.cache_form(x.cpu()) for x in self.operands)
        call = self.q.cpu(), *cache, self.lengths.cpu(), self.table.cpu(), SCALE, out
        dispatch.implementation(self.operation, "reference")(*call)
        return out.float()


class OfBf16(Requests):
    operation = "decode_attention_bf16"

    @property
    def operands(self) -> list[torch.Tensor]:
        return list(self.pages.unbind(1))


class OfFp8(Requests):
    operation = "decode_attention"

    def fill(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pages, _, page_size, kv_heads, _ = self.pages.shape
        cache = torch.full(reference.cache_shape(pages, page_size, kv_heads), 255, dtype=torch.uint8, device="cuda")
        kernels.write_kv(self.k, self.v, cache, slots)
        self.operands = [cache]
        return kernels.quantize_kv(self.k, self.v)[1:]


of_every_cache = pytest.mark.parametrize("requests_of", [OfBf16, OfFp8])
by_every_cluster = pytest.mark.parametrize("cluster", CLUSTERS)


@of_every_cache
@by_every_cluster
@pytest.mark.parametrize("change", [lambda x: x, outliers, of_every_size])
@pytest.mark.parametrize("lengths", [[1], [128], AROUND, [16384], [1, 5000, 17, 32768, 2048], [4096] * 8])
def test_lengths(lengths, change, cluster, requests_of):
    requests = requests_of(lengths, change=change)
    want = requests.flash_attention()
    for _ in range(5):
        assert different(requests.decode(cluster), want) == 0


@of_every_cache
@by_every_cluster
@pytest.mark.parametrize(
    ("group", "kv_heads", "page_size"),
    [(1, 8, 16), (2, 4, 48), (4, 8, 64), (5, 3, 32), (7, 1, 256), (8, 4, 16), (4, 8, 128)],
)
def test_shapes(group, kv_heads, page_size, cluster, requests_of):
    requests = requests_of(torch.randint(1, 3000, (40,)), group, kv_heads, page_size, seed=group)
    assert different(requests.decode(cluster), requests.flash_attention()) == 0


@of_every_cache
@pytest.mark.parametrize("count", [1, 2, 5, 8, 17, 64, 300])
def test_the_choice_of_a_cluster(count, requests_of):
    requests = requests_of(torch.randint(1, 2000, (count,)), seed=count)
    assert different(requests.decode(), requests.flash_attention()) == 0


@of_every_cache
@by_every_cluster
def test_many_more_blocks_than_run_at_once(cluster, requests_of):
    """Up to 2,048 requests of 32 heads: 8.4 million results."""
    requests = requests_of(torch.randint(1, 700, (2048 // cluster,)), seed=cluster)
    assert different(requests.decode(cluster), requests.flash_attention()) == 0


@of_every_cache
@pytest.mark.parametrize("cluster", [None, *CLUSTERS])
def test_in_a_cuda_graph_with_padded_requests(cluster, requests_of):
    requests = requests_of([700, 2500, 5, 1])
    out = torch.empty_like(requests.q)
    decode, plan = dispatch.implementation(requests.operation, "native"), cluster and Plan(cluster=cluster)
    decode(*requests.call(out), plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(*requests.call(out), plan=plan)
    for lengths in ([700, 2500, 0, 0], [1, 129, 5, 0], [0, 2049, 0, 1]):
        requests.lengths.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        some = torch.tensor(lengths) > 0
        assert different(out[some], requests.flash_attention()[some]) == 0 and (out[~some] == 0).all()


@of_every_cache
def test_the_path_without_the_library_matches(requests_of):
    requests = requests_of(torch.randint(1, 900, (64,)))
    requests.pages.nan_to_num_(0)
    assert different(requests.decode(backend="flash_attention_3"), requests.decode()) == 0


@pytest.mark.parametrize("cache", [formats.UNQUANTIZED, "fp8"])
@pytest.mark.parametrize("built", [True, False])
def test_the_rollout_cache_probe_passes(monkeypatch, built, cache):
    """With the native kernel, and with FlashAttention 3 where it is not built."""
    if not built:
        monkeypatch.setattr(native, "unavailable", lambda: "it is not built")
    device = torch.device("cuda")
    rollout = stated_operations(device, "shared", cache, rollout=True)
    assert rollout == stated_operations(device, "shared", cache)


@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (8, 8)])
def test_decode_over_fp8_equals_the_trainers_whole_sequences(heads):
    """Every token of four sequences as a separate decode step, and the sequences packed."""
    (query_heads, kv_heads), lengths = heads, [900, 1, 333, 64]
    requests = OfFp8(lengths, query_heads // kv_heads, kv_heads)
    q = normal(sum(lengths), query_heads, 128, seed=5, device="cuda")
    whole = kernels.attention_fp8(q, requests.k, requests.v, requests.starts, max(lengths), SCALE)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    of_steps = (torch.arange(sum(lengths), device="cuda") - requests.starts[:-1].long()[owner] + 1).to(torch.int32)
    steps = kernels.decode_attention(q, *requests.operands, of_steps, requests.table[owner].contiguous(), SCALE)
    assert different(steps, whole) == 0


@pytest.mark.parametrize("fresh", [[300, 1, 200, 64], [1, 1, 1, 1], [900, 1, 333, 1]])
def test_chunks_over_fp8_equal_the_trainers_whole_sequences(fresh):
    lengths = [900, 1, 333, 64]
    requests = OfFp8(lengths)
    q = normal(sum(lengths), 32, 128, seed=5, device="cuda")
    whole = kernels.attention_fp8(q, requests.k, requests.v, requests.starts, max(lengths), SCALE)
    last = torch.cat([torch.arange(end - n, end) for end, n in zip(requests.starts[1:].tolist(), fresh, strict=True)])
    out = torch.empty(sum(fresh), 32, 128, dtype=torch.bfloat16, device="cuda")
    queries = packed(*fresh).cuda(), max(fresh)
    chunk_attention(q[last], *requests.operands, *queries, requests.lengths, lengths, requests.table, SCALE, out)
    assert different(out, whole[last]) == 0


@of_every_cache
def test_small_calls_for_the_sanitizer(requests_of):
    for lengths, group, page_size in (([300, 1, 16], 4, 16), ([129], 8, 64)):
        requests = requests_of(lengths, group, 2, page_size)
        want = requests.on_the_host()
        for cluster in CLUSTERS:
            off = (requests.decode(cluster).cpu() - want).abs().amax((1, 2))
            assert (off < 2**-6 * want.abs().amax((1, 2))).all()
