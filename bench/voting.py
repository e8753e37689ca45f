"""Voting among 32 answers of each trained model: majority, DeepConf, and ARRoL's vote by the quality head (Table 3).

    python bench/voting.py                                               both models that ARRoL trained, all seeds
    python bench/voting.py --model Qwen/Qwen3-1.7B-Base --data amc23     (default there: amc23 aime24 aime25)

Each is one call of tts.py on the last checkpoint of a training run; its files are kept in the run's folder.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.runs import ROOT, Run, command, last_words, read_flags, run_program, train
from bench.tables import (
    Estimate,
    ended,
    estimates,
    markdown,
    measured_on,
    named,
    new_figure,
    plot_seeds,
    provenance,
    save,
    show,
)
from support.args import fail

METHODS = ("GRPO + ARRoL", "DAPO + ARRoL")
RULES = {
    "majority": "black",
    "DeepConf, mean": "tab:green",
    "DeepConf, lowest window": "tab:olive",
    "ARRoL": "tab:red",
    "ARRoL, probability": "tab:orange",
    "log-prob": "tab:purple",
}
PAPER = {  # Table 3, maj@32 in percent: AMC'23, AIME'24, AIME'25
    "Qwen3-1.7B-Base": ((55.0, 16.7, 3.3), (57.5, 16.7, 6.7), (60.0, 23.3, 13.3)),
    "Qwen3-4B-Base": ((72.5, 26.7, 20.0), (72.5, 33.3, 23.3), (82.5, 36.7, 26.7)),
    "Qwen3-8B-Base": ((75.0, 23.3, 26.7), (80.0, 23.3, 23.3), (85.0, 33.3, 33.3)),
    "Llama-3.2-1B-Instruct": ((10.0, 0.0, 0.0), (15.0, 3.3, 0.0), (17.5, 10.0, 0.0)),
}
NOTE = """\
Mean over seeds ± half of the 95% t interval, of each set's mean where there are several sets; differences are taken seed by seed. DeepConf weighs each
vote by trace confidence: its mean over the trace, or the mean of the lowest window. ARRoL weighs it by the rank of the head's score, as in the paper,
or by the score s′ itself; *log-prob* by the rank of the mean log-prob of its sampled tokens, which needs no head. The paper's row is the mean of AMC'23, AIME'24 and AIME'25; it
does not say which of the two it took."""


def sample(run: Run, data: str, n: int, title: str) -> dict | None:
    """What tts.py says of a run's last checkpoint: its scores.json, None if it crashed. Done once."""
    folder = run.folder / f"tts-{re.sub(r'[^A-Za-z0-9]+', '-', data)}-{n}"
    if not _complete(folder / "scores.json") and not (folder / "crash.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        model = run.folder / f"checkpoint-{int(run.lines[-1]['step'])}"
        flags = ["--model", str(model), "--data", data, "--n", str(n), "--seed", str(run.seed), "--output", str(folder)]
        if status := run_program([str(ROOT / "tts.py"), *flags], folder, title):
            (folder / "scores.json").unlink(missing_ok=True)
            crash = {
                "method": run.method,
                "seed": run.seed,
                "status": status,
                "error": last_words(folder),
            }
            (folder / "crash.json").write_text(json.dumps(crash), "utf-8")
    if (folder / "crash.json").is_file():
        print(f"{title}: crashed, see {folder}", flush=True)
        return None
    return json.loads((folder / "scores.json").read_text("utf-8"))


def _complete(path: Path) -> bool:
    """Whether there are scores of all rules: an older tts.py had fewer."""
    return path.is_file() and RULES.keys() <= json.loads(path.read_text("utf-8"))["votes"].keys()


def votes(sets: Sequence[dict]) -> dict[str, float]:
    """Accuracy of one model's samples, of an oracle and of each rule, a mean over the sets."""
    n = sets[0]["settings"]["n"]

    def mean(part: str, name: str) -> float:
        return statistics.fmean(one[part][name]["value"] for one in sets)

    found = {"one sample": mean("samples", f"avg@{n}"), "oracle": mean("samples", f"pass@{n}")}
    found |= {rule: mean("votes", rule) for rule in RULES}
    return found | {f"{rule} − majority": found[rule] - found["majority"] for rule in RULES if rule != "majority"}


def table(found: dict[str, dict[str, Estimate]], runs: dict[str, list[Run]], crashed: list[dict], n: int) -> str:
    gains = ("ARRoL − majority", "ARRoL, probability − majority", "log-prob − majority")
    rows = [["", f"avg@{n}", *RULES, *(f"{gain} (95% interval)" for gain in gains), f"pass@{n}"]]
    columns = ("one sample", *RULES, *gains, "oracle")
    for method, one in found.items():
        bad = [f"tts.py **crashed** with seed {crash['seed']}" for crash in crashed if crash["method"] == method]
        name = ", ".join([named(method, runs[method]), *bad])
        rows.append([name, *(show(one, key, "+.3f" if "−" in key else ".3f") for key in columns)])
    for model, sets in PAPER.items():
        majority, deepconf, arrol = (statistics.fmean(values) / 100 for values in sets)
        cells = [
            f"{majority:.3f}",
            f"{deepconf:.3f}",
            "",
            f"{arrol:.3f}",
            "",
            "",
            f"{arrol - majority:+.3f}",
            "",
            "",
            "",
        ]
        rows.append([f"paper, Table 3, {model}", "", *cells])
    return markdown(rows)


def curve(sets: Sequence[dict], rule: str) -> list[tuple[float, float]]:
    """Candidates per problem and accuracy, a mean over the sets."""
    columns = zip(*(one["curve"][rule] for one in sets), strict=True)
    return list(zip(sets[0]["curve"]["sizes"], map(statistics.fmean, columns), strict=True))


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--data", nargs="+", help="sets, as for tts.py")
    parser.add_argument("--n", type=int, default=32, help="candidates per problem")
    plan, own = read_flags(parser)
    if own.n < 2:
        fail(f"--n {own.n}: a vote needs 2 candidates at least")
    runs = train(plan, METHODS)
    data = own.data or (["sums"] if plan.embedded else ["amc23", "aime24", "aime25"])
    scored: dict[str, list[list[dict]]] = {method: [] for method in METHODS}
    crashed = []
    for method in METHODS:
        for run in ended(runs[method]):
            found = [sample(run, one, own.n, f"{method}, seed {run.seed}, {one}") for one in data]
            sets = [one for one in found if one is not None]
            if len(sets) == len(data):
                scored[method].append(sets)
            else:
                crashed.append({"method": method, "seed": run.seed})
    voted = {method: estimates([votes(sets) for sets in scored[method]]) for method in METHODS}
    results = provenance(runs, plan) | {
        "methods": voted,
        "data": data,
        "n": own.n,
        "tts_crashed": crashed,
        "paper": PAPER,
    }
    figure, panels = new_figure(*(f"{method}: accuracy against candidates" for method in METHODS))
    for axes, method in zip(panels, METHODS, strict=True):
        for rule, color in RULES.items():
            plot_seeds(axes, rule, color, [curve(sets, rule) for sets in scored[method]])
        axes.set_xscale("log", base=2)
        axes.set(xlabel="candidates per problem", ylabel="accuracy")
    panels[0].legend()
    text = f"## Voting (Table 3)\n\n{table(voted, runs, crashed, own.n)}\n\n{NOTE}\n\n{measured_on(results)}"
    save("voting", plan.results, results, text, figure)


if __name__ == "__main__":
    main()
