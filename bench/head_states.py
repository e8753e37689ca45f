"""Which state of a finished answer should the quality head score? AUC within problems, and accuracy of the rank vote, for each.

    python bench/head_states.py --model runs/NAME/checkpoint-20       flags of tts.py; about 3 minutes on 2 CPU cores

Samples the candidates as tts.py does, passes them through transformers for the states of all their tokens, and scores with the run's own head:
the state that produced the last token (which tts.py uses), the one at L_detect (the last one of shorter answers), the one that opened the last box, and
the mean score over the last ten tokens and over all.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tts
from support.args import parse_tts
from support.test_time import Sampler, accuracies, signal_quality

BOX = "\\boxed{"


def token_scores(sampler: Sampler, rollouts: list, batch: int = 128) -> list:
    """The head's logit of the state that produced each token, (tokens,) for each rollout."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sampler.args.model, dtype=torch.float32).eval()
    order = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].token_ids))
    scores: dict[int, torch.Tensor] = {}
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        ids = [torch.tensor(sampler.prompts[rollouts[i].group].token_ids + rollouts[i].token_ids) for i in rows]
        with torch.no_grad():  # padding on the right, which a causal model never looks at
            states = model.model(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)).last_hidden_state
            for row, i in enumerate(rows):
                prompt = len(sampler.prompts[rollouts[i].group].token_ids)
                scores[i] = sampler.head(states[row, prompt - 1 : len(ids[row]) - 1])
    return [scores[i] for i in range(len(rollouts))]


def box(tokenizer, token_ids: list[int]) -> int:
    """The number of the token that opens the last box; of the last token where there is none."""
    text = ""
    opened = len(token_ids) - 1
    for number, token in enumerate(token_ids):
        before, text = text.count(BOX), text + tokenizer.decode([token])
        if text.count(BOX) > before:
            opened = number
    return opened


def main() -> None:
    import torch

    args = parse_tts(sys.argv[1:])
    if not args.head:
        sys.exit("head_states.py: --head: name a quality_head.safetensors, or a checkpoint that has one as --model")
    with Sampler(args).running() as sampler:
        rollouts = sampler.sample(args.n)
        every = [candidates for candidates in sampler.judge(rollouts) if candidates.rollouts]
        scores = token_scores(sampler, rollouts)
        gap = max(
            abs(s[-1].item() - sampler.head(r.last_state[None]).item()) for s, r in zip(scores[:200], rollouts)
        )
        boxes = [box(sampler.tokenizer, rollout.token_ids) for rollout in rollouts]
    detect = args.detect_length - 1
    states = {
        "last token": [s[-1] for s in scores],
        "L_detect": [s[min(detect, len(s) - 1)] for s in scores],
        "opening of the box": [s[i] for s, i in zip(scores, boxes)],
        "mean of the last ten": [s[-10:].mean() for s in scores],
        "mean of all": [s.mean() for s in scores],
    }
    majority = accuracies(every, args.n, args.seed)["majority"]
    hard = [candidates for candidates, won in zip(every, majority) if not won]
    print(f"engine and transformers differ by at most {gap:.1e}; majority {statistics.fmean(majority):.3f}")
    print(f"{'state':22s}   AUC   within   within, where majority fails   ARRoL vote")
    for name, values in states.items():
        number = iter(torch.stack(values).tolist())
        for candidates in every:  # in the order of the rollouts
            candidates.signals = {"head": [next(number) for _ in candidates.rollouts]}
        quality = signal_quality(every)["head"]
        won = [tts.winners(c.classes, c.signals)["ARRoL"] in c.right for c in every]
        cells = [*quality.values(), signal_quality(hard)["head"]["auc_within"] if hard else None]
        shown = [float("nan") if cell is None else cell for cell in cells]
        print(f"{name:22s}   {shown[0]:.3f}   {shown[1]:.3f}   {shown[2]:28.3f}   {statistics.fmean(won):10.3f}")


if __name__ == "__main__":
    main()
