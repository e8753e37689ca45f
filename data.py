"""Data sets in, prompts out; and the grader."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem: a stable `id` (unique within its set), its text and its gold answer."""

    id: str
    text: str
    answer: str


def sums(count: int, seed: int, split: str = "train", terms: tuple[int, int] = (3, 10), largest: int = 15) -> list[Problem]:
    """`count` different sums such as `25-13+39=?`, each with its answer; the same for the same arguments.

    `split` is "train" or "test": a tenth of all sums, chosen by a hash of their text, is held out of training.
    """
    rng, found = random.Random(f"sums-{seed}-{split}"), {}
    for _ in range(1000 * count):
        if len(found) == count:
            break
        numbers = [rng.randint(1, largest) for _ in range(rng.randint(*terms))]
        signs = [rng.choice("+-") for _ in numbers[1:]]
        text = str(numbers[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, numbers[1:])) + "=?"
        held_out = zlib.crc32(text.encode()) % 10 == 0
        if held_out == (split == "test") and text not in found:
            total = numbers[0] + sum(n if s == "+" else -n for s, n in zip(signs, numbers[1:]))
            found[text] = Problem(text, text, str(total))
    if len(found) < count:
        raise ValueError(f"only {len(found)} of {count} different sums of {terms} terms up to {largest} exist in the {split} split")
    return list(found.values())
