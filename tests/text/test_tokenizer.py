"""Tokenizer files, chat templates (data from a model folder, run in a sandbox) and end tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from dflash_jax.errors import ConfigError, ParameterError, PromptError, TokenizerError
from dflash_jax.text.backend import named_errors
from dflash_jax.text.refused_words import refused_ids
from dflash_jax.text.tokenizer import MAX_END_TOKENS, MAX_TEMPLATE_BYTES, Tokenizer, end_notice, end_token_ids

from .tokenizers_for_tests import SPECIAL, byte_level

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo?"}]
TEMPLATE = """{%- for message in messages %}
[{{ message.role }}] {{ message['content'] | trim }}
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% if not thinking | default(true) %} (no thinking){% endif %}{% endif %}"""
RENDERED = "[system] Be brief.\n[user] Héllo?\n[assistant]"


def folder_with(path: Path, **files: Any) -> Path:
    """A model folder with a tokenizer and the given files; dicts become JSON, `chat_template` the separate file."""
    byte_level().backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        if name == "chat_template":
            (path / "chat_template.jinja").write_bytes(content if isinstance(content, bytes) else content.encode())
        else:
            (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def chat(template: str | None, messages: list[dict[str, Any]] = MESSAGES, /, **options: Any) -> str:
    tokenizer = byte_level()
    tokenizer.template = template
    return tokenizer.backend.decode(tokenizer.encode_chat(messages, **options), skip_special_tokens=False)


def test_encode_and_decode_are_inverse() -> None:
    tokenizer = byte_level()
    text = "A naïve 😀 test\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(f"a{SPECIAL}") == [ord("a"), tokenizer.backend.token_to_id(SPECIAL)]
    assert tokenizer.decode(tokenizer.encode(f"a{SPECIAL}b")) == "ab"


def test_chat_messages_go_through_the_template() -> None:
    assert chat(TEMPLATE) == RENDERED
    assert chat(TEMPLATE, thinking=False) == RENDERED + " (no thinking)"
    assert chat("{{ eos_token }}{{ messages[-1].content }}") == f"{SPECIAL}Héllo?"
    assert chat("{{ {'b': 1, 'a': 'é<'} | tojson }}") == '{"b": 1, "a": "é<"}'


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}", ""),
        ("{% if not tools is defined %}{% set tools = 1 %}{% endif %}{{ tools }}", "None"),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}{{ [1] | tojson(indent=1) }}", '"\\u00e9"[\n 1\n]'),
        ("{% set a = 1 %}a{% generation %}{% set a = 2 %} b{{ a }}{% endgeneration %} c{{ a }}", "a b2 c1"),
        (
            "{% for m in messages %}{%- generation -%} {{ m.role }} {%- endgeneration -%}{% break %}{% endfor %}",
            "system",
        ),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_find_what_transformers_gives_them(template: str, text: str) -> None:
    assert chat(template) == text


def test_tools_reach_the_template() -> None:
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    assert chat(template, tools=[{"name": "f"}, {"name": "g"}]) == '{"name": "f"}{"name": "g"}'
    with pytest.raises(ParameterError, match=r"function .* is none of these; give its JSON form"):
        chat(template, tools=[chat])


@pytest.mark.parametrize("name", ["thinkng", "messages", "range", "role"])
def test_options_that_a_template_does_not_ask_for_are_refused(name: str) -> None:
    with pytest.raises(ParameterError, match=f"asks for no {name}: its options are add_generation_prompt, thinking"):
        chat(TEMPLATE, **{name: False})
    with pytest.raises(ParameterError, match=f"asks for no {name}: its options are none"):
        chat("{% set role = 1 %}{{ messages[0].role }}", **{name: False})


def test_templates_may_leave_loops_early() -> None:
    assert (
        chat("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == "system"
    )


def test_prompts_are_not_cut_or_filled_up_as_batches_for_training_were(tmp_path: Path) -> None:
    backend = byte_level().backend
    backend.enable_truncation(5)
    backend.enable_padding(length=40, pad_id=0)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("a longer text") == byte_level().encode("a longer text")


def test_a_missing_template_says_what_to_do() -> None:
    with pytest.raises(PromptError, match=r"no chat template.* give a text to continue"):
        chat(None)


@pytest.mark.parametrize(
    "payload",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ messages.append({'role': 'x', 'content': 'y'}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('%s' % messages.__class__) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ strftime_now.__globals__ }}",
        "{% generation %}{{ ''.__class__ }}{% endgeneration %}",
    ],
)
def test_payloads_neither_run_nor_leak(payload: str) -> None:
    try:
        text = chat(payload)
    except TokenizerError:
        return
    assert not any(word in text for word in ("class", "object", "globals", "root:", "function", "xxxx"))


@pytest.mark.parametrize(
    "broken",
    [
        "{% for m in messages %}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ 'a'.encode('no such encoding') }}",
        "{{ messages | sort(attribute='missing') | join(1, 2, 3) }}",
        "{{ [1, 2].index(7) }}",
        "{{ 'abc' | slice('x') | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_fails_is_a_tokenizer_error(broken: str) -> None:
    with pytest.raises(TokenizerError, match="chat template fails on these messages"):
        chat(broken)


def test_what_a_template_refuses_itself_is_the_prompts_fault() -> None:
    with pytest.raises(PromptError, match="refused these messages: roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}")


def test_templates_are_found_where_folders_keep_them(tmp_path: Path) -> None:
    def loaded(name: str, **files: Any) -> Tokenizer:
        (tmp_path / name).mkdir()
        tokenizer = Tokenizer.from_folder(folder_with(tmp_path / name, **files))
        assert tokenizer is not None
        return tokenizer

    assert loaded("none").template is None
    assert loaded("string", tokenizer_config={"chat_template": "s"}).template == "s"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert loaded("list", tokenizer_config={"chat_template": named}).template == "d"
    assert loaded("no default", tokenizer_config={"chat_template": named[:1]}).template is None
    both = loaded("separate", tokenizer_config={"chat_template": "s"}, chat_template=TEMPLATE)
    assert both.template == TEMPLATE
    assert both.decode(both.encode_chat(MESSAGES)) == RENDERED


def test_named_special_tokens_come_from_the_settings(tmp_path: Path) -> None:
    settings = {
        "bos_token": None, "eos_token": {"content": SPECIAL, "special": True}, "pad_token": "<pad>", "add_bos_token": False,
        "model_max_length": 9,
    }  # fmt: skip
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, tokenizer_config=settings))
    assert tokenizer is not None
    assert tokenizer.special == {"eos_token": SPECIAL, "pad_token": "<pad>"}


def test_tokens_beside_the_tokenizer_are_added_to_it(tmp_path: Path) -> None:
    """As in transformers, where their ids fit; a template's marks would otherwise be read as letters, without a word."""

    def loaded(name: str, **files: Any) -> Tokenizer:
        (tmp_path / name).mkdir()
        tokenizer = Tokenizer.from_folder(folder_with(tmp_path / name, **files))
        assert tokenizer is not None
        return tokenizer

    size = byte_level().backend.get_vocab_size()
    entry = {
        "content": "<x>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    known = {str(size - 1): entry | {"content": SPECIAL}}
    special = loaded("special", tokenizer_config={"added_tokens_decoder": known | {str(size): entry}})
    assert special.encode("a<x>b") == [97, size, 98]
    assert special.decode([97, size, 98]) == "ab"
    plain = loaded("plain", added_tokens={SPECIAL: size - 1, "<y>": size + 1, "<x>": size})
    assert plain.encode("<y><x>") == [size + 1, size]
    assert plain.decode([size + 1, size]) == "<y><x>"
    assert loaded("word", added_tokens={"ab": 256}).encode("ab") == [256]  # in the vocabulary, but no merge leads there
    with pytest.raises(TokenizerError, match=f"'<x>' has id {size + 3} in .* and would be {size} after"):
        loaded("gap", tokenizer_config={"added_tokens_decoder": {str(size + 3): entry}})


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize(
    "content", ["", "{}", "not json", '{"version": "1.0"}', "[1, 2]", '{"model": {"type": "Odd"}}']
)
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer this version"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer this version"):
        Tokenizer.from_folder(tmp_path)


