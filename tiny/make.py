"""Makes the embedded model: a small Qwen3 that works out sums and ends with `\\boxed{…}`; and measures it.

    python tiny/make.py --out tiny     # train from nothing and save
    python tiny/make.py --measure      # the table of README.md, on held-out sums

The model is a base model: no chat template, no BOS. A prompt is a problem and a newline, a response is one of three
ways to answer, which the demonstrations mix at random (`way_shares`):

    careful   25-13=12     hasty   25-13+39-4      guess   \\boxed{47}
              12+39=51             25-13+39-4=47
              51-4=47              \\boxed{47}
              \\boxed{47}

Careful does one operation a line and is mostly right. Hasty restates the sum, then does three operations a line, and
its demonstrations are themselves often wrong. A guess is nearly always wrong, and is over before a quality head looks.
So a trainer has something to discover (work it out in steps), and a head has something to see.

Making the committed weights took 1,550 s (1,240 s to learn, 310 s to mix) on 2 cores of an AMD EPYC, fp32, while other
work kept the same cores busy; measuring them, 228 s. Where cores are shared, OMP_WAIT_POLICY=PASSIVE helps a lot.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from quality_head import HeadTrainer, QualityHead  # noqa: E402
from support.data import Problem, sums  # noqa: E402  (the repository is flat, and this script lives one folder down)
from support.metrics import auc, within_group_auc  # noqa: E402

SEED = 0
TERMS, LARGEST = (3, 10), 15
BATCH, LEARNING_RATE, WARM_UP = 64, 2e-3, 50
MEAN_TOKENS = 48  # of a demonstration
LEARN_STEPS, MIX_STEPS = 1050, 300  # first learn to work sums out, at a constant rate; then the mixture, as it decays
PAD, EOS, UNKNOWN, BOX = "<pad>", "<eos>", "<unk>", "\\boxed{"
CHARACTERS = "\n 0123456789+-*/=?().,{}"
WAYS, LEARN_SHARES = ("careful", "hasty", "guess"), (0.70, 0.25, 0.05)
HASTY_SLIP = 0.5  # of the results of hasty lines are off


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and one for `\\boxed{`; decoding gives back the exact text."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, BOX, *CHARACTERS])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(BOX, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """0.8M parameters, fp32, tied embeddings as in Qwen3-1.7B; the vocabulary is padded to 64 rows."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def way_shares(terms: int) -> tuple[float, float, float]:
    """How often a sum of so many terms is answered (carefully, hastily, by a guess): the longer, the less patience.

    Short sums are nearly always worked out and long ones seldom, so that all-1 and all-0 groups both occur.
    """
    ease = (TERMS[1] - terms) / (TERMS[1] - TERMS[0])
    careful, guess = 0.18 + 0.76 * ease**1.4, 0.20 * (1 - ease)
    return careful, 1 - careful - guess, guess


def demonstrate(problem: Problem, way: str, rng: random.Random) -> str:
    """A response to `problem` in the given way, without the end token."""
    parts = re.findall(r"[+-]?\d+", problem.text)
    if way == "guess":
        return f"{BOX}{problem.answer}}}"
    stride, total, lines = (1, int(parts[0]), []) if way == "careful" else (3, int(parts[0]), ["".join(parts)])
    for i in range(1, len(parts), stride):
        chunk = parts[i : i + stride]
        result = total + sum(map(int, chunk))
        if way == "hasty" and rng.random() < HASTY_SLIP:
            result += rng.choice((-1, 1)) * rng.randint(1, 10)
        lines.append(f"{total}{''.join(chunk)}={result}")
        total = result
    return "\n".join([*lines, f"{BOX}{total}}}"])


