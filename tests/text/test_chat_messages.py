"""What messages a chat template is given, and that it says what they say."""

from typing import Any

import pytest

from dflash_jax.errors import ParameterError, PromptError

from .tokenizers_for_tests import byte_level

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo?"}]


def chat(template: str, messages: list[dict[str, Any]] = MESSAGES, /, **options: Any) -> str:
    tokenizer = byte_level()
    tokenizer.template = template
    return tokenizer.decode(tokenizer.encode_chat(messages, **options))


def test_what_a_template_assigns_in_a_loop_is_no_option() -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}{% set content = m.content %}{% endif %}{{ content }}{% endfor %}"
        "{{ style }}"
    )
    assert chat(template, style="!") == "Be brief.Héllo?!"
    with pytest.raises(ParameterError, match=r"asks for no styl: its options are style$"):
        chat(template, styl="!")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"content": "hi"}], r"messages\[0\] has no role: expected 'user' for example, got content"),
        ([{}], r"messages\[0\] has no role: .* got no key"),
        ([*MESSAGES, {"role": None, "content": "hi"}], r"messages\[2\] has no role"),
        ([{"role": "user", "text": "hi"}], r"messages\[0\], of the user, has no content"),
        ([{"role": "system", "content": None}, *MESSAGES[1:]], r"messages\[0\], of the system, has no content"),
        ([{"role": "human", "content": "hi"}], r"leaves out messages\[0\]: it knows no role 'human'"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            r"messages\[0\], whose content is a list of parts",
        ),
    ],
)
def test_messages_that_a_template_would_pass_over_are_refused(messages: list[dict[str, Any]], said: str) -> None:
    """As Qwen3's template does: other roles and contents that are no texts vanish from the prompt."""
    template = """{% for m in messages %}{% if m.role in ('user', 'system', 'assistant') %}
{{ m.role }}: {{ m.content if m.content is string else '' }}{% endif %}{% endfor %}"""
    with pytest.raises(PromptError, match=said):
        chat(template, messages)


def test_parts_that_a_template_would_write_as_python_does_are_refused() -> None:
    """As one does that knows of texts alone and does not ask."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    parts = ({"type": "text", "text": "it's é"},)
    for content in (parts, list(parts), ["one", "two"]):
        with pytest.raises(PromptError, match=r"writes messages\[1\], a list of parts, brackets and all"):
            chat(template, [MESSAGES[0], {"role": "user", "content": content}])


def test_messages_that_say_something_in_another_way_pass() -> None:
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endfor %}"
    said = [{"role": "user", "content": [{"type": "text", "text": "a\n'é'"}]}]
    assert chat("{{ messages[0].content | tojson }}", said) == """[{"type": "text", "text": "a\\n'é'"}]"""
    assert chat(parts, [{"role": "user", "content": [{"type": "text", "text": " hi "}, {"type": "image"}]}]) == "hi"
    calls = [{"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "1"}]
    assert chat("{% for m in messages %}{{ m.role }}{% endfor %}", calls) == "assistanttool"
    assert (
        chat("{% for m in messages %}{{ m.content | upper }}{% endfor %}", [{"role": "user", "content": "hi"}]) == "HI"
    )
    assert (
        chat("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}", [{"role": "critic", "content": "hi"}])
        == "[critic] hi"
    )
    assert chat("{% if messages[0].role == 'ipython' %}x{% endif %}", [{"role": "ipython", "content": "hi"}]) == "x"
