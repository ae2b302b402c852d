# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shared operations in a real vLLM on the CPU, one engine a family: log-probabilities equal the trainer's in all 32
bits with prefix caching, chunked prefill and preemption; some engines run vLLM's own compilation."""

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import vllm_engine
from streams import parts_of_model
from tiny_models import ALL, HYBRIDS, WITH_TOWER, packed, padded, tiny_model, with_preferences
from vllm_engine import sync

from jetrl_verl import kernels
from jetrl_verl.config.installed import installed_version
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.chunked_logits import mask_unused_vocabulary
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.reference import cache_shape
from jetrl_verl.reference.kv_cache import cache_units
from jetrl_verl.rollout import cpu_attention, qk_norm
from jetrl_verl.sync.statement import ContractViolation
from jetrl_verl.train.shared_operations import share_operations

RULE = "fp32"
VOCABULARY, TOKENS, BANNED = 100, 90, [88, 89]
"""Rows of lm_head, how many of them have a token, and which tokens are, as the others, never sampled."""
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=256, intermediate_size=384, max_position_embeddings=256)
CHANGES = {
    "llama": dict(head_dim=256),
    "mistral": dict(sliding_window=None),
    "qwen2": dict(head_dim=64, num_attention_heads=4, num_key_value_heads=2),
}
"""Heads of every supported width among them."""
TEMPERATURES = (1.0, 0.6, 1.3)
RULED = {"qwen3": 11, "qwen3_vl": 11, "qwen3_moe": 9} | dict.fromkeys(HYBRIDS, 15)
"""Norms, activations and gates of a model if not seven: with QK norms, and without activations in a mixture."""
ACTIVATIONS = {"qwen3_moe": [], "qwen3_5_moe": ["mlp.shared_expert.act_fn"]}
"""Activations of a layer's linears in a mixture."""
FIRST_HALVES = dict.fromkeys(HYBRIDS, (["linear_attn.norm"], ["linear_attn.norm"], ["self_attn"]))
"""What else of each layer hands quantized results over: a gated norm or gated attention."""
COMPILED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_moe")
"""Families whose engine runs vLLM's own compilation."""
VLLMS_SPLITTING = ("vllm::unified_attention_with_output", "vllm::unified_kv_cache_update", qk_norm.VLLMS_DELTA_NET)
"""Where vLLM cuts on a GPU."""
SPLITTING = (qk_norm.ATTENTION, qk_norm.DELTA_NET)
PIECES: list[list[str]] = []
"""Operators of jetrl in each piece of the compiled model between two attentions."""


def cut_at_attention(graph, inputs):
    """Backend of the compiled engine: splits the graph as vLLM does on a GPU, without Inductor."""
    from vllm.compilation.backends import split_graph

    whole, pieces = split_graph(graph, [*VLLMS_SPLITTING, *SPLITTING])
    operators = [
        [str(node.target) for node in piece.graph.graph.nodes] for piece in pieces if not piece.is_splitting_graph
    ]
    PIECES[:] = [[name[6:] for name in names if name.startswith("jetrl.")] for names in operators]
    return whole


def crowded(family: str) -> dict:
    """Arguments of a crowded engine. A hybrid's blocks grow from 16 to 64 tokens, whose keys take a state's bytes."""
    blocks = dict(max_num_batched_tokens=64, num_gpu_blocks_override=10)
    return vllm_engine.CROWDED | (blocks if family in HYBRIDS else {})


def build_policy(family: str, seed: int):
    """FP32 masters of a policy far from uniform."""
    return with_preferences(tiny_model(family, seed, **SHAPE, **CHANGES.get(family, {})))