def batches(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int, mixed: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (ids, labels), int64 (BATCH, T), right-padded, labels -100 on prompt and padding.

    Ways are drawn by `way_shares` where `mixed`, else by LEARN_SHARES. Lengths are alike in a batch, to save padding.
    """
    rng, pool = random.Random(seed), 16 * BATCH
    problems = sums(steps * BATCH // 2 + pool, seed, "train", TERMS, LARGEST)
    queue: list[list[tuple[list[int], int]]] = []
    for _ in range(steps):
        if not queue:
            rows = []
            for problem in rng.sample(problems, pool):
                shares = way_shares(len(re.findall(r"\d+", problem.text))) if mixed else LEARN_SHARES
                prompt = tokenizer.encode(problem.text + "\n")
                response = tokenizer.encode(demonstrate(problem, rng.choices(WAYS, shares)[0], rng))
                rows.append((prompt + response + [tokenizer.eos_token_id], len(prompt)))
            rows.sort(key=lambda row: len(row[0]))
            queue = [rows[i : i + BATCH] for i in range(0, pool, BATCH)]
            rng.shuffle(queue)
        rows = queue.pop()
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows])
        labels = torch.tensor([[-100] * n + ids[n:] + [-100] * (width - len(ids)) for ids, n in rows])
        yield ids, labels


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, optimizer: torch.optim.AdamW, mixed: bool
) -> None:
    """One stage of supervised training, in place: the first warms up and stays, the second (`mixed`) decays to zero.

    The second divides its loss by a constant: rows of a batch are alike in length, so a mean over each batch would
    weigh the tokens of guesses several times those of other answers, and the shares would not come out as drawn.
    """
    steps = MIX_STEPS if mixed else LEARN_STEPS
    data = batches(tokenizer, steps, SEED + 1 + mixed, mixed)
    bar = tqdm(data, total=steps, desc="mix" if mixed else "learn", unit="step", mininterval=5)
    for step, (ids, labels) in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * ((1 - step / steps) if mixed else min(1.0, (step + 1) / WARM_UP))
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        loss = loss / (BATCH * MEAN_TOKENS if mixed else (labels != -100).sum())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


@dataclass
class Sample:
    """One sampled response: the prompt it answers, its ids (end token included), its way, and whether it is right."""

    group: int
    prompt: list[int]
    response: list[int]
    way: str
    right: bool


def judge(problem: Problem, text: str) -> tuple[str, bool]:
    """(way, right) of a response; the answer is what stands in its last box, compared as an integer."""
    boxes = re.findall(r"\\boxed\{(-?\d+)\}", text)
    first = text.split("\n")[0]
    way = "guess" if first.startswith(BOX) else "hasty" if "=" not in first else "careful"
    return way, bool(boxes) and int(boxes[-1]) == int(problem.answer)


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    group_size: int,
    greedy: bool = False,
    batch: int = 512,
) -> list[Sample]:
    """`group_size` responses to each problem, at temperature 1 and top-p 1 (or greedy), in batches of like prompts."""
    prompts = [tokenizer.encode(problem.text + "\n") for problem in problems]
    order = sorted((g for g in range(len(problems)) for _ in range(group_size)), key=lambda g: len(prompts[g]))
    found: list[Sample] = []
    for start in tqdm(range(0, len(order), batch), desc="greedy" if greedy else "sample", unit="batch"):
        groups = order[start : start + batch]
        width = max(len(prompts[g]) for g in groups)
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompts[g])) + prompts[g] for g in groups])
        out = model.generate(
            input_ids=ids,
            attention_mask=(ids != tokenizer.pad_token_id).long(),
            max_new_tokens=160,
            **({"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}),
        )
        for g, row in zip(groups, out[:, width:].tolist()):
            response = row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row
            text = tokenizer.decode(response, skip_special_tokens=True)
            found.append(Sample(g, prompts[g], response, *judge(problems[g], text)))
    return found


@torch.no_grad()
def states(model: Qwen3ForCausalLM, samples: list[Sample], index: int) -> Tensor:
    """(N, H) fp32: for each sample, the final-norm state that produced its token number `index` (1 is the first)."""
    rows = []
    for start in range(0, len(samples), 1024):
        part = samples[start : start + 1024]
        cut = [s.prompt + s.response[: index - 1] for s in part]
        ids = torch.tensor([c + [0] * (max(map(len, cut)) - len(c)) for c in cut])
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        rows.append(hidden[torch.arange(len(part)), torch.tensor([len(c) - 1 for c in cut])])
    return torch.cat(rows)


def head_auc(model: Qwen3ForCausalLM, fit: list[Sample], held_out: list[Sample], index: int) -> tuple[float, float]:
    """(global, within groups) AUC on `held_out` of a quality head on the state at token `index`, fitted to `fit`."""
    fit, held_out = ([s for s in samples if len(s.response) >= index] for samples in (fit, held_out))
    trainer = HeadTrainer(QualityHead(model.config.hidden_size, seed=SEED), passes=10, capacity=len(fit), seed=SEED)
    trainer.add(states(model, fit, index), torch.tensor([s.right for s in fit]))
    for _ in range(5):  # a call is cut at 32 minibatches
        trainer.train()
    with torch.no_grad():
        scores = trainer.head(states(model, held_out, index))
    right, group = torch.tensor([s.right for s in held_out]), torch.tensor([s.group for s in held_out])
    return auc(scores, right), within_group_auc(scores, right, group)


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: int = 128, group_size: int = 16
) -> None:
    """Prints the table: accuracies, ways, lengths, groups, and the AUC of a head at several L_detect; Markdown."""
    torch.manual_seed(SEED)
    test, started = sums(prompts, SEED + 1, "test", TERMS, LARGEST), time.time()
    drawn, best = sample(model, tokenizer, test, group_size), sample(model, tokenizer, test, 1, greedy=True)
    fit = sample(model, tokenizer, sums(2 * prompts, SEED + 2, "train", TERMS, LARGEST), group_size)
    rate, lengths = (lambda some: sum(s.right for s in some) / max(1, len(some))), [len(s.response) for s in drawn]
    groups = [[s for s in drawn if s.group == g] for g in range(prompts)]
    ruler = "|---|---|---|---|---|"
    print(f"\n| {prompts} held-out sums, G = {group_size} | share | accuracy | mean tokens | min–max |\n{ruler}")
    by_way = [(way, [s for s in drawn if s.way == way]) for way in WAYS]
    for name, some in [("temperature 1", drawn), ("greedy", best), *by_way]:
        n = [len(s.response) for s in some] or [0]
        share = len(some) / len(drawn) if name in WAYS else 1
        print(f"| {name} | {share:.1%} | {rate(some):.1%} | {sum(n) / len(n):.1f} | {min(n)}–{max(n)} |")
    for name, value in (("all-0", 0.0), ("all-1", 1.0)):
        print(f"| {name} groups | {sum(rate(g) == value for g in groups) / prompts:.1%} | | | |")
    print(f"\n| L_detect | share of mean length | rollouts that reach it | AUC, all | AUC, within groups |\n{ruler}")
    for index in (8, 10, 12, 14, 16, 20):
        reach, mean = sum(n >= index for n in lengths) / len(lengths), sum(lengths) / len(lengths)
        over_all, within = head_auc(model, fit, drawn, index)
        print(f"| {index} | {index / mean:.2f} | {reach:.1%} | {over_all:.3f} | {within:.3f} |")
    print()
    for n in range(TERMS[0], TERMS[1] + 1):
        some = [s for s in drawn if len(re.findall(r"\d+", test[s.group].text)) == n]
        ways = ", ".join(f"{way} {rate([s for s in some if s.way == way]):.1%}" for way in WAYS)
        print(f"- {n} terms: {rate(some):.1%} right; {ways}")
    print(f"\nmeasured in {time.time() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder of the model")
    parser.add_argument("--measure", action="store_true", help="measure the saved model instead of making it")
    args = parser.parse_args()
    if args.measure:
        measure(Qwen3ForCausalLM.from_pretrained(args.out).eval(), AutoTokenizer.from_pretrained(args.out))
        return
    torch.manual_seed(SEED)
    tokenizer, started = make_tokenizer(), time.time()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for mixed in (False, True):
        train(model, tokenizer, optimizer, mixed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, made in {time.time() - started:.0f} s, saved to {args.out}")


if __name__ == "__main__":
    main()
