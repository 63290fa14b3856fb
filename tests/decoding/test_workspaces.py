"""Workspaces of persistent kernels are made once for a loop, and change no token."""

from typing import Any

import pytest

from dflash_jax.execution import persistent, plan


@pytest.mark.few("True")
@pytest.mark.parametrize("draft", [True, False])
def test_made_once_for_all_cycles(make_pair, monkeypatch, draft):
    prompts = [[5, 9, 11]]
    apart = make_pair().run(prompts, draft=draft)[0]
    made, real = list[tuple[int, ...]](), persistent.attention_chain_exchange

    def counted(stream: Any, *rest: Any, **heads: Any) -> Any:
        made.append(stream.shape)
        return real(stream, *rest, **heads)

    monkeypatch.setattr(plan, "layer_chain_refusal", lambda *_, **__: None)
    monkeypatch.setattr(plan, "attention_chain_refusal", lambda *_, **__: None)
    monkeypatch.setattr(persistent, "attention_chain_exchange", counted)
    pair = make_pair()
    assert pair.run(prompts, draft=draft)[0] == apart
    loops = sum(line.startswith("loop") for line in pair.engine.programs.shapes())
    width = 8  # columns for the few tokens of a cycle; a prompt's chunk has more
    assert loops
    assert sum(shape[1] == width for shape in made) == loops * (1 + draft)
