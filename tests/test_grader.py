"""The grader: which answer counts, what it is worth, and that no answer can hurt another one or the run."""

from __future__ import annotations

import doctest
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import grader as module
from support.data import gold_text
from support.grader import Grader, GraderError, Verdict, extract_answer

TOWER = r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}"  # hangs sympy, in C
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=2, timeout=20.0) as shared:
        yield shared


def workers_of(parent: int) -> list[int]:
    """The grading workers that `parent` has started and that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"--grade-worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


# ------------------------------------------------------------------ which answer counts


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"So \boxed{5}. That is wrong; it is \boxed{7}", "7"),  # tinker-cookbook#895: 0.9.0 alone would make it {5, 7}
        (r"\boxed {5}", "5"),
        (r"\fbox{42}", "42"),
        (r"\\boxed{5}", "5"),
        (r"a\\\boxed{5}", "5"),
        (r"$\boxed{\frac{1}{\sqrt{2}}}$", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ 1, 2 \right\}}", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{ $5$ }", "5"),
        (r"\boxed{}", None),
        (r"\boxed{5", None),
        (r"\boxed{5} or \boxed{6", "5"),
        (r"\boxed{ {5}", None),
        (r"{ \boxed{5} and then text", "5"),
        ("Answer: 13", "13"),
        ("Answer: $13$", "13"),
        ("**Answer:** 13", "13"),
        ("**Answer**: 13.", "13"),
        ("**Answer: 13**", "13"),
        ("### Final Answer: $\\frac{1}{2}$.", r"\frac{1}{2}"),
        ("first\nAnswer: 12\nno, wait\nanswer: 13\nThat was it.", "13"),
        (r"Answer: \boxed{13}", "13"),
        (r"Answer: $\boxed{13}$", "13"),
        # The last commitment counts, in whichever form it comes.
        ("Answer: 12\nso \\boxed{13}\nAnswer: 14", "14"),
        ("Answer: 4\n\nno, wait: \\boxed{5}", "5"),
        ("First \\boxed{\\Delta E}. So the choice is\n\n**Answer: D**", "D"),
        ("\\boxed{41}\n#### 42", "42"),
        ("#### 41\nSo it is \\boxed{42}", "42"),
        ("#### 41\nAnswer: 42", "42"),
        ("\\boxed{5}\nAnswer:", "5"),
        ("\\boxed{5}\nAnswer: \\boxed{6", "5"),
        # GSM8K's line is an answer, a heading is not.
        ("6 times 7 is 42.\n#### 42", "42"),
        ("####42", "42"),
        ("#### $1,234.", "1,234"),
        ("#### **-3**", "-3"),
        (r"#### \frac{1}{2}", r"\frac{1}{2}"),
        ("#### x=5", "x=5"),
        ("### 42", None),
        ("\\boxed{5}\n#### Step 2: check it", "5"),
        ("\\boxed{5}\n#### 2. Verification", "5"),
        ("#### 步骤\nand so on", None),
        # boxes without braces
        (r"The answer is $\boxed 7$.", "7"),
        (r"\boxed7", "7"),
        (r"$\fbox 3$", "3"),
        (r"\boxed -3.", "-3"),
        (r"so $\boxed\frac{1}{2}$ is it", r"\frac{1}{2}"),
        (r"\(\boxed (1, 2)\)", "(1, 2)"),
        (r"\boxed\{1, 2\}", r"\{1, 2\}"),
        (r"(\boxed \sqrt{2})", r"\sqrt{2}"),
        (r"\boxed B.", "B"),
        (r"**\boxed 5**", "5"),
        (r"\boxed{\boxed 5}", "5"),
        (r"\boxed{5} is in \boxed format, with a \boxed.", "5"),
        # punctuation after the answer, inside the box; dots that stand for more are no punctuation
        (r"\boxed{3\sqrt{13}.}", r"3\sqrt{13}"),
        (r"\boxed{\frac{3}{4},}", r"\frac{3}{4}"),
        (r"\boxed{$5.$}", "5"),
        (r"\boxed{5\,;}", "5"),
        (r"\boxed{5!}", "5!"),
        (r"\boxed{1, 2, ...}", "1, 2, ..."),
        (r"Answer: \boxed{13", None),
        ("Answer:", None),
        ("I mention 42 here and there but commit to nothing", None),  # PrimeIntellect-ai/verifiers#1028
        ("The answer is 42.", None),
        ("", None),
        (r"<think> \boxed{1} </think> The result is \boxed{2}", "2"),
        (r"<think> \boxed{1} </think> The result is 2", None),
        (r"<think> perhaps \boxed{1}", None),
        (r"a </think> b \boxed{1} </think> Answer: 2", "2"),
    ],
)
def test_the_answer_that_a_response_commits_itself_to(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_a_box_counts_wherever_it_stands_and_however_long_it_is() -> None:
    """verl#7440: looking at the last 300 characters only cuts a long set off."""
    content = ", ".join(str(n) for n in range(1000, 1100))
    assert extract_answer(f"So \\boxed{{{content}}}. " + "And more words. " * 100) == content


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 40_000,
        "\\boxed{" * 20_000 + "}" * 20_000,
        "{" * 100_000 + "\\boxed{5}",
        "\\" * 200_000,
        "\\boxed" + " " * 200_000,
        "\\boxed5{a" * 40_000,
        "\\boxed (" * 40_000,
        "#" * 200_000 + "a b",
        "#### " + "\\a" * 100_000 + "bc",
        "\\boxed{" + ". " * 100_000 + "}",
        " " * 200_000 + "Answer",
        "Answer: " + "*" * 200_000 + "x",
        "answer" + " " * 200_000,
        "Answer:\n" * 40_000,
        "<think>" * 40_000,
    ],
)
def test_extraction_takes_linear_time(text: str) -> None:
    """Quadratic matching would take minutes here."""
    assert len(extract_answer(text) or "") < len(text)


