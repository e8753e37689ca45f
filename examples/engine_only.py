"""vLLM without a trainer: read hidden states at a token, stop some requests there, keep what they have.

    python examples/engine_only.py --model Qwen/Qwen3-0.6B-Base --prompt "Name a prime: " --token 32

Of samples whose states at token `--token` are nearly alike, one goes on. Any other rule that looks
at states fits into `StopAlike.decide`, which `Engine` calls before the next token is computed.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from engine import Decision, Engine, Sampling


class StopAlike:
    """Stops a sample whose state has a cosine above `limit` to that of a sibling that goes on."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.kept: dict[int, list[Tensor]] = defaultdict(list)

    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        """states: (N, hidden), as fed to lm_head; groups, samples: prompt and number of each."""
        decisions = []
        for state, group in zip(F.normalize(states), groups, strict=True):
            alike = max((float(state @ other) for other in self.kept[group]), default=0.0)
            if alike <= self.limit:
                self.kept[group].append(state)
            decisions.append(Decision(keep=alike <= self.limit, score=round(alike, 2)))
        return decisions


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "tiny"), help="folder or hub id")
    parser.add_argument("--prompt", nargs="+", default=["12+7-3=?\n", "9+9+9-4+1=?\n"], help="taken as it is")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--token", type=int, default=10, help="response token whose state is read")
    parser.add_argument("--limit", type=float, default=0.95, help="cosine above which a sample is stopped")
    parser.add_argument("--max-length", type=int, default=256, help="tokens of prompt and response")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    prompts = dict(enumerate(tokenizer(args.prompt)["input_ids"]))
    sampling = Sampling(args.max_length, (tokenizer.eos_token_id,))
    engine = Engine(args.model, args.token, args.max_length, dtype=dtype, vocabulary=len(tokenizer))
    for r in engine.generate(prompts, args.samples, sampling, seed=0, pruner=StopAlike(args.limit)):
        print(r.group, r.sample, r.finish, len(r.token_ids), r.score, repr(tokenizer.decode(r.token_ids)), sep="\t")
    engine.close()
