"""Seconds per phase of a GRPO step and an ARRoL step, in turn on the same prompts and weights, in one process (Table 5).

    python bench/speed.py                          the embedded model, 2 CPU cores, about 6 minutes
    python bench/speed.py --model Qwen/Qwen3-1.7B-Base --pairs 5

L_detect is a quarter of the mean response length, which the first step measures. The learning rate is 0, so that both kinds of step
do all the work and the weights stay the same. On the embedded model a step has 96 x 16 rollouts on 768 slots, so
that rollouts that wait take the place of pruned ones: with fewer, what a step of vLLM costs on a CPU at any batch size hides the savings.
Any flag of arrol.py goes too.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from args import Args, parse

PHASES = ("generate", "logprob", "update", "grade", "head", "sync", "step")
PAPER = {"generate": 1.46, "logprob": 1.84, "update": 2.08}  # Table 5: Qwen3-1.7B-Base, GH200, L_detect 512


def measure(args: Args, pairs: int) -> tuple[list[dict], list[dict]]:
    """The metrics of `pairs` steps of each kind, alternating which goes first."""
    from arrol import workbench

    with workbench(args) as trainer:
        plain = trainer(dataclasses.replace(args, prune="none"))
        length = plain.step()[0]["length_mean"]
        args = dataclasses.replace(args, detect_length=max(1, round(length / 4)))
        plain.engine.detect_length = plain.args.detect_length = args.detect_length
        print(
            f"mean response {length:.1f} tokens, L_detect {args.detect_length}, {args.prompts} x {args.group_size} rollouts, keep ratio {args.keep_ratio}"
        )
        pruned = trainer(args)
        for _ in range(args.cold_start + 1):  # fill head and windows; then one step with pruning to warm up
            pruned.step()
        lines: tuple[list[dict], list[dict]] = ([], [])
        for pair in range(pairs):
            plain.taken = pruned.taken
            for kind in (0, 1) if pair % 2 == 0 else (1, 0):
                metrics, _ = (plain, pruned)[kind].step()
                engine = plain.engine
                lines[kind].append(metrics | {"hook": engine.hook_seconds, "generation": engine.step_seconds})
                print(f"pair {pair + 1}/{pairs} {('GRPO', 'ARRoL')[kind]:5s} {metrics['time_step']:.3f} s", flush=True)
        return lines


def table(plain: list[dict], pruned: list[dict], prompt_tokens: float) -> str:
    """Medians, spread (half the distance of the quartiles), the ratio, what the token counts allow, and the share reached."""

    def median(lines: list[dict], key: str) -> float:
        return statistics.median(line[key] for line in lines)

    def spread(lines: list[dict], key: str) -> float:
        low, _, high = statistics.quantiles([line[key] for line in lines], n=4)
        return (high - low) / 2

    rows = ["phase      GRPO, s          ARRoL, s         ratio   tokens allow   share   paper"]
    allowed_step = 0.0
    for phase in PHASES:
        key = f"time_{phase}"
        before, after = median(plain, key), median(pruned, key)
        if phase == "generate":
            limit = statistics.median(a["tokens_generated"] / b["tokens_generated"] for a, b in zip(plain, pruned))
        elif phase in (
            "logprob",
            "update",
        ):  # what passes through the model again: prompts and responses of the survivors
            limit = statistics.median(
                (a["tokens_trained"] + prompt_tokens * a["rollouts"])
                / (b["tokens_trained"] + prompt_tokens * (b["rollouts"] - b["pruned"]))
                for a, b in zip(plain, pruned)
            )
        elif phase == "step":
            limit = before / allowed_step
        else:
            limit = None
        if phase != "step":
            allowed_step += before / limit if limit else before
        ratio = before / after if after and phase != "head" else None
        rows.append(
            f"{phase:9s}  {before:6.3f} +- {spread(plain, key):5.3f}  {after:6.3f} +- {spread(pruned, key):5.3f}  "
            + (f"{ratio:5.2f}x" if ratio else "     -")
            + (f"  {limit:10.2f}x  {ratio / limit:9.0%}" if limit and ratio else "            -          -")
            + (f"  {PAPER[phase]:5.2f}x" if phase in PAPER else "")
        )
    overhead = statistics.median(line["hook"] / line["generation"] for line in pruned)
    kept = statistics.median(line["keep_ratio"] for line in pruned)
    rows.append(
        f"hook, head and decisions: {overhead:.2%} of generation time; keep ratio {kept:.3f}; "
        f"gap between sampler and trainer at most {max(line['gap_max'] for line in plain + pruned):.1e}"
    )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="steps of each kind")
    own, rest = parser.parse_known_args()
    if own.pairs < 2:
        parser.error("--pairs must be at least 2, for a spread")
    wide = (
        []
        if "--model" in rest
        else ["--prompts", "96", "--max-num-seqs", "768", "--kv-cache-gb", "1", "--cold-start", "2"]
    )
    args = dataclasses.replace(parse([*wide, *rest, "--prune", "arrol"]), lr=0.0, weight_decay=0.0, eval_problems=0)
    plain, pruned = measure(args, own.pairs)
    print(table(plain, pruned, statistics.mean(line["prompt_tokens"] / line["rollouts"] for line in plain)))


if __name__ == "__main__":
    main()
