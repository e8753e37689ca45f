"""One group of 16 rollouts from prompt to gradient, with the functions that train, in the paper's order.

    python examples/tour.py        about a minute on 2 cores; prints the group as a table, draws tour.png

The quality head learns first. Of eight groups the one is shown whose posteriors differ most.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support import launch

# isort: split
import torch
from torch import Tensor

from arrol import Pruner
from calibration import Settings, bin_index, draw_bernoulli, survival_probability, tilt_group
from engine import Decision, Rollout, Sampling
from grpo import Sample, group_advantages, pad, token_objective
from support.args import parse
from support.evaluation import grade
from support.report import plot_rollouts, rollout_rows

GROUP_SIZE, ROUNDS, PROMPTS, GROUPS = 16, 6, 24, 8


class Guide:
    """What `Pruner.decide` does at L_detect, one function after the other, with everything noted."""

    def __init__(self, pruner: Pruner) -> None:
        self.pruner, self.generator = pruner, torch.Generator().manual_seed(1)
        self.notes: dict[tuple[int, int], dict[str, float]] = {}

    @torch.no_grad()
    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        calibrator, settings = self.pruner.calibrator, self.pruner.settings
        scores = self.pruner.head(states).sigmoid()  # s' (Sec. 4.2)
        bins = bin_index(scores, calibrator.bins)  # b (App. A.4)
        q = calibrator.posterior(scores)  # q (Eq. 1)
        tilt = tilt_group(q, torch.tensor(groups), settings)  # towards rho (Lemma 4.1)
        bias = calibrator.bias(settings)  # delta: E[p] = kappa (App. A.4)
        p = survival_probability(tilt, bias, settings)  # p (Eq. 2)
        keep = draw_bernoulli(p, self.generator)
        for row, key in enumerate(zip(groups, samples, strict=True)):
            self.notes[key] = {"bin": bins[row].item(), "tilt": tilt[row].item()}
        return [Decision(*row) for row in zip(keep.tolist(), scores.tolist(), q.tolist(), p.tolist(), strict=True)]


def sample(parts: launch.Parts, first: int, count: int, hook: Pruner | Guide) -> list[Rollout]:
    """Graded rollouts of `count` prompts, from prompt number `first` on."""
    prompts = {number: parts.prompts[number] for number in range(first, first + count)}
    ids = {number: prompt.token_ids for number, prompt in prompts.items()}
    sampling = Sampling(256, tuple(parts.stop_token_ids))
    rollouts = parts.engine.generate(ids, GROUP_SIZE, sampling, pruner=hook, seed=first, last_states=True)
    grade(rollouts, prompts, parts.tokenizer, parts.grader)
    return rollouts


def print_table(rollouts: list[Rollout], notes: dict[tuple[int, int], dict[str, float]]) -> None:
    """A line for each rollout; those that ended before L_detect have no score."""
    print("  #  tokens   s'  bin    q    tilt     p  fate      verdict    A")
    for r in rollouts:
        scored = " " * 31
        if r.score is not None:
            note = notes[r.group, r.sample]
            scored = f"{r.score:5.2f} {note['bin']:4d} {r.posterior:5.2f} {note['tilt']:+6.2f} {r.survival:6.2f}"
        advantage = "" if r.advantage is None else f"{r.advantage:+.2f}"
        print(f"{r.sample:3d} {len(r.token_ids):6d} {scored}  {r.finish:8s}  {r.verdict or '':9s}  {advantage}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("tour.png"), help="the picture")
    output = parser.parse_args().output
    args = parse(["--eval-data"])
    with launch.open_parts(args) as parts:
        learner = launch.make_learner(args, parts.device, parts.engine.vocabulary)
        pruner = Pruner(learner.policy.model.config.hidden_size, GROUP_SIZE, Settings(), cold_start=ROUNDS, bins=32)
        for step in range(ROUNDS):
            pruner.begin(step + 1)
            learnt = pruner.learn(sample(parts, step * PROMPTS, PROMPTS, pruner))
        print(f"head: loss {learnt['head_loss']:.3f} after {ROUNDS * PROMPTS * GROUP_SIZE} rollouts")

        guide = Guide(pruner)
        groups = defaultdict(list)
        for r in sample(parts, ROUNDS * PROMPTS, GROUPS, guide):
            groups[r.group].append(r)
        number = max(groups, key=lambda group: statistics.pstdev(r.posterior for r in groups[group] if r.score))
        rollouts, prompt = groups[number], parts.prompts[number]
        survivors = [r for r in rollouts if r.reward is not None]
        rewards = torch.tensor([r.reward for r in survivors])
        advantages = group_advantages(rewards, torch.full((len(survivors),), number))  # A (Sec. 3)
        for r, advantage in zip(survivors, advantages.tolist(), strict=True):
            r.advantage = advantage
        print(f"\n{prompt.problem.text} (answer {prompt.problem.answer}), L_detect {args.detect_length}, κ = 0.5\n")
        print_table(rollouts, guide.notes)

        batch = [Sample(prompt.token_ids, r.token_ids, r.advantage, r.logprobs) for r in survivors]
        logprobs, _ = learner.policy(*pad(batch))
        lengths = torch.tensor([len(s.response_ids) for s in batch])
        loss, *_ = token_objective(logprobs, logprobs.detach(), advantages.repeat_interleave(lengths), 0.2, 0.2)
        weights = (1 / lengths).repeat_interleave(lengths) / len(batch)
        (loss * weights).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(learner.policy.parameters(), float("inf"))
        gap = (logprobs - torch.tensor([p for s in batch for p in s.sampler_logprobs])).abs().max()
        print(f"\npositive ratio of survivors {rewards.mean():.2f}, |sampler - trainer| up to {gap:.1e} nats")
        print(f"loss {(loss * weights).sum().item():.4f}, norm of its gradient {float(norm):.3f}")
        plot_rollouts(rollout_rows(ROUNDS, {number: prompt}, rollouts), args.detect_length, output)


if __name__ == "__main__":
    main()