def save_untrained(family: str, folder: Path) -> None:
    """What an engine starts from."""
    build_policy(family, 0).to(torch.bfloat16).save_pretrained(folder)
    if family == "qwen2_5_vl":  # vLLM 0.29 builds its processor for text as well
        if installed_version("vllm").startswith("0.29"):
            pytest.importorskip("torchvision", reason="the processor's class needs it")
        (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')


def as_trainer(model: torch.nn.Module, kv_cache: str = "bf16", tp: int = 1) -> torch.nn.Module:
    """A policy as FSDP shows it to a forward: BF16 weights, FP8 linears, shared operations, for a rollout of ``tp``
    ranks."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    replace_linears(model, plan_linears(model.config, tp=tp), scale_rule=RULE)
    share_operations(model, kv_cache)
    mask_unused_vocabulary(model, TOKENS, BANNED)
    return model


def build_trainer(family: str, seed: int, kv_cache: str = "bf16"):
    return as_trainer(build_policy(family, seed), kv_cache)


def stream(family: str, seed: int, operations: str = "shared", kv_cache: str = "bf16"):
    model = build_policy(family, seed)
    if operations == "shared":
        share_operations(model)
    mask_unused_vocabulary(model, TOKENS, BANNED)
    return parts_of_model(model, operations=operations, kv_cache=kv_cache, rule=RULE)


@dataclass
class Rollout:
    """A live engine and counts of what its scheduler did."""

    family: str
    llm: object
    worker: object
    kv_cache: str = "bf16"
    chunks: int = 0
    preemptions: int = 0
    draws: int = 0

    def watch(self) -> None:
        """Count prompt chunks, preemptions, and steps that the shared sampler draws, if this process has one."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def counted_schedule(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for request, tokens in output.num_scheduled_tokens.items():
                state = scheduler.requests[request]
                self.chunks += tokens > 1 and state.num_computed_tokens < state.num_prompt_tokens
            return output

        def counted_preempt(*args, **kwargs):
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler.schedule, scheduler._preempt_request = counted_schedule, counted_preempt
        sampler = None if self.worker is None else self.worker.model_runner.sampler
        if not hasattr(sampler, "draw"):
            return
        draw = sampler.draw

        def counted_draw(*args, **kwargs):
            self.draws += 1
            return draw(*args, **kwargs)

        sampler.draw = counted_draw

    def check_crowded(self, outputs: list) -> None:
        """Each request of :func:`prompts_with_shared_prefixes` has two of the outputs."""
        # vLLM cuts a hybrid's prompts at ends of blocks alone.
        assert self.chunks > (2 if self.family in HYBRIDS else len(outputs) // 2), "no prompt was cut"
        assert self.preemptions > 0, "no request was preempted"
        assert any(output.num_cached_tokens >= 16 for output in outputs), "no prefix was reused"

    def generate(self, prompts: list[list[int]], temperatures: list[float], **sampling):
        from vllm import SamplingParams

        parameters = [
            SamplingParams(max_tokens=40, temperature=t, logprobs=0, detokenize=False, ignore_eos=True, **sampling)
            for t in temperatures
        ]
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)


EXACT = dict(train="fp8", rollout="fp8", scale_rule=RULE, operations="shared")
ENGINES = {family: (family, JetConfig("jet_fp8_exact", **EXACT)) for family in ALL}
ENGINES["FP8 cache"] = "qwen3", JetConfig("jet_fp8_exact", **EXACT, kv_cache="fp8")
BASELINE = "baseline with an FP8 cache"


@pytest.fixture(scope="module", params=ENGINES)
def rollout(request, tmp_path_factory, cpu_platform):
    baseline = "qwen3", JetConfig("fp8_rollout", train="bf16", rollout="fp8", kv_cache="fp8")
    family, options = ENGINES.get(request.param, baseline)
    with vllm_engine.cpu_settings(), pytest.MonkeyPatch.context() as patch:
        import vllm.envs
        from vllm.distributed import cleanup_dist_env_and_memory

        folder = tmp_path_factory.mktemp(family)
        save_untrained(family, folder)
        compiled = {}
        if family in COMPILED:
            # AOT compilation saves Inductor's artifacts. vLLM reads its environment once a process.
            patch.setattr(vllm.envs, "VLLM_USE_AOT_COMPILE", False)
            backend = f"{__name__}.{cut_at_attention.__name__}"
            settings = {"mode": "DYNAMO_TRACE_ONCE", "backend": backend, "splitting_ops": list(VLLMS_SPLITTING)}
            compiled = dict(enforce_eager=False, compilation_config=settings)
        llm, worker = vllm_engine.start(folder, options, load_format="dummy", **crowded(family), **compiled)
        worker.monkey_patch_model(TOKENS, BANNED)
        engine = Rollout(family, llm, worker, options.kv_cache)
        engine.watch()
        yield engine
        del llm, worker
        engine.llm = engine.worker = None
        cleanup_dist_env_and_memory()


def prompts_with_shared_prefixes(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    prefix = [chance.randrange(BANNED[0]) for _ in range(64)]
    prompts = [[chance.randrange(BANNED[0]) for _ in range(n)] for n in (1, 3, 17, 33, 80, 60, 5, 40)]
    return prompts + [prefix + [chance.randrange(BANNED[0]) for _ in range(n)] for n in (1, 9, 20, 2)]


def trainer_log_probs(
    model, sequences: list[list[int]], temperatures: list[float], is_packed: bool
) -> list[torch.Tensor]:
    """Log-probabilities of each sequence's tokens from the second on, in one micro-batch."""
    lengths, rows = torch.tensor([len(s) for s in sequences]), [torch.tensor(s) for s in sequences]
    inputs = (packed if is_packed else padded)(rows)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        logits = model(**inputs, use_cache=False).logits
        logits = logits[0] if is_packed else logits[inputs["attention_mask"].bool()]
        following = torch.cat(rows).roll(-1)[:, None]
        log_probs = kernels.log_probs(logits, following, torch.tensor(temperatures).repeat_interleave(lengths))[:, 0]
    assert log_probs.requires_grad == torch.is_grad_enabled()
    return [part[:-1].detach() for part in log_probs.split(lengths.tolist())]


def differences(model, prompts, temperatures, outputs, *, packed: bool, micro_batch: int) -> int:
    """Number of response tokens whose log-probability differs in the trainer, over shuffled micro-batches."""
    order = list(range(len(prompts)))
    random.Random(micro_batch).shuffle(order)
    different = compared = 0
    for start in range(0, len(order), micro_batch):
        chosen = order[start : start + micro_batch]
        responses = [list(outputs[i].outputs[0].token_ids) for i in chosen]
        sequences = [prompts[i] + response for i, response in zip(chosen, responses, strict=True)]
        log_probs = trainer_log_probs(model, sequences, [temperatures[i] for i in chosen], packed)
        for i, response, trained in zip(chosen, responses, log_probs, strict=True):
            entries = outputs[i].outputs[0].logprobs
            sampled = torch.tensor([e[token].logprob for e, token in zip(entries, response, strict=True)])
            different += int((trained[-len(response) :] != sampled).sum())
            compared += len(response)
    assert compared == 40 * len(prompts)
    return different


@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (12, 13))])
def test_equal_in_every_bit_after_each_weight_update(rollout, seed):
    sync(rollout.worker, stream(rollout.family, seed, kv_cache=rollout.kv_cache))
    rollout.llm.reset_prefix_cache()
    rollout.chunks = rollout.preemptions = rollout.draws = 0
    prompts = prompts_with_shared_prefixes(seed)
    temperatures = [TEMPERATURES[i % 3] for i in range(len(prompts))]
    outputs = rollout.generate(prompts, temperatures)
    again = rollout.generate(prompts, temperatures)
    rollout.check_crowded(outputs + again)
    assert rollout.draws >= 80, "each of two times 40 tokens is drawn by the shared sampler"
    assert all(token < BANNED[0] for output in outputs for token in output.outputs[0].token_ids)

    model = build_trainer(rollout.family, seed, rollout.kv_cache)
    with torch.no_grad():
        assert differences(model, prompts, temperatures, outputs, packed=False, micro_batch=5) == 0
        assert differences(model, prompts, temperatures, again, packed=True, micro_batch=12) == 0
        if rollout.kv_cache == "fp8":
            of_bf16 = build_trainer(rollout.family, seed)
            assert differences(of_bf16, prompts, temperatures, outputs, packed=True, micro_batch=12) > 0
    # In the forward that carries the gradient, in other micro-batches.
    assert differences(model, prompts, temperatures, outputs, packed=True, micro_batch=1) == 0
    assert differences(model, prompts, temperatures, again, packed=False, micro_batch=4) == 0


