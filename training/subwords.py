"""The shared subword vocabulary: trained here, or taken from a SentencePiece model.

A trained vocabulary is a Unigram model (Kudo 2018) over pieces in SentencePiece's notation, a space written as U+2581,
with the 256 bytes as a fallback: no text has unknown tokens, and decoding gives back every text exactly. What is saved
is an ordinary fast tokenizer that `AutoTokenizer` loads without this package.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
"""Ids 0, 1 and 2 of a trained vocabulary, as in T5; the decoder starts with padding, as in T5 and Marian."""

_SPACE = "\u2581"
# A private-use character that escapes U+2581, and itself, where a text contains them, so that they stay apart from
# spaces: E becomes E0 and U+2581 becomes E1. SentencePiece has no such escape and turns U+2581 into a space.
_ESCAPE = "\ue581"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_ASCII = [chr(code) for code in range(0x21, 0x7F)]
# The score, a log-probability, of pieces that only the tokenizer itself may use. The Viterbi search would otherwise
# find "</s>" or "<0x41>" in a text that spells them; it now always prefers their characters.
_RESERVED_SCORE = -1e4
# Characters beyond this share of a text are left to the byte fallback. In a large corpus they are thousands.
_CHARACTER_COVERAGE = 0.9999
# The candidates that one round of training keeps. The library's 0.75 takes twice the time for 2 % shorter sequences
# (measured on the bundled corpus, 4,000 pieces).
_SHRINKING_FACTOR = 0.5


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, languages: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Train a Unigram vocabulary with byte fallback that source and target share.

    Args:
        texts: Sentences of both languages; iterated over twice, so no generator.
        vocab_size: Number of tokens with the special ones and the 256 bytes, at least about 500. A small corpus can
            give fewer.
        languages: Target languages that get a tag token, such as `>>de<<`.

    Returns:
        A fast tokenizer that pads right, ends every text in `</s>`, and decodes to the text exactly with
        `skip_special_tokens=True`. Text that spells a special token is text (`split_special_tokens`).

    Raises:
        ValueError: There is no text, or `vocab_size` has no room for the characters of the texts.
    """
    counts = Counter()
    for text in texts:
        counts.update(text)
    if not counts:
        raise ValueError("texts must hold at least one character to train a vocabulary on, but all are empty.")
    rare = _rare_characters(counts)
    tags = [language_tag(language) for language in languages]
    room = vocab_size - 3 - len(_BYTES) - len(tags)
    needed = len(set(_ASCII) | (set(counts) - set(rare))) + 1
    if room < needed:
        raise ValueError(
            f"vocab_size must be at least {vocab_size - room + needed} for the characters of this corpus, the bytes and "
            f"the special tokens, not {vocab_size}."
        )
    backend = Tokenizer(models.Unigram())
    backend.normalizer, backend.pre_tokenizer = _normalizer(), _pre_tokenizer()
    trainer = trainers.UnigramTrainer(
        vocab_size=room + 1,
        special_tokens=[UNK],
        unk_token=UNK,
        initial_alphabet=_ASCII,
        shrinking_factor=_SHRINKING_FACTOR,
        show_progress=False,
    )
    without_rare = str.maketrans(dict.fromkeys(rare, " "))
    backend.train_from_iterator((text.translate(without_rare) for text in texts), trainer)
    tokenizer = _wrap(_unigram(_scores(backend), tags), pad_token=PAD, eos_token=EOS, unk_token=UNK)
    add_language_tags(tokenizer, languages)
    return tokenizer


def language_tag(language: str) -> str:
    """The token that stands at the start of a source and says what language to translate into, as in Marian."""
    return f">>{language}<<"


def add_language_tags(tokenizer: PreTrainedTokenizerBase, languages: Sequence[str]) -> None:
    """Give a tokenizer the tag tokens that it lacks, as special tokens, which no text is taken for."""
    tags = [AddedToken(language_tag(language), special=True, normalized=False, rstrip=True) for language in languages]
    tokenizer.add_special_tokens({"extra_special_tokens": tags}, replace_extra_special_tokens=False)


