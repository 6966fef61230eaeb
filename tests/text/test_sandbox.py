"""Hostile chat templates end soon, in an error, having taken little memory; ordinary ones never notice."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from headrace.text.chat import ChatTemplate, render_chat
from headrace.text.tokenizer import Tokenizer
from headrace.types import RequestError

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]

KEEP = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = GROWN %}{% endfor %}{{ ns.s }}"


def doubling(start: str, grown: str) -> str:
    return KEEP.replace("START", start).replace("GROWN", grown)


HOSTILE = {
    "a range that is too long": "{% for a in range(10**9) %}{% endfor %}",
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "endless recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "branching recursion": (
        "{% macro m(n) %}{% if n < 40 %}{{ m(n + 1) }}{{ m(n + 1) }}{% endif %}{% endmacro %}{{ m(0) }}"
    ),
    "call blocks": "{% macro m(n) %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m(1) %}" * 30
    + "x"
    + "{% endcall %}" * 30,
    "a constant repeated": "{{ 'a' * 10**9 }}",
    "a string repeated": "{% set s = 'a' * 1000000 %}{{ s * 1000 }}",
    "a list repeated": "{{ ([1] * 100000) * 100000 }}",
    "powers": "{{ 10**10000 }}",
    "products": "{{ (10**1000) * (10**1000) }}",
    "doubling by +": doubling("'a'", "ns.s + ns.s"),
    "doubling by ~": doubling("'a'", "ns.s ~ ns.s"),
    "doubling by join": doubling("'a'", "[ns.s, ns.s] | join"),
    "doubling by a format": doubling("'a'", "'%s%s' % (ns.s, ns.s)"),
    "doubling by a format method": doubling("'a'", "'{0}{0}'.format(ns.s)"),
    "doubling by replace": doubling("'aa'", "ns.s.replace('a', 'aa')"),
    "doubling a list": doubling("[1]", "ns.s + ns.s"),
    "a tower of lists": doubling("[1]", "[ns.s, ns.s]"),
    "a tower of tuples as a key": doubling("(1,)", "(ns.s, ns.s)").replace("{{ ns.s }}", "{{ {ns.s: 1} }}"),
    "a tower of dicts": doubling("{}", "dict(a=ns.s, b=ns.s)"),
    "a tower of views": doubling("{}", "[ns.s, ns.s]").replace("[ns.s, ns.s]", "{'a': ns.s, 'b': ns.s}.items()"),
    "a tower of batches": doubling("[1]", "(ns.s + ns.s) | batch(2) | list"),
    "a tower of defaults": doubling("[1]", "range(2) | map(attribute='nope', default=ns.s) | list"),
    "a tower of captures": "{% set x = 'aaaaaaaaaa' %}" + "{% set x %}{{ x }}{{ x }}{{ x }}{{ x }}{% endset %}" * 30,
    "a tower by with": "{% with a = 'aaaaaaaaaa' %}"
    + "{% with a = a ~ a ~ a %}" * 18
    + "{{ a }}"
    + "{% endwith %}" * 19,
    "many copies kept": "".join(f"{{% set s{i} = ('a' * 7000000) %}}" for i in range(100)),
    "output in a loop": "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}",
    "output captured in a loop": "{% set x %}{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
    "template text in a loop": "{% for i in range(100000) %}" + "y" * 100_000 + "{% endfor %}",
    "template text in a macro": (
        "{% macro m() %}" + "y" * 100_000 + "{% endmacro %}{% for i in range(100000) %}{{ m() }}{% endfor %}"
    ),
    "padding by a filter": "{{ 'a' | center(10**9) }}",
    "padding by a method": "{{ 'a'.ljust(10**9) }}",
    "padding by a keyword": "{{ 'a' | center(width=10**9) }}",
    "a wide %": "{{ '%1000000000d' % 1 }}",
    "a wide % by an argument": "{{ '%*d' % (10**9, 1) }}",
    "a wide % by a filter": "{{ '%1000000000d' | format(1) }}",
    "a wide format": "{{ '{:>1000000000}'.format(1) }}",
    "a wide nested format": "{{ '{:>{}}'.format(1, 10**9) }}",
    "a wide % of a dict": "{{ '%(a)010000d' % {'a': 1} }}",
    "a precise %": "{{ '%.9999f' % 1 }}",
    "a wide time": "{{ strftime_now('%1000000000d') }}",
    "a replacement that multiplies": "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
    "a replacing filter that multiplies": "{% set s = 'a' * 1000000 %}{{ s | replace('a', s) }}",
    "a separator that multiplies": "{% set s = 'a' * 1000000 %}{{ s.join(range(100000) | map('string')) }}",
    "a joining filter that multiplies": "{% set s = 'a' * 1000000 %}{{ range(100000) | join(s) }}",
    "a joining filter that multiplies by a keyword": "{% set s = 'a' * 1000000 %}{{ range(100000) | join(d=s) }}",
    "indentation": "{{ ('\n' * 1000000) | indent(900) }}",
    "indentation of JSON": "{{ [1, 2] | tojson(indent=10**9) }}",
    "separators of JSON": "{{ range(100000) | list | tojson(separators=('a' * 1000000, ':')) }}",
    "sums of lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
    "bytes": "{{ (5).to_bytes(10**9, 'big') }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10**7) }}",
    "filters in a loop": "{% for i in range(100000) %}{% set x = range(100000) | map('string') | list %}{% endfor %}",
    "slices in a loop": "{% set s = 'a' * 8000000 %}{% for i in range(100000) %}{{ s[1:] | length }}{% endfor %}",
    "comparisons in a loop": (
        "{% set a = [0] * 90000 %}{% set b = [0] * 90000 %}"
        "{% for i in range(100000) %}{% if a == b %}{% endif %}{% endfor %}"
    ),
    "lorem ipsum": "{{ lipsum(10**6) }}",
    "another template": "{% include 'x' %}",
    "a division by zero": "{{ 1 / 0 }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a change by the type's method": "{{ dict.update(messages[0], {'role': 'system'}) }}",
    "an undefined name": "{{ a.b.c }}",
    "an unsafe call": "{{ messages.__class__.__mro__[-1].__subclasses__() }}",
    "an unsafe call by a filter": "{{ (messages | attr('__class__')).__name__() }}",
    "an unsafe format": "{{ '{0.__class__.__mro__}'.format(messages)() }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_ends_soon_in_an_error(tiny_tokenizer: Tokenizer, source: str) -> None:
    start, memory = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = ChatTemplate(source)
    with pytest.raises(RequestError, match="the chat template failed"):
        render_chat(tiny_tokenizer, template, MESSAGES)
    assert time.thread_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 256 * 1024  # KiB


def test_the_limit_of_time_is_that_of_the_clock_handed_in(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    with pytest.raises(RequestError, match=r"it takes more than 2\.0 seconds"):
        render_chat(tiny_tokenizer, ChatTemplate("{% for i in range(10) %}{{ i }}{% endfor %}"), MESSAGES)


def test_a_template_that_failed_can_be_used_again(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% if messages | length > 1 %}{{ 'a' * 10**9 }}{% endif %}fine")
    with pytest.raises(RequestError):
        render_chat(tiny_tokenizer, template, MESSAGES * 2)
    assert render_chat(tiny_tokenizer, template, MESSAGES) == "fine"


def test_numbers_in_a_format_that_are_no_widths_are_left_alone(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ 'December 2023: %s, %05.1f' % ('x', 2.25) }}|{{ '2024 {:>4} 12345'.format(1) }}")
    assert render_chat(tiny_tokenizer, template, MESSAGES) == "December 2023: x, 002.2|2024    1 12345"


def test_a_long_conversation_is_within_the_limits(tiny_tokenizer: Tokenizer, golden_chats: dict[str, Any]) -> None:
    messages = [{"role": role, "content": "word " * 200} for role in ("user", "assistant")] * 1000
    for source in golden_chats["templates"].values():
        assert len(render_chat(tiny_tokenizer, ChatTemplate(source), messages)) > 600


def test_a_long_message_is_within_the_limits(tiny_tokenizer: Tokenizer, golden_chats: dict[str, Any]) -> None:
    message = {"role": "user", "content": "word " * 2_000_000}
    for name in ("stripping", "blocks_on_lines_of_their_own", "tools"):
        text = render_chat(tiny_tokenizer, ChatTemplate(golden_chats["templates"][name]), [message])
        assert text.count("word") == 2_000_000


def test_variables_that_users_write_do_not_shadow_the_meter(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for i in range(2) %}{{ meter }}{{ i }}{% endfor %}")
    assert (
        render_chat(tiny_tokenizer, template, MESSAGES, extra={"meter": "m", "environment": 1, "context": 2}) == "m0m1"
    )
