"""Chat templates are programs of strangers: what they say comes out as transformers renders it, and nothing else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from smcjax.tokenizer import chat_template
from smcjax.tokenizer.chat_template import Renderer, plain_messages
from tests.tokenizer.test_tokenizer import PLAIN_CHAT, load, write_tokenizer

HI = [{"role": "user", "content": "hi"}]
TEMPLATES = {
    "plain": PLAIN_CHAT,
    "blocks": "{% for m in messages %}\n  {% if 1 %}\n{{ eos_token }}{% endif %}{{ m.content | trim }}\n{% endfor %}\n",
    "loop control": "{% for m in messages %}{% if m.x %}{% continue %}{% endif %}{{ m|tojson }}{% break %}{% endfor %}",
    "generation": "a{% generation %}b{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}c",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "dict": "{{ dict(a=1, b='é') | tojson(indent=2) }}{{ tools is none }}{{ documents }}{{ eos_token }}",
    "date": "{{ strftime_now('%Y') }}{{ undefined_name }}",
    "macro": "{% macro f(m) %}[{{ m.role }}]{{ m.content }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "slices": "{{ messages[-1]['content'].split('h')[1].upper() }}{{ messages[1:] | length }}<b>&amp;",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers_renders_it(tmp_path: Path, name: str) -> None:
    tokenizer = load(write_tokenizer(tmp_path, chat_template=TEMPLATES[name]))
    messages = [{"role": "user", "content": " hí "}, {"role": "assistant", "content": "oh"}]
    theirs = tokenizer._inner.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat_template(messages) == theirs


def test_named_templates(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    tokenizer = load(write_tokenizer(tmp_path / "both", chat_template=both))
    assert tokenizer.decode(tokenizer.apply_chat_template(HI)) == "A"
    tokenizer = load(write_tokenizer(tmp_path / "one", chat_template=both[1:]))
    with pytest.raises(ValueError, match=r"has the chat templates \['tool_use'\]; name one"):
        tokenizer.apply_chat_template(HI)


def test_variables_of_the_templates_own(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }}{% if thinking %} hm{% endif %}"
    tokenizer = load(write_tokenizer(tmp_path, chat_template=template))
    plain = tokenizer.apply_chat_template(HI)
    assert tokenizer.apply_chat_template(HI, {"thinking": False}) == plain
    assert tokenizer.decode(tokenizer.apply_chat_template(HI, {"thinking": True})) == tokenizer.decode(plain) + " hm"
    with pytest.raises(ValueError, match="the chat template's variable 'messages' is set already"):
        tokenizer.apply_chat_template(HI, {"messages": []})


ENDLESS = {
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long range": "{% for i in range(10**9) %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a long text": "{{ 'x' * 10**10 }}",
    "a filter": "{{ 'x' | center(10**10) }}",
    "a list": "{{ ([0] * 10**10) | length }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "a macro of itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "a division": "{{ 1 / 0 }}",
    "an item": "{{ {}['a']['b'] }}{{ [][0].x.y }}",
    "a lookup": "{{ raise_exception() }}",
    "a syntax": "{% if %}",
    "no such filter": "{{ messages | nonsense }}",
    "a surrogate": "{{ '\\ud800' }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_whatever_a_template_does_is_one_sentence_in_time(name: str) -> None:
    renderer, began = Renderer(), time.perf_counter()
    try:
        with pytest.raises(ValueError, match=r"^the chat template .*; (mend it|change them|shorten)") as caught:
            renderer.render(ENDLESS[name], {"messages": HI})
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
        assert time.perf_counter() - began < 60
        assert renderer.render("{{ messages[0].content }}", {"messages": HI}) == "hi"  # the next one is as any other
    finally:
        renderer.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__subclasses__() }}",
        "{{ (strftime_now | attr('__globals__'))['json'] }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ ''.format_map({'a': 1}) ~ '{0.__class__}'.format(1) }}",
    ],
)
def test_templates_reach_nothing_of_python(template: str) -> None:
    renderer = Renderer()
    try:
        text = renderer.render(template, {"messages": HI})
    except ValueError as error:
        text = str(error)
    finally:
        renderer.close()
    assert "object at" not in text
    assert "class '" not in text
    assert "module" not in text


def test_a_process_that_somebody_ends_is_replaced() -> None:
    renderer = Renderer()
    assert renderer.render("a", {}) == "a"
    assert renderer._process is not None
    first = renderer._process.pid
    renderer._process.kill()
    assert renderer.render("b", {}) == "b"
    assert renderer._process.pid != first
    renderer.close()
    renderer.close()


def test_an_interruption_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer()
    renderer.render("a", {})
    with monkeypatch.context() as patch:
        patch.setattr(chat_template.os, "read", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            renderer.render("interrupted", {})
    assert renderer.render("b", {}) == "b"
    renderer.close()


def test_threads_tasks_and_forks_share_it() -> None:
    def ask(number: int) -> str:
        return chat_template.RENDERER.render("{{ n }}" + " " * (number % 3), {"n": number}).strip()

    async def tasks() -> list[str]:
        return list(await asyncio.gather(*(asyncio.to_thread(ask, number) for number in range(20))))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(100))) == [str(number) for number in range(100)]
    assert asyncio.run(tasks()) == [str(number) for number in range(20)]


def test_a_chat_costs_little(tmp_path: Path) -> None:
    tokenizer = load(write_tokenizer(tmp_path, chat_template=PLAIN_CHAT))
    tokenizer.apply_chat_template(HI)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        tokenizer.apply_chat_template(HI * 5)
        times.append(time.perf_counter() - began)
    assert sorted(times)[10] < 5e-3


def test_parts_are_joined(tmp_path: Path) -> None:
    tokenizer = load(write_tokenizer(tmp_path, chat_template=PLAIN_CHAT))
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == whole
    assert plain_messages([{"role": "tool", "name": "f", "content": []}]) == [
        {"role": "tool", "name": "f", "content": ""}
    ]


WRONG: list[tuple[Any, str]] = [
    ("hi", "messages is 'hi'"),
    ([], "messages is empty"),
    ([5], r"messages is \[5\]"),
    ([HI[0], {"content": "a"}], r"messages\[1\] is .* has no 'role'; add it"),
    ([{"role": "user"}], r"messages\[0\] is .* has no 'content'; add it"),
    ([{"role": 5, "content": "a"}], r"messages\[0\]\['role'\] is 5 and must be a string; "),
    ([{"role": "user", "content": b"a"}], r"messages\[0\]\['content'\] is b'a' and must be a string, or a list"),
    ([{"role": "user", "content": None}], r"messages\[0\]\['content'\] is None and must be a string"),
    ([{"role": "user", "content": {"text": "a"}}], r"messages\[0\]\['content'\] is {'text': 'a'} and must be"),
    ([{"role": "user", "content": ["a"]}], r"messages\[0\]\['content'\]\[0\] is 'a' and must be {'type': 'text'"),
    (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        r"\['content'\]\[0\] is of type 'image_url', and .* 'text'",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], r"\[0\] has the text None, which must be a string"),
    ([{"role": "user", "content": [{"type": "text", "text": b"a"}]}], r"\[0\] has the text b'a', which must be"),
    ([{"role": "user", "content": "a", "tool_calls": [{}]}], r"messages\[0\]\['tool_calls'\] holds {} and must hold"),
    ([{"role": "user", "content": "a", 5: "b"}], r"a key of messages\[0\] is 5 and must be a string"),
    ([{"role": "user", "content": "a\udce9"}], r"messages\[0\]\['content'\] must be valid Unicode"),
]


@pytest.mark.parametrize(("messages", "reason"), WRONG, ids=[reason for _, reason in WRONG])
def test_other_messages_are_refused(messages: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="^.*" + reason) as caught:
        plain_messages(messages)
    assert "\n" not in str(caught.value)


def test_a_fork_starts_its_own() -> None:
    """In a process without threads, as those have it that fork."""
    program = (
        "import os; from smcjax.tokenizer.chat_template import RENDERER\n"
        "assert RENDERER.render('a', {}) == 'a'; mine = RENDERER._process.pid\n"
        "if not os.fork():\n"
        "    assert RENDERER._process is None\n"
        "    os._exit(0 if RENDERER.render('b', {}) == 'b' and RENDERER._process.pid != mine else 1)\n"
        "assert os.wait()[1] == 0\n"
        "assert RENDERER.render('c', {}) == 'c' and RENDERER._process.pid == mine"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
