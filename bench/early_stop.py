"""Early stop at test time: accuracy against tokens and seconds, beside voting among fewer candidates.

    python -m bench.early_stop

Of n candidates per problem the head stops all but κ at L_detect (`tts.py --early-stop`). What that
costs would also buy fewer candidates that are all completed: these it has to beat. Models are the
last checkpoints of ARRoL's runs, whose heads were trained at one L_detect and are used at three.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from bench.runs import names_model, read_flags, run_parser, train
from bench.tables import Estimate, estimates, markdown, new_figure, plot_seeds, publish, show
from engine import Rollout
from support.args import TtsArgs, parse_tts
from support.checkpoint import complete
from support.test_time import Candidates, KeepBetter, Sampler, accuracies

METHOD = "GRPO + ARRoL"
KEPT = (0.25, 0.5, 0.75)
# L_detect, of the mean length of an answer.
FRACTIONS = {0.25: "tab:red", 0.5: "tab:orange", 0.75: "tab:purple"}
COSTS = {"tokens": "tokens per problem", "seconds": "CPU seconds per problem"}
PAIRS = [(rule, cost) for rule in ("majority", "ARRoL") for cost in COSTS]
Cells = dict[str, float]


def sample(sampler: Sampler, count: int, **options: object) -> tuple[list[Rollout], Cells]:
    """`count` candidates of each problem, and what they cost per problem."""
    start = time.process_time()
    rollouts = sampler.sample(count, **options)
    cost = {"tokens": sum(len(r.token_ids) for r in rollouts), "seconds": time.process_time() - start}
    return rollouts, {name: value / len(sampler.prompts) for name, value in cost.items()}


def votes(problems: Sequence[Candidates], count: int, seed: int) -> Cells:
    """Accuracy of each rule that needs no more than the head, among `count` candidates or all there are."""
    alone = [dataclasses.replace(one, signals={"head": one.signals["head"]}) for one in problems]
    return {rule: statistics.fmean(right) for rule, right in accuracies(alone, count, seed).items()}


def plain_votes(sampler: Sampler) -> dict[int, Cells]:
    """Candidates per problem -> costs and accuracies, if all are completed."""
    n = sampler.args.n
    sampler.sample(1)  # what is done once, such as preparing kernels, is not timed
    drawn = {count: sample(sampler, count) for count in (n // 8, n // 4, n // 2, n)}
    problems, found = sampler.judge(drawn[n][0]), {}
    for count in range(n // 8, n + 1, n // 8):
        seconds = float(np.interp(count, list(drawn), [cost["seconds"] for _, cost in drawn.values()]))
        cost = {"tokens": drawn[n][1]["tokens"] * count / n, "seconds": seconds}
        found[count] = cost | votes(problems, count, sampler.args.seed)
    return found


def gains(cells: Cells, plain: Mapping[int, Cells]) -> Cells:
    """Each rule's accuracy less that of a plain vote at the same cost, between the sizes around it."""
    found = {}
    for rule, cost in PAIRS:
        costs, right = ([one[key] for one in plain.values()] for key in (cost, rule))
        found[f"{rule}, {cost}"] = cells[rule] - float(np.interp(cells[cost], costs, right))
    return found


def measure(args: TtsArgs) -> tuple[dict[int, Cells], dict[tuple[float, float], Cells]]:
    """`plain_votes`, and (fraction, κ) -> L_detect, costs, accuracies and `gains` of an early stop."""
    sampler, stopped = Sampler(args), {}
    with sampler.running():
        plain = plain_votes(sampler)
        for fraction in FRACTIONS:
            detect = sampler.engine.detect_length = max(1, round(fraction * plain[args.n]["tokens"] / args.n))
            for kept in KEPT:
                pruner = KeepBetter(sampler.head, sampler.table, kept, args.seed)
                rollouts, cost = sample(sampler, args.n, pruner=pruner)
                cells = {"L_detect": detect} | cost | votes(sampler.judge(rollouts), args.n, args.seed)
                stopped[fraction, kept] = cells | gains(cells, plain)
    return plain, stopped


def rows(models: Sequence[tuple[dict, dict]]) -> dict[str, dict[str, Estimate]]:
    """`measure` of several seeds -> the rows of the table."""
    plain, stopped = ({key: estimates(one[key] for one in some) for key in some[0]} for some in zip(*models))
    return {f"{count} candidates, all completed": one for count, one in plain.items()} | {
        f"stopped at {of} of the mean length, κ = {kept}": one for (of, kept), one in stopped.items()
    }


def table(found: dict[str, dict[str, Estimate]]) -> str:
    heading = ["", "L_detect", *COSTS.values(), "majority", "ARRoL"]
    heading += [f"{rule} − plain, equal {cost} (95% interval)" for rule, cost in PAIRS]
    forms = {"L_detect": ".1f", "tokens": ".0f", "seconds": ".3f", "majority": ".3f", "ARRoL": ".3f"}
    forms |= {f"{rule}, {cost}": "+.3f" for rule, cost in PAIRS}
    return markdown([heading, *([name, *(show(one, *form) for form in forms.items())] for name, one in found.items())])


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--data", help="set, as for tts.py (default: that of the regime)")
    parser.add_argument("--n", type=int, default=32, choices=(8, 16, 32, 64, 128), help="candidates per problem")
    plan, own = read_flags(parser)
    runs, measured = train(plan, [METHOD]), {}
    # CPU seconds of one core: threads that wait for each other on several would count as work.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    for regime, of in runs.items():
        measured[regime] = []
        for run in of[METHOD]:
            data = own.data or ("aime24" if names_model(plan.flags) else run.args["dataset"])
            flags = ["--model", str(complete(run.folder)[-1]), "--data", data, "--n", str(own.n)]
            measured[regime].append(measure(parse_tts([*flags, "--seed", str(run.seed)])))
    titles = (f"{regime}, {rule}: accuracy against {COSTS[cost]}" for regime in runs for rule, cost in PAIRS)
    figure, panels = new_figure(*titles, rows=2 * len(runs))
    for axes, (models, (rule, cost)) in zip(panels, itertools.product(measured.values(), PAIRS), strict=True):
        curves = {"fewer candidates, all completed": ("black", [list(plain.values()) for plain, _ in models])}
        for of, color in FRACTIONS.items():
            curves[f"stopped at {of} of the mean length"] = color, [[one[of, k] for k in KEPT] for _, one in models]
        for name, (color, seeds) in curves.items():
            plot_seeds(axes, name, color, [[(cells[cost], cells[rule]) for cells in one] for one in seeds])
    panels[0].legend(fontsize=7)
    found = {regime: rows(models) for regime, models in measured.items()}
    tables = {regime: table(one) for regime, one in found.items()}
    publish("early_stop", plan, runs, {"regimes": found, "n": own.n}, figure, table=tables)


if __name__ == "__main__":
    main()
