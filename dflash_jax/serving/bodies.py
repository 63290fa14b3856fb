"""Bodies of requests: JSON in, a checked `Ask` out. Fields are OpenAI's and vLLM's; what is not known is refused by name."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeGuard

from dflash_jax.decoding.grammar_masks import Grammar
from dflash_jax.engine.requests import Request
from dflash_jax.errors import ParameterError
from dflash_jax.generation import prompted, shortened
from dflash_jax.model import Model
from dflash_jax.options import are_integers, as_integer
from dflash_jax.sampling_params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams
from dflash_jax.serving.problems import Problem
from dflash_jax.serving.structure import FIELDS as STRUCTURE_FIELDS
from dflash_jax.serving.structure import refused as structure_refused
from dflash_jax.serving.structure import structure_of
from dflash_jax.text.prompts import is_chat
from dflash_jax.text.refused_words import refused_ids

MAX_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16
SHOWN = 80  # characters of a wrong value

# Taken without effect, whatever they say.
_WITHOUT_EFFECT = (
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity",
    "request_id",
)  # fmt: skip
# Taken where they say what happens anyway.
_FIXED: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,), "priority": (0,), "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,), "suffix": ("",), "parallel_tool_calls": (True, False),
    "modalities": (["text"],), "add_generation_prompt": (True,), "continue_final_message": (False,), "tools": (),
    "tool_choice": ("none", "auto"),
}  # fmt: skip
# Of chats alone.
_FIXED_OF_CHATS: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "prompt_logprobs": (), "add_special_tokens": (False,),
}  # fmt: skip
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words",
    "skip_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip
_COMMON = (
    "model", "max_tokens", "n", "best_of", "seed", "stop", "stream", "stream_options", "logprobs",
    "return_tokens_as_token_ids", "return_metrics", "logit_bias", *STRUCTURE_FIELDS, *_SAMPLING, *_WITHOUT_EFFECT, *_FIXED,
)  # fmt: skip
COMPLETION_FIELDS = ("prompt", "echo", "prompt_logprobs", "add_special_tokens", *_COMMON)
CHAT_FIELDS = (
    "messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", "reasoning_effort", *_COMMON,
    *_FIXED_OF_CHATS,
)  # fmt: skip
# Options that clients send to every model: a template that does not ask for them is not told.
_SENT_TO_ALL = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class Ask:
    """Parsed request body.

    Attributes:
      prompts: texts or token ids; for a chat its messages, alone.
      params: of every choice; `max_tokens` and `seed` are made up for each.
      max_tokens: None for what is left of the model's length.
      seed: of the first choice.
      n: choices for each prompt.
      usage: "end" for a last chunk with the usage, "always" for one in each.
      ids: tokens are named by their ids among log-probabilities.
      echo: whether texts begin with their prompts, and log-probabilities with theirs.
      prompt_logprobs: whether those of prompts come by themselves.
      metrics: whether times and acceptance come with the answer.
      structured_by: the field that says what the text has to be; None where it may be anything.
      special: whether texts get the tokens that the tokenizer puts around one.
    """

    prompts: list[Any]
    params: SamplingParams
    max_tokens: int | None
    seed: int | None
    n: int
    stream: bool
    usage: str | None
    ids: bool
    chat_options: dict[str, Any]
    echo: bool = False
    prompt_logprobs: bool = False
    metrics: bool = False
    structured_by: str | None = None
    special: bool = True


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises Problem for anything else."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no number of JSON's")

    try:
        value = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Problem(400, f"the body must be JSON in UTF-8: {why}") from None
    if not isinstance(value, dict):
        raise Problem(400, f"the body must be a JSON object, got {shown(value)}")
    return {name: field for name, field in value.items() if field is not None}


def shown(value: Any) -> str:
    """A value in a message, shortened."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def completion_ask(body: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})) -> Ask:
    """Parses a body of `/v1/completions`; `defaults` are for the sampling fields it leaves out. Raises Problem, ParameterError."""
    check_names(body, COMPLETION_FIELDS)
    prompts = body.get("prompt")
    single = isinstance(prompts, str) or (_is_list(prompts) and len(prompts) > 0 and as_integer(prompts[0]) is not None)
    listed = [prompts] if single else prompts
    if not _is_list(listed) or not listed:
        raise _wrong("prompt", "a text, token ids, or a list of those", prompts)
    for place, prompt in enumerate(listed):
        ids = _is_list(prompt) and len(prompt) > 0 and are_integers(prompt)
        if not isinstance(prompt, str) and not ids:
            raise _wrong("prompt" if single else f"prompt.{place}", "a text or token ids", prompt)
        if prompt == "":
            raise _wrong("prompt" if single else f"prompt.{place}", "a text that is not empty", prompt)
    echo, scored = flag(body, "echo"), _integer(body, "prompt_logprobs", 0, MAX_LOGPROBS)
    if scored is not None and flag(body, "stream"):
        raise Problem(
            400, "prompt_logprobs are for whole answers: leave stream out, or ask for echo and logprobs",
            param="prompt_logprobs", code="unsupported_parameter",
        )  # fmt: skip
    most = _integer(body, "max_tokens", 0 if echo or scored is not None else 1, 2**31 - 1)
    made = _ask(
        body,
        listed,
        DEFAULT_COMPLETION_TOKENS if most is None else most,
        _integer(body, "logprobs", 0, MAX_LOGPROBS),
        defaults,
    )
    wanted = [
        each for each in (scored, made.params.logprobs if echo else None, 0 if most == 0 else None) if each is not None
    ]
    params = replace(made.params, prompt_logprobs=max(wanted)) if wanted else made.params
    special = flag(body, "add_special_tokens", default=True)
    return replace(made, params=params, echo=echo, prompt_logprobs=scored is not None, special=special)


