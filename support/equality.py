"""Whether two answers are equal: math-verify's judgement, made exact.

The grader's workers run this file as a script, so it imports nothing of this repository.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import resource
import signal
import sys

if __name__ == "__main__":
    # Before the imports below, which take a second. Ctrl-C reaches all processes; the parent cleans up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints is no reply.
    REPLIES = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from sympy import Basic, Eq, Expr, FiniteSet, Interval, MatrixBase, Mul, Rational, Symbol, Tuple
from sympy.concrete.expr_with_limits import ExprWithLimits

# `B`, `(B)`, `\text{B. } 12`, `\textbf{(B)}\ 12`: a letter alone, or before its option's text
_LETTER = re.compile(r"\\(?:text|math)[a-z]*\s*\{\s*\(?([A-J])[).:]?\s*\}")
_OPTION = re.compile(
    r"(?:\\text\s*\{)?\s*(?:(?i:option|choice)\s*)?\(*([A-J])(?:[).:]+(?:\\(?:[ ,;:!]|q?quad)|[\s~}])*(.*)|\}?)"
)
_SEVERAL = re.compile(r"\b[A-J][).:]|(?:,|/|&|\band|\bor)\s*\(?[A-J]\b")

# A value before its unit; the unit's exponent and a number's base, which math-verify does not read
_UNIT = re.compile(
    r"(?P<value>.*(?:\d|\\pi|π).*?)"
    r"(?P<unit>(?:(?:\\[ ,;:!]|[\s~])*\\(?:text[a-z]*|mbox|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*(?:\d|\{\d\}))?)+)"
)
_BASE = re.compile(r"(?<=[\d)])\s*_\s*(?:\{\s*)?(\d+)")
_SIDE_BY_SIDE = re.compile(r"(?<![\w.^\\])(?<!frac )(?<!binom )\d+(?:\^\{?\\circ\}?)? +\d")

# Numbers and functions as programs write them, which a fifth of Minerva's golds are
_PROGRAM = [
    (r"(?<![\w.\\])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([+-]?)0*([0-9]{1,4})(?![\w.])", r"\1 \\times 10^{\2\3}"),
    (r"(?<=[0-9])\.(?![0-9.\\])", ""),
    (r"\*\*", "^"),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"(?<![A-Za-z\\])(?:np\.|math\.)?(pi|theta|arc(?:sin|cos|tan)|sin|cos|tan|ln|log|exp)(?![A-Za-z{])", r"\\\1 "),
]
# LaTeX that latex2sympy cannot read, or reads as something else
_LATEX = [
    (r"~|\\[bB]igg?[lrm]?(?![a-zA-Z])|\\(?:left|right)(?![a-zA-Z])\.?", " "),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\varnothing", r"\\emptyset"),
    (r"\((\d+)\)(?=\s*_)", r"\1"),
    (r"(?<!\d)_ *\{ *\\(?:(?:text|math|mbox)[a-z]* *(\{) *)?([A-Za-z]+) *(?(1)\} *)\}", r"_{\2}"),
    # It drops dots, primes and the indices of e, E and I, and takes gamma for a function.
    (r"\\[lc]?dots(?![a-z])|\.\.\.", r"\\mathfrak{o}"),
    (r"(?<=[A-Za-z)}'])'", r"^{\\prime}"),
    (r"\\gamma(?![a-zA-Z])", r"\\mathfrak{g}"),
    # It takes the derivative of a symbol by another for 0.
    (r"\\frac *\{ *d((?:[^{}]|\{[^{}]*\})*)\} *\{ *d *(?=\\?[a-zA-Z])", r"\\frac{\\mathfrak{dn}\1}{\\mathfrak{dt} "),
    (r"((?<!\\)[EI]|(?<![A-Za-z\\])e)(?=\s*_)", r"\\mathfrak{\1}"),
    # It adds an integer to the fraction after it: true of 1 1/4, not of 2(3).
    (r"(?<![\w.^\\])(\d+) +(\d+) */ *(\d+)", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w.^\\])(\d+|\(\d+\)) *(?=\(|\\[dt]?binom)", r"\1\\cdot "),
    # It takes for a unit all that follows a text.
    (r"(?<!^)\\(?:text[a-z]*|mbox)\s*\{(?!\s*(?:and|or)\s*\})\W*(\w*)[^{}]*\}", r"\\mathfrak{t\1}"),
]


def equivalent(gold: str, answer: str) -> bool:
    """Whether `answer` is right by `gold`. Not symmetric: x<3 may be answered by its interval."""
    wanted, chosen = _option(gold), _option(answer)
    if wanted and chosen:
        return wanted[0] == chosen[0]
    (gold, *marks), (answer, *others) = _split(gold), _split(chosen[1] or answer if chosen else answer)
    if any(mark and other and mark != other for mark, other in zip(marks, others)):
        return False
    # As LaTeX first: `2e-1` may be Euler's number less one. But 2e3 is not 3e2.
    numbers = all(re.search(_PROGRAM[0][0], text) for text in (gold, answer))
    for rules in (_PROGRAM + _LATEX,) if numbers else (_LATEX, _PROGRAM + _LATEX):
        texts = [functools.reduce(lambda text, rule: re.sub(*rule, text), rules, text) for text in (gold, answer)]
        if len({re.sub(r" (?!\w)|(?<!\w) ", "", text) for text in texts}) == 1:
            return True
        # The last letter may be a unit.
        for units in (False, True):
            config = NormalizationConfig(units=units, malformed_operators=True, nits=True, boxed="none")
            try:
                if _equal(*(normalize_latex(text, config) for text in texts)):
                    return True
            except MemoryError:
                raise
            # Parsers and sympy raise anything on what a model writes.
            except Exception:
                continue
    return False


def _option(text: str) -> tuple[str, str] | None:
    """Letter and text of an option of a multiple choice, or None."""
    match = _OPTION.fullmatch(_LETTER.sub(r"(\1)", text))
    if match is None or _SEVERAL.search(rest := match[2] or ""):
        return None
    return match[1], rest.removesuffix("}") if rest.count("{") < rest.count("}") else rest


def _split(text: str) -> tuple[str, list[str], list[str]]:
    """The text without its unit, the digits in the unit, and the bases of numbers."""
    match = _UNIT.fullmatch(text)
    value, unit = match.group("value", "unit") if match else (text, "")
    return value, re.findall(r"\d", unit), sorted(_BASE.findall(value))


@functools.lru_cache(64)
def _parse(text: str) -> Basic:
    """Normalized LaTeX as sympy has it, with decimals as exact fractions. Raises anything."""
    if _SIDE_BY_SIDE.search(text):
        raise ValueError("two numbers side by side are neither a sum nor a product")
    value = latex2sympy(text, is_real=True, normalization_config=None)
    exact = {number: Rational(str(number)) for number in value.atoms(sympy.Float)}
    # A word is a product of its letters.
    word = isinstance(value, Mul) and all(factor == sympy.E or isinstance(factor, Symbol) for factor in value.args)
    if not word and not value.has(sympy.Sum, sympy.Product):
        exact[Symbol("i", real=True)] = sympy.I
    parsed = value.xreplace(exact)
    if hasattr(value, "_unsorted_args"):
        # math-verify compares (1,2) with 1,2 in the order of writing.
        parsed._unsorted_args = [element.xreplace(exact) for element in value._unsorted_args]
    if parsed.has(sympy.nan, sympy.zoo):
        raise ValueError("not a number")
    return parsed


@functools.lru_cache(64)
def _equal(gold: str, answer: str) -> bool:
    """Whether math-verify takes the two for equal and they are not apart. Raises anything."""
    first, second = _parse(gold), _parse(answer)
    for text, mine, other in ((gold, first, second), (answer, second, first)):
        if _rounds(text, other):
            return True
        if isinstance(mine, FiniteSet) and text.lstrip().startswith("\\{") and isinstance(other, (Interval, Tuple)):
            return False
    return not _apart(first, second) and verify(
        first, second, numeric_precision=50, timeout_seconds=None, raise_on_error=True
    )


def _rounds(text: str, value: Basic) -> bool:
    """Whether `text` is a decimal of six places or more that rounds a number which is no decimal."""
    match = re.fullmatch(r"[+-]?[0-9]*\.([0-9]{6,300})", text)
    if not match or not getattr(value, "is_number", False) or value.is_Rational and 10**300 % value.q == 0:
        return False
    gap = abs(value - Rational(text)).evalf()
    return bool(gap < Rational(1, 2 * 10 ** len(match[1])) and gap < abs(value) / 100)


def _apart(first: Basic, second: Basic) -> bool:
    """Whether the two differ for certain: math-verify rounds to 6 or 15 places, or to 0.

    Symbols get arbitrary values. Elements of sets and tuples are compared in any order.
    """
    if isinstance(first, Eq) and isinstance(second, Eq) and first.lhs == second.lhs:
        first, second = first.rhs, second.rhs
    elif isinstance(first, Eq) != isinstance(second, Eq):
        first, second = (value.rhs if isinstance(value, Eq) else value for value in (first, second))
    if all(isinstance(value, (FiniteSet, Interval, MatrixBase, Tuple)) for value in (first, second)):
        elements, rest = _elements(first), _elements(second)
        if len(rest) != len(elements):
            # 2,2,3 may answer 2,3, but not the reverse.
            return len(rest) < len(elements)
        for element in elements:
            partner = next((n for n, other in enumerate(rest) if not _apart(element, other)), None)
            if partner is None:
                return True
            del rest[partner]
        return False
    if first == second or not isinstance(first, Expr) or not isinstance(second, Expr):
        return False
    difference = first - second
    if Symbol in (type(first), type(second)) or difference.has(sympy.UnevaluatedExpr, ExprWithLimits):
        return False
    values = {s: Rational(int.from_bytes(s.name.encode()) % 997 + 1009, 613) for s in difference.free_symbols}
    parts = difference.evalf(15, subs=values, maxn=200).as_real_imag()
    if any(value.is_Float and value._prec > 1 and value != 0 for value in parts):
        return True
    exact = difference if values else difference.doit()
    return bool(exact.is_Rational and exact != 0)


def _elements(value: Basic) -> list[Basic]:
    """The elements of a set, a tuple or a matrix as written, or the ends of an interval."""
    if isinstance(value, MatrixBase):
        return value.flat()
    if isinstance(value, Interval):
        return [value.start, value.end]
    return list(getattr(value, "_unsorted_args", value.args))


def serve(memory_mb: int) -> None:
    """A worker's life, which ends with its stdin or with its parent."""
    # PR_SET_PDEATHSIG: a busy worker reads no stdin, and a forked sibling may hold it open.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    works = equivalent("\\frac{1}{2}", "0.5")
    print("ready" if works else "math-verify cannot tell that 1/2 is 0.5", file=REPLIES)
    for line in sys.stdin.buffer:
        try:
            reply = "right" if equivalent(*json.loads(line)) else "wrong"
        except MemoryError:
            reply = "memory"
        print(reply, file=REPLIES)


if __name__ == "__main__":
    serve(int(sys.argv[2]))
