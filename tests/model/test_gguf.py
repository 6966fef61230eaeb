"""The GGUF reader: what it reads, and that every damage is named and costs nothing."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_writer import Raw, gguf_bytes, string
from headrace.model.gguf import GGML_TYPES, MAX_ALIGNMENT, MAX_ARRAY_LENGTH, MAX_KEYS, MAX_TENSORS, GgufFile, read_gguf
from headrace.tensor import FORMATS, from_f32
from headrace.types import ModelError

Read = Callable[[bytes], GgufFile]

MATRIX = from_f32(np.arange(128, dtype=np.float32).reshape(2, 64), FORMATS["q8_0"])
ROW = from_f32(np.arange(3, dtype=np.float32), FORMATS["f32"])
TENSORS = {"matrix": MATRIX, "row": ROW}
METADATA: dict[str, object] = {"name": "tiny", "size": 7, "words": ["a", "é"], "flags": Raw(7, b"\x01"), "ids": [1, -2]}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_bytes(content: bytes) -> GgufFile:
        path = tmp_path / "model.gguf"
        path.unlink(missing_ok=True)  # not overwritten: an earlier map may still be alive
        path.write_bytes(content)
        return read_gguf(path)

    return read_bytes


def head(num_tensors: int, num_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def entry(dims: tuple[int, ...], kind: int = 0, offset: int = 0, name: str = "t") -> bytes:
    """One row of the tensor directory."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def key(kind: int, content: bytes, name: str = "k") -> bytes:
    return string(name) + struct.pack("<I", kind) + content


# What is read ---------------------------------------------------------------------------------------------------


def test_every_type_of_value_comes_back(read: Read) -> None:
    numbers: dict[str, tuple[int, str, float]] = {
        "u8": (0, "<B", 255),
        "i8": (1, "<b", -1),
        "u16": (2, "<H", 65535),
        "i16": (3, "<h", -2),
        "u32": (4, "<I", 2**32 - 1),
        "i32": (5, "<i", -3),
        "f32": (6, "<f", 0.5),
        "u64": (10, "<Q", 2**64 - 1),
        "i64": (11, "<q", -4),
        "f64": (12, "<d", 0.1),
    }
    metadata: dict[str, object] = {n: Raw(kind, struct.pack(fmt, v)) for n, (kind, fmt, v) in numbers.items()}
    metadata |= {f"{n}s": Raw(9, struct.pack("<IQ", k, 2) + struct.pack(f, v) * 2) for n, (k, f, v) in numbers.items()}
    metadata |= {
        "text": "naïve",
        "yes": True,
        "words": ["", "a", "語"],
        "bits": Raw(9, struct.pack("<IQ2B", 7, 2, 0, 1)),
    }
    found = read(gguf_bytes(metadata, {})).metadata
    for name, (_, _, number) in numbers.items():
        assert found[name] == number
        assert type(found[name]) is type(number)
        assert np.asarray(found[f"{name}s"]).tolist() == [number, number]
    assert found["text"] == "naïve"
    assert found["yes"] is True
    assert found["words"] == ("", "a", "語")
    assert np.asarray(found["bits"]).tolist() == [False, True]


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_are_views_of_the_map_with_the_contiguous_axis_last(read: Read, version: int) -> None:
    file = read(gguf_bytes(METADATA, TENSORS, version=version))
    matrix = file.tensors["matrix"].tensor()
    assert (matrix.shape, matrix.format.name) == ((2, 64), "q8_0")
    assert not matrix.data.flags.owndata
    assert not matrix.data.flags.writeable
    np.testing.assert_array_equal(matrix.to_f32(), MATRIX.to_f32())
    np.testing.assert_array_equal(file.tensors["row"].tensor().to_f32(), [0, 1, 2])


def test_another_alignment_is_honoured(read: Read) -> None:
    file = read(gguf_bytes({"general.alignment": 128}, TENSORS, alignment=128))
    np.testing.assert_array_equal(file.tensors["row"].tensor().to_f32(), [0, 1, 2])


