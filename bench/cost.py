"""Seconds of a training step against its size, fitted; and from that when pruning pays.

    python -m bench.cost        the embedded model, 8 minutes of one CPU core

    generation ~ a + b decoding steps + c tokens sampled
    the rest   ~ d + e tokens trained on, prompts included

Seconds are CPU time of steps at learning rate 0; every fourth cell of the grid is held out of the
fit. `paper_speed_up` rests on the paper's Table 5, and on nothing measured here.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import os
import random
import shutil
from collections.abc import Sequence

import numpy as np

from bench import one_core

if __name__ == "__main__" and shutil.which("nvidia-smi") is None:
    one_core.count_cpu_time(max(os.sched_getaffinity(0)))

from bench.runs import code_version, machine, results_parser
from bench.speed import passed
from bench.tables import described, markdown, new_figure, save
from support.args import Args, parse

FLAGS = "--prompts 32 --minibatches 2 --cold-start 1 --max-num-seqs 128 --prune arrol"
# κ, and L_detect as a share of the mean length.
PRUNING = ((1.0, 0.25), (0.5, 0.1), (0.5, 0.25), (0.25, 0.1), (0.25, 0.25))
SLOTS = (32, 64, 128)
PHASES = {"generation": ("steps", "sampled"), "rest": ("trained",)}
KEEP, UPDATE = (0.75, 0.5, 0.25), (0.2, 0.5, 0.8)
DETECT, PAPER_DETECT = (0.1, 0.25, 0.5, 0.75), (128, 256, 512, 1024)
# Qwen3-1.7B-Base, κ = 0.5, L_detect 512: seconds of generation and of log-probs and update, GRPO
# and ARRoL (Table 5); speed-up of the step (Table 1).
PAPER_GENERATION, PAPER_TRAINING, PAPER_STEP = (106.82, 72.96), (18.40 + 63.05, 10.02 + 30.26), 1.61


def decoding_steps(lengths: Sequence[int], slots: int) -> int:
    """Steps until all rollouts are done, if each takes the slot that is free first."""
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def measure(args: Args, some_prompts: Sequence[int], repeats: int) -> tuple[list[dict], list[int]]:
    """Size and seconds of a step for each cell of the grid, `repeats` times; lengths of responses."""
    cells = list(enumerate(itertools.product(some_prompts, SLOTS, PRUNING)))
    # They import vLLM, which takes seconds.
    from arrol import Trainer
    from support.launch import open_parts

    with open_parts(args) as parts:
        trainer, engine, lines = Trainer(args, parts), parts.engine, []
        pruner = trainer.pruner
        # The first step fills head and windows, the second one warms up.
        lengths = [len(r.token_ids) for r in trainer.step()[2]]
        trainer.step()
        for number, (prompts, slots, (keep, share)) in cells * repeats:
            engine.core.scheduler.max_num_active_reqs = slots
            engine.detect_length = max(1, round(share * np.mean(lengths)))
            trainer.args = dataclasses.replace(args, prompts=prompts, detect_length=engine.detect_length)
            trainer.pruner = pruner if keep < 1 else None
            pruner.settings = dataclasses.replace(pruner.settings, keep_ratio=keep)
            found, _, rollouts = trainer.step()
            line = {"prompts": prompts, "slots": slots, "keep": keep, "share": share, "held_out": number % 4 == 3}
            line |= {"steps": decoding_steps([len(r.token_ids) for r in rollouts], slots)}
            line |= {"sampled": found["tokens_generated"]}
            line |= {"trained": passed(found, found["prompt_tokens"] / found["rollouts"])}
            seconds = found["time_generate"]
            lines.append(line | {"generation": seconds, "rest": found["time_step"] - seconds})
    return lines, lengths


def fit(lines: list[dict]) -> dict[str, dict]:
    """Coefficients of each phase by least squares of relative errors; median errors, within and held out."""
    held, found = np.array([line["held_out"] for line in lines]), {}
    for phase, sizes in PHASES.items():
        x = np.array([[1.0, *(line[size] for size in sizes)] for line in lines])
        relative = x / np.array([[line[phase]] for line in lines])
        coefficients = np.linalg.lstsq(relative[~held], np.ones(sum(~held)), rcond=None)[0]
        errors = [float(np.median(abs(relative[some] @ coefficients - 1))) for some in (~held, held)]
        found[phase] = {"coefficients": coefficients.tolist(), "error": errors[0], "held_out": errors[1]}
    return found


def predict(model: dict, prompts: int, slots: int, keep: float, share: float) -> list[float]:
    """Seconds of generation and of the rest of a step with κ = `keep`, L_detect = `share` of the mean."""
    rng, detect = random.Random(0), max(1, round(share * np.mean(model["lengths"])))
    lengths = list(itertools.islice(itertools.cycle(model["lengths"]), prompts * model["group_size"]))
    kept = [length <= detect or rng.random() < keep for length in lengths]
    sampled = [length if goes_on else detect for length, goes_on in zip(lengths, kept)]
    trained = sum(itertools.compress(lengths, kept)) + model["prompt_tokens"] * sum(kept)
    sizes = {"steps": decoding_steps(sampled, slots), "sampled": sum(sampled), "trained": trained}
    return [float(np.dot(model[p]["coefficients"], [1, *(sizes[s] for s in PHASES[p])])) for p in PHASES]


def paper_speed_up(fixed: float, keep: float, detect: float) -> tuple[float, float]:
    """Speed-up of the paper's step at other κ and L_detect, and the mean length that Table 5 implies.

    fixed: the share of generation that tokens do not change. bench/notes/cost.md says what is assumed.
    """
    (generation, generation_pruned), (training, training_pruned) = PAPER_GENERATION, PAPER_TRAINING
    saved = (1 - generation_pruned / generation) / (1 - fixed)  # of the tokens: (1 - κ)(1 - L_detect / mean)
    mean = 512 / (1 - saved / 0.5)
    step, pruned = generation + training, generation_pruned + training_pruned
    step += (PAPER_STEP * pruned - step) / (1 - PAPER_STEP)  # what Table 5 leaves out
    per_pruned = generation * (1 - fixed) * (1 - detect / mean) + (training - training_pruned) / 0.5
    return step / (step - (1 - keep) * per_pruned), mean


def speed_up(model: dict, update: float, keep: float, share: float) -> float:
    """Of a step of 512 rollouts on 64 slots; `update`: the rest's share of the unpruned one."""
    (g, r), (g_pruned, r_pruned) = (predict(model, 32, 64, *one) for one in ((1.0, 1.0), (keep, share)))
    return 1 / ((1 - update) * g_pruned / g + update * r_pruned / r)


