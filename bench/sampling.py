"""What the extras of sampling cost: token confidence, the last states, a seed for each rollout.

    python -m bench.sampling    the embedded model, 4 minutes on 2 CPU cores
    python -m bench.sampling --model Qwen/Qwen3-1.7B-Base --data math500 --rounds 3

Each round samples the same prompts plainly and with each extra, in an order that rotates. A cost is
the median over rounds of seconds per token against plain sampling in the same round. Any flag of
tts.py goes too.
"""

from __future__ import annotations

import argparse
import statistics
import time

from support.args import parse_tts
from support.test_time import Sampler

EXTRAS: dict[str, dict[str, bool]] = {
    "nothing": {},
    "confidence": {"confidence": True},
    "last states": {"last_states": True},
    "both": {"confidence": True, "last_states": True},
    "rollout seeds": {"rollout_seeds": True},
}
# Of each round: seconds, tokens, seconds in the hook.
Rounds = list[tuple[float, int, float]]


def measure(sampler: Sampler, rounds: int) -> dict[str, Rounds]:
    """Each kind of sampling in each round, after an unmeasured plain one."""
    prompts = {group: prompt.token_ids for group, prompt in sampler.prompts.items()}
    found: dict[str, Rounds] = {name: [] for name in EXTRAS}
    engine, n, names = sampler.engine, sampler.args.n, list(EXTRAS)
    engine.generate(prompts, n, sampler.sampling, seed=sampler.args.seed)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            rollouts = engine.generate(prompts, n, sampler.sampling, seed=turn, **EXTRAS[name])
            seconds = time.perf_counter() - start
            tokens = sum(len(rollout.token_ids) for rollout in rollouts)
            found[name].append((seconds, tokens, engine.hook_seconds))
            print(f"round {turn + 1}/{rounds}  {name:14s} {seconds:.2f} s", flush=True)
    return found


def table(found: dict[str, Rounds]) -> str:
    """Costs; and the hook's share of the time, which says on a CPU the same with less noise."""
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
        print(table(measure(sampler, own.rounds)))


if __name__ == "__main__":
    main()