def test_prompt_log_probabilities_are_equal_too(rollout):
    sync(rollout.worker, stream(rollout.family, 14, kv_cache=rollout.kv_cache))
    rollout.llm.reset_prefix_cache()
    prompt = prompts_with_shared_prefixes(14)[4]
    (output,) = rollout.generate([prompt], [1.0], prompt_logprobs=0)
    sampled = torch.tensor([e[token].logprob for e, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)])
    with torch.no_grad():
        model = build_trainer(rollout.family, 14, rollout.kv_cache)
        (trained,) = trainer_log_probs(model, [prompt], [1.0], True)
    assert torch.equal(trained, sampled)


def test_inputs_of_linears_alone_are_quantized_where_they_are_written(rollout):
    model = rollout.worker.model_runner.model
    rules = {name: module.reader_rule for name, module in model.named_modules() if hasattr(module, "reader_rule")}
    root, activations = "language_model.model" if rollout.family in WITH_TOWER else "model", ["mlp.act_fn"]
    activations = ACTIVATIONS.get(rollout.family, activations)
    read_by_linears = ("input_layernorm", "post_attention_layernorm", *activations)
    assert {name for name, rule in rules.items() if rule == RULE} == {
        f"{root}.layers.{layer}.{name}"
        for layer, others in enumerate(FIRST_HALVES.get(rollout.family, ([], [])))
        for name in (*read_by_linears, *others)
    }
    assert rules[f"{root}.norm"] is None and len(rules) == RULED.get(rollout.family, 7)


