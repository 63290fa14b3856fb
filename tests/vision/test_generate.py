"""Messages with pictures through the engine: the text is transformers', drafted or not, whatever runs beside it or ran before."""

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from PIL import Image

import dflash_jax as dj
from dflash_jax.cache import extend_keys
from dflash_jax.cli.chat import Commands
from dflash_jax.cli.commands import main
from dflash_jax.cli.session import Session
from dflash_jax.generation import make_requests
from dflash_jax.serving.bodies import chat_ask, requests_of
from dflash_jax.serving.problems import Problem
from dflash_jax.serving.responses import response_ask

from ..models.golden.film_words import TEMPLATE
from ..picture_pair import expected, golden_message, load_pictures, picture_folder, picture_model, words

# Other tests of this process ask the same model for texts that its drafter knows nothing of.
pytestmark = pytest.mark.filterwarnings("ignore:the drafter's tokens are hardly ever accepted")

PARAMS = dj.SamplingParams(max_tokens=24)


def alone() -> list[dict[str, Any]]:
    return [{"role": "user", "content": words(expected()["ids"][-4:])}]


@pytest.fixture
def model() -> dj.Model:
    found = picture_model()
    found.engine.snapshot_tokens = 16  # prompts here are short
    return found


def test_texts_of_pictures_beside_others_and_again(model: dj.Model) -> None:
    """Three prompts share calls: with pictures, without, and with another second picture. Drafts stand in some of the cycles.

    Asked again, pages up to the end of the second picture's are found, and none of another picture. Where pages run out, a request
    loses its slot: its prompt is prefilled anew, what it had emitted behind it.
    """
    found, few = expected(), dj.SamplingParams(max_tokens=6)
    prompts = [golden_message(), alone(), golden_message(second=255 - found["picture_2"])]
    together = dj.generate(model, prompts, few)
    assert together[0].token_ids == found["greedy"][:6].tolist()
    assert together[2].token_ids != together[0].token_ids
    again = dj.generate(model, prompts, few)
    assert [one.token_ids for one in again] == [one.token_ids for one in together]
    assert [one.stats.cached_tokens for one in again] == [32, 0, 32]
    swapped = [golden_message(first=found["picture_2"], second=found["picture_0"]), alone(), alone()]
    assert dj.generate(model, swapped, few)[0].stats.cached_tokens == 0
    long = dj.generate(model, [golden_message(), alone(), golden_message()], dj.SamplingParams(max_tokens=48))
    assert long[0].token_ids == long[2].token_ids == found["greedy"].tolist()
    assert long[0].stats.tokens_per_cycle > 1
    assert model.engine.scheduler.stats.preemptions > 0


def test_keys_of_pages_name_pictures(model: dj.Model) -> None:
    """Prompts of equal tokens whose pictures differ share the pages before the picture that does, and none from there on."""
    found = expected()
    messages = [
        golden_message(),
        golden_message(first=255 - found["picture_0"]),
        golden_message(second=255 - found["picture_2"]),
    ]
    requests = make_requests(model, messages, PARAMS)
    assert len({request.prompt for request in requests}) == 1
    keys = []
    for request in requests:
        own = list[bytes]()
        extend_keys(own, request.prompt, 4, b"", request.marks)
        keys.append(own)
    same = [[ours == theirs for ours, theirs in zip(keys[0], other, strict=True)] for other in keys[1:]]
    assert same[0] == [True] + [False] * 9
    assert same[1] == [True] * 5 + [False] * 5


@pytest.mark.few
def test_a_conversation_with_a_picture(model: dj.Model) -> None:
    chat = dj.Chat(model, dj.SamplingParams(max_tokens=4))
    first = chat.say("w1 w2", images=[expected()["picture_0"]])
    second = chat.say("w3")
    assert [message["role"] for message in chat.history] == ["user", "assistant"] * 2
    assert chat.history[0]["content"][0]["type"] == "image"
    told = [*chat.history[:2], {"role": "user", "content": "w3"}]
    assert dj.generate(model, told, dj.SamplingParams(max_tokens=4)).token_ids == second.token_ids
    assert len(first.token_ids) == 4
    with pytest.raises(dj.ParameterError, match="images must be a list"):
        chat.say("w1", images="a.png")  # type: ignore[arg-type]


