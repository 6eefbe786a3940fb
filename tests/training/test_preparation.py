import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from relpos.training.corpus import CorpusError
from relpos.training.preparation import _Texts, make_tokenizer, read_corpora, tokenize_corpora
from relpos.training.recipe import DataArguments, ModelArguments, RecipeError
from relpos.training.subwords import add_language_tags
from relpos.training.trainer import save_tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "corpus.tsv"
    file.write_text("".join(f"The {n} house.\tDas {n} Haus.\n" for n in range(60)), encoding="utf-8")
    return DataArguments(train_corpus=[str(file)], validation_corpus=[str(file)])


def prepare(data, tokenizer=None):
    corpora = read_corpora(data)
    tokenizer = tokenizer or make_tokenizer(ModelArguments(vocab_size=430), data, corpora)
    return tokenize_corpora(corpora, tokenizer, data), tokenizer


def files(dataset):
    return [entry["filename"] for entry in dataset.cache_files]


def test_a_second_run_finds_the_tokens_again(data, tmp_path):
    sets, tokenizer = prepare(data)
    tokenizer("used", padding="max_length", max_length=9, truncation=True)  # which leaves its mark on the tokenizer
    save_tokenizer(tokenizer, tmp_path / "saved")
    again, _ = prepare(data, AutoTokenizer.from_pretrained(tmp_path / "saved"))
    assert files(sets.train)
    assert files(again.train) == files(sets.train)
    assert again.train["labels"][:] == sets.train["labels"][:]
    add_language_tags(tokenizer, ["fr"])
    other, _ = prepare(data, tokenizer)
    assert files(other.train) != files(sets.train)


@pytest.mark.slow
def test_several_processes_give_the_same_rows_in_the_same_order(data):
    sets, tokenizer = prepare(data)
    data.preprocessing_num_workers = 2
    data.validation_corpus = None
    data.train_corpus *= 2  # another set, which is not found in a file
    shared, _ = prepare(data, tokenizer)
    for column in ("input_ids", "labels"):
        assert shared.train[column][:] == sets.train[column][:] * 2


def test_rows_are_token_ids_in_order_and_validation_is_by_length(data):
    sets, tokenizer = prepare(data)
    assert sets.copies is None
    assert tokenizer.batch_decode(sets.train["input_ids"][:3], skip_special_tokens=True)[2] == "The 2 house."
    assert all(row["labels"][-1] == tokenizer.eos_token_id for row in sets.train)
    lengths = [len(row) for row in sets.validation["input_ids"]]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 1


def test_the_vocabulary_is_trained_on_evenly_spaced_pairs(data):
    data.subword_sentences = 7
    corpora = read_corpora(data)
    texts = []
    reader = _Texts(corpora.train, at_most=data.subword_sentences)
    for _ in range(2):
        texts.append(list(reader))
    assert texts[0] == texts[1]
    assert texts[0][:4] == ["The 0 house.", "Das 0 Haus.", "The 9 house.", "Das 9 Haus."]
    assert len(texts[0]) == 14


def test_the_bundled_corpus_trains_on_its_training_part_and_validates_on_another():
    corpora = read_corpora(DataArguments())
    assert [len(part) for part in corpora.train.values()] == [40_548 - corpora.dropped["an empty side"]]
    assert [len(part) for part in corpora.validation.values()] == [500]
    again = read_corpora(DataArguments(source_lang="de", target_lang="en"))
    assert list(again.train) == [("de", "en")]
    np.testing.assert_equal(len(again.train["de", "en"]), len(corpora.train["en", "de"]))


def test_an_empty_corpus_is_refused(data, tmp_path):
    empty, blank = tmp_path / "empty.tsv", tmp_path / "blank.tsv"
    empty.touch()
    blank.write_text("a\t\n \tb\n")
    with pytest.raises(CorpusError, match=r"empty\.tsv is empty"):
        read_corpora(DataArguments(train_corpus=data.train_corpus, validation_corpus=[str(empty)]))
    with pytest.raises(RecipeError, match=r"blank\.tsv has no pair of en-de with text on both sides"):
        read_corpora(DataArguments(train_corpus=[str(blank)]))
    with pytest.raises(
        RecipeError, match=r"validation_corpus=.*blank\.tsv has no pair of en-de with text on both sides"
    ):
        read_corpora(DataArguments(train_corpus=data.train_corpus, validation_corpus=[str(blank)]))


def test_pairs_in_a_wrong_language_are_left_out_and_counted(data):
    data.train_corpus = ["en-de=" + data.train_corpus[0]]
    data.drop_wrong_language = True
    with open(data.train_corpus[0].partition("=")[2], "a", encoding="utf-8") as file:
        file.write("La maison est grande et le jardin est petit.\tDas Haus ist groß und der Garten ist klein.\n")
    corpora = read_corpora(data)
    assert len(corpora.train["en", "de"]) == 60
    assert corpora.dropped["wrong language"] == 1
    data.target_lang, data.train_corpus = "tlh", data.validation_corpus
    with pytest.raises(RecipeError, match="drop_wrong_language cannot tell tlh"):
        read_corpora(data)