@pytest.mark.parametrize("rollout", ["qwen3"], indirect=True)
def test_quantizing_before_the_linear_changes_no_bit(rollout, monkeypatch):
    """Three of a layer's four linears read qdata."""
    sync(rollout.worker, stream(rollout.family, 17))
    calls = Counter()

    def count(owner, name: str) -> None:
        stock = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *inputs, **options: calls.update([name]) or stock(*inputs, **options))

    count(kernels, "fprop_quantized")
    count(kernels, "fprop")
    prompt = prompts_with_shared_prefixes(17)[2]
    qdata = vllm_engine.prompt_log_probs(rollout.llm, prompt)
    steps = calls["fprop"] // 2
    assert steps > 0 and calls == {"fprop": 2 * steps, "fprop_quantized": 2 * 3 * steps}
    for module in rollout.worker.model_runner.model.modules():
        if hasattr(module, "reader_rule"):
            monkeypatch.setattr(module, "reader_format", None)
    calls.clear()
    assert torch.equal(vllm_engine.prompt_log_probs(rollout.llm, prompt), qdata)
    assert calls == {"fprop": 2 * 4 * steps}


EXPERTS = ["logits", "route_and_permute", "grouped_gemm_nt", "weighted_silu_mul_quantize", "grouped_gemm_nt"]
HALVES = {
    "qwen2": (["rotary"], ["fprop_quantized", "silu_mul_quantize", "fprop_quantized"], "add_rms_norm"),
    "qwen3_moe": ([], EXPERTS, "combine_add_rms_norm"),
}
"""Operators between qkv and attention (QK norms are part of attention), those after the second norm, and the next
norm."""


