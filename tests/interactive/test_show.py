"""Completions as notebooks show them, and texts while they are made."""

import re
from dataclasses import replace
from html import unescape

import dflash_jax as dj
from dflash_jax.interactive import show as shown

from ..chat_pair import chat_pair


def test_tokens_of_a_completion_are_spans_with_all_of_its_text():
    done = dj.generate(chat_pair(), "def f(", dj.SamplingParams(max_tokens=12, logprobs=0))
    assert done.text_ends[-1] == len(done.text)
    assert len(done.text_ends) == 12
    html = done._repr_html_()
    pieces = re.findall(
        r'<span class="([dt])( e)?" title="id ([\d ]+), cycle (\d+), logprob -?[\d.]+">(.*?)</span>', html
    )
    assert "".join(unescape(piece[-1]) for piece in pieces) == done.text
    assert [int(token) for piece in pieces for token in piece[2].split()] == done.token_ids
    assert sum(piece[1] == " e" for piece in pieces) == len(done.acceptance_lengths) + 1
    assert [piece[0] == "d" for piece in pieces] == done.from_draft
    assert html.count('class="bar"') == len(done.acceptance_lengths)
    assert str(done).endswith(f"(12 tokens, {done.stats.tokens_per_cycle:.2f} per cycle, length)")


def test_what_a_text_says_is_no_markup():
    done = dj.generate(chat_pair(), "def f(", dj.SamplingParams(max_tokens=12))
    text = "<script>x</script> &é"
    ends = [3, 3, 9, 9, 9, 12, 13, 14, 15, 16, 20, len(text)]  # some tokens make one character together
    html = replace(done, text=text, text_ends=ends)._repr_html_()
    assert "<script" not in html
    assert unescape("".join(re.findall(r'title="id [^>]*>(.*?)</span>', html))) == text
    assert unescape(replace(done, text=text, text_ends=[])._repr_html_()).count(text) == 1
    many = replace(
        done, token_ids=[1] * 5000, text_ends=list(range(1, 5001)), from_draft=[True] * 5000, text="x" * 5000
    )
    assert "… 1,000 more tokens" in many._repr_html_()
    empty = replace(done, token_ids=[], text_ends=[], text="", acceptance_lengths=[])
    assert "0 tokens" in empty._repr_html_()


def test_a_text_is_shown_while_it_is_made(capsys, monkeypatch):
    params = dj.SamplingParams(max_tokens=12)
    monkeypatch.setattr(shown, "_notebook", lambda: None)
    done = dj.show(chat_pair(), "def f(", params)
    assert done is not None
    assert capsys.readouterr().out == f"{done.text}\n"
    outputs: list[str] = []
    monkeypatch.setattr(shown, "_notebook", lambda: outputs.append)
    monkeypatch.setattr(shown, "UPDATE_S", 0.0)
    again = dj.show(chat_pair(), "def f(", params)
    assert again is not None
    assert outputs[-1] == again._repr_html_()
    assert all("<pre" in one for one in outputs[:-1])


def test_an_interrupt_keeps_what_was_made(capsys, monkeypatch):
    class Interrupted(shown.Writer):
        def write(self, update):
            if self.counts or not stops:
                raise KeyboardInterrupt
            return super().write(update)

    monkeypatch.setattr(shown, "Writer", Interrupted)
    monkeypatch.setattr(shown, "STREAM_CYCLES", 1)
    monkeypatch.setattr(shown, "_notebook", lambda: None)
    stops = [True]
    params = dj.SamplingParams(max_tokens=60)
    done = dj.show(chat_pair(), "def f(", params)
    assert done is not None
    assert done.finish_reason == "abort"
    assert len(done.acceptance_lengths) == 1
    assert capsys.readouterr().out == f"{done.text}\n"
    assert dj.generate(chat_pair(), "def f(", params).text.startswith(done.text)
    stops.clear()
    assert dj.show(chat_pair(), "def f(", params) is None
    engine = chat_pair().engine
    assert engine.allocator.num_free == engine.num_pages


def test_the_plan_is_what_info_prints():
    plan = dj.plan(max_batch=2, max_model_len=256)
    assert plan["pages"]["max_batch"] == 2
    assert "for 2 requests of up to 256 tokens" in str(plan)
