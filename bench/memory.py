"""GPU memory per rank and phase, computed from configs and flags by memory.py: no GPU, no weights, no download.

    python bench/memory.py                              four models on three machines, with the defaults of arrol.py
    python bench/memory.py --token-budget 16384 --markdown memory.md
    python bench/memory.py --model Qwen/Qwen3-14B-Base  another one: a folder, or a hub id, of which the config is loaded

Any flag of arrol.py goes too. What is assumed is listed in memory.py.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.args import TINY, Args, parse
from support.memory import Estimate, estimate, first_misfit, shape

_QWEN3 = dict(vocab_size=151_936, num_key_value_heads=8, head_dim=128)
_LLAMA = dict(vocab_size=128_256, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)
# The published config.json, as far as sizes go.
MODELS: dict[str, PretrainedConfig] = {
    "Qwen3-1.7B-Base": Qwen3Config(
        **_QWEN3, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "Qwen3-4B-Base": Qwen3Config(
        **_QWEN3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "Qwen3-8B-Base": Qwen3Config(
        **_QWEN3, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "Llama-3.2-1B": LlamaConfig(
        **_LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32
    ),
}  # fmt: skip
# Ranks and bytes per GPU. CUDA reports about 79.2 GiB of an 80 GB card and 94.5 GiB of a GH200's 96 GB.
MACHINES = {
    "1 × 96 GB (GH200)": (1, int(94.5 * 2**30)),
    "1 × 80 GB": (1, int(79.2 * 2**30)),
    "8 × 80 GB": (8, int(79.2 * 2**30)),
}
PHASES = ("generate", "logprob", "update", "sync")
HEADER = (
    "model", "GPUs", "`--offload`", "bf16 weights", "fp32 masters", "gradients", "Adam", "activations", "logits chunk",
    "KV cache, tokens", *PHASES, "host", "",
)  # fmt: skip


def row(model: str, machine: str, offload: bool, found: Estimate, misfit: str | None) -> list[str]:
    """One line of the table; sizes in GB (1e9 bytes) per rank."""
    parts = (found.weights, found.masters, found.gradients, found.adam, found.activations, found.logits)
    sizes, phases = (
        [f"{size / 1e9:.1f}" for size in group]
        for group in (parts, (*(found.phases[phase] for phase in PHASES), found.host))
    )
    return [model, machine, "yes" if offload else "no", *sizes, f"{found.kv_tokens:,}", *phases, misfit or "fits"]


def table(models: dict[str, PretrainedConfig], args: Args) -> str:
    """The Markdown table of `models` on MACHINES, with and without offload."""
    rows = [list(HEADER), ["---"] * len(HEADER)]
    for name, config in models.items():
        counted = shape(config)
        for machine, (ranks, device_bytes) in MACHINES.items():
            for offload in (False, True):
                flags = copy.copy(args)
                flags.offload = offload
                found = estimate(counted, flags, ranks, device_bytes)
                rows.append(row(name, machine, offload, found, first_misfit(counted, flags, ranks, device_bytes)))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id (default: the four of the README)")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    own, rest = parser.parse_known_args()
    # The defaults of a real model, which is named: without a name, arrol.py's are those of the embedded one.
    args = parse(["--model", str(own.model or TINY), *rest])
    text = table({own.model: AutoConfig.from_pretrained(own.model)} if own.model else MODELS, args)
    caption = (
        f"GB per GPU at --token-budget {args.token_budget:,}, --max-length {args.max_length:,}, --max-num-seqs"
        f" {args.max_num_seqs} and --gpu-memory-utilization {args.gpu_memory_utilization}"
    )
    print(f"{caption}\n\n{text}")
    if own.markdown:
        own.markdown.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