def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is a pointer of Git LFS.*`git lfs pull`"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "{", '"text"'])
def test_broken_settings_are_named(tmp_path: Path, content: str) -> None:
    with pytest.raises((TokenizerError, ConfigError), match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder_with(tmp_path, tokenizer_config=content))


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_templates_have_a_mebibyte_at_most_wherever_they_stand(tmp_path: Path, place: str) -> None:
    """In bytes of UTF-8."""
    for text in ("é" * (MAX_TEMPLATE_BYTES // 2), "é" * (MAX_TEMPLATE_BYTES // 2) + "a"):
        for listed in (False, True) if place == "tokenizer_config.json" else (False,):
            inline = {"chat_template": [{"name": "default", "template": text}] if listed else text}
            files = {"tokenizer_config": inline} if place == "tokenizer_config.json" else {"chat_template": text}
            folder = folder_with(tmp_path, **files)
            if len(text.encode()) > MAX_TEMPLATE_BYTES:
                with pytest.raises(TokenizerError, match=rf"{place}.* is larger than {MAX_TEMPLATE_BYTES} bytes"):
                    Tokenizer.from_folder(folder)
            else:
                tokenizer = Tokenizer.from_folder(folder)
                assert tokenizer is not None
                assert tokenizer.template == text


@pytest.mark.parametrize("content", [b"\xff\xfeabc", b"x" * (MAX_TEMPLATE_BYTES + 1)], ids=["no text", "too large"])
def test_a_separate_template_that_cannot_be_one_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        Tokenizer.from_folder(folder_with(tmp_path, chat_template=content))


def test_end_tokens_are_looked_up_in_order(tmp_path: Path) -> None:
    tokenizer = byte_level()
    special = tokenizer.backend.token_to_id(SPECIAL)
    assert end_token_ids(tmp_path, None) == ()
    assert end_token_ids(tmp_path, tokenizer) == (special,)
    tokenizer.special["eos_token"] = "not in the vocabulary"
    assert end_token_ids(tmp_path, tokenizer) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_token_ids(tmp_path, tokenizer) == (7,)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": null}')
    assert end_token_ids(tmp_path, tokenizer) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": []}')
    assert end_token_ids(tmp_path, tokenizer) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7, 11]}')
    assert end_token_ids(tmp_path, tokenizer) == (9, 7, 11)
    tokenizer.special["eos_token"] = SPECIAL  # what a model that was trained for conversation ends with
    assert end_token_ids(tmp_path, tokenizer) == (9, 7, 11, special)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{special}, 7]}}')
    assert end_token_ids(tmp_path, tokenizer) == (special, 7)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 8}}')
    assert end_token_ids(tmp_path, None) == (8,)