def test_sizes_of_all_types_are_those_of_ggml() -> None:
    """Blocks of 32 and 256 values: the sizes are sums of their fields, worked out from ggml-common.h's structs."""
    sizes = {kind.name: (kind.block_values, kind.block_bytes) for kind in GGML_TYPES.values()}
    for name, fmt in FORMATS.items():
        assert sizes[name] == (fmt.block_values, fmt.block_bytes)
    assert sizes["q4_k"] == (256, 2 + 2 + 12 + 128)  # d, dmin, scales, quants
    assert sizes["q6_k"] == (256, 128 + 64 + 16 + 2)  # low bits, high bits, scales, d
    assert sizes["mxfp4"] == (32, 1 + 16)  # e, quants


def test_a_type_that_cannot_be_decoded_is_refused_only_when_it_is_used(read: Read) -> None:
    content = head(1, 0, entry((256,), kind=12))
    file = read(content + bytes(-len(content) % 32) + bytes(144))
    with pytest.raises(
        ModelError, match="tensor 't' is stored as q4_k; supported are f32, f16, bf16, q8_0, q4_0, q4_1"
    ):
        file.tensors["t"].tensor()


def test_the_default_models_header_is_read_whole(smollm2_path: Path) -> None:
    file = read_gguf(smollm2_path)
    words, merges = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.merges"]
    assert isinstance(words, tuple)
    assert isinstance(merges, tuple)
    assert (len(words), words[17]) == (49152, "!")
    assert (len(merges), merges[0]) == (48900, "Ġ t")
    assert len(file.tensors) == 272
    assert sum(tensor.data.size for tensor in file.tensors.values()) == 96_576_768


# What is refused ------------------------------------------------------------------------------------------------

