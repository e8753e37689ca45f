"""Forward and backward of the same micro-batches, bare and by `Learner.update`, in turn in one process.

    python -m bench.trainer        the embedded model and SmolLM2-135M's shape, 3 minutes on 2 idle cores

Bare is what anybody would write first: `model.model`, `lm_head`, `log_softmax`, all of it in memory; no FSDP, no
chunks, no clipping, no optimizer. `Learner.update` has these, entropy, and proof of finite weights on top. The ids and
SmolLM2's weights are random, lengths spread evenly, the learning rate is 0.
"""

from __future__ import annotations

import math
import statistics
import time

from support.args import TINY  # before torch: support/ sets how its threads wait

# isort: split

import torch
import torch.distributed as dist
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.runs import code_version, machine, results_parser
from bench.tables import described, estimate, markdown, save
from grpo import Learner, LossConfig, Policy, Sample, micro_batches, pad, shard
from support.distributed import start_process_group
from support.launch import quiet

PROMPT = 17
SMOLLM2 = dict(vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
SMOLLM2 |= dict(num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
# Rollouts, their shortest and longest response, tokens of a micro-batch.
SIZES = {"embedded": (256, 20, 77, 2048), "SmolLM2-135M": (16, 40, 80, 2048)}


def load(name: str) -> PreTrainedModel:
    """The model, float32, without dropout."""
    if name == "embedded":
        return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2), dtype=torch.float32).eval()


def make_samples(vocabulary: int, rollouts: int, shortest: int, longest: int) -> list[Sample]:
    """Responses of all lengths between the two, right and wrong in turn."""
    generator = torch.Generator().manual_seed(0)
    lengths = [shortest + (longest - shortest) * number // (rollouts - 1) for number in range(rollouts)]
    rows = [torch.randint(vocabulary, (PROMPT + n,), generator=generator).tolist() for n in lengths]
    return [Sample(ids[:PROMPT], ids[PROMPT:], (-1.0) ** i, [0.0] * n) for i, (ids, n) in enumerate(zip(rows, lengths))]


def bare(model: PreTrainedModel, samples: list[Sample], budget: int) -> None:
    """Forward and backward of the policy-gradient loss, the mean of each response, then over responses."""
    for rows in micro_batches([len(s) for s in samples], budget):
        ids, prompts, lengths = pad([samples[row] for row in rows])
        states = model.model(input_ids=ids, attention_mask=None, use_cache=False).last_hidden_state
        logprobs = log_softmax(model.lm_head(states[:, :-1]), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        position = torch.arange(1, ids.shape[1])
        response = (position >= prompts[:, None]) & (position < lengths[:, None])
        advantages = torch.tensor([samples[row].advantage for row in rows]) / (lengths - prompts) / len(samples)
        (-(logprobs * response).sum(1) * advantages).sum().backward()


def measure(name: str, pairs: int) -> dict:
    """Seconds of both, in turn, after one of each to warm up; and the norms of both gradients, which must agree."""
    rollouts, shortest, longest, budget = SIZES[name]
    model, policy = load(name), shard(Policy(load(name), 1.0), torch.device("cpu"))
    still = dict(lr=0.0, warmup_steps=1, weight_decay=0.0, grad_clip=1.0)
    learner = Learner(policy, LossConfig(), **still, token_budget=budget)
    samples, seconds = make_samples(model.config.vocab_size, rollouts, shortest, longest), {"bare": [], "update": []}
    for _ in range(1 + pairs):
        model.zero_grad(set_to_none=True)
        begun = time.perf_counter()
        bare(model, samples, budget)
        seconds["bare"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        norm = learner.update(samples, math.inf)["grad_norm"]
        seconds["update"].append(time.perf_counter() - begun)
        print(f"{name}: bare {seconds['bare'][-1]:.2f} s, update {seconds['update'][-1]:.2f} s", flush=True)
    norms = [torch.stack([p.grad.norm() for p in model.parameters()]).norm().item(), norm]
    warm, tokens = {who: values[1:] for who, values in seconds.items()}, sum(map(len, samples))
    return {"tokens": tokens, "seconds": warm, "norms": norms, **compare(tokens, **warm)}


def compare(tokens: int, bare: list[float], update: list[float]) -> dict:
    """Tokens per second of both, medians; how many times as fast the update is, pair by pair, with its interval."""
    speeds = {"bare": tokens / statistics.median(bare), "update": tokens / statistics.median(update)}
    return {"tokens_per_s": speeds, "ratio": estimate([a / b for a, b in zip(bare, update, strict=True)])}


def main() -> None:
    parser = results_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="of each model")
    args = parser.parse_args()
    quiet(verbose=False)
    start_process_group()
    models = {name: measure(name, args.pairs) for name in SIZES}
    dist.destroy_process_group()
    rows = [["model", "rollouts", "tokens", "bare, tokens/s", "update, tokens/s", "update / bare"]]
    for name, one in models.items():
        speeds = [f"{one['tokens_per_s'][who]:,.0f}" for who in ("bare", "update")]
        rows.append([name, str(SIZES[name][0]), f"{one['tokens']:,}", *speeds, one["ratio"].show(".2f") + " ×"])
    results = {"machine": machine(), "code": code_version(), "pairs": args.pairs, "models": models}
    save("trainer", args.results, results, table=markdown(rows), measured_on=described(results["machine"]))


if __name__ == "__main__":
    main()