# ------------------------------------------------------------------ what it is worth

CASES = [  # gold, response, whether it is right; most from public reports of graders that got them wrong
    ("840", r"therefore\boxed{840}., but let me check ... **Final Answer** \boxed{840}", True),
    ("004", r"\boxed{4}", True),
    ("033", r"\boxed{33}", True),
    ("1", r"It must be \boxed{1}. The reason why \boxed{1} is right: every other case fails.", True),
    ("2.5", r"\boxed{2\frac{1}{2}}", True),
    ("10", r"\boxed{4 10/3}", False),
    ("1331,1728", r"\boxed{1728, 1331}", True),
    ("n=2, 3, 4", r"\boxed{n=1, 2, 3}", False),
    (r"19, 46, \text{ and } 82", r"\boxed{21, 36, and 82}", False),
    (r"\pm 2021", r"\boxed{2021}", False),
    ("4", r"\boxed{4\sqrt(2)}", False),
    (r"y = -\frac{1}{2}x + \frac{3}{4}", r"\boxed{2x+4y-3=0}", True),
    ("34x+45y-20z+100=0", r"\boxed{-34x-45y+20z-100=0}", True),
    (r"28\%", r"\boxed{28 percent}", True),
    (r"7.41\%", r"\boxed{7.41\%}", True),
    ("e^{16} - 1", r"\boxed{-1 + e^{16}}", True),
    (r"\dfrac{9}{7}", r"\boxed{\frac{9}{7}}", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \frac{2\pi}{3})}", False),
    ("x<3", r"\boxed{(-\infty, 3)}", True),  # open-r1#557: only with the gold as the first argument
    (r"(1,\frac{9}{2})", r"\boxed{(1,4.5)}", True),
    (r"0.5 + \frac{\pi}{8}", r"\boxed{\pi \div 8 + 1 \div 2}", True),
    ("-2,1", r"\boxed{1,-2}", True),
    (r"\frac{1}{2}", r"\boxed{\frac12}", True),
    ("42", r"\fbox{42}", True),
    ("42", "There is a 42 in here, but nobody says that it is the result.", False),
    (r"\frac{1}{3}", r"<think> say \boxed{\frac{1}{3}} </think> Finally: \boxed{\frac{1}{2}}", False),
    ("E", r"\boxed{\text{E}}", True),
    ("5", r"Answer: \boxed{5}", True),
    ("13", "Answer: $13$", True),
    ("7", r"\boxed{1,2,3,4,5,6,7}", False),
    ("70", r"\boxed{70}", True),
    ("5", r"\boxed{}", False),
    ("5", r"\boxed{5", False),
    # Trinity-RFT#566, Skills#1074: one number in many dresses
    ("13", "Answer: 13", True),
    ("13", r"Answer: $\boxed{13}$", True),
    ("70.0", r"\boxed{70}", True),
    ("070", r"\boxed{70}", True),
    (" 70 ", r"\boxed{70}", True),
    ("$70$", r"\boxed{70}", True),
    ("70", r"\boxed{\frac{140}{2}}", True),
    ("70", r"\boxed{x = 70}", True),
    ("1234", r"\boxed{1,234}", True),
    ("1234567", r"\boxed{1{,}234{,}567}", True),
    ("10000", r"\boxed{10,\!000}", True),
    ("-3", r"\boxed{3}", False),
    ("0", r"\boxed{-0.00}", True),
    # huggingface/open-r1#566: a gold of bare LaTeX, right and wrong
    (r"\sqrt{17}", r"\boxed{17^{1/2}}", True),
    (r"\sqrt{17}", r"\boxed{\sqrt{19}}", False),
    (r"\dfrac{9}{7}", r"\boxed{\frac{7}{9}}", False),
    (r"\text{Evelyn}", r"\boxed{Evelyn}", True),
    (r"\text{Evelyn}", r"\boxed{\text{Joyce}}", False),
    # a gold as a program writes it, as a fifth of those of Minerva are; but 2e-1 may be LaTeX
    ("3.83e35", r"\boxed{3.83 \times 10^{35}}", True),
    ("3.83e35", r"\boxed{3.83e+35}", True),
    ("3.83e35", r"\boxed{3.83 \cdot 10^{35} \mathrm{~erg}}", True),
    ("3.83e35", r"\boxed{3.84 \times 10^{35}}", False),
    ("1e-5", r"\boxed{10^{-5}}", True),
    ("4.6e-24", r"\boxed{4.6 \times 10^{-24}}", True),
    ("4.6e-24", r"\boxed{4.6 \times 10^{-27}}", False),  # math-verify takes both for 0
    ("3.89e-10", r"\boxed{0.000000000389}", True),
    ("3.89e-10", r"\boxed{0.000000000255}", False),
    ("3.89e-10", r"\boxed{0.0}", False),
    ("0.0000001", r"\boxed{-0.0000001}", False),
    ("0.0", r"\boxed{0.00}", True),
    ("10^{400}", r"\boxed{100^{200}}", True),  # more than a float holds
    (r"\frac{1}{3000}", r"\boxed{0.000333}", True),
    ("5.3e3", r"\boxed{5300}", True),
    (r"5.3 \times 10^{3}", r"\boxed{5.3E3}", True),
    ("2e-1", r"\boxed{-1+2e}", True),
    ("2e-1", r"\boxed{0.2}", True),
    ("-1./3", r"\boxed{-\frac{1}{3}}", True),
    ("-1./3", r"\boxed{\frac{1}{3}}", False),
    ("np.arcsin(10/13)", r"\boxed{\arcsin{\frac{10}{13}}}", True),
    ("np.arcsin(10/13)", r"\boxed{\arccos{\frac{10}{13}}}", False),
    (r"$\boxed{204}$", r"\boxed{204}", True),
    (r"-2\pi", r"\boxed{-2*pi}", True),
    (r"\sin x", r"\boxed{sin(x)}", True),
    ("2e3", r"\boxed{3e2}", False),
    ("\\begin{cases", "Answer: \\begin{cases", True),  # not to be parsed: compared as text
    ("\\begin{cases", r"\boxed{5}", False),
]


