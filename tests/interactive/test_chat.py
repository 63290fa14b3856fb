"""Conversations: what the model is told, what is remembered of stopped answers, and the terminal around them."""

import io
import json
import signal

import pytest
from jaxtyping import TypeCheckError

import dflash_jax as dj
from dflash_jax.cli import chat as terminal
from dflash_jax.cli.commands import main
from dflash_jax.cli.session import Session

from ..chat_pair import chat_pair

PARAMS = dj.SamplingParams(max_tokens=12)


@pytest.fixture
def chat():
    return dj.Chat(chat_pair(), PARAMS, system="s")


def told(chat, text, **params):
    """What `generate` makes of the same messages."""
    messages = [{"role": "system", "content": chat.system}, *chat.history, {"role": "user", "content": text}]
    return dj.generate(chat.model, messages, dj.SamplingParams(**{"max_tokens": 12} | params)).text


def test_answers_are_those_of_generate_and_are_remembered(chat):
    first = told(chat, "def f(")
    assert chat.say("def f(").text == first
    second = told(chat, "more")
    assert "".join(piece.text for piece in chat.stream("more")) == second
    assert [message["content"] for message in chat.history] == ["def f(", first, "more", second]
    assert [done.text for done in chat.completions] == [first, second]
    assert chat.completions[1].stats.cached_tokens >= 0
    assert repr(chat).endswith("2 answers)")
    assert chat.undo()
    assert [message["content"] for message in chat.history] == ["def f(", first]
    chat.reset()
    assert (chat.history, chat.completions, chat.undo()) == ([], [], False)
    assert chat.system == "s"


def test_a_stopped_answer_is_remembered_as_far_as_it_went(chat):
    chat.params = dj.SamplingParams(max_tokens=200)
    pieces = chat.stream("def f(")
    text = next(pieces).text + next(pieces).text  # of the prompt, and of the first cycles
    pieces.close()
    assert chat.history[-1] == {"role": "assistant", "content": text}
    assert chat.completions == []
    chat.stream("never asked for").close()
    assert len(chat.history) == 2


def test_what_cannot_be_said_is_told_at_once(chat):
    model = chat.model
    for wrong in ({"params": [PARAMS]}, {"system": 3}, {"chat_options": {"colour": 1}}, {"draft": "no"}):
        with pytest.raises((dj.ParameterError, TypeCheckError)):  # the test run checks annotations first
            dj.Chat(model, **wrong)
    with pytest.raises((dj.ParameterError, TypeCheckError)):
        chat.stream(3)
    with pytest.raises(dj.ParameterError, match="asks for no colour"):
        chat.set_options({"colour": 1})
    assert chat.chat_options == {}
    chat.history = [{"role": "user", "content": "word " * 240}, {"role": "assistant", "content": "x"}]
    with pytest.raises(dj.CapacityError, match=r"the conversation has \d+ tokens .*\(undo\)"):
        chat.say("more")
    with pytest.raises(dj.PromptError, match="no chat template"):
        dj.Chat(dj.load(max_batch=1))


@pytest.fixture
def terminal_of(monkeypatch, tmp_path):
    """Runs `dflash-jax chat` on lines of stdin, with the model that is there."""
    monkeypatch.setattr(terminal, "load", lambda path, ahead, **options: (ahead(chat_pair()), chat_pair())[1])
    monkeypatch.setattr("dflash_jax.cli.commands.begin", lambda args: None)

    def run(*lines, options=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return main(["chat", "--max-tokens", "12", *options])

    return run


def test_the_terminal_answers_and_obeys(terminal_of, chat, capsys):
    first, other = told(chat, "def f("), told(chat, "/x\ny", temperature=1.0, seed=3)
    lines = (
        "/stats", "def f(", "/stats", "/reset", "/set temperature=1", "/set seed=3", "/set", "//x\\", "y", "/undo", "/undo",
        "/system", "/set colour=1", "/set top_p=7", "/set top_p 0.5", "/nothing", "/help", "/stats on", "/exit", "not read",
    )  # fmt: skip
    assert terminal_of(*lines, options=["--system", "s"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{first}\n{other}\n"
    assert err.index("nothing was answered") < err.index("tokens per cycle:") < err.index("1 answer: ")
    assert "temperature=1" in err
    assert "nothing was said" in err
    assert "asks for no colour" in err
    assert "top_p must be" in err
    assert "expected NAME=VALUE, such as enable_thinking=false, got 'top_p 0.5'" in err
    assert "there is no /nothing" in err
    assert "Ctrl-D" in err


def test_ctrl_c_stops_the_answer_alone(terminal_of, chat, capsys, monkeypatch, tmp_path):
    """A session's file has the answer as far as it went, and another conversation goes on with it."""
    file = tmp_path / "talk.json"
    kept = dj.Chat.stream

    def interrupted(self, text, **shown):
        for piece in kept(self, text, **shown):
            yield piece
            if text == "def f(":
                signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(dj.Chat, "stream", interrupted)
        assert terminal_of("def f(", "next", options=["--session", str(file), "--system", "s", "--seed", "3"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    assert "(stopped)" in err
    said = json.loads(file.read_text())
    assert [message["content"] for message in said["history"]][::2] == ["def f(", "next"]
    answers = [message["content"] for message in said["history"][1::2]]
    assert out == f"{answers[0]}{answers[1]}\n"
    assert (said["system"], said["params"]) == ("s", {"max_tokens": 12, "seed": 3})
    chat.history = said["history"]
    following = told(chat, "more")
    assert terminal_of("more", options=["--session", str(file)]) == 0
    assert capsys.readouterr().out == f"{following}\n"


def test_files_that_are_no_session_and_wrong_options_end_before_loading(terminal_of, tmp_path, capsys):
    file = tmp_path / "talk.json"
    for text in ("{", "[]", '{"system": 3, "history": [], "params": {}, "chat_options": {}}', '{"history": []}'):
        file.write_text(text)
        assert terminal_of(options=["--session", str(file)]) == 2
        assert "is not the file of a conversation" in capsys.readouterr().err
    assert terminal_of(options=["--session", str(tmp_path / "none" / "talk.json")]) == 2
    assert "there is no folder for" in capsys.readouterr().err
    assert terminal_of(options=["--top-p", "7"]) == 2
    session = Session(params={"logit_bias": [[3, 1.5]], "stop": ["x"]})
    assert session.sampling().logit_bias == ((3, 1.5),)
