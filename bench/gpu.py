"""What only a GPU can settle: one of 80 GB, no hub and no network. Exits with 1 and names the rows that fail.

    make gpu-check                        both suites, ten minutes
    python -m bench.gpu --only trainer    torch from 2.11 and transformers are enough; 4 minutes
    python -m bench.gpu --only engine     where vLLM is installed; 6 minutes
    python -m bench.gpu --rehearse        with a small model on a CPU, to see that all of it runs

Each row is a process with a time limit; its numbers go to gpu.jsonl at once. Weights are random, in the shape of
Qwen3-1.7B, and tokens nearly uniform: bfloat16 is then off from float32 by 0.034 nats on average (on a CPU). Logits
as peaked as a trained model's make it 0.16, many times what is reported of trained models, and above the limit.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config

from arrol import Trainer
from bench.runs import machine, results_parser
from engine import Engine, Sampling, token_confidence
from grpo import Learner, LossConfig, Policy, Sample, frozen_logprobs, micro_batches, pad, shard
from quality_head import QualityHead
from support import checkpoint
from support.args import TINY, Args
from support.distributed import start_process_group
from support.grader import Verdict
from support.launch import open_parts, quiet
from support.memory import CONTEXT, GRAPHS, Estimate, Shape
from support.model import flip

Measures = dict[str, float]
# Dense bfloat16, from the data sheets. Another GPU has no MFU.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
# Wherever a row has that measure. The gap has the defaults of --max-gap; memory, what support/memory.py promises;
# MFU, cosine and what a tenth night leaves are guesses.
AT_LEAST = {"log-probs MFU": 0.25, "update MFU": 0.25, "cosine of the steps": 0.9}
AT_MOST = {
    "log-probs GB / estimate": 1.05,
    "update GB / estimate": 1.05,
    "gap mean": 0.1,
    "gap max": 5.0,
    "score off by": 1e-4,
    "confidence off by": 1e-4,
    "tensors not restored": 0,
    "GB taken in night 1": (CONTEXT + GRAPHS) / 1e9,
    "GB taken in night 10": (CONTEXT + GRAPHS) / 1e9 + 0.5,
}
# What rows work on: `device`, a folder `scratch`, and sizes, in tokens. A prompt has 16 responses.
Lab = SimpleNamespace
QWEN = dict(hidden=2048, layers=28, vocabulary=151_936, longest=1500, budget=32_768, prompts=32, response=256)
SMALL = dict(hidden=64, layers=2, vocabulary=600, longest=60, budget=240, prompts=2, response=24)
make_learner = functools.partial(Learner, config=LossConfig(), lr=1e-6, warmup_steps=1, weight_decay=0.1, grad_clip=1.0)


def make_model(lab: Lab, seed: int = 0, layers: int = 0) -> PreTrainedModel:
    """Qwen3-1.7B's shape at its width, float32, on the device."""
    heads = dict(num_attention_heads=lab.hidden // 128 or 2, num_key_value_heads=lab.hidden // 256 or 1)
    widths = dict(hidden_size=lab.hidden, intermediate_size=3 * lab.hidden, head_dim=min(128, lab.hidden))
    config = Qwen3Config(vocab_size=lab.vocabulary, num_hidden_layers=layers or lab.layers, **widths, **heads)
    # The highest id that the program knows of bounds what is sampled.
    config.tie_word_embeddings, config.bos_token_id, config.eos_token_id = True, None, lab.vocabulary - 1
    torch.manual_seed(seed)
    with lab.device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_survivors(lab: Lab, count: int) -> list[Sample]:
    """Random ids, of all lengths up to the longest; the sampler's log-probs are 0."""
    prompt = lab.longest // 10
    lengths = [lab.longest - number * (lab.longest - prompt) // count for number in range(count)]
    ids = [torch.randint(lab.vocabulary, (length,)).tolist() for length in lengths]
    return [Sample(x[:prompt], x[prompt:], (-1.0) ** i, [0.0] * (len(x) - prompt)) for i, x in enumerate(ids)]


def differences(policy: Policy, samples: list[Sample], budget: int, device: torch.device) -> Tensor:
    """The policy's log-probs, less the sampler's, of all response tokens (R,), on the CPU."""
    found = []
    for rows in micro_batches([len(sample) for sample in samples], budget):
        batch = [samples[row] for row in rows]
        logprobs, _ = frozen_logprobs(policy, tuple(tensor.to(device) for tensor in pad(batch)))
        found.append(logprobs.cpu() - torch.tensor([value for x in batch for value in x.sampler_logprobs]))
    return torch.cat(found)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of `work`, which ends on the host, and the peak of what PyTorch had allocated on the GPU, in GB."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 1e9


def gap(nats: Tensor) -> Measures:
    """Of differences (R,) of log-probs."""
    size = nats.abs().double()
    return {"gap mean": size.mean().item(), "gap 99.9%": size.quantile(0.999).item(), "gap max": size.max().item()}


def passes(lab: Lab, count: int, budget: int, checkpointing: bool = True, offload: bool = False) -> Measures:
    """Log-probs and update of survivors: tokens per second, share of the GPU's arithmetic, memory and its estimate."""
    policy = shard(Policy(make_model(lab), 1.0), lab.device, checkpointing, offload)
    learner, samples = make_learner(policy, token_budget=budget), make_survivors(lab, count)
    # The first use of a kernel loads it.
    learner.update(samples[-1:], math.inf)
    counted, tokens = Shape(policy.model.config), sum(map(len, samples))
    needed = Estimate(counted, Args(token_budget=budget, max_length=lab.longest, offload=offload), 1, 80 * 2**30).phases
    gpu = torch.cuda.get_device_name() if lab.device.type == "cuda" else ""
    peak_flops = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), None)
    found = {"tokens": float(tokens)}
    for phase, label, times, work in [
        ("logprob", "log-probs", 1, lambda: differences(policy, samples, budget, lab.device)),
        ("update", "update", 3, lambda: learner.update(samples, math.inf)),
    ]:
        seconds, peak = timed(work)
        found |= {f"{label} tokens/s": tokens / seconds, f"{label} GB": peak}
        if peak_flops and not offload:
            # Without attention, and without what is computed again.
            found[f"{label} MFU"] = times * 2 * counted.parameters * tokens / seconds / peak_flops
        if checkpointing:
            found[f"{label} GB / estimate"] = peak / ((needed[phase] - CONTEXT - GRAPHS) / 1e9)
    return found


