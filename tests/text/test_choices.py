"""Several completions of one prompt come in a list, or not at all."""

import pytest

import dflash_jax as dj
from dflash_jax.generation import check_single


def test_one_prompt_alone_has_one_completion() -> None:
    several = dj.SamplingParams(n=2)
    for params in (several, [several]):
        check_single(params, single=False)
        with pytest.raises(dj.ParameterError, match="n=2 gives a list of completions: give the prompt in a list too"):
            check_single(params, single=True)
    check_single([dj.SamplingParams()], single=True)
    with pytest.raises(dj.ParameterError, match="one for each of 1 prompts, got 2"):
        check_single([several, several], single=True)
