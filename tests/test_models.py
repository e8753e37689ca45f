"""Families of models, each tiny and random, through a real engine and real training steps; and what is refused, in the
sentence that says why. docs/models.md has the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

import arrol
from arrol import Trainer
from engine import Engine, EngineError, Rollout, Sampling
from grpo import Policy, SamplerGapError
from support import data, model
from support.args import TINY, parse, parse_tts
from support.grader import Grader
from support.launch import Parts, quiet
from support.test_time import Sampler

SIZES = dict(vocab_size=64, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, pad_token_id=0, bos_token_id=None)
# The window is shorter than the responses; caps and scales are far from 1.
FAMILIES: dict[str, tuple[str, dict]] = {
    "Qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "Qwen3": ("Qwen3", dict(head_dim=32)),
    "Llama, tied": ("Llama", dict(tie_word_embeddings=True)),
    "Llama, untied": ("Llama", dict(tie_word_embeddings=False)),
    "Mistral, sliding window": ("Mistral", dict(sliding_window=16)),
    "Gemma-2": (
        "Gemma2",
        dict(head_dim=32, sliding_window=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    ),
    "Gemma-3, text": ("Gemma3Text", dict(head_dim=32, sliding_window=16)),
    "Phi-3": ("Phi3", dict()),
    "Granite": ("Granite", dict(logits_scaling=4.0, residual_multiplier=0.5, embedding_multiplier=3.0)),
    "OLMo-2": ("Olmo2", dict()),
    "SmolLM3": ("SmolLM3", dict(no_rope_layer_interval=2)),
    "Qwen3-MoE": ("Qwen3Moe", dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
}
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
CPU = torch.device("cpu")
quiet(verbose=False)


def make_model(folder: Path, kind: str, **changes: object) -> Path:
    """A random model of a family, with the tokenizer of the embedded one."""
    config = getattr(transformers, f"{kind}Config")(**(SIZES | changes))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = AutoModelForCausalLM.from_config(config).float()
        for parameter in made.parameters():
            parameter.data.add_(0.08 * torch.randn(parameter.shape))
    made.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: object) -> Path:
    """A checkpoint's tensors and its config, changed."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_model(tmp_path / "llama", "Llama", tie_word_embeddings=False)