def bfloat16(lab: Lab) -> Measures:
    """Log-probs of the same sampled tokens, as the trainer computes them and in float32."""
    model, length = make_model(lab), lab.longest // 10
    prompts = torch.randint(lab.vocabulary, (64, length), device=lab.device)
    rows = make_model(lab).bfloat16().generate(prompts, do_sample=True, top_k=0, max_new_tokens=2 * length).tolist()
    samples = [Sample(row[:length], row[length:], 0.0, [0.0] * 2 * length) for row in rows]
    exact = differences(Policy(model, 1.0), samples, lab.budget // 4, lab.device)
    rounded = differences(shard(Policy(model, 1.0), lab.device), samples, lab.budget // 4, lab.device)
    return gap(rounded - exact) | {"nats per token": -exact.mean().item()}


def float32(lab: Lab) -> Measures:
    """One optimizer step, in float32 and as the trainer takes it: do the weights go the same way?"""
    samples, norms, moves = make_survivors(lab, 12), [], []
    for prepare in (lambda policy: policy, lambda policy: shard(policy, lab.device)):
        policy = prepare(Policy(make_model(lab), 1.0))
        norms.append(make_learner(policy, token_budget=lab.longest).update(samples, math.inf)["grad_norm"])
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in policy.parameters()]
        moves.append(torch.cat([(a - b).flatten() for a, b in zip(weights, make_model(lab).parameters())]).detach())
    cosine = torch.nn.functional.cosine_similarity(*moves, dim=0).item()
    return {"cosine of the steps": cosine, "gradient norm": norms[0], "in bfloat16": norms[1]}


@torch.no_grad()
def head(lab: Lab) -> Measures:
    """Scores and H_t on the device, beside those on a CPU."""
    quality, states = QualityHead(lab.hidden), 8 * torch.randn(512, lab.hidden)
    logits = (7 * torch.randn(128, lab.vocabulary)).bfloat16()
    on_cpu, exact = quality(states).sigmoid(), -logits.double().log_softmax(-1).sum(-1)
    score = (quality.to(lab.device)(states).sigmoid().cpu() - on_cpu).abs().max().item()
    confidence = (token_confidence(logits.to(lab.device)).cpu() / exact - 1).abs().max().item()
    return {"score off by": score, "confidence off by": confidence}


def resume(lab: Lab) -> Measures:
    """A checkpoint of two layers, restored into another policy: are weights and moments as they were?"""
    policies = [shard(Policy(make_model(lab, seed, layers=2), 1.0), lab.device) for seed in (0, 1)]
    first, second = learners = [make_learner(policy, token_budget=lab.budget) for policy in policies]
    first.update(make_survivors(lab, 12), math.inf)
    model, tokenizer = policies[0].model, AutoTokenizer.from_pretrained(TINY)
    weights = ((name, p.full_tensor().bfloat16()) for name, p in model.named_parameters())
    saved, _ = timed(lambda: checkpoint.save(lab.scratch, 1, model, weights, tokenizer, None, first, {}, keep=1))
    loaded, _ = timed(lambda: checkpoint.load(checkpoint.complete(lab.scratch)[0], second))
    states = [[x for x in tree_leaves(learner.state_dict()) if isinstance(x, DTensor)] for learner in learners]
    wrong = sum(not torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(*states, strict=True))
    return {"tensors not restored": wrong, "save s": saved, "load s": loaded}


def engine_rows(lab: Lab, eager: bool = False, **options: bool) -> Iterator[tuple[str, Measures]]:
    """One engine's rows; with options only how fast it samples."""
    folder = lab.scratch / "model"
    if not folder.exists():
        make_model(lab).bfloat16().save_pretrained(folder)
        AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
        torch.cuda.empty_cache()
    if eager:
        vllm = importlib.import_module("vllm")
        vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)
    importlib.import_module("support.model").Engine = functools.partial(Engine, **options)
    sizes = dict(max_prompt=64, max_length=64 + lab.response, detect_length=lab.response // 4, token_budget=lab.budget)
    run = dict(prompts=lab.prompts, max_num_seqs=16 * lab.prompts, cold_start=0, gpu_memory_utilization=0.45)
    args = Args(str(folder), dataset="sums", instruction="", kv_cache_gb=0.5, eval_data=(), **sizes, **run)
    with open_parts(args) as parts:
        engine, prompts = parts.engine, {i: prompt.token_ids for i, prompt in enumerate(parts.prompts[: lab.prompts])}
        # On the host, so that all that is on the GPU is the engine's.
        weights = load_file(folder / "model.safetensors")
        engine.wake(weights.items())
        yield "sampling", sampling(lab, engine, prompts)
        if options or eager:
            return
        nights = []
        for _ in range(10):
            engine.sleep()
            free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
            nights.append((total - free) / 1e9)
            awake, _ = timed(lambda: engine.wake(weights.items()))
        yield "sleep", {"GB taken in night 1": nights[0], "GB taken in night 10": nights[-1], "wake s": awake}
        engine.sleep()
        # Random weights are never right.
        verdicts = [Verdict("right", "1"), Verdict("wrong", "2")]
        parts.grader = SimpleNamespace(grade=lambda texts, golds: [verdicts[i % 2] for i in range(len(texts))])
        trainer = Trainer(args, parts)
        for name, keep_ratio in {"cold": 1.0, "κ = 1": 1.0, "κ = 0.5": 0.5, "κ = 0.25": 0.25}.items():
            trainer.pruner.settings = dataclasses.replace(trainer.pruner.settings, keep_ratio=keep_ratio)
            metrics, *_ = trainer.step()
            chosen = {key: value for key, value in metrics.items() if key.startswith(("time_", "gap_", "keep_"))}
            yield f"step, {name}", chosen | {"hook, share": engine.hook_seconds / metrics["time_generate"]}
        # Another model, of the same shape.
        flip(trainer.policy)
        engine.wake(trainer.weights())
        rollouts = engine.generate(prompts, 16, Sampling(lab.response, ()), seed=2)
        samples = [Sample(prompts[r.group], r.token_ids, 0.0, r.logprobs) for r in rollouts]
        yield "gap", gap(differences(trainer.policy, samples, lab.budget, lab.device))


def sampling(lab: Lab, engine: Engine, prompts: dict[int, list[int]]) -> Measures:
    """Tokens per second of vLLM alone, of the engine, and of the engine as tts.py asks it."""
    from vllm import SamplingParams

    requests, length = [{"prompt_token_ids": ids} for ids in prompts.values() for _ in range(16)], lab.response // 2
    params = functools.partial(SamplingParams, max_tokens=length, ignore_eos=True, detokenize=False)
    plain = functools.partial(engine.generate, prompts, 16, Sampling(length, ()), seed=1)
    plain()
    kinds = {
        "LLM.generate": lambda: engine.llm.generate(requests, params(), use_tqdm=False),
        "with log-probs": lambda: engine.llm.generate(requests, params(logprobs=0), use_tqdm=False),
        "Engine.generate": plain,
        "with confidence": functools.partial(plain, rollout_seeds=True, last_states=True, confidence=True),
    }
    return {f"{name} tokens/s": len(requests) * length / timed(work)[0] for name, work in kinds.items()}


# A suite's rows, and how many seconds each has.
ROWS: dict[str, dict[str, tuple[int, Callable]]] = {
    "trainer": {
        "passes": (60, lambda lab: passes(lab, 16 * lab.prompts, lab.budget)),
        "bfloat16": (35, bfloat16),
        "no checkpointing": (30, lambda lab: passes(lab, 4 * lab.prompts, lab.budget // 4, checkpointing=False)),
        "offload": (45, lambda lab: passes(lab, 4 * lab.prompts, lab.budget, offload=True)),
        "float32": (30, float32),
        "head": (15, head),
        "resume": (25, resume),
    },
    "engine": {
        "default": (220, engine_rows),
        "no CUDA graphs": (70, functools.partial(engine_rows, eager=True)),
        "synchronous": (70, functools.partial(engine_rows, async_scheduling=False)),
    },
}


def measure(suite: str, row: str, lab: Lab, file: Path) -> None:
    """In a process of its own: print what a row measures, and append it to `file`, a line at once."""
    quiet(False)
    if suite == "trainer":
        start_process_group()
    found, made = ROWS[suite][row][1](lab), machine()
    for name, measures in found if isinstance(found, Iterator) else [(row, found)]:
        broken = [f"{key} is below {low:g}" for key, low in AT_LEAST.items() if not measures.get(key, low) >= low]
        broken += [f"{key} is above {high:g}" for key, high in AT_MOST.items() if not measures.get(key, high) <= high]
        line = {"suite": suite, "row": row, "name": name, "measures": measures, "broken": broken, "machine": made}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
        for key, value in measures.items():
            print(f"{suite:9s}{row:18s}{name:18s}{key:26s}{value:>14,.6g}", flush=True)
    # What tears down vLLM or NCCL may fail, after all is measured.
    os._exit(0)


def supervise(suite: str, row: str, lab: Lab, file: Path) -> list[str]:
    """What is wrong with a row, a sentence for each fault."""
    limit, before = ROWS[suite][row][0], file.stat().st_size
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(suite, row, lab, file))
    process.start()
    process.join(limit)
    ended = f"not done after {limit} s" if process.exitcode is None else f"ended with status {process.exitcode}"
    faults = [f"{suite}, {row}: {ended}"] if process.exitcode != 0 else []
    process.kill()
    lines = [json.loads(line) for line in file.read_bytes()[before:].splitlines()]
    return faults + [f"{suite}, {line['name']}: {fault}" for line in lines for fault in line["broken"]]


def main() -> None:
    parser = results_parser(__doc__)
    parser.add_argument("--only", action="append", choices=[*ROWS, *ROWS["trainer"], *ROWS["engine"]])
    parser.add_argument("--rehearse", action="store_true", help="with a small model on a CPU")
    own = parser.parse_args()
    if own.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse needs none")
    own.results.mkdir(parents=True, exist_ok=True)
    file, faults, device = own.results / "gpu.jsonl", [], torch.device("cpu" if own.rehearse else "cuda")
    file.touch()
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(device=device, scratch=Path(scratch), **(SMALL if own.rehearse else QWEN))
        names = [(suite, row) for suite, rows in ROWS.items() for row in rows]
        for suite, row in (name for name in names if not own.only or {*name} & {*own.only}):
            if suite == "engine" and not importlib.util.find_spec("vllm"):
                print(f"{suite}, {row}: vLLM is not installed")
            else:
                faults += supervise(suite, row, lab, file)
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
