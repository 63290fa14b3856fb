"""Regenerates the golden files in `golden/`. Needs Python with torch and transformers >= 5.23.

    python tests/models/make_golden.py

Committed results are compared by the test_parity_*.py files, which need neither.
"""

import argparse

import torch
from golden import (
    deepseek_oracle,
    dflash_oracle,
    gemma_oracle,
    gpt_oss_oracle,
    lfm2_oracle,
    llama_oracle,
    mellum_oracle,
    minimax_m2_oracle,
    mistral4_oracle,
    muse_glimmer_oracle,
    nemotron_h_oracle,
    qwen3_moe_oracle,
    qwen3_oracle,
    sparse_oracle,
    vision_oracle,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = (
        "qwen3",
        "qwen3_moe",
        "llama",
        "gpt_oss",
        "gemma",
        "deepseek",
        "sparse",
        "dflash",
        "vision",
        "lfm2",
        "nemotron_h",
        "all",
    )
    parser.add_argument("family", nargs="?", choices=families, default="all")
    family = parser.parse_args().family
    torch.set_num_threads(1)
    sizes: dict[str, int] = {}
    if family in ("qwen3", "all"):
        sizes |= qwen3_oracle.write_all()
    if family in ("qwen3_moe", "all"):
        sizes |= qwen3_moe_oracle.write_all()
    if family in ("llama", "all"):
        sizes |= llama_oracle.write_all()
    if family in ("gpt_oss", "all"):
        sizes |= gpt_oss_oracle.write_all()
    if family in ("gemma", "all"):
        sizes |= gemma_oracle.write_all()
    if family in ("deepseek", "all"):
        sizes |= deepseek_oracle.write_all()
    if family in ("sparse", "all"):
        sizes |= sparse_oracle.write_all()
    if family in ("dflash", "all"):
        sizes |= dflash_oracle.write_all()
    if family in ("vision", "all"):
        sizes |= vision_oracle.write_all()
    if family in ("lfm2", "muse_glimmer", "mellum", "minimax_m2", "mistral4", "all"):
        sizes |= lfm2_oracle.write_all()
    if family in ("nemotron_h", "all"):
        sizes |= nemotron_h_oracle.write_all()
    if family in ("muse_glimmer", "mellum", "minimax_m2", "mistral4", "all"):
        sizes |= muse_glimmer_oracle.write_all()
    if family in ("mellum", "all"):
        sizes |= mellum_oracle.write_all()
    if family in ("minimax_m2", "mistral4", "all"):
        sizes |= minimax_m2_oracle.write_all()
    if family in ("mistral4", "all"):
        sizes |= mistral4_oracle.write_all()
    for case, size in sizes.items():
        print(f"{case:28s} {size / 1000:8.1f} kB")
    print(f"{'in all':28s} {sum(sizes.values()) / 1000:8.1f} kB")


if __name__ == "__main__":
    main()
