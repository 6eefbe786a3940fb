"""Vocabularies written as SentencePiece models, run by SentencePiece itself."""

import io
import tempfile
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from relpos.conversion.files import ConversionError
from relpos.conversion.segmenters import segmenter_of, sentencepiece_segmenter
from relpos.conversion.sentencepiece_writer import write_sentencepiece
from relpos.training.subwords import train_tokenizer

TEXTS = [
    "Save the file.",
    "Speichern Sie die Datei.",
    "Open the selected files and close the window.",
    "Öffnen Sie die gewählten Dateien und schließen Sie das Fenster.",
] * 5


def written(segmenter):
    with tempfile.TemporaryDirectory() as folder:
        write_sentencepiece(segmenter, Path(folder) / "written.model")
        return sentencepiece.SentencePieceProcessor(model_proto=(Path(folder) / "written.model").read_bytes())


@pytest.fixture(scope="module")
def trained():
    """A vocabulary of this package's, and the SentencePiece model written from it."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    return tokenizer, written(segmenter_of(tokenizer))


# U+2581 is SentencePiece's space, U+E581 escapes it in our vocabularies, and surrogates are no text.
TEXT = st.text(st.characters(exclude_characters="\u2581\ue581", exclude_categories=["Cs"]))


@given(text=st.one_of(TEXT, st.lists(st.sampled_from(["the", "Datei", " ", "  ", ".", "ß", "☃", "\t"])).map("".join)))
def test_it_cuts_and_joins_any_text_the_same(trained, text):
    tokenizer, processor = trained
    assert processor.encode(text, out_type=str) == tokenizer.tokenize(text)
    assert processor.decode(processor.encode(text)) == text


def test_ids_and_special_pieces_are_the_same(trained):
    tokenizer, processor = trained
    assert [processor.id_to_piece(index) for index in range(len(processor))] == tokenizer.convert_ids_to_tokens(
        list(range(len(tokenizer)))
    )
    assert (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id()) == (0, 1, 2, -1)
    assert processor.is_byte(tokenizer.convert_tokens_to_ids("<0x41>"))
    assert processor.encode("</s><pad>", out_type=int) == tokenizer("</s><pad>", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"add_dummy_prefix": False, "pad_id": 3, "user_defined_symbols": []},
    ],
)
def test_a_model_of_sentencepiece_comes_through(options, tmp_path):
    """SentencePiece -> segmenter -> SentencePiece, normalisation included."""
    stream = io.BytesIO()
    size = 300 if options.get("byte_fallback") else 45
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=stream, vocab_size=size, minloglevel=2, **options
    )
    (tmp_path / "original.model").write_bytes(stream.getvalue())
    original = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
    again = written(sentencepiece_segmenter(tmp_path / "original.model"))
    for text in (*TEXTS[:4], "", " ", "  two  spaces ", "ﬁne ① ﬀ", "☃ unknown", "tab\there", "日本"):
        assert again.encode(text, out_type=str) == original.encode(text, out_type=str), text
        assert again.decode(again.encode(text)) == original.decode(original.encode(text)), text


def test_what_sentencepiece_cannot_do_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="from a Unigram vocabulary, and this one is of type BPE"):
        write_sentencepiece(Tokenizer(models.BPE()), tmp_path / "out.model")
    lower = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    lower.normalizer = normalizers.Lowercase()
    with pytest.raises(ConversionError, match=r"nothing like the normaliser .*Lowercase"):
        write_sentencepiece(lower, tmp_path / "out.model")
    assert list(tmp_path.iterdir()) == []
