"""What a vocabulary must hold, from GGUF and from tokenizer.json, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from headrace.model.files import GgufVocabulary, TokenizerFile
from headrace.text.chat import ChatTemplate, encode_chat, render_chat
from headrace.text.tokenizer import Tokenizer
from headrace.text.vocabulary import MAX_TOKENS
from headrace.types import ModelError
from tiny import MERGES, TOKENS

TEXTS = ("Hello world", " the in 's 123  x\n", "<|im_start|>user\nhi<|im_end|>", "é🙂\x00", "")


def tokenizer_file(path: Path, **fields: Any) -> TokenizerFile:
    values: dict[str, Any] = {
        "path": path,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": None,
        "pad_token": None,
        "add_bos": None,
        "add_eos": None,
    }
    return TokenizerFile(**{**values, **fields})


def byte_level() -> tokenizers.Tokenizer:
    """The tiny vocabulary as a tokenizer.json has it: special tokens apart, and one added token that is not special."""
    vocab = {token: index for index, token in enumerate(TOKENS)}
    built = tokenizers.Tokenizer(models.BPE(vocab, [(a, b) for a, b in (merge.split(" ") for merge in MERGES)]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in TOKENS[:3]])
    built.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return built


def saved(built: tokenizers.Tokenizer, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    built.save(str(path))
    return path


def sentence_piece() -> tokenizers.Tokenizer:
    """A vocabulary of Llama 2's kind: ▁ for spaces, <0xNN> for bytes that no token has."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlorw", "▁h", "lo"]
    vocab = {token: index for index, token in enumerate(letters)}
    built = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "h"), ("l", "o")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in letters[:3]])
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return built


def test_tokenizer_json_gives_the_same_ids_as_the_same_vocabulary_in_gguf(
    tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    tokenizer = Tokenizer.load(tokenizer_file(saved(byte_level(), tmp_path)))
    for text in TEXTS:
        for parse_special in (True, False):
            expected = tiny_tokenizer.encode(text, parse_special=parse_special)
            assert tokenizer.encode(text, parse_special=parse_special) == expected
    assert tokenizer.token_bytes[: len(TOKENS)] == tiny_tokenizer.token_bytes
    assert tokenizer.special_ids == tiny_tokenizer.special_ids
    assert tokenizer.named_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_an_added_token_that_is_not_special_is_a_token_in_every_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_file(saved(byte_level(), tmp_path)))
    index = len(TOKENS)
    assert tokenizer.token_bytes[index] == b"<think>"
    assert index in tokenizer.encode("a<think>b", parse_special=False)
    assert index not in tokenizer.special_ids


def test_the_post_processor_decides_about_the_bos_unless_the_config_does(tmp_path: Path) -> None:
    built = byte_level()
    built.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    path = saved(built, tmp_path)
    bare = Tokenizer.load(tokenizer_file(path)).encode("a", add_special=False)
    assert Tokenizer.load(tokenizer_file(path)).encode("a") == [1, *bare, 2]
    assert Tokenizer.load(tokenizer_file(path, add_bos=False)).encode("a") == [*bare, 2]
    assert Tokenizer.load(tokenizer_file(path, add_eos=False)).encode("a") == [1, *bare]


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path: Path) -> None:
    built = byte_level()
    built.enable_truncation(4)
    built.enable_padding(length=16)
    tokenizer = Tokenizer.load(tokenizer_file(saved(built, tmp_path)))
    assert tokenizer.decode(tokenizer.encode("xyzxyzxyz")) == "xyzxyzxyz"
    assert len(tokenizer.encode("x")) == 1


def test_a_sentence_piece_vocabulary_has_spaces_and_bytes(tmp_path: Path) -> None:
    built = sentence_piece()
    path = saved(built, tmp_path)
    tokenizer = Tokenizer.load(tokenizer_file(path, bos_token="<s>", eos_token="</s>", unk_token="<unk>"))
    assert tokenizer.add_bos
    for text in ("hello world", "é🙂", "  a", "a<s>b"):
        ids = tokenizer.encode(text)
        assert ids == built.encode(text).ids
        assert tokenizer.decode(ids, skip_special=True) == built.decode(ids)
    assert tokenizer.token_bytes[tokenizer.encode("é", add_special=False)[-1]] == "é".encode()[-1:]
    assert tokenizer.token_bytes[built.token_to_id("▁h")] == b" h"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_chat_with_a_sentence_piece_vocabulary_has_the_ids_of_its_whole_text(tmp_path: Path, scheme: str) -> None:
    built = sentence_piece()
    built.normalizer = None
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer = Tokenizer.load(
        tokenizer_file(saved(built, tmp_path), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    )
    template = ChatTemplate("h{{ bos_token }}{% for m in messages %}hello {{ m.content }}{{ eos_token }}{% endfor %}")
    messages = [{"role": "user", "content": "world"}, {"role": "user", "content": " h"}]
    text = render_chat(tokenizer, template, messages)
    assert encode_chat(tokenizer, template, messages) == built.encode(text, add_special_tokens=False).ids


@settings(max_examples=60)
@given(
    places=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.none() | st.integers(0, 2**16),
)
def test_a_corrupted_tokenizer_json_gives_a_model_error_or_a_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int]], cut: int | None
) -> None:
    path = tmp_path_factory.mktemp("corrupted") / "tokenizer.json"
    content = bytearray(sentence_piece().to_str().encode())
    for place, byte in places:
        content[place % len(content)] = byte
    path.write_bytes(bytes(content[: None if cut is None else cut % len(content)]))
    try:
        tokenizer = Tokenizer.load(tokenizer_file(path, bos_token=None, eos_token=None))
    except ModelError as error:
        assert "tokenizer.json" in str(error)
    else:
        tokenizer.decode(tokenizer.encode("hello é<s>"))


