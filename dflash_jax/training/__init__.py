"""Training of the pair that ships with this package: a small Qwen3-shaped target and a DFlash drafter for it.

    python -m dflash_jax.training --out DIR --work WORKDIR

The stages run in order, and each keeps its result in WORKDIR, so that an interrupted run goes on where it stopped: corpus
(`corpus`, `licences`, `tokenizer`), target (`target`), continuations by the target (`rollouts`), drafter (`drafter`, `losses`;
`kinds` and `head_losses` for DFlash 2 and DSpark), acceptance on files none of them saw (`evaluate`), and Hugging Face folders with
model cards (`export`, `card`).

The recipe is that of "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036, section 4.2.
"""