def load_sentencepiece(path: str | Path) -> PreTrainedTokenizerFast:
    """Take the vocabulary of a SentencePiece model file (unigram or BPE), ids and normalisation included.

    Encoding equals SentencePiece's, but for a `</s>` at the end of every text. A model without padding gets `<pad>` as
    its last id, and one without an end of sentence `</s>`. Decoding gives back what the model's own normalisation kept.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no SentencePiece model, or one of words or characters, or it cuts text as no fast tokenizer
            does: with spaces at the ends of words, or with user-defined symbols that its normalisation spares.
        ImportError: protobuf is not installed.
    """
    try:
        from google.protobuf.message import DecodeError
        from transformers.convert_slow_tokenizer import SpmConverter, import_protobuf
    except ImportError as error:
        raise ImportError(
            "Reading a SentencePiece model needs protobuf: pip install 'relpos[sentencepiece]'."
        ) from error
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no SentencePiece model {path}.")
    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError:
        raise ValueError(f"{path} is not a SentencePiece model.") from None
    unigram, bpe = 1, 2
    normal, user_defined = 1, 4
    kind = proto.trainer_spec.model_type
    if not proto.pieces or kind not in (unigram, bpe):
        raise ValueError(f"{path} must be a SentencePiece model of type unigram or bpe.")
    if kind == unigram:
        written = (normal, user_defined)  # the others never match text
        vocab = [(p.piece, p.score if p.type in written else _RESERVED_SCORE) for p in proto.pieces]
    else:
        vocab = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    backend = SpmConverter.build_tokenizer_from_spm_proto(proto=proto, vocab=vocab)
    spec = proto.trainer_spec
    if spec.treat_whitespace_as_suffix:
        raise ValueError(
            f"{path} puts spaces at the ends of words (treat_whitespace_as_suffix), which is not supported."
        )
    _check_symbols(backend, [p.piece for p in proto.pieces if p.type == user_defined], path)
    return _wrap(
        backend,
        pad_token=spec.pad_piece if spec.pad_id >= 0 else PAD,
        eos_token=spec.eos_piece if spec.eos_id >= 0 else EOS,
        unk_token=spec.unk_piece,
    )


def _check_symbols(backend: Tokenizer, symbols: Sequence[str], path: Path) -> None:
    """Raise ValueError for user-defined symbols that SentencePiece finds in a text where the tokenizer does not.

    SentencePiece keeps them from its normalisation, which a tokenizer always does first. Of several spaces, a Unigram
    tokenizer takes the last ones for a symbol and SentencePiece the first.
    """
    for symbol in symbols:
        is_kept = backend.normalizer.normalize_str(f"x{symbol}x") == f"x{symbol}x"  # within a text, not at its ends
        if not is_kept or (isinstance(backend.model, models.Unigram) and _SPACE * 2 in symbol):
            raise ValueError(
                f"{path} has the user-defined symbol {symbol!r}, which its normalisation changes or which holds several "
                "spaces, and that is not supported."
            )


def _rare_characters(counts: Counter) -> list[str]:
    """The rarest characters, which together stay below the share of the text that need not be covered."""
    spare = (1 - _CHARACTER_COVERAGE) * counts.total()
    rare = [character for character in (_SPACE, _ESCAPE) if character in counts]
    for character, count in reversed(counts.most_common()):
        spare -= count
        if spare < 0:
            break
        rare.append(character)
    return rare


def _scores(trained: Tokenizer) -> list[tuple[str, float]]:
    """The pieces of a trained model with their log-probabilities, best first, without the unknown token.

    Training adds up in no fixed order, and gives characters that no text needed the lowest score and 0.0001 more for
    each, in no fixed order either. What is left to chance is rounded off here and equal scores are ordered by name, so
    that a corpus gives the same ids every time.
    """
    vocab = [(piece, score) for piece, score in json.loads(trained.to_str())["model"]["vocab"] if piece != UNK]
    lowest = min(score for _, score in vocab)
    unneeded = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in vocab)
    scores = [(piece, round(lowest if score <= unneeded else score, 6)) for piece, score in vocab]
    return sorted(scores, key=lambda scored: (-scored[1], scored[0]))


def _unigram(scores: list[tuple[str, float]], tags: list[str]) -> Tokenizer:
    reserved = [(piece, _RESERVED_SCORE) for piece in (PAD, EOS, UNK, *_BYTES, *tags)]
    backend = Tokenizer(models.Unigram(reserved + scores, unk_id=2, byte_fallback=True))
    backend.normalizer, backend.pre_tokenizer = _normalizer(), _pre_tokenizer()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
            decoders.Replace(_ESCAPE + "1", _SPACE),
            decoders.Replace(_ESCAPE + "0", _ESCAPE),
        ]
    )
    return backend


def _normalizer() -> normalizers.Normalizer:
    """Escapes, and the space that every text begins with, so that a word is the same piece wherever it stands."""
    return normalizers.Sequence(
        [
            normalizers.Replace(_ESCAPE, _ESCAPE + "0"),
            normalizers.Replace(_SPACE, _ESCAPE + "1"),
            # Not Metaspace's own prefix: that leaves a text alone that begins with a space, which loses the space.
            normalizers.Prepend(_SPACE),
        ]
    )


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=True)


def _wrap(backend: Tokenizer, *, pad_token: str, eos_token: str, unk_token: str) -> PreTrainedTokenizerFast:
    specials = [AddedToken(token, special=True, normalized=False) for token in (unk_token, eos_token, pad_token)]
    backend.add_special_tokens(specials)
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {eos_token}",
        pair=f"$A {eos_token} $B {eos_token}",
        special_tokens=[(eos_token, backend.token_to_id(eos_token))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad_token,
        eos_token=eos_token,
        unk_token=unk_token,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_input_names=["input_ids", "attention_mask"],
    )
