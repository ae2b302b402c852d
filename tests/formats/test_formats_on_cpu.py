# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What every number format promises to those who ask it, and that nobody tells formats apart himself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contract_inputs import gaussian

from jetrl_verl import formats, kernels, reference
from jetrl_verl.formats.format import SCALE_SUFFIX, Format
from jetrl_verl.reference import BLOCK, QuantizedTensor

CPU = torch.device("cpu")
PACKAGE = Path(formats.__file__).parents[1]

IMPLEMENTS = ("formats", "reference", "kernels")
"""Where a format's own arithmetic and its kernels are; every other file asks a format."""


@pytest.fixture(params=list(formats.FORMATS))
def number_format(request) -> Format:
    return formats.get(request.param)


@pytest.fixture
def weight() -> torch.Tensor:
    return gaussian(2 * BLOCK, 3 * BLOCK).to(torch.bfloat16)


def test_names_types_and_vllm_methods_are_each_ones_own():
    traits = formats.FORMATS.values()
    assert [each.name for each in traits] == list(formats.FORMATS)
    assert len({formats.get(each.name).dtype for each in traits}) == 2
    assert set(formats.VLLM_METHODS) == {*formats.FORMATS, formats.UNQUANTIZED}
    assert len(set(formats.VLLM_METHODS.values())) == 3
    assert formats.get(formats.FLOW).traits.trains and formats.traits_of(formats.UNQUANTIZED) is None
    assert formats.of(torch.zeros(1)) is None
    for call in (formats.get, formats.traits_of):
        with pytest.raises(ValueError, match="'fp4' is not a"):
            call("fp4")


def test_a_cache_is_what_its_traits_say():
    assert next(iter(formats.CACHES)) == formats.UNQUANTIZED
    for name, traits in formats.CACHES.items():
        held = formats.kv_cache(name)
        assert held.traits is traits and traits.name == name and traits.quantized == (held.vllm_head is not None)
        k, v = (gaussian(6 * 2, 128).view(6, 2, 128).to(torch.bfloat16) for _ in range(2))
        seen = held.seen(k, v)
        assert traits.quantized == any(not torch.equal(*pair) for pair in zip(seen, (k, v)))
        parts = list(held.held(k, v))
        assert [part.tensor for part in parts] == (["K", "V"] if traits.quantized else [])
        assert all(torch.equal(part.restored, x) for part, x in zip(parts, seen))
        # The pages hold what attention sees, in as many bytes as the traits say, and no numbers elsewhere.
        pages, slots = held.new_pages(2, traits.page_tokens * 16, 2, CPU), torch.tensor([17, 3, 31, 0, 4, 16])
        held.write(k, v, pages, slots)
        for x, stored in zip(seen, held.read(pages)):
            assert torch.equal(kernels.cache_form(x), stored[slots])
            assert stored.isnan().all(dim=-1).sum() == (len(stored) - 6) * 2
        assert pages.nbytes == 2 * 2 * traits.page_tokens * 16 * 2 * traits.head_bytes(traits.head_dim or 128)
        if not traits.quantized:
            assert traits.head_bytes(128) == k[0, 0].nbytes
            for call in (held.lost, held.saturated):
                with pytest.raises(NotImplementedError):
                    call(None)
            continue
        assert held.vllm_head == (traits.head_bytes(traits.head_dim), torch.uint8)
        with pytest.raises(ValueError, match=f"multiple of {traits.page_tokens} tokens"):
            held.new_pages(2, traits.page_tokens + 1, 2, CPU)
    assert len({formats.kv_cache(name).contract for name in formats.CACHES}) == len(formats.CACHES)
    for call in (formats.kv_cache, formats.cache_traits):
        with pytest.raises(ValueError, match="'fp4' is not what a KV cache may hold"):
            call("fp4")