def more_prompts(model: dict, slots: int, keep: float, share: float) -> int:
    """How many prompts a pruned step does in the time in which an unpruned one does 32."""
    seconds = sum(predict(model, 32, slots, 1.0, 1.0))
    return next(n for n in itertools.count(1) if sum(predict(model, n + 1, slots, keep, share)) > seconds)


def tables(lines: list[dict], lengths: list[int], group_size: int) -> tuple[dict, dict[str, str]]:
    """The fitted model, and the tables that follow from it."""
    prompts = [(a["trained"] - a["sampled"]) / a["prompts"] / group_size for a in lines if a["keep"] == 1]
    model = {"lengths": lengths, "group_size": group_size, "prompt_tokens": float(np.mean(prompts))} | fit(lines)
    share_of = [f"L_detect {share:g} of the mean" for share in DETECT]
    paper_at = [f"L_detect {detect}" for detect in PAPER_DETECT]
    rows = {
        "fitted": [["seconds of", "coefficients of", "", "median error", "held out"]],
        "speed_ups": [["update's share", "κ", *share_of]],
        "more_prompts": [["slots", "κ", *share_of]],
        "paper": [["fixed share of generation", "mean length", "κ", *paper_at]],
    }
    for phase, sizes in PHASES.items():
        coefficients = ", ".join(f"{value:.3g}" for value in model[phase]["coefficients"])
        errors = [f"{model[phase][name]:.1%}" for name in ("error", "held_out")]
        rows["fitted"].append([phase, ", ".join(("1", *sizes)), coefficients, *errors])
    for update, keep in itertools.product(UPDATE, KEEP):
        cells = [f"{speed_up(model, update, keep, share):.2f} ×" for share in DETECT]
        rows["speed_ups"].append([f"{update:.0%}", f"{keep:g}", *cells])
    for slots, keep in itertools.product(SLOTS, KEEP):
        cells = [str(more_prompts(model, slots, keep, share)) for share in DETECT]
        rows["more_prompts"].append([str(slots), f"{keep:g}", *cells])
    for fixed, keep in itertools.product((0.0, 0.2), KEEP):
        found = [paper_speed_up(fixed, keep, detect) for detect in PAPER_DETECT]
        cells = [f"{ratio:.2f} ×" for ratio, _ in found]
        rows["paper"].append([f"{fixed:.0%}", f"{found[0][1]:,.0f}", f"{keep:g}", *cells])
    return model, {name: markdown(table) for name, table in rows.items()}


def main() -> None:
    parser = results_parser(__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 16, 32], help="of a step")
    parser.add_argument("--repeats", type=int, default=2, help="steps of each size")
    own = parser.parse_args()
    args = dataclasses.replace(parse(FLAGS.split()), lr=0.0, weight_decay=0.0, eval_problems=0)
    lines, lengths = measure(args, own.prompts, own.repeats)
    model, shown = tables(lines, lengths, args.group_size)
    figure, (left, right) = new_figure("embedded model, update half of the step", "Qwen3-1.7B, from Table 5")
    for i, keep in enumerate(KEEP):
        shares, detects = np.linspace(0.05, 1, 20), np.linspace(64, 1280, 20)
        left.plot(shares, [speed_up(model, 0.5, keep, share) for share in shares], f"C{i}", label=f"κ = {keep:g}")
        for fixed, line in ((0.0, "-"), (0.2, "--")):
            right.plot(detects, [paper_speed_up(fixed, keep, detect)[0] for detect in detects], f"C{i}{line}")
    left.set(xlabel="L_detect / mean length", ylabel="speed-up of a step")
    right.set(xlabel="L_detect, tokens; dashed: a fifth of generation is fixed")
    left.legend()
    made = {"machine": machine(), "code": code_version(), "flags": FLAGS, "repeats": own.repeats}
    made["prompts"] = ", ".join(map(str, own.prompts))
    results = made | {"model": model, "lines": lines}
    save("cost", own.results, results, figure, measured_on=described(made["machine"]), **shown)


if __name__ == "__main__":
    main()
