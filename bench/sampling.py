"""What the extras of sampling cost: token confidence, the last states, a seed for each rollout. Ratios within one run.

    python bench/sampling.py                            the embedded model, 256 in flight, about 4 minutes on 2 CPU cores
    python bench/sampling.py --model Qwen/Qwen3-1.7B-Base --data math500 --rounds 3

Each round samples the same prompts once plainly and once with each extra, in an order that rotates; a ratio is the median over rounds of
seconds with the extra / seconds without it in the same round. Any flag of tts.py goes too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.args import parse_tts
from support.test_time import Sampler

EXTRAS = ("nothing", "confidence", "last states", "both", "rollout seeds")


def measure(sampler: Sampler, rounds: int) -> dict[str, list[tuple[float, int, float]]]:
    """Seconds, tokens and seconds in the hook of each kind of sampling, in each round; one unmeasured plain sampling first."""
    options = {
        "nothing": {},
        "confidence": dict(confidence=True),
        "last states": dict(last_states=True),
        "both": dict(confidence=True, last_states=True),
        "rollout seeds": dict(rollout_seeds=True),
    }
    prompts = {group: prompt.token_ids for group, prompt in sampler.prompts.items()}
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in EXTRAS}
    sampler.engine.generate(prompts, sampler.args.n, sampler.sampling, seed=sampler.args.seed)
    for turn in range(rounds):
        for name in EXTRAS[turn % len(EXTRAS) :] + EXTRAS[: turn % len(EXTRAS)]:
            rollouts = sampler.engine.generate(prompts, sampler.args.n, sampler.sampling, seed=turn, **options[name])
            tokens = sum(len(rollout.token_ids) for rollout in rollouts)
            found[name].append((sampler.engine.step_seconds, tokens, sampler.engine.hook_seconds))
            print(f"round {turn + 1}/{rounds}  {name:14s} {found[name][-1][0]:.2f} s", flush=True)
    return found


def table(found: dict[str, list[tuple[float, int, float]]]) -> str:
    """Medians of seconds per token against plain sampling, with the quartiles (other seeds sample other numbers of tokens); and the hook's share
    of the time, which on a CPU is what confidence and states cost, without the noise of two measurements."""
    plain = [seconds / tokens for seconds, tokens, _ in found["nothing"]]
    lines = [f"{'extra':14s}  tokens/s   cost (median, quartiles of {len(plain)} rounds)   in the hook"]
    for name, rounds in found.items():
        costs = [seconds / tokens / base - 1 for (seconds, tokens, _), base in zip(rounds, plain, strict=True)]
        rate = statistics.median(tokens / seconds for seconds, tokens, _ in rounds)
        hook = statistics.median(hook / seconds for seconds, _, hook in rounds)
        low, middle, high = statistics.quantiles(costs, n=4)
        lines.append(f"{name:14s}  {rate:8,.0f}   {middle:+7.1%} ({low:+.1%} to {high:+.1%})  {hook:22.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="how often each kind is measured")
    own, rest = parser.parse_known_args()
    with Sampler(parse_tts(["--n", "2", *rest])).running() as sampler:
        found = measure(sampler, own.rounds)
    print(table(found))


if __name__ == "__main__":
    main()
