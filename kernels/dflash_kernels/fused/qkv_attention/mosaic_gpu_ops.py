"""A CTA's queries, new keys and new values as Pallas calls them, and what stands for them in its interpreter."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused import mosaic_gpu_ops as chain
from dflash_kernels.fused.plan import Attention
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.thread_op import WORDS

_GMEM, _SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())


def ask(attention: Attention, refs, sequence, head, interpret: Any) -> tuple[list, list]:
    """What `put_queries` and `put_new` are made of, on its way to registers from here on."""
    if interpret is not None:
        return [], []

    from dflash_kernels.fused.qkv_attention import mosaic_gpu_heads as heads
    from dflash_kernels.mosaic_gpu import ptx as th

    asked = [WORDS] * heads.count(attention)

    @plgpu.inline_mgpu(arg_types=(*[_GMEM] * 5, *[_SCALAR] * 2), return_type=asked)
    def load(_ctx, *operands):
        return [th.as_array(found) for found in heads.ask(attention, *operands)]

    names = ("qkv", "cos", "sin", "q_norm", "k_norm")
    return heads.parted(load(*[refs[name] for name in names], sequence, head))


def put_queries(attention: Attention, eps: float, refs, asked: list, target, sequence, head, interpret: Any) -> None:
    """Normed, turned queries of a KV head to `target [1, 128, 64]`, two blocks of 64 rows."""
    if interpret is not None:
        chain.load_queries(attention, eps, refs, target, 0, sequence, head, interpret)
        return

    from dflash_kernels.fused.qkv_attention import mosaic_gpu_heads as heads
    from dflash_kernels.mosaic_gpu import ptx as th

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED), *[WORDS.layout] * len(asked)))
    def put(_ctx, target, *held):
        heads.put_queries(attention, eps, [th.as_words(array) for array in held], target)

    put(target.at[0], *asked)


def put_new(attention: Attention, eps: float, refs, asked: list, pages, sequence, head, limits, interpret: Any) -> None:
    """New keys and values of a head to the pages, those at positions `limits[1]` to `limits[2] - 1`.

    `pages`: of the first new token's tile and of the next one; `limits[0]`: position of the first new token.
    """
    if interpret is not None:
        chain.stage_new(attention, eps, refs, None, sequence, head, *limits, interpret)
        return

    from dflash_kernels.fused.qkv_attention import mosaic_gpu_heads as heads
    from dflash_kernels.mosaic_gpu import ptx as th

    @plgpu.inline_mgpu(arg_types=(*[_GMEM] * 2, *[_SCALAR] * 6, *[WORDS.layout] * len(asked)))
    def put(_ctx, k, v, head, first, low, high, page, following, *held):
        words = [th.as_words(array) for array in held]
        heads.put_new(attention, eps, words, (k, v), head, (first, low, high), (page, following))

    put(refs["k"], refs["v"], head, *limits, *pages, *asked)
