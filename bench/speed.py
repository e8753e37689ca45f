"""Seconds per phase of GRPO steps and ARRoL steps, in turn on the same prompts (Table 5).

    python -m bench.speed                          the embedded model, 2 CPU cores, about 6 minutes
    python -m bench.speed --model Qwen/Qwen3-1.7B-Base --pairs 5

L_detect is a quarter of the mean response length, which the first step measures. The learning rate
is 0: both kinds of step do all the work, and the weights stay the same. On the embedded model a
step has 96 x 16 rollouts on 768 slots, so that rollouts that wait take the place of pruned ones:
with fewer, the fixed cost of a step of vLLM on a CPU hides the savings. Any flag of arrol.py goes
too.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

from bench.runs import code_version, machine, names_model, results_parser
from bench.tables import estimate, markdown, measured_on, new_figure, save
from support.args import Args, parse

PHASES = ("generate", "logprob", "update", "grade", "head", "sync", "step")
EMBEDDED = "--prompts 96 --minibatches 2 --max-num-seqs 768 --kv-cache-gb 1 --cold-start 2"
# Table 5: Qwen3-1.7B-Base, GH200, L_detect 512.
PAPER = {"generate": 1.46, "logprob": 1.84, "update": 2.08}


def measure(args: Args, pairs: int) -> tuple[Args, list[dict], list[dict]]:
    """The flags with the L_detect that was found, and the metrics of `pairs` steps of each kind."""
    # They import vLLM, which takes seconds.
    from arrol import Trainer
    from support.launch import open_parts

    with open_parts(args) as parts:
        engine, plain = parts.engine, Trainer(dataclasses.replace(args, prune="none"), parts)
        length = plain.step()[0]["length_mean"]
        args = dataclasses.replace(args, detect_length=max(1, round(length / 4)))
        engine.detect_length = plain.args.detect_length = args.detect_length
        print(f"mean response {length:.1f} tokens, L_detect {args.detect_length}")
        pruned = Trainer(args, parts)
        # Fill head and windows; then one step with pruning to warm up.
        for _ in range(args.cold_start + 1):
            pruned.step()
        lines: tuple[list[dict], list[dict]] = ([], [])
        for pair in range(pairs):
            plain.prompts_used = pruned.prompts_used
            for kind in (0, 1) if pair % 2 == 0 else (1, 0):
                metrics, *_ = (plain, pruned)[kind].step()
                lines[kind].append(metrics | {"hook": engine.hook_seconds})
                print(f"pair {pair + 1}/{pairs} {('GRPO', 'ARRoL')[kind]:5s} {metrics['time_step']:.3f} s", flush=True)
    return args, *lines


def passed(line: dict, prompt_tokens: float) -> float:
    """Tokens that pass through the model again: prompts and responses of the survivors."""
    return line["tokens_trained"] + prompt_tokens * (line["rollouts"] - line["pruned"])


def compare(plain: list[dict], pruned: list[dict], prompt_tokens: float) -> dict[str, dict]:
    """For each phase: median and half the distance of the quartiles of both kinds of step, the
    medians' ratio, the pairs' mean ratio with its interval, the ratio that token counts allow."""

    def middle(lines: list[dict], key: str) -> dict[str, float]:
        low, median, high = statistics.quantiles([line[key] for line in lines], n=4)
        return {"median": median, "spread": (high - low) / 2}

    pairs = list(zip(plain, pruned, strict=True))
    sampled = statistics.median(a["tokens_generated"] / b["tokens_generated"] for a, b in pairs)
    trained = statistics.median(passed(a, prompt_tokens) / passed(b, prompt_tokens) for a, b in pairs)
    allowed: dict[str, float] = {"generate": sampled, "logprob": trained, "update": trained}
    found: dict[str, dict] = {}
    seconds = 0.0
    for phase in PHASES:
        key = f"time_{phase}"
        before, after = middle(plain, key), middle(pruned, key)
        if phase == "step":
            allowed[phase] = before["median"] / seconds
        seconds += before["median"] / allowed.get(phase, 1.0)
        comparable = phase != "head" and all(b[key] > 0 for b in pruned)
        found[phase] = {
            "plain": before,
            "pruned": after,
            "medians": before["median"] / after["median"] if comparable else None,
            "ratio": estimate([a[key] / b[key] for a, b in pairs]) if comparable else None,
            "allowed": allowed.get(phase),
            "paper": PAPER.get(phase),
        }
    return found


def table(phases: dict[str, dict]) -> str:
    rows = [["phase", "GRPO, s", "ARRoL, s", "ratio", "tokens allow", "share of that", "paper, Table 5"]]
    for phase, one in phases.items():
        ratio, allowed, paper = one["medians"], one["allowed"], one["paper"]
        cells = [f"{one[who]['median']:.3f} ± {one[who]['spread']:.3f}" for who in ("plain", "pruned")]
        cells += [f"{value:.2f} ×" if value else "–" for value in (ratio, allowed)]
        share = f"{ratio / allowed:.0%}" if ratio and allowed else "–"
        rows.append([phase, *cells, share, f"{paper:.2f} ×" if paper else ""])
    return markdown(rows)


def main() -> None:
    parser = results_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="steps of each kind")
    own, rest = parser.parse_known_args()
    if own.pairs < 2:
        parser.error("--pairs must be at least 2, for a spread")
    flags = [*([] if names_model(rest) else EMBEDDED.split()), *rest]
    args = dataclasses.replace(parse([*flags, "--prune", "arrol"]), lr=0.0, weight_decay=0.0, eval_problems=0)
    begun = time.monotonic()
    args, plain, pruned = measure(args, own.pairs)
    phases = compare(plain, pruned, statistics.mean(line["prompt_tokens"] / line["rollouts"] for line in plain))
    results = {
        "seeds": [args.seed],
        "flags": flags,
        "machines": [machine()],
        "code": [code_version()],
        "seconds_of_runs": time.monotonic() - begun,
        "pairs": own.pairs,
        "phases": phases,
        "hook_share": statistics.median(line["hook"] / line["time_generate"] for line in pruned),
        "keep_ratio": statistics.median(line["keep_ratio"] for line in pruned),
        "gap_max": max(line["gap_max"] for line in plain + pruned),
        "paper": PAPER,
    }
    figure, (axes,) = new_figure("median seconds of a step, by phase")
    for who, name in (("plain", "GRPO"), ("pruned", "ARRoL")):
        bottom = 0.0
        for i, phase in enumerate(PHASES[:-1]):
            height = phases[phase][who]["median"]
            axes.bar(name, height, 0.6, bottom, color=f"C{i}", label=phase if who == "plain" else None)
            bottom += height
    axes.legend()
    batch = f"{args.prompts} × {args.group_size} rollouts on {args.max_num_seqs} slots"
    sizes = {"batch": batch, "detect_length": str(args.detect_length), "target": f"{args.keep_ratio:g}"}
    tables = {"table": table(phases), "ratio": phases["step"]["ratio"].show(".2f"), "measured_on": measured_on(results)}
    save("speed", own.results, results, figure, **sizes, **tables)


if __name__ == "__main__":
    main()