@pytest.fixture
def trainer(tmp_path: Path, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Builds a trainer of a model folder and its engine. Rewards are by chance: a random model has nothing right."""

    def chance(rollouts: list[Rollout], *_: object) -> None:
        for rollout in rollouts:
            if rollout.finish != "pruned":
                rollout.reward, rollout.verdict = float(sum(rollout.token_ids) % 2), "right"

    monkeypatch.setattr(arrol, "grade", chance)
    with Grader() as grader:

        def make(folder: Path, **changes: object) -> Trainer:
            flags = dict(
                model=folder, output=tmp_path / "run", steps=3, prompts=3, group_size=4, lr=1e-3, warmup_steps=0
            )
            flags |= dict(dataset="sums", instruction="", max_length=96, max_prompt=64, detect_length=8, cold_start=3)
            flags |= dict(kv_cache_gb=0.05, max_num_seqs=16, eval_problems=0, checkpoint_every=3) | changes
            args = parse([f"--{name.replace('_', '-')}={value}" for name, value in flags.items()])
            tokenizer, stops, config = model.load_tokenizer(args)
            model.refuse_untrainable(config, args, CPU)
            ids = model.vocabulary(tokenizer, stops, config)
            engine = make_engine(
                folder, detect_length=8, max_model_len=96, max_num_seqs=16, kv_cache_gb=0.05, vocabulary=ids
            )
            prompts, _ = data.tokenize(data.load("sums", 1)[0][:20], tokenizer, args)
            return Trainer(args, Parts(engine, tokenizer, prompts, [], stops, grader, CPU))

        yield make


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains(family: str, trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """Proven, trained for three steps in step with its sampler, saved, and read by transformers again."""
    kind, changes = FAMILIES[family]
    folder = make_model(tmp_path / "model", kind, **changes)
    trained = trainer(folder)
    start = {name: tensor.clone() for name, tensor in trained.weights()}
    lines = trained.run("test")[1:]
    assert sum(line["optimizer_steps"] for line in lines) > 0
    print(f"{family}: gap {max(line['gap_max'] for line in lines):.1g}")
    assert max(line["gap_max"] for line in lines) < 1e-4
    end = dict(trained.weights())
    moved = [name for name in start if not torch.equal(start[name], end[name])]
    assert len(moved) > 0.9 * len(start)
    saved = load_file(tmp_path / "run" / "checkpoint-3" / "model" / "model.safetensors")
    assert saved.keys() == load_file(folder / "model.safetensors").keys()
    assert all(torch.equal(saved[name], end[name]) for name in saved)
    again = model.load(str(tmp_path / "run" / "checkpoint-3" / "model"))
    assert all(torch.equal(p, q.full_tensor()) for p, q in zip(again.parameters(), trained.policy.parameters()))


# ------------------------------------------------------------------ what is refused before the weights are read


def refused(capsys: pytest.CaptureFixture[str], work: Callable[..., object], *arguments: object) -> str:
    """The sentence with which `work` ends the program."""
    with pytest.raises(SystemExit) as stop:
        work(*arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1
    return lines[0]


def settings(folder: Path, **changes: object) -> tuple[object, object, torch.device]:
    """Config and flags of a model, for `refuse_untrainable`."""
    args = parse([f"--model={folder}", "--dataset=sums", *(f"--{k.replace('_', '-')}={v}" for k, v in changes.items())])
    return transformers.AutoConfig.from_pretrained(folder), args, CPU


def test_rotary_embeddings_that_depend_on_the_batch_are_refused_beyond_their_first_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LongRoPE: transformers takes other factors where any row is long, vLLM where any could be."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 16, long_factor=[4.0] * 16, factor=8.0)
    rope |= dict(original_max_position_embeddings=64)
    folder = make_model(tmp_path, "Phi3", rope_parameters=rope, original_max_position_embeddings=64)
    short = dict(max_prompt=32, detect_length=8, kv_cache_gb=0.05)
    assert "at most 64" in refused(capsys, model.refuse_untrainable, *settings(folder, max_length=65, **short))
    model.refuse_untrainable(*settings(folder, max_length=64, **short))


def test_what_main_memory_cannot_hold_is_refused_before_its_weights_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 bytes a parameter and the KV cache, from a config alone; and a warning of how long a step will take."""
    sizes = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, head_dim=128)
    config = transformers.Qwen3Config(**(SIZES | sizes | dict(vocab_size=151_936, tie_word_embeddings=True)))
    config.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    arguments = settings(tmp_path, max_length=512, max_prompt=64, detect_length=8, kv_cache_gb=1.0)
    attention, mlp, norms = 2 * 1024 * (2048 + 256), 3 * 1024 * 3072, 2 * 1024 + 2 * 128
    needed = 20 * (151_936 * 1024 + 28 * (attention + mlp + norms) + 1024) + 2**30
    monkeypatch.setattr(model, "_free_memory", lambda: needed - 2**26)
    said = refused(capsys, model.refuse_untrainable, *arguments)
    assert f"{needed / 2**30:.1f} GiB" in said and "--kv-cache-gb 1.0" in said
    monkeypatch.setattr(model, "_free_memory", lambda: needed + 2**26)
    model.refuse_untrainable(*arguments)
    warning = capsys.readouterr().out
    assert (
        warning.startswith("no GPU: 552M parameters and, if all rollouts reach --max-length, 524,288 tokens")
        and warning.count("\n") == 1
    )
    model.refuse_untrainable(*settings(TINY, max_length=256, max_prompt=64, detect_length=8, prompts=16))
    assert not capsys.readouterr().out


# ------------------------------------------------------------------ checkpoints that are not the model's


def without(*ends: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: t for name, t in tensors.items() if not any(end in name for end in ends)}


def with_changed(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: change(t) if name.endswith(end) else t for name, t in tensors.items()}


def extra_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    more = {n.replace("layers.1", "layers.2"): t.clone() for n, t in tensors.items() if "layers.1" in n}
    return tensors | more


