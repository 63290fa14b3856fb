"""The table of a grammar over a model's tokens, where it is regular and llguidance agrees."""

import json
from typing import Any

from dflash_jax.decoding.token_automata import TokenAutomaton
from dflash_jax.sampling_params import Structured
from dflash_jax.text.regular.expressions import Alt, Node, NotRegular, automaton, literal
from dflash_jax.text.regular.oracle import compare
from dflash_jax.text.regular.patterns import parse
from dflash_jax.text.regular.schemas import document
from dflash_jax.text.regular.tokens import Vocabulary, token_automaton

_START = "start: "


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
    return parse(text) if kind == "regex" else _choices(text)


def _choices(text: str) -> Node:
    """Those of `Structured(choice=...)`, as it writes them."""
    read, choices, place = json.JSONDecoder().raw_decode, list[Node](), len(_START)
    try:
        while text.startswith(_START) and text[place] == '"':
            found, place = read(text, place)
            choices.append(literal(found))
            if place == len(text):
                return Alt(tuple(choices))
            if text[place : place + 3] != " | ":
                break
            place += 3
    except (ValueError, IndexError):
        pass
    raise NotRegular("a grammar with rules")
