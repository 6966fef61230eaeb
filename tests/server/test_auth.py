"""Who may ask."""

from __future__ import annotations

import pytest

from headrace.server.auth import Access, is_loopback
from headrace.server.serve import check_reach
from headrace.types import RequestError


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]", "[::1]:8000", "::1"]
)
def test_the_loopback_names_are_always_ours(host: str) -> None:
    assert Access.of("127.0.0.1", None).allows_host(host)


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "127.0.0.1.evil.example", "10.0.0.5", "localhost.evil", "[::2]"]
)
def test_other_names_are_not(host: str | None) -> None:
    assert not Access.of("127.0.0.1", None).allows_host(host)


def test_the_bound_host_and_the_operators_names_are_ours() -> None:
    access = Access.of("10.0.0.5", "key", ("llm.example",))
    assert access.allows_host("10.0.0.5:8000") and access.allows_host("LLM.example")
    assert not access.allows_host("10.0.0.6")


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_bound_to_every_address_any_address_is_ours_but_no_name(bound: str) -> None:
    access = Access.of(bound, "key")
    assert access.allows_host("10.0.0.6:8000") and access.allows_host("[fe80::1]:8000")
    assert not access.allows_host("evil.example")  # what DNS rebinding needs


def test_a_star_allows_every_name() -> None:
    assert Access.of("0.0.0.0", "key", ("*",)).allows_host("anything")


def test_the_key_is_compared_whole() -> None:
    access = Access.of("127.0.0.1", "secret")
    assert access.allows_key("Bearer secret") and access.allows_key("bearer secret")
    for wrong in (
        None,
        "",
        "secret",
        "Bearer",
        "Bearer ",
        "Bearer secre",
        "Bearer secrets",
        "Basic secret",
        "Bearer ünï",
    ):
        assert not access.allows_key(wrong)


@pytest.mark.parametrize("key", ["", " ", "\n", "secret ", " secret", "sec\nret", "secret\x00"])
def test_a_key_that_is_empty_or_that_no_header_carries_is_refused_when_it_is_given(key: str) -> None:
    for make in (
        lambda: Access.of("0.0.0.0", key),
        lambda: Access(key, frozenset({"h"})),
        lambda: check_reach("::", key),
    ):
        with pytest.raises(RequestError, match="the API key must be"):
            make()


def test_a_key_that_ends_in_a_letter_whose_last_byte_is_white_space_in_latin_1_is_accepted() -> None:
    access = Access.of("127.0.0.1", "voilà")
    assert access.allows_key("Bearer " + "voilà".encode().decode("latin-1"))


def test_an_empty_host_is_refused_rather_than_matched_by_requests_without_one() -> None:
    for make in (
        lambda: Access.of("", "key"),
        lambda: Access.of("127.0.0.1", None, ("",)),
        lambda: Access.of("127.0.0.1", None, (" ",)),
        lambda: check_reach("", "key"),
        lambda: check_reach(" ", "key"),
    ):
        with pytest.raises(RequestError, match=r"empty; name an address"):
            make()


def test_a_name_of_the_operators_may_have_a_port() -> None:
    assert Access.of("127.0.0.1", None, ("LLM.example:443",)).allows_host("llm.example")


def test_without_a_key_everybody_on_this_machine_may_ask() -> None:
    assert Access.of("127.0.0.1", None).allows_key(None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org"])
def test_another_address_without_a_key_refuses_to_start(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(RequestError, match="--api-key"):
        check_reach(host, None)
    check_reach(host, "key")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.0.1"])
def test_the_loopback_needs_no_key(host: str) -> None:
    check_reach(host, None)
