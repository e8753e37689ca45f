"""Data sets in, prompts out: what real files and tokenizers do to a trainer that trusts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from support.args import INSTRUCTION, SamplingArgs
from support.data import Problem, load, stop_token_ids, sums, tokenize, unwrap
from tiny.sums import sums_range

DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def chat_row(text: str, answer: str, index: int = 0) -> dict[str, object]:
    """A row in the nested form of DAPO and verl."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": str(index)},
    }


def write(path: Path, rows: list[dict[str, object]]) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs(source: str) -> list[tuple[str, str]]:
    return [(problem.text, problem.answer) for problem in load(source)[0]]


# ------------------------------------------------------------------ the built-in sums


def test_sums_are_right_repeatable_and_held_out_ones_are_never_trained_on() -> None:
    train, test = sums(300, seed=1), sums(60, seed=2, split="test")
    assert train == sums(300, seed=1) != sums(300, seed=2)
    assert len({p.id for p in train}) == 300 and not {p.text for p in train} & {p.text for p in test}
    assert all(eval(p.text.removesuffix("=?")) == int(p.answer) for p in train + test)


def test_the_source_of_sums_says_how_many_numbers_and_how_large() -> None:
    assert sums_range("sums") == ((3, 10), 15) and sums_range("sums:2-3:20") == ((2, 3), 20)
    assert sums_range("summary.jsonl") is None
    problems, report = load("sums:2-2:9", seed=3)
    assert len(problems) == 81 and "81 sums" in report and "\n" not in report
    assert load("sums:2-2:9", seed=4)[0] != problems == load("sums:2-2:9", seed=3)[0]


@pytest.mark.parametrize("source", ["sums:", "sums:3", "sums:3-2:9", "sums:0-2:9", "sums:2-3:0", "sums:1-1:1"])
def test_sums_that_make_no_sense_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match=f"^--dataset {source}: "):
        load(source)
    if source != "sums:1-1:1":  # well-formed, but too few
        with pytest.raises(ValueError, match=f"^{source}: "):
            sums_range(source)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    "row, answer",
    [
        ({"problem": "What is 1+1?", "answer": "2", "solution": "\\boxed{3}"}, "2"),
        ({"question": "What is 1+1?", "answer": 2}, "2"),
        ({"question": "What is 1+1?", "answer": 2.0}, "2"),
        ({"question": "What is 1+1?", "answer": "One and one\nmake <<1+1=2>>2\n#### 2"}, "2"),
        ({"Problem": "What is 1+1?", "Answer": " 2 "}, "2"),
        ({"problem": "What is 1+1?", "solution": "Not \\boxed{3} but $\\boxed{\\frac{4}{2}}$."}, "\\frac{4}{2}"),
        ({"prompt": "What is 1+1?", "answer": "2"}, "2"),
        ({"question": "What is 1+1?", "solution": "Count them.", "final_answer": "2"}, "2"),
        (chat_row("What is 1+1?", "2"), "2"),
        (chat_row(DAPO_HEAD + "What is 1+1?" + DAPO_TAIL, "2"), "2"),
        (chat_row("Solve the following math problem step by step.\n\nWhat is 1+1?", "2"), "2"),
        # TRL's DeepMath-103K, Open-R1's DAPO, GSM8K's working
        ({"prompt": [{"role": "user", "content": "What is 1+1?"}], "solution": "\\dfrac{4}{2}"}, "\\dfrac{4}{2}"),
        ({"prompt": "What is 1+1?", "solution": "odd function"}, "odd function"),
        ({"problem": "What is 1+1?", "solution": "Count them.\n#### 2"}, "2"),
        # OlympiadBench, and verl's list in a reward model; Skywork-OR1 packs it in JSON
        ({"question": "What is 1+1?", "final_answer": ["$2$"]}, "$2$"),
        ({"prompt": "What is 1+1?", "reward_model": {"ground_truth": ["2"]}}, "2"),
        ({"prompt": "What is 1+1?", "reward_model": {"ground_truth": '["\\\\frac{4}{2}"]'}}, "\\frac{4}{2}"),
        # JSON in columns, and what Python prints, as CSV files hold it
        ({"prompt": json.dumps(chat_row("What is 1+1?", "")["prompt"]), "reward_model": '{"ground_truth": "2"}'}, "2"),
        ({"prompt": str(chat_row("What is 1+1?", "")["prompt"]), "reward_model": "{'ground_truth': '2'}"}, "2"),
        ({"prompt": "What is 1+1?", "verification_info": '{"ground_truth": "2"}'}, "2"),
        # ShareGPT, OpenRLHF, NVIDIA, SimpleRL, messages in pieces, ORZ
        ({"conversations": [{"from": "human", "value": "What is 1+1?"}, {"from": "gpt", "value": "2"}], "gt": 2}, "2"),
        ({"input": "What is 1+1?", "target": "2"}, "2"),
        ({"messages": [{"role": "user", "content": "What is 1+1?"}], "expected_answer": "2"}, "2"),
        ({"question": "What is 1+1?", "gt_answer": "2"}, "2"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "What is 1+1?"}]}], "ground_truth": "2"},
            "2",
        ),
        ({"0": {"from": "human", "value": "What is 1+1?"}, "1": {"ground_truth": {"value": "2"}}}, "2"),
        # what begins like JSON and is none
        ({"problem": "What is 1+1?", "answer": "[1, 2]"}, "[1, 2]"),
        ({"problem": "What is 1+1?", "answer": "{'a', 'b'}"}, "{'a', 'b'}"),
    ],
)
def test_the_usual_columns_are_understood(tmp_path: Path, ending: str, row: dict[str, object], answer: str) -> None:
    """Trinity-RFT#566: and DAPO's request for an `Answer:` line is taken off."""
    assert pairs(write(tmp_path / f"rows.{ending}", [row])) == [("What is 1+1?", answer)]


