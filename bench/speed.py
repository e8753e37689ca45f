"""Seconds per phase of a GRPO step and an ARRoL step, in turn on the same prompts and weights, in one process (Table 5).

    python bench/speed.py                          the embedded model, 2 CPU cores, about 6 minutes
    python bench/speed.py --model Qwen/Qwen3-1.7B-Base --pairs 5

L_detect is a quarter of the mean response length, which the first step measures. The learning rate is 0, so that both kinds of step
do all the work and the weights stay the same. On the embedded model a step has 96 x 16 rollouts on 768 slots, so
that rollouts that wait take the place of pruned ones: with fewer, what a step of vLLM costs on a CPU at any batch size hides the savings.
Any flag of arrol.py goes too. Leaves bench/results/speed.json, .md and .png.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.runs import ROOT, code_version
from bench.tables import estimate, machine, markdown, measured_on, new_figure, save
from support.args import Args, parse

PHASES = ("generate", "logprob", "update", "grade", "head", "sync", "step")
PAPER = {"generate": 1.46, "logprob": 1.84, "update": 2.08}  # Table 5: Qwen3-1.7B-Base, GH200, L_detect 512


def measure(args: Args, pairs: int) -> tuple[Args, list[dict], list[dict]]:
    """The flags with the L_detect that was found, and the metrics of `pairs` steps of each kind, alternating which goes first."""
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
        return args, *lines


def compare(plain: list[dict], pruned: list[dict], prompt_tokens: float) -> dict[str, dict]:
    """For each phase: median and spread (half the distance of the quartiles) of both, the medians' ratio, the mean ratio of the pairs with
    its interval, and what the token counts allow."""

    def middle(lines: list[dict], key: str) -> dict[str, float]:
        low, _, high = statistics.quantiles([line[key] for line in lines], n=4)
        return {"median": statistics.median(line[key] for line in lines), "spread": (high - low) / 2}

    def passed(line: dict) -> float:  # what passes through the model again: prompts and responses of the survivors
        return line["tokens_trained"] + prompt_tokens * (line["rollouts"] - line["pruned"])

    found: dict[str, dict] = {}
    pairs = list(zip(plain, pruned, strict=True))
    allowed_step = 0.0
    for phase in PHASES:
        key = f"time_{phase}"
        before, after = middle(plain, key), middle(pruned, key)
        allowed = None
        if phase == "generate":
            allowed = statistics.median(a["tokens_generated"] / b["tokens_generated"] for a, b in pairs)
        elif phase in ("logprob", "update"):
            allowed = statistics.median(passed(a) / passed(b) for a, b in pairs)
        elif phase == "step":
            allowed = before["median"] / allowed_step
        allowed_step += before["median"] / (allowed or 1.0)
        comparable = phase != "head" and all(b[key] > 0 for b in pruned)
        found[phase] = {
            "plain": before,
            "pruned": after,
            "medians": before["median"] / after["median"] if comparable else None,
            "ratio": estimate([a[key] / b[key] for a, b in pairs]) if comparable else None,
            "allowed": allowed,
            "paper": PAPER.get(phase),
        }
    return found


def table(phases: dict[str, dict]) -> list[list[str]]:
    """Rows of the table, the heading first."""
    rows = [["phase", "GRPO, s", "ARRoL, s", "ratio", "tokens allow", "share of that", "paper, Table 5"]]
    for phase, one in phases.items():
        ratio, allowed = one["medians"], one["allowed"]
        rows.append(
            [
                phase,
                *(f"{one[who]['median']:.3f} ± {one[who]['spread']:.3f}" for who in ("plain", "pruned")),
                f"{ratio:.2f} ×" if ratio else "–",
                f"{allowed:.2f} ×" if allowed else "–",
                f"{ratio / allowed:.0%}" if ratio and allowed else "–",
                f"{one['paper']:.2f} ×" if one["paper"] else "",
            ]
        )
    return rows


def leave(args: Args, flags: list[str], plain: list[dict], pruned: list[dict], seconds: float, folder: Path) -> None:
    """Print the table, and leave it with its numbers and a picture."""
    prompt_tokens = statistics.mean(line["prompt_tokens"] / line["rollouts"] for line in plain)
    phases = compare(plain, pruned, prompt_tokens)
    step, slots = phases["step"]["ratio"].show(".2f"), f"{args.group_size} rollouts on {args.max_num_seqs} slots"
    results = {
        "seeds": [args.seed],
        "flags": flags,
        "machines": [machine()],
        "code": [code_version()],
        "seconds_of_runs": seconds,
        "pairs": len(plain),
        "phases": phases,
        "hook_share": statistics.median(line["hook"] / line["generation"] for line in pruned),
        "keep_ratio": statistics.median(line["keep_ratio"] for line in pruned),
        "gap_max": max(line["gap_max"] for line in plain + pruned),
        "paper": PAPER,
    }
    note = f"""\
Medians of {len(plain)} pairs of steps, ± half the distance of the quartiles: {args.prompts} × {slots}, L_detect
{args.detect_length}, κ = {args.keep_ratio:g}. Pair by pair the whole step is {step} × faster (mean, half of the 95% t interval). Hook, head and
decisions take {results["hook_share"]:.1%} of generation time; {results["keep_ratio"]:.3f} of the scored rollouts were kept; the log-probs of sampler and
trainer differ by at most {results["gap_max"]:.1e}. The paper's column is Qwen3-1.7B-Base on a GH200; the whole step is 1.61 × there (Table 1)."""
    figure, (axes,) = new_figure("median seconds of a step, by phase")
    for who, name, bottom in (("plain", "GRPO", 0.0), ("pruned", "ARRoL", 0.0)):
        for i, phase in enumerate(phase for phase in PHASES if phase != "step"):
            height = phases[phase][who]["median"]
            axes.bar(name, height, 0.6, bottom, color=f"C{i}", label=phase if who == "plain" else None)
            bottom += height
    axes.legend()
    text = f"## Time by phase (Table 5, Fig. 1b)\n\n{markdown(table(phases))}\n\n{note}\n\n{measured_on(results)}"
    save("speed", folder, results, text, figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="steps of each kind")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="folder of the table")
    own, rest = parser.parse_known_args()
    if own.pairs < 2:
        parser.error("--pairs must be at least 2, for a spread")
    wide = (
        []
        if any(word.split("=")[0] == "--model" for word in rest)
        else ["--prompts", "96", "--max-num-seqs", "768", "--kv-cache-gb", "1", "--cold-start", "2"]
    )
    args = dataclasses.replace(parse([*wide, *rest, "--prune", "arrol"]), lr=0.0, weight_decay=0.0, eval_problems=0)
    begun = time.monotonic()
    args, plain, pruned = measure(args, own.pairs)
    leave(args, [*wide, *rest], plain, pruned, time.monotonic() - begun, own.results)


if __name__ == "__main__":
    main()
