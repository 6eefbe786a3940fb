import sys

import datasets
import pytest
from datasets import Dataset

from relpos.training import cleaning
from relpos.training.cleaning import check_languages, drop_by_length, drop_pairs, drop_wrong_language

PAIRS = [("a", "b"), ("", "b"), ("a", "b"), ("a", "c"), ("a", " \t\u2003"), ("", "b"), ("c", "b"), ("a", "b")]


def corpus_of(pairs):
    features = datasets.Features({"translation": datasets.Translation(languages=["en", "de"])})
    return Dataset.from_list([{"translation": dict(zip(("en", "de"), pair))} for pair in pairs], features=features)


def pairs_of(corpus):
    return [(pair["en"], pair["de"]) for pair in corpus["translation"][:]]


@pytest.fixture(params=[3, 10_000])
def _piece_size(request, monkeypatch):
    monkeypatch.setattr(cleaning, "_ROWS", request.param)


@pytest.mark.usefixtures("_piece_size")
def test_empty_pairs_and_repeated_ones_are_counted():
    kept, counts = drop_pairs(corpus_of(PAIRS))
    assert pairs_of(kept) == [pair for pair in PAIRS if pair[0] and pair[1].strip()]
    assert counts == {"an empty side": 3}
    kept, counts = drop_pairs(corpus_of(PAIRS), duplicates=True)
    assert pairs_of(kept) == [("a", "b"), ("a", "c"), ("c", "b")]
    assert counts == {"an empty side": 3, "duplicate": 2}


@pytest.mark.usefixtures("_piece_size")
def test_a_selection_of_rows_is_cleaned_as_it_stands():
    rows = corpus_of(PAIRS).select([7, 1, 3, 0])
    kept, counts = drop_pairs(rows, duplicates=True)
    assert pairs_of(kept) == [("a", "b"), ("a", "c")]
    assert counts == {"an empty side": 1, "duplicate": 1}


def test_a_missing_text_is_an_empty_side():
    kept, counts = drop_pairs(corpus_of([("a", None), ("a", "b")]), duplicates=True)
    assert pairs_of(kept) == [("a", "b")]
    assert counts == {"an empty side": 1, "duplicate": 0}


def test_nothing_left_and_nothing_to_begin_with():
    corpus = corpus_of([("", "")])
    for rows in (corpus, corpus.select([])):
        kept, counts = drop_pairs(rows, duplicates=True)
        assert len(kept) == 0
        assert counts == {"an empty side": len(rows), "duplicate": 0}


def test_sides_in_a_wrong_language_are_counted():
    right = [
        ("The file could not be opened because it is damaged.", "Die Datei konnte nicht geöffnet werden."),
        ("OK", "OK"),
        ("LibreOffice 7.4", "LibreOffice 7.4"),
        ("Save the file.", "Datei speichern"),
        ("https://example.org/help?id=1", "https://example.org/help?id=1"),
    ]
    wrong = [
        ("Die Datei konnte nicht geöffnet werden.", "The file could not be opened because it is damaged."),
        ("The file could not be opened because it is damaged.", "The file could not be opened because it is damaged."),
        ("Le fichier est endommagé et ne peut pas être ouvert.", "Die Datei konnte nicht geöffnet werden."),
        ("The file could not be opened.", "Файл повреждён и не может быть открыт."),
    ]
    kept, counts = drop_wrong_language(corpus_of([*right, *wrong]))
    assert pairs_of(kept) == right
    assert counts == {"wrong language": len(wrong)}


def test_a_language_that_cannot_be_told(monkeypatch):
    check_languages(["en", "de"])
    with pytest.raises(ValueError, match="cannot tell tlh; it knows ace, "):
        check_languages(["en", "tlh"])
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    cleaning._identifier.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'relpos\[language\]'"):
        check_languages(["en"])


def test_lengths_and_ratios():
    lengths = [(3, 3), (3, 10), (10, 4), (11, 11), (1, 3), (1, 4), (0, 1)]
    rows = Dataset.from_dict(
        {name: [[1] * pair[i] for pair in lengths] for i, name in enumerate(("input_ids", "labels"))}
    )
    kept, counts = drop_by_length(rows, max_length=10)
    assert counts == {"too long": 1}
    assert len(kept) == len(lengths) - 1
    kept, counts = drop_by_length(rows, max_length=10, max_ratio=3)
    assert [(len(row["input_ids"]), len(row["labels"])) for row in kept] == [(3, 3), (10, 4), (1, 3)]
    assert counts == {"too long": 1, "lengths too different": 3}
