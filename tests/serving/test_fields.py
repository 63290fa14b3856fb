"""Fields of bodies are done or refused, never passed over: those about tokens, and those inside of others."""

from typing import Any

import pytest

import dflash_jax as dj

TestClient = pytest.importorskip("starlette.testclient").TestClient
PROMPT = "def quicksort("
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture
def client(app: Any) -> Any:
    return TestClient(app)


def test_tokens_around_a_prompt_may_be_left_out(client: Any, model: dj.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tokenizer puts before every text, as Llama's does."""
    assert model.tokenizer is not None
    known = model.tokenizer.encode
    monkeypatch.setattr(
        model.tokenizer, "encode", lambda text, special=True: [3] * special + known(text, special=special)
    )
    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    told = [client.post("/v1/completions", json=asked | {"add_special_tokens": one}) for one in (True, False, 1)]
    assert [one.json()["usage"]["prompt_tokens"] for one in told[:2]] == [len(known(PROMPT)) + 1, len(known(PROMPT))]
    assert told[2].json()["error"]["param"] == "add_special_tokens"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": PROMPT, "truncate": 2}, "truncate"),
        ("/tokenize", {"prompt": PROMPT, "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", CHAT | {"add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", CHAT | {"add_special_tokens": True}, "add_special_tokens"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "text"}, "length": 3}}, "text.length"),
        ("/v1/responses", {"input": "a", "reasoning": {"budget": 3}}, "reasoning.budget"),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": True}, "skip_special_tokens"),
    ],
)
def test_what_would_change_nothing_is_refused(client: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
