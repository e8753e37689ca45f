"""Policy on the families of models that it is meant for, each tiny and random, against the logits
of transformers' own forward: what a family does after lm_head, in its layers or in its attention is
in log-probs and gradients, under FSDP too."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from grpo import Learner, LossConfig, Policy, Sample, pad, shard

VOCAB = 60
TEMPERATURE = 0.7
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1, mlp_only_layers=[])
FAMILIES = {
    "llama": dict(tie_word_embeddings=False),
    "llama tied": dict(tie_word_embeddings=True),
    "qwen2": dict(),
    "qwen3": dict(tie_word_embeddings=True),
    "mistral": dict(sliding_window=5),
    # Caps and scales far from 1, so that no test could pass without them.
    "gemma2": dict(sliding_window=5, final_logit_softcapping=2.0, attn_logit_softcapping=2.0),
    "gemma3_text": dict(sliding_window=5, sliding_window_pattern=2, final_logit_softcapping=2.0),
    "phi3": dict(pad_token_id=0),
    "granite": dict(logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.5),
    "cohere": dict(logit_scale=0.25),
    "olmo2": dict(),
    "smollm3": dict(no_rope_layer_interval=2, pad_token_id=0),
    "qwen3_moe": MOE,
}


def make_model(family: str, **options: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, head_dim=8, initializer_range=0.3, max_position_embeddings=64)
    config = AutoConfig.for_model(family.split()[0], **(sizes | FAMILIES[family]))
    return AutoModelForCausalLM.from_config(config, **options).eval()


def make_samples() -> list[Sample]:
    """Rows of 4 to 20 ids: longer than the sliding windows, and of unequal lengths."""
    rng = random.Random(0)
    samples = []
    for prompt, response in ((1, 3), (2, 18), (6, 7)):
        ids = [rng.randrange(1, VOCAB) for _ in range(prompt + response)]
        samples.append(Sample(ids[:prompt], ids[prompt:], rng.choice([-1.0, 0.5]), [-4.0] * response))
    return samples


def dense(model: PreTrainedModel, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by the model's own forward, each row alone."""
    logprobs, entropies = [], []
    for s in samples:
        logits = model(torch.tensor([s.prompt_ids + s.response_ids])).logits[0, len(s.prompt_ids) - 1 : -1]
        values = F.log_softmax(logits / TEMPERATURE, dim=-1)
        logprobs.append(values.gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0])
        entropies.append(-(values.exp() * values).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_the_models_own_logits(family: str) -> None:
    """The reference attends eagerly: transformers' default leaves out Gemma-2's attention cap."""
    reference, model, samples = make_model(family, attn_implementation="eager"), make_model(family), make_samples()
    logprobs, entropies = dense(reference, samples)
    weights = torch.linspace(-1, 1, len(logprobs))
    (logprobs * weights).sum().backward()
    own, entropy = Policy(model, TEMPERATURE, chunk_tokens=5)(*pad(samples))
    torch.testing.assert_close(own, logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, entropies, atol=1e-5, rtol=0)
    (own * weights).sum().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(parameter.grad, expected.grad, atol=1e-4, rtol=1e-4)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_model_learns_as_the_plain_one(one_rank: None, family: str) -> None:
    """With gradient checkpointing: the same log-probs, and after two steps the same weights."""
    settings = dict(lr=1e-3, warmup_steps=0, weight_decay=0.1, grad_clip=1.0, token_budget=40)
    samples, weights = make_samples(), []
    for sharded in (False, True):
        policy = Policy(make_model(family), TEMPERATURE, chunk_tokens=5)
        if sharded:
            shard(policy, torch.device("cpu"), gradient_checkpointing=True)
        learner = Learner(policy, LossConfig(), **settings)
        metrics = [learner.update(samples, max_gap=1e9) for _ in range(2)]
        assert all(m["optimizer_steps"] == 1 and m["grad_norm"] > 0 for m in metrics)
        weights.append([p.full_tensor() if sharded else p for p in policy.parameters()])
    for plain, gathered in zip(*weights):
        torch.testing.assert_close(gathered, plain, atol=1e-5, rtol=0)


def test_a_model_laid_out_otherwise_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot be trained: .*model.model.layers"):
        Policy(model, 1.0)
