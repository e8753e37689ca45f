"""GPU memory per rank and phase, by support/memory.py: no GPU, no weights, no download.

    python -m bench.memory                              four models on three machines
    python -m bench.memory --token-budget 16384         any flag of arrol.py
    python -m bench.memory --model Qwen/Qwen3-14B-Base  another one: a folder, or a hub id

What is assumed is listed in support/memory.py.
"""

from __future__ import annotations

import argparse
import copy

from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from bench.tables import markdown
from support.args import TINY, Args, parse
from support.memory import Estimate, Shape, first_misfit


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=tied,
    )  # fmt: skip


# The published config.json, as far as sizes go.
MODELS: dict[str, PretrainedConfig] = {
    "Qwen3-1.7B-Base": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B-Base": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B-Base": _qwen3(4096, 12_288, 36, 32, tied=False),
    "Llama-3.2-1B": LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
}  # fmt: skip
# Ranks, and bytes per GPU as CUDA reports them.
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


def table(models: dict[str, PretrainedConfig], args: Args) -> str:
    """`models` on MACHINES, without and with offload; sizes in GB (1e9 bytes) per rank."""
    rows = [list(HEADER)]
    for name, config in models.items():
        counted = Shape(config)
        for machine, (ranks, device_bytes) in MACHINES.items():
            for offload in (False, True):
                flags = copy.copy(args)
                flags.offload = offload
                found = Estimate(counted, flags, ranks, device_bytes)
                sizes = (found.weights, found.masters, found.gradients, found.adam, found.activations, found.logits)
                phases = (*(found.phases[phase] for phase in PHASES), found.host)
                cells = [[f"{size / 1e9:.1f}" for size in group] for group in (sizes, phases)]
                misfit = first_misfit(counted, flags, ranks, device_bytes) or "fits"
                switch = "yes" if offload else "no"
                rows.append([name, machine, switch, *cells[0], f"{found.kv_tokens:,}", *cells[1], misfit])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id (default: the four of the README)")
    own, rest = parser.parse_known_args()
    # With any model named, the defaults are those of a real one.
    args = parse(["--model", own.model or str(TINY), *rest])
    print(
        f"GB per GPU at --token-budget {args.token_budget:,}, --max-length {args.max_length:,}, --max-num-seqs"
        f" {args.max_num_seqs} and --gpu-memory-utilization {args.gpu_memory_utilization}\n"
    )
    print(table({own.model: AutoConfig.from_pretrained(own.model)} if own.model else MODELS, args))


if __name__ == "__main__":
    main()
