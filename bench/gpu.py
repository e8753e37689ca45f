"""What only a GPU can settle: one of 80 GB, no hub and no network. Exits with 1 and names the rows that fail.

    make gpu-check                    both suites, ten minutes
    python -m bench.gpu trainer       torch from 2.11 and transformers are enough; 4 minutes
    python -m bench.gpu engine        where vLLM is installed; 6 minutes
    python -m bench.gpu --rehearse    with a small model on a CPU, to see that all of it runs

Every row is a process with a time limit, and its numbers are in gpu.jsonl at once: a run that is cut off still
tells. Weights are random, in the shape of Qwen3-1.7B, with a final norm that leaves a token about 2 nats, as a
trained model does: near a uniform distribution bfloat16 looks better than it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import signal
import subprocess
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

from engine import Engine, Sampling, token_confidence
from grpo import Learner, LossConfig, Policy, Sample, frozen_logprobs, micro_batches, pad, shard
from quality_head import QualityHead
from support import checkpoint
from support.args import TINY, Args
from support.distributed import start_process_group
from support.grader import Verdict
from support.memory import CONTEXT, GRAPHS, estimate, shape

ROOT = Path(__file__).resolve().parent.parent
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


@dataclasses.dataclass
class Lab:
    """What rows work on. Sizes are in tokens; the engine samples 16 responses to each prompt."""

    device: torch.device
    scratch: Path
    hidden: int = 2048
    layers: int = 28
    vocabulary: int = 151_936
    survivors: int = 512
    longest: int = 1500
    budget: int = 32_768
    prompts: int = 32
    response: int = 512


SMALL = dict(hidden=64, layers=2, vocabulary=600, survivors=12, longest=60, budget=240, prompts=4, response=24)


def make_model(lab: Lab, seed: int = 0, layers: int = 0) -> PreTrainedModel:
    """Qwen3-1.7B's shape at its width, float32, on the device."""
    heads = dict(num_attention_heads=lab.hidden // 128 or 2, num_key_value_heads=lab.hidden // 256 or 1)
    widths = dict(hidden_size=lab.hidden, intermediate_size=3 * lab.hidden, head_dim=min(128, lab.hidden))
    config = Qwen3Config(vocab_size=lab.vocabulary, num_hidden_layers=layers or lab.layers, **widths, **heads)
    config.tie_word_embeddings, config.bos_token_id, config.eos_token_id = True, None, None
    torch.manual_seed(seed)
    with lab.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Logits spread by 4.5 have an entropy of log(vocabulary) - 4.5² / 2.
    model.model.norm.weight.data.fill_(4.5 / (config.initializer_range * lab.hidden**0.5))
    return model


def make_learner(policy: Policy, budget: int) -> Learner:
    options = dict(lr=1e-6, warmup_steps=1, weight_decay=0.1, grad_clip=1.0)
    return Learner(policy, LossConfig(), token_budget=budget, **options)


def make_survivors(lab: Lab, count: int) -> list[Sample]:
    """Random ids, of all lengths up to the longest; the sampler's log-probs are 0."""
    torch.manual_seed(0)
    prompt, samples = lab.longest // 10, []
    for number in range(count):
        length = lab.longest - number * (lab.longest - prompt) // count
        ids = torch.randint(lab.vocabulary, (length,)).tolist()
        samples.append(Sample(ids[:prompt], ids[prompt:], (-1.0) ** number, [0.0] * (length - prompt)))
    return samples


def differences(policy: Policy, samples: list[Sample], budget: int, device: torch.device) -> Tensor:
    """The policy's log-probs, less the sampler's, of all response tokens (R,), on the CPU."""
    found = []
    for rows in micro_batches([len(sample) for sample in samples], budget):
        batch = [samples[row] for row in rows]
        logprobs, _ = frozen_logprobs(policy, tuple(tensor.to(device) for tensor in pad(batch)))
        found.append(logprobs.cpu() - torch.tensor([value for x in batch for value in x.sampler_logprobs]))
    return torch.cat(found)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of `work`, and the peak of what PyTorch had allocated on the GPU, in GB; without a GPU 0."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 1e9


def gap(nats: Tensor) -> Measures:
    """Of differences (R,) of log-probs."""
    ordered = nats.abs().double().sort().values
    rare = ordered[math.ceil(0.999 * len(ordered)) - 1].item()
    return {"gap mean": ordered.mean().item(), "gap 99.9%": rare, "gap max": ordered[-1].item()}


# ------------------------------------------------------------------ trainer


def passes(lab: Lab, count: int, budget: int, checkpointing: bool = True, offload: bool = False) -> Measures:
    """Log-probs and update of survivors: tokens per second, share of the GPU's arithmetic, memory and its estimate."""
    policy = shard(Policy(make_model(lab), 1.0), lab.device, checkpointing, offload)
    learner, samples, counted = make_learner(policy, budget), make_survivors(lab, count), shape(policy.model.config)
    # The first use of a kernel loads it.
    learner.update(samples[-1:], math.inf)
    tokens = sum(map(len, samples))
    name = torch.cuda.get_device_name() if lab.device.type == "cuda" else ""
    peak_flops = next((value for key, value in PEAK_FLOPS.items() if key in name), None)
    args = Args(token_budget=budget, max_length=lab.longest, offload=offload)
    needed = estimate(counted, args, 1, 80 * 2**30).phases
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
    for exact in (True, False):
        policy = Policy(make_model(lab), 1.0)
        policy = policy if exact else shard(policy, lab.device)
        norms.append(make_learner(policy, lab.longest).update(samples, math.inf)["grad_norm"])
        weights = [getattr(p, "_local_tensor", p).detach() for p in policy.parameters()]
        moves.append([(new - old).detach() for new, old in zip(weights, make_model(lab).parameters(), strict=True)])
    products = [sum((a * b).sum().item() for a, b in zip(moves[i], moves[j])) for i, j in ((0, 1), (0, 0), (1, 1))]
    cosine = products[0] / math.sqrt(products[1] * products[2])
    return {"cosine of the steps": cosine, "gradient norm": norms[0], "in bfloat16": norms[1]}


@torch.no_grad()
def head(lab: Lab) -> Measures:
    """Scores and H_t on the device, beside those on a CPU."""
    quality, states = QualityHead(lab.hidden), 8 * torch.randn(512, lab.hidden)
    logits = (4.5 * torch.randn(128, lab.vocabulary)).bfloat16()
    on_cpu, exact = quality(states).sigmoid(), -logits.double().log_softmax(-1).sum(-1)
    score = (quality.to(lab.device)(states).sigmoid().cpu() - on_cpu).abs().max().item()
    confidence = (token_confidence(logits.to(lab.device)).cpu() / exact - 1).abs().max().item()
    return {"score off by": score, "confidence off by": confidence}


def resume(lab: Lab) -> Measures:
    """A checkpoint of two layers, restored into another policy: is all as it was, and the next step the same?"""

    def tensors(learner: Learner) -> list[Tensor]:
        return [leaf.full_tensor() for leaf in tree_leaves(learner.state_dict()) if isinstance(leaf, DTensor)]

    policies = [shard(Policy(make_model(lab, seed, layers=2), 1.0), lab.device) for seed in (0, 1)]
    first, second = (make_learner(policy, lab.budget) for policy in policies)
    samples, model, folder = make_survivors(lab, 12), policies[0].model, lab.scratch / f"{checkpoint.PREFIX}1"
    first.update(samples, math.inf)
    weights = ((name, p.full_tensor().bfloat16()) for name, p in model.named_parameters())
    files = dict(model=model, weights=weights, tokenizer=AutoTokenizer.from_pretrained(TINY), head=None)
    saved, _ = timed(lambda: checkpoint.save(lab.scratch, 1, **files, learner=first, state={}, keep=1))
    loaded, _ = timed(lambda: checkpoint.load(folder, second))
    wrong = sum(not torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))
    for learner in (first, second):
        learner.update(samples, math.inf)
    apart = max((a - b).abs().max().item() for a, b in zip(tensors(first), tensors(second)))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9
    return {"tensors not restored": wrong, "next step apart": apart, "GB": size, "save s": saved, "load s": loaded}


