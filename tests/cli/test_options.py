"""An option of `load` is declared once: the command line, `info` and type checkers read the same fields."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.cli.commands import load_options, main
from dflash_jax.cli.info import collect
from dflash_jax.cli.parser import build_parser
from dflash_jax.errors import ParameterError
from dflash_jax.options import FLAGS, LoadKeywords, LoadOptions, read_options

FIELDS = {one.name: one for one in fields(LoadOptions)}
# A value of each option as somebody types it, and what `load` gets.
TYPED = {
    "dtype": ("bfloat16", "bfloat16"), "max_model_len": ("64", 64), "max_batch": ("2", 2), "page_size": ("32", 32),
    "num_pages": ("9", 9), "state_snapshots": ("0", 0),
    "proposals": ("argmax", "argmax"), "cache_dtype": ("fp8", "fp8"),
    "cache_dtype_skip_layers": ("0,sliding_window", ["0", "sliding_window"]), "draft_cache_dtype": ("fp8", "fp8"),
    "attention_output": ("nvfp4", "nvfp4"), "query_dtype": ("fp8", "fp8"), "scale_range": ("200,100,50.5", [200, 100, 50.5]),
    "weight_dtype": ("int8", "int8"), "draft_weight_dtype": ("fp8", "fp8"), "verify_length": ("auto", "auto"),
    "draft_window": ("128", 128), "exact": (None, True), "tp": ("2", 2), "vision": ("no", False),
    "vision_attention_dtype": ("fp8", "fp8"), "vision_scales": ("v.json", "v.json"),
    "decode_context_parallel_size": ("2", 2),
    "cp_kv_cache_interleave_size": ("16", 16),
    "revision": ("v1", "v1"), "draft_revision": ("v2", "v2"), "calibration": ("FILE", ["a"]), "cache_scales": ("s.json", "s.json"),
}  # fmt: skip


def test_keywords_are_the_fields():
    assert LoadKeywords.__annotations__ == {name: one.type for name, one in FIELDS.items()}


def test_load_shows_every_field():
    shown = inspect.signature(dj.load).parameters
    assert {name: shown[name].default for name in FIELDS} == {name: one.default for name, one in FIELDS.items()}
    assert all(f"  {name}: " in (inspect.getdoc(dj.load) or "") for name in FIELDS)


def test_the_command_line_has_every_field():
    assert {*FLAGS, "draft"} == set(FIELDS)
    assert set(TYPED) == set(FLAGS)


@pytest.mark.parametrize("name", TYPED)
def test_values_reach_load(name, tmp_path):
    (tmp_path / "texts").write_text("a\n")
    typed, wanted = TYPED[name]
    typed = str(tmp_path / "texts") if typed == "FILE" else typed
    args = build_parser().parse_args(["info", f"--{name.replace('_', '-')}", *([] if typed is None else [typed])])
    assert load_options(args)[name] == wanted


def test_what_is_not_typed_keeps_its_default():
    assert load_options(build_parser().parse_args(["info"])) == {"draft": None}
    assert load_options(build_parser().parse_args(["info", "--no-draft"])) == {"draft": False}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_batch": 0}, "max_batch must be an integer from 1 to 4096, got 0"),
        ({"page_size": True}, "page_size must be an integer"),
        ({"num_pages": 0}, "num_pages must be an integer"),
        ({"state_snapshots": -1}, "state_snapshots must be an integer from 0 to 4096"),
        ({"proposals": "best"}, "proposals must be shared_noise, argmax or rejection, got 'best'"),
        ({"weight_dtype": "fp4"}, "weight_dtype must be None, int8, fp8, fp8_dynamic or mxfp4, got 'fp4'"),
        ({"draft_weight_dtype": "mxfp4"}, "draft_weight_dtype must be None, int8, fp8 or fp8_dynamic, got 'mxfp4'"),
        ({"attention_output": "fp4"}, "attention_output must be None, fp8, fp8_groups or nvfp4, got 'fp4'"),
        ({"attention_output": "fp8"}, 'multiplied by float8 weights: add weight_dtype="fp8_dynamic"'),
        ({"query_dtype": "int8", "cache_dtype": "fp8"}, "query_dtype must be None or fp8, got 'int8'"),
        ({"query_dtype": "fp8"}, "query_dtype='fp8' is for cache_dtype=\"fp8\": give both"),
        ({"scale_range": (200, 200), "cache_dtype": "fp8"}, r"three numbers from 1 to 448, .* got \(200, 200\)"),
        ({"scale_range": (200, 0, 449), "cache_dtype": "fp8"}, "three numbers from 1 to 448"),
        ({"scale_range": (9, 9, 9), "cache_dtype": "fp8"}, "scales that are found: add calibration"),
        ({"scale_range": (9, 9, 9), "cache_dtype": "int8", "calibration": ["a"]}, "not 'int8': leave it out"),
        ({"vision_scales": "a.json"}, 'vision_scales are for vision_attention_dtype="fp8": give both'),
        ({"vision": "maybe"}, "vision must be True or False .--vision yes or no., or left out .* got 'maybe'"),
        ({"vision_attention_dtype": "int8"}, "vision_attention_dtype must be None or fp8, got 'int8'"),
        ({"calibration": "a text"}, r"a list of texts or of token ids, got one text: \['a text'\]"),
        ({"cache_dtype_skip_layers": 0, "cache_dtype": "fp8"}, "cache_dtype_skip_layers must list numbers of layers"),
        (
            {"cache_dtype_skip_layers": None, "cache_dtype": "fp8"},
            "cache_dtype_skip_layers must list numbers of layers",
        ),
        ({"calibration": ["a"]}, 'calibration finds scales for cache_dtype "fp8" and "int8", not for None'),
        ({"proposals": np.array([1, 2])}, r"proposals must be shared_noise, argmax or rejection, got array"),
        ({"cache_dtype": np.array(["fp8", "fp8"])}, r"cache_dtype must be None or 'fp8' or .*, got array"),
        ({"draft_cache_dtype": np.array([1, 2])}, r"draft_cache_dtype must be None or 'fp8' or .*, got array"),
        ({"cache_dtype_skip_layers": np.array(0), "cache_dtype": "fp8"}, "must list numbers of layers.*, got array"),
        ({"calibration": np.array(3), "scale_range": (9, 9, 9), "cache_dtype": "fp8"}, "got ndarray; leave it out"),
    ],
)
def test_what_no_model_could_take_is_refused(given, message):
    with pytest.raises(ParameterError, match=message):
        read_options(given)
    for function in (dj.load, collect):
        with pytest.raises(ParameterError, match=message):
            function(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft": False, "proposals": "rejection"}, "proposals must be left out without a drafter, got 'rejection'"),
        (
            {"cache_dtype": "auto", "calibration": ["a"]},
            '"auto" leaves pages as they are, .*: calibration finds scales',
        ),
    ],
)
def test_what_would_change_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        collect(**given)


def test_info_takes_what_no_size_depends_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("a text")
    found = ["--cache-dtype", "fp8", "--calibration", str(texts), "--scale-range", "100,100,100"]
    assert main(["info", *found]) == 0
    assert "in float8_e4m3fn (target)" in capsys.readouterr().out


def test_an_unknown_option_is_named():
    unknown: Any = {"max_batches": 3}
    with pytest.raises(TypeError, match=r"^plan\(\) got an unexpected keyword argument 'max_batches'"):
        dj.plan(**unknown)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_batches'; there are draft, dtype"):
        dj.load(**unknown)
