"""Every option of `load`, declared and checked once: `load`, the command line, `info` and `bench` read it here.

Values are as callers have them: Python's own numbers and flags, or scalars of numpy, JAX and the like, which `as_integer`,
`as_number` and `as_flag` make Python's, here and for other arguments. A number that comes out of an array is no less a number. What
would have to be rounded, counted as one or read is refused still: 5.0 for an integer, True for 1, a text, an array with an axis.

Nothing slow is imported, since the command line makes its arguments of these fields before it imports JAX. What an option comes to
for a model's sizes is in `engine/planning.py`.
"""

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args, no_type_check

from dflash_jax.errors import ParameterError

DEFAULT_MODEL_LEN = 4096
MOST_SNAPSHOTS = 4096
MOST_RANKS = 64
type WeightDtype = Literal["int8", "fp8", "fp8_dynamic", "mxfp4"]
AttentionOutput = Literal["fp8", "fp8_groups", "nvfp4"]
QueryDtype = Literal["fp8"]
VisionDtype = Literal["fp8"]
CacheDtype = Literal["fp8", "fp8_e5m2", "fp8_packed", "int8", "int8_keys", "fp8_e4m3", "fp8_ds_mla", "auto"]
DraftCacheDtype = Literal["fp8", "fp8_e5m2", "fp8_e4m3", "auto"]
Proposals = Literal["shared_noise", "argmax", "rejection"]
WEIGHT_DTYPES: tuple[str, ...] = get_args(WeightDtype.__value__)
# Formats that a release comes in: weights are kept so, never made so, and no drafter is released so.
RELEASED = ("mxfp4",)
DRAFT_WEIGHT_DTYPES = tuple(one for one in WEIGHT_DTYPES if one not in RELEASED)
VISION_DTYPES: tuple[str, ...] = get_args(VisionDtype)
QUERY_DTYPES: tuple[str, ...] = get_args(QueryDtype)
ATTENTION_OUTPUTS: tuple[str, ...] = get_args(AttentionOutput)
CACHE_DTYPES: tuple[str, ...] = get_args(CacheDtype)
DRAFT_CACHE_DTYPES: tuple[str, ...] = get_args(DraftCacheDtype)
# Of formats that have one name here and another one in vLLM, that one.
_CACHE_NAMES = {"fp8_e4m3": "fp8", "fp8_ds_mla": "fp8_packed"}
# As the target's checkpoint says.
AUTO = "auto"
PROPOSALS: tuple[str, ...] = get_args(Proposals)
FLOAT_DTYPES = ("bfloat16", "float16", "float32")
# Page dtypes whose scales are found on texts.
CALIBRATED = ("fp8", "int8")
# In place of a file of scales: they are found on the first prompts that come.
FROM_TRAFFIC = "traffic"


def as_integer(value: Any) -> int | None:
    """An integer, None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def are_integers(values: Collection[Any]) -> bool:
    """Whether all are integers; a long list of Python's own is one quick look."""
    return set(map(type, values)) == {int} or all(as_integer(value) is not None for value in values)


def is_list(value: Any) -> bool:
    """Whether things are listed: not by a text, nor by an array without axes, which says that it can be iterated and cannot."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) > 0


def as_layers(text: str) -> list[str]:
    """Layers of a text that has commas between them."""
    return text.split(",")


def as_number(value: Any) -> int | float | None:
    """An integer or a floating point number, infinite ones and NaN included, None for anything else."""
    if (whole := as_integer(value)) is not None:
        return whole
    return float(value) if isinstance(value, float) or "float" in _kind(value) else None


def as_flag(value: Any) -> bool | None:
    """True or False, None for anything else."""
    return bool(value) if isinstance(value, bool) or _kind(value) == "bool" else None


def _kind(value: Any) -> str:
    """The dtype's name of a scalar or of an array without axes, empty for all else."""
    return str(getattr(value, "dtype", "")) if getattr(value, "ndim", None) == 0 else ""


@dataclass(frozen=True)
class Flag:
    """An option as the command line has it.

    Attributes:
      about: what `--help` says.
      metavar: name of the value.
      choices: the values there are; None where others are possible.
      kind: makes the value of the text.
      switch: whether it has no value: to name it is True.
    """

    about: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    kind: Callable[[str], Any] = str
    switch: bool = False


def _length(text: str) -> int | str:
    """A number, or a word; the option's own check says which there are."""
    return int(text) if text.lstrip("-").isdigit() else text


def _yes_or_no(text: str) -> bool | str:
    return {"yes": True, "no": False}.get(text, text)