@pytest.mark.parametrize("rollout", COMPILED, indirect=True)
def test_a_compiled_layer_has_only_shared_operations_in_whole_pieces(rollout):
    assert rollout.worker.vllm_config.compilation_config.splitting_ops == [*VLLMS_SPLITTING, *SPLITTING]
    if rollout.family in HYBRIDS:
        gated, norm = ["gated_rms_norm_quantize", "fprop_quantized"], "add_rms_norm_quantize_1x128"
        mlp = ["fprop_quantized", "silu_mul_quantize", "fprop_quantized"]
        if rollout.family == "qwen3_5_moe":
            mlp = [*EXPERTS, "combine", *mlp, "logits", "add_shared_expert"]
        mlp = [norm, *mlp]
        to_delta_net = ["fprop_quantized", "logits"]
        assert [
            ["rms_norm_quantize_1x128", *to_delta_net],
            [*gated, *mlp, norm, *to_delta_net],
            [*gated, *mlp, norm, "fprop_quantized"],
            ["sigmoid_mul_quantize", "fprop_quantized", *mlp, "add_rms_norm"],
        ] == PIECES
        return
    heads, second, norm = HALVES[rollout.family]
    to_attention = ["fprop_quantized", *heads]
    mlp = ["fprop", "add_rms_norm_quantize_1x128", *second]
    assert len(PIECES) == 3
    assert PIECES[0] == ["rms_norm_quantize_1x128", *to_attention]
    assert PIECES[1] == [*mlp, f"{norm}_quantize_1x128", *to_attention]
    assert PIECES[2] == [*mlp, norm]


def plant_norm(model, runner):
    norm = model.model.layers[1].post_attention_layernorm
    return norm, "_forward_method", norm.forward_native


def plant_qdata(model, runner):
    return model.model.layers[0].input_layernorm, "reader_rule", "pow2"


def plant_activation(model, runner):
    act = model.model.layers[1].mlp.act_fn
    return act, "_forward_method", act.forward_native


def plant_rotary(model, runner):
    """In one layer with QK norms, where norm and rotary then run one by one; else in all layers."""
    attention = model.model.layers[0].self_attn
    rotary = attention.rotary_emb
    if not hasattr(attention, "q_norm"):
        return rotary, "_forward_method", rotary.forward_native

    def forward(*inputs, **options):
        attention.one_by_one, rotary._forward_method = True, rotary.forward_native
        try:
            return type(attention).forward(attention, *inputs, **options)
        finally:
            attention.one_by_one, rotary._forward_method = False, rotary._forward_shared

    return attention, "forward", forward


def plant_attention(model, runner):
    """A softmax scale off by one part in 4096, which BF16 cannot represent."""
    impl = model.model.layers[1].self_attn.attn.impl
    return impl, "scale", impl.scale * (1 + 2**-12)


def plant_logits(model, runner):
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    processor = model.logits_processor
    return processor, "_get_logits", lambda *inputs: LogitsProcessor._get_logits(processor, *inputs).float()


def plant_log_probs(model, runner):
    from vllm.v1.sample.sampler import Sampler

    return runner.sampler, "__class__", Sampler


@pytest.mark.parametrize("rollout", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    "plant", [plant_norm, plant_qdata, plant_activation, plant_rotary, plant_attention, plant_logits, plant_log_probs]
)
def test_one_stock_operation_makes_log_probabilities_differ(rollout, plant):
    """Each operation, put back in the rollout alone: the equality above is not a tautology."""
    sync(rollout.worker, stream(rollout.family, 15))
    rollout.llm.reset_prefix_cache()
    runner = rollout.worker.model_runner
    owner, name, value = plant(runner.model, runner)
    prompts = prompts_with_shared_prefixes(15)
    temperatures = [0.7] * len(prompts)
    stock = getattr(owner, name)
    setattr(owner, name, value)
    try:
        outputs = rollout.generate(prompts, temperatures)
    finally:
        setattr(owner, name, stock)
    rollout.llm.reset_prefix_cache()
    with torch.no_grad():
        model = build_trainer(rollout.family, 15)
        assert differences(model, prompts, temperatures, outputs, packed=True, micro_batch=12) > 0