def test_each_answer_gets_what_it_is_worth(grader: Grader) -> None:
    verdicts = grader.grade([text for _, text, _ in CASES], [gold for gold, _, _ in CASES])
    got = [(gold, text, verdict.reward) for (gold, text, _), verdict in zip(CASES, verdicts)]
    assert got == [(gold, text, float(right)) for gold, text, right in CASES]


SAME = [  # gold, then other spellings of it
    # A full stop in the box hit 98 of the 500 golds of MATH-500.
    ("3\\sqrt{13}", "3\\sqrt{13}.", "3\\sqrt{13},", "$3\\sqrt{13}.$", "3 \\sqrt {13} ;"),
    ("\\text{east}", "\\text{east}.", "east", "East."),
    ("(1,2)", "(1,2).", "\uff081\uff0c2\uff09", "\\left(1, 2\\right)", "\\bigl(1,2\\bigr)", "1,2"),
    # Unicode
    ("\\frac{1}{2}", "\u00bd", "1\u20442", "0.5", ".5", "1/2", "\\dfrac12", "\\frac{2}{4}", "50\\%"),
    ("\\frac{3}{2}", "1\u00bd", "1 1/2", "1\\frac{1}{2}", "1.50"),
    ("\\frac{\\sqrt{3}}{2}", "\u221a3/2", "\u221a(3)/2", "sqrt(3)/2", "\\sqrt3/2"),
    ("\\sqrt[3]{10}", "\u221b10", "10^{1/3}"),
    ("-3", "\u22123", "\u20133", "\uff0d\uff13"),
    ("8", "\uff18", "\U0001d7d6", "+8", "8.0"),
    ("x^2+1", "x\u00b2+1", "x**2 + 1", "1+x^{2}"),
    ("x_{1}^{10}", "x\u2081\u00b9\u2070"),
    ("10^{-3}", "10\u207b\u00b3", "0.001", "1e-3", "1\u00d710\u207b\u00b3"),
    ("90^\\circ", "90\u00b0", "90^{\\circ}", "90", "90 \\text{ degrees}"),
    ("2\\pi", "2\u03c0", "2*pi", "2 \\cdot \\pi"),
    ("x \\le 3", "x \u2264 3", "x <= 3", "x\\leq3", "3 \\ge x"),
    ("(-\\infty,0)\\cup[1,\\infty)", "(\u2212\u221e,0)\u222a[1,\u221e)"),
    ("1 \\pm \\sqrt{19}", "1 \u00b1 \u221a19", "1+\\sqrt{19}, 1-\\sqrt{19}"),
    ("1, 2, \\ldots, n", "1, 2, \u2026, n", "1,2,\\dots,n"),
    # letters, and the text of their options
    ("B", "(B)", "B) 12", "\\text{B}", "\\text{(B) 12}", "\\textbf{(B)}\\ 12", "\\mathrm{B.}\\ \\frac12", "Option B"),
    ("\\text{(C)}", "C", "C.", "C: x^2", "\\textbf{(C) }\\frac{1}{2}"),
    ("12", "(B) 12", "\\textbf{(B)}\\ 12", "B. 12"),
    # units, and indices that may be left out
    ("15\\mbox{ cm}^2", "15", "15\\text{ cm}^2", "15 \\text{ cm}^{2}", "15\\,\\mathrm{cm}^2", "15~\\text{square cm}"),
    ("2516_8", "2516_{8}", "2516", "(2516)_8", "2516_{\\text{eight}}"),
    ("1234567", "1,234,567", "1 234 567", "1\\,234\\,567", "1{,}234{,}567"),
    ("28\\%", "28", "0.28", "\\frac{7}{25}"),
    # what math-verify reads as something else
    ("m(\\gamma^2-1)", "(\\gamma^{2}-1)m", "m(\u03b3\u00b2-1)"),
    ("\\frac{1}{3} E_{1}+\\frac{2}{3} E_{2}", "\\frac{E_1+2E_2}{3}"),
    ("m \\frac{d v}{d t}+b v=f", "bv + m\\frac{dv}{dt} = f"),
    ("2+3i", "3i+2", "2+i\\cdot 3"),
    ("6", "2(3)", "3 \\binom{2}{1}"),
    ("\\lambda_{\\text{red}}", "\\lambda_{red}", "\\lambda_{\\mathrm{red}}"),
    # rounded to six places or more
    ("\\frac{1}{3}", "0.333333"),
    ("\\sqrt{2}", "1.4142136"),
    ("2,3", "3,2", "2, 2, 3", "x = 2 \\text{ or } x = 3"),
    ("(1.5, 0.5)", "1.5, 0.5", "(\\frac32, \\frac12)"),
]