def three_numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


# Options that the command line has, in the order of its help; `--draft` and `--no-draft` exclude one another and are made apart.
FLAGS: dict[str, Flag] = {
    "dtype": Flag("of weights, activations and pages", choices=FLOAT_DTYPES),
    "max_model_len": Flag(
        "prompt and produced tokens of a request at most (default: the model's own, at most 4096)", kind=int
    ),
    "max_batch": Flag("prompts that run side by side at most (default: 8)", kind=int),
    "page_size": Flag("tokens of a page (default: 64)", kind=int),
    "num_pages": Flag("pages shared by all requests (default: as many as are needed)", kind=int),
    "state_snapshots": Flag(
        "recurrent states of a hybrid target that are kept for prompts that begin alike (default: twice max-batch, where there "
        "is room; 0 shares nothing)",
        kind=int,
    ),
    "proposals": Flag("how the drafter proposes where a request samples (default: shared_noise)", choices=PROPOSALS),
    "cache_dtype": Flag(
        "the target's pages in eight bits; fp8_packed is for targets with latent attention, int8 for others; auto is fp8 where the "
        "checkpoint says so",
        choices=CACHE_DTYPES,
    ),
    "cache_dtype_skip_layers": Flag(
        "layers whose pages stay as they are: numbers from 0, sliding_window, full_attention; commas between",
        kind=as_layers,
        metavar="LAYERS",
    ),
    "query_dtype": Flag(
        "with --cache-dtype fp8: queries of latent attention in float8 too, and keys and values of prompts",
        choices=QUERY_DTYPES,
    ),
    "draft_cache_dtype": Flag("the drafter's pages in eight bits", choices=DRAFT_CACHE_DTYPES),
    "calibration": Flag(
        "texts like those to be served, on which scales of fp8 and int8 pages are found: JSON list, JSON lines or one a line",
        metavar="FILE",
    ),
    "cache_scales": Flag(
        "scales of fp8 and int8 pages that were found before and saved; traffic finds them on the first prompts that come",
        kind=str,
        metavar="PATH",
    ),
    "scale_range": Flag(
        "numbers of float8 that the largest query, key and value lie at, where scales are found (default: 200,200,200)",
        kind=three_numbers,
        metavar="Q,K,V",
    ),
    "weight_dtype": Flag(
        "large matrices in eight bits, a scale for each row; fp8_dynamic rounds what they multiply too where rows are many; mxfp4 "
        "leaves the experts of such a release in four bits",
        choices=WEIGHT_DTYPES,
    ),
    "draft_weight_dtype": Flag("the same for the drafter alone, which changes no text", choices=DRAFT_WEIGHT_DTYPES),
    "attention_output": Flag(
        "with --weight-dtype fp8_dynamic: what latent attention gives, in eight or four bits, multiplied so",
        choices=ATTENTION_OUTPUTS,
    ),
    "verify_length": Flag(
        "tokens verified in a cycle: a number, auto for what pays, or per_request to have requests share them "
        "(default: the whole block)",
        kind=_length,
    ),
    "draft_window": Flag(
        "tokens of a context that the drafter sees, the last ones (default: all); changes no text", kind=int
    ),
    "exact": Flag(
        "the same text, bit by bit, whatever is drafted and whoever is served beside it, in bfloat16 too (docs/exactness.md)",
        switch=True,
    ),
    "tp": Flag(
        "GPUs that share the models, each with its heads, feed-forwards and rows of the head (default: 1)", kind=int
    ),
    "decode_context_parallel_size": Flag(
        "GPUs that pages are spread over of those that keep the same keys: 1, each has all of them (default), or all",
        kind=int,
    ),
    "cp_kv_cache_interleave_size": Flag(
        "tokens that lie on one of those GPUs before the next one's begin (default: a page)", kind=int
    ),
    "vision": Flag(
        "whether the tower that makes rows of pictures is loaded (default: where the target has one)",
        kind=_yes_or_no,
        metavar="yes|no",
    ),
    "vision_attention_dtype": Flag("queries, keys and values of the vision tower in float8", choices=VISION_DTYPES),
    "vision_scales": Flag(
        "their scales, found before and saved (default: by the largest numbers of the last 16 calls)", metavar="PATH"
    ),
    "revision": Flag("branch, tag or commit of a target's hub id", metavar="REV"),
    "draft_revision": Flag("the same for --draft", metavar="REV"),
}