def chat_ask(body: Mapping[str, Any], template: str | None, defaults: Mapping[str, Any] = MappingProxyType({})) -> Ask:
    """Parses a body of `/v1/chat/completions` for a model with this template; see `completion_ask`, also for errors."""
    check_names(body, CHAT_FIELDS, _FIXED | _FIXED_OF_CHATS)
    messages = _messages(body.get("messages"), template or "")
    wanted, top = flag(body, "logprobs"), _integer(body, "top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise Problem(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    most = _limit(body, "max_completion_tokens")
    options = dict(_mapping(body, "chat_template_kwargs"))
    if not isinstance(body.get("reasoning_effort", ""), str):
        raise _wrong("reasoning_effort", "a text", body["reasoning_effort"])
    if "reasoning_effort" in body and "enable_thinking" not in options:
        options["enable_thinking"] = body["reasoning_effort"] != "none"
    for name in _SENT_TO_ALL:
        if name in options and name not in (template or ""):
            del options[name]
    most = _limit(body, "max_tokens") if most is None else most
    return _ask(body, [messages], most, (top or 0) if wanted else None, defaults, options)


def requests_of(model: Model, ask: Ask) -> list[Request]:
    """The engine's requests, one for each choice: `index = prompt * n + choice`. For a thread: templates and long texts take time.

    Raises:
      Problem, PromptError, ParameterError, CapacityError, TokenizerError: nothing can be made of it.
    """
    requests, longest = list[Request](), model.engine.max_model_len
    refused = refused_ids(model.tokenizer, model.name, ask.params.bad_words)
    grammar = _grammar(model, ask)
    for prompt in ask.prompts:
        if not ask.special and isinstance(prompt, str) and model.tokenizer is not None:
            prompt = model.tokenizer.encode(prompt, special=False)
        ids, held = prompted(model, prompt, chat=False, chat_options=ask.chat_options)
        least = 1 if ask.max_tokens is None else ask.max_tokens
        if ask.params.truncate_prompt_tokens is not None:
            ids = shortened(ids, held, replace(ask.params, max_tokens=max(least, ask.params.min_tokens)), longest)
        room = longest - len(ids)
        if room < min(1, least):
            raise Problem(
                400,
                f"This model's maximum context length is {longest} tokens. However, you requested {len(ids) + least} tokens "
                f"({len(ids)} in the messages, {least} in the completion). Please reduce the length of the messages or completion.",
                param="messages" if is_chat(prompt) else "prompt",
                code="context_length_exceeded",
            )
        most = room if ask.max_tokens is None else min(room, ask.max_tokens)
        pictures = None if held is None or model.vision is None else held.seen(model.vision)
        for choice in range(ask.n):
            seed = None if ask.seed is None else (ask.seed + choice) % 2**64
            made = {"max_tokens": most, "min_tokens": min(ask.params.min_tokens, most), "seed": seed}
            same = all(getattr(ask.params, name) == value for name, value in made.items())
            params = ask.params if same else replace(ask.params, **made)  # which checks all of it again
            request = Request(
                len(requests), ids, params, model.eos_ids, refused=refused, grammar=grammar, pictures=pictures
            )
            requests.append(request)
            model.engine.check(requests[-1])
    return requests


def _grammar(model: Model, ask: Ask) -> Grammar | None:
    if ask.params.structured is None:
        return None
    try:
        return model.grammars.compiled(ask.params.structured)
    except ParameterError as error:
        raise structure_refused(ask.structured_by or "structured_outputs", error) from None


def _ask(
    body: Mapping[str, Any], prompts: list, most: int | None, logprobs: int | None, defaults: Mapping[str, Any],
    options: dict | None = None,
) -> Ask:  # fmt: skip
    n = _integer(body, "n", 1, MAX_CHOICES) or 1
    if (best := _integer(body, "best_of", 1, MAX_CHOICES)) is not None and best != n:
        raise Problem(400, f"best_of must equal n, got {best} and {n}", param="best_of", code="unsupported_parameter")
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not _is_list(stops) or len(stops) > MAX_STOPS or not all(isinstance(one, str) for one in stops):
        raise _wrong("stop", f"a string or at most {MAX_STOPS} of them", stop)
    stops = [one for one in stops if one]
    seed = _integer(body, "seed", -(2**63), 2**64 - 1)
    given: dict[str, Any] = {"temperature": 1.0, **defaults} | {name: body[name] for name in _SAMPLING if name in body}
    if bias := _mapping(body, "logit_bias"):
        given["logit_bias"] = {_token(name): amount for name, amount in bias.items()}
    least = as_integer(given.get("min_tokens", 0)) or 0
    if (
        most is not None
        and "min_tokens" in body
        and least > most
        and {"max_tokens", "max_completion_tokens"} & body.keys()
    ):
        raise _wrong("min_tokens", f"at most max_tokens, which is {most}", body["min_tokens"])
    by, structured = structure_of(body) or (None, None)
    params = SamplingParams(
        max_tokens=max(1, most or 1, least), logprobs=logprobs, stop=stops, structured=structured, **given
    )  # fmt: skip
    stream, told = flag(body, "stream"), _mapping(body, "stream_options")
    if told and not stream:
        raise Problem(400, "stream_options are for stream: true", param="stream_options", code="invalid_value")
    if unknown := told.keys() - {"include_usage", "continuous_usage_stats", "include_obfuscation"}:
        raise _unknown(f"stream_options.{sorted(unknown)[0]}")
    usage = "end" if flag(told, "include_usage") else None
    usage = "always" if usage and flag(told, "continuous_usage_stats") else usage
    ids = flag(body, "return_tokens_as_token_ids")
    metrics = flag(body, "return_metrics")
    seed = None if seed is None else seed % 2**64
    return Ask(prompts, params, most, seed, n, stream, usage, ids, options or {}, metrics=metrics, structured_by=by)


def _messages(value: Any, template: str) -> list[dict[str, Any]]:
    """Messages as templates want them: texts for contents, objects for arguments of calls."""
    if not _is_list(value) or not value:
        raise _wrong("messages", "a list of messages, not empty", value)
    messages = []
    for place, message in enumerate(value):
        at = f"messages.{place}"
        if not isinstance(message, dict):
            raise _wrong(at, "an object with role and content", message)
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise _wrong(f"{at}.role", "system, developer, user, assistant or tool", role)
        made = {name: field for name, field in message.items() if field is not None}
        if role == "developer" and "developer" not in template:
            made["role"] = "system"
        made["content"] = _content(message.get("content"), f"{at}.content", empty=role == "assistant")
        thought = made.pop("reasoning", None)
        if thought is not None:
            made.setdefault("reasoning_content", thought)
        if calls := made.get("tool_calls"):
            made["tool_calls"] = [_call(call, f"{at}.tool_calls.{i}") for i, call in enumerate(_listed(calls, at))]
        messages.append(made)
    return messages


def _content(value: Any, at: str, *, empty: bool) -> str | list[dict[str, Any]]:
    """A content as templates want it: one text, or parts where pictures or films are among them."""
    if value is None and empty:
        return ""
    if isinstance(value, str):
        return value
    if not _is_list(value):
        raise _wrong(at, "a text or a list of parts", value)
    parts = list[dict[str, Any]]()
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image_url":
            parts.append(picture_part(part.get("image_url"), f"{at}.{place}.image_url"))
            continue
        if kind == "video_url":
            parts.append(_film_part(part.get("video_url"), f"{at}.{place}.video_url"))
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            wanted = 'a part {"type": "text", "text": ...}, image_url or video_url, others are not supported'
            raise _wrong(f"{at}.{place}", wanted, part)
        parts.append({"type": "text", "text": part["text"]})
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def picture_part(value: Any, at: str) -> dict[str, Any]:
    """A part with a picture, whose URL holds it: a server that fetched what strangers name could be sent anywhere.

    Args:
      value: a URL, or an object with it and how much detail is to be seen.
    """
    told = value if isinstance(value, dict) else {"url": value}
    url, detail = told.get("url"), told.get("detail", "auto")
    if not isinstance(url, str) or not url.startswith("data:"):
        raise _wrong(f"{at}.url", "a data URL (data:image/png;base64,...): nothing is fetched", url)
    if detail not in ("auto", "low", "high"):
        raise _wrong(f"{at}.detail", "auto, low or high", detail)
    return {"type": "image", "image": url, "detail": detail}


def _film_part(value: Any, at: str) -> dict[str, Any]:
    """A part with a film, whose URL holds it as a picture's does.

    Args:
      value: a URL, or an object with it; `fps` of frames, which data:video/jpeg;base64, lists with commas between them;
        `num_frames` that are looked at, and `max_pixels` of all of them.
    """
    told = value if isinstance(value, dict) else {"url": value}
    url = told.get("url")
    if not isinstance(url, str) or not url.startswith("data:"):
        raise _wrong(f"{at}.url", "a data URL (data:video/mp4;base64,...): nothing is fetched", url)
    given = {name: told[name] for name in ("fps", "num_frames", "max_pixels") if told.get(name) is not None}
    for name, one in given.items():
        if name != "fps" and (as_integer(one) or 0) < 1:
            raise _wrong(f"{at}.{name}", "a positive integer", one)
    return {"type": "video", "video": url, **given}


def _call(call: Any, at: str) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates walk through them; on the wire they are a text of JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(at, "a call with a function and its name", call)
    arguments = function.get("arguments", "{}")
    try:
        # Clients give back what they were streamed: nothing where a function takes nothing.
        made = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise _wrong(f"{at}.function.arguments", "a JSON object as a text", arguments) from None
    if not isinstance(made, dict):
        raise _wrong(f"{at}.function.arguments", "a JSON object as a text", arguments)
    return {**call, "function": {**function, "arguments": made}}


def check_names(
    body: Mapping[str, Any], known: Sequence[str], fixed: Mapping[str, tuple[Any, ...]] = MappingProxyType(_FIXED)
) -> None:
    """Raises Problem for a field that is not known, or that asks for what is not done."""
    if unknown := next((name for name in body if name not in known), None):
        raise _unknown(unknown)
    for name, values in fixed.items():
        if name in body and not any(_same(body[name], value) for value in values):
            options = " or ".join(map(repr, values)) or "null"
            raise Problem(
                400, f"{name} is not supported: leave it out, or give {options}, got {shown(body[name])}",
                param=name, code="unsupported_parameter",
            )  # fmt: skip


def _same(value: Any, other: Any) -> bool:
    """Equality of JSON: 1.0 is 1, and true is not."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _unknown(name: str) -> Problem:
    return Problem(400, f"unknown field: {name!r:.100}", param=name[:100], code="unknown_parameter")


def _wrong(name: str, wanted: str, value: Any) -> Problem:
    return Problem(400, f"{name} must be {wanted}, got {shown(value)}", param=name, code="invalid_value")


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _listed(value: Any, at: str) -> list:
    if not _is_list(value):
        raise _wrong(f"{at}.tool_calls", "a list", value)
    return value


def _mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    return value


def _token(name: str) -> int:
    """A token id that is a name, as JSON's names are texts."""
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise _wrong("logit_bias", "an object with token ids for names", name)
    return int(name)


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A field that is true or false. Raises Problem for any other value."""
    value = body.get(name, default)
    if type(value) is not bool:
        raise _wrong(name, "true or false", value)
    return value


def _integer(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    if name not in body:
        return None
    value = as_integer(body[name])
    if value is None or not low <= value <= high:
        raise _wrong(name, f"an integer from {low} to {high}", body[name])
    return value


def _limit(body: Mapping[str, Any], name: str) -> int | None:
    return _integer(body, name, 1, 2**31 - 1)
