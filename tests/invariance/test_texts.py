"""`exact` texts in bfloat16: the same whatever is drafted and whoever is served beside it. Small pairs of every kind that the mode
takes, on a CPU and on a GPU, and on a GPU the pair that ships."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflash_jax as dj
from dflash_jax.checkpoints.calibration import calibrate
from dflash_jax.compile.programs import Programs
from dflash_jax.engine import Engine
from dflash_jax.engine.planning import check_exact
from dflash_jax.engine.requests import Request
from dflash_jax.errors import ParameterError
from dflash_jax.models import DeepseekConfig, family_for
from dflash_jax.models.heads import MarkovConfig, SelectorConfig
from dflash_jax.models.qwen3_moe import Qwen3MoeConfig
from dflash_jax.options import LoadOptions
from dflash_jax.parallel import collectives
from dflash_jax.parallel.ranks import local_ranks
from dflash_jax.quantization.mxfp4 import Mxfp4
from dflash_jax.quantization.weights import quantize_weights

from ..devices import on
from ..hybrid_pair import hybrid_config
from ..models import test_gpt_oss
from ..random_pair import VOCAB, Pair, draft_config, random_prompts, target_config
from ..shared_weights import shared_weights

PROMPTS = Path(__file__).parent.parent / "data" / "heldout_prompts.json"
EXACT: Any = {"exact": True, "dtype": jnp.dtype("bfloat16"), "page_size": 32, "max_batch": 4}
LENGTHS = (40, 70, 20, 33, 50, 3, 33, 1)
GREEDY = dj.SamplingParams(max_tokens=40)
SAMPLED = dj.SamplingParams(max_tokens=40, temperature=0.9, top_p=0.9, top_k=30, seed=5)

SIZES: Any = {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 64, "num_layers": 2, "windows": (None,) * 2}
EXPERTS: Any = {"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 16, "norm_routing_weights": True}
LATENT = DeepseekConfig(
    **SIZES, **EXPERTS, num_heads=3, num_kv_heads=3, head_dim=14, q_lora_rank=20, kv_lora_rank=128, qk_nope_head_dim=8,
    qk_rope_head_dim=6, v_head_dim=10, num_shared_experts=1, routing="noaux_tc", num_groups=1, groups_per_token=1,
    routing_scale=1.5, num_dense_layers=1,
)  # fmt: skip


def in_sixteen_bits(weights: Any, kind: Any = None) -> None:
    """And the target's large matrices in `kind`. The drafter is right now and then: it shares the target's embedding and says
    little of its own."""
    for name in weights["draft"]:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights["draft"][name] = weights["draft"][name] * 0.0
    for role, table in weights.items():
        weights[role] = {name: array.astype(jnp.bfloat16) for name, array in table.items()}
    if kind is not None:
        weights["target"] = quantize_weights(weights["target"], kind)


def small(target: Any = None, draft: Any = None, kind: Any = None, **options: Any) -> Pair:
    """Four slots verify sixteen rows: of other numbers a CPU's batched products depend on a row's place."""
    return Pair(
        target, draft or draft_config(block_size=4), edit=partial(in_sixteen_bits, kind=kind), **EXACT | options
    )


def of_gpt_oss(**options: Any) -> Pair:
    """Windows, sinks, biases and experts in four bits."""
    made, *_ = test_gpt_oss.make_pair()
    weights = {
        role: {name: _narrowed(array) for name, array in table.items()} for role, table in made.engine.weights.items()
    }
    pair = object.__new__(Pair)
    pair.target, pair.draft = made.target, made.draft
    pair.engine = Engine(target=made.target, draft=made.draft, weights=weights, max_model_len=160, **EXACT | options)
    return pair


def _narrowed(weight: Any) -> Any:
    return replace(weight, dtype=EXACT["dtype"]) if isinstance(weight, Mxfp4) else weight.astype(EXACT["dtype"])


def shared(ranks: int, kind: Any = None, **options: Any) -> Pair:
    """Of devices that share heads, feed-forwards and the vocabulary."""
    devices = local_ranks(ranks)
    assert devices is not None
    sizes: Any = {"vocab_size": 96, "num_heads": 4, "num_kv_heads": 2}
    target, draft = target_config(**sizes), draft_config(**sizes, block_size=4, mask_token_id=95)
    pair = small(target, draft, kind, **options)
    both = [(config, family_for(config)) for config in (target, draft)]
    weights = shared_weights(both, pair.engine.weights, devices)
    programs = Programs(ranks=devices)
    pair.engine = Engine(target, draft, weights, programs=programs, max_model_len=160, **EXACT | options)
    return pair


def in_eight_bits(make: Callable[..., Pair], cache_dtype: Any) -> Pair:
    """Of pages on scales that were found before."""
    pair = make(cache_dtype=cache_dtype)
    given: Any = pair.engine.weights["target"]
    scales = calibrate(
        pair.target, given, random_prompts(LENGTHS), cache_dtype=cache_dtype, ranks=pair.engine.programs.ranks
    )
    pair.engine = replace(pair.engine, cache_scales=scales)
    return pair


PAIRS: dict[str, Callable[..., Pair]] = {
    "heads": small,
    "windows": partial(small, target_config(windows=(20, None))),
    "experts": partial(small, Qwen3MoeConfig(**SIZES, **EXPERTS, num_heads=4, num_kv_heads=2, head_dim=16)),
    "latents": partial(small, LATENT),
    "sinks and windows": of_gpt_oss,
    "DSpark": partial(small, None, draft_config(block_size=4, head=MarkovConfig(rank=6))),
    "DFlash 2": partial(small, None, draft_config(block_size=4, head=SelectorConfig(rank=6, top_k=5), conv_taps=2, conv_group=8)),
    "weights in int8": partial(small, kind="int8"),
    "weights in fp8": partial(small, kind="fp8"),
    "weights and rows in fp8": partial(small, kind="fp8_dynamic", max_batch=16),
    "pages in fp8": partial(in_eight_bits, small, "fp8"),
    "pages in int8": partial(in_eight_bits, small, "int8"),
    "windows, pages in fp8": partial(in_eight_bits, partial(small, target_config(windows=(20, None))), "fp8"),
    "sinks and windows, pages in int8": partial(in_eight_bits, of_gpt_oss, "int8"),
    "two devices, pages in fp8": partial(in_eight_bits, partial(shared, 2), "fp8"),
    "pages in fp8_e5m2": partial(small, cache_dtype="fp8_e5m2"),
    "pages in int8_keys": partial(small, cache_dtype="int8_keys"),
    "latent rows in fp8": partial(small, LATENT, cache_dtype="fp8"),
    "latent rows packed": partial(small, LATENT, cache_dtype="fp8_packed"),
    "two devices": partial(shared, 2),
    "four devices": partial(shared, 4),
}  # fmt: skip
PLACES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.mark.few
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.several if "devices" in kind else ()) for kind in PAIRS]
)
@pytest.mark.parametrize("place", PLACES)
def test_small_pairs(place: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted, plain, alone, in batches of up to eight, again with the prompts' pages, and with pages for fewer."""
    needed = {"two": 2, "four": 4}[kind.split()[0]] if "devices" in kind else 1
    if len(jax.devices()) < needed:
        pytest.skip(f"{needed} GPUs are not here")
    # Messages of every size are large ones: what promises nothing is never added up in shares.
    monkeypatch.setattr(collectives, "GATHERED_BYTES", 0)
    pair, prompts = PAIRS[kind](), random_prompts(LENGTHS)
    each = [(GREEDY, SAMPLED)[index % 2] for index in range(len(prompts))]
    plain, ones, _ = pair.run(prompts, each, draft=False)
    drafted, counts, _ = pair.run(prompts, each)
    assert drafted == plain
    assert {count for row in ones for count in row} == {1}
    assert max(max(row) for row in counts) > 1, "nothing that was proposed stood"
    for some in ([1], [0, 5, 3]):
        again = pair.run([prompts[index] for index in some], [each[index] for index in some])[0]
        assert again == [plain[index] for index in some]
    found = list(pair.engine.run([Request(0, tuple(prompts[1]), GREEDY)]))
    assert found[0].cached == 64
    pair.engine = replace(pair.engine, num_pages=6, window_pages=tuple(6 for _ in pair.engine.window_pages))
    assert pair.run(prompts, each)[0] == plain
    assert pair.engine.scheduler.stats.preemptions > 0