def test_pictures_at_the_terminal(
    model: dj.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.png"
    Image.fromarray(expected()["picture_0"]).save(file)
    parts = [{"type": "image", "image": str(file)}, {"type": "text", "text": "w1 w2"}]
    text = dj.generate(model, [{"role": "user", "content": parts}], dj.SamplingParams(max_tokens=4)).text
    monkeypatch.setattr("dflash_jax.model.load", lambda *_, **__: model)
    monkeypatch.setattr("dflash_jax.cli.commands.begin", lambda _: None)
    assert (
        main(
            ["generate", "w1 w2", "--chat", "--image", str(file), "--max-tokens", "4", "--model", str(picture_folder())]
        )
        == 0
    )
    assert capsys.readouterr().out.strip() == text.strip()
    assert main(["generate", "w1 w2", "--image", str(file), "--model", str(picture_folder())]) == 2
    chat = dj.Chat(model, dj.SamplingParams(max_tokens=4))
    commands = Commands(chat, Session(), stats=False)
    assert commands.obey(f"/image {file}")
    commands.answer("w1 w2")
    commands.answer("w3")
    assert [message["content"] for message in chat.history[::2]] == [parts, "w3"]
    assert capsys.readouterr().out.startswith(text.strip())
    with pytest.raises(dj.PromptError, match="cannot be opened"):
        commands.obey("/image /no/such.png")


def test_a_request_to_the_server_holds_its_picture(model: dj.Model) -> None:
    file = io.BytesIO()
    Image.fromarray(expected()["picture_0"]).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    def asked(url: Any) -> Any:
        parts = [{"type": "text", "text": "w1"}, {"type": "image_url", "image_url": {"url": url}}]
        return chat_ask({"messages": [{"role": "user", "content": parts}], "max_tokens": 4}, TEMPLATE)

    (request,) = requests_of(model, asked(url))
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "w1"}, {"type": "input_image", "image_url": url}]}
    ]
    (same,) = requests_of(model, response_ask({"input": items, "max_output_tokens": 4}, model.tokenizer))
    assert (same.prompt, same.marks) == (request.prompt, request.marks)
    assert request.prompt == (1, 102, *[100] * 6, 103)
    assert request.pictures is not None
    assert request.pictures.rows[0].shape == (6, 32)
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "fine"}}]
    with pytest.raises(Problem, match="auto, low or high"):
        chat_ask({"messages": [{"role": "user", "content": parts}]}, TEMPLATE)
    for elsewhere in ("http://a.test/b.png", "file:///etc/passwd", "/etc/passwd"):
        with pytest.raises(Problem, match="nothing is fetched"):
            asked(elsewhere)
    parts = [{"type": "image", "image": "/etc/passwd"}]  # as `generate` takes it, on this machine
    with pytest.raises(Problem, match="others are not supported"):
        chat_ask({"messages": [{"role": "user", "content": parts}]}, TEMPLATE)
    with pytest.raises(dj.PromptError, match="cannot be opened"):
        requests_of(model, asked("data:image/png;base64,AAAA"))


def test_what_is_refused(model: dj.Model) -> None:
    with pytest.raises(dj.CapacityError, match="prompt of 43 tokens and max_tokens=150"):
        dj.generate(model, golden_message(), dj.SamplingParams(max_tokens=150))
    with pytest.raises(dj.ParameterError, match="truncate_prompt_tokens may not cut"):
        dj.generate(model, golden_message(), dj.SamplingParams(max_tokens=4, truncate_prompt_tokens=40))
    parts = [{"type": "text", "text": "w1 <|image_pad|>"}, {"type": "image", "image": expected()["picture_0"]}]
    with pytest.raises(dj.PromptError, match="2 places for pictures and 1 pictures"):
        dj.generate(model, [{"role": "user", "content": parts}], PARAMS)
    with pytest.raises(dj.ParameterError, match="vision=True asks for a vision tower, which is not in this checkpoint"):
        dj.load(vision=True)


def test_a_model_without_its_tower(model: dj.Model) -> None:
    blind = load_pictures(vision=False)
    assert blind.vision is None
    assert blind.target.mrope_section == ()  # type: ignore[attr-defined]
    assert not blind.engine.pictures
    assert blind.memory.weights < model.memory.weights
    with pytest.raises(dj.PromptError, match="loaded without a vision tower"):
        dj.generate(blind, golden_message(), PARAMS)
    facts = dj.plan(picture_folder())
    assert f"qwen3_5_vision, {facts['vision']['parameters']:,} parameters" in str(facts)
    assert "a token for every 8 x 8 pixels" in str(facts)
    assert dj.plan(picture_folder(), vision=False)["vision"] is None


@pytest.mark.few
@pytest.mark.parametrize(
    ("params", "options", "draft"),
    [
        pytest.param({}, {}, False, id="greedy-plain"),
        pytest.param({"temperature": 0.7, "seed": 3}, {}, True, id="sampled"),
        pytest.param({}, {"verify_length": "per_request"}, True, id="greedy-per request"),
        pytest.param({}, {"state_snapshots": 0}, True, id="greedy-nothing shared"),
        pytest.param({}, {"tp": 2}, True, id="greedy-two devices"),
    ],
)
def test_texts_are_the_same_however_they_come(params: dict[str, Any], options: dict[str, Any], draft: bool) -> None:
    model = load_pictures(**options)
    wanted = dj.SamplingParams(max_tokens=24, **params)
    prompts = [golden_message(), alone(), golden_message(second=255 - expected()["picture_2"])]
    found = [one.token_ids for one in dj.generate(model, prompts, wanted, draft=draft)]
    if not params:
        assert found[0] == expected()["greedy"][:24].tolist()
    if draft and not options:
        assert found == [one.token_ids for one in dj.generate(model, prompts, wanted, draft=False)]


def test_what_is_compiled_ahead_is_what_is_called(model: dj.Model) -> None:
    """Before weights are there too, when rows of pictures are of no use and have their shapes alone."""
    assert model.vision is not None
    requests = make_requests(model, [golden_message()], dj.SamplingParams(max_tokens=4))
    weights = model.vision.weights
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in weights.items()}
    early = replace(model.vision, weights=shapes)
    assert requests[0].pictures is not None
    rows = early.rows([model.vision.processor.picture(expected()[f"picture_{number}"]) for number in (0, 2)])
    assert [one.shape for one in rows] == [one.shape for one in requests[0].pictures.rows]
    for job in model.engine.run(requests, cycles=4).first_jobs():
        job()
    next(model.vision.jobs(64))()
    known = set(model.engine.programs._compiled)
    dj.generate(model, golden_message(), dj.SamplingParams(max_tokens=4))
    assert set(model.engine.programs._compiled) == known
