"""The runs that test_ranks.py compares, on one engine: [torchrun …] tests/ranks_worker.py FOLDER
[CHECKPOINT]

The first is the program's own, as arrol.py runs it; the others follow before it takes the engine
down. With CHECKPOINT, the run that it belongs to is gone on with as well. Every rank leaves
FOLDER/rank-N.json, hashes of what it has learnt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from arrol import Trainer
from support import launch
from support.args import Args, parse
from support.distributed import rank

# 40 rollouts and about 900 prompt tokens a step: vLLM starts them all at once, so that no group
# arrives in portions.
FLAGS = (
    "--prompts 5 --group-size 8 --steps 4 --cold-start 1 --warmup-steps 0 --lr 1e-4 --minibatches 2 --rollout-seeds "
    "--eval-problems 9 --eval-n 1 --baseline-steps 0 --max-num-seqs 64 --kv-cache-gb 0.25 --checkpoint-every 2 "
    "--log-rollouts all"
).split()
OTHERS = {
    "dapo": {"algo": "dapo", "prompts": 3, "steps": 2, "max_refills": 2, "survival": "systematic", "minibatches": 1},
    "one prompt": {"prompts": 1, "steps": 2, "cold_start": 0},
}


def digest(value: object) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return hashlib.sha256(file.getvalue()).hexdigest()


def learnt(trainer: Trainer) -> dict[str, str]:
    """Hashes of policy, head and calibration, as this rank has them."""
    weights = list(trainer.weights())
    return {"policy": digest(weights)} | {name: digest(part) for name, part in trainer.pruner.state_dict().items()}


def main(folder: Path, begun: Path | None) -> int:
    open_parts = launch.open_parts

    @contextlib.contextmanager
    def open_parts_longer(args: Args) -> Iterator[launch.Parts]:
        """The program's parts, with more runs on them before they are taken down."""
        with open_parts(args) as parts:
            yield parts
            for name, changes in OTHERS.items():
                runs[name] = Trainer(dataclasses.replace(args, output=str(folder / name), **changes), parts)
                runs[name].run(name, checkpoints=False)
            if begun:
                Trainer(dataclasses.replace(args, output=str(begun.parent)), parts).run("resumed", resume_from=begun)
            hashes = {name: learnt(run) for name, run in runs.items()}
            (folder / f"rank-{rank()}.json").write_text(json.dumps(hashes))

    runs: dict[str, Trainer] = {}

    def trainer(args: Args, parts: launch.Parts) -> Trainer:
        return runs.setdefault("grpo", Trainer(args, parts))

    launch.open_parts = open_parts_longer
    return launch.run(parse([*FLAGS, "--output", str(folder / "grpo")]), trainer)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
