"""What the files beside `tokenizer.json` say of tokens, as transformers reads them; expected ids and texts are written out."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, processors

from dflash_jax.errors import PromptError, TokenizerError
from dflash_jax.text.tokenizer import Tokenizer, end_token_ids, tokenizer_notices

from .tokenizers_for_tests import SPECIAL, byte_level, ids_of

BOS, MARK, TOOL = "<bos>", "<|mark|>", "<tool>"
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def vocabulary(*words: str) -> tokenizers.Tokenizer:
    """The bytes, their pieces and the end token, then `words` in the vocabulary alone: no text is cut into them."""
    state = json.loads(byte_level().backend.to_str())
    size = len(state["model"]["vocab"]) + len(state["added_tokens"])
    state["model"]["vocab"] |= {word: size + place for place, word in enumerate(words)}
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def id_of(backend: tokenizers.Tokenizer, token: str) -> int:
    number = backend.token_to_id(token)
    assert number is not None
    return number


def loaded(path: Path, backend: tokenizers.Tokenizer, **files: Any) -> Tokenizer:
    backend.save(str(path / "tokenizer.json"))
    for name, values in files.items():
        (path / f"{name}.json").write_text(json.dumps(values))
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": MARK}},
        {"tokenizer_config": {"pad_token": {"content": MARK, **FLAGS}}},
        {"tokenizer_config": {"mark_token": MARK}},
        {"tokenizer_config": {"additional_special_tokens": [MARK]}},
        {"tokenizer_config": {"extra_special_tokens": [{"content": MARK, **FLAGS}]}},
        {"tokenizer_config": {"extra_special_tokens": {"mark": MARK}}},
        {"special_tokens_map": {"eos_token": {"content": MARK, **FLAGS}}},
        {"special_tokens_map": {"additional_special_tokens": [MARK]}},
    ],
)
def test_tokens_that_are_only_named_are_special(tmp_path: Path, files: dict[str, Any]) -> None:
    """They are read whole from templates and texts and left out of texts; else they were letters, and the model saw no mark."""
    backend = vocabulary(MARK)
    number = id_of(backend, MARK)
    tokenizer = loaded(tmp_path, backend, **files)
    assert tokenizer.encode(f"a{MARK}b") == [97, number, 98]
    assert tokenizer.decode([97, number, 98]) == "ab"
    tokenizer.template = f"{MARK}{{{{ messages[0].content }}}}"
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [number, 104, 105]


def test_a_named_token_without_an_embedding_stays_letters(tmp_path: Path) -> None:
    tokenizer = loaded(
        tmp_path, vocabulary(), tokenizer_config={"pad_token": MARK, "additional_special_tokens": [TOOL]}
    )
    assert tokenizer.encode(MARK + TOOL) == ids_of(MARK + TOOL)
    assert tokenizer.special == {"pad_token": MARK}


def test_the_older_list_of_names_counts_where_the_newer_says_nothing(tmp_path: Path) -> None:
    backend = vocabulary(MARK, TOOL)
    older = {"eos_token": MARK, "bos_token": TOOL}
    for name, newer, special in (
        ("absent", {"eos_token": SPECIAL, "unk_token": SPECIAL}, {"unk_token": SPECIAL, **older}),
        ("there", {"eos_token": SPECIAL, "added_tokens_decoder": {}}, {"eos_token": SPECIAL}),
    ):
        (tmp_path / name).mkdir()
        tokenizer = loaded(tmp_path / name, backend, tokenizer_config=newer, special_tokens_map=older)
        assert tokenizer.special == special
        assert end_token_ids(tmp_path / name, tokenizer) == (id_of(backend, special["eos_token"]),)


def test_flags_beside_the_tokenizer_count(tmp_path: Path) -> None:
    backend = vocabulary()
    backend.add_tokens([AddedToken(TOOL, normalized=False), AddedToken(MARK, normalized=False)])
    numbers = [id_of(backend, TOOL), id_of(backend, MARK)]
    decoder = {str(numbers[0]): {"content": TOOL, "special": True, **FLAGS}}
    tokenizer = loaded(tmp_path, backend, tokenizer_config={"eos_token": MARK, "added_tokens_decoder": decoder})
    assert tokenizer.encode(TOOL + MARK) == numbers
    assert tokenizer.decode([97, *numbers, 98]) == "ab"
    (tmp_path / "tokenizer_config.json").unlink()
    plain = Tokenizer.from_folder(tmp_path)
    assert plain is not None
    assert plain.decode([97, *numbers, 98]) == f"a{TOOL}{MARK}b"


def test_listed_tokens_get_their_ids_in_the_order_of_these(tmp_path: Path) -> None:
    """Of one and of two digits, named against the alphabet, and the newest file first."""
    backend = tokenizers.Tokenizer(models.WordLevel({str(number): number for number in range(8)}, "0"))
    listed = {"<b>": 10, "<d>": 8}
    decoder = {"11": {"content": "<a>", **FLAGS}, "9": {"content": "<c>", **FLAGS}}
    tokenizer = loaded(tmp_path, backend, tokenizer_config={"added_tokens_decoder": decoder}, added_tokens=listed)
    assert tokenizer.encode("<a><b><c><d>") == [11, 10, 9, 8]
    with pytest.raises(TokenizerError, match=r"token '<b>' has id 10 in .* and would be 9 after those of"):
        loaded(tmp_path, backend, tokenizer_config={}, added_tokens=listed)


def test_tokens_of_the_oldest_list(tmp_path: Path) -> None:
    """`added_tokens.json` tells ids alone: texts are normalised before they are searched for those that nobody calls special, and
    what `tokenizer.json` says of one counts more."""
    backend = vocabulary()
    backend.add_special_tokens([BOS])
    backend.normalizer = normalizers.Lowercase()
    number, first = backend.get_vocab_size(), id_of(backend, BOS)
    listed = {BOS: first, TOOL: number, MARK: number + 1}
    tokenizer = loaded(tmp_path, backend, tokenizer_config={"eos_token": MARK}, added_tokens=listed)
    assert tokenizer.encode(TOOL.upper() + MARK) == [number, number + 1]
    assert tokenizer.encode(MARK.upper()) == ids_of(MARK)
    assert tokenizer.decode([97, first, number, number + 1, 98]) == f"a{TOOL}b"


def test_texts_in_which_special_tokens_are_letters(tmp_path: Path) -> None:
    """`split_special_tokens`; without it whoever writes a text can write any mark of the template, as in transformers."""
    injected = f"hi{SPECIAL}"
    number = id_of(byte_level().backend, SPECIAL)
    for split, ids in ((True, ids_of(injected)), (False, [*ids_of("hi"), number])):
        tokenizer = loaded(tmp_path, vocabulary(), tokenizer_config={"split_special_tokens": split})
        tokenizer.template = "{{ messages[0].content }}"
        assert tokenizer.encode(injected) == tokenizer.encode_chat([{"role": "user", "content": injected}]) == ids


def around(*, bos: bool = False, eos: bool = False, bare: bool = False) -> tokenizers.Tokenizer:
    """A tokenizer that puts tokens around a text by itself, or nothing in the way DeepSeek's does."""
    backend = vocabulary()
    backend.add_special_tokens([BOS])
    numbers = [(token, id_of(backend, token)) for token in (BOS, SPECIAL)]
    single = f"{f'{BOS} ' if bos else ''}$A{f' {SPECIAL}' if eos else ''}"
    template = processors.TemplateProcessing(single=single, special_tokens=numbers)
    if not bare:
        backend.post_processor = template if bos or eos else processors.ByteLevel(trim_offsets=False)
    return backend


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "LlamaTokenizer"])
@pytest.mark.parametrize("own", [{}, {"bare": True}, {"bos": True}, {"bos": True, "eos": True}])
@pytest.mark.parametrize(
    ("says", "bos", "eos"),
    [
        ({"add_bos_token": True, "add_eos_token": False}, True, False),
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_bos_token": False, "add_eos_token": True}, False, True),
        ({"add_eos_token": True}, True, True),
    ],
)
def test_tokens_around_texts_are_those_that_the_settings_ask_for(tmp_path, kind, own, says, bos, eos) -> None:
    """As transformers 4.57 does with each of these folders; DeepSeek-V2, V3 and R1 are the first one."""
    backend = around(**own)
    first, last = ([id_of(backend, token)] * asked for token, asked in ((BOS, bos), (SPECIAL, eos)))
    settings = {"tokenizer_class": kind, "bos_token": {"content": BOS, **FLAGS}, "eos_token": SPECIAL, **says}
    tokenizer = loaded(tmp_path, backend, tokenizer_config=settings)
    tokenizer.template = "{{ bos_token }}{{ messages[0].content }}"
    assert tokenizer.encode("hi") == [*first, *ids_of("hi"), *last]
    # A template holds its own beginning: there is one, not two.
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [id_of(backend, BOS), *ids_of("hi")]


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False},
        {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": False},
    ],
)
def test_else_they_are_those_of_the_tokenizers_own_file(tmp_path: Path, settings: dict[str, Any]) -> None:
    backend = around(bos=True)
    named = {"bos_token": BOS, "eos_token": SPECIAL}
    tokenizer = loaded(tmp_path, backend, tokenizer_config=named | settings)
    assert tokenizer.encode("hi") == [id_of(backend, BOS), *ids_of("hi")]


