"""What the engine costs beside vLLM's own loop: both sample the same prompts, in turn, in one process.

    python -m bench.engine      the embedded model, 256 and 768 slots, 20 minutes of one CPU core
    python -m bench.engine --model Qwen/Qwen3-1.7B-Base --slots 512 --tokens 512

All rollouts have the same length, so that every kind does the same work. A ratio is that of tokens
per second to those of vLLM's loop with the same log-probs, in the same round; the order turns round
from one to the next. Seconds are CPU time of one core, on a GPU wall-clock time.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial

from bench import one_core

if __name__ == "__main__" and shutil.which("nvidia-smi") is None:
    one_core.count_cpu_time(max(os.sched_getaffinity(0)))

import torch
from torch import Tensor
from transformers import AutoConfig

from bench.runs import code_version, machine, results_parser
from bench.tables import described, estimate, markdown, save
from engine import Decision, Engine, Sampling
from quality_head import QualityHead
from support.args import TINY

GROUP = 16
# What is compared with what: the part that the wrapper adds.
LIKE = {
    "Engine.generate, all log-probs": "LLM.generate, all log-probs",
    "Engine.generate, log-probs of one in 16": "LLM.generate, log-probs of one in 16",
    "the same, scored at a quarter, none pruned": "LLM.generate, log-probs of one in 16",
}


class KeepAll:
    """Scores every rollout and prunes none."""

    def __init__(self, hidden_size: int) -> None:
        self.head = QualityHead(hidden_size)

    @torch.no_grad()
    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        return [Decision(True, score) for score in self.head(states).sigmoid().tolist()]


def kinds(engine: Engine, slots: int, tokens: int, pruner: KeepAll) -> dict[str, Callable[[], object]]:
    """As many rollouts as there are slots, of `tokens` tokens each, sampled in several ways."""
    from vllm import SamplingParams

    rng = random.Random(0)
    # Any ids do, since nothing ends a rollout but its length.
    prompts = {group: [rng.randrange(4, 20) for _ in range(16)] for group in range(slots // GROUP)}
    requests = [{"prompt_token_ids": ids} for ids in prompts.values() for _ in range(GROUP)]
    params = partial(SamplingParams, max_tokens=tokens, ignore_eos=True, detokenize=False, flat_logprobs=True)

    def vllm(logprobs: int) -> None:
        """vLLM's loop, with log-probs of the first so many of each group."""
        each = [params(logprobs=0 if i % GROUP < logprobs else None) for i in range(len(requests))]
        torch.manual_seed(0)
        engine.llm.generate(requests, each, use_tqdm=False)

    ours = partial(engine.generate, prompts, GROUP, Sampling(tokens, ()), seed=0)
    return {
        "LLM.generate, all log-probs": partial(vllm, GROUP),
        "Engine.generate, all log-probs": ours,
        "LLM.generate, log-probs of one in 16": partial(vllm, 1),
        "Engine.generate, log-probs of one in 16": partial(ours, logprobs=1),
        "the same, scored at a quarter, none pruned": partial(ours, logprobs=1, pruner=pruner, last_states=True),
    }


def measure(engine: Engine, works: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of each kind, and those in the hook, in each round, after a round that warms up."""
    found: dict[str, list[list[float]]] = {name: [] for name in works}
    for turn in range(-1, rounds):
        for name in list(works)[:: 1 if turn % 2 else -1]:
            engine.hook_seconds, start = 0.0, time.perf_counter()
            works[name]()
            if turn >= 0:
                found[name].append([time.perf_counter() - start, engine.hook_seconds])
    return found


def rows(slots: int, tokens: int, found: dict[str, list[list[float]]]) -> list[list[str]]:
    """A line for each kind: median rate, the hook's share, and the mean ratio to what computes the same."""
    lines = []
    for name, rounds in found.items():
        line = [str(slots), name, f"{slots * tokens / statistics.median(own for own, _ in rounds):,.0f}", "", "", ""]
        if name in LIKE:
            pairs = zip(found[LIKE[name]], rounds, strict=True)
            ratio = estimate([other / own for (other, _), (own, _) in pairs]).show()
            hook = statistics.median(hook / own for own, hook in rounds)
            line[3:] = [f"{hook:.1%}", LIKE[name], ratio]
        lines.append(line)
    return lines


def main() -> None:
    parser = results_parser(__doc__)
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 768], help="multiples of 16")
    parser.add_argument("--tokens", type=int, default=32, help="of a response")
    parser.add_argument("--rounds", type=int, default=24)
    own = parser.parse_args()
    hidden_size = AutoConfig.from_pretrained(own.model).get_text_config().hidden_size
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    lines, seconds = [["slots", "", "tokens/s", "in the hook", "beside", "ratio"]], {}
    for slots in own.slots:
        engine = Engine(own.model, max(1, own.tokens // 4), own.tokens + 32, slots, dtype=dtype)
        works = kinds(engine, slots, own.tokens, KeepAll(hidden_size))
        found = seconds[slots] = measure(engine, works, own.rounds)
        engine.close()
        lines += rows(slots, own.tokens, found)
    made = {"machine": machine(), "code": code_version(), "rounds": own.rounds, "tokens": own.tokens}
    results = made | {"seconds": seconds}
    save("engine", own.results, results, table=markdown(lines), measured_on=described(results["machine"]))


if __name__ == "__main__":
    main()
