"""Checks of tensor parallelism: models and options that several GPUs cannot share are refused, with the sizes that say why."""

from collections.abc import Iterator

import jax

from dflash_jax.attention.context_parallel import most_queries
from dflash_jax.cache.specs import layer_specs
from dflash_jax.config import DecoderConfig
from dflash_jax.errors import ParameterError
from dflash_jax.models import DFlashConfig
from dflash_jax.models.registry import family_for, layer_traits
from dflash_jax.options import FROM_TRAFFIC, LoadOptions


def sharing_refusals(target: DecoderConfig, draft: DFlashConfig | None, ranks: int) -> list[str]:
    """Why so many devices cannot share a target and its drafter; none where they can."""
    reasons = [f"the target: {reason}" for reason in _refusals(target, ranks)]
    return reasons + ([] if draft is None else [f"the drafter: {reason}" for reason in _refusals(draft, ranks)])


def check_sharing(target: DecoderConfig, draft: DFlashConfig | None, options: LoadOptions) -> None:
    """Raises ParameterError, with every reason, where `options.tp` devices cannot share a target and its drafter."""
    _check_dealing(target, draft, options)
    if options.tp == 1:
        return
    reasons = sharing_refusals(target, draft, options.tp)
    if options.cache_scales == FROM_TRAFFIC and jax.process_count() > 1:
        reasons.append(
            f'cache_scales="{FROM_TRAFFIC}" finds scales in one process of several: give texts as calibration, or a file'
        )
    if reasons:
        raise ParameterError(f"tp={options.tp} cannot be: {'; '.join(reasons)}")


def _check_dealing(target: DecoderConfig, draft: DFlashConfig | None, options: LoadOptions) -> None:
    """Raises ParameterError where pages cannot be dealt out as asked."""
    dealt, subject = options.decode_context_parallel_size, "decode_context_parallel_size"
    run = options.cp_kv_cache_interleave_size or options.page_size
    if options.page_size % run:
        raise ParameterError(f"cp_kv_cache_interleave_size={run} must divide page_size={options.page_size}")
    if dealt == 1:
        if options.cp_kv_cache_interleave_size is not None:
            raise ParameterError(
                f"cp_kv_cache_interleave_size={run} is for pages that are spread: give {subject}, or leave it out"
            )
        return
    traits, name = layer_traits(target), family_for(target).name
    # Ranks that keep the same keys: all of them where a row is all heads'.
    most = max(1, options.tp // (1 if traits.attention == "latent" else traits.kv_heads))
    if most == 1:
        raise ParameterError(
            f"{subject}={dealt} spreads pages over devices that keep the same keys, and each of tp={options.tp} has some of "
            f"{name}'s {traits.kv_heads} key heads for itself: leave it out"
        )
    if dealt != most:
        raise ParameterError(
            f"{subject} must be 1 or {most}, the devices of tp={options.tp} that keep the same keys of {name}, got {dealt}"
        )
    if traits.attention == "heads" and (traits.window or traits.sinks or traits.normed_out or traits.uneven_heads):
        raise ParameterError(
            f"{subject}={dealt} is not there for {name}, whose layers have windows, attention sinks, soft caps or heads of "
            "several kinds: leave it out"
        )
    if traits.attention == "heads" and options.cache_dtype is not None:
        raise ParameterError(
            f"{subject}={dealt} deals out pages of heads in the model's dtype, got cache_dtype={options.cache_dtype!r}: leave one "
            "out"
        )
    if options.query_dtype is not None:
        raise ParameterError(
            f"{subject}={dealt} attends with queries in the model's dtype, got query_dtype={options.query_dtype!r}: leave one out"
        )
    if traits.compressed:
        raise ParameterError(f"{subject}={dealt} is not there for {name}, which keeps compressed keys: leave it out")
    if any(spec.index for spec in layer_specs(target)):
        raise ParameterError(
            f"{subject}={dealt} is not there for {name}, whose indexer chooses rows among all: leave it out"
        )
    verified, most = 1 if draft is None else draft.num_drafts + 1, most_queries(dealt, run)
    if traits.attention == "latent" and verified > most:
        raise ParameterError(
            f"{subject}={dealt} with runs of {run} tokens on a device verifies up to {most} tokens of a sequence, the drafter's "
            f"blocks have {verified}: raise page_size or cp_kv_cache_interleave_size"
        )


def _refusals(config: DecoderConfig, ranks: int) -> Iterator[str]:
    """Why so many devices cannot share a model."""
    traits = layer_traits(config)
    if traits.short_conv:
        yield "short convolutions are not shared"
    if traits.relative:
        yield "attention with a bias by distance is not shared"
    if traits.block_sparse:
        yield "heads that attend to blocks of their own choice are not shared"
    if traits.mamba2:
        yield "layers of Mamba 2 are not shared"
    if traits.streams > 1 and not traits.compressed:
        yield "layers with several residual streams are not shared"
    if (groups := getattr(config, "out_groups", 0)) % ranks:
        yield f"{groups} groups of heads, which are projected by themselves, are no multiple of {ranks}"
    if getattr(config, "kda", None) is not None:
        yield "Kimi delta attention is not shared"
    if traits.normed_together and traits.kv_heads % ranks:
        yield f"{traits.kv_heads} key heads, which are normed together, are no multiple of {ranks}"
    for heads in ("linear_key_heads", "linear_value_heads"):
        if (count := getattr(config, heads, 0)) % ranks:
            yield f"{count} {heads.removeprefix('linear_').replace('_', ' ')} of gated delta nets are no multiple of {ranks}"
    for count in dict.fromkeys((traits.heads, *getattr(config, "layer_heads", ()))):
        if count % ranks:
            yield f"{count} query heads are no multiple of {ranks}"
    counts = [traits.kv_heads] + ([] if traits.full_heads is None else [traits.full_heads[0]])
    for count in dict.fromkeys(counts if traits.attention == "heads" else ()):
        if count % ranks and ranks % count:
            yield f"{count} key heads neither divide {ranks} nor are a multiple of it"
    if traits.feed_forward != "moe" and traits.inner % ranks:
        yield f"feed-forwards of {traits.inner} are no multiple of {ranks}"
    experts = 0 if traits.experts is None else traits.experts.count - traits.experts.shared
    if experts % ranks:
        yield f"{experts} experts are no multiple of {ranks}"
