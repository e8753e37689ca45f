"""One group of 16 rollouts from prompt to gradient, with the functions that train, in the paper's order.

    python examples/tour.py        about a minute on 2 cores; prints the group as a table, draws tour.png

The embedded model works out sums. Its quality head learns for a few rounds first: without that, all
posteriors are alike. Then one group is sampled and pruned at L_detect = 10 tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support import launch
from support.args import parse

import torch
from torch import Tensor

from arrol import Pruner
from calibration import Settings, bin_index, draw_bernoulli, survival_probability, tilt_group
from engine import Decision, Rollout, Sampling
from grpo import Sample, group_advantages, pad, token_objective
from support.evaluation import grade
from support.pictures import plot_rollouts
from support.report import rollout_rows

GROUP_SIZE, DETECT, ROUNDS, PROMPTS = 16, 10, 6, 24


class Guide:
    """What `Pruner.decide` does at L_detect, one function after the other, with everything noted."""

    def __init__(self, pruner: Pruner) -> None:
        self.pruner, self.generator = pruner, torch.Generator().manual_seed(1)
        self.notes: dict[int, dict[str, float]] = {}

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
        columns = {"bin": bins, "tilt": tilt, "keep": keep}
        for row, sample in enumerate(samples):
            self.notes[sample] = {name: values[row].item() for name, values in columns.items()}
        return [Decision(*row) for row in zip(keep.tolist(), scores.tolist(), q.tolist(), p.tolist(), strict=True)]


def sample(parts: launch.Parts, first: int, count: int, hook: Pruner | Guide) -> list[Rollout]:
    """Graded rollouts of `count` prompts, from prompt number `first` on."""
    prompts = {number: parts.prompts[number] for number in range(first, first + count)}
    sampling = Sampling(256, tuple(parts.stop_token_ids))
    ids = {number: prompt.token_ids for number, prompt in prompts.items()}
    rollouts = parts.engine.generate(ids, GROUP_SIZE, sampling, pruner=hook, seed=first, last_states=True)
    grade(rollouts, prompts, parts.tokenizer, parts.grader)
    return rollouts


def print_table(rollouts: list[Rollout], notes: dict[int, dict[str, float]]) -> None:
    """A line for each rollout; those that ended before L_detect have no score."""
    print("  #  tokens   s'  bin    q    tilt     p  fate      verdict    A")
    for r in rollouts:
        scored = " " * 31
        if r.score is not None:
            note = notes[r.sample]
            scored = f"{r.score:5.2f} {note['bin']:4d} {r.posterior:5.2f} {note['tilt']:+6.2f} {r.survival:6.2f}"
        advantage = "" if r.advantage is None else f"{r.advantage:+.2f}"
        print(f"{r.sample:3d} {len(r.token_ids):6d} {scored}  {r.finish:8s}  {r.verdict or '':9s}  {advantage}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("tour.png"), help="the picture")
    output = parser.parse_args().output
    flags = ["--detect-length", str(DETECT), "--kv-cache-gb", "0.25", "--eval-problems", "0", "--eval-data"]
    args = parse(flags)
    with launch.open_parts(args) as parts:
        learner = launch.make_learner(args, parts.device)
        hidden_size = learner.policy.model.config.hidden_size
        pruner = Pruner(hidden_size, GROUP_SIZE, Settings(), cold_start=ROUNDS, bins=32)
        for step in range(ROUNDS):
            pruner.begin(step + 1)
            learnt = pruner.learn(sample(parts, step * PROMPTS, PROMPTS, pruner))
        print(f"head: loss {learnt['head_loss']:.3f} after {ROUNDS * PROMPTS * GROUP_SIZE} rollouts")

        number, guide = ROUNDS * PROMPTS, Guide(pruner)
        rollouts, prompt = sample(parts, number, 1, guide), parts.prompts[number]
        survivors = [r for r in rollouts if r.reward is not None]
        rewards = torch.tensor([r.reward for r in survivors])
        advantages = group_advantages(rewards, torch.full((len(survivors),), number))  # A (Sec. 3)
        for r, advantage in zip(survivors, advantages.tolist(), strict=True):
            r.advantage = advantage
        print(f"\n{prompt.problem.text} (answer {prompt.problem.answer}), L_detect {DETECT}, κ = 0.5\n")
        print_table(rollouts, guide.notes)

        batch = [Sample(prompt.token_ids, r.token_ids, r.advantage, r.logprobs) for r in survivors]
        logprobs, _ = learner.policy(*pad(batch))
        lengths = torch.tensor([len(s.response_ids) for s in batch])
        per_token = advantages.repeat_interleave(lengths)
        loss, *_ = token_objective(logprobs, logprobs.detach(), per_token, 0.2, 0.2)  # Sec. 3
        weights = (1 / lengths).repeat_interleave(lengths) / len(batch)
        (loss * weights).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(learner.policy.parameters(), float("inf"))
        gap = (logprobs - torch.tensor([p for s in batch for p in s.sampler_logprobs])).abs().max()
        print(
            f"\npositive ratio of the survivors {rewards.mean():.2f}; |log-prob of sampler - trainer| up to {gap:.1e}"
        )
        print(f"loss {(loss * weights).sum().item():.4f}, norm of its gradient {float(norm):.3f}")
        plot_rollouts(rollout_rows(0, {number: prompt}, rollouts), DETECT, output)
        print(f"picture: {output}")


if __name__ == "__main__":
    main()
