"""What a client may ask: every wrong value is refused by the name of its field."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

import pytest

from headrace.types import MAX_INT32, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_SEED, Request, RequestError, SamplingParams

REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs")


def refused(name: str, value: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name and str(caught.value).startswith(name)
    return caught.value


@pytest.mark.parametrize("value", ["1", True, [1], {}, b"1", 1j])
@pytest.mark.parametrize("name", [*REALS, *INTEGERS])
def test_a_number_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    assert refused(name, value).code == "invalid_type"


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.5, 2.0, math.nan])
def test_a_count_is_an_integer(name: str, value: float) -> None:
    assert str(refused(name, value)) == f"{name} is {value}; it must be an integer"


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 101, -3, 10**400])
def test_a_number_out_of_range_is_refused_with_the_range(name: str, value: float) -> None:
    assert "and at most" in str(refused(name, value))


@pytest.mark.parametrize("name", INTEGERS)
def test_a_count_out_of_range_is_refused_with_the_range(name: str) -> None:
    high = {"seed": MAX_SEED, "logprobs": MAX_LOGPROBS, "prompt_logprobs": MAX_LOGPROBS}.get(name, MAX_INT32)
    for value in (-1, high + 1):
        assert str(refused(name, value)) == f"{name} is {value}; it must be at least 0 and at most {high}"


@pytest.mark.parametrize("name", [*REALS, "top_k", "min_tokens"])
def test_a_number_cannot_be_left_out_by_none(name: str) -> None:
    refused(name, None)


@pytest.mark.parametrize("value", [1, 0, "false", None])
def test_ignore_eos_is_true_or_false(value: object) -> None:
    assert str(refused("ignore_eos", value)) == f"ignore_eos is {value!r}; it must be true or false"


@pytest.mark.parametrize("value", [[3], {3}, 3, "3", None, ("3",), (3.0,), (True,), (None,), ((3,),)])
def test_stop_tokens_are_a_tuple_of_integers(value: object) -> None:
    assert "a tuple of token ids" in str(refused("stop_token_ids", value))


@pytest.mark.parametrize(
    "value",
    [
        {5: 1.0},
        [(5, 1.0)],
        None,
        "5",
        (5,),
        ("ab",),
        ([5, 1.0],),
        ((5,),),
        ((5, 1.0, 2),),
        (("5", 1.0),),
        ((5.0, 1.0),),
    ],
)
def test_biases_are_a_tuple_of_pairs(value: object) -> None:
    assert "pair" in str(refused("logit_bias", value))


@pytest.mark.parametrize("bias", ["1", None, True, math.nan, 101, -100.5])
def test_a_bias_is_a_number_within_its_range(bias: object) -> None:
    assert "must be" in str(refused("logit_bias", ((5, bias),)))


def test_more_biases_than_allowed_are_refused_with_their_number() -> None:
    many = tuple((token, 1.0) for token in range(MAX_LOGIT_BIAS + 1))
    assert str(refused("logit_bias", many)) == "logit_bias has 1025 entries; at most 1024 are allowed"
    assert SamplingParams(logit_bias=many[1:]).logit_bias == many[1:]


def test_whole_numbers_are_real_numbers_too() -> None:
    assert SamplingParams(temperature=0, top_p=1, logit_bias=((5, 2),)) == SamplingParams(
        temperature=0.0, top_p=1.0, logit_bias=((5, 2.0),)
    )


def test_min_tokens_are_at_most_max_tokens() -> None:
    with pytest.raises(RequestError, match=r"min_tokens is 3, more than max_tokens \(2\)"):
        SamplingParams(min_tokens=3, max_tokens=2)


@pytest.mark.parametrize("params", [SamplingParams(stop_token_ids=(9, 10)), SamplingParams(logit_bias=((10, 1.0),))])
def test_token_ids_are_within_the_vocabulary(params: SamplingParams) -> None:
    params.check_vocabulary(11)
    with pytest.raises(RequestError, match="the token id 10; the vocabulary is 0 to 9"):
        params.check_vocabulary(10)


def test_a_requests_biases_forbid_its_ends_until_min_tokens() -> None:
    params = SamplingParams(min_tokens=2, logit_bias=((8, 2.5),))
    request = Request(1, array("i", [1, 2, 3]), params, seed=0, stop_ids=frozenset({40, 4}))
    for position, is_early in ((0, True), (3, True), (4, True), (5, False)):
        ids, values = request.bias_at(position)
        assert list(zip(ids, values, strict=True)) == [(8, 2.5), *[(4, -math.inf), (40, -math.inf)] * is_early]


def test_a_request_that_replaces_another_has_the_biases_of_its_own_params() -> None:
    request = Request(1, array("i", [1]), SamplingParams(logit_bias=((8, 2.5),)), seed=0)
    other = replace(request, params=SamplingParams(logit_bias=((9, 1.0),)))
    assert list(other.bias_at(1).ids) == [9] and list(request.bias_at(1).ids) == [8]
