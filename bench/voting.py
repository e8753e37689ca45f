"""Voting among 32 answers of each trained model: majority, DeepConf, and ARRoL (Table 3).

    python -m bench.voting    the models that ARRoL trained, all seeds
    python -m bench.voting --model Qwen/Qwen3-1.7B-Base --data amc23

Each is one call of tts.py on the last checkpoint of a training run; its files are kept in the run's
folder.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.runs import Job, Run, names_model, read_flags, run_all, run_parser, train
from bench.tables import Estimate, estimates, markdown, new_figure, plot_seeds, publish, show
from support.args import fail
from support.checkpoint import complete

METHODS = ("GRPO + ARRoL", "GRPO + ARRoL, log-probs")
RULES = {
    "majority": "black",
    "DeepConf, mean": "tab:green",
    "DeepConf, lowest window": "tab:olive",
    "ARRoL": "tab:red",
    "ARRoL, probability": "tab:orange",
    "ARRoL, log-odds": "tab:blue",
    "log-prob": "tab:purple",
}
GAINS = tuple(f"{rule} − majority" for rule in ("ARRoL", "ARRoL, probability", "ARRoL, log-odds", "log-prob"))
# candidates where a majority has little to count
FEW = (2, 4)
# Table 3, maj@32 in percent on AMC'23, AIME'24 and AIME'25: majority, DeepConf, ARRoL.
PAPER = {
    "Qwen3-1.7B-Base": ((55.0, 16.7, 3.3), (57.5, 16.7, 6.7), (60.0, 23.3, 13.3)),
    "Qwen3-4B-Base": ((72.5, 26.7, 20.0), (72.5, 33.3, 23.3), (82.5, 36.7, 26.7)),
    "Qwen3-8B-Base": ((75.0, 23.3, 26.7), (80.0, 23.3, 23.3), (85.0, 33.3, 33.3)),
    "Llama-3.2-1B-Instruct": ((10.0, 0.0, 0.0), (15.0, 3.3, 0.0), (17.5, 10.0, 0.0)),
}


def sampling(run: Run, data: str, n: int) -> Job:
    """The call of tts.py on a run's last checkpoint."""
    folder = run.folder / f"tts-{re.sub(r'[^A-Za-z0-9]+', '-', data)}-{n}"
    flags = ["--model", str(complete(run.folder)[-1]), "--data", data, "--n", str(n), "--seed", str(run.seed)]
    return Job(f"{run.method}, seed {run.seed}, {data}", "tts.py", [*flags, "--output", str(folder)], folder)


def scores_of(job: Job) -> Path:
    """What tts.py leaves when it has ended."""
    return job.folder / "scores.json"


def votes(sets: Sequence[dict]) -> dict[str, float]:
    """Accuracy of one model's samples, of an oracle and of each rule, and gains over the majority.

    Means over the sets. A head whose file counts no finished answers has no log-odds.
    """
    rules = [rule for rule in RULES if rule in sets[0]["votes"]]
    n = sets[0]["settings"]["n"]
    cells = {"one sample": ("samples", f"avg@{n}"), "oracle": ("samples", f"pass@{n}")}
    cells |= {rule: ("votes", rule) for rule in rules}
    found = {key: statistics.fmean(one[kind][name]["value"] for one in sets) for key, (kind, name) in cells.items()}
    found |= {f"{rule} − majority": found[rule] - found["majority"] for rule in rules if rule != "majority"}
    majority = dict(curve(sets, "majority"))
    for rule in rules:
        of_size = dict(curve(sets, rule))
        found |= {f"{rule} − majority, of {k}": of_size[k] - majority[k] for k in FEW if k in majority}
    return found


def table(found: dict[str, dict[str, Estimate]], n: int) -> str:
    rows = [["", f"avg@{n}", *RULES, *(f"{gain} (95% interval)" for gain in GAINS), f"pass@{n}"]]
    for method, one in found.items():
        cells = [show(one, key) for key in ("one sample", *RULES)]
        gains = [show(one, key, "+.3f") for key in GAINS]
        rows.append([method, *cells, *gains, show(one, "oracle")])
    for model, sets in PAPER.items():
        majority, deepconf, arrol = (statistics.fmean(values) / 100 for values in sets)
        votes = [f"{majority:.3f}", f"{deepconf:.3f}", "", f"{arrol:.3f}", "", "", ""]
        rows.append([f"paper, Table 3, {model}", "", *votes, f"{arrol - majority:+.3f}", "", "", "", ""])
    return markdown(rows)


def table_of_few(found: dict[str, dict[str, Estimate]]) -> str:
    """Gains at 2 and 4 candidates, a dash where so many were not sampled."""
    rows = [["at 2 and 4 candidates", "candidates", *(f"{gain} (95% interval)" for gain in GAINS)]]
    for method, one in found.items():
        rows += [[method, str(k), *(show(one, f"{gain}, of {k}", "+.3f") for gain in GAINS)] for k in FEW]
    return markdown(rows)


def curve(sets: Sequence[dict], rule: str) -> list[tuple[float, float]]:
    """Candidates per problem and accuracy, a mean over the sets."""
    columns = zip(*(one["curve"][rule] for one in sets), strict=True)
    return list(zip(sets[0]["curve"]["sizes"], map(statistics.fmean, columns), strict=True))


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--data", nargs="+", help="sets, as for tts.py")
    parser.add_argument("--n", type=int, default=32, help="candidates per problem")
    plan, own = read_flags(parser)
    if own.n < 2:
        fail(f"--n {own.n}: a vote needs 2 candidates at least")
    runs = train(plan, METHODS)
    jobs = {}
    for regime, of in runs.items():
        for method, some in of.items():
            # What is held out of the sums that a run was trained on.
            known = ["amc23", "aime24", "aime25"] if names_model(plan.flags) else [some[0].args["dataset"]]
            jobs[regime, method] = [[sampling(run, data, own.n) for data in own.data or known] for run in some]
    missing = [job for models in jobs.values() for sets in models for job in sets if not scores_of(job).is_file()]
    for job, _ in run_all(missing, plan.cores):
        print(job.title, flush=True)
    scored = {
        key: [[json.loads(scores_of(job).read_text("utf-8")) for job in sets] for sets in models]
        for key, models in jobs.items()
    }
    found: dict[str, dict] = {regime: {} for regime in runs}
    for (regime, method), models in scored.items():
        found[regime][method] = estimates([votes(sets) for sets in models])
    figure, panels = new_figure(*(f"{regime}, {method}" for regime, method in scored), rows=len(runs))
    for axes, models in zip(panels, scored.values(), strict=True):
        for rule, color in RULES.items():
            plot_seeds(axes, rule, color, [curve(sets, rule) for sets in models if rule in sets[0]["curve"]])
        axes.set_xscale("log", base=2)
        axes.set(xlabel="candidates per problem", ylabel="accuracy")
    panels[0].legend()
    results = {"regimes": found, "n": own.n, "paper": PAPER}
    tables = {r: table(of, own.n) for r, of in found.items()}, {r: table_of_few(of) for r, of in found.items()}
    publish("voting", plan, runs, results, figure, table=tables[0], few=tables[1])


if __name__ == "__main__":
    main()