# ------------------------------------------------------------------ engine


def engine_rows(lab: Lab, eager: bool = False, **options: bool) -> Iterator[tuple[str, Measures]]:
    """What one engine is asked, in turn; with options only how fast it samples."""
    from arrol import Trainer
    from support import launch

    folder = lab.scratch / "model"
    if not folder.exists():
        make_model(lab).bfloat16().save_pretrained(folder)
        AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
        torch.cuda.empty_cache()
    if eager:
        import vllm

        vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)
    launch.Engine = functools.partial(Engine, **options)
    sizes = dict(max_prompt=64, max_length=64 + lab.response, detect_length=lab.response // 4, token_budget=lab.budget)
    run = dict(prompts=lab.prompts, max_num_seqs=16 * lab.prompts, cold_start=0, gpu_memory_utilization=0.45)
    args = Args(str(folder), dataset="sums", instruction="", kv_cache_gb=0.5, eval_data=(), **sizes, **run)
    with launch.open_parts(args) as parts:
        engine, prompts = parts.engine, {i: prompt.token_ids for i, prompt in enumerate(parts.prompts[: lab.prompts])}
        weights = load_file(folder / "model.safetensors", lab.device.type)
        engine.wake(weights.items())
        yield "sampling", sampling(lab, engine, prompts)
        if options or eager:
            return
        yield "sleep", sleep(engine, weights)
        weights.clear()
        # Random weights are never right.
        verdicts = itertools.cycle([Verdict("right", "1"), Verdict("wrong", "2")])
        parts.grader = SimpleNamespace(grade=lambda texts, golds: list(itertools.islice(verdicts, len(texts))))
        trainer = Trainer(args, parts)
        for name, keep_ratio in {"cold": 1.0, "κ = 1": 1.0, "κ = 0.5": 0.5, "κ = 0.25": 0.25}.items():
            trainer.pruner.settings = dataclasses.replace(trainer.pruner.settings, keep_ratio=keep_ratio)
            metrics, *_ = trainer.step()
            chosen = {key: value for key, value in metrics.items() if key.startswith(("time_", "gap_", "keep_"))}
            yield f"step, {name}", chosen | {"hook, share": engine.hook_seconds / engine.step_seconds}
        yield "gap", changed_weights(lab, trainer, prompts)


def sampling(lab: Lab, engine: Engine, prompts: dict[int, list[int]]) -> Measures:
    """Tokens per second of vLLM alone, of the engine, and of the engine as tts.py asks it."""
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": ids} for ids in prompts.values() for _ in range(16)]
    params = functools.partial(SamplingParams, max_tokens=lab.response, ignore_eos=True, detokenize=False)
    plain = functools.partial(engine.generate, prompts, 16, Sampling(lab.response, ()), seed=1)
    plain()
    kinds = {
        "LLM.generate": lambda: engine.llm.generate(requests, params(), use_tqdm=False),
        "with log-probs": lambda: engine.llm.generate(requests, params(logprobs=0), use_tqdm=False),
        "Engine.generate": plain,
        "with confidence": functools.partial(plain, rollout_seeds=True, last_states=True, confidence=True),
    }
    return {f"{name} tokens/s": len(requests) * lab.response / timed(work)[0] for name, work in kinds.items()}


def sleep(engine: Engine, weights: dict[str, Tensor]) -> Measures:
    """Ten nights: what stays on the GPU, but for the weights with which the engine is woken."""
    found: Measures = {}
    for night in range(1, 11):
        found["fall asleep s"], _ = timed(engine.sleep)
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found[f"GB taken in night {night}"] = (total - free - torch.cuda.memory_allocated()) / 1e9
        found["wake s"], _ = timed(lambda: engine.wake(weights.items()))
    engine.sleep()
    return found


@torch.no_grad()
def changed_weights(lab: Lab, trainer: Trainer, prompts: dict[int, list[int]]) -> Measures:
    """The gap of sampler and trainer after a sync of weights that make another model."""
    for weights in (parameter.to_local() for parameter in trainer.policy.parameters()):
        weights += 0.1 * weights.std() * torch.randn_like(weights)
    trainer.engine.wake(trainer.weights())
    rollouts = trainer.engine.generate(prompts, 16, Sampling(lab.response, ()), seed=2)
    trainer.engine.sleep()
    samples = [Sample(prompts[r.group], r.token_ids, 0.0, r.logprobs) for r in rollouts]
    return gap(differences(trainer.policy, samples, lab.budget, lab.device))


# ------------------------------------------------------------------ rows

# A suite's rows, and how many seconds each has.
ROWS: dict[str, dict[str, tuple[int, Callable]]] = {
    "trainer": {
        "passes": (50, lambda lab: passes(lab, lab.survivors, lab.budget)),
        "bfloat16": (35, bfloat16),
        "no checkpointing": (35, lambda lab: passes(lab, lab.survivors // 4, lab.budget // 4, checkpointing=False)),
        "offload": (45, lambda lab: passes(lab, lab.survivors // 4, lab.budget, offload=True)),
        "float32": (30, float32),
        "head": (15, head),
        "resume": (30, resume),
    },
    "engine": {"engine": (220, engine_rows), "no CUDA graphs": (70, functools.partial(engine_rows, eager=True))},
}
if "async_scheduling" in inspect.signature(Engine).parameters:
    ROWS["engine"]["synchronous"] = (70, functools.partial(engine_rows, async_scheduling=False))


def measure(suite: str, row: str, lab: Lab, file: Path) -> None:
    """Print what a row measures, and append it to `file`, a line at once."""
    found = ROWS[suite][row][1](lab)
    for name, measures in found if isinstance(found, Iterator) else [(row, found)]:
        low = [
            f"{key} is below {AT_LEAST[key]}" for key in measures if not measures[key] >= AT_LEAST.get(key, -math.inf)
        ]
        high = [f"{key} is above {AT_MOST[key]}" for key in measures if not measures[key] <= AT_MOST.get(key, math.inf)]
        device = torch.cuda.get_device_name() if lab.device.type == "cuda" else "CPU"
        line = {"suite": suite, "row": row, "name": name, "device": device, "torch": torch.__version__, **measures}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line | {"broken": low + high}, ensure_ascii=False) + "\n")
        for key, value in measures.items():
            print(f"{suite:9s}{row:18s}{name:18s}{key:26s}{value:>14,.6g}", flush=True)


def supervise(suite: str, row: str, command: list[str], limit: float, file: Path) -> list[str]:
    """Run a row as a process; returns what is wrong with it, a sentence for each fault."""
    before = len(file.read_bytes().splitlines()) if file.exists() else 0
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = child.wait(limit)
        faults = [f"{suite}, {row}: ended with status {status}"] if status else []
    except subprocess.TimeoutExpired:
        faults = [f"{suite}, {row}: not done after {limit} s"]
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    lines = map(json.loads, file.read_bytes().splitlines()[before:] if file.exists() else [])
    return faults + [f"{suite}, {line['name']}: {fault}" for line in lines for fault in line["broken"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help="trainer, engine; default: both")
    parser.add_argument("--rehearse", action="store_true", help="with a small model on a CPU")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="folder of gpu.jsonl")
    parser.add_argument("--row", help="only this one, in this process")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse needs none")
    file = own.results.resolve() / "gpu.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if own.row:
        device = (
            start_process_group()
            if own.suites == ["trainer"]
            else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
        measure(own.suites[0], own.row, Lab(device, own.scratch, **(SMALL if own.rehearse else {})), file)
        # What tears down vLLM or NCCL may fail, after all is measured.
        os._exit(0)
    faults = []
    with tempfile.TemporaryDirectory() as scratch:
        for suite in own.suites or ROWS:
            if suite == "engine" and not importlib.util.find_spec("vllm"):
                print("engine: vLLM is not installed")
                continue
            for row, (limit, _) in ROWS[suite].items():
                command = [sys.executable, "-m", "bench.gpu", suite, "--row", row, "--scratch", scratch]
                command += ["--results", str(file.parent), *["--rehearse"] * own.rehearse]
                faults += supervise(suite, row, command, limit, file)
    sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
