"""A quality head, with its calibration, for a model that was never trained with ARRoL.

    python examples/train_head.py --model MODEL --data train.jsonl --n 16 --output runs/head
    python tts.py --model MODEL --head runs/head/quality_head.safetensors --data aime24 --early-stop

The flags are those of `tts.py`. It samples n answers to each problem and has them graded; it cannot
start from the candidates.jsonl of `tts.py`, which holds neither states nor token ids. Half of the
problems teach the head, a quarter fill the calibration, on a quarter both are judged.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from torch import Tensor

from calibration import Calibrator
from engine import Decision, Rollout
from quality_head import HeadTrainer, QualityHead
from support.args import fail, parse_tts
from support.checkpoint import save_head
from support.evaluation import grade
from support.metrics import within_group_auc
from support.test_time import Sampler

# Calls of HeadTrainer.train, 4 passes each. Few answers fill few bins.
ROUNDS, BINS = 8, 32
FIELDS = ("detect_state", "last_state")


class KeepAll:
    """With a pruner the engine notes the states at L_detect; this one drops nothing."""

    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        return [Decision(keep=True) for _ in samples]


def rows(rollouts: list[Rollout], field: str) -> tuple[Tensor, Tensor, Tensor]:
    """States (N, H), labels (N,) and problems (N,) of the graded answers that have `field`."""
    found = [r for r in rollouts if getattr(r, field) is not None and r.reward is not None]
    if len({r.reward for r in found}) < 2:
        fail(f"--data, --n: of {len(found)} answers none is right, or none is wrong; there is nothing to learn")
    states = torch.stack([getattr(r, field) for r in found])
    return states, torch.tensor([r.reward for r in found]), torch.tensor([r.group for r in found])


def main() -> None:
    args = parse_tts(["--head=", *sys.argv[1:]])
    with Sampler(args).running() as sampler:
        rollouts = sampler.sample(args.n, pruner=KeepAll(), confidence=False)
        grade(rollouts, sampler.prompts, sampler.tokenizer, sampler.grader)
    problems = random.Random(args.seed).sample(list(sampler.prompts), len(sampler.prompts))
    quarter = {problem: 4 * place // len(problems) for place, problem in enumerate(problems)}

    # Pruning and early stop score the states at L_detect, votes the last ones: it learns from both.
    taught = [rows([r for r in rollouts if quarter[r.group] < 2], field) for field in FIELDS]
    states, labels, _ = map(torch.cat, zip(*taught))
    head = QualityHead(states.shape[1], seed=args.seed)
    trainer = HeadTrainer(head, capacity=len(states), seed=args.seed)
    trainer.add(states, labels)
    losses = [trainer.train()["loss"] for _ in range(ROUNDS)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, on {len(states)} states")

    calibrators = []
    for field in FIELDS:
        states, labels, _ = rows([r for r in rollouts if quarter[r.group] == 2], field)
        calibrators.append(Calibrator(BINS, window=len(states)))
        calibrators[-1].label(head(states).sigmoid(), labels)
    for field in FIELDS:
        states, labels, groups = rows([r for r in rollouts if quarter[r.group] == 3], field)
        found = f"{len(labels)} answers to {len(groups.unique())} held-out problems, {labels.mean():.1%} right"
        print(f"AUC within problems {within_group_auc(head(states).detach(), labels, groups):.3f} by {field} ({found})")
    Path(args.output).mkdir(parents=True, exist_ok=True)
    save_head(Path(args.output, "quality_head.safetensors"), head, *calibrators, args.detect_length)


if __name__ == "__main__":
    main()
