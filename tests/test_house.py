"""The layout: who may import whom, how long files may be, and five files that work alone.

One concept per file, to be read in an evening or copied into another project. What is held here
grows back unseen: a cycle hidden in a function, a second name for one thing, a few lines more.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support.args import TINY

ROOT = Path(__file__).resolve().parent.parent
ALONE = ("quality_head", "calibration", "engine", "grpo", "tts")
SIX = (*ALONE, "arrol")
FOLDERS = ("support", "bench", "tests", "tiny", "examples")
FORBIDDEN = {
    *("say", "of_first", "of_leader", "take", "part", "everywhere", "nobody", "Tally", "Bench", "workbench"),
    *("whole", "every", "due", "active"),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for folder in (".", *FOLDERS) for path in sorted((ROOT / folder).glob("*.py"))}
SUPPORT = [name for name in MODULES if name.partition(".")[0] == "support"]
PRODUCT = [name for name in MODULES if name in SIX] + SUPPORT


@functools.cache
def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


# --- imports ----------------------------------------------------------------------------------------------------------


def named(name: str, nodes: list[ast.stmt]) -> Iterator[str]:
    """Modules that statements of module `name` import, at any depth."""
    folder = name.rpartition(".")[0]
    for node in (node for statement in nodes for node in ast.walk(statement)):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            longer = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [module if module in MODULES else node.module for module in longer]
        for module in found:
            # tests, and scripts in a folder of their own, also see what lies beside them
            beside = f"{folder}.{module}"
            yield beside if module not in MODULES and beside in MODULES else module


def program(tree: ast.Module) -> list[ast.stmt]:
    """What runs only under `if __name__ == "__main__"`: the block, and functions it alone calls."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    blocks = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "__name__ == '__main__'"]

    def called(nodes: list[ast.stmt]) -> set[str]:
        names = {node.id for top in nodes for node in ast.walk(top) if isinstance(node, ast.Name)}
        return names & functions.keys()

    reached = called(blocks)
    while more := called([functions[name] for name in reached]) - reached:
        reached |= more
    while shared := reached & called(
        [node for node in tree.body if node not in blocks and getattr(node, "name", None) not in reached]
    ):
        reached -= shared
    return blocks + [functions[name] for name in reached]


def library(name: str) -> list[str]:
    """All modules that `name` imports when somebody imports or calls it, inside functions too."""
    tree = parse(name)
    apart = program(tree)
    return list(named(name, [node for node in tree.body if node not in apart]))


