"""Subword models of other toolkits as `tokenizers` objects that cut text into pieces; the ids come from elsewhere."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from relpos.training.subwords import load_sentencepiece

from .files import ConversionError, read_text

SPECIAL_TOKENS = ("<unk>", "<blank>", "<pad>", "<s>", "</s>")
"""How toolkits write the tokens that stand for no text."""


def load_segmenter(path: Path, vocabulary: Sequence[str]) -> tuple[Tokenizer, list[str]]:
    """A SentencePiece model (unigram or BPE) or BPE codes of subword-nmt, told apart by their first bytes.

    Args:
        path: The file of the subword model.
        vocabulary: The toolkit's pieces in the order of their ids.

    Returns:
        The segmenter, and the vocabulary in its notation of pieces.

    Raises:
        ConversionError: There is no such file, or it is neither.
    """
    if not path.is_file():
        raise ConversionError(f"There is no subword model {path}.")
    with path.open("rb") as file:
        is_codes = file.read(9) == b"#version:"
    return bpe_codes_segmenter(path, vocabulary) if is_codes else (sentencepiece_segmenter(path), list(vocabulary))


def sentencepiece_segmenter(path: Path) -> Tokenizer:
    """Pieces as SentencePiece's `encode(text, out_type=str)` gives them.

    Raises:
        ConversionError: The file is no SentencePiece model, one of words or characters, or protobuf is not installed.
    """
    try:
        return segmenter_of(load_sentencepiece(path))
    except (ValueError, OSError, ImportError) as error:
        raise ConversionError(str(error)) from error


def segmenter_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The subword model of a fast tokenizer, without special tokens: text that spells one is cut like any other."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**state, "added_tokens": [], "post_processor": None}))


def bpe_codes_segmenter(path: Path, vocabulary: Sequence[str]) -> tuple[Tokenizer, list[str]]:
    """BPE of subword-nmt (Sennrich et al. 2016), and its vocabulary in another notation of the same pieces: what
    subword-nmt writes as "ab@@" within a word and "ab" at its end is "ab" and "ab</w>".

    Raises:
        ConversionError: The file is not one of subword-nmt's version 0.2, or cut off within a line.
    """
    merges = _read_merges(path)
    vocabulary = [
        piece if piece in SPECIAL_TOKENS else piece.removesuffix("@@") if piece.endswith("@@") else f"{piece}</w>"
        for piece in vocabulary
    ]
    pieces = dict.fromkeys(["<unk>", *vocabulary])
    for left, right in merges:
        pieces |= dict.fromkeys([*_characters(left + right), left, right, left + right])
    ids = {piece: index for index, piece in enumerate(pieces)}
    segmenter = Tokenizer(models.BPE(ids, merges, end_of_word_suffix="</w>", unk_token="<unk>"))
    segmenter.normalizer, segmenter.pre_tokenizer = _strip(), pre_tokenizers.Split(" ", "removed")
    segmenter.decoder = decoders.BPEDecoder(suffix="</w>")
    return segmenter, vocabulary


def whitespace_segmenter(vocabulary: Sequence[str], *, ascii_spaces: bool = False) -> Tokenizer:
    """The words between spaces: for models whose text was tokenized before it came to the toolkit.

    Args:
        vocabulary: The words.
        ascii_spaces: Split at tabs and line ends, too, as TensorFlow does; otherwise they and all spaces of Unicode are
            stripped and only U+0020 splits, as in OpenNMT-py.
    """
    ids = {word: index for index, word in enumerate(dict.fromkeys(["<unk>", *vocabulary]))}
    segmenter = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    if ascii_spaces:
        segmenter.pre_tokenizer = pre_tokenizers.Split(Regex(r"[ \t\n\v\f\r]"), "removed")
    else:
        segmenter.normalizer, segmenter.pre_tokenizer = _strip(), pre_tokenizers.Split(" ", "removed")
    return segmenter


def tokenizer_sides(
    vocabularies: Sequence[Sequence[str]], subwords: Sequence[Path | None] | None, *, ascii_spaces: bool = False
) -> dict[str, Tokenizer | list[str]]:
    """Subword models and vocabularies of source and target, as `RelPosTokenizer` takes them.

    Args:
        vocabularies: The toolkit's pieces of both sides in the order of their ids.
        subwords: The subword model of each side; None where words come as they stand.
        ascii_spaces: How such words are told apart, see `whitespace_segmenter`.

    Raises:
        ConversionError: A subword model cannot be read.
    """
    sides: dict[str, Tokenizer | list[str]] = {}
    for side, vocabulary, path in zip(("source", "target"), vocabularies, subwords or (None, None)):
        if path:
            segmenter, vocabulary = load_segmenter(path, vocabulary)
        else:
            segmenter = whitespace_segmenter(vocabulary, ascii_spaces=ascii_spaces)
        sides |= {f"{side}_segmenter": segmenter, f"{side}_vocabulary": list(vocabulary)}
    return sides


def looks_segmented(vocabulary: Sequence[str]) -> bool:
    """Whether a vocabulary holds pieces of a subword model: SentencePiece's U+2581 or subword-nmt's "@@"."""
    return any("\u2581" in token or token.endswith("@@") for token in vocabulary)


def _strip() -> normalizers.Normalizer:
    """Python's `str.strip`, which counts four more characters as spaces than `normalizers.Strip`."""
    return normalizers.Replace(Regex(r"\A[\s\x1c-\x1f]+|[\s\x1c-\x1f]+\z"), "")


def _read_merges(path: Path) -> list[tuple[str, str]]:
    lines = read_text(path, "BPE codes file").rstrip("\n").split("\n")
    if lines[0].split() != ["#version:", "0.2"]:
        raise ConversionError(f"The BPE codes {path} must begin with '#version: 0.2', not with {lines[0]!r}.")
    merges = [tuple(line.strip("\r\n ").split(" ")) for line in lines[1:]]
    for number, parts in enumerate(merges, start=2):
        if len(parts) != 2:
            raise ConversionError(f"Line {number} of the BPE codes {path} must hold two pieces and holds {len(parts)}.")
    return list(dict.fromkeys(merges))  # of two equal ones, the first counts


def _characters(piece: str) -> list[str]:
    """The characters of a merged piece, each as it stands within a word and at its end."""
    return [form for character in piece.removesuffix("</w>") for form in (character, f"{character}</w>")]
