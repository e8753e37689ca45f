"""The states that produced the tokens of sampled answers, and which of them votes best.

    sampler = Sampler(parse_tts(["--model", "runs/NAME/checkpoint-20"]))
    with sampler.running() as sampler:
        rollouts = sampler.sample(16)
        problems = sampler.judge(rollouts)
        sample, logits = draw_sample(sampler, rollouts)

States come from a transformers pass over the finished answers. `bench.head` makes the tables.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import tts
from bench.tables import Estimate, estimate
from engine import Rollout
from support import metrics
from support.test_time import Candidates, Sampler

# Detection lengths, of the mean length.
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
# Samples per problem of the generations that are timed, and how often.
TIMED, REPEATS = 2, 3
# Rollouts that pass through the model at once.
BATCH = 128


@dataclass
class Sample:
    """Judged rollouts, and the states that produced their token L, or the last if shorter."""

    # L, or "last" -> (N, hidden) fp32
    states: dict[int | str, Tensor]
    # (N,) tokens; 0 or 1; problem
    lengths: Tensor
    labels: Tensor
    groups: Tensor
    # "confidence" (mean of H_t), "log-prob" (sum) -> L -> (N,) over the first L tokens
    signals: dict[str, dict[int, Tensor]]
    # the eight L, and the run's own
    detections: list[int]
    detect: int

    def reach(self, length: int) -> Tensor:
        """Which rollouts (N,) are scored at L: those that have not ended there."""
        return self.lengths > length


@torch.no_grad()
def token_states(sampler: Sampler, rollouts: Sequence[Rollout]) -> Iterator[tuple[int, Tensor]]:
    """Number of each rollout, and the states (tokens, hidden) that produced its tokens."""
    model = AutoModelForCausalLM.from_pretrained(sampler.args.model, dtype=torch.float32).eval()
    order = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].token_ids))
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        prompts = [sampler.prompts[rollouts[i].group].token_ids for i in rows]
        ids = [torch.tensor(prompt + rollouts[i].token_ids) for prompt, i in zip(prompts, rows)]
        # A causal model never looks at padding on the right.
        states = model.model(pad_sequence(ids, batch_first=True)).last_hidden_state
        for row, i in enumerate(rows):
            yield i, states[row, len(prompts[row]) - 1 : len(ids[row]) - 1]


@torch.no_grad()
def draw_sample(sampler: Sampler, rollouts: list[Rollout]) -> tuple[Sample, dict[str, list[float]]]:
    """The sample; and by state that is scored, the own head's logit of each rollout.

    rollouts: graded, with confidences; those without a verdict on them are not in the sample.
    """
    judged = [i for i, rollout in enumerate(rollouts) if rollout.reward is not None]
    lengths = torch.tensor([len(rollouts[i].token_ids) for i in judged])
    detections = sorted({max(1, round(f * lengths.double().mean().item())) for f in FRACTIONS})
    detect, positions = sampler.args.detect_length, [*detections, sampler.args.detect_length]
    picked: dict[int, Tensor] = {}
    logits: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(rollouts))
    for i, states in token_states(sampler, rollouts):
        picked[i] = torch.stack([*(states[min(length, len(states)) - 1] for length in positions), states[-1]])
        if sampler.head is not None:
            scores = sampler.head(states)
            logits["the one that produced the last token"][i] = scores[-1].item()
            logits["at L_detect"][i] = scores[min(detect, len(scores)) - 1].item()
            logits["the opening of the box"][i] = scores[box(sampler.tokenizer, rollouts[i].token_ids)].item()
            logits["mean score of the last ten tokens"][i] = scores[-10:].mean().item()
            logits["mean score of all tokens"][i] = scores.mean().item()

    def until(length: int, values: list[Sequence[float]]) -> Tensor:
        return torch.tensor([float(sum(v[:length])) for v in values], dtype=torch.float64)

    traces = [np.asarray(rollouts[i].confidences) for i in judged]
    logprobs = [rollouts[i].logprobs for i in judged]
    states = torch.stack([picked[i] for i in judged]).float().unbind(1)
    sample = Sample(
        states=dict(zip([*positions, "last"], states, strict=True)),
        lengths=lengths,
        labels=torch.tensor([rollouts[i].reward for i in judged]),
        groups=torch.tensor([rollouts[i].group for i in judged]),
        signals={
            "confidence": {length: until(length, traces) / lengths.clamp_max(length) for length in positions},
            "log-prob": {length: until(length, logprobs) for length in positions},
        },
        detections=detections,
        detect=detect,
    )
    return sample, logits


def box(tokenizer, token_ids: list[int]) -> int:
    """The number of the token that opens the last box; of the last token where there is none."""
    text, opened = "", len(token_ids) - 1
    for number, token in enumerate(token_ids):
        text += tokenizer.decode([token])
        if "\\boxed{" in text:
            text, opened = "", number
    return opened


def costs(sampler: Sampler, sample: Sample) -> dict[int, dict[str, float]]:
    """L -> who gets there, and the share of all tokens and of all generation time that it takes.

    Lengths are timed in turn: a machine that gets slower does so for all.
    """
    limits, shares = [*sample.detections, sampler.sampling.max_tokens], []
    prompts = {group: prompt.token_ids for group, prompt in sampler.prompts.items()}
    for _ in range(REPEATS):
        seconds = []
        for limit in limits:
            sampling, start = dataclasses.replace(sampler.sampling, max_tokens=limit), time.perf_counter()
            sampler.engine.generate(prompts, TIMED, sampling, seed=sampler.args.seed, rollout_seeds=True)
            seconds.append(time.perf_counter() - start)
        shares.append([one / seconds[-1] for one in seconds])
    return {
        length: {
            "reached": sample.reach(length).double().mean().item(),
            "tokens": (sample.lengths.clamp_max(length).sum() / sample.lengths.sum()).item(),
            "time": statistics.median(share),
        }
        for length, share in zip(sample.detections, zip(*shares))
    }


def scored_states(problems: list[Candidates], logits: dict[str, list[float]]) -> dict[str, dict[str, Estimate]]:
    """State that the own head scores -> AUC, and accuracy of the vote by ranks."""
    rows = {}
    for name, values in logits.items():
        # in the order of the rollouts
        number = iter(values)
        for one in problems:
            one.signals = {"head": [next(number) for _ in one.rollouts]}
        won = statistics.fmean(tts.winners(one.classes, one.signals)["ARRoL"] in one.right for one in problems)
        quality = signal_quality(problems)["head"]
        cells = {"AUC": quality["auc"], "within": quality["auc_within"], "ARRoL vote": won}
        rows[name] = {key: estimate([value]) for key, value in cells.items() if value is not None}
    return rows


def signal_quality(problems: Sequence[Candidates]) -> dict[str, dict[str, float | None]]:
    """How well each signal tells right candidates from wrong ones: AUC, and within problems.

    Candidates without an answer do not count. None where there is no pair to tell apart.
    """
    quality = {}
    for name in problems[0].signals:
        rows = [
            (value, rollout.verdict == "right", group)
            for group, one in enumerate(problems)
            for value, rollout, c in zip(one.signals[name], one.rollouts, one.classes)
            if c is not None
        ]
        values, right, groups = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
        found = {"auc": metrics.auc(values, right), "auc_within": metrics.within_group_auc(values, right, groups)}
        quality[name] = {key: None if math.isnan(value) else value for key, value in found.items()}
    return quality
