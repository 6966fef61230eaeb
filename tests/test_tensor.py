"""Formats: decoders against values worked out by hand and against the gguf package, encoders against error bounds."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from headrace.model.stored import map_file
from headrace.tensor import FORMATS, GROUP, Tensor, from_f32, round_bf16

GOLDEN = json.loads((Path(__file__).parent / "golden" / "formats.json").read_text("utf-8"))
BLOCK_FORMATS = ("q8_0", "q4_0", "q4_1")


def tensor_of(content: bytes, shape: tuple[int, ...], name: str) -> Tensor:
    return Tensor(np.frombuffer(content, dtype=np.uint8), shape, FORMATS[name])


def resident_file_bytes() -> int:
    """Of files on a disk or (tmpfs) in memory."""
    found = re.findall(r"Rss(?:File|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return sum(map(int, found)) * 1024


def f16(value: float) -> bytes:
    return struct.pack("<e", value)


def golden_values(text: str) -> npt.NDArray[np.float32]:
    return np.frombuffer(bytes.fromhex(text), dtype="<f4").reshape(GOLDEN["shape"])


def random_rows(seed: int = 0) -> npt.NDArray[np.float32]:
    """Rows of very different size, one of zeros, one of equal values, one with a single spike."""
    rows = np.random.default_rng(seed).standard_normal((8, 4 * GROUP)) * 10.0 ** np.arange(-3, 5)[:, None]
    rows[1], rows[2], rows[3] = 0, 0.75, 0
    rows[3, 17] = -5
    return rows.astype(np.float32)


# Decoders -------------------------------------------------------------------------------------------------------


def test_q8_0_is_a_half_scale_then_32_signed_bytes() -> None:
    quants = bytes([0x80, 0x7F, 0x00, 0xFF, *range(28)])
    expected = [-64.0, 63.5, 0.0, -0.5, *(0.5 * i for i in range(28))]
    assert tensor_of(f16(0.5) + quants, (32,), "q8_0").to_f32().tolist() == expected


def test_q4_0_holds_low_nibbles_first_and_is_centred_on_8() -> None:
    quants = bytes([0xF0, 0x18, *[0x88] * 14])
    expected = [-16.0, 0.0, *[0.0] * 14, 14.0, -14.0, *[0.0] * 14]
    assert tensor_of(f16(2.0) + quants, (32,), "q4_0").to_f32().tolist() == expected


def test_q4_1_adds_the_blocks_minimum() -> None:
    quants = bytes([0xF0, 0x21, *[0x00] * 14])
    expected = [-1.0, -0.75, *[-1.0] * 14, 2.75, -0.5, *[-1.0] * 14]
    assert tensor_of(f16(0.25) + f16(-1.0) + quants, (32,), "q4_1").to_f32().tolist() == expected


def test_bf16_is_the_upper_half_of_an_f32() -> None:
    assert tensor_of(bytes.fromhex("803f49c0807f"), (3,), "bf16").to_f32().tolist() == [1.0, -3.140625, np.inf]


@pytest.mark.parametrize("name", FORMATS)
def test_decoding_equals_the_gguf_packages(name: str) -> None:
    golden = GOLDEN["formats"][name]
    decoded = tensor_of(bytes.fromhex(golden["packed"]), tuple(GOLDEN["shape"]), name).to_f32()
    np.testing.assert_array_equal(decoded, golden_values(golden["unpacked"]))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_random_blocks_decode_as_in_the_gguf_package(name: str) -> None:
    golden = GOLDEN["formats"][name]
    decoded = tensor_of(bytes.fromhex(golden["random"]), tuple(GOLDEN["shape"]), name).to_f32()
    np.testing.assert_array_equal(decoded, golden_values(golden["random_unpacked"]))


def test_bytes_that_are_not_aligned_decode_alike() -> None:
    values = random_rows()
    for name, fmt in FORMATS.items():
        packed = from_f32(values, fmt)
        shifted = np.concatenate([np.zeros(1, np.uint8), packed.data])[1:]
        decoded = Tensor(shifted, values.shape, fmt).to_f32()
        assert decoded.flags.aligned, name
        np.testing.assert_array_equal(decoded, packed.to_f32())


# Encoders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_encoding_is_no_worse_than_the_gguf_packages(name: str) -> None:
    values = golden_values(GOLDEN["values"])
    ours = np.abs(from_f32(values, FORMATS[name]).to_f32() - values).max(axis=1)
    theirs = np.abs(golden_values(GOLDEN["formats"][name]["unpacked"]) - values).max(axis=1)
    assert (ours <= theirs * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_values_that_a_float_format_has_survive_exactly(name: str) -> None:
    once = from_f32(random_rows().clip(-60000, 60000), FORMATS[name]).to_f32()
    np.testing.assert_array_equal(from_f32(once, FORMATS[name]).to_f32(), once)


@pytest.mark.parametrize("seed", range(4))
def test_f16_and_bf16_round_to_half_a_unit_in_the_last_place(seed: int) -> None:
    values = random_rows(seed).clip(-60000, 60000)
    for name, bits, smallest in (("f16", 11, 2.0**-25), ("bf16", 8, 0.0)):
        error = np.abs(from_f32(values, FORMATS[name]).to_f32() - values)
        assert (error <= np.abs(values) * 2.0**-bits + smallest).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_block_format_errs_by_half_a_step_and_the_rounding_of_its_scale(seed: int) -> None:
    values = random_rows(seed)
    groups = values.reshape(-1, GROUP).astype(np.float64)
    largest, low, high = np.abs(groups).max(1), groups.min(1), groups.max(1)
    half = 2.0**-11  # relative rounding of an f16, and its smallest step
    tiny = 2.0**-24
    bounds = {
        "q8_0": largest / 127 * (0.5 + 127 * half) + 127 * tiny,
        # the side opposite the extreme ends at 7 of 8 steps, so it may be a whole step off
        "q4_0": largest / 8 * (1 + 8 * half) + 8 * tiny,
        "q4_1": (high - low) / 15 * (0.5 + 15 * half) + np.abs(low) * half + 16 * tiny,
    }
    for name, bound in bounds.items():
        error = np.abs(from_f32(values, FORMATS[name]).to_f32().reshape(-1, GROUP) - groups).max(1)
        assert (error <= bound * (1 + 1e-6)).all(), name


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_zeros_and_the_smallest_numbers_are_encoded_without_a_warning(name: str) -> None:
    values = np.zeros((2, GROUP), dtype=np.float32)
    values[1, 3] = 1e-45  # subnormal: its inverse is infinite
    assert np.abs(from_f32(values, FORMATS[name]).to_f32()).max() == 0


def test_rounding_to_bf16_is_to_even_and_keeps_what_is_not_a_number() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7FC00001, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    rounded = round_bf16(ties)
    assert rounded[:3].view(np.uint32).tolist() == [0x3F800000, 0x3F820000, 0x7F800000]
    assert np.isnan(rounded[3:]).all()


# Tensors --------------------------------------------------------------------------------------------------------


def test_a_tensor_refuses_bytes_that_do_not_fill_its_shape() -> None:
    with pytest.raises(ValueError, match="takes 68 bytes, not 34"):
        tensor_of(bytes(34), (2, 32), "q8_0")


def test_a_tensor_refuses_rows_that_are_not_whole_blocks() -> None:
    with pytest.raises(ValueError, match="whole blocks of 32; a row of 48"):
        tensor_of(bytes(51), (1, 48), "q8_0")


def test_a_shape_whose_product_passes_64_bits_is_no_way_around_the_check() -> None:
    with pytest.raises(ValueError, match="bytes, not 0"):
        tensor_of(b"", (1 << 40, 1 << 40), "f32")


def test_a_tensor_without_axes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one axis"):
        tensor_of(bytes(4), (), "f32")


@pytest.mark.parametrize("name", FORMATS)
def test_rows_move_whole_whatever_the_format(name: str) -> None:
    matrix = from_f32(random_rows(), FORMATS[name])
    order = np.array([7, 0, 3, 1, 2, 6, 5, 4])
    moved = matrix.rows(order)
    assert moved.stored is matrix.stored  # nothing is copied before it is asked for
    np.testing.assert_array_equal(moved.to_f32(), matrix.to_f32()[order])


def test_an_order_that_does_not_have_every_row_is_refused() -> None:
    with pytest.raises(ValueError, match="an order of 2 rows does not fit"):
        from_f32(random_rows(), FORMATS["f32"]).rows(np.array([1, 0]))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read")
def test_pages_of_a_map_are_given_back_and_the_bytes_stay_readable(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(1 << 20)
    (tmp_path / "file").write_bytes(content)
    mapped = map_file(tmp_path / "file")
    tensor = Tensor(mapped[4096 : 4096 + 64], (16,), FORMATS["f32"])
    assert mapped.tobytes() == content
    before = resident_file_bytes()
    tensor.release()
    assert resident_file_bytes() <= before - (1 << 19)
    assert mapped.tobytes() == content


def is_in_page_cache(file: int, offset: int) -> bool:
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def can_drop_files(folder: Path) -> bool:
    """False where files live in memory (tmpfs), or where nobody can ask whether they do."""
    with (folder / "probe").open("wb+") as file:
        file.write(bytes(8 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            return not is_in_page_cache(file.fileno(), 4 << 20)
        except OSError:
            return False


def test_of_a_file_that_fills_the_machines_memory_the_packed_part_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_drop_files(tmp_path):
        pytest.skip("files of this folder do not leave memory")
    content, middle = random.Random(0).randbytes(8 << 20), 4 << 20
    with (tmp_path / "file").open("wb+") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # what is not on the disk yet cannot be dropped
        mapped = map_file(tmp_path / "file")
        tensor = Tensor(mapped[100:middle], ((middle - 100) // 4,), FORMATS["f32"])
        assert mapped.tobytes() == content
        tensor.release()
        assert is_in_page_cache(file.fileno(), middle // 2)
        assert mapped.tobytes() == content
        monkeypatch.setattr("headrace.tensor._machine_bytes", lambda: 16 << 20)
        tensor.release()
        assert not is_in_page_cache(file.fileno(), middle // 2)
        assert is_in_page_cache(file.fileno(), 2 * middle - 4096)
        assert mapped.tobytes() == content


def test_samples_are_spread_over_the_bytes_and_read_little_else_of_a_file(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(8 << 20)
    with (tmp_path / "file").open("wb+") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        tensor = Tensor(map_file(tmp_path / "file")[64:], ((len(content) - 64) // 4,), FORMATS["f32"])
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pieces = tensor.samples(4, 4096)
        assert [content.find(piece) for piece in pieces] == [64 + i * (2 << 20) - 16 * i for i in range(4)]
        if can_drop_files(tmp_path):
            assert not is_in_page_cache(file.fileno(), 1 << 20)


def test_bytes_that_are_on_no_map_are_left_alone() -> None:
    tensor = from_f32(np.arange(4096, dtype=np.float32), FORMATS["f32"])
    tensor.release()
    assert tensor.to_f32().tolist() == list(range(4096))