def test_one_answer_in_many_spellings(grader: Grader) -> None:
    pairs = [(gold, text) for gold, *texts in SAME for text in texts]
    verdicts = grader.grade([f"\\boxed{{{text}}}" for _, text in pairs], [gold for gold, _ in pairs])
    assert [pair for pair, verdict in zip(pairs, verdicts) if verdict.kind != "right"] == []


APART = [  # gold, then what is not equal to it
    # math-verify rounds decimals to 6 places and other numbers to 15.
    ("\\frac{1}{3}", "\\frac{333333}{1000000}", "0.3333333333333333334", "0.33333"),
    ("0.1234567", "0.1234568", "\\frac{1234568}{10000000}"),
    ("1000000.1", "1000000.1000001"),
    ("1", "0.9999999", "1 + 10^{-20}", "\\frac{10^{40}+1}{10^{40}}"),
    ("0", "10^{-20}", "0.0000001"),
    ("10^{30}+1", "10^{30}", "10^{30}+2"),
    ("\\sqrt{2}", "\\sqrt{2}+10^{-20}", "1.4142135"),
    ("\\frac{2^{2005}+1}{3 \\cdot 2^{2006}}", "\\frac{1}{3 \\cdot 2^{2006}}", "\\frac{1}{6}"),
    ("\\frac{1}{2004!}", "\\frac{1}{2006!}"),
    ("2.88e-19", "2.89e-19"),
    ("x=\\frac13", "x=\\frac{333333333333333333}{10^{18}}"),
    ("x<\\frac13", "x<\\frac{333333333333333333}{10^{18}}"),
    ("(\\frac13, 2)", "(0.3333333, 2)", "(\\frac{33333333}{10^8}, 2)"),
    ("\\begin{pmatrix} 1/3 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 0.3333333 \\\\ 2 \\end{pmatrix}"),
    # It drops the base of a number, the power of a unit, dots, primes and the indices of e, E and I.
    ("10_2", "10_3", "10_{3}", "(10)_3"),
    ("15\\mbox{ cm}^2", "15\\mbox{ cm}^3", "15 \\text{ cm}^{3}"),
    ("1, 2, \\ldots, n", "1, 3, 5, \\ldots, 2n-1"),
    ("1, 2, 3", "1, 2, 3, \\ldots", "1, 2, 3, ..."),
    ("y'", "y", "y''"),
    ("x_1", "x_2", "x", "x_{11}"),
    (
        "\\frac{1}{3} E_{1}+\\frac{2}{3} E_{2}",
        "\\frac{1}{3} E_{2}+\\frac{2}{3} E_{2}",
        "\\frac{2}{3} E_{1}+\\frac{1}{3} E_{2}",
    ),
    ("I_1", "I_2"),
    ("\\gamma^2-1", "\\gamma^2-2"),
    ("m \\frac{d v}{d t}+b v=f", "2m \\frac{d v}{d t}+b v=f"),
    # It adds what stands side by side, and finds a number in what it cannot read.
    ("7", "3 4", "7 of 9 or 3 of 4"),
    ("5", "2(3)", "4\\binom{1}{1}"),
    ("45", "30^\\circ 15'"),
    ("12", "D. 13", "1 2", "(A) 12, (B) 13"),
    ("12 \\text{ h } 30 \\text{ min}", "12 \\text{ h } 45 \\text{ min}"),
    ("n=\\text{even}", "n=\\text{odd}"),
    # letters
    ("C", "D. 12", "\\textbf{(B)}\\ C", "B, C", "(C) or (D)"),
    # sets, tuples, intervals
    ("(1,2)", "(2,1)", "[1,2]", "(1,2]", "\\{1,2\\}", "2,1"),
    ("\\{1,2,3\\}", "(1,2,3)"),
    ("(1,2,3)", "(3,2,1)", "\\{1,2,3\\}"),
    ("16,3,1,1", "16,3,3,1", "16,3,1"),
    ("x \\le 3", "x < 3", "x \\ge 3"),
    ("x=5", "y=5", "x=-5"),
    ("\\sqrt{x^2}", "x"),
]


