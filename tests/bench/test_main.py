"""The command lines of the comparison and of the growth tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import growth, records
from bench.__main__ import main
from bench.engines import headrace
from bench.verdicts import Record


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


def test_tables_tell_what_the_machine_gave_over_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, engine = tmp_path / "run.jsonl", headrace("smollm2-135m", "q4_1", "m.gguf")
    for number, (bandwidth, line) in enumerate([(3.1e10, 2.7e-8), (5.5e10, 1.7e-7), (3.3e10, 2.9e-8)]):
        records.append(file, Record(number, engine, "conc1", {}, bandwidth, line, "it fell silent"))
    main(["--from", str(file)])
    told = capsys.readouterr().out
    assert "Read bandwidth, GB/s: median 33.0, from 31.0 to 55.0 over the run." in told
    assert "A cache line's way from one core to another, ns: median 29.0, from 27.0 to 170.0 over the run." in told