WISH = 'Let\'s think step by step and output the final answer after "####"'


@pytest.mark.parametrize(
    "asked, problem",
    [
        (f"What is 1+1? {WISH}.", "What is 1+1?"),
        (f"What is $1+1$ {WISH}", "What is $1+1$"),
        (f"Find 1+1 {WISH}.", "Find 1+1"),
        ("What is 1+1? Let's think step by step and output the final answer within \\boxed{}.", "What is 1+1?"),
        (f"What is 1+1?\n{INSTRUCTION}", "What is 1+1?"),
        ("Sum it. End with a line that holds #### and the sum.", "Sum it."),
        (f"{DAPO_HEAD}What is 1+1?{DAPO_TAIL}", "What is 1+1?"),
        ("What does #### mean in Markdown? Count the signs.", "What does #### mean in Markdown? Count the signs."),
        ("Fill the \\boxed{} in $\\boxed{}+1=2$. What is it?", "Fill the \\boxed{} in $\\boxed{}+1=2$. What is it?"),
    ],
)
def test_a_set_s_own_wish_for_a_form_is_taken_off(asked: str, problem: str) -> None:
    """EasyR1#382: verl's GSM8K asks for ####, the instruction for a box, and the grader looks for one of them."""
    assert unwrap(asked) == problem


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": '[{"role": "user", "content": "What', "reward_model": '{"ground_truth": "2"}'},
        {"prompt": "What is 1+1?", "reward_model": '{"ground_truth": "2'},
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "2"},
        {"prompt": "Make 98 of 44, 19, 35.", "reward_model": {"ground_truth": {"target": 98}}},
        {"problem": "What is 1+1?", "solution": "Let us count.\nIt is easy."},
        {"problem": "What is 1+1?", "solution": "Left to the reader."},
        {"problem": "What is 1+1?", "answer": ["2", "3"]},
        {"problem": "What is 1+1?", "answer": True},
    ],
)
def test_what_is_not_understood_is_no_problem(tmp_path: Path, ending: str, row: dict[str, object]) -> None:
    """JSON that is cut off is no text, and a target among other things no answer: dropped, with a count."""
    source = write(tmp_path / f"rows.{ending}", [row])
    with pytest.raises(
        ValueError, match="^--dataset .*1 rows read, 0 problems kept; rows dropped: 1 without a.*; name"
    ):
        load(source)