def test_what_differs_is_never_right(grader: Grader) -> None:
    """A false right is what a policy learns to write."""
    pairs = [(gold, text) for gold, *texts in APART for text in texts]
    verdicts = grader.grade([f"\\boxed{{{text}}}" for _, text in pairs], [gold for gold, _ in pairs])
    assert [pair for pair, verdict in zip(pairs, verdicts) if verdict.kind != "wrong"] == []


@given(st.integers(1, 10**25), st.integers(2, 10**25), st.integers(0, 30))
@settings(max_examples=50, deadline=None)
def test_numbers_are_equal_exactly_when_their_values_are(grader: Grader, top: int, bottom: int, places: int) -> None:
    scaled = f"\\frac{{{7 * top}}}{{{7 * bottom}}}"
    near = f"\\frac{{{7 * top * 10**places + 1}}}{{{7 * bottom * 10**places}}}"
    decimal, other = (f"{top + step}.{bottom}{step}" for step in (0, 1))
    pairs = [(f"{top}/{bottom}", scaled), (f"{top}/{bottom}", near), (decimal, f"{decimal}0"), (decimal, f"{decimal}1")]
    assert grader.equivalent(pairs) == [True, False, True, False]


def test_the_kinds_of_verdict_and_their_rewards(grader: Grader) -> None:
    """miles#2800: no gold is no fault of the response, so no label."""
    texts, golds = [r"\boxed{5}", r"\boxed{6}", "5", r"\boxed{5}", r"\boxed{5}"], ["5", "5", "5", "", " "]
    kinds = ["right", "wrong", "no answer", "bad gold", "bad gold"]
    verdicts = grader.grade(texts, golds)
    assert [v.kind for v in verdicts] == kinds and [v.reward for v in verdicts] == [1.0, 0.0, 0.0, None, None]
    assert [v.answer for v in verdicts] == ["5", "6", None, "5", "5"]
    assert Verdict("timeout", "5").reward is None


