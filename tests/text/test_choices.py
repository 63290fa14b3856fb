"""Several completions of one prompt come in a list, or not at all."""

import pytest

import dflash_jax as dj
from dflash_jax.generation import check_single

from ..chat_pair import chat_pair


def test_one_prompt_alone_has_one_completion() -> None:
    several = dj.SamplingParams(n=2)
    for params in (several, [several]):
        check_single(params, single=False)
        with pytest.raises(dj.ParameterError, match="n=2 gives a list of completions: give the prompt in a list too"):
            check_single(params, single=True)
    check_single([dj.SamplingParams()], single=True)
    with pytest.raises(dj.ParameterError, match="one for each of 1 prompts, got 2"):
        check_single([several, several], single=True)


def test_a_message_has_one_answer() -> None:
    """Two of them would be mixed."""
    model, several = chat_pair(), dj.SamplingParams(n=2)
    with pytest.raises(dj.ParameterError, match="a message has one answer in a conversation: n must be 1, got 2"):
        dj.Chat(model, several)
    chat = dj.Chat(model)
    chat.params = several
    with pytest.raises(dj.ParameterError, match="n must be 1, got 2"):
        chat.say("def f(")
    assert chat.history == []