GOLDS = ["proof", "Proof.", "\\text{proof}", "\\boxed{proof}", "the proof is complete", "notfound", "not found", "N/A"]
GOLDS += [
    "n.a.",
    "none",
    "unknown",
    "see solution",
    "See the solution above.",
    "answer not found",
    "?",
    "...",
    "-",
    "inf",
]
ANSWERS = [
    "A",
    "(B)",
    "yes",
    "No",
    "True",
    "Evelyn",
    "east",
    "no solution",
    "\\emptyset",
    "infinity",
    "<",
    "i",
    "n",
    "-1",
]


def test_golds_that_cannot_be_verified_are_dropped_with_a_count(tmp_path: Path) -> None:
    r"""NuminaMath-1.5 has 143,300 of them in 896,215 rows, and `\boxed{proof}` was right."""
    rows = [{"problem": f"Problem {n}", "answer": answer} for n, answer in enumerate(GOLDS + ANSWERS)]
    problems, report = load(write(tmp_path / "rows.jsonl", rows))
    assert [p.answer for p in problems] == ANSWERS
    assert f"{len(GOLDS)} with an answer that cannot be verified" in report


@pytest.mark.parametrize("form", ["rows.jsonl", "rows.json", "rows.parquet", "a folder"])
def test_each_problem_comes_once_however_often_its_row_does(tmp_path: Path, form: str) -> None:
    """BytedTsinghua-SIA/DAPO#15: DAPO-Math-17k holds every problem 100 times. A folder goes the way of a hub id."""
    asked = ["$1+1$?", "在 $1+2$ 中?", "$1+3$?"]
    rows = [chat_row(DAPO_HEAD + text + DAPO_TAIL, str(n + 2), i) for i in range(100) for n, text in enumerate(asked)]
    source = write(tmp_path / ("rows.parquet" if form == "a folder" else form), rows)
    problems, report = load(str(tmp_path) if form == "a folder" else source)
    assert [p.text for p in problems] == asked and [p.answer for p in problems] == ["2", "3", "4"]
    assert len({p.id for p in problems}) == 3
    assert "300 rows read, 3 problems kept" in report and "297 duplicates" in report and "\n" not in report


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_every_row_is_accounted_for(tmp_path: Path, ending: str) -> None:
    """Skills#1074: a gold that is None, empty or nan is no gold. One problem with two answers has none either."""
    rows = [("a", "1"), ("a  ", "$01.0$"), ("b", "1"), ("b", "2"), ("b", "1"), ("c", None), ("d", ""), ("e", "NaN")]
    rows += [("", "5"), (None, "5"), ("f", "6")]
    source = write(tmp_path / f"rows.{ending}", [{"problem": text, "answer": answer} for text, answer in rows])
    problems, report = load(source)
    assert [(p.text, p.answer) for p in problems] == [("a", "1"), ("f", "6")]
    assert report == (
        f"rows.{ending}: 11 rows read, 2 problems kept; rows dropped: 1 duplicates, 3 with conflicting answers, "
        "2 without a text, 3 without an answer"
    )


def test_jsonl_with_a_byte_order_mark_blank_lines_and_line_separators_in_strings(tmp_path: Path) -> None:
    """declare-lab/flan-alpaca#5: U+2028 is a line break to str.splitlines and not to JSON."""
    path = tmp_path / "rows.jsonl"
    good = '\ufeff{"problem": "a\u2028b", "answer": "1"}\r\n\n{"problem": "c", "answer": "2"}\n'
    path.write_bytes(good.encode())
    assert pairs(str(path)) == [("a\u2028b", "1"), ("c", "2")]
    path.write_bytes((good + '{"problem": "d", "ans').encode())
    with pytest.raises(ValueError, match="rows.jsonl:4: bad JSON"):
        load(str(path))


