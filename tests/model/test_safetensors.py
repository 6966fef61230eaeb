"""The safetensors reader: single files, shards, and what hostile headers and indexes try."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.model.safetensors import INDEX, MAX_HEADER_BYTES, SINGLE, inside, read_directory, read_file
from headrace.tensor import FORMATS, from_f32
from headrace.types import ModelError
from tiny import write_safetensors

Write = Callable[[bytes], Path]

TENSORS = {
    "a": from_f32(np.arange(6, dtype=np.float32).reshape(2, 3), FORMATS["bf16"]),
    "b": from_f32(np.arange(5, dtype=np.float32), FORMATS["f32"]),
    "c": from_f32(np.arange(4, dtype=np.float32).reshape(4, 1), FORMATS["f16"]),
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_bytes(content: bytes) -> Path:
        path = tmp_path / "file.safetensors"
        path.unlink(missing_ok=True)  # not overwritten: an earlier map may still be alive
        path.write_bytes(content)
        return path

    return write_bytes


def file_bytes(header: Any, content: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + content


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_tensors_are_views_of_the_map(tmp_path: Path) -> None:
    stored = read_file(write_safetensors(tmp_path / "x.safetensors", TENSORS))
    assert list(stored) == list(TENSORS)
    for name, expected in TENSORS.items():
        tensor = stored[name].tensor()
        assert not tensor.data.flags.owndata
        assert tensor.format is expected.format
        np.testing.assert_array_equal(tensor.to_f32(), expected.to_f32())


def test_metadata_in_the_header_is_no_tensor(write: Write) -> None:
    assert list(read_file(write(file_bytes({"__metadata__": {"format": "pt"}, "t": entry()}, bytes(4))))) == ["t"]


def test_a_type_that_cannot_be_used_is_refused_when_it_is(write: Write) -> None:
    stored = read_file(write(file_bytes({"t": entry("F8_E4M3", [4])}, bytes(4))))
    with pytest.raises(ModelError, match="tensor 't' is stored as f8_e4m3; supported are"):
        stored["t"].tensor()


REFUSED: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "cannot be read"),
    "no header length": (b"1234567", "has 7 bytes"),
    "a header longer than the file": (file_bytes({})[:8] + b"{", "the header length is 2"),
    "a header longer than allowed": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + bytes(64), "the header length is"),
    "a header of 64 bits": (b"\xff" * 8 + bytes(8), "the header length is 18446744073709551615"),
    "a header that is not JSON": (file_bytes(b"{a}"), "is not valid JSON"),
    "a header that is not UTF-8": (file_bytes(b'{"\xff": 1}'), "is not valid JSON"),
    "a header that is a list": (file_bytes([]), "must hold a JSON object"),
    "a header nested too deep": (file_bytes(b"[" * 200_000), "nested too deep"),
    "a header with NaN": (file_bytes(b'{"t": NaN}'), "NaN is not JSON"),
    "a header with a number of 5,000 digits": (file_bytes(b'{"t": ' + b"9" * 5000 + b"}"), "is not valid JSON"),
    "a tensor twice": (file_bytes(b'{"t": 1, "t": 2}'), "the key 't' is there twice"),
    "an entry that is no object": (file_bytes({"t": 1}), "its entry must have dtype, shape and data_offsets"),
    "an entry with a surplus field": (file_bytes({"t": entry(strides=[1])}, bytes(4)), "its entry must have"),
    "an unknown dtype": (file_bytes({"t": entry("F31")}, bytes(4)), "the unknown dtype 'F31'"),
    "a dtype that is a list": (file_bytes({"t": entry([])}, bytes(4)), "the unknown dtype list of 0"),
    "a negative size": (file_bytes({"t": entry(shape=[-1])}, bytes(4)), "its shape must be"),
    "a size that is true": (file_bytes({"t": entry(shape=[True])}, bytes(4)), "its shape must be"),
    "a shape of 9 axes": (file_bytes({"t": entry(shape=[1] * 9)}, bytes(4)), "its shape must be"),
    "a product past 64 bits": (file_bytes({"t": entry(shape=[1 << 40] * 2)}, bytes(4)), f"takes {4 << 80} bytes"),
    "offsets past the end": (file_bytes({"t": entry(shape=[2], offsets=[0, 8])}, bytes(4)), "within 4 bytes"),
    "offsets in the wrong order": (file_bytes({"t": entry(shape=[0], offsets=[4, 0])}, bytes(4)), "a begin and an end"),
    "three offsets": (file_bytes({"t": entry(offsets=[0, 4, 4])}, bytes(4)), "a begin and an end"),
    "offsets that do not match the shape": (file_bytes({"t": entry(offsets=[0, 2])}, bytes(4)), "takes 4 bytes"),
    "tensors that overlap": (
        file_bytes({"t": entry(), "u": entry("F16", [2], [2, 6])}, bytes(6)),
        "tensor 'u' begins at 2; the one before it ends at 4",
    ),
    "a hole": (file_bytes({"t": entry(), "u": entry(offsets=[8, 12])}, bytes(12)), "tensor 'u' begins at 8"),
    "bytes after the last tensor": (file_bytes({"t": entry()}, bytes(5)), "end after 4 bytes, but there are 5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damage_is_refused_by_name(write: Write, name: str) -> None:
    content, expected = REFUSED[name]
    with pytest.raises(ModelError) as refusal:
        read_file(write(content))
    assert expected in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_a_file_cut_anywhere_is_refused(write: Write, tmp_path: Path) -> None:
    content = write_safetensors(tmp_path / "whole", TENSORS).read_bytes()
    for length in range(len(content)):
        with pytest.raises(ModelError):
            read_file(write(content[:length]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_mutation_of_a_file_raises_anything_but_a_model_error(write: Write, tmp_path: Path, data: Any) -> None:
    content = bytearray(write_safetensors(tmp_path / "whole", TENSORS).read_bytes())
    at = data.draw(st.integers(0, len(content)))
    content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=16))
    try:
        stored = read_file(write(bytes(content)))
    except ModelError:
        return
    assert sum(tensor.data.size for tensor in stored.values()) <= len(content)


# Directories ----------------------------------------------------------------------------------------------------


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "1.safetensors", {name: TENSORS[name] for name in "ac"})
    write_safetensors(tmp_path / "2.safetensors", {"b": TENSORS["b"]})
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"})
    stored = read_directory(tmp_path)
    assert list(stored) == ["a", "b", "c"]
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(stored[name].tensor().to_f32(), expected.to_f32())


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "", ".", "..", "a\0b", "\ud800"]
)
def test_a_shard_outside_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, {"a": name})
    with pytest.raises(ModelError, match="must be a plain name inside the directory"):
        read_directory(tmp_path)


def test_a_link_that_leads_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    write_safetensors(tmp_path / "secret.safetensors", TENSORS)
    for name in (SINGLE, "shard.safetensors"):
        (directory / name).symlink_to(tmp_path / "secret.safetensors")
        with pytest.raises(ModelError, match="a link that leads out of the directory"):
            inside(directory, name)
    with pytest.raises(ModelError, match="leads out"):
        read_directory(directory)


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to("b.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    write_index(tmp_path, {"a": "a.safetensors"})
    with pytest.raises(ModelError, match="cannot be"):
        read_directory(tmp_path)


def test_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--o--n" / "snapshots" / "c0ffee"
    blobs = tmp_path / "models--o--n" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_safetensors(blobs / "0123", TENSORS)
    (snapshot / SINGLE).symlink_to(Path("../../blobs/0123"))
    assert list(read_directory(snapshot)) == list(TENSORS)


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        (None, "weight_map must be an object"),
        ({"a": 1}, "weight_map must be an object"),
        ({"a": "1.safetensors", "z": "1.safetensors"}, "tensor 'z' is not in 1.safetensors"),
        ({"a": "1.safetensors"}, "does not list tensor 'b' of 1.safetensors"),
        ({"a": "absent.safetensors"}, "absent.safetensors: cannot be read"),
    ],
)
def test_an_index_that_contradicts_its_shards_is_refused(tmp_path: Path, weight_map: Any, expected: str) -> None:
    write_safetensors(tmp_path / "1.safetensors", {name: TENSORS[name] for name in "ab"})
    write_index(tmp_path, weight_map)
    with pytest.raises(ModelError) as refusal:
        read_directory(tmp_path)
    assert expected in str(refusal.value)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_directory(tmp_path)
