"""Errors of requests as OpenAI's error objects and statuses, by which clients choose their exception classes."""

import json
from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import CapacityError, DFlashError, ParameterError, PromptError, TokenizerError
from dflash_jax.sampling_params import SamplingParams

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
MOST_SHOWN = 1000  # characters of a message: values in it are the caller's own, and may be long


class Problem(Exception):
    """An answer that is an error.

    Attributes:
      status: of HTTP.
      param: dotted path of the field that is wrong.
      code: a word for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The error object."""
        message = str(self)[:MOST_SHOWN]
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}


def unavailable(message: str) -> Problem:
    """Something that ends by itself: clients try again."""
    return Problem(503, message, headers={"Retry-After": "1"})


def problem_of(error: Exception, *, begun: bool = False) -> Problem:
    """The answer for an error of this library; a bug or a device's error says nothing of itself.

    Args:
      begun: tokens were computed: a client that tries again would have them computed again.
    """
    if isinstance(error, Problem):
        return error
    text = str(error)
    if isinstance(error, CapacityError):
        return Problem(400, text, code="context_length_exceeded")
    if isinstance(error, ParameterError):
        name = "chat_template_kwargs" if text.startswith("the chat template ") else text.partition(" ")[0]
        known = (*SamplingParams.__dataclass_fields__, "chat_template_kwargs")
        return Problem(400, text, param=name if name in known else None, code="invalid_value")
    if isinstance(error, PromptError | TokenizerError):
        return Problem(400, text, code="invalid_value")
    if isinstance(error, DFlashError):
        return unavailable(text)
    retry = {"x-should-retry": "false"} if begun else {}
    return Problem(500, "the server failed to answer; its log has the reason under this request's id", headers=retry)


def dumped(value: Any) -> bytes:
    """Compact JSON. Halves of characters, which texts of clients may hold and UTF-8 does not, become question marks."""
    return _ENCODER.encode(value).encode("utf-8", "replace")