@pytest.mark.parametrize(
    ("target", "options", "why"),
    [
        (hybrid_config(), {}, "gated delta nets sum the tokens of a block in another order"),
        (LATENT, {"cache_dtype": "fp8", "verify_length": 4}, "the kernel for up to 16 queries over latent rows"),
    ],
    ids=["gated delta nets", "few latent queries"],
)
def test_refused(target: Any, options: Any, why: str) -> None:
    with pytest.raises(ParameterError, match=why):
        check_exact(target, draft_config(), LoadOptions(exact=True, **options))


@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_pages_in_eight_bits_are_taken(kept: Any) -> None:
    """By a kernel of this mode on a Hopper GPU; XLA attends to them elsewhere."""
    for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "cpu"):
        with on(name) if name != "cpu" else nullcontext():
            check_exact(target_config(), None, LoadOptions(exact=True, cache_dtype=kept))
    with on("NVIDIA H200"):
        check_exact(LATENT, None, LoadOptions(exact=True, cache_dtype="fp8", verify_length=None))


def test_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other GPUs than Hopper, where its kernel would attend to latent rows. To pages of heads XLA attends then."""
    monkeypatch.setattr("dflash_jax.execution.plan._has_triton", lambda: True)
    with on("NVIDIA A100-SXM4-80GB"):
        check_exact(target_config(), None, LoadOptions(exact=True))
        with pytest.raises(ParameterError, match="Triton's kernel of latent attention, which NVIDIA A100"):
            check_exact(LATENT, None, LoadOptions(exact=True))
    with on("NVIDIA H200"):
        check_exact(LATENT, None, LoadOptions(exact=True))


@pytest.fixture(scope="module", params=[1, 8, 32])
def model(request: pytest.FixtureRequest) -> dj.Model:
    return dj.load(exact=True, dtype="bfloat16", max_batch=request.param, max_model_len=512)


def params(sampled: bool, index: int) -> dj.SamplingParams:
    law = {"temperature": 0.8, "top_p": (1.0, 0.9)[index % 2], "seed": index} if sampled else {}
    return dj.SamplingParams(max_tokens=128, ignore_eos=True, **law)


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [(False, False), (True, True), (False, True)], ids=["greedy", "sampled", "both"])
def test_the_shipped_pair(model: dj.Model, sampled: tuple[bool, bool]) -> None:
    """The second and third runs find the prompts' pages."""
    prompts = [row["text"] for row in json.loads(PROMPTS.read_text())]
    each = [params(sampled[index % 2], index) for index in range(len(prompts))]
    served: Any = partial(dj.generate, model, prompts, each)
    drafted = [row.token_ids for row in served()]
    assert [row.token_ids for row in served(draft=False)] == drafted
    assert [dj.generate(model, *one).token_ids for one in zip(prompts, each, strict=True)] == drafted


@pytest.mark.gpu
@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_the_shipped_pair_over_pages_in_eight_bits(kept: Any, max_batch: int) -> None:
    """Half of its texts are sampled."""
    prompts = [row["text"] for row in json.loads(PROMPTS.read_text())][:40]
    options: Any = {"exact": True, "dtype": "bfloat16", "max_batch": max_batch, "max_model_len": 512}
    found = dj.load(cache_dtype=kept, calibration=prompts[:8], **options)
    each = [params(index % 2 == 1, index) for index in range(len(prompts))]
    served: Any = partial(dj.generate, found, prompts, each)
    drafted = [row.token_ids for row in served()]
    assert [row.token_ids for row in served(draft=False)] == drafted
    assert [dj.generate(found, *one).token_ids for one in zip(prompts, each, strict=True)] == drafted
