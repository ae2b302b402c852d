# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The decode kernel over vLLM's BF16 pages on a GPU: every bit of FlashAttention 3 with one split.

A difference in the last bit of an FP32 sum shows in about one of 2^16 BF16 results.
"""

import pytest
import torch

from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch, native, vllm_kernels
from jetrl_verl.kernels.decode_attention import CLUSTERS, native_decode_attention_bf16
from jetrl_verl.kernels.native import Plan
from jetrl_verl.sync.operations_probe import stated_operations

SCALE = 128**-0.5
AROUND = [n + more for n in (16, 64, 128, 256, 384, 1024, 4096) for more in (-1, 0, 1)]
"""Lengths around what a page, a stage and a block of keys hold."""
pytestmark = pytest.mark.usefixtures("native_library")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


def of_every_size(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0 ** (torch.arange(len(x), device=x.device) % 61 - 40)[:, None, None].to(x.dtype)


class Requests:
    """Tokens in pages of any order, laid out as vLLM's ``[pages, 2, page size, KV heads, 128]``, between NaN."""

    def __init__(self, lengths, group=4, kv_heads=8, page_size=16, seed=0, change=lambda x: x):
        lengths = [int(n) for n in lengths]
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        total, pages = sum(lengths), [-(-n // page_size) for n in lengths]
        numbers = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed)).to(torch.int32).split(pages)
        self.table = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True).cuda()
        owner = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), self.lengths.long())
        self.starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
        place = torch.arange(total, device="cuda") - self.starts[:-1].long()[owner]
        slots = self.table[owner, place // page_size].long() * page_size + place % page_size
        # In a wider row, as in a merged projection.
        self.q = normal(len(lengths), (group + 2) * kv_heads, 128, seed=seed + 1)[:, : group * kv_heads]
        self.k, self.v = (change(normal(total, kv_heads, 128, seed=seed + i)) for i in (2, 3))
        shape = (sum(pages), 2, page_size, kv_heads, 128)
        self.pages = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        for i, x in enumerate((self.k, self.v)):
            self.pages[slots // page_size, i, slots % page_size] = x

    def call(self, pages: torch.Tensor, out: torch.Tensor) -> tuple:
        return self.q, *pages.unbind(1), self.lengths, self.table, SCALE, out

    def flash_attention(self) -> torch.Tensor:
        """Over zeros instead of NaN: FlashAttention copies large pages whole."""
        out = torch.empty_like(self.q)
        vllm_kernels.flash_attention_3_pages(*self.call(self.pages.nan_to_num(0), out))
        return out

    def on_the_host(self) -> torch.Tensor:
        """The FP32 reference on the CPU, where the sanitizer does not watch it."""
        out = torch.empty(self.q.shape, dtype=torch.bfloat16)
        keys, values = (kernels.cache_form(x.cpu()) for x in self.pages.unbind(1))
        call = self.q.cpu(), keys, values, self.lengths.cpu(), self.table.cpu(), SCALE, out
        dispatch.implementation("decode_attention_bf16", "reference")(*call)
        return out.float()

    def decode(self, cluster: int | None = None) -> torch.Tensor:
        out = torch.full_like(self.q, torch.nan)
        native_decode_attention_bf16(*self.call(self.pages, out), plan=cluster and Plan(cluster=cluster))
        return out


def different(got: torch.Tensor, want: torch.Tensor) -> int:
    return int((got.view(torch.int16) != want.view(torch.int16)).sum())


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("change", [lambda x: x, of_every_size])
@pytest.mark.parametrize("lengths", [[1], AROUND, [1, 5000, 17, 32768, 2048], [4096] * 8])
def test_lengths(lengths, change, cluster):
    requests = Requests(lengths, change=change)
    want = requests.flash_attention()
    for _ in range(3):
        assert different(requests.decode(cluster), want) == 0


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(
    ("group", "kv_heads", "page_size"), [(1, 8, 16), (2, 4, 48), (4, 8, 64), (5, 3, 32), (7, 1, 256), (8, 4, 16)]
)
def test_shapes(group, kv_heads, page_size, cluster):
    requests = Requests(torch.randint(1, 3000, (40,)), group, kv_heads, page_size, seed=group)
    assert different(requests.decode(cluster), requests.flash_attention()) == 0


@pytest.mark.parametrize("requests", [1, 2, 5, 8, 17, 64, 300])
def test_the_choice_of_a_cluster(requests):
    asked = Requests(torch.randint(1, 2000, (requests,)), seed=requests)
    assert different(asked.decode(), asked.flash_attention()) == 0


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_many_more_blocks_than_run_at_once(cluster):
    """Up to 2,048 requests of 32 heads: 8.4 million results."""
    requests = Requests(torch.randint(1, 700, (2048 // cluster,)), seed=cluster)
    assert different(requests.decode(cluster), requests.flash_attention()) == 0


@pytest.mark.parametrize("cluster", [None, *CLUSTERS])
def test_in_a_cuda_graph_with_padded_requests(cluster):
    requests = Requests([700, 2500, 5, 1])
    out, plan = torch.empty_like(requests.q), cluster and Plan(cluster=cluster)
    call = requests.call(requests.pages, out)
    native_decode_attention_bf16(*call, plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native_decode_attention_bf16(*call, plan=plan)
    for held in ([700, 2500, 0, 0], [1, 129, 5, 0], [0, 2049, 0, 1]):
        requests.lengths.copy_(torch.tensor(held))
        out.fill_(torch.nan)
        graph.replay()
        some = torch.tensor(held) > 0
        assert different(out[some], requests.flash_attention()[some]) == 0 and (out[~some] == 0).all()


def test_the_path_without_the_library_matches():
    requests = Requests(torch.randint(1, 900, (64,)))
    pages, outs = requests.pages.nan_to_num(0), []
    for backend in ("native", "flash_attention_3"):
        with dispatch.override_backend("decode_attention_bf16", backend):
            outs.append(kernels.decode_attention_bf16(*requests.call(pages, torch.empty_like(requests.q))))
    assert different(*outs) == 0


@pytest.mark.parametrize("built", [True, False])
def test_the_rollout_cache_probe_passes(monkeypatch, built):
    """With the native kernel, and with FlashAttention 3 where it is not built."""
    if not built:
        monkeypatch.setattr(native, "unavailable", lambda: "it is not built")
    device = torch.device("cuda")
    assert stated_operations(device, "shared", rollout=True) == stated_operations(device, "shared")


def test_small_calls_for_the_sanitizer():
    for lengths, group, page_size in (([300, 1, 16], 4, 16), ([129], 8, 64)):
        requests = Requests(lengths, group, 2, page_size)
        want = requests.on_the_host()
        for cluster in CLUSTERS:
            off = (requests.decode(cluster).cpu() - want).abs().amax((1, 2))
            assert (off < 2**-6 * want.abs().amax((1, 2))).all()