def test_the_trainer_attends_to_what_the_cache_gives():
    q, k, v = (gaussian(6 * heads, 128).view(6, heads, 128).to(torch.bfloat16) for heads in (4, 2, 2))
    sequences = torch.tensor([0, 4, 6], dtype=torch.int32), 4, 128**-0.5
    for name in formats.CACHES:
        held = formats.kv_cache(name)
        expected = formats.kv_cache(formats.UNQUANTIZED).attend(q, *held.seen(k, v), *sequences)
        assert torch.equal(held.attend(q, k, v, *sequences), expected)


def test_the_limits_of_a_cache_are_those_of_its_kernels():
    from jetrl_verl.kernels.attention import HEAD_DIM
    from jetrl_verl.kernels.decode_attention import MOST_QUERY_HEADS
    from jetrl_verl.reference import kv_cache

    (traits,) = (each for each in formats.CACHES.values() if each.quantized)
    assert traits.head_dim == kv_cache.HEAD_DIM == HEAD_DIM and traits.most_query_heads == MOST_QUERY_HEADS
    assert (traits.page_tokens, traits.head_bytes(HEAD_DIM)) == (kv_cache.UNIT_TOKENS, kv_cache.TOKEN_BYTES)


def test_the_catalog_needs_no_torch():
    program = "import sys; from jetrl_verl.formats.catalog import FORMATS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent).returncode == 0


def test_a_weight_has_the_shapes_that_vllm_is_given_and_is_known_by_its_type(number_format, weight):
    q = number_format.quantize_weight(weight, "fp32")
    assert q.qdata.shape == weight.shape and q.qdata.dtype == number_format.dtype
    assert tuple(q.scales.shape) == number_format.scales_shape(*weight.shape)
    assert formats.of(q.qdata) is number_format
    half = number_format.scales_of_rows(q.scales, BLOCK, BLOCK)
    assert torch.equal(half, number_format.quantize_weight(weight[BLOCK:], "fp32").scales)


def test_the_linear_is_the_product_of_what_the_parts_dequantize_to(number_format, weight):
    x, bias = gaussian(5, 3 * BLOCK).to(torch.bfloat16), gaussian(1, 2 * BLOCK)[0].to(torch.bfloat16)
    q = number_format.quantize_weight(weight, "fp32")
    restored = number_format.dequantize_weight(q)
    # Half a step of the coarser of the two, E4M3, at the largest magnitude.
    assert (restored - weight.float()).abs().max() <= 2**-4 * weight.abs().max().float()
    y = number_format.linear(x, q, bias, "fp32")
    want = x.double() @ restored.double().t() + bias.double()
    assert y.shape == (5, 2 * BLOCK) and y.dtype == torch.bfloat16
    assert (y.double() - want).norm() < 0.05 * want.norm()


def test_what_an_operation_quantized_is_accepted_or_refused(number_format, weight):
    x = gaussian(5, 3 * BLOCK).to(torch.bfloat16)
    q, given = number_format.quantize_weight(weight, "fp32"), kernels.quantize_1x128(x, "fp32")
    if number_format.accepts_quantized:
        assert torch.equal(number_format.linear(given, q, None, "fp32"), number_format.linear(x, q, None, "fp32"))
    else:
        with pytest.raises(TypeError, match="quantize their input themselves"):
            number_format.linear(given, q, None, "fp32")


def test_the_wire_carries_qdata_then_scales(number_format, weight):
    q = number_format.quantize_weight(weight, "fp32")
    (suffix, qdata), (scales_suffix, scales) = number_format.wire(q)
    assert (suffix, scales_suffix) == ("", SCALE_SUFFIX)
    assert qdata is q.qdata and scales is q.scales


def test_a_sum_sees_a_bit_in_its_block_and_nowhere_else(number_format, weight):
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