ARRAY = 9
HUGE = 2**63
REFUSED: dict[str, tuple[bytes, str]] = {
    "another magic number": (b"GGJT" + bytes(60), "is not a GGUF file"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(60), "GGUF version 1; supported are 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
    "too many keys": (head(0, MAX_KEYS + 1), f"key count is {MAX_KEYS + 1}"),
    "too many tensors": (head(MAX_TENSORS + 1, 0), f"tensor count is {MAX_TENSORS + 1}"),
    "counts of 64 bits": (head(2**64 - 1, 2**64 - 1), "tensor count is 18446744073709551615"),
    "a key longer than allowed": (head(0, 1, struct.pack("<Q", HUGE)), "the length of the name of key 0"),
    "a key longer than the file": (head(0, 1, struct.pack("<Q", 1000)), "needs 1000 bytes"),
    "a key that is not UTF-8": (head(0, 1, string(b"\xff\xfe")), "key 0 is not UTF-8"),
    "a key twice": (head(0, 2, key(7, b"\0") * 2), "the key 'k' is there twice"),
    "an unknown type": (head(0, 1, key(13, bytes(8))), "key 'k' has the unknown type 13"),
    "a boolean of 2": (head(0, 1, key(7, b"\2")), "a boolean with the value 2"),
    "a string longer than allowed": (head(0, 1, key(8, struct.pack("<Q", HUGE))), "the length of key 'k'"),
    "a string that is not UTF-8": (head(0, 1, key(8, string(b"a\x80"))), "key 'k' is not UTF-8"),
    "an array longer than allowed": (head(0, 1, key(ARRAY, struct.pack("<IQ", 0, MAX_ARRAY_LENGTH + 1))), "at most"),
    "an array longer than the file": (head(0, 1, key(ARRAY, struct.pack("<IQ", 10, 1000))), "needs 8000 bytes"),
    "more strings than the file holds": (head(0, 1, key(ARRAY, struct.pack("<IQ", 8, 1000))), "has 1000 strings"),
    "an array of arrays": (head(0, 1, key(ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))), "array of arrays"),
    "an array of an unknown type": (head(0, 1, key(ARRAY, struct.pack("<IQ", 99, 1) + bytes(64))), "unknown type 99"),
    "a word longer than the file": (
        head(0, 1, key(ARRAY, struct.pack("<IQQ", 8, 1, HUGE) + bytes(8))),
        f"entry 0 of key 'k' has {HUGE} bytes",
    ),
    "a word cut off": (head(0, 1, key(ARRAY, struct.pack("<IQ", 8, 2) + string("abcdefgh"))), "ends at entry 1"),
    "a word that is not UTF-8": (head(0, 1, key(ARRAY, struct.pack("<IQ", 8, 1) + string(b"\xc3"))), "entry 0 of key"),
    "no dimensions": (head(1, 0, entry(())), "has 0 dimensions"),
    "five dimensions": (head(1, 0, entry((1, 1, 1, 1, 1))), "has 5 dimensions; 1 to 4"),
    "a dimension of 0": (head(1, 0, entry((4, 0))), "a dimension of 0"),
    "a huge dimension": (head(1, 0, entry((HUGE,))), "a dimension of tensor 't' is"),
    "a product past 64 bits": (head(1, 0, entry((1 << 40, 1 << 40))) + bytes(64), f"takes {4 << 80} bytes"),
    "a tensor of an unknown type": (head(1, 0, entry((1,), kind=4)), "tensor 't' has the unknown type 4"),
    "half a block": (head(1, 0, entry((48,), kind=8)), "rows of 48 values, not whole q8_0 blocks of 32"),
    "a tensor twice": (head(2, 0, entry((1,)) * 2), "the tensor 't' is there twice"),
    "an offset that is not aligned": (head(1, 0, entry((1,), offset=4)) + bytes(99), "offset 4, not a multiple"),
    "an offset past the end": (head(1, 0, entry((1,), offset=1 << 20)) + bytes(99), "at offset 1048576"),
    "an offset that wraps around": (head(1, 0, entry((8,), offset=2**64 - 32)) + bytes(99), "at offset 1844674407"),
    "more bytes than are left": (head(1, 0, entry((99,))) + bytes(99), "takes 396 bytes at offset 0"),
    "tensors that overlap": (
        head(2, 0, entry((16,), offset=0, name="a") + entry((1,), offset=32, name="b")) + bytes(199),
        "tensor 'b' has the offset 32, inside tensor 'a'",
    ),
    **{
        f"an alignment of {alignment!r}": (
            gguf_bytes({"general.alignment": alignment}, TENSORS),
            "general.alignment is",
        )
        for alignment in (0, 4, 48, MAX_ALIGNMENT * 2, True, "32")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_damage_is_refused_by_name_before_anything_is_allocated(read: Read, name: str) -> None:
    content, expected = REFUSED[name]
    tracemalloc.start()
    with pytest.raises(ModelError) as refusal:
        read(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert expected in str(refusal.value)
    assert "model.gguf" in str(refusal.value)
    assert peak < 1 << 20


def test_a_file_cut_anywhere_is_refused(read: Read) -> None:
    content = gguf_bytes(METADATA, TENSORS)
    used = len(content) - 32 + ROW.nbytes  # the padding after the last tensor may go
    for length in range(used):
        with pytest.raises(ModelError):
            read(content[:length])
    read(content[:used])


def test_a_file_with_any_byte_changed_is_read_or_refused(read: Read) -> None:
    content = gguf_bytes(METADATA, TENSORS)
    num_refused = 0
    for at in range(len(content)):
        for byte in (0, 1, 0x7F, 0x80, 0xFF):
            try:
                read(content[:at] + bytes([byte]) + content[at + 1 :])
            except ModelError:
                num_refused += 1
    assert num_refused > len(content)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_mutation_of_a_file_raises_anything_but_a_model_error(read: Read, data: st.DataObject) -> None:
    content = bytearray(gguf_bytes(METADATA, TENSORS))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        num_removed = data.draw(st.integers(0, 16))
        content[at : at + num_removed] = data.draw(st.binary(max_size=24))
    try:
        file = read(bytes(content))
    except ModelError:
        return
    assert all(tensor.data.size <= len(content) for tensor in file.tensors.values())


@pytest.mark.parametrize("content", [b"", b"G", b"GGUF"])
def test_a_file_shorter_than_its_header_is_refused(read: Read, content: bytes) -> None:
    with pytest.raises(ModelError):
        read(content)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelError, match="cannot be read"):
            read_gguf(path)