@no_type_check  # it says itself what is wrong with a value
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of `load` beside the path. Scalars of numpy or JAX count as the numbers that they are.

    Attributes:
      draft: a drafter's path or id. None takes the one beside the target (a folder `draft` or `dflash` in it) or the published
        one for a hub id, where there is one; True insists on that; False loads none.
      dtype: of weights, activations and pages; None keeps the checkpoint's on GPUs and is float32 on CPUs.
      max_model_len: prompt and produced tokens of one request at most; None is the model's own limit, at most 4096.
      max_batch: requests that run side by side, no more than are expected: it also decides the layout of weights on Hopper
        (`dflash_jax.execution.weight_layout`).
      page_size: tokens of one page.
      num_pages: pages shared by all requests; None is enough for `max_batch` requests of full length, fewer where the device has
        no room for them. Layers with windows have pages of their own, as many as their windows need.
      state_snapshots: recurrent states of a hybrid target that are kept, so that prompts that begin alike share pages; each is as
        large as one slot's states. None is twice `max_batch`, fewer where pages leave no room for them; 0 shares nothing.
      proposals: how the drafter proposes where a request samples (never changes the text's law): "shared_noise", "argmax", or
        "rejection" for its own samples, of which block verification judges how many stand.
      cache_dtype: None keeps the target's pages in `dtype`. "fp8" keeps them in float8 (e4m3), "fp8_e5m2" (keys and values of
        heads) in that on scales of 1; "int8" (keys and values of heads) with a scale for each key and for each channel of the
        values, "int8_keys" so for keys alone, with values in `dtype`; "fp8_packed" (latents) in float8 with scales in each row.
        Texts may differ from those of unquantized pages. "auto" is "fp8" for a checkpoint that says so of its keys and values, by
        a `kv_cache_scheme` or by scales, and None for any other. vLLM's names "fp8_e4m3" and "fp8_ds_mla" are "fp8" and
        "fp8_packed".
      cache_dtype_skip_layers: layers of the target whose pages stay in `dtype`: numbers from 0 on, "sliding_window" for those with
        a window, "full_attention" for those without.
      query_dtype: "fp8", for targets with latent attention and `cache_dtype="fp8"`, rounds queries to float8 too: those of a few
        tokens with both parts joined, on a scale of their layer, those of long prompts on a scale of 1, with the keys and values
        that are made of the rows. None leaves queries as they are.
      draft_cache_dtype: "fp8" or "fp8_e5m2" keeps the drafter's pages in float8 with scales of 1. Only proposals change, no text.
      calibration: texts or token ids like those to be served, on which the scales of "fp8" pages and of "int8" values are found.
        Without, "fp8" has the scales of the checkpoint (`k_scale` and `v_scale` of compressed-tensors and ModelOpt), of 1 where it
        has none, and "int8" is refused.
      cache_scales: a file of `Model.save_cache_scales`, with scales that were found before. "traffic" finds them on the first
        prompts that come, before these are served (vLLM's `calculate_kv_scales`), and keeps them from then on.
      scale_range: three numbers from 1 to 448 of float8, of which the largest query, key and value seen in `calibration`, or by
        "traffic", comes to lie at one or below, as scales are powers of two; None is 200 for each. A latent row counts as a key.
      weight_dtype: None keeps weights in `dtype`. "int8" and "fp8" (W8A16) keep the large matrices of both models in eight bits
        with one scale per row; experts stay in `dtype`. "fp8_dynamic" (W8A8) also rounds activations where 64 rows or more are
        multiplied at once: faster for prompts and many requests, but logits then depend on how many tokens are computed together.
        Texts are those of the rounded target. "mxfp4" leaves experts that were released in MXFP4 in their four bits; other
        weights, and the drafter's, stay in `dtype`. On Hopper GPUs in bfloat16 None does so too, as a kernel reads them there.
      draft_weight_dtype: the same for the drafter alone; None is `weight_dtype`. Only proposals change, no text. A drafter that
        proposes with the target's head keeps a copy of it in eight bits.
      attention_output: for targets with latent attention and `weight_dtype="fp8_dynamic"`: what attention gives is rounded, however
        many tokens there are, and the output projection multiplies that. "fp8" is float8 on one scale of the layer, which its
        weights give, "fp8_groups" on a power of two for each 128 columns (64 where those do not fit), "nvfp4" four bits on a scale
        for each 16. Texts are those of the rounded target.
      verify_length: how many tokens of the block the target verifies in a cycle. None is the whole block, an integer stays, 1 is no
        drafting. "auto" chooses anew every few cycles by each request's acceptance and measured costs, and shares what is verified
        among unlike requests: more of a block where the drafter is sure of it; on CPUs it is None. "per_request" shares wherever
        that can be. No text depends on it.
      draft_window: tokens of a context that the drafter sees, the last ones, up to a page more; None for all. For contexts longer
        than a drafter was trained on. No text depends on it.
      exact: the same text, bit by bit, with drafting and without, alone and in any company, after hits in pages and after lost
        ones, in sixteen bits too: every cycle and every part of a prompt has one shape, of `max_batch` requests. See
        docs/exactness.md for what it costs and what it does not go with.
      tp: GPUs that share target and drafter (tensor parallelism), of this machine, or all of several hosts that have come
        together (`dflash_jax.parallel.hosts`); each holds its heads, its part of feed-forwards and of the vocabulary, and keys of
        its heads. For models that do not fit one, and for speed. With float32 weights drafting changes no text for a given number;
        another number adds in another order.
      decode_context_parallel_size: over how many of those GPUs that keep the same keys a target's pages are spread. 1: each has all
        of them. `tp` for latent rows, which all keep, and `tp` over the number of key heads where these are fewer: each has
        `page_size` tokens of every page, and a page has so many times as many. So many times the tokens fit, for two exchanges
        more in every layer. For contexts that do not fit otherwise.
      cp_kv_cache_interleave_size: tokens of a sequence that lie on one of these GPUs before the next one's begin, a divisor of
        `page_size`, which it is where None. Fewer spread short contexts better.
      vision: whether the target's vision tower is loaded, with which messages may hold pictures. None loads it where there is
        one, on the first GPU; True insists on it; False leaves it out.
      vision_attention_dtype: "fp8" rounds queries, keys and values of the vision tower's attention to float8, on a scale of each
        block. None leaves them.
      vision_scales: a file of `Model.save_vision_scales`, or of vLLM's, with those scales. Without, they follow from the largest
        numbers of the last 16 calls and of the newest one, so that a picture's rows depend on what was seen before.
      revision: branch, tag or commit of the target's hub id.
      draft_revision: the same for `draft`.

    Raises:
      ParameterError: a value that no model could take; it says which there are.
    """

    draft: str | Path | bool | None = None
    dtype: Any = None
    max_model_len: int | None = None
    max_batch: int = 8
    page_size: int = 64
    num_pages: int | None = None
    state_snapshots: int | None = None
    proposals: Proposals = "shared_noise"
    cache_dtype: CacheDtype | None = None
    cache_dtype_skip_layers: Sequence[int | str] = ()
    query_dtype: QueryDtype | None = None
    draft_cache_dtype: DraftCacheDtype | None = None
    calibration: Sequence[str | Sequence[int]] = ()
    cache_scales: str | Path | None = None
    scale_range: Sequence[float] | None = None
    weight_dtype: WeightDtype | None = None
    draft_weight_dtype: WeightDtype | None = None
    attention_output: AttentionOutput | None = None
    verify_length: int | str | None = None
    draft_window: int | None = None
    exact: bool = False
    tp: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int | None = None
    vision: bool | None = None
    vision_attention_dtype: VisionDtype | None = None
    vision_scales: str | Path | None = None
    revision: str | None = None
    draft_revision: str | None = None

    def __post_init__(self) -> None:
        counts = {"max_batch": 4096, "page_size": 4096, "num_pages": 2**31 - 1, "tp": MOST_RANKS}
        for name, most in (counts | {"decode_context_parallel_size": MOST_RANKS}).items():
            value = getattr(self, name)
            if not (name == "num_pages" and value is None):
                object.__setattr__(self, name, _count(name, value, most))
        if self.cp_kv_cache_interleave_size is not None:
            run = _count("cp_kv_cache_interleave_size", self.cp_kv_cache_interleave_size, self.page_size)
            object.__setattr__(self, "cp_kv_cache_interleave_size", run)
        if self.state_snapshots is not None:
            kept = as_integer(self.state_snapshots)
            if kept is None or not 0 <= kept <= MOST_SNAPSHOTS:
                raise ParameterError(
                    f"state_snapshots must be an integer from 0 to {MOST_SNAPSHOTS}, or None for as many as there is room for, "
                    f"got {self.state_snapshots!r}"
                )
            object.__setattr__(self, "state_snapshots", kept)
        for name in ("max_model_len", "verify_length", "draft_window"):
            if (number := as_integer(getattr(self, name))) is not None:
                object.__setattr__(self, name, number)
        if (exact := as_flag(self.exact)) is None:
            raise ParameterError(f"exact must be True or False, got {self.exact!r}")
        object.__setattr__(self, "exact", exact)
        if self.vision is not None:
            if (vision := as_flag(self.vision)) is None:
                raise ParameterError(
                    "vision must be True or False (--vision yes or no), or left out for the tower that there is, "
                    f"got {self.vision!r:.80}"
                )
            object.__setattr__(self, "vision", vision)
        _one_of("vision_attention_dtype", self.vision_attention_dtype, (None, *VISION_DTYPES))
        if self.vision_scales is not None and self.vision_attention_dtype is None:
            raise ParameterError('vision_scales are for vision_attention_dtype="fp8": give both, or leave them out')
        _one_of("proposals", self.proposals, PROPOSALS)
        check_weight_dtype(self.weight_dtype)
        check_weight_dtype(self.draft_weight_dtype, "draft_weight_dtype", DRAFT_WEIGHT_DTYPES)
        _one_of("attention_output", self.attention_output, (None, *ATTENTION_OUTPUTS))
        if self.attention_output is not None and self.weight_dtype != "fp8_dynamic":
            raise ParameterError(
                f'attention_output={self.attention_output!r} is multiplied by float8 weights: add weight_dtype="fp8_dynamic", or '
                "leave it out"
            )
        self._check_cache()
        if self.exact:
            self._check_exact()

    def _check_cache(self) -> None:
        """Puts formats of pages under the names that they have here."""
        for name, known in (("cache_dtype", CACHE_DTYPES), ("draft_cache_dtype", DRAFT_CACHE_DTYPES)):
            given = getattr(self, name)
            # An array is equal to nothing.
            if given is not None and (
                not isinstance(given, str) or (name == "draft_cache_dtype" and given not in known)
            ):
                raise ParameterError(f"{name} must be None or {' or '.join(map(repr, known))}, got {given!r}")
            if isinstance(given, str):
                object.__setattr__(self, name, _CACHE_NAMES.get(given, given))
        if self.draft_cache_dtype == AUTO:  # no drafter says anything of its pages
            object.__setattr__(self, "draft_cache_dtype", None)
        skipped = self.cache_dtype_skip_layers
        if not is_list(skipped) or not all(isinstance(one, str) or as_integer(one) is not None for one in skipped):
            raise ParameterError(
                f'cache_dtype_skip_layers must list numbers of layers, "sliding_window" or "full_attention", got {skipped!r}'
            )
        if len(skipped) and self.cache_dtype is None:
            raise ParameterError(
                "cache_dtype_skip_layers leaves layers out of a cache_dtype: give one, or leave it out"
            )
        object.__setattr__(self, "cache_dtype_skip_layers", tuple(skipped))
        _one_of("query_dtype", self.query_dtype, (None, *QUERY_DTYPES))
        if self.query_dtype is not None and self.cache_dtype not in ("fp8", AUTO):
            raise ParameterError(
                f'query_dtype={self.query_dtype!r} is for cache_dtype="fp8": give both, or leave it out'
            )
        self._check_calibration()
        if self.scale_range is not None:
            self._check_scale_range()
        if self.cache_scales is not None and (len(self.calibration) or self.cache_dtype not in (*CALIBRATED, AUTO)):
            raise ParameterError(
                'cache_scales is for cache_dtype "fp8" and "int8", without calibration: name one of them, and leave the texts out'
            )

    def _check_scale_range(self) -> None:
        given: Any = self.scale_range
        listed = isinstance(given, Sequence) and not isinstance(given, str)
        numbers = [float(one) for one in map(as_number, given) if one is not None] if listed else []
        if not listed or len(given) != 3 or len(numbers) != 3 or not all(1 <= one <= 448 for one in numbers):
            raise ParameterError(
                f"scale_range must be three numbers from 1 to 448, of queries, keys and values, got {self.scale_range!r}"
            )
        if not len(self.calibration) and self.cache_scales != FROM_TRAFFIC:
            raise ParameterError('scale_range is for scales that are found: add calibration or cache_scales="traffic"')
        if self.cache_dtype not in ("fp8", AUTO):
            raise ParameterError(
                f'scale_range is for scales of cache_dtype="fp8", not {self.cache_dtype!r}: leave it out'
            )
        object.__setattr__(self, "scale_range", tuple(numbers))

    def _check_exact(self) -> None:
        """Refuses what texts would depend on beside their requests, whatever the target is."""
        whys = {
            "verify_length": (
                isinstance(self.verify_length, str),
                "chooses the shape of a cycle by what was accepted before: give a number, or leave it out",
            ),
            "proposals": (
                self.proposals == "rejection", "draws tokens from what the drafter proposed: take shared_noise or argmax",
            ),
            "attention_output": (
                self.attention_output is not None, "rounds what attention gives, which was not compared: leave it out",
            ),
            "cache_scales": (
                self.cache_scales == FROM_TRAFFIC,
                "finds scales on the prompts that come first, whosever they are: take a file, calibration, or leave it out",
            ),
            "decode_context_parallel_size": (
                self.decode_context_parallel_size > 1,
                "joins what several GPUs attended to each, which was not compared: leave it out",
            ),
        }  # fmt: skip
        refused = [f"{name}={getattr(self, name)!r}, which {why}" for name, (wrong, why) in whys.items() if wrong]
        if refused:
            raise ParameterError(f"exact does not go with {'; '.join(refused)}")

    def _check_calibration(self) -> None:
        texts, wanted = self.calibration, "calibration must be a list of texts or of token ids, got"
        if isinstance(texts, str):
            raise ParameterError(f"{wanted} one text: [{texts!r:.40}]")
        if isinstance(texts, bytes | bytearray) or not isinstance(texts, Sequence):
            raise ParameterError(f"{wanted} {type(texts).__name__}; leave it out for none")
        if len(texts) and self.cache_dtype not in (*CALIBRATED, AUTO):
            raise ParameterError(
                f'calibration finds scales for cache_dtype "fp8" and "int8", not for {self.cache_dtype!r}: leave it out'
            )


class LoadKeywords(TypedDict, total=False):
    """The fields of `LoadOptions` as keywords of `load`, for type checkers and editors; a test compares both."""

    draft: str | Path | bool | None
    dtype: Any
    max_model_len: int | None
    max_batch: int
    page_size: int
    num_pages: int | None
    state_snapshots: int | None
    proposals: Proposals
    cache_dtype: CacheDtype | None
    cache_dtype_skip_layers: Sequence[int | str]
    query_dtype: QueryDtype | None
    draft_cache_dtype: DraftCacheDtype | None
    calibration: Sequence[str | Sequence[int]]
    cache_scales: str | Path | None
    scale_range: Sequence[float] | None
    weight_dtype: WeightDtype | None
    draft_weight_dtype: WeightDtype | None
    attention_output: AttentionOutput | None
    verify_length: int | str | None
    draft_window: int | None
    exact: bool
    tp: int
    decode_context_parallel_size: int
    cp_kv_cache_interleave_size: int | None
    vision: bool | None
    vision_attention_dtype: VisionDtype | None
    vision_scales: str | Path | None
    revision: str | None
    draft_revision: str | None


def read_options(given: dict[str, Any], function: str = "load") -> LoadOptions:
    """`LoadOptions` of keywords. Raises TypeError for a keyword that is none, as Python does for functions."""
    known = [one.name for one in fields(LoadOptions)]
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}; there are {', '.join(known)}")
    return LoadOptions(**given)


def taking_options[F: Callable[..., Any]](function: F) -> F:
    """Gives a function of `**options` the fields of `LoadOptions` in its signature and docstring, for `help` and notebooks."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(one.name, keyword, default=one.default, annotation=one.type) for one in fields(LoadOptions)
    ]
    places = [one for one in own if one.kind is not keyword] + options + [one for one in own if one.kind is keyword]
    function.__signature__ = signature.replace(parameters=places)  # pyright: ignore[reportFunctionMemberAccess]
    listed = inspect.getdoc(LoadOptions)
    assert listed is not None
    texts = listed.partition("Attributes:\n")[2].partition("\n\n")[0]
    function.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("  **options: fields of `LoadOptions`.", texts)
    return function


def check_weight_dtype(
    weight_dtype: str | None, name: str = "weight_dtype", choices: Sequence[str] = WEIGHT_DTYPES
) -> None:
    """Raises ParameterError unless weights can be kept in it."""
    if weight_dtype is not None:
        _one_of(name, weight_dtype, (None, *choices))


def _one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    # An array is equal to nothing.
    if not (value is None or isinstance(value, str)) or value not in choices:
        *others, last = map(str, choices)
        raise ParameterError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def _count(name: str, value: Any, most: int) -> int:
    number = as_integer(value)
    if number is None or not 1 <= number <= most:
        raise ParameterError(f"{name} must be an integer from 1 to {most}, got {value!r}")
    return number