@pytest.mark.parametrize(
    "name, content, place",
    [
        ("missing.jsonl", None, "missing.jsonl: "),
        ("missing.parquet", None, "missing.parquet: "),
        ("rows.csv", b"problem,answer\n", "rows.csv: "),
        ("rows.jsonl", b"", "rows.jsonl: "),
        ("rows.jsonl", b'{"problem": "a", "answer": "1"} {"problem": "b", "answer": "2"}\n', "rows.jsonl:1: "),
        ("rows.jsonl", b'{\n  "problem": "a",\n  "answer": "1"\n}\n', "rows.jsonl:1: "),
        ("rows.jsonl", b'{"problem": "a", "answer": "1"}\n{"problem": "\xff", "answer": "1"}\n', "rows.jsonl:2: "),
        ("rows.jsonl", b'{"problem": "a", "answer": "1"}\n{"text": "b", "label": "1"}\n', "rows.jsonl:2: "),
        ("rows.jsonl", b'["a", "1"]\n', "rows.jsonl:1: "),
        ("rows.jsonl", b"[" * 100_000, "rows.jsonl:1: "),
        ("rows.json", b'[{"problem": "a", "answer": "1"},\n{"problem": "b"', "rows.json:2: "),
        ("rows.json", b'[{"problem": "a", "answer": "1"}, 7]', r"rows.json \(row 2\): "),
        ("rows.parquet", b"not parquet", "rows.parquet: "),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes | None, place: str
) -> None:
    """declare-lab/flan-alpaca#5: one sentence with the flag, the place and the remedy."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^--dataset .*{place}.*; ") as caught:
        load(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_parquet_column_of_another_kind_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.parquet", [{"problem": "a", "answer": ["1", "2"]}])
    with pytest.raises(ValueError, match="^--dataset .*rows.parquet: .*answer.*; "):
        load(source)


def folder(path: Path) -> str:
    """A folder as a hub has it: two configs, one of them with two splits."""
    path.mkdir()
    write(path / "train.jsonl", [{"problem": "a", "answer": "1"}])
    write(path / "test.parquet", [{"problem": "b", "answer": "2"}])
    write(path / "other.jsonl", [{"problem": "c", "answer": "3"}])
    main = "- config_name: main\n  data_files:\n  - {split: train, path: train.jsonl}\n  - {split: test, path: test*}\n"
    text = f"---\nconfigs:\n{main}- config_name: socratic\n  data_files: other.jsonl\n---\n"
    (path / "README.md").write_text(text.replace("test*", "second.jsonl"))
    write(path / "second.jsonl", [{"problem": "b", "answer": "2"}])
    return str(path)


def test_configs_and_splits_are_chosen_or_listed(tmp_path: Path) -> None:
    """GSM8K has two configs. A folder goes the way of a hub id."""
    source = folder(tmp_path / "set")
    for config, split, text in (("main", "train", "a"), ("main", "test", "b"), ("socratic", "train", "c")):
        assert [p.text for p in load(source, 0, config, split)[0]] == [text]
    remedy = ".*; choose by --dataset-config and --dataset-split"
    for config, split, there in (
        ("", "train", "main.*socratic"),
        ("x", "train", "main.*socratic"),
        ("main", "x", "test"),
    ):
        with pytest.raises(ValueError, match=f"^--dataset .*set: .*{there}{remedy}") as caught:
            load(source, 0, config, split)
        assert "\n" not in str(caught.value)
    for source in (write(tmp_path / "rows.jsonl", [{"problem": "a", "answer": "1"}]), "sums"):
        with pytest.raises(ValueError, match="^--dataset .*: it has no configs and splits; leave out --dataset-config"):
            load(source, 0, "main")


@pytest.mark.parametrize("content", [{}, {"set.py": "import datasets"}, {"a.jsonl": "answer", "b.jsonl": "solution"}])
def test_a_folder_that_datasets_refuses_is_a_sentence(tmp_path: Path, content: dict[str, str]) -> None:
    """Nothing in it, a script (which datasets 5 does not run), unequal columns."""
    source = tmp_path / "set"
    source.mkdir()
    for name, text in content.items():
        row = text if name.endswith(".py") else json.dumps({"problem": "a", text: "1"})
        (source / name).write_text(row + "\n")
    with pytest.raises(ValueError, match="^--dataset .*set: .*; .*or name one file of it") as caught:
        load(str(source))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["rows.jsonl", "set"])
def test_a_column_of_texts_and_numbers_keeps_its_texts(tmp_path: Path, form: str) -> None:
    r"""datasets makes JSON of such a column: `1/2` became `"1\/2"`, with quotes."""
    answers = [2, "1/2", "\\frac{1}{2}", 2.5, ["5"], {"ground_truth": "6"}, "x+1"]
    (tmp_path / "set").mkdir()
    path = write(tmp_path / "set" / "rows.jsonl", [{"problem": f"p{i}", "answer": a} for i, a in enumerate(answers)])
    read = pairs(path if form == "rows.jsonl" else str(tmp_path / form))
    assert [answer for _, answer in read] == ["2", "1/2", "\\frac{1}{2}", "2.5", "5", "6", "x+1"]


@pytest.mark.parametrize("form", ["rows.jsonl", "rows.parquet", "set"])
def test_nothing_stale_is_read_and_nothing_is_written_at_home(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of datasets goes by the time of a file's change, which copying and unpacking may keep."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("/dev/null/datasets"))
    path = tmp_path / form
    if form == "set":
        path.mkdir()
        path /= "rows.jsonl"
    for answer in ("1", "2"):
        write(path, [{"problem": "a", "answer": answer}])
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert pairs(str(tmp_path / form)) == [("a", answer)]


def test_importing_data_is_light() -> None:
    """The grader's workers run this file as a script, once for every hostile answer."""
    heavy = "{'torch', 'vllm', 'transformers', 'datasets', 'pyarrow', 'numpy', 'math_verify', 'sympy'}"
    check = f"import sys; import support.data; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    assert subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parent.parent).returncode == 0


# ------------------------------------------------------------------ prompts

LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
THINKING_TEMPLATE = LLAMA_TEMPLATE + "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
ADDED = ["<bos>", "<eos>", "<|start|>", "<|end|>"]
BOS, EOS, START, END = range(4)


def tokenizer(template: str | None = None, add_eos: bool = False, letters: bool = True) -> PreTrainedTokenizerFast:
    """One token a character; it puts `<bos>` before all that it encodes with special tokens, as Llama's does."""
    characters = [chr(c) for c in range(32, 127) if letters or not chr(c).isalpha()] + ["\n"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(ADDED + characters)}, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(ADDED)
    form = "<bos> $A <eos>" if add_eos else "<bos> $A"
    core.post_processor = processors.TemplateProcessing(form, special_tokens=[("<bos>", BOS), ("<eos>", EOS)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>")
    made.chat_template = template
    return made


def ids_of(text: str, with_tokenizer: PreTrainedTokenizerFast, **options: object) -> list[int]:
    (prompt,), dropped = tokenize([Problem("1", text, "2")], with_tokenizer, SamplingArgs(**options))
    assert dropped == 0
    return prompt.token_ids


@pytest.mark.parametrize("template", [None, LLAMA_TEMPLATE, "{{ bos_token }}" + LLAMA_TEMPLATE])
@pytest.mark.parametrize("add_eos", [False, True])
@pytest.mark.parametrize("text", ["What is 1+1?", "<bos>What is 1+1?"])
def test_bos_comes_once_and_eos_not_at_all(template: str | None, add_eos: bool, text: str) -> None:
    """vllm#27486: template and tokenizer both add BOS. And a prompt that ends with EOS asks for nothing."""
    ids = ids_of(text, tokenizer(template, add_eos))
    assert ids[0] == BOS and ids[1] != BOS and EOS not in ids
    if template and not text.startswith("<bos>"):
        assert ids.count(BOS) == 1 and ids[1] == START


def test_the_prompt_asks_for_a_box_by_the_template_or_in_plain_text() -> None:
    """Trinity-RFT#566, OpenRLHF#1073: a tokenizer without a template gets a plain prompt and does not raise."""
    plain, chat = tokenizer(), tokenizer(LLAMA_TEMPLATE)
    assert plain.decode(ids_of("1+1?", plain)) == f"<bos>1+1?\n{INSTRUCTION}\n" and "\\boxed{}" in INSTRUCTION
    expected = f"<bos><|start|>user\n1+1?\n{INSTRUCTION}<|end|><|start|>assistant\n"
    assert chat.decode(ids_of("1+1?", chat)) == expected


def test_without_an_instruction_the_plain_prompt_is_the_problem_and_a_newline() -> None:
    """The embedded model's vocabulary has no letters to write an instruction with."""
    digits = tokenizer(letters=False)
    assert digits.decode(ids_of("25-13=?", digits, instruction="")) == "<bos>25-13=?\n"


def test_a_problem_that_the_tokenizer_cannot_write_at_all_is_no_empty_prompt() -> None:
    """trl#3180: an empty list of ids fails in the engine, far from its cause."""
    silent = tokenizer("{{ '' }}", letters=False)
    with pytest.raises(ValueError, match="no token of problem 1"):
        ids_of("1+1", silent)


@pytest.mark.parametrize("enable_thinking, end", [(True, "<think>"), (False, "<think></think>")])
def test_the_template_is_told_whether_to_think(enable_thinking: bool, end: str) -> None:
    """OpenRLHF#1073: thinking left on, or off, because the template never heard of the setting."""
    thinker = tokenizer(THINKING_TEMPLATE)
    assert thinker.decode(ids_of("1+1", thinker, thinking=enable_thinking)).endswith(f"assistant\n{end}")


def test_the_switch_may_have_another_name_and_none_is_said_so() -> None:
    """DeepSeek and Granite call it `thinking`. Asked of a template without a switch, thinking would be left off."""
    thinker = tokenizer(THINKING_TEMPLATE.replace("enable_thinking", "thinking"))
    for wanted, end in ((True, "<think>"), (False, "<think></think>")):
        assert thinker.decode(ids_of("1+1", thinker, thinking=wanted)).endswith(end)
    for template in (LLAMA_TEMPLATE, None):
        with pytest.raises(ValueError, match="^--thinking: .*no switch.*; leave the flag out"):
            ids_of("1+1", tokenizer(template), thinking=True)


@pytest.mark.parametrize("template", [None, LLAMA_TEMPLATE])
def test_prompts_that_are_too_long_are_dropped_by_their_token_count(template: str | None) -> None:
    """trl#3180: counted in tokens, BOS and template included; problems keep their order."""
    one = tokenizer(template)
    problems = [Problem(str(n), "1" * n, "2") for n in (3, 1, 2)]
    length = len(ids_of("1", one)) + 1
    prompts, dropped = tokenize(problems, one, SamplingArgs(max_prompt=length))
    assert [p.problem.id for p in prompts] == ["1", "2"] and dropped == 1
    assert [len(p.token_ids) for p in prompts] == [length - 1, length]


def test_every_end_of_sequence_id_stops_a_response() -> None:
    """trl#7039: tokenizer, config and generation config each know another one, and base checkpoints a wrong one."""
    plain = tokenizer()
    assert stop_token_ids(plain, PreTrainedConfig(eos_token_id=7), None) == [EOS, 7]
    config, generation = PreTrainedConfig(eos_token_id=[7, 5]), GenerationConfig(eos_token_id=[9, 5])
    assert stop_token_ids(plain, config, generation) == [EOS, 5, 7, 9]
    assert stop_token_ids(plain, PreTrainedConfig(eos_token_id=None), GenerationConfig(eos_token_id=6)) == [EOS, 6]


def test_the_end_of_a_turn_stops_a_response_too() -> None:
    """trl#7039: a base checkpoint whose every eos_token_id is the end of text is still prompted by a template."""
    config = PreTrainedConfig(eos_token_id=EOS)
    assert stop_token_ids(tokenizer(LLAMA_TEMPLATE), config, None) == [EOS, END]
    assert stop_token_ids(tokenizer("{% for m in messages %}{{ m['content'] }}\n{% endfor %}"), config, None) == [EOS]