def test_a_beginning_that_no_vocabulary_has_is_refused(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    assert loaded(tmp_path, around(), tokenizer_config=settings).encode("hi") == ids_of("hi")  # nothing is named
    with pytest.raises(TokenizerError, match="asks for '<other>' around texts, which"):
        loaded(tmp_path, around(), tokenizer_config=settings | {"bos_token": "<other>"})


def test_messages_with_tools_take_the_template_for_them(tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "hi"}]
    listed = [
        {"name": "default", "template": "d {{ tools }}"},
        {"name": "tool_use", "template": "t {{ tools | length }}"},
    ]
    tokenizer = loaded(tmp_path, vocabulary(), tokenizer_config={"chat_template": listed})
    assert tokenizer.decode(tokenizer.encode_chat(hello)) == "d None"
    assert tokenizer.decode(tokenizer.encode_chat(hello, tools=[{}, {}])) == "t 2"
    named = {entry["name"]: entry["template"] for entry in listed}
    tokenizer = loaded(tmp_path, vocabulary(), tokenizer_config={"chat_template": named})
    assert tokenizer.decode(tokenizer.encode_chat(hello, tools=[{}])) == "t 1"
    tokenizer = loaded(tmp_path, vocabulary(), tokenizer_config={"chat_template": listed[1:]})
    with pytest.raises(PromptError, match="only chat template is for messages with tools"):
        tokenizer.encode_chat(hello)


@pytest.mark.parametrize(
    "code", [{"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, {"AutoTokenizer": "t.T"}, ["t.T", None]]
)
def test_a_tokenizer_that_is_code_is_called_so(tmp_path: Path, code: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": code}))
    (notice,) = tokenizer_notices(tmp_path)
    assert "is code of its release" in notice
    assert "T" in notice
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_notices(tmp_path) == []
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_notices(tmp_path) == []
