"""Chat templates that would loop for ever or fill the memory: each ends with an error, and the next template is rendered."""

import collections
import os
import signal
import subprocess
import sys
import threading
import time
import types
from typing import Any

import numpy as np
import pytest

from dflash_jax.errors import ParameterError, PromptError, TokenizerError
from dflash_jax.text import template_process
from dflash_jax.text.chat_template import render

MESSAGES = [{"role": "user", "content": "hi"}]
GOOD = "{{ messages[0].content }}"


def rendered(template: str, messages: list[dict[str, Any]] = MESSAGES, **options: Any) -> str:
    return render(template, messages, {}, options)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are passed soon; the process is ready before."""
    rendered(GOOD)
    monkeypatch.setattr(template_process, "SECONDS", 1.0)


GROW = "{% set n = namespace(x=%START) %}{% for i in range(60) %}{% set n.x = %STEP %}{% endfor %}{{ n.x }}"


def grow(start: str, step: str) -> str:
    return GROW.replace("%START", start).replace("%STEP", step)


@pytest.mark.few("template1", "template11", "*9 ** (9*")
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for i in range(9) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endfor %}{% endmacro %}{{ f(30) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x ** 9 %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 'a' | center(10 ** 11) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ (['a' * 10 ** 6] * 10 ** 6) | join('b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 6) | replace('a', 'a' * 10 ** 6) }}",
        grow("'aaaaaaaaaa'", "n.x ~ n.x"),
        grow("[1]", "[n.x, n.x]"),
    ],
)
def test_time_and_memory_of_a_template_are_bounded(template: str) -> None:
    """In loops, in single steps that no exception could interrupt, and in texts of nested lists that share their parts."""
    started = time.perf_counter()
    with pytest.raises(TokenizerError, match=r"the chat template takes more than (1 s|1024 MiB of memory)"):
        rendered(template)
    assert time.perf_counter() - started < 20
    assert rendered(GOOD) == "hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
        "{{ " + "-" * 200_000 + "1 }}",
        "{% if 1 %}" * 20_000 + "{% endif %}" * 20_000,
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
    ids=[
        "parentheses",
        "signs",
        "blocks",
        "macros",
    ],  # a process that a test starts is told its name, of 128 KB at most
)
def test_templates_nested_without_end_fail(template: str) -> None:
    with pytest.raises(TokenizerError, match="the chat template"):
        rendered(template)
    assert rendered(GOOD) == "hi"


def test_the_text_of_a_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes of UTF-8."""
    most = template_process.MAX_TEXT_BYTES
    assert len(rendered(f"{{{{ 'é' * {most // 2} }}}}")) == most // 2
    for one, size in (("é", most // 2 + 1), ("a", most + 1)):
        with pytest.raises(TokenizerError, match=rf"makes a text of [\d,]+ bytes of these messages, at most {most:,}"):
            rendered(f"{{{{ '{one}' * {size} }}}}")
    with pytest.raises(PromptError, match=rf"may have {most:,} bytes together, these have"):
        rendered(GOOD, [{"role": "user", "content": "a" * most}])


def test_what_json_does_not_have_is_named() -> None:
    looped: list[Any] = []
    looped.append(looped)
    for wrong in (b"bytes", object(), {1, 2}, looped, {(1, 2): 3}, 10**5000):
        with pytest.raises(PromptError, match="messages must hold what JSON can"):
            rendered("{{ messages[0].extra }}", [{"role": "user", "content": "hi", "extra": wrong}])
        with pytest.raises(ParameterError, match="chat_options must hold what JSON can"):
            rendered("{{ tools }}", tools=wrong)


def test_other_mappings_sequences_and_scalars_are_as_pythons() -> None:
    tools = collections.deque([types.MappingProxyType({"a": np.int64(3)}), np.True_, np.float32(0.5), None])
    template = "{{ tools[0].a + 1 }} {{ tools[1] is true }} {{ tools[2] }} {{ tools[3] is none }}"
    assert rendered(template, tools=tools) == "4 True 0.5 True"


def test_texts_are_the_same_on_the_way_there_and_back() -> None:
    """Half of a surrogate pair as well, which the tokenizer refuses with its place."""
    for text in ("é你😀\u2028\x00\x1b", "a\ud800b", "\\u00e9 \" ' {{ }}"):
        assert rendered(GOOD, [{"role": "user", "content": text}]) == text


def test_threads_get_their_own_texts() -> None:
    found: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        found[number] = [rendered(GOOD, [{"role": "user", "content": f"{number} {i}"}]) for i in range(30)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number} {i}" for i in range(30)] for number in range(4)}


def test_a_process_that_somebody_ended_is_started_again() -> None:
    rendered(GOOD)
    process = template_process._PROCESS._process
    assert process is not None
    process.kill()
    process.wait()
    assert rendered(GOOD) == "hi"


def test_an_interrupted_rendering_leaves_no_answer_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered(GOOD)

    def interrupted(stream: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(template_process.template_worker, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rendered("old")
    assert rendered("new") == "new"


def test_the_process_ends_with_python_and_survives_its_interrupts() -> None:
    code = (
        "import os, signal, sys, time; from dflash_jax.text import chat_template, template_process as t\n"
        "say = lambda: chat_template.render('{{ messages[0].content }}', [{'role': 'user', 'content': 'hi'}], {}, {})\n"
        "say(); number = t._PROCESS._process.pid; os.kill(number, 2); time.sleep(0.1); print(say(), number, flush=True)\n"
        "os._exit(0) if sys.argv[1] == 'hard' else None"
    )
    for how in ("soft", "hard"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, how], capture_output=True, text=True, check=True
        )
        said, number = done.stdout.split()
        assert (said, done.stderr) == ("hi", "")
        for _ in range(100):
            if not alive(int(number)):
                break
            time.sleep(0.05)
        else:
            pytest.fail("the process is still there")


def alive(number: int) -> bool:
    """Whether a process is there that is not a zombie, which nobody in a container may collect."""
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_python_that_starts_no_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    template_process._PROCESS.close()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(TokenizerError, match=r"a process of their own, which does not start: .*No such file"):
        rendered(GOOD)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(TokenizerError, match="a process of their own, which does not start: /bin/true ended"):
        rendered(GOOD)


def test_a_forked_process_renders_for_itself() -> None:
    """Its pipes would be its parent's."""
    code = (
        "import os, sys; from dflash_jax.text.chat_template import render\n"
        "say = lambda text: render('{{ messages[0].content }}', [{'role': 'user', 'content': text}], {}, {})\n"
        "say('before'); child = os.fork()\n"
        "found = [say(f'{child > 0} {i}') for i in range(20)]\n"
        "good = found == [f'{child > 0} {i}' for i in range(20)]\n"
        "sys.exit(not good or (child and os.waitpid(child, 0)[1]))"
    )
    # Python 3.12 warns of any fork beside threads; here the fork is what is tested.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_that_ends_the_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered(GOOD)
    process = template_process._PROCESS._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)  # it takes nothing more, and is ended while somebody waits
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGABRT)).start()
    threading.Timer(0.4, os.kill, (process.pid, signal.SIGCONT)).start()
    with pytest.raises(TokenizerError, match=r"its process ended with -6"):
        rendered(GOOD)