@pytest.mark.parametrize(
    ("rollout", "broken", "place"),
    [
        *(("qwen3", "norm_rotary_write", 2), ("qwen3", "decode_attention_bf16", 0)),
        *(
            ("FP8 cache", "norm_rotary_write_fp8", 2),
            ("FP8 cache", "write_kv", 1),
            ("FP8 cache", "decode_attention", 0),
        ),
    ],
    indirect=["rollout"],
)
def test_a_fault_in_cache_writes_or_reads_is_named_at_the_sync(rollout, monkeypatch, broken, place):
    """No weight shows it: values of another token, or scaled queries."""
    stock = getattr(kernels, broken)

    def faulty(*call):
        x = call[place]
        return stock(*call[:place], x.roll(1, dims=0) if place else x * 1.0078125, *call[place + 1 :])

    monkeypatch.setattr(kernels, broken, faulty)
    name = "norm_rotary" if broken.startswith("norm") else f"attention over an? {rollout.kv_cache.upper()} KV cache"
    with pytest.raises(ContractViolation, match=f"contract check: {name} of the shared operations differ"):
        sync(rollout.worker, stream(rollout.family, 17, kv_cache=rollout.kv_cache))


# --- an FP8 cache ----------------------------------------------------------------------------------------------------

of_fp8_cache = pytest.mark.parametrize("rollout", ["FP8 cache"], indirect=True)


@of_fp8_cache
def test_cache_pages_are_bytes_of_half_the_bf16_size(rollout):
    runner = rollout.worker.model_runner
    kv_heads = runner.model_config.get_num_kv_heads(runner.parallel_config)
    pages, block_size = (vllm_engine.CROWDED[name] for name in ("num_gpu_blocks_override", "block_size"))
    for cache in runner.kv_caches:
        assert cache.dtype == torch.uint8 and cache_units(cache).shape == cache_shape(pages, block_size, kv_heads)
    spec = next(iter(runner.get_kv_cache_spec().values()))
    assert spec.page_size_bytes == 2 * block_size * kv_heads * 129
    impl = runner.model.model.layers[0].self_attn.attn.impl
    assert type(impl) is cpu_attention.FP8CPUAttention and impl.kv_cache_dtype == "auto"


@of_fp8_cache
def test_stale_bytes_in_the_cache_after_a_sleep_change_nothing(rollout):
    """Pages are not initialized after waking up; here they are NaN as data and huge as scales."""
    sync(rollout.worker, stream(rollout.family, 23, kv_cache="fp8"))
    prompts = prompts_with_shared_prefixes(23)
    for cache in rollout.worker.model_runner.kv_caches:
        cache.fill_(255)
    rollout.llm.reset_prefix_cache()
    after = rollout.generate(prompts, [1.0] * len(prompts))
    model = build_trainer(rollout.family, 23, "fp8")
    with torch.no_grad():
        assert differences(model, prompts, [1.0] * len(prompts), after, packed=True, micro_batch=12) == 0


@of_fp8_cache
def test_a_trainer_with_another_cache_is_refused_at_the_sync(rollout):
    names = "attention over a BF16 KV cache, attention over an FP8 KV cache, norm_rotary"
    with pytest.raises(ContractViolation, match=f"contract check: {names} of the shared operations differ"):
        sync(rollout.worker, stream(rollout.family, 24))


@pytest.mark.parametrize("rollout", [BASELINE], indirect=True)
def test_a_baseline_has_the_fp8_cache_and_stock_operations(rollout):
    sync(rollout.worker, stream(rollout.family, 26, operations="stock"))
    model = rollout.worker.model_runner.model
    assert type(model.model.norm).__module__.startswith("vllm.")
    assert type(model.model.layers[0].self_attn.attn.impl) is cpu_attention.FP8CPUAttention
    prompt = prompts_with_shared_prefixes(26)[4]
    sampled = vllm_engine.prompt_log_probs(rollout.llm, prompt)
    for layer in model.model.layers:
        assert layer.self_attn.attn.get_kv_cache_spec(rollout.worker.vllm_config).dtype == torch.uint8
    with torch.no_grad():
        (trained,) = trainer_log_probs(build_trainer(rollout.family, 26), [prompt], [1.0], True)
    # Each side has its own BF16 operations, and the rollout alone has FP8 keys and values.
    assert 0 < (sampled - trained).abs().max() < 0.3