def test_a_named_token_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"eos_token is '<nope>', which is not in the vocabulary"):
        Tokenizer.load(tokenizer_file(saved(byte_level(), tmp_path), eos_token="<nope>"))


def test_a_kind_of_model_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    built = tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("b", -1.0)], 0, False))
    built.decoder = decoders.ByteLevel()
    with pytest.raises(ModelError, match="the model is Unigram; only BPE is supported"):
        Tokenizer.load(tokenizer_file(saved(built, tmp_path), bos_token=None, eos_token=None))


def test_a_decoder_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    built = byte_level()
    built.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.load(tokenizer_file(saved(built, tmp_path)))
    built = byte_level()
    built.decoder = None
    with pytest.raises(ModelError, match="missing"):
        Tokenizer.load(tokenizer_file(saved(built, tmp_path)))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": "1.0"}',
        '{"model": {"type": "BPE", "vocab": [], "merges": 3}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_tokenizer_json_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tokenizer_file(path))


def test_a_missing_tokenizer_json_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: No such file"):
        Tokenizer.load(tokenizer_file(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("index", [MAX_TOKENS, 4_000_000_000])
def test_an_id_that_would_need_a_huge_table_is_refused(tmp_path: Path, index: int) -> None:
    path = saved(byte_level(), tmp_path)
    document = json.loads(path.read_text())
    document["model"]["vocab"]["a hole before it"] = index
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=rf"tokenizer\.json: a token has the id {index:,}; ids must be less than"):
        Tokenizer.load(tokenizer_file(path))


def test_a_post_processor_that_makes_the_library_panic_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = saved(byte_level(), tmp_path)
    document = json.loads(path.read_text())
    single = [{"SpecialToken": {"id": "<nope>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    document["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tokenizer_file(path))


def test_a_post_processor_that_adds_an_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    built = byte_level()
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 123_456)])
    with pytest.raises(ModelError, match="adds the id 123,456; the largest is"):
        Tokenizer.load(tokenizer_file(saved(built, tmp_path)))


def test_an_interrupt_while_a_vocabulary_is_read_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(content: bytes) -> None:
        raise KeyboardInterrupt

    path = saved(byte_level(), tmp_path)
    monkeypatch.setattr("headrace.text.vocabulary.tokenizers.Tokenizer", SimpleNamespace(from_buffer=interrupted))
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.load(tokenizer_file(path))


def test_an_added_token_with_an_id_out_of_order_gets_the_next_one_as_in_transformers(tmp_path: Path) -> None:
    path = saved(byte_level(), tmp_path)
    document = json.loads(path.read_text())
    document["added_tokens"][-1]["id"] = 10_000
    path.write_text(json.dumps(document))
    tokenizer = Tokenizer.load(tokenizer_file(path))  # the library gives its own id, and both of ours agree on it
    assert tokenizer.encode("<think>") == tokenizer.encode("<think>", parse_special=False) == [len(TOKENS)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "llama"}, r'tokenizer\.ggml\.model is "llama"; only "gpt2"'),
        ({"pre": "default"}, r'tokenizer\.ggml\.pre is "default"; supported are gpt-2, llama-bpe'),
        ({"types": (1,)}, "304 tokens but 1 token types"),
        ({"merges": ("a b c",)}, r"tokenizer\.ggml\.merges\[0\] is 'a b c'"),
        ({"merges": ("a b", "ab")}, r"tokenizer\.ggml\.merges\[1\] is 'ab'"),
        ({"merges": ("q q",)}, r"tokenizer\.ggml\.merges: "),
        ({"bos_id": 304}, r"tokenizer\.ggml\.bos_token_id is 304; the vocabulary has 304 tokens"),
        ({"eos_id": -1}, r"tokenizer\.ggml\.eos_token_id is -1"),
        ({"bos_id": None, "add_bos": True}, "its bos token around every text but names none"),
    ],
)
def test_a_gguf_vocabulary_that_cannot_be_used_is_refused_by_its_field(
    tiny_vocabulary: GgufVocabulary, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(dataclasses.replace(tiny_vocabulary, **fields))


def test_user_defined_tokens_are_tokens_but_not_special(tiny_vocabulary: GgufVocabulary) -> None:
    tokens = (*tiny_vocabulary.tokens, "<box> é")
    types = (*tiny_vocabulary.types, 4)
    tokenizer = Tokenizer.load(dataclasses.replace(tiny_vocabulary, tokens=tokens, types=types))
    index = len(tokens) - 1
    assert tokenizer.encode("<box> é", parse_special=False) == [index]
    assert tokenizer.token_bytes[index] == "<box> é".encode()
    assert index not in tokenizer.special_ids


def test_a_llama_3_vocabulary_has_a_bos_where_the_file_does_not_say(tiny_vocabulary: GgufVocabulary) -> None:
    assert Tokenizer.load(dataclasses.replace(tiny_vocabulary, pre="llama-bpe")).add_bos
    assert not Tokenizer.load(dataclasses.replace(tiny_vocabulary, pre="llama-bpe", add_bos=False)).add_bos
    assert not Tokenizer.load(tiny_vocabulary).add_bos


def test_tokens_outside_the_byte_alphabet_stand_for_their_own_text(tiny_vocabulary: GgufVocabulary) -> None:
    vocabulary = dataclasses.replace(
        tiny_vocabulary, tokens=(*tiny_vocabulary.tokens, "日本"), types=(*tiny_vocabulary.types, 5)
    )
    assert Tokenizer.load(vocabulary).token_bytes[-1] == "日本".encode()
