"""The command lines of the comparison and of the growth tables."""

from __future__ import annotations

import pytest

from bench import growth
from bench.__main__ import main


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--passes", "0"], "'0' is not a whole number of at least 1"),
        (["--threads", "-1"], "'-1' is not a whole number of at least 1"),
        (["--from", "missing.jsonl"], "there is no file missing.jsonl"),
    ],
)
def test_flags_that_cannot_be_are_refused_by_what_they_say(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--threads", "--repeats"])
def test_growth_refuses_numbers_that_cannot_be(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        growth.main([flag, "0"])
    assert ended.value.code == 2
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast"])
def test_growth_refuses_a_peak_that_cannot_be(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        growth.main(["--peak-ops", text])
    assert ended.value.code == 2
    assert f"'{text}' is not a number above 0" in capsys.readouterr().err
