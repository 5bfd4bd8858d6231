"""Text and ids: streams equal the whole decode, whatever ids split, at a cost per id that does not grow."""

import random
import sys
from itertools import groupby

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tilekern.errors import ExtraMissing, InputError
from tilekern.inference.text import Tokenizer

TEXT = "Gr\u00fc\u00dfe an \u4f60\u597d und \U0001f469\u200d\U0001f469\u200d\U0001f467  ;  the end of the\n\n\tend "
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def byte_level():
    """A byte-level BPE as GPT-2's and Qwen3's: few merges, so that most characters beyond ASCII are several ids."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the end of the end", "\u4f60\u597d"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return tokenizer


def with_fallback():
    """A BPE as Llama 2's: words with a space before, and bytes of what is not in the vocabulary."""
    words = ["\u2581", "t", "h", "e", "n", "d", "\u2581t", "\u2581th", "\u2581the", "en", "end", "\u2581end"]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("e", "n"), ("en", "d"), ("\u2581", "end")]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


KINDS = {"byte level": byte_level, "byte fallback": with_fallback}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]()


def saved(folder, tokenizer):
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def parts_of(stream, ids):
    return [*(stream.add(token) for token in ids), stream.rest()]


def test_characters_come_when_they_are_complete_and_spaces_stay(kind, tmp_path):
    read = saved(tmp_path, kind)
    ids = read.encode(TEXT)
    *parts, rest = parts_of(read.stream(), ids)
    assert "".join(parts) == kind.decode(ids) == TEXT
    assert rest == ""
    assert not any(UNKNOWN in part for part in parts)
    assert parts.count("") > 10
    # Each character comes with its last byte.
    assert max(len(list(some)) for part, some in groupby(parts) if not part) == 3


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_the_whole_decode_too(seed, tmp_path):
    tokenizer = byte_level()
    ids = [random.Random(seed).randrange(300) for _ in range(200)]
    assert "".join(parts_of(saved(tmp_path, tokenizer).stream(), ids)) == tokenizer.decode(ids)


def test_bytes_that_wait_at_the_end_are_the_rest(kind, tmp_path):
    read = saved(tmp_path, kind)
    ids = read.encode("end \U0001f600")[:-1]
    *parts, rest = parts_of(read.stream(), ids)
    assert "".join(parts) == "end "
    assert rest.strip(UNKNOWN) == ""
    assert "".join(parts) + rest == kind.decode(ids)


@pytest.mark.parametrize("unit", ["the end ", "\u4f60", "\U0001f600"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_id_costs_the_same_at_the_end_of_a_long_text(kind, tmp_path, unit, is_cut):
    class Counted:
        longest = 0

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return kind.decode(ids)

        id_to_token = staticmethod(kind.id_to_token)

    read, counted = saved(tmp_path, kind), Counted()
    ids = read.encode(unit)[-1:] * 1000 if is_cut else read.encode(unit * 400)
    stream = read.stream()
    stream._tokenizer = counted
    assert "".join(parts_of(stream, ids))
    assert counted.longest <= (128 if is_cut else 8)


def test_a_prompt_keeps_its_bos_and_is_neither_cut_nor_filled_up(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=500)
    ids = saved(tmp_path, tokenizer).encode(TEXT)
    assert ids == byte_level().encode(TEXT).ids
    assert ids[0] == 0


def test_special_tokens_and_ids_without_a_token_have_no_text(kind, tmp_path):
    kind.add_special_tokens(["<end>"])
    read = saved(tmp_path, kind)
    between = [kind.token_to_id("<end>"), 100_000]
    ids = [one for token in read.encode(" the \u4f60 end") for one in (*between, token)]
    assert "".join(parts_of(read.stream(), ids)) == kind.decode(ids) == " the \u4f60 end"


@pytest.mark.parametrize(("text", "said"), [("{", "is not a file of tokenizers"), (None, "has no tokenizer.json")])
def test_a_file_that_is_missing_or_wrong_is_named(tmp_path, text, said):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match=said) as raised:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_without_tokenizers_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ExtraMissing, match=r"text of a model needs tokenizers, .* 'tilekern\[text\]'"):
        Tokenizer(tmp_path)
