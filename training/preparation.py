"""Prepares what a recipe trains and validates on: corpora read, cleaned, mixed and tokenized.

The work is done by `datasets` in Arrow files, which a second run of the same recipe finds again.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets
from datasets.fingerprint import Hasher
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from relpos.configuration import presets
from relpos.pipeline_relpos import language_tags

from .batching import sequence_lengths
from .cleaning import check_languages, drop_by_length, drop_pairs, drop_wrong_language
from .corpus import BUNDLED, BUNDLED_LANGUAGES, bundled_splits, parse_corpora, read_corpus
from .recipe import DataArguments, ModelArguments, RecipeError
from .streaming import drop_empty_pairs, tokenize_streams
from .subwords import add_language_tags, load_sentencepiece, train_tokenizer

Languages = tuple[str, str]
"""Source and target."""


@dataclass
class Corpora:
    """Pairs of text by their languages, as `read_corpus` returns them, and what was left out of the training pairs."""

    train: dict[Languages, Dataset] | dict[Languages, IterableDataset]
    validation: dict[Languages, Dataset]
    dropped: Counter = field(default_factory=Counter)

    @property
    def targets(self) -> list[str]:
        """The target languages that are trained, in order."""
        return sorted({target for _, target in self.train})


@dataclass
class TokenizedSets:
    """What Trainer is given: rows of `input_ids` and `labels`, both ending in the end-of-sentence token."""

    train: Dataset | IterableDataset
    validation: Dataset | None
    """Has a column `reference`, too: the target as it is, since ids have lost what the vocabulary lacks."""
    copies: np.ndarray | None
    """How often each training pair comes in an epoch; None: once."""


def read_corpora(data: DataArguments) -> Corpora:
    """Read and clean the corpora of a recipe.

    Raises:
        RecipeError: There is no pair with text on both sides, or languages that cannot be told are to be told.
        CorpusError: A corpus cannot be read.
    """
    languages = (data.source_lang, data.target_lang)
    named = {
        "train": parse_corpora(data.train_corpus, languages=languages),
        "validation": parse_corpora(data.validation_corpus or [], languages=languages),
    }
    if not named["validation"]:
        named["validation"] = [corpus for corpus in named["train"] if corpus[1] == BUNDLED]
    if data.drop_wrong_language:
        _check_languages(named["train"])
    corpora = Corpora(
        train=_read_by_languages(named["train"], "train", streaming=data.streaming),
        validation=_read_by_languages(named["validation"], "validation"),
    )
    for pair, corpus in corpora.train.items():
        if data.streaming:
            corpora.train[pair] = drop_empty_pairs(corpus)
        else:
            corpora.train[pair], counts = drop_pairs(corpus, duplicates=data.drop_duplicates)
            corpora.dropped.update(counts)
        if data.drop_wrong_language:
            corpora.train[pair], counts = drop_wrong_language(
                corpora.train[pair], num_proc=data.preprocessing_num_workers
            )
            corpora.dropped.update(counts)
        if next(iter(corpora.train[pair]), None) is None:
            names = " ".join(data.train_corpus)
            raise RecipeError(f"train_corpus={names} has no pair of {'-'.join(pair)} with text on both sides.")
    for pair, corpus in corpora.validation.items():
        if not any(all(text.strip() for text in row["translation"].values()) for row in corpus):
            names = " ".join(data.validation_corpus or [BUNDLED])
            raise RecipeError(f"validation_corpus={names} has no pair of {'-'.join(pair)} with text on both sides.")
        if pair[1] not in corpora.targets:
            raise RecipeError(
                f"validation_corpus has the target language {pair[1]}, but train_corpus only {', '.join(corpora.targets)}."
            )
    return corpora


def _check_languages(named: list[tuple[Languages, str | Languages]]) -> None:
    try:
        check_languages(language for languages, _ in named for language in languages)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _read_by_languages(
    named: list[tuple[Languages, str | Languages]], split: str, *, streaming: bool = False
) -> dict[Languages, Dataset]:
    parts: dict[Languages, list[Dataset]] = {}
    for languages, source in named:
        if source == BUNDLED and set(languages) == set(BUNDLED_LANGUAGES):
            corpus = bundled_splits()[split]
            corpus = corpus.to_iterable_dataset() if streaming else corpus
        else:
            corpus = read_corpus(source, languages=languages, split=split, streaming=streaming)
        parts.setdefault(languages, []).append(corpus)
    return {
        languages: corpora[0] if len(corpora) == 1 else concatenate_datasets(corpora)
        for languages, corpora in parts.items()
    }


def make_tokenizer(model: ModelArguments, data: DataArguments, corpora: Corpora) -> PreTrainedTokenizerBase:
    """The tokenizer that is named, that of the saved model, or one whose vocabulary is trained on the pairs.

    It has a tag token for each target language where there are several of them, now or in the saved model.

    Raises:
        RecipeError: It cannot be read, or `vocab_size` has no room for the characters of the corpora.
    """
    named = model.tokenizer or (None if model.model in presets() else model.model)
    if named is None:
        tags = corpora.targets if len(corpora.targets) > 1 else []
        texts = _Texts(corpora.train, at_most=data.subword_sentences)
        try:
            return train_tokenizer(texts, vocab_size=model.vocab_size, languages=tags)
        except ValueError as error:
            raise RecipeError(str(error)) from error
    try:
        tokenizer = load_sentencepiece(named) if named.endswith(".model") else AutoTokenizer.from_pretrained(named)
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(f"tokenizer={named} cannot be read: {' '.join(str(error).split())}") from error
    if len(corpora.targets) > 1 or language_tags(tokenizer):
        add_language_tags(tokenizer, corpora.targets)
    return tokenizer


class _Texts:
    """The sentences of evenly spaced pairs, both sides, or of the first pairs of streams, read anew at each iteration."""

    def __init__(self, corpora: dict[Languages, Dataset], *, at_most: int) -> None:
        if all(isinstance(corpus, Dataset) for corpus in corpora.values()):
            step = -(-sum(map(len, corpora.values())) // at_most)
            self._parts = {pair: corpus.select(range(0, len(corpus), step)) for pair, corpus in corpora.items()}
        else:
            self._parts = {pair: stream.take(at_most // len(corpora)) for pair, stream in corpora.items()}

    def __iter__(self) -> Iterator[str]:
        for languages, part in self._parts.items():
            for batch in part.iter(batch_size=1000):
                for pair in batch["translation"]:
                    yield from (pair[language] for language in languages)


def tokenize_corpora(corpora: Corpora, tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> TokenizedSets:
    """Token ids of all pairs, training pairs of sensible lengths, and how the languages are mixed.

    Raises:
        RecipeError: No pair is left to train on.
    """
    validation = []
    for languages, pairs in corpora.validation.items():
        rows = _tokenize(pairs, tokenizer, languages, num_proc=data.preprocessing_num_workers)
        references = [pair[languages[1]] for pair in pairs["translation"]]
        validation.append(rows.add_column("reference", references))
    if data.streaming:
        limits = {"max_length": data.max_length, "max_ratio": data.max_ratio}
        encoders = [_encoder(tokenizer, languages) for languages in corpora.train]
        train, copies = tokenize_streams(list(corpora.train.values()), encoders, **limits), None
    else:
        parts = _tokenize_training_pairs(corpora, tokenizer, data)
        train, copies = concatenate_datasets(parts), _copies([len(rows) for rows in parts], data.sampling_temperature)
    return TokenizedSets(
        train=train,
        validation=_sorted_by_length(concatenate_datasets(validation)) if validation else None,
        copies=copies,
    )


def _tokenize_training_pairs(
    corpora: Corpora, tokenizer: PreTrainedTokenizerBase, data: DataArguments
) -> list[Dataset]:
    """The training pairs of sensible lengths by their languages, as token ids."""
    parts = []
    for languages, pairs in corpora.train.items():
        rows = _tokenize(pairs, tokenizer, languages, num_proc=data.preprocessing_num_workers)
        rows, counts = drop_by_length(rows, max_length=data.max_length, max_ratio=data.max_ratio)
        corpora.dropped.update(counts)
        if not len(rows):
            limits = f"max_length={data.max_length}" + f" and max_ratio={data.max_ratio}" * (data.max_ratio is not None)
            raise RecipeError(f"{limits} leaves no pair of {'-'.join(languages)} to train on.")
        parts.append(rows)
    return parts


def _tokenize(
    pairs: Dataset, tokenizer: PreTrainedTokenizerBase, languages: Languages, *, num_proc: int | None
) -> Dataset:
    return pairs.map(
        _encoder(tokenizer, languages),
        batched=True,
        remove_columns=pairs.column_names,
        features=Features({name: List(Value("int32")) for name in ("input_ids", "labels")}),
        num_proc=num_proc,
        new_fingerprint=_fingerprint(pairs, tokenizer, languages),
    )


def _encoder(tokenizer: PreTrainedTokenizerBase, languages: Languages) -> Callable[[dict[str, list]], dict[str, list]]:
    """What makes `input_ids`, which begin with the tag of the target language where there are tags, and `labels`."""
    tag = language_tags(tokenizer).get(languages[1])
    prefix = [] if tag is None else [tag]

    def encode(batch: dict[str, list]) -> dict[str, list]:
        sources, targets = ([pair[language] for pair in batch["translation"]] for language in languages)
        encoded = tokenizer(sources, text_target=targets)
        return {"input_ids": [prefix + ids for ids in encoded["input_ids"]], "labels": encoded["labels"]}

    return encode


def _fingerprint(pairs: Dataset, tokenizer: PreTrainedTokenizerBase, languages: Languages) -> str | None:
    """What names the Arrow file of the token ids. Left to itself, `datasets` would pickle the tokenizer, whose state
    changes with use, and would find nothing again."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    return Hasher.hash((pairs._fingerprint, backend.to_str(), languages, tokenizer.split_special_tokens))


def _copies(sizes: list[int], temperature: float) -> np.ndarray | None:
    """How often each pair comes in an epoch, so that sizes to the power of 1/temperature are the shares of the languages
    (Arivazhagan et al. 2019, section 4.2) and the largest comes once."""
    if temperature == 1 or len(sizes) == 1:
        return None
    return np.concatenate([np.full(size, (max(sizes) / size) ** (1 - 1 / temperature)) for size in sizes])


def _sorted_by_length(dataset: Dataset) -> Dataset:
    """The rows in order of their sources' length, longest first, so that evaluation pads and waits least."""
    return dataset.select(np.argsort(-sequence_lengths(dataset, "input_ids"), kind="stable"))


def load_run_tokenizer(output_dir: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer that an earlier start of this run has left in its folder."""
    return AutoTokenizer.from_pretrained(output_dir) if (output_dir / "tokenizer_config.json").is_file() else None
