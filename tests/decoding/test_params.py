"""SamplingParams: every value outside its range is refused with field, value and range."""

import dataclasses
import inspect
import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.engine.requests import Request, request_arrays
from dflash_jax.errors import DFlashError, ParameterError
from dflash_jax.sampling_params import MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams

NOT_INTEGERS = (1.0, "1", True, None, [1])
NOT_NUMBERS = ("1", True, None, math.nan, math.inf, -math.inf, 1j)

BAD: dict[str, tuple[str, tuple[Any, ...]]] = {
    "max_tokens": ("an integer of at least 1", (0, -1, *NOT_INTEGERS)),
    "min_tokens": ("an integer from 0 to max_tokens, which is 256", (-1, 257, *NOT_INTEGERS)),
    "top_k": ("an integer of at least 0", (-2, *NOT_INTEGERS)),
    "logprobs": (f"an integer from 0 to {MAX_LOGPROBS}", (-1, MAX_LOGPROBS + 1, 1.0, "1", True)),
    "n": ("an integer from 1 to 128", (0, 129, *NOT_INTEGERS)),
    "prompt_logprobs": (f"an integer from 0 to {MAX_LOGPROBS}", (-1, MAX_LOGPROBS + 1, 1.0, "1", True)),
    "seed": ("an integer from 0 to 18446744073709551615", (-1, 2**64, 1.0, "1", True)),
    "temperature": ("a number from 0.0 to 10000.0", (-0.1, 1e5, *NOT_NUMBERS)),
    "top_p": ("a number above 0.0 and at most 1.0", (0.0, -0.5, 1.1, *NOT_NUMBERS)),
    "min_p": ("a number from 0.0 to 1.0", (-0.1, 1.01, *NOT_NUMBERS)),
    "stop": ("non-empty strings", ("", ["a", ""], [b"a"], [1], b"ab", None, 5)),
    "stop_token_ids": (f"at most {MAX_STOP_IDS} token ids", ([-1], [1.0], ["a"], "12", [True], None, 5, [0] * 65)),
    "ignore_eos": ("True or False", (1, 0, None, "yes")),
    "include_stop": ("True or False", (1, 0, None, "yes")),
    "skip_special_tokens": ("True or False", (1, 0, None, "yes")),
    "truncate_prompt_tokens": ("an integer of at least 1", (0, -2, 1.0, "1", True)),
    "presence_penalty": ("a number from -2.0 to 2.0", (-2.1, 2.1, *NOT_NUMBERS)),
    "frequency_penalty": ("a number from -2.0 to 2.0", (-2.1, 2.1, *NOT_NUMBERS)),
    "repetition_penalty": ("a number above 0.0 and at most 2.0", (0.0, -1.0, 2.1, *NOT_NUMBERS)),
    "logit_bias": (
        "token ids of at least 0 with numbers from -100.0 to 100.0",
        ({-1: 1}, {"1": 1}, {1: 101}, {1: math.nan}, {1: True}, [1], [(1, 2, 3)], 5, None, "ab"),
    ),
    "allowed_token_ids": ("a list of token ids of at least 0, or None", ([], [-1], [1.0], "12", 5)),
    "bad_words": (
        "texts that are not empty, or of lists of token ids",
        ("a", [""], [" "], [[]], [[-1]], [1], [b"a"], None, 5),
    ),
    "structured": ("a dflash_jax.Structured or a mapping", (5, "[0-9]+", [1], True)),
}
CASES = [(field, span, value) for field, (span, values) in BAD.items() for value in values]