@pytest.mark.parametrize(
    "cell, column, text",
    [
        (["$2$"], "final_answer", "$2$"),
        (["2", "3"], "final_answer", ""),
        ([], "final_answer", ""),
        ([None], "final_answer", ""),
        (float("nan"), "answer", ""),
        (27, "answer", "27"),
        (27.0, "answer", "27"),
        (3.83e35, "answer", "3.83e+35"),
        ("So it is $\\boxed{204}$.", "answer", "204"),
        ("So it is 204.", "solution", ""),
        ("\\boxed{204", "answer", ""),
    ],
)
def test_a_gold_cell_as_text(cell: object, column: str, text: str) -> None:
    """Skills#1074: what a data set holds need not be a string. A float as large as 3.83e35 is no exact integer."""
    assert gold_text(cell, column) == text == gold_text(text)


def test_nothing_is_dropped_from_a_batch_and_lengths_must_agree(grader: Grader) -> None:
    """verl#78: the denominator of an accuracy is the number of responses."""
    assert len(grader.grade([r"\boxed{5}"] * 5, ["5"] * 5)) == 5 and grader.grade([], []) == []
    with pytest.raises(ValueError):
        grader.grade([r"\boxed{5}"] * 2, ["5"])


DRESSES = ["{}", "${}$", " {} ", "{}.0", "{}.", "\\({}\\)"]