def test_probes_repeat_and_tell_formats_and_rules_apart():
    probes = {
        (name, rule): formats.get(name).probe(CPU, rule)
        for name, traits in formats.FORMATS.items()
        for rule in traits.scale_rules
    }
    assert len(set(probes.values())) == len(probes) == 3
    assert all(formats.get(name).probe(CPU, rule) == probe for (name, rule), probe in probes.items())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_seen(number_format, weight, bad):
    q = number_format.quantize_weight(weight, "fp32")
    assert not number_format.weight_is_nan(q.qdata, q.scales)
    weight[BLOCK + 1, 200] = bad
    q = number_format.quantize_weight(weight, "fp32")
    assert number_format.weight_is_nan(q.qdata, q.scales)


def test_only_what_is_measured_tells_what_was_lost(number_format):
    if number_format.traits.measured:
        x = torch.tensor([[448.0, 2.0**-8, 2.0**-20, 0.0]])
        zero, subnormal = number_format.lost(reference.quantize_1x128(x, "fp32").qdata)
        assert zero.tolist() == [[False, False, True, True]] and subnormal.tolist() == [[False, True, False, False]]
    else:
        with pytest.raises(NotImplementedError):
            number_format.lost(torch.zeros(1, dtype=number_format.dtype))


MODULES = tuple(f"jetrl_verl.formats.{traits.module}" for traits in formats.FORMATS.values())


def _is_the_cache(node: ast.AST) -> bool:
    """Whether an expression is what a KV cache holds: ``o.kv_cache``, ``o["kv_cache"]``, ``get("jetrl.kv_cache")``."""
    named = getattr(node, "attr", None) or getattr(node, "id", None)
    parts = [*getattr(node, "args", ()), getattr(node, "slice", None)]
    keys = [part.value for part in parts if isinstance(part, ast.Constant)]
    return named == "kv_cache" or any(str(key).rpartition(".")[2] == "kv_cache" for key in keys)


def _names_a_format(path: Path) -> list[str]:
    """Lines in which a file spells a format's name, its type or a function, or compares what a cache holds."""
    types = {"int8", "float8_e4m3fn", "FP8_DTYPE", "E4M3_MAX", "E4M3_NAN_BITS"}
    functions = {"quantize_int8", "gemm_int8", "fprop_int8", "quantize_128x128", "dequantize_128x128"}
    functions |= {"quantize_kv", "quantize_dequantize_kv", "dequantize_kv", "quantize_heads", "dequantize_heads"}
    functions |= {"attention_fp8", "TOKEN_BYTES"}
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and node.value in formats.FORMATS:
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value!r}")
        sides = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
        if any(map(_is_the_cache, sides)) and not all(isinstance(each, ast.Is | ast.IsNot) for each in node.ops):
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: compares kv_cache")
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(MODULES):
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.module}")
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if isinstance(node, ast.Attribute | ast.Name) and name in types | functions:
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}")
    return found


def test_nobody_else_names_a_format():
    folders = tuple(PACKAGE / name for name in IMPLEMENTS)
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if not any(folder in path.parents for folder in folders)]
    files += sorted((PACKAGE / "patches").rglob("*.py"))  # a symlink, which rglob does not follow
    assert len(files) > 50
    found = [line for path in files for line in _names_a_format(path)]
    assert found == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('x = options.kv_cache == "bf16"', True),
        ('x = request["kv_cache"] != formats.UNQUANTIZED', True),
        ('x = get("jetrl.kv_cache") in names', True),
        ("x = kv_cache is None", False),
        ("x = formats.cache_traits(options.kv_cache).quantized", False),
        ("_, k, v = kernels.quantize_kv(k, v)", True),
    ],
)
def test_the_search_sees_who_tells_caches_apart(tmp_path, monkeypatch, code, found):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "some.py").write_text(code)
    assert bool(_names_a_format(tmp_path / "some.py")) == found


def test_the_search_for_names_finds_them():
    found = _names_a_format(PACKAGE / "formats/channel_int8.py")
    assert any("'int8'" in line for line in found) and any("quantize_int8" in line for line in found)