@pytest.mark.parametrize(("field", "span", "value"), CASES, ids=[f"{case[0]}={case[2]!r:.20}" for case in CASES])
def test_a_bad_value_is_named_with_its_range(field: str, span: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    text = str(caught.value)
    assert text.startswith(f"{field} must ")
    assert span in text
    shown = value if field not in ("stop", "stop_token_ids") or not isinstance(value, list) else value[-1]
    assert repr(shown) in text
    assert isinstance(caught.value, DFlashError)
    assert isinstance(caught.value, ValueError)


def test_every_field_is_covered() -> None:
    assert set(BAD) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1, "min_tokens": 1, "top_k": 0, "logprobs": 0, "seed": 0, "temperature": 0.0, "min_p": 0.0},
        {"top_p": 1.0, "min_p": 1.0, "temperature": 1e4, "seed": 2**64 - 1, "logprobs": MAX_LOGPROBS, "top_k": 10**9},
        {"top_p": 1e-9, "stop": "end", "stop_token_ids": range(MAX_STOP_IDS)},
        {"stop": ["a", "b"], "stop_token_ids": (0, 5)},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1e-3, "logit_bias": {0: -100, 7: 100}},
        {"repetition_penalty": 2.0, "logit_bias": (), "allowed_token_ids": (0,), "bad_words": ["a", (0, 1)]},
    ],
)
def test_the_ends_of_every_range_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert isinstance(params.stop, tuple)
    assert isinstance(params.stop_token_ids, tuple)


def test_greedy_and_256_tokens_unless_told_otherwise() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.stop, params.seed) == (256, 0.0, (), None)
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_parameters_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop == ("a",)
    assert hash(params) == hash(SamplingParams(stop=("a",)))


def test_names_of_other_libraries_lead_to_ours() -> None:
    meanings = {
        "max_new_tokens": "max_tokens", "max_length": "max_tokens", "min_new_tokens": "min_tokens", "max_token": "max_tokens",
        "temprature": "temperature", "do_sample": "temperature", "eos_token_id": "stop_token_ids",
        "stop_token_id": "stop_token_ids",
    }  # fmt: skip
    for name, meant in meanings.items():
        with pytest.raises(ParameterError, match=rf"^SamplingParams takes no {name}: did you mean {meant}\?$"):
            SamplingParams(**{"max_tokens": 3, name: 3})
    with pytest.raises(ParameterError, match=r"^SamplingParams takes no zz: it takes max_tokens, temperature, "):
        SamplingParams(**{"zz": 2})


def test_vllms_spellings_are_taken() -> None:
    for all_tokens in (-1, np.int64(-1)):
        params = SamplingParams(top_k=all_tokens)
        assert (params, params.top_k) == (SamplingParams(), 0)
    for name in (True, np.True_):
        assert SamplingParams(include_stop_str_in_output=name) == SamplingParams(include_stop=True)
    assert SamplingParams(include_stop_str_in_output=False) == SamplingParams()
    kept = dataclasses.replace(SamplingParams(include_stop_str_in_output=True), max_tokens=3)
    assert (kept.include_stop, kept.max_tokens) == (True, 3)
    assert SamplingParams(include_stop=True, include_stop_str_in_output=True).include_stop
    with pytest.raises(ParameterError, match="are one thing"):
        SamplingParams(include_stop=True, include_stop_str_in_output=False)
    for wrong in (1, "yes", np.array([True])):
        with pytest.raises(ParameterError, match="include_stop_str_in_output must be True or False"):
            SamplingParams(include_stop_str_in_output=wrong)


def test_the_signature_names_every_field() -> None:
    names = [*inspect.signature(SamplingParams).parameters]
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    assert names == [*fields, "structured_outputs", "include_stop_str_in_output"]


def test_min_tokens_reaches_as_far_as_max_tokens() -> None:
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    with pytest.raises(ParameterError, match="min_tokens must be an integer from 0 to max_tokens, which is 5, got 6"):
        SamplingParams(max_tokens=5, min_tokens=6)


def test_choices_have_seeds_of_their_own() -> None:
    assert [one.seed for one in SamplingParams(n=3, seed=2**64 - 2).choices()] == [2**64 - 2, 2**64 - 1, 0]
    assert SamplingParams(n=2).choices() == [SamplingParams()] * 2


