# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Number formats and KV caches: shapes, products, sums, NaN, traits."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contract_inputs import gaussian

from jetrl_verl import formats, kernels, reference
from jetrl_verl.formats.format import SCALE_SUFFIX, Format
from jetrl_verl.reference import BLOCK, QuantizedTensor
from jetrl_verl.sources import source_files

CPU = torch.device("cpu")


@pytest.fixture(params=list(formats.FORMATS))
def number_format(request) -> Format:
    return formats.get(request.param)


@pytest.fixture
def weight() -> torch.Tensor:
    return gaussian(2 * BLOCK, 3 * BLOCK).to(torch.bfloat16)


def test_names_dtypes_and_vllm_methods_are_distinct():
    traits = formats.FORMATS.values()
    assert [item.name for item in traits] == list(formats.FORMATS)
    assert len({formats.get(item.name).dtype for item in traits}) == 2
    assert set(formats.VLLM_METHODS) == {*formats.FORMATS, formats.UNQUANTIZED}
    assert len(set(formats.VLLM_METHODS.values())) == 3
    assert formats.get(formats.FLOW).traits.trains and formats.traits_of(formats.UNQUANTIZED) is None
    for call in (formats.get, formats.traits_of):
        with pytest.raises(ValueError, match="'fp4' is not a"):
            call("fp4")


@pytest.mark.parametrize("name", formats.CACHES)
def test_a_cache_stores_attentions_input_in_the_bytes_of_its_traits(name):
    traits, cache = formats.CACHES[name], formats.kv_cache(name)
    assert cache.traits is traits and traits.name == name and traits.quantized == (cache.vllm_head is not None)
    k, v = (gaussian(6 * 2, 128).view(6, 2, 128).to(torch.bfloat16) for _ in range(2))
    seen = cache.seen(k, v)
    assert traits.quantized == any(not torch.equal(*pair) for pair in zip(seen, (k, v)))
    pages, slots = cache.new_pages(2, traits.page_tokens * 16, 2, 128, CPU), torch.tensor([17, 3, 31, 0, 4, 16])
    cache.write(k, v, pages, slots)
    for x, rows in zip(seen, cache.read(pages)):
        assert torch.equal(kernels.cache_form(x), rows[slots])
        assert rows.isnan().all(dim=-1).sum() == (len(rows) - 6) * 2, "unwritten slots hold no numbers"
    assert pages.nbytes == 2 * 2 * traits.page_tokens * 16 * 2 * traits.head_bytes(traits.head_dim or 128)
    if traits.quantized:
        stored = list(cache.stored(k, v))
        assert [heads.tensor for heads in stored] == ["K", "V"]
        assert all(torch.equal(heads.restored, x) for heads, x in zip(stored, seen))
        assert cache.vllm_head == (traits.head_bytes(traits.head_dim), torch.uint8)
        with pytest.raises(ValueError, match=f"multiple of {traits.page_tokens} tokens"):
            cache.new_pages(2, traits.page_tokens + 1, 2, 128, CPU)
    else:
        assert cache.vllm_head is None and traits.head_bytes(128) == k[0, 0].nbytes


def test_caches_have_their_own_contracts_and_unknown_names_are_refused():
    assert next(iter(formats.CACHES)) == formats.UNQUANTIZED
    assert len({formats.kv_cache(name).contract for name in formats.CACHES}) == len(formats.CACHES)
    for call in (formats.kv_cache, formats.cache_traits):
        with pytest.raises(ValueError, match="'fp4' is not supported as a KV cache"):
            call("fp4")


def test_the_trainer_attends_to_the_caches_contents():
    q, k, v = (gaussian(6 * heads, 128).view(6, heads, 128).to(torch.bfloat16) for heads in (4, 2, 2))
    sequences = torch.tensor([0, 4, 6], dtype=torch.int32), 4, 128**-0.5
    for name in formats.CACHES:
        cache = formats.kv_cache(name)
        expected = formats.kv_cache(formats.UNQUANTIZED).attend(q, *cache.seen(k, v), *sequences)
        assert torch.equal(cache.attend(q, k, v, *sequences), expected)


def test_a_caches_traits_are_its_kernels_limits():
    from jetrl_verl.kernels.decode_attention import MOST_QUERY_HEADS
    from jetrl_verl.reference import kv_cache

    (traits,) = (traits for traits in formats.CACHES.values() if traits.quantized)
    assert traits.head_dim == kv_cache.HEAD_DIM and traits.most_query_heads == MOST_QUERY_HEADS
    assert (traits.page_tokens, traits.head_bytes(traits.head_dim)) == (kv_cache.UNIT_TOKENS, kv_cache.TOKEN_BYTES)


def test_the_catalog_needs_no_torch():
    program = "import sys; from jetrl_verl.formats.catalog import FORMATS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(formats.__file__).parents[2]).returncode == 0


def test_a_weight_has_scales_of_the_formats_shape_and_names_it(number_format, weight):
    q = number_format.quantize_weight(weight, "fp32")
    assert q.qdata.shape == weight.shape and q.qdata.dtype == number_format.dtype
    assert tuple(q.scales.shape) == number_format.scales_shape(*weight.shape)
    assert q.format is number_format
    half = number_format.scales_of_rows(q.scales, BLOCK, BLOCK)
    assert torch.equal(half, number_format.quantize_weight(weight[BLOCK:], "fp32").scales)