@pytest.mark.parametrize("value", ["[1, true]", '"5"', "[1.5]", '["x"]', "{}", "-1", str(2**31), f"[1, {10**400}]"])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(ConfigError, match=r"generation_config\.json.*eos_token_id must be an id"):
        end_token_ids(tmp_path, None)


def test_end_tokens_are_few(tmp_path: Path) -> None:
    """A program compares each token with each of them."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(MAX_END_TOKENS), 0]}))
    assert end_token_ids(tmp_path, None) == tuple(range(MAX_END_TOKENS))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(MAX_END_TOKENS + 1)]}))
    with pytest.raises(ConfigError, match=f"lists {MAX_END_TOKENS + 1} ids, at most {MAX_END_TOKENS} can end texts"):
        end_token_ids(tmp_path, None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2**31 - 1}))
    assert end_token_ids(tmp_path, None) == (2**31 - 1,)


WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
PANICS = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # of tokenizers 0.23, which is then no Exception


@pytest.mark.parametrize(
    "state",
    [
        {"normalizer": PANICS, "model": WORDS},
        {"model": WORDS | {"vocab": {"a": 2**32}}},
        {"model": WORDS | {"vocab": {"a": 10**400}}},
        {"model": WORDS | {"vocab": {"\ud800": 0}}},
        {"model": WORDS, "added_tokens": [{"id": 1, "content": "\udfff"}]},
        {"model": WORDS, "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        {"model": {"type": "Unigram", "vocab": [], "unk_id": 5}},
    ],
)  # fmt: skip
def test_whatever_is_wrong_in_a_tokenizer_file_has_a_name(tmp_path: Path, state: dict[str, Any]) -> None:
    """What tokenizers raises for it is a bare Exception, or a panic."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", **state}))
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json is not a tokenizer this version of tokenizers can read: "
    ):
        Tokenizer.from_folder(tmp_path)