@given(st.integers(-(10**30), 10**30), st.integers(-2, 2), st.sampled_from(DRESSES), st.sampled_from(DRESSES))
@settings(max_examples=100, deadline=None)
def test_integers_are_equal_exactly_when_their_values_are(number: int, off: int, gold: str, given_as: str) -> None:
    with Grader() as fast:
        text = f"\\boxed{{{given_as.format(number + off)}}}"
        verdict, grouped = fast.grade([text, f"\\boxed{{{number:,}}}"], [gold.format(number), str(number)])
    assert verdict.kind == ("wrong" if off else "right") and grouped.kind == "right"


def test_equivalence_has_a_direction(grader: Grader) -> None:
    """open-r1#557: the gold goes first. What is empty equals nothing, and integers need no mathematics."""
    interval = r"(-\infty, 3)"
    cases = {
        ("x<3", interval): True,
        (interval, "x<3"): False,
        ("0.5", r"\frac12"): True,
        (r"\frac12", "0.3"): False,
        ("1234", "1,234"): True,
        ("7", "8"): False,
        ("$x$", " x "): True,
        ("\\begin{cases", "5"): False,
        ("", "5"): False,
        ("5", ""): False,
        ("", ""): False,
    }
    pairs = [*cases, *cases]
    assert dict(zip(pairs, grader.equivalent(pairs))) == cases and grader.equivalent([]) == []


def test_an_answer_that_hangs_is_asked_once_and_equals_nothing_else() -> None:
    """With m others it would cost its bound 2m times. Its neighbours are compared all the same."""
    tower, half, same = f"{TOWER}+0", r"\frac12", "0.5"
    with Grader(workers=1, timeout=2.0) as single:
        single.grade([r"\boxed{0.5}"], ["1/2"])
        pairs = [(TOWER, tower), (tower, half), (TOWER, half), (same, TOWER), (same, half), (TOWER, f"${TOWER}$")]
        assert single.equivalent(pairs) == [False, False, False, False, True, True]


def test_a_thousand_integers_start_no_worker() -> None:
    """Nor do golds of a hundred thousand digits, which int() refuses, and answers too long to be one."""
    huge = "7" * 100_000
    texts = [f"\\boxed{{{n}}}" for n in [*range(1000), huge, huge, "x" + huge]]
    with Grader() as fast:
        started = set(workers_of(os.getpid()))
        verdicts = fast.grade(texts, [f"{n:03d}" for n in range(1000)] + [huge, "7", "x"])
        assert set(workers_of(os.getpid())) == started
    assert [v.kind for v in verdicts] == ["right"] * 1001 + ["wrong"] * 2


# ------------------------------------------------------------------ workers


def test_a_hostile_answer_costs_its_own_bound_and_nothing_else() -> None:
    """Math-Verify#65: math-verify's own time-out does not stop it. Neighbours are graded, before it and after it."""
    texts = [r"\boxed{\frac12}", f"\\boxed{{{TOWER}}}", r"\boxed{0.5}", f"\\boxed{{{TOWER}}}", r"\boxed{\frac13}"]
    with Grader(workers=1, timeout=2.0) as single:
        single.grade([r"\boxed{0.5}"], ["1/2"])
        verdicts = single.grade(texts, [r"\frac{2}{4}", "1", r"\frac{2}{4}", "1", r"\frac{2}{4}"])
        assert [v.kind for v in verdicts] == ["right", "timeout", "right", "timeout", "wrong"]
    assert verdicts[1].reward is None


