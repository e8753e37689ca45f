"""Accuracy and speed-up for keep ratios of 0.25, 0.5, 0.75 and 1, which is GRPO (Table 6).

python -m bench.keep_ratio
"""

from __future__ import annotations

from bench import accuracy
from bench.runs import Run, read_flags, run_parser, train
from bench.tables import Estimate, estimates, markdown, new_figure, publish, show
from support.args import fail

METHODS = {0.25: "GRPO + ARRoL, κ = 0.25", 0.5: "GRPO + ARRoL", 0.75: "GRPO + ARRoL, κ = 0.75", 1.0: "GRPO"}
PAPER = {0.25: (32.46, 2.33), 0.5: (33.34, 1.61), 0.75: (32.68, 1.17), 1.0: (32.36, 1.00)}
ROWS = (
    ("accuracy (avg)", "avg", ".3f", ""),
    ("− κ = 1, equal steps (95% interval)", "equal steps", "+.3f", ""),
    ("− κ = 1, equal time (95% interval)", "equal time", "+.3f", ""),
    ("kept of scored rollouts", "keep_ratio", ".3f", ""),
    ("E[ρ̂(1 − ρ̂)]", "rho_variance", ".3f", ""),
    ("speed-up of the whole run", "speed-up", ".2f", " ×"),
    ("speed-up of a step after the cold start", "speed-up of a step", ".2f", " ×"),
)


def against(plain: Run, run: Run) -> dict[str, float]:
    """A run beside that of GRPO with the same seed, and what was kept."""
    return accuracy.against(plain, run) | {key: run.mean(key) for key in ("keep_ratio", "rho_variance")}


def table(found: dict[str, dict[str, Estimate]]) -> str:
    rows = [["κ", *(f"{k:g}" for k in METHODS)]]
    rows += [[title, *(show(found[str(k)], *cell) for k in METHODS)] for title, *cell in ROWS]
    rows.append(["paper, Table 6: accuracy", *(f"{PAPER[k][0]:.2f}" for k in METHODS)])
    rows.append(["paper, Table 6: speed-up", *(f"{PAPER[k][1]:.2f} ×" for k in METHODS)])
    return markdown(rows)


def main() -> None:
    plan, _ = read_flags(run_parser(__doc__))
    if any(word.split("=")[0] == "--keep-ratio" for word in plan.flags):
        fail("--keep-ratio: this table sets it; leave it out")
    runs = train(plan, list(METHODS.values()))
    found = {
        regime: {str(k): estimates(map(against, of["GRPO"], of[method])) for k, method in METHODS.items()}
        for regime, of in runs.items()
    }
    figure, panels = new_figure("accuracy at equal steps", "accuracy − κ = 1, equal time", "speed-up of the whole run")
    for axes, key in zip(panels, ("avg", "equal time", "speed-up")):
        for color, (regime, of) in zip(("tab:blue", "tab:orange"), found.items()):
            known = {k: of[str(k)][key] for k in METHODS if key in of[str(k)]}
            for k, one in known.items():
                axes.plot([k] * len(one.values), one.values, ".", color=color, alpha=0.4)
            axes.plot(list(known), [one.mean for one in known.values()], color=color, linewidth=2.2, label=regime)
        axes.set(xlabel="κ")
    panels[2].plot(list(PAPER), [speedup for _, speedup in PAPER.values()], "--", color="gray", label="paper")
    panels[2].legend()
    tables = {regime: table(of) for regime, of in found.items()}
    publish("keep_ratio", plan, runs, {"regimes": found, "paper": PAPER}, figure, table=tables)


if __name__ == "__main__":
    main()