def roots(modules: list[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_six_files_lie_on_top() -> None:
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(SIX)


@pytest.mark.parametrize("name", ALONE)
def test_five_files_import_nothing_of_this_repository(name: str) -> None:
    """Not in functions and not for type checkers either. One of them, `tts`, is also a program."""
    found = library(name) if name == "tts" else named(name, parse(name).body)
    assert set(found) & MODULES.keys() == set()


@pytest.mark.parametrize("name, allowed", [("quality_head", {"torch"}), ("calibration", {"torch"}), ("tts", {"numpy"})])
def test_small_files_need_one_package(name: str, allowed: set[str]) -> None:
    assert roots(library(name)) - sys.stdlib_module_names <= allowed


def test_only_the_engine_imports_vllm() -> None:
    """Not even under `__main__`."""
    assert [name for name in PRODUCT if "vllm" in roots(list(named(name, parse(name).body)))] == ["engine"]


@pytest.mark.parametrize("name", SUPPORT)
def test_support_does_not_know_who_uses_it(name: str) -> None:
    above = {"arrol", "bench", "tests", "examples"}
    assert roots(list(named(name, parse(name).body))) & above == set()


def test_no_import_cycles() -> None:
    """Nor among imports in functions and for type checkers. A CycleError names the cycle."""
    graph = {name: [module for module in library(name) if module in MODULES] for name in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


# --- sizes and names --------------------------------------------------------------------------------------------------


def test_the_six_are_read_in_an_evening() -> None:
    sizes = {name: count_lines(ROOT / f"{name}.py") for name in SIX}
    assert sum(sizes.values()) <= 2050 and max(sizes.values()) <= 440, sizes


@pytest.mark.parametrize(("folder", "most"), [("support", 3550), ("bench", 2300)])
def test_folders_do_not_grow(folder: str, most: int) -> None:
    """What in bench/ measures something else than the paper does comes on top."""
    others = {"engine.py", "gpu.py", "grading.py", "peers.py", "trainer.py"}
    sizes = {path.name: count_lines(path) for path in (ROOT / folder).glob("*.py") if path.name not in others}
    assert sum(sizes.values()) <= most, sizes


@pytest.mark.parametrize("name", PRODUCT)
def test_functions_fit_on_a_screen(name: str) -> None:
    functions = [node for node in ast.walk(parse(name)) if isinstance(node, ast.FunctionDef)]
    sizes = {function.name: function.end_lineno - function.lineno + 1 for function in functions}
    assert {function: size for function, size in sizes.items() if size > 60} == {}


def test_flags_can_be_surveyed() -> None:
    from support.args import Args, TtsArgs

    assert len(dataclasses.fields(Args)) <= 65 and len(dataclasses.fields(TtsArgs)) <= 20


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 140 and len(text.split()) <= 1200 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", PRODUCT)
def test_names_are_those_of_the_field(name: str) -> None:
    found = set()
    for node in ast.walk(parse(name)):
        match node:
            case (
                ast.Name(id=word)
                | ast.arg(arg=word)
                | ast.Attribute(value=ast.Name(id="self"), attr=word)
                | ast.alias(asname=str(word))
                | ast.FunctionDef(name=word)
                | ast.ClassDef(name=word)
            ) if word in FORBIDDEN:
                found.add(f"{word}, line {node.lineno}")
    assert found == set()


def test_a_class_shares_its_name_with_nothing() -> None:
    """There were two classes `Pruner`, and a `Sequence` beside that of collections.abc."""
    nodes = [node for name in PRODUCT for node in ast.walk(parse(name))]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    outside = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module not in MODULES]
    imported = {alias.asname or alias.name for node in outside for alias in node.names}
    assert [name for name, count in classes.items() if count > 1 or name in imported] == []


# --- alone ------------------------------------------------------------------------------------------------------------

USES = {
    "quality_head": """
import torch
from quality_head import HeadTrainer, QualityHead

states = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
right = states[:, 0] > 0
trainer = HeadTrainer(QualityHead(16, width=32), lr=1e-2)
trainer.add(states, right)
losses = [trainer.train()["loss"] for _ in range(20)]
assert losses[-1] < losses[0] / 2, losses
assert ((trainer.head(states) > 0) == right).float().mean() > 0.9
""",
    "calibration": """
import torch
from calibration import Calibrator, Settings, SystematicDraw

generator = torch.Generator().manual_seed(0)
scores, groups = torch.rand(512, generator=generator), torch.arange(512) // 16
calibrator = Calibrator(bins=16)
calibrator.observe(scores, groups)
calibrator.label(scores, torch.rand(512, generator=generator) < scores)
p = calibrator.survival(calibrator.posterior(scores), groups, Settings())
assert abs(p.mean() - 0.5) < 1e-6
keep = SystematicDraw(generator)(p, groups)
assert (keep.double() - p).view(32, 16).sum(1).abs().max() < 1
""",
    "grpo": """
import torch
from grpo import group_advantages, token_objective

advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([3, 3, 5]))
assert advantages[0] == -advantages[1] > 0 == advantages[2]
logits = torch.zeros(3, 4, requires_grad=True)
logprobs = logits.log_softmax(1)[:, 0]
loss, clipped_low, clipped_high = token_objective(logprobs, logprobs.detach(), advantages, 0.2, 0.28)
loss.mean().backward()
assert not (clipped_low | clipped_high).any()
assert logits.grad[0, 0] < 0 < logits.grad[1, 0] and not logits.grad[2].any()
""",
    "tts": """
from tts import answer_classes, rank_weights, vote

classes = answer_classes(["1/2", "0.5", "3", None], lambda pairs: [set(pair) == {"1/2", "0.5"} for pair in pairs])
assert classes == [0, 0, 1, None]
assert vote(classes, [1.0, 1.0, 1.0, 1.0]) == 0
assert vote(classes, [*rank_weights([0.1, 0.2, 5.0]), 0.0]) == 1
""",
    "engine": f"""
import torch
from engine import Decision, Engine, Rollout, Sampling


class KeepEven:
    def decide(self, states: torch.Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        assert states.shape == (len(samples), 128) and set(groups) == {{7}}
        return [Decision(keep=sample % 2 == 0, score=0.5) for sample in samples]


engine = Engine({str(TINY)!r}, detect_length=4, max_model_len=64, max_num_seqs=8, dtype=torch.float32, kv_cache_gb=0.25)
rollouts = engine.generate({{7: [5, 6, 7]}}, 4, Sampling(max_tokens=9, stop_token_ids=()), seed=0, pruner=KeepEven())
engine.close()
assert all(isinstance(rollout, Rollout) and rollout.score == 0.5 for rollout in rollouts)
assert [rollout.finish for rollout in rollouts] == ["length", "pruned"] * 2
assert [len(rollout.token_ids) for rollout in rollouts] == [9, 4, 9, 4]
""",
}


@pytest.mark.parametrize("name", ALONE)
def test_works_alone_in_an_empty_folder(name: str, tmp_path: Path) -> None:
    """Nothing of this repository is to be had there. `grpo` and `engine` take ten seconds."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    check = "import importlib.util\n\nassert importlib.util.find_spec('support') is None\n"
    (tmp_path / "use.py").write_text(check + USES[name])
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH") if key in os.environ}
    command = [sys.executable, "use.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
