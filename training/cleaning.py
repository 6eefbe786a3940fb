"""Leaves pairs out of a training corpus, and counts how many and why.

Pairs are looked at in pieces of an Arrow table, so that a corpus of millions of pairs is never in memory as a whole.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset

from .batching import sequence_lengths

_ROWS = 10_000
# A side is in another language where py3langid gives its own less than this probability. Of 2,000 pairs of the bundled
# corpus, none of which is wrong, 1e-2 leaves out 25, with sides of a word or two, and 1e-3 none.
_SURELY_NOT = 1e-3


def drop_pairs(corpus: Dataset, *, duplicates: bool = False) -> tuple[Dataset, dict[str, int]]:
    """The pairs that have text on both sides: a pair with an empty side teaches a model to say nothing.

    Args:
        corpus: Rows as `read_corpus` returns them.
        duplicates: Leave out, too, what equals an earlier pair on both sides.

    Returns:
        The pairs that remain, and the number of those that do not by reason.
    """
    filled = [np.zeros(0, dtype=bool)]
    keys = [np.zeros(0, dtype=np.uint64)]
    for source, target in _sides(corpus):
        filled.append(_has_text(source) & _has_text(target))
        if duplicates:
            keys.append(_keys(source, target))
    keep = np.concatenate(filled)
    counts = {"an empty side": int((~keep).sum())}
    if duplicates:
        rows = np.flatnonzero(keep)
        _, first = np.unique(np.concatenate(keys)[rows], return_index=True)
        keep = np.zeros_like(keep)
        keep[rows[first]] = True
        counts["duplicate"] = len(rows) - len(first)
    return _select(corpus, keep), counts


def drop_wrong_language(corpus: Dataset, *, num_proc: int | None = None) -> tuple[Dataset, dict[str, int]]:
    """The pairs whose sides are not surely in other languages than the corpus names.

    Args:
        corpus: Rows as `read_corpus` returns them.
        num_proc: Processes that do it.

    Returns:
        The pairs that remain, and the number of those that do not.

    Raises:
        ValueError: The languages cannot be told, see `check_languages`.
    """
    check_languages(corpus.features["translation"].languages)
    kept = corpus.filter(_in_their_languages, batched=True, input_columns="translation", num_proc=num_proc)
    return kept, {"wrong language": len(corpus) - len(kept)}


def check_languages(languages: Iterable[str]) -> None:
    """Raise ValueError where py3langid is not installed, or does not know one of the languages."""
    known = _identifier().labels
    for language in languages:
        if language not in known:
            raise ValueError(f"drop_wrong_language cannot tell {language}; it knows {', '.join(sorted(known))}.")


def _in_their_languages(pairs: list[dict[str, str]]) -> list[bool]:
    rank = _identifier().rank
    return [all(dict(rank(text))[language] >= _SURELY_NOT for language, text in pair.items()) for pair in pairs]


@cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise ValueError("drop_wrong_language needs py3langid: pip install 'relpos[language]'.") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def drop_by_length(
    dataset: Dataset, *, max_length: int, max_ratio: float | None = None
) -> tuple[Dataset, dict[str, int]]:
    """The pairs of sensible lengths.

    Args:
        dataset: Rows with `input_ids` and `labels`.
        max_length: Tokens on either side at most, special ones included.
        max_ratio: Tokens of the longer side for each of the shorter at most; no limit by default.

    Returns:
        The pairs that remain, and the number of those that do not by reason.
    """
    source, target = (sequence_lengths(dataset, column) for column in ("input_ids", "labels"))
    longer, shorter = np.maximum(source, target), np.minimum(source, target)
    keep = longer <= max_length
    counts = {"too long": int((~keep).sum())}
    if max_ratio is not None:
        uneven = keep & (longer > max_ratio * shorter)
        counts["lengths too different"] = int(uneven.sum())
        keep &= ~uneven
    return _select(dataset, keep), counts


def _sides(corpus: Dataset) -> Iterator[list[pyarrow.ChunkedArray]]:
    """The texts of both languages, piece by piece."""
    languages = corpus.features["translation"].languages
    for table in corpus.with_format("arrow").iter(batch_size=_ROWS):
        yield [pyarrow.compute.struct_field(table["translation"], [language]) for language in languages]


def _has_text(texts: pyarrow.ChunkedArray) -> np.ndarray:
    length = pyarrow.compute.binary_length(pyarrow.compute.utf8_trim_whitespace(texts))
    return pyarrow.compute.greater(pyarrow.compute.fill_null(length, 0), 0).to_numpy()


def _keys(source: pyarrow.ChunkedArray, target: pyarrow.ChunkedArray) -> np.ndarray:
    """64 bits of a hash of each pair: among ten million pairs, two differ and share them once in 400,000 corpora."""
    digests = b"".join(
        hashlib.blake2b(f"{one}\n{other}".encode(), digest_size=8).digest()
        for one, other in zip(source.to_pylist(), target.to_pylist())
    )
    return np.frombuffer(digests, dtype=np.uint64)


def _select(dataset: Dataset, keep: np.ndarray) -> Dataset:
    return dataset if keep.all() else dataset.select(np.flatnonzero(keep))
