"""Evaluation sets and verdicts: every row counts, and what is wrong with one is said with its place and column."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine import Rollout
from support import data
from support.data import Problem, Prompt
from support.evaluation import ENDINGS, KNOWN, OPENINGS, contaminated, grade, load_benchmark
from support.grader import Grader

ROWS = [  # in the forms of AIME, Minerva and OlympiadBench
    {"problem": "What is $1+1$?", "answer": "002"},
    {"problem": "How many ergs are in a joule?", "answer": "1e7"},
    {"problem": "Solve $x^2=2$ for $x>0$.", "answer": "$\\sqrt{2}$"},
]


def write(path: Path, rows: list[dict[str, object]]) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs(spec: str) -> list[tuple[str, str]]:
    return [(problem.text, problem.answer) for problem in load_benchmark(spec, "--data").problems]


# ------------------------------------------------------------------ what is loaded


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_every_row_is_kept_in_its_order_with_its_duplicates(tmp_path: Path, ending: str) -> None:
    """verl#78: the denominator is the number of rows in the set. Training data would lose the last two here."""
    rows = [*ROWS, {"problem": "What is $1+1$?", "answer": "3"}, ROWS[0]]
    benchmark = load_benchmark(write(tmp_path / f"mine.{ending}", rows), "--data")
    assert [(p.text, p.answer) for p in benchmark.problems] == [(row["problem"], row["answer"]) for row in rows]
    assert [p.id for p in benchmark.problems] == [f"mine:{n}" for n in range(1, 6)]
    assert (benchmark.name, benchmark.metric) == ("mine", "avg") and "problem and answer" in benchmark.source


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "row, answer",
    [
        ({"id": 60, "problem": "1+1?", "solution": "\\boxed{2}"}, "2"),
        ({"problem": "1+1?", "solution": "Not \\boxed{3}, so it is $\\boxed{2}$.", "answer": "2"}, "2"),
        ({"question": "1+1?", "answer": 2.0}, "2"),
        ({"question": "1+1?", "answer": 0.5}, "0.5"),
        ({"question": "1+1?", "solution": ["Count."], "final_answer": ["$2$"]}, "$2$"),
        ({"question": "1+1?", "answer": "One and one.\n#### 2"}, "2"),
        ({"Problem": "1+1?", "Answer": 2}, "2"),
        ({"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}, "2"),
    ],
)
def test_the_columns_of_the_usual_sets_are_understood(
    tmp_path: Path, ending: str, row: dict[str, object], answer: str
) -> None:
    assert pairs(write(tmp_path / f"rows.{ending}", [row, row])) == [("1+1?", answer)] * 2


def test_a_file_with_a_byte_order_mark_blank_lines_and_line_separators(tmp_path: Path) -> None:
    """declare-lab/flan-alpaca#5: and the file:line of a message counts the blank lines."""
    path = tmp_path / "rows.jsonl"
    good = '\ufeff{"problem": "a\u2028b", "answer": "1"}\r\n\n{"problem": "c", "answer": "2"}\n'
    path.write_bytes(good.encode())
    assert pairs(str(path)) == [("a\u2028b", "1"), ("c", "2")]
    for bad, message in (('{"problem": "d", "ans', "bad JSON"), ('{"problem": "d", "answer": null}', "column answer")):
        path.write_bytes((good + bad).encode())
        with pytest.raises(ValueError, match=f"^--data .*rows.jsonl:4: .*{message}"):
            load_benchmark(str(path), "--data")


def test_a_known_set_comes_from_the_hub_or_from_a_local_copy_and_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder goes the way of a hub id. lighteval#631: equal digests say that two scores are on the same problems."""
    (tmp_path / "hub").mkdir()
    write(tmp_path / "hub" / "test.jsonl", ROWS)
    monkeypatch.setitem(KNOWN, "amc23", (str(tmp_path / "hub"), "test", 3, "pass@16"))
    hub = load_benchmark("amc23", "--data")
    copy = load_benchmark(f"amc23={write(tmp_path / 'copy.parquet', ROWS)}", "--data")
    assert (hub.name, hub.metric) == (copy.name, copy.metric) == ("amc23", "pass@16")
    assert hub.problems == copy.problems and hub.digest == copy.digest
    assert len(hub.digest) == 12 and int(hub.digest, 16) >= 0
    with pytest.raises(ValueError, match="^--data .*copy.jsonl: 2 rows, where amc23 has 3; "):
        load_benchmark(f"amc23={write(tmp_path / 'copy.jsonl', ROWS[:2])}", "--data")
    monkeypatch.setitem(KNOWN, "amc23", (str(tmp_path / "hub"), "validation", 3, "pass@16"))
    with pytest.raises(ValueError, match="^--data .*: .*split: validation.*; .*amc23=FILE"):
        load_benchmark("amc23", "--data")


def test_the_digest_changes_with_every_text_answer_and_order(tmp_path: Path) -> None:
    versions = [
        ROWS,
        ROWS[::-1],
        ROWS[:2],
        [*ROWS[:2], ROWS[2] | {"answer": "1"}],
        [*ROWS[:2], ROWS[2] | {"problem": "x"}],
    ]
    digests = [load_benchmark(write(tmp_path / "rows.jsonl", rows), "--data").digest for rows in versions]
    assert len(set(digests)) == len(versions)
    assert load_benchmark(write(tmp_path / "rows.jsonl", ROWS), "--data").digest == digests[0]


def test_the_paper_s_sets_and_their_headline_metrics() -> None:
    """Sec. 5.1, App. A.2: average accuracy on the large sets, pass@16 on AMC and AIME."""
    assert {name: known[2:] for name, known in KNOWN.items()} == {
        "math500": (500, "avg"),
        "minerva": (272, "avg"),
        "olympiadbench": (674, "avg"),
        "amc23": (40, "pass@16"),
        "aime24": (30, "pass@16"),
        "aime25": (30, "pass@16"),
    }


def test_sums_are_the_ones_that_training_holds_out() -> None:
    benchmark = load_benchmark("sums", "--data")
    assert benchmark.problems == data.sums(200, 0, "test") and (benchmark.name, benchmark.metric) == ("sums", "avg")
    assert load_benchmark("sums:2-3:20", "--data", 30).problems == data.sums(30, 0, "test", (2, 3), 20)
    few = load_benchmark("sums:2-2:9", "--data").problems
    assert few == data.sums(len(data.load("sums:2-2:9")[0]) // 10, 0, "test", (2, 2), 9)
    assert contaminated(benchmark.problems, data.load("sums")[0]) == []


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "column, cell",
    [
        ("answer", None),
        ("answer", "  "),
        ("answer", "nan"),
        ("answer", float("nan")),
        ("answer", float("inf")),
        ("answer", True),
        ("answer", ["1", "2"]),
        ("answer", []),
        ("answer", "\\boxed{1"),
        ("answer", "\\text{Proof}"),
        ("answer", "N/A"),
        ("answer", '{"ground_truth": "1'),
        ("problem", None),
        ("problem", " "),
        ("problem", 7),
        ("problem", '[{"role": "user", "content": "a'),
    ],
)
def test_a_bad_cell_is_named_with_its_row_and_column(tmp_path: Path, ending: str, column: str, cell: object) -> None:
    """Skills#1074: in training such a row is dropped; here, a score with one problem less would pass for the set's."""
    good, bad = {"problem": "a", "answer": "1"}, {"problem": "b", "answer": "2"} | {column: cell}
    rows = [bad, bad] if ending == "parquet" else [good, bad]  # a column of parquet has one type
    place = r"rows.parquet \(row 1\)" if ending == "parquet" else "rows.jsonl:2"
    with pytest.raises(ValueError, match=f"^--eval-data .*{place}: .*column {column}, which holds .*; ") as caught:
        load_benchmark(write(tmp_path / f"rows.{ending}", rows), "--eval-data")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("math50", "math50: neither a known set nor a file nor sums; write one of math500, .*sums"),
        ("mine=rows.jsonl", "mine=rows.jsonl: no set is known as 'mine'; write one of math500, "),
        ("amc23=rows", "amc23=rows: neither a known set nor a file nor sums; "),
        ("amc23=missing.jsonl", "missing.jsonl: No such file, or not a readable one; name a file"),
        ("missing.parquet", "missing.parquet: No such file, or not a readable one; name a file"),
        ("rows.csv", "rows.csv: not a .*file; convert it"),
        ("empty.jsonl", "empty.jsonl: there is no problem in it; "),
        ("text.jsonl", "text.jsonl:1: no problem or no answer among the columns .*; "),
        ("bad.parquet", "bad.parquet: .*not a parquet file.*; write "),
        ("sums:3-2:9", "sums:3-2:9: write sums, or sums:2-3:20 "),
        ("sums:1-1:1", "sums:1-1:1: there is no problem in it; "),
        ("sums:2-2:6", "sums:2-2:6: only 2 of 3 .*; ask for larger numbers"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("problem,answer\n")
    Path("empty.jsonl").write_text("\n")
    Path("bad.parquet").write_text("not parquet")
    write(Path("text.jsonl"), [{"text": "a", "label": "1"}])
    with pytest.raises(ValueError, match=f"^--data {message}") as caught:
        load_benchmark(spec, "--data")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ contamination


def test_a_training_problem_is_found_in_another_layout_and_no_other_problem_is() -> None:
    """DAPO-Math-17k holds a fifth of AMC 2023, most of it with other dollar signs, braces and line ends."""
    ask = "Solve the following math problem step by step. The last line of your response should be Answer: $Answer\n\n"
    end = '\n\nRemember to put your answer on its own line after "Answer:".'
    training = [
        Problem("1", f"{ask}How many complex numbers satisfy $z^{{5}} = \\overline{{z}}$?{end}", "7"),
        Problem("2", "Find the roots of\n$$z^4 - z^2 + 1 = 0.$$", "1"),
        Problem("3", "A game:\n- one  move\n- then another", "1"),
    ]
    tested = [
        Problem("a", "How many complex numbers satisfy  \n\\[z^5=\\overline z\\]?", "7"),
        Problem("b", "Find the roots of $z^4 + z^2 + 1 = 0$.", "1"),
        Problem("c", "A game:\n\u2022 one move\n\u2022 then another.", "1"),
        Problem("d", "Find the roots of $z^4 - z^2 + 11 = 0$.", "1"),
    ]
    assert [problem.id for problem in contaminated(tested, training)] == ["a", "c"]
    assert contaminated(tested, []) == [] == contaminated([], training)


# ------------------------------------------------------------------ verdicts


def character_tokenizer(*markers: str, special: bool = False) -> PreTrainedTokenizerFast:
    """One token a character, `<eos>`, which is special, and `markers`, which may be."""
    vocabulary = ["<eos>", *markers, *(chr(code) for code in range(32, 127)), "\n", "\u25c1", "\u25b7"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(marker, special=special, normalized=False) for marker in markers])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def test_verdicts_come_by_group_in_order_and_pruned_rollouts_get_none() -> None:
    tokenizer = character_tokenizer("<think>")

    def rollout(group: int, text: str, finish: str = "stop") -> Rollout:
        ends = [tokenizer.eos_token_id] if finish == "stop" else []
        return Rollout(group, token_ids=tokenizer(text)["input_ids"] + ends, finish=finish)

    prompts = {
        7: Prompt(Problem("a", "1+1=?", "2"), tokenizer("1+1=?\n")["input_ids"]),
        3: Prompt(Problem("b", "1+2=?", "3"), tokenizer("1+2=?\n<think>\n")["input_ids"]),  # opened by the template
    }
    rollouts = [
        rollout(7, "\\boxed{2}"),
        rollout(3, "say \\boxed{3}"),  # a thought that was never ended
        rollout(7, "\\boxed{2}", "pruned"),
        rollout(3, "say \\boxed{2}</think>\\boxed{3}"),
        rollout(7, "\\boxed{3}", "length"),
        rollout(7, "well", "length"),
    ]
    with Grader() as grader:
        grade(rollouts, prompts, tokenizer, grader)
        grade([], prompts, tokenizer, grader)
        (alone,) = rollouts[2:3]
        grade([alone], prompts, tokenizer, grader)
    assert [r.verdict for r in rollouts] == ["right", "no answer", None, "right", "wrong", "no answer"]
    assert [r.reward for r in rollouts] == [1.0, 0.0, None, 1.0, 0.0, 0.0]
    assert [r.answer for r in rollouts] == ["2", None, None, "3", "3", None]
    assert rollouts[0].tail == "\\boxed{2}<eos>" and rollouts[2].tail == "\\boxed{2}"


@pytest.mark.parametrize("token", ["special", "added", "none"])
@pytest.mark.parametrize("opening, ending", list(zip(OPENINGS, ENDINGS)))
def test_what_is_thought_is_no_answer_whatever_its_markers_are(opening: str, ending: str, token: str) -> None:
    """Special tokens vanish in decoding: right answers became "no answer", unfinished thoughts "right"."""
    markers = () if token == "none" else (opening, ending)
    tokenizer = character_tokenizer(*markers, special=token == "special")
    plain, opened = (
        Prompt(Problem("a", "1+1=?", "2"), tokenizer(text)["input_ids"]) for text in ("?\n", f"?{opening}\n")
    )
    thought = "maybe \\boxed{3} or \\boxed{2}"
    cases = [
        (plain, f"{opening}{thought}{ending}\\boxed{{2}}", "right"),
        (opened, f"{thought}{ending}\\boxed{{2}}", "right"),
        (plain, f"{opening}{thought}", "no answer"),
        (opened, thought, "no answer"),
        (plain, f"{opening}{thought}{ending}so", "no answer"),
        (plain, f"{opening}\\boxed{{2}}{ending}\\boxed{{3}}", "wrong"),
        (plain, thought, "right"),
    ]
    rollouts = [
        Rollout(i, token_ids=tokenizer(text)["input_ids"], finish="stop") for i, (_, text, _) in enumerate(cases)
    ]
    with Grader() as grader:
        grade(rollouts, {i: prompt for i, (prompt, _, _) in enumerate(cases)}, tokenizer, grader)
    assert [rollout.verdict for rollout in rollouts] == [verdict for _, _, verdict in cases]


def test_the_tail_is_of_the_text_with_its_special_tokens_however_long(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer("0123456789" * 500)["input_ids"] + [tokenizer.eos_token_id]
    rollout = Rollout(0, token_ids=ids, finish="pruned")
    with Grader() as grader:
        grade([rollout], {0: Prompt(Problem("a", "1+1=?", "2"), ids[:3])}, tokenizer, grader)
    assert rollout.tail == tokenizer.decode(ids)[-200:] and rollout.tail.endswith("789<eos>")
