"""The table of a grammar over a model's tokens, where it is regular and llguidance agrees."""

from typing import Any

from dflash_jax.decoding.token_automata import TokenAutomaton
from dflash_jax.sampling_params import Structured
from dflash_jax.text.regular.expressions import Node, NotRegular, automaton
from dflash_jax.text.regular.oracle import compare
from dflash_jax.text.regular.patterns import parse
from dflash_jax.text.regular.rules import language
from dflash_jax.text.regular.schemas import document
from dflash_jax.text.regular.tokens import Vocabulary, token_automaton


def table_of(wanted: Structured, vocabulary: Vocabulary, matcher: Any) -> TokenAutomaton:
    """Every state of it has been compared with llguidance's mask.

    Args:
      matcher: llguidance's at the beginning of the same grammar.

    Raises:
      NotRegular: the host has to be asked, and why.
    """
    try:
        found = token_automaton(automaton(_tree(wanted)), vocabulary, matcher)
    except RecursionError:
        raise NotRegular("a grammar that is nested too deeply") from None
    compare(found, matcher)
    return found


def _tree(wanted: Structured) -> Node:
    kind, text = wanted.form.kind, wanted.form.text
    if kind == "json":
        return document(text)
    return parse(text) if kind == "regex" else language(text)