def test_prompts_are_shortened_from_their_beginning() -> None:
    for kept, left in ((None, (1, 2, 3, 4)), (3, (2, 3, 4)), (9, (1, 2, 3, 4)), (-1, (3, 4))):
        assert SamplingParams(max_tokens=6, truncate_prompt_tokens=kept).shortened([1, 2, 3, 4], 8) == left
    assert SamplingParams(max_tokens=9, truncate_prompt_tokens=-1).shortened([1, 2], 8) == (2,)


def test_no_bit_of_a_seed_is_lost() -> None:
    requests = [Request(0, (1,), SamplingParams(seed=seed)) for seed in (7, 5 << 32 | 7, 2**64 - 1)]
    assert request_arrays([*requests], 1).seed.tolist() == [[0, 7], [5, 7], [2**32 - 1, 2**32 - 1]]


NUMPY = {
    "max_tokens": np.int64(40), "temperature": np.float32(0.5), "top_p": np.float16(0.5), "top_k": np.uint8(5),
    "min_p": jnp.float32(0.25), "seed": np.uint64(2**64 - 1), "stop": np.array(["a", "b"]), "stop_token_ids": np.array([3, 4]),
    "ignore_eos": np.True_,
    "min_tokens": np.array(2), "logprobs": jnp.int32(1), "include_stop": np.array([True, False])[1],
    "n": np.int8(2), "prompt_logprobs": np.uint8(3), "skip_special_tokens": np.False_, "truncate_prompt_tokens": np.int64(-1),
    "presence_penalty": np.float32(0.5), "frequency_penalty": np.int8(-1), "repetition_penalty": jnp.float32(1.5),
    "logit_bias": {np.int32(7): np.float32(0.5), 3: 1}, "allowed_token_ids": np.array([3, 7]), "bad_words": [np.array([1, 2])],
    "structured": None,
}  # fmt: skip
PYTHON = {
    "max_tokens": 40, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.25, "seed": 2**64 - 1, "stop": ("a", "b"),
    "stop_token_ids": (3, 4), "ignore_eos": True, "min_tokens": 2, "logprobs": 1, "include_stop": False,
    "n": 2, "prompt_logprobs": 3, "skip_special_tokens": False, "truncate_prompt_tokens": -1,
    "presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 1.5, "logit_bias": ((3, 1.0), (7, 0.5)),
    "allowed_token_ids": (3, 7), "bad_words": ((1, 2),), "structured": None,
}  # fmt: skip


def test_scalars_of_arrays_are_numbers() -> None:
    """As they come out of a sweep over `np.linspace`; what is kept is Python's, for JSON and for hashing."""
    assert set(NUMPY) == set(PYTHON) == set(BAD)
    params = SamplingParams(**NUMPY)
    assert params == SamplingParams(**PYTHON)
    lists = {"stop": ["a", "b"], "stop_token_ids": [3, 4], "allowed_token_ids": [3, 7], "bad_words": [[1, 2]]}
    assert json.loads(json.dumps(dataclasses.asdict(params))) == PYTHON | lists | {"logit_bias": [[3, 1.0], [7, 0.5]]}
    assert type(SamplingParams(temperature=np.float64(0.5)).temperature) is float
    assert [type(text) for text in params.stop] == [str, str]
    assert hash(params) == hash(SamplingParams(**PYTHON))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", np.float32(5)), ("max_tokens", np.True_), ("max_tokens", np.array([5])), ("max_tokens", np.int64(0)),
        ("temperature", np.float32("nan")), ("temperature", np.array([0.5])), ("temperature", np.True_),
        ("temperature", np.complex64(1)), ("temperature", 10**400), ("ignore_eos", np.int64(1)), ("ignore_eos", np.array([True])),
        ("stop_token_ids", np.array([0.5])), ("stop_token_ids", np.array([True])), ("top_p", np.timedelta64(1, "s")),
        ("stop", np.array(3)), ("stop_token_ids", np.array(3)), ("allowed_token_ids", np.array(3)), ("bad_words", np.array(3)),
        ("bad_words", [np.array(3)]),
    ],
)  # fmt: skip
def test_what_is_no_number_in_python_is_none_in_an_array(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{field} must "):
        SamplingParams(**{field: value})
