"""The estimate of GPU memory, held against published sizes and against what PyTorch's allocator reports on a CPU."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import grpo
from grpo import Learner, LossConfig, Policy, Sample, pad, shard
from support import memory
from support.args import Args
from support.memory import Estimate, Shape, first_misfit

CPU = torch.device("cpu")
SETTINGS = dict(lr=1e-6, warmup_steps=1, weight_decay=0.1, grad_clip=1.0)
GB = 10**9


def load_bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_memory", ROOT / "bench" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load_bench()


def flags(**changes: object) -> SimpleNamespace:
    """The defaults of a run with a real model."""
    return SimpleNamespace(**vars(Args()) | {"offload": False} | changes)


def small(kind: str, **changes: int | bool) -> PretrainedConfig:
    sizes = dict(
        hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    sizes |= dict(head_dim=16, vocab_size=64, tie_word_embeddings=False) | changes
    return (Qwen3Config if kind == "qwen3" else LlamaConfig)(**sizes)


def rows(tokens: int, count: int = 4) -> list[Sample]:
    """`tokens` tokens, padding and prompts of one token included."""
    length = tokens // count
    return [Sample([1], [2] * (length - 1), 1.0, [-4.0] * (length - 1)) for _ in range(count)]


def allocations(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that `work` holds at its peak, beyond what was there before, and its largest single allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]  # negative: freed
    return max(itertools.accumulate(sizes)), max(sizes)


# Counts


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-1.7B-Base", 1.72), ("Qwen3-4B-Base", 4.02), ("Qwen3-8B-Base", 8.19), ("Llama-3.2-1B", 1.24)],
)
def test_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert round(Shape(bench.MODELS[name]).parameters / 1e9, 2) == billions


@pytest.mark.parametrize("tied", [True, False])
def test_parts_of_a_model_add_up(tied: bool) -> None:
    """A tied lm_head is one parameter; layers and root are everything."""
    config = small("qwen3", tie_word_embeddings=tied)
    s = Shape(config)
    assert s.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert s.parameters == s.root + 3 * s.layer and s.root == (1 if tied else 2) * 64 * 64 + 64


TEXT = dict(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64
)


@pytest.mark.parametrize(
    ("config", "width", "keys"),
    [
        (
            Gemma3nTextConfig(
                **TEXT, intermediate_size=[96, 192, 96], vocab_size_per_layer_input=64, num_kv_shared_layers=0
            ),
            192,
            2 * 16,
        ),
        (
            Qwen3MoeConfig(
                **TEXT, intermediate_size=96, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=80
            ),
            4 * 80,
            2 * 16,
        ),
        (MixtralConfig(**TEXT, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2), 2 * 96, 2 * 16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_configs_of_all_kinds_are_counted(config: PretrainedConfig, width: int, keys: int) -> None:
    """Sizes for each layer, or of experts: `shape` died of them."""
    shape = Shape(config)
    assert shape.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert shape.hidden == shape.vocabulary == 64 and shape.kept == 2 * 3 * 64 and shape.kv == 4 * 3 * keys
    assert shape.forward == 8 * 64 + 6 * width and 0 < 3 * shape.layer <= shape.parameters
    assert first_misfit(shape, flags(), 1, 80 * GB) is None


def test_states_of_1_7b_by_hand() -> None:
    """16 bytes a parameter: 27.5 GB; 28 layers x 8 key-value heads x 128 x 2 tensors x 2 bytes a token of KV cache."""
    shape = Shape(bench.MODELS["Qwen3-1.7B-Base"])
    found = Estimate(shape, flags(), 1, 96 * GB)
    assert (found.masters + found.gradients + found.adam) / 1e9 == pytest.approx(27.5, abs=0.05)
    assert found.weights == 2 * 1_720_574_976 and shape.kv == 114_688
    assert found.logits == 5 * 4 * 1024 * 151_936  # the default chunk of grpo.Policy


def test_ranks_share_the_states_and_nothing_else() -> None:
    config = Shape(bench.MODELS["Qwen3-8B-Base"])
    one, eight = (Estimate(config, flags(), ranks, 80 * GB) for ranks in (1, 8))
    for name in ("masters", "gradients", "adam"):
        assert getattr(eight, name) == getattr(one, name) // 8 > 0
    for name in ("weights", "activations", "logits", "kv_cache"):
        assert getattr(eight, name) == getattr(one, name)
    offloaded = Estimate(config, flags(offload=True), 8, 80 * GB)
    assert offloaded.masters == offloaded.gradients == offloaded.adam == 0
    moved = eight.masters + eight.gradients + eight.adam
    assert offloaded.host - eight.host == moved == eight.phases["update"] - offloaded.phases["update"]


def test_a_reference_model_is_counted() -> None:
    config = Shape(bench.MODELS["Qwen3-1.7B-Base"])
    plain, with_kl = (Estimate(config, flags(beta=beta), 1, 80 * GB) for beta in (0.0, 0.1))
    for phase, needed in plain.phases.items():
        assert with_kl.phases[phase] - needed >= plain.masters


# What does not fit


@pytest.mark.parametrize(
    ("model", "gigabytes", "changes", "phase", "remedies"),
    [
        ("Qwen3-4B-Base", 96, {}, "generate", "lower --gpu-memory-utilization, add --offload or take more GPUs"),
        ("Qwen3-1.7B-Base", 80, {"gpu_memory_utilization": 0.08}, "generate needs 0.9 GB of KV", "raise this"),
        ("Qwen3-1.7B-Base", 80, {"token_budget": 1 << 18}, "update", "lower --token-budget, add --offload or take"),
        ("Qwen3-8B-Base", 80, {"offload": True, "token_budget": 1 << 18}, "update", "lower --token-budget or take"),
    ],
)
def test_a_misfit_names_the_phase_and_the_flags(
    model: str, gigabytes: int, changes: dict, phase: str, remedies: str
) -> None:
    sentence = first_misfit(Shape(bench.MODELS[model]), flags(**changes), 1, gigabytes * GB)
    assert sentence.startswith(phase) and "\n" not in sentence and len(re.findall(r"[\d.]+ GB", sentence)) >= 2
    assert f"; {remedies}" in sentence


@pytest.mark.parametrize(
    ("model", "gigabytes", "wrong", "mended", "ranks"),
    [
        ("Qwen3-4B-Base", 96, {}, {"gpu_memory_utilization": 0.4}, 1),
        ("Qwen3-4B-Base", 96, {}, {"offload": True}, 1),
        ("Qwen3-1.7B-Base", 80, {"gpu_memory_utilization": 0.08}, {"gpu_memory_utilization": 0.5}, 1),
        ("Qwen3-1.7B-Base", 80, {"token_budget": 1 << 18}, {"token_budget": 1 << 15}, 1),
        ("Qwen3-8B-Base", 80, {}, {"offload": True}, 1),
        ("Qwen3-8B-Base", 80, {}, {}, 4),
    ],
)
def test_those_flags_mend_it(model: str, gigabytes: int, wrong: dict, mended: dict, ranks: int) -> None:
    assert first_misfit(Shape(bench.MODELS[model]), flags(**wrong), 1, gigabytes * GB)
    assert first_misfit(Shape(bench.MODELS[model]), flags(**wrong | mended), ranks, gigabytes * GB) is None


def test_what_fits_is_let_through() -> None:
    assert first_misfit(Shape(bench.MODELS["Qwen3-1.7B-Base"]), flags(), 1, 96 * GB) is None
    assert first_misfit(Shape(bench.MODELS["Qwen3-8B-Base"]), flags(), 8, 80 * GB) is None


def test_the_bench_prints_every_model_and_machine() -> None:
    models = {name: small("llama") for name in bench.MODELS}
    lines = bench.table(models, flags()).splitlines()
    assert len(lines) == 2 + 4 * 3 * 2 and len({line.count("|") for line in lines}) == 1


# Activations


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_saved_tensors_are_the_estimates(kind: str) -> None:
    """With checkpoints, one more layer saves its input; without, all that its backward needs.

    That is the estimate's peak less the gradients that meet it there: 2 H and 6 I, of the MLP's saved
    8 I the last 2 being gone. Within 3%.
    """
    tokens = 1024

    def saved(layers: int, checkpointing: bool) -> int:
        config = small(kind, num_hidden_layers=layers)
        policy = Policy(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), 1.0, 64)
        if checkpointing:
            shard_checkpoints(policy)
        weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
        storages: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy(*pad(rows(tokens)))
        return sum(t.untyped_storage().nbytes() for address, t in storages.items() if address not in weights)

    config = small(kind)
    s = Shape(config)
    layer = s.recomputed - 2 * config.hidden_size - 4 * config.intermediate_size
    assert (saved(4, True) - saved(2, True)) / 2 / tokens == pytest.approx(s.kept / 3, rel=0.03)
    assert (saved(4, False) - saved(2, False)) / 2 / tokens == pytest.approx(layer, rel=0.03)


def shard_checkpoints(policy: Policy) -> None:
    """What `shard` does for checkpointing, without FSDP."""
    policy.model.gradient_checkpointing_enable()
    for layer in policy.model.model.layers:
        layer.training = True


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def as_on_a_gpu(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shard` computes in bfloat16 on the CPU too."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    monkeypatch.setattr(grpo, "MixedPrecisionPolicy", lambda **_: mixed)


def learner(config: PretrainedConfig, chunk: int, token_budget: int) -> Learner:
    policy = shard(Policy(AutoModelForCausalLM.from_config(config), 1.0, chunk), CPU, gradient_checkpointing=True)
    return Learner(policy, LossConfig(), token_budget=token_budget, **SETTINGS)


# Where the update peaks: in a layer's activations, in its weights, in lm_head, at the end.
LAYER = (dict(), 64, 1024)
WEIGHTS = (dict(hidden_size=256, intermediate_size=512, head_dim=64), 16, 32)
HEAD = (dict(vocab_size=2048, intermediate_size=128), 128, 256)
END = (dict(vocab_size=4096, hidden_size=256), 16, 64)


@pytest.mark.parametrize(
    ("case", "kind", "tied"),
    [
        (LAYER, "qwen3", False),
        (LAYER, "llama", True),
        (WEIGHTS, "qwen3", True),
        (HEAD, "qwen3", True),
        (END, "llama", False),
    ],
)
def test_an_update_takes_what_is_estimated(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, case: tuple[dict, int, int], kind: str, tied: bool
) -> None:
    """FSDP on one rank, bfloat16, gradient checkpointing, two micro-batches: what the allocator reports, within 5%."""
    changes, chunk, tokens = case
    config = small(kind, **changes, tie_word_embeddings=tied)
    monkeypatch.setattr(memory, "CHUNK_TOKENS", chunk)
    found = Estimate(Shape(config), flags(token_budget=tokens, max_length=16), 1, 80 * GB)
    resting = memory.CONTEXT + memory.GRAPHS + found.masters + found.adam
    subject = learner(config, chunk, tokens)
    peak, _ = allocations(lambda: subject.update(rows(tokens) * 2, 1e9))
    assert peak == pytest.approx(found.phases["update"] - resting, rel=0.05)


@pytest.mark.parametrize(("case", "tied"), [(LAYER, True), (HEAD, True), (END, False)])
def test_logprobs_take_what_is_estimated(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, case: tuple[dict, int, int], tied: bool
) -> None:
    changes, chunk, tokens = case
    config = small("qwen3", **changes, tie_word_embeddings=tied)
    monkeypatch.setattr(memory, "CHUNK_TOKENS", chunk)
    found = Estimate(Shape(config), flags(token_budget=tokens, max_length=16), 1, 80 * GB)
    resting = memory.CONTEXT + memory.GRAPHS + found.masters + found.adam
    policy = shard(Policy(AutoModelForCausalLM.from_config(config), 1.0, chunk), CPU, gradient_checkpointing=True)
    peak, _ = allocations(lambda: grpo.frozen_logprobs(policy, pad(rows(tokens))))
    assert peak == pytest.approx(found.phases["logprob"] - resting, rel=0.05)


def test_an_update_never_holds_tokens_times_vocabulary() -> None:
    """trl#2709, at Qwen3's vocabulary, in eight chunks of tokens.

    No allocation is larger than one chunk's float32 logits, and of all that the update makes, no more
    is held than the five copies of a chunk that are estimated, beside its gradients.
    """
    vocabulary, chunk, tokens = 151_936, 64, 512
    config = small("qwen3", vocab_size=vocabulary, hidden_size=16, intermediate_size=32, tie_word_embeddings=True)
    policy = Policy(AutoModelForCausalLM.from_config(config), 1.0, chunk)
    subject = Learner(policy, LossConfig(), token_budget=tokens, **SETTINGS)
    held, largest = allocations(lambda: subject.update(rows(tokens), 1e9))
    assert chunk * vocabulary * 4 <= largest < 1.01 * chunk * vocabulary * 4
    gradients = 2 * 4 * vocabulary * 16  # so far, and a chunk's
    assert held < 5.2 * chunk * vocabulary * 4 + gradients < tokens * vocabulary * 4
