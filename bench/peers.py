"""Beside TRL's GRPOTrainer: seconds per step and per sampled token, and peak memory, in turn on the same model.

    make peers        8 minutes on 2 idle cores; --trl names the Python of another environment with TRL

Each turn runs three processes one after the other: TRL with transformers' generation, this program without pruning,
and with it. Same embedded model, float32; same problems, 16 of them with 16 rollouts a step; one optimizer step. The
learning rate is 0, so that all sample alike from first to last. The first steps are left out: they warm up, and fill
what the pruner decides by.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# What imports support/ is in functions: it sets how OpenMP waits, and TRL is to run as it comes, in this.
ENVIRONMENT = dict(os.environ)
ROOT = Path(__file__).resolve().parent.parent
PROMPTS, GROUP, MAX_LENGTH, WARM_UP = 16, 16, 256, 3
KINDS = ("TRL", "GRPO", "ARRoL")
FLAGS = f"--prompts {PROMPTS} --group-size {GROUP} --max-length {MAX_LENGTH} --max-num-seqs {PROMPTS * GROUP}"
FLAGS += f" --minibatches 1 --lr 0 --weight-decay 0 --cold-start {WARM_UP - 1} --eval-problems 0"

UNITS = {"step": "seconds", "token": "ms per token"}
Step = tuple[float, int]  # seconds, response tokens that were sampled


def trl_steps(problems: list[dict], folder: str, seed: int) -> Iterator[Step]:
    """Steps of GRPOTrainer, each from the end of the one before: generation, rewards, loss, optimizer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends, tokens = [], []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    def accuracy(completions: list[str], completion_ids: list, answer: list[str], **_: object) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [float(text.endswith(f"\\boxed{{{number}}}")) for text, number in zip(completions, answer)]

    batch = dict(per_device_train_batch_size=64, gradient_accumulation_steps=PROMPTS * GROUP // 64)
    batch |= dict(num_generations=GROUP, max_completion_length=MAX_LENGTH - 18, max_steps=len(problems) // PROMPTS)
    model = dict(learning_rate=0.0, loss_type="grpo", gradient_checkpointing=False, bf16=False, use_cpu=True)
    files = dict(output_dir=folder, save_strategy="no", report_to="none", disable_tqdm=True)
    config = GRPOConfig(**batch, **model, **files, seed=seed)
    data = Dataset.from_list([{"prompt": p["problem"] + "\n", "answer": p["answer"]} for p in problems])
    trainer = GRPOTrainer(str(ROOT / "tiny"), accuracy, config, data, callbacks=[Clock()])
    begun = time.perf_counter()
    trainer.train()
    yield from zip([end - start for start, end in zip([begun, *ends], ends)], tokens, strict=True)


def our_steps(problems: list[dict], folder: str, seed: int, prune: str) -> Iterator[Step]:
    """Steps of `arrol.Trainer`."""
    from support.args import parse

    path = Path(folder, "problems.jsonl")
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    flags = [*FLAGS.split(), "--prune", prune, "--seed", str(seed), "--dataset", str(path), "--output", folder]
    args = parse([*flags, "--eval-data"])
    from arrol import Trainer
    from support.launch import open_parts

    with open_parts(args) as parts:
        trainer = Trainer(args, parts)
        for _ in range(len(problems) // PROMPTS):
            metrics, *_ = trainer.step()
            yield metrics["time_step"], metrics["tokens_generated"]


def child(kind: str, count: int, seed: int) -> None:
    """Run one of the three, and print its steps and its peak memory as the last line."""
    from tiny.sums import sums

    problems = [{"problem": text, "answer": answer} for text, answer in sums(count * PROMPTS, seed).items()]
    with tempfile.TemporaryDirectory() as folder:
        parts = (problems, folder, seed)
        steps = trl_steps(*parts) if kind == "TRL" else our_steps(*parts, {"GRPO": "none", "ARRoL": "arrol"}[kind])
        found = list(steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"steps": found[WARM_UP:], "memory_gb": peak}))


def run(kind: str, python: str, steps: int, seed: int) -> dict:
    """`child` in a process of its own; ends this program if it fails."""
    command = [python, "-m", "bench.peers", "--child", kind, str(steps), str(seed)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{kind}: ended with status {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(turns: list[dict[str, dict]]) -> dict[str, dict]:
    """Of each kind, with an interval over turns: seconds per step, milliseconds per token, tokens per step, memory;
    and how many times as fast it is as TRL of the same turn, by step and by token."""
    from bench.tables import estimates

    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in turns[0]}
    for turn in turns:
        for kind, found in turn.items():
            seconds, tokens = (sum(column) for column in zip(*found["steps"]))
            row = {"seconds": seconds / len(found["steps"]), "ms per token": 1000 * seconds / tokens}
            row |= {"tokens": tokens / len(found["steps"]), "memory_gb": found["memory_gb"]}
            first = rows["TRL"][-1] if kind != "TRL" else row
            row |= {f"faster by {unit}": first[key] / row[key] for unit, key in UNITS.items()}
            rows[kind].append(row)
    return {kind: estimates(found) for kind, found in rows.items()}


def main() -> None:
    from bench.runs import code_version, machine, results_parser
    from bench.tables import described, markdown, save, show

    parser = results_parser(__doc__)
    parser.add_argument("--trl", default=str(ROOT / ".venv-trl/bin/python"), help="Python of TRL's environment")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="that count, of each kind and turn")
    args = parser.parse_args()
    turns: list[dict[str, dict]] = [{} for _ in range(args.turns)]
    for seed, turn in enumerate(turns):
        for kind in KINDS:
            turn[kind] = run(kind, args.trl if kind == "TRL" else sys.executable, WARM_UP + args.steps, seed)
            print(f"turn {seed + 1}/{args.turns} {kind:5s}", *(f"{s:.2f}" for s, _ in turn[kind]["steps"]), flush=True)
    found = compare(turns)
    columns = {"seconds": ("s per step", ".2f"), "ms per token": ("ms per sampled token", ".3f")}
    columns |= {"tokens": ("tokens sampled per step", ",.0f"), "memory_gb": ("peak memory, GB", ".2f")}
    columns |= {f"faster by {unit}": (f"× as fast by {unit}", ".2f") for unit in UNITS}
    rows = [["", *(title for title, _ in columns.values())]]
    rows += [[kind, *(show(one, key, form) for key, (_, form) in columns.items())] for kind, one in found.items()]
    query = "from importlib.metadata import version; print(version('trl'))"
    peer = subprocess.run([args.trl, "-c", query], capture_output=True, text=True).stdout.strip()
    results = {"machine": machine(), "peer": peer, "code": code_version(), "turns": turns, "found": found}
    sizes = {"count": str(args.turns), "each": str(args.steps), "flags": FLAGS}
    save("peers", args.results, results, table=markdown(rows), measured_on=described(results["machine"]), **sizes)


if __name__ == "__main__":
    child(sys.argv[2], *map(int, sys.argv[3:5])) if sys.argv[1:2] == ["--child"] else main()
