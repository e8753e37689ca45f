"""What the embedded model works out: sums such as `25-13+39=?`, made up on the spot."""

from __future__ import annotations

import random
import re
import zlib


def sums(
    count: int, seed: int, split: str = "train", terms: tuple[int, int] = (3, 10), largest: int = 15
) -> dict[str, str]:
    """`count` different sums, each with its answer, fixed by the arguments.

    `split` is "train" or "test": a tenth of all sums, by a hash of their text, is held out.
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
            found[text] = str(numbers[0] + sum(n if s == "+" else -n for s, n in zip(signs, numbers[1:])))
    if len(found) < count:
        place = f"sums:{terms[0]}-{terms[1]}:{largest}"
        raise ValueError(f"{place}: only {len(found)} of {count} are in the {split} split; ask for larger numbers")
    return found


def sums_range(source: str) -> tuple[tuple[int, int], int] | None:
    """(terms, largest) that `sums` or `sums:2-3:20` (2 to 3 numbers, up to 20) asks for; else None."""
    if source != "sums" and not source.startswith("sums:"):
        return None
    match = re.fullmatch(r"sums(?::([1-9][0-9]?)-([1-9][0-9]?):([1-9][0-9]{0,8}))?", source)
    low, high, largest = (int(n) for n in match.groups(default="0")) if match else (2, 1, 0)
    if low > high:
        raise ValueError(f"{source}: write sums, or sums:2-3:20 for 2 to 3 numbers of at most 20")
    return ((low, high), largest) if low else ((3, 10), 15)


def asked(source: str, split: str, most: int) -> dict[str, object] | None:
    """The arguments of `sums`, but the seed, that `source` asks for (see `sums_range`), or None.

    Half of the split's sums at most: to find the last few by drawing would take for ever.
    """
    if (wanted := sums_range(source)) is None:
        return None
    (low, high), largest = wanted
    existing = sum(largest**n * 2 ** (n - 1) for n in range(low, high + 1))
    count = min(most, existing // (20 if split == "test" else 2))
    return {"count": count, "split": split, "terms": (low, high), "largest": largest}
