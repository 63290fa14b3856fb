"""Grammars over a model's tokens, compiled by llguidance and kept, with tables of those that are regular."""

import importlib
import importlib.util
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock, Thread
from typing import Any

from dflash_jax.decoding.grammar_masks import Grammar
from dflash_jax.errors import ParameterError, TokenizerError
from dflash_jax.sampling_params import WHITE_SPACE, Structured
from dflash_jax.text.regular.expressions import NotRegular
from dflash_jax.text.regular.tables import table_of
from dflash_jax.text.regular.tokens import Vocabulary, vocabulary_of
from dflash_jax.text.tokenizer import Tokenizer

MOST_KEPT = 128
MOST_MADE = 4  # tables that are made or wait for that in the background
NO_TABLE_YET = "a table is made when a grammar comes again, in the background"
log = logging.getLogger("dflash_jax.grammars")


class Grammars:
    """Compiled grammars of one model. May be asked from several threads.

    Args:
      name: of the model, for messages.
      vocabulary: tokens that the target has logits for.
      end_ids: tokens that end a text: where a grammar is at its end no other may come.
      at_once: whether every grammar waits for its table: where no host can be asked.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, name: str, vocabulary: int, end_ids: Sequence[int], *, at_once: bool = False
    ):
        self._tokenizer, self._name, self._vocabulary, self._end_ids = tokenizer, name, vocabulary, tuple(end_ids)
        self._at_once = at_once
        self._tokens: Any = None
        self._bytes: Vocabulary | None = None
        self._kept: OrderedDict[Structured, Grammar] = OrderedDict()
        self._making: dict[Structured, Thread] = {}
        self._lock, self._one_table = Lock(), Lock()

    def compiled(self, given: Structured | Mapping[str, Any], *, at_once: bool = False) -> Grammar:
        """A grammar at its beginning. The first of a model takes the time to read its tokens, up to a second.

        Where it comes for the second time its table is made, in the background: that takes from a second to five, which one text
        does not save. Texts that come meanwhile ask the host, and are the same.

        Args:
          at_once: makes the table and waits for it.

        Raises:
          ParameterError: llguidance is not installed, or takes no such grammar, with what it says of it.
          TokenizerError: the model has no tokenizer, or one that llguidance cannot read.
        """
        llguidance, wanted, wait = _installed(), Structured.of(given), at_once or self._at_once
        with self._lock:
            found = self._kept.get(wanted)
            tokens = self._tokens = self._tokens or self._read_tokens(llguidance)
        again = found is not None
        if found is None:
            # Not under the lock: large grammars take a while, and others need not wait for them.
            found = Grammar(_matcher(llguidance, tokens, wanted), reason=NO_TABLE_YET)
        with self._lock:
            found = self._kept.setdefault(wanted, found)
            self._kept.move_to_end(wanted)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            making = self._making.get(wanted)
            if found.reason == NO_TABLE_YET and making is None and (wait or (again and len(self._making) < MOST_MADE)):
                making = Thread(
                    target=self._make_table, args=(wanted, found.matcher.deep_copy()), name="grammar table", daemon=True
                )
                self._making[wanted] = making
                making.start()
        if not wait or making is None:
            return found
        making.join()
        with self._lock:
            return self._kept.get(wanted, found)

    def _make_table(self, wanted: Structured, matcher: Any) -> None:
        """Puts the grammar with its table, or with the reason why it has none, in the place of that without."""
        with self._one_table:
            grammar = self._with_table(wanted, matcher)
        with self._lock:
            if wanted in self._kept:
                self._kept[wanted] = grammar
            del self._making[wanted]

    def _with_table(self, wanted: Structured, matcher: Any) -> Grammar:
        started = time.perf_counter()
        try:
            with self._lock:
                if self._bytes is None:
                    self._bytes = vocabulary_of(self._tokens, self._vocabulary, self._end_ids)
            table = table_of(wanted, self._bytes, matcher)
        except NotRegular as error:
            log.info("%r: the host is asked in every cycle: %s", wanted, error)
            return Grammar(matcher, reason=str(error))
        except Exception as error:  # a table is a matter of speed: whatever is wrong with one, the host can be asked
            log.exception("%r: no table could be made, the host is asked in every cycle", wanted)
            return Grammar(matcher, reason=f"no table could be made: {error!r:.200}")
        seconds = time.perf_counter() - started
        log.info("%r: a table of %d states and %d classes, %.2f s", wanted, *table.next.shape, seconds)
        return Grammar(matcher, table=table, reason="")

    def _read_tokens(self, llguidance: Any) -> Any:
        if self._tokenizer is None:
            raise TokenizerError(f"{self._name} has no tokenizer.json: structured texts need one")
        if not self._end_ids:
            raise ParameterError(f"structured needs a token that ends a text, and {self._name} names none")
        try:
            return llguidance.LLTokenizer(
                self._tokenizer.backend.to_str(), n_vocab=self._vocabulary, eos_token=list(self._end_ids)
            )
        except Exception as error:
            raise TokenizerError(f"llguidance cannot read the tokenizer of {self._name}: {error!s:.200}") from error


def installed() -> bool:
    """Whether the extra `structured` is there."""
    return importlib.util.find_spec("llguidance") is not None


def _installed() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise ParameterError(
            "structured needs llguidance, which is not installed: pip install 'dflash-jax[structured]'"
        ) from None


def _matcher(llguidance: Any, tokens: Any, wanted: Structured) -> Any:
    kind, text = wanted.form.kind, wanted.form.text
    make = llguidance.LLMatcher
    try:
        if kind == "json":
            grammar = make.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITE_SPACE})
        elif kind == "regex":
            grammar = make.grammar_from_regex(text)
        else:
            if "::=" in text:
                text = importlib.import_module("llguidance.gbnf_to_lark").any_to_lark(text)
            grammar = make.grammar_from_lark(text)
        wrong, said = make.validate_grammar_with_warnings(grammar, tokens)
        matcher = None if wrong else make(tokens, grammar, log_level=0)
        if matcher is not None:
            matcher.compute_bitmask()  # what is worked out with the first mask, all texts have then
            said = [matcher.get_error()]
    except Exception as error:
        matcher, said = None, [str(error)]
    if matcher is None or matcher.is_error():
        raise ParameterError(f"structured {kind} is none that can be followed: {' '.join(said).strip():.400}")
    return matcher