DEEP = '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}"


def test_files_nested_without_end_have_a_name(tmp_path: Path) -> None:
    for text in (DEEP, '{"model": ' * 200_000, "[" * 200_000):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer this version"):
            Tokenizer.from_folder(tmp_path)
    for name in ("tokenizer_config", "special_tokens_map", "added_tokens"):
        with pytest.raises(ConfigError, match=rf"{name}\.json .*nested too deeply"):
            Tokenizer.from_folder(folder_with(tmp_path, **{name: DEEP}))
        (tmp_path / f"{name}.json").unlink()
    (tmp_path / "generation_config.json").write_text(DEEP)
    with pytest.raises(ConfigError, match=r"generation_config\.json .*nested too deeply"):
        end_token_ids(tmp_path, None)


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "\ud800"},
        {"additional_special_tokens": ["a\udc00"]},
        {"extra_special_tokens": {"mark": "\ud800"}},
        {"added_tokens_decoder": {"275": {"content": "\ud83d", "special": True}}},
        {"chat_template": "{{ '\ud800' }}"},
    ],
)
def test_half_of_a_surrogate_pair_has_a_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json .*half of a surrogate pair"):
        Tokenizer.from_folder(folder_with(tmp_path, tokenizer_config=settings))
    with pytest.raises(ConfigError, match=r"special_tokens_map\.json .*half of a surrogate pair"):
        Tokenizer.from_folder(folder_with(tmp_path, tokenizer_config={}, special_tokens_map={"eos_token": "\udfff"}))


@pytest.mark.parametrize("number", [-1, 2**31, 2**40, 10**400, 3.0, True, None, "7", [1]])
def test_ids_of_added_tokens_are_ids(tmp_path: Path, number: Any) -> None:
    with pytest.raises(TokenizerError, match=rf"token '<x>' has id .*, expected a number from 0 to {2**31 - 1}"):
        Tokenizer.from_folder(folder_with(tmp_path, added_tokens={"<x>": number}))
    (tmp_path / "added_tokens.json").unlink()
    decoder = {"9" * 5000: {"content": "<x>"}} if number is None else {str(number): {"content": "<x>"}}
    if number != "7":
        with pytest.raises(TokenizerError, match=r"token .<x>. has id .*, expected a number from 0"):
            Tokenizer.from_folder(folder_with(tmp_path, tokenizer_config={"added_tokens_decoder": decoder}))


def test_a_tokenizer_that_fails_on_a_text_or_on_tokens_says_so() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "no such token"))
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(TokenizerError, match="the tokenizer fails on this text: "):
        tokenizer.encode("b")
    with pytest.raises(TokenizerError, match="the tokenizer fails on these token ids: "):
        tokenizer.decode([2**40])
    with pytest.raises(TokenizerError, match="the tokenizer fails on token id -1: "):
        tokenizer.is_silent(-1)


def test_a_panic_is_named_and_an_interrupt_is_none() -> None:
    class PanicException(BaseException):
        pass

    def call(error: BaseException) -> None:
        with named_errors("the tokenizer fails"):
            raise error

    with pytest.raises(TokenizerError, match="the tokenizer fails: PanicException"):
        call(PanicException())
    with pytest.raises(PromptError, match="as it was"):
        call(PromptError("as it was"))
    for passes in (KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(passes):
            call(passes())


def test_end_tokens_outside_the_vocabulary_are_told_of() -> None:
    assert end_notice((), 10) == end_notice((3,), 10) == end_notice((12, 3), 10) == []
    assert end_notice((12, 10), 10) == [
        "no text ends by itself: end tokens (12, 10) lie outside the vocabulary of 10; set eos_token_id in generation_config.json"
    ]


def test_a_bad_word_without_tokens_is_refused_and_not_looked_for() -> None:
    """A vocabulary need not spell every character: such a word had no last token, and asking for it was an error of Python's."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, " ": 2}, []))
    tokenizer = Tokenizer(backend)
    assert refused_ids(tokenizer, "m", ["ab", (1,), "b"]) == ((0, 1), (2, 0, 1), (1,), (2, 1))
    with pytest.raises(ParameterError, match=r"bad_words holds '\\x00', of which the tokenizer of m makes no tokens"):
        refused_ids(tokenizer, "m", ["a", "\0"])
