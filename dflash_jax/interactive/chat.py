"""Conversations with a model. The command `dflash-jax chat` and Python have them from here."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from dflash_jax.engine.requests import Request
from dflash_jax.errors import CapacityError, DFlashError, ParameterError, TokenizerError
from dflash_jax.generation import Prompted, check_flags, make_requests, pieces_of, prompted
from dflash_jax.model import Model
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.text.completion import Completion, Piece

DEFAULT_TOKENS = 1024


class Chat:
    """A conversation with a model, which remembers what was said and how to answer.

    `say` gives an answer, `stream` its pieces as they come. An answer that is stopped half way (Ctrl-C, or a stream that is left)
    is in the history as far as it went; a message that gets none is not. Prompts grow with the conversation, and pages of what was
    said before are used again. One answer at a time.

    Args:
      model: from `load`, with a chat template.
      params: of answers, from the next one on; greedy and 1024 tokens where None. `max_tokens` is shortened to what is left of the
        model's length.
      system: what the model is told before everything else; None for nothing.
      draft: False answers with the target alone.
      chat_options: names for the chat template, for example `{"enable_thinking": False}`.

    Attributes:
      history: messages so far, without the system's: `{"role": "user" or "assistant", "content": ...}`. The content of one with
        pictures is a list of parts, as `dflash_jax.generate` takes it.
      completions: of the answers that were not stopped, in order.

    Raises:
      TokenizerError: the model has no tokenizer.
      PromptError: it has no chat template.
      ParameterError: an argument is nothing that it may be.
    """

    def __init__(
        self,
        model: Model,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        draft: bool = True,
        chat_options: Mapping[str, Any] | None = None,
    ):
        self.draft, _ = check_flags(model, draft, False, chat_options)
        if params is not None and not isinstance(params, SamplingParams):
            raise ParameterError(f"params must be one SamplingParams, got {type(params).__name__}")
        if system is not None and not isinstance(system, str):
            raise ParameterError(f"system must be a text, got {type(system).__name__} {system!r:.80}")
        self.model, self.system = model, system
        self.params = params or SamplingParams(max_tokens=DEFAULT_TOKENS)
        self._check_alone()
        self.chat_options = dict(chat_options or {})
        self.history: list[dict[str, Any]] = []
        self.completions: list[Completion] = []
        if model.tokenizer is None:
            raise TokenizerError(
                f"{model.name} has no tokenizer.json, and a conversation is made of texts: add the file to its folder"
            )
        self._ids("?")  # a template that is not there, or takes no such option or no system message, says so now

    def __repr__(self) -> str:
        answers = sum(message["role"] == "assistant" for message in self.history)
        return f"Chat({self.model.name!r}: {answers} answers)"

    def say(self, text: str, *, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Completion:
        """The answer to a message. Arguments and errors are those of `stream`."""
        with closing(self.stream(text, images=images, videos=videos)) as pieces:
            for piece in pieces:
                if piece.completion is not None:
                    return piece.completion
        raise AssertionError("a stream ends with a completion")

    def stream(self, text: str, *, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Generator[Piece]:
        """Pieces of the answer to a message.

        Args:
          images: pictures that are shown with it, before its text: paths, bytes, data URLs, arrays or images of Pillow.
          videos: films, after the pictures: paths, bytes or data URLs; or `{"video": ..., "fps": ...}` with frames, or with
            `num_frames` or `max_pixels`.

        Raises:
          PromptError, ParameterError, TokenizerError: at once; the conversation stays as it was.
          CapacityError: at once: the conversation is longer than the model takes. `undo` or `reset` make room.
        """
        content = self._content(text, images, videos)
        prompt, params = self._asked(content)
        pieces = pieces_of(self.model, [prompt], params, draft=self.draft)
        return self._answer(content, pieces)

    def request(self, text: str) -> Request:
        """The engine's request for a message. Raises what `stream` raises."""
        prompt, params = self._asked(self._content(text, (), ()))
        return make_requests(self.model, [prompt], params)[0]

    def set_options(self, chat_options: Mapping[str, Any]) -> None:
        """Other names for the chat template, in place of those before. Raises ParameterError for one that it does not ask for."""
        check_flags(self.model, self.draft, False, chat_options)
        before, self.chat_options = self.chat_options, dict(chat_options)
        try:
            self._ids("?")
        except DFlashError:
            self.chat_options = before
            raise

    def reset(self) -> None:
        """Forgets what was said; options and the system's message stay."""
        self.history.clear()
        self.completions.clear()

    def undo(self) -> bool:
        """Forgets the last message and its answer. False where nothing was said."""
        if not self.history:
            return False
        *self.history, _, answer = self.history
        if self.completions and self.completions[-1].text == answer["content"]:
            self.completions.pop()
        return True

    def _content(self, text: str, images: Sequence[Any], videos: Sequence[Any]) -> str | list[dict[str, Any]]:
        """A message's content. Raises ParameterError for one that is no text, and for pictures or films that are no list."""
        if not isinstance(text, str):
            raise ParameterError(f"a message must be a text, got {type(text).__name__} {text!r:.80}")
        if not isinstance(images, list | tuple):
            raise ParameterError(f"images must be a list of pictures, got {type(images).__name__}")
        if not isinstance(videos, list | tuple):
            raise ParameterError(f"videos must be a list of films, got {type(videos).__name__}")
        shown = [{"type": "image", "image": image} for image in images]
        shown += [{"type": "video", **(one if isinstance(one, Mapping) else {"video": one})} for one in videos]
        return [*shown, {"type": "text", "text": text}] if shown else text

    def _asked(self, content: Any) -> tuple[Prompted, SamplingParams]:
        """The prompt that a message makes, and the parameters of its answer."""
        self._check_alone()
        messages = self._messages(content)
        prompt = prompted(self.model, messages, chat=False, chat_options=self.chat_options)
        engine = self.model.engine
        longest = engine.longest
        if (room := longest - len(prompt.ids)) < 1:
            raise CapacityError(
                f"the conversation has {len(prompt.ids)} tokens with this message, the model has room for {longest}: reset it, or "
                "take back what was said last (undo)"
            )
        most = min(room, self.params.max_tokens)
        params = replace(self.params, max_tokens=most, min_tokens=min(most, self.params.min_tokens))
        return prompt, params

    def _check_alone(self) -> None:
        if self.params.n > 1:
            raise ParameterError(f"a message has one answer in a conversation: n must be 1, got {self.params.n}")

    def _messages(self, content: Any) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.history, {"role": "user", "content": content}]

    def _ids(self, text: str) -> tuple[int, ...]:
        return prompted(self.model, self._messages(text), chat=False, chat_options=self.chat_options).ids

    def _answer(self, content: Any, pieces: Generator[Piece]) -> Generator[Piece]:
        said, whole = "", False
        try:
            with closing(pieces):
                for piece in pieces:
                    said += piece.text
                    if piece.completion is not None:
                        self.completions.append(piece.completion)
                        whole = True
                    yield piece
        finally:
            if said or whole:
                self.history += [{"role": "user", "content": content}, {"role": "assistant", "content": said}]
