"""Regenerates the golden files in `golden/`. Needs Python with torch and transformers >= 5.23.

    python tests/models/make_golden.py

Committed results are compared by the test_parity_*.py files, which need neither.
"""

import argparse

import torch
from golden import (
    deepseek_oracle,
    deepseek_v4_oracle,
    dflash_oracle,
    gemma_oracle,
    glm5_next_oracle,
    gpt_oss_oracle,
    inkling_oracle,
    kimi_linear_oracle,
    laguna_oracle,
    lfm2_oracle,
    llama_oracle,
    mellum_oracle,
    mimo_v2_oracle,
    minimax_m2_oracle,
    minimax_m3_oracle,
    mistral4_oracle,
    muse_glimmer_oracle,
    nemotron_h_oracle,
    qwen3_moe_oracle,
    qwen3_oracle,
    qwen4_exp_oracle,
    sparse_oracle,
    vision_oracle,
)

ORACLES = {
    "qwen3": qwen3_oracle, "qwen3_moe": qwen3_moe_oracle, "llama": llama_oracle, "gpt_oss": gpt_oss_oracle, "gemma": gemma_oracle,
    "deepseek": deepseek_oracle, "sparse": sparse_oracle, "dflash": dflash_oracle, "vision": vision_oracle, "lfm2": lfm2_oracle,
    "muse_glimmer": muse_glimmer_oracle, "mellum": mellum_oracle, "minimax_m2": minimax_m2_oracle, "minimax_m3": minimax_m3_oracle,
    "mistral4": mistral4_oracle, "laguna": laguna_oracle, "glm5_next": glm5_next_oracle, "kimi_linear": kimi_linear_oracle,
    "deepseek_v4": deepseek_v4_oracle, "inkling": inkling_oracle,
    "mimo_v2": mimo_v2_oracle, "nemotron_h": nemotron_h_oracle, "qwen4_exp": qwen4_exp_oracle,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="?", choices=(*ORACLES, "all"), default="all")
    family = parser.parse_args().family
    torch.set_num_threads(1)
    sizes: dict[str, int] = {}
    for name, oracle in ORACLES.items():
        if family in (name, "all"):
            sizes |= oracle.write_all()
    for case, size in sizes.items():
        print(f"{case:28s} {size / 1000:8.1f} kB")
    print(f"{'in all':28s} {sum(sizes.values()) / 1000:8.1f} kB")


if __name__ == "__main__":
    main()