BROKEN = {
    "no head": (without("lm_head"), {}, "lm_head.weight: missing"),
    "no norm": (without("layers.1.input_layernorm"), {}, "model.layers.1.input_layernorm.weight: missing"),
    "no query": (without("layers.0.self_attn.q_proj"), {}, "model.layers.0.self_attn.q_proj.weight: missing"),
    "a layer too few": (without("layers.1."), {}, "and 6 more: missing"),
    "a layer too many": (extra_layer, {}, "and 6 more: not known to the model"),
    "a bias": (lambda t: t | {"lm_head.bias": torch.ones(64)}, {}, "lm_head.bias: not known"),
    "rows": (without(), dict(vocab_size=80), "lm_head.weight, model.embed_tokens.weight: not of the shape"),
    "shape": (
        with_changed("0.mlp.up_proj.weight", lambda t: t[:90].clone()),
        {},
        "0.mlp.up_proj.weight: not of the shape",
    ),
    "int8": (with_changed("1.mlp.up_proj.weight", lambda t: t.to(torch.int8)), {}, "1.mlp.up_proj.weight: no floating"),
    "float8": (with_changed("up_proj.weight", lambda t: t.to(torch.float8_e4m3fn)), {}, "up_proj.weight: no floating"),
    "NaN": (with_changed("model.norm.weight", lambda t: t * torch.nan), {}, "model.norm.weight: not finite"),
    "two heads": (without(), dict(tie_word_embeddings=True), "lm_head.weight: not the embedding's"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_parameters_that_are_not_the_models_are_named(
    fault: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vllm#53019: nothing is made up and trained, and nothing of the checkpoint is dropped in silence."""
    change, config, named = BROKEN[fault]
    said = refused(capsys, model.load, str(edit(llama, change, **config)))
    assert named in said and said.startswith(f"{Path(arrol.sys.argv[0]).name}: error: --model {llama}: ")


def test_test_time_scaling_scores_no_made_up_parameters(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM samples from whatever is in the memory of a head that it did not find."""
    args = parse_tts(
        [
            f"--model={edit(llama, without('lm_head'))}",
            "--data=sums",
            "--instruction=",
            "--max-length=96",
            "--max-prompt=64",
        ]
    )
    assert "lm_head.weight: missing" in refused(capsys, Sampler, args)


@pytest.mark.parametrize("text", ['{"num_return_sequences": 4}', '{"eos_token_id": 1'], ids=["refused", "cut off"])
def test_a_generation_config_that_cannot_be_read_is_a_sentence(
    text: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may hold ids that end a response: without them rollouts would run on."""
    (llama / "generation_config.json").write_text(text)
    assert "generation_config.json cannot be loaded" in refused(capsys, model.load_tokenizer, settings(llama)[1])


def test_files_that_are_missing_or_cut_off_are_a_sentence(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "cannot be loaded" in refused(capsys, model.load, str(llama))
    file.unlink()
    assert "cannot be loaded" in refused(capsys, model.load, str(llama))
    shards = {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (llama / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    assert "model-00002-of-00002.safetensors" in refused(capsys, model.load, str(llama))


@pytest.mark.parametrize(
    "change",
    [
        with_changed("weight", lambda t: t.double()),
        with_changed("weight", lambda t: t.bfloat16()),
        lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)},
    ],
    ids=["float64", "bfloat16", "a buffer of old checkpoints"],
)
def test_checkpoints_that_are_only_unusual_load(llama: Path, change: Callable) -> None:
    model.load(str(edit(llama, change)))


def test_a_tied_head_may_be_in_the_checkpoint_or_not(tmp_path: Path) -> None:
    """Qwen3-0.6B has it."""
    folder = make_model(tmp_path, "Llama", tie_word_embeddings=True)
    model.load(str(folder))
    model.load(str(edit(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})))


# ------------------------------------------------------------------ engines that cannot be built


@pytest.mark.parametrize(
    ("flags", "change", "config", "sentence"),
    [
        (
            dict(kv_cache_gb=0.0001),
            without(),
            {},
            "--kv-cache-gb 0.0001: no room for the keys and values of --max-length 256",
        ),
        (
            dict(kv_cache_gb=1e-7),
            without(),
            {},
            "--kv-cache-gb 1e-07: no room for the keys and values of --max-length 256",
        ),
        (dict(kv_cache_gb=4096), without(), {}, "--kv-cache-gb 4096.0: that much memory is not free"),
        (dict(max_num_seqs=100_000), without(), {}, "--max-num-seqs 100000: "),
        ({}, without(), dict(architectures=["NoneForCausalLM"]), "NoneForCausalLM'] are not supported"),
        ({}, extra_layer, {}, "model.layers.2.input_layernorm.weight"),
        ({}, without("layers.1.input_layernorm"), {}, "model.layers.1.input_layernorm.weight: missing"),
        ({}, without(), dict(vocab_size=80), "model.embed_tokens.weight: not of the shape in config.json"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_an_engine_that_cannot_be_built_is_a_sentence_with_the_flag_to_change(
    flags: dict,
    change: Callable,
    config: dict,
    sentence: str,
    llama: Path,
    make_engine: Callable,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edit(llama, change, **config)
    sizes = dict(max_length=256, max_prompt=64, detect_length=8, kv_cache_gb=0.05, max_num_seqs=8) | flags
    _, args, _ = settings(llama, **sizes)
    if not torch.distributed.is_initialized():
        model.distributed.start_process_group()
    said = refused(capsys, model.engine_from, args, CPU, 64)
    assert sentence in said and "max_model_len" not in said and "gpu_memory_utilization" not in said


# ------------------------------------------------------------------ the proof


def test_the_proof_leaves_weights_and_randomness_as_they_are(trainer: Callable[..., Trainer], llama: Path) -> None:
    trained = trainer(llama)
    before = {name: tensor.clone() for name, tensor in trained.weights()}
    state = torch.get_rng_state()
    model.sampler_follows(trained)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.weights())
    model.flip(trained.policy)
    changed = dict(trained.weights())
    assert not any(torch.equal(before[name], tensor) for name, tensor in changed.items())


def test_a_sampler_that_does_not_follow_is_refused_before_anything_is_evaluated(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that vLLM takes in part: here a tied head that keeps its old pack."""
    trained = trainer(make_model(tmp_path / "model", "Llama", tie_word_embeddings=True))
    monkeypatch.setattr(trained.engine, "_packed", [])
    with pytest.raises(SamplerGapError, match="LlamaForCausalLM the sampler's log-probs are not the trainer's"):
        trained.run("test")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_trainer_that_is_not_transformers_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A forward that ends otherwise than the trainer's: both would agree with a sampler that has the same gap."""
    policy = Policy(model.load(str(llama)), 0.7)
    model.forward_agrees(policy, str(llama))
    own = Policy.forward
    monkeypatch.setattr(Policy, "forward", lambda self, *inputs: tuple(1.01 * values for values in own(self, *inputs)))
    assert "LlamaForCausalLM the trainer's log-probs" in refused(capsys, model.forward_agrees, policy, str(llama))


def test_a_sync_must_bring_each_tensor_and_no_other(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    """vLLM has a line in its log for a tensor that is left out, and none for one that it drops."""
    folder = make_model(tmp_path, "Qwen3Moe", **FAMILIES["Qwen3-MoE"][1])
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = make_engine(folder, kv_cache_gb=0.05)
    weights = revert_weight_conversion(loaded, {name: p.detach() for name, p in loaded.named_parameters()})
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in weights
    engine.sync(weights.items())
    with pytest.raises(EngineError, match=f"{len(weights)} tensors"):
        engine.sync({}.items())
    for name in (
        "model.norm.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
    ):
        with pytest.raises(EngineError, match=name):
            engine.sync((weights.keys() - {name} and {n: t for n, t in weights.items() if n != name}).items())
        with pytest.raises(EngineError, match=name):
            engine.sync((weights | {name: weights[name][:-1]}).items())
        with pytest.raises(EngineError, match=f"{name}s"):
            engine.sync((weights | {f"{name}s": weights[name]}).items())
    with pytest.raises(EngineError, match="model.layers.0.self_attn.k_proj.bias"):
        engine.sync((weights | {"model.layers.0.self_attn.k_proj.bias": torch.zeros(64)}).items())
    engine.sync(weights.items())


# ------------------------------------------------------------------ padded vocabularies


def test_ids_beyond_the_tokenizer_are_not_sampled_and_not_trained(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """verl#1398: ids without a text vanish in decoding, and `\\boxed{4` + id + `}` is graded right."""
    folder = make_model(tmp_path / "model", "Qwen3", head_dim=32, vocab_size=64, tie_word_embeddings=False)
    trained = trainer(folder)
    assert (trained.engine.vocabulary, trained.policy.vocabulary) == (28, 28)
    prompts, sampling = {0: [5, 6, 7]}, Sampling(60, (1,))
    rollouts = trained.engine.generate(prompts, 16, sampling, seed=1, confidence=True)
    assert max(max(r.token_ids) for r in rollouts) < 28
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for r in rollouts[:4]:
        with torch.no_grad():
            logits = plain(torch.tensor([prompts[0] + r.token_ids])).logits[0, 2:-1]
        # They would have much of the mass.
        assert logits.softmax(-1)[:, 28:].sum(-1).mean() > 0.3
        expected = logits[:, :28].log_softmax(-1)
        sampled = expected.gather(1, torch.tensor(r.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(r.logprobs), sampled, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(r.confidences).float(), -expected.sum(-1), atol=1e-2, rtol=1e-4)
    lines = trained.run("test")[1:]
    assert max(line["gap_max"] for line in lines) < 1e-4 and sum(line["optimizer_steps"] for line in lines) > 0


def test_the_vocabulary_ends_with_the_last_id_that_means_something() -> None:
    rows = transformers.Qwen3Config(vocab_size=96)
    assert model.vocabulary(TOKENIZER, [1], rows) == max(TOKENIZER.get_vocab().values()) + 1 == 28
    assert model.vocabulary(TOKENIZER, [1, 80], rows) == 81
    assert model.vocabulary(TOKENIZER, [1], transformers.Qwen3Config(vocab_size=20)) == 20