def test_grading_from_threads(grader: Grader) -> None:
    """Math-Verify#22: math-verify works in the main thread only, and raises elsewhere."""

    def graded(n: int) -> float | None:
        return grader.grade([f"\\boxed{{\\frac{{{n}}}{{7}}}}"], [f"{2 * n}/14"])[0].reward

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(graded, range(1, 9))) == [1.0] * 8


def test_a_worker_that_is_killed_is_replaced_and_ctrl_c_kills_none() -> None:
    """Ctrl-C in a terminal reaches the workers too; what to do then is for the parent to say."""
    with Grader(timeout=20.0) as single:
        before = set(workers_of(os.getpid()))
        assert single.grade([r"\boxed{0.5}"], ["1/2"])[0].kind == "right"
        (worker,) = set(workers_of(os.getpid())) - before
        os.kill(worker, signal.SIGINT)
        assert single.grade([r"\boxed{0.25}"], ["1/4"])[0].kind == "right" and runs(worker)
        os.kill(worker, signal.SIGKILL)
        assert single.grade([r"\boxed{0.75}"], ["3/4"])[0].kind == "right" and not runs(worker)


def test_workers_have_a_memory_bound_and_the_parent_has_none_from_them() -> None:
    with Grader(timeout=20.0, memory_mb=777) as single:
        before = set(workers_of(os.getpid()))
        single.grade([r"\boxed{0.5}"], ["1/2"])
        (worker,) = set(workers_of(os.getpid())) - before
        assert resource.prlimit(worker, resource.RLIMIT_AS) == (777 << 20, 777 << 20)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 777 << 20


def test_workers_that_cannot_work_are_an_error_and_no_reward() -> None:
    """miles#2800: here there is too little memory to load math-verify; a machine without it is the same."""
    with Grader(memory_mb=60) as broken, pytest.raises(GraderError, match="workers keep dying"):
        broken.grade([r"\boxed{0.5}"], ["1/2"])


def test_closing_leaves_no_worker_not_even_a_busy_one() -> None:
    grader = Grader(workers=2, timeout=60.0)
    before = set(workers_of(os.getpid()))
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(grader.grade, [r"\boxed{0.5}", f"\\boxed{{{TOWER}}}"], ["1/2", "1"])
        assert wait_for(lambda: len(set(workers_of(os.getpid())) - before) == 2)
        started = set(workers_of(os.getpid())) - before
        grader.close()
        with pytest.raises(RuntimeError):
            hanging.result()
    grader.close()
    assert not any(runs(worker) for worker in started)
    with pytest.raises(RuntimeError):
        grader.grade([r"\boxed{0.5}"], ["1/2"])


def test_workers_die_with_a_parent_that_is_killed() -> None:
    """Both the idle one, whose input ends, and the busy one, which reads none."""
    program = (
        "from support import grader\n"
        "judge = grader.Grader(workers=2, timeout=3.0)\n"
        r"print(judge.grade([r'\boxed{0.5}', r'\boxed{0.25}'], ['1/2', '1/4'])[0].kind, flush=True)" + "\n"
        f"judge.grade([r'\\boxed{{{TOWER}}}'], ['1'])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"right\n"
    assert wait_for(lambda: len(workers_of(parent.pid)) == 2)
    workers = workers_of(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for(lambda: not any(runs(worker) for worker in workers))


def test_a_script_that_grades_is_not_run_again_by_its_workers(tmp_path: Path) -> None:
    """multiprocessing's spawn imports the main script once more in every child."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from support import grader\n"
        "print('run')\n"
        r"print(grader.Grader().grade([r'\boxed{0.5}'], ['1/2'])[0].kind)" + "\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["run", "right"] and not done.stderr


def test_doctests_of_the_module() -> None:
    assert doctest.testmod(module).failed == 0
