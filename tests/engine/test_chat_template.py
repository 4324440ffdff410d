"""Chat templates: the same text as transformers gives, errors that say what, and templates that attack."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.chat_template import ChatTemplate
from octavo.errors import InvalidRequestError, ModelError
from octavo.models.gguf_file import GgufFile
from tests.engine.chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN, TALKS, TEMPLATES, TOOL

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "hi"}]


def theirs(source: str, messages: Sequence[Any], *, add_generation_prompt: bool, **variables: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        **{**SPECIAL, **variables},
    )
    return str(rendered[0])


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name: str, add_generation_prompt: bool) -> None:
    source = TEMPLATES[name]
    template = ChatTemplate(source, SPECIAL)
    for talk in TALKS:
        expected = theirs(source, talk, add_generation_prompt=add_generation_prompt)
        assert template.render(talk, add_generation_prompt) == expected
        assert len(expected) > 20


def test_smollm2_template_of_the_file(smollm2_path: Path) -> None:
    source = str(GgufFile(smollm2_path).metadata["tokenizer.chat_template"])
    for talk in TALKS:
        for prompt in (True, False):
            assert ChatTemplate(source).render(talk, prompt) == theirs(source, talk, add_generation_prompt=prompt)
    assert ChatTemplate(source).render(HELLO).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("source", [LLAMA3, QWEN], ids=["llama3", "qwen"])
def test_tools_and_variables_reach_the_template(source: str) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"ort": "Tromsø"}}}
    talk: list[dict[str, object]] = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"t": -3}'},
    ]
    ours = ChatTemplate(source, SPECIAL).render(talk, tools=[TOOL], enable_thinking=False)
    expected = theirs(source, talk, add_generation_prompt=True, tools=[TOOL], enable_thinking=False)
    assert ours == expected
    assert "Wetter & <Ort>" in ours  # neither HTML escapes nor \\u ones


def test_time_comes_from_the_clock_that_is_given() -> None:
    template = ChatTemplate(LLAMA3, SPECIAL, now=lambda: datetime(2026, 2, 3))
    assert "Today: 03 Feb 2026" in template.render(HELLO)


def test_parts_of_text_are_joined_where_the_template_wants_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate(CHATML).render(parts, False) == "<|im_start|>user\na b<|im_end|>\n"


def test_parts_go_as_they_are_to_a_template_that_reads_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]
    ours = ChatTemplate(GEMMA, SPECIAL).render(parts)
    assert ours == theirs(GEMMA, parts, add_generation_prompt=True)
    assert "user\nab<end_of_turn>" in ours


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            r"messages\[0\]\.content\[0\].*image_url",
        ),
        ({"role": "user", "content": ["text"]}, "of type None"),
        ({"role": "user", "content": [{"type": "text"}]}, "only parts of type 'text'"),
        ({"content": "x"}, r"messages\[0\] has no role"),
    ],
)
def test_messages_of_another_form_are_refused(message: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        ChatTemplate(CHATML).render([message])
    assert caught.value.param == "messages"


def test_what_the_template_refuses_is_the_requests_fault() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidRequestError, match="refuses these messages: roles must alternate"):
        ChatTemplate(MISTRAL, SPECIAL).render(talk)


def test_messages_the_template_does_not_foresee_are_the_requests_fault() -> None:
    with pytest.raises(InvalidRequestError, match="cannot take these messages"):
        ChatTemplate("{{ messages[0]['content'] + 'x' }}").render([{"role": "user", "content": None}])
    with pytest.raises(InvalidRequestError, match="no attribute 'name'"):
        ChatTemplate("{{ messages[0].name.upper() }}").render(HELLO)


def test_names_of_our_own_cannot_be_set() -> None:
    with pytest.raises(InvalidRequestError, match="documents cannot be set"):
        ChatTemplate(CHATML).render(HELLO, documents=[])


@pytest.mark.parametrize("source", [None, "", " \n"])
def test_no_template_says_what_to_do(source: str | None) -> None:
    with pytest.raises(ModelError, match="no chat template; give another one with --chat-template FILE"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a\n{% if %}", "broken at line 2"),
        ("{% for x in messages %}", "broken at line 1"),
        ("{{ x | nothing_such }}", "nothing_such"),
        ("{% nothing_such %}", "nothing_such"),
        ("x" * (2**20 + 1), "has 1048577 characters"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "chat template"),
    ],
    ids=["if", "for", "filter", "tag", "long", "deep"],
)
def test_a_broken_template_is_a_fault_of_the_model(source: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        ChatTemplate(source)


REACHES_PYTHON = (
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.keys() }}",
    "{{ strftime_now.__self__._now }}",
    "{{ strftime_now.__func__.__globals__ }}",
    "{{ range.__self__._running }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '%s' | format(messages.__class__.__mro__) }}",
    "{{ messages | map(attribute='__class__.__mro__') | list | tojson }}",
    "{{ messages.append(messages) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].__setitem__('role', 'x') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('true') }}",
    "{{ lipsum.__globals__ }}",
    "{{ (messages | groupby('role'))[0].__class__.__mro__ }}",
)


@pytest.mark.parametrize("source", REACHES_PYTHON)
def test_a_template_does_not_reach_python(source: str) -> None:
    with pytest.raises((ModelError, InvalidRequestError)):
        ChatTemplate(source).render(HELLO)
    assert HELLO == [{"role": "user", "content": "hi"}]


DOUBLE = "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = HOW %}{% endfor %}"
GROWS = {
    "range": "{{ range(10**9) | list }}",
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "loops over letters": "{% for a in 'x' * 1000000 %}{% for b in 'x' * 1000000 %}{% endfor %}{% endfor %}",
    "macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros that branch": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "loop that calls itself": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "repeat": "{{ 'a' * 10**9 }}",
    "repeat from the right": "{{ 10**9 * 'a' }}",
    "repeat a list": "{{ ([1] * 10**9) | length }}",
    "double by plus": DOUBLE.replace("HOW", "n.s + n.s"),
    "double by tilde": DOUBLE.replace("HOW", "n.s ~ n.s"),
    "double by format": DOUBLE.replace("HOW", "'%s%s' % (n.s, n.s)"),
    "double by method": DOUBLE.replace("HOW", "'{0}{0}'.format(n.s)"),
    "double by join": DOUBLE.replace("HOW", "[n.s, n.s] | join"),
    "double by block": DOUBLE.replace("HOW", "x").replace(
        "{% set n.s", "{% set x %}{{ n.s ~ n.s }}{% endset %}{% set n.s"
    ),
    "double lists": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "output": "{% for i in range(9999) %}{{ 'a' * 100000 }}{% endfor %}",
    "join method": "{{ ('b' * 10000).join(['a'] * 10000) }}",
    "join filter": "{{ (['a'] * 10000) | join('b' * 10000) }}",
    "replace method": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "power": "{{ 9 ** 99999999 }}",
    "power of powers": "{% set n = namespace(s=9) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "width by percent": "{{ '%999999999d' % 1 }}",
    "width by star": "{{ '%*d' % (999999999, 1) }}",
    "width by name": "{{ '%(a)999999999d' % {'a': 1} }}",
    "width by filter": "{{ '%999999999d' | format(1) }}",
    "width by method": "{{ '{:999999999}'.format(1) }}",
    "width by map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "indent of json": "{{ messages | tojson(indent=10**9) }}",
    "indent": "{{ ('a\\n' * 100000) | indent(100000) }}",
    "wordwrap": "{{ ('a b ' * 1000) | wordwrap(1, wrapstring='x' * 100000) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "time": "{{ strftime_now('%0999999999d') }}",
    "long time": "{{ strftime_now('%c' * 1000000) }}",
}


@pytest.mark.parametrize("source", GROWS.values(), ids=GROWS.keys())
def test_a_template_does_not_grow_without_end(source: str) -> None:
    with pytest.raises((ModelError, InvalidRequestError), match="chat template"):
        ChatTemplate(source).render(HELLO)


def test_a_long_talk_is_within_the_bounds() -> None:
    talk = [{"role": ("user", "assistant")[i % 2], "content": "word " * 100} for i in range(3001)]
    for source in TEMPLATES.values():
        assert len(ChatTemplate(source, SPECIAL).render(talk)) > 1_000_000


def test_the_bound_is_of_one_rendering() -> None:
    template = ChatTemplate("{% for i in range(4000) %}{% for j in range(50) %}{% endfor %}{% endfor %}ok")
    assert [template.render(HELLO) for _ in range(3)] == ["ok"] * 3


def test_threads_render_one_template() -> None:
    template = ChatTemplate(QWEN)
    expected = [template.render(talk) for talk in TALKS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(template.render, TALKS * 20)) == expected * 20