def test_linear_is_close_to_the_product_with_the_dequantized_weight(number_format, weight):
    x, bias = gaussian(5, 3 * BLOCK).to(torch.bfloat16), gaussian(1, 2 * BLOCK)[0].to(torch.bfloat16)
    q = number_format.quantize_weight(weight, "fp32")
    restored = number_format.dequantize_weight(q)
    # Half a step of the coarser of the two, E4M3, at the largest magnitude.
    assert (restored - weight.float()).abs().max() <= 2**-4 * weight.abs().max().float()
    y = number_format.linear(x, q, bias, "fp32")
    want = x.double() @ restored.double().t() + bias.double()
    assert y.shape == (5, 2 * BLOCK) and y.dtype == torch.bfloat16
    assert (y.double() - want).norm() < 0.05 * want.norm()


def test_a_quantized_input_is_accepted_or_refused(number_format, weight):
    x = gaussian(5, 3 * BLOCK).to(torch.bfloat16)
    w, quantized = number_format.quantize_weight(weight, "fp32"), kernels.quantize_1x128(x, "fp32")
    if number_format.accepts_quantized:
        assert torch.equal(number_format.linear(quantized, w, None, "fp32"), number_format.linear(x, w, None, "fp32"))
    else:
        with pytest.raises(TypeError, match="quantize their input themselves"):
            number_format.linear(quantized, w, None, "fp32")


def test_the_wire_sends_qdata_then_scales(number_format, weight):
    q = number_format.quantize_weight(weight, "fp32")
    (suffix, qdata), (scales_suffix, scales) = number_format.wire(q)
    assert (suffix, scales_suffix) == ("", SCALE_SUFFIX)
    assert qdata is q.qdata and scales is q.scales


def test_a_flipped_bit_changes_only_the_sum_of_its_block(number_format, weight):
    q = number_format.quantize_weight(weight, "fp32")
    before = number_format.sums(q)
    assert before.shape == (2, 3)
    changed = q.qdata.clone()
    changed.view(torch.uint8)[BLOCK + 3, 2 * BLOCK + 17] ^= 1
    differs = number_format.sums(QuantizedTensor(changed, q.scales)) != before
    assert differs.nonzero().tolist() == [[1, 2]]
    scales = q.scales.clone()
    scales.view(torch.int32)[-1, -1] ^= 1
    differs = number_format.sums(QuantizedTensor(q.qdata, scales)) != before
    assert differs[1, 2] and not differs[0].any()


def test_a_part_of_a_weight_has_the_sums_of_its_blocks(number_format, weight):
    q = number_format.quantize_weight(weight, "fp32")
    columns = slice(BLOCK, 3 * BLOCK)
    scales = q.scales if number_format.columns_per_scale is None else q.scales[:, 1:]
    part = QuantizedTensor(q.qdata[:, columns], scales)
    assert torch.equal(number_format.sums(part), number_format.sums(q)[:, 1:])


def test_probes_repeat_and_differ_between_formats_and_rules():
    probes = {
        (name, rule): formats.get(name).probe(CPU, rule)
        for name, traits in formats.FORMATS.items()
        for rule in traits.scale_rules
    }
    assert len(set(probes.values())) == len(probes) == 3
    assert all(formats.get(name).probe(CPU, rule) == probe for (name, rule), probe in probes.items())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_weight_is_detected(number_format, weight, bad):
    for value in (0.0, bad):
        weight[BLOCK + 1, 200] = value
        q = number_format.quantize_weight(weight, "fp32")
        assert number_format.is_nan(number_format.nan_sample(q.qdata), q.scales) == (value is bad)


def test_measured_formats_report_zeros_and_subnormals(number_format):
    if number_format.traits.measured:
        x = torch.tensor([[448.0, 2.0**-8, 2.0**-20, 0.0]])
        zero, subnormal = number_format.lost(reference.quantize_1x128(x, "fp32").qdata)
        assert zero.tolist() == [[False, False, True, True]] and subnormal.tolist() == [[False, True, False, False]]
    else:
        with pytest.raises(NotImplementedError):
            number_format.lost(torch.zeros(1, dtype=number_format.dtype))


LAYOUT = re.compile(r"1x128|128x1|float8|(?i:e4m3|block_?fp8|channel_?int8)|^BLOCK$|FP8_DTYPE|^(fp8|int8)$")
"""Names and strings that one format's layout, dtype or object has."""

NAMED = {"tools/doctor/self_check.py": "operands of the kernels that it checks", "tools/memory/terms.py": "the presets"}
"""Files that name one, and what for."""

DEFAULTS = {
    "config/options.py": "of jetrl.backward",
    "models/plan.py": "of plan_linears",
    "tools/demo/policy.py": "the demo's preset",
    "tools/doctor/asked.py": "the preset that the doctor asks about",
    "tools/memory/terms.py": "the presets",
}
"""Files that name the default format (``FLOW``), and what for."""


def words_of(path: Path):
    """Imported, used and quoted names of a file, without docstrings."""
    tree = ast.parse(path.read_text())
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield f".{node.attr}"
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            yield node.value


def test_other_packages_ask_the_format():
    files = {
        name: set(words_of(path))
        for name, path in source_files().items()
        if not name.startswith(("formats/", "reference/", "kernels/", "patches/"))
    }
    assert {name for name, words in files.items() if any(map(LAYOUT.search, words))} == set(NAMED)
    assert {name for name, words in files.items() if words & {"FLOW", ".FLOW"}} == set(DEFAULTS)
