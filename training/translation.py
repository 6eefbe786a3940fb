"""Translates sentences and streams of lines: as many lines come out as go in, in the same order."""

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from .loading import LoadedModel

# Sentences are sorted by length within a window of this many batches, so that a batch has little padding.
BATCHES_PER_WINDOW = 16
# What any common reader takes for the end of a line (str.splitlines knows the same set).
LINE_BREAKS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")


class TranslationError(ValueError):
    """Input or options that cannot be translated with; the message is one sentence for the user."""


@dataclass(frozen=True)
class Translation:
    """One translated sentence.

    Attributes:
        text: the translation on one line.
        source_tokens: length of the source in tokens, `</s>` included; 0 for a blank sentence, which no model sees.
        complete: the model ended the sentence itself; False if the limit on new tokens cut it off.
    """

    text: str
    source_tokens: int
    complete: bool


def translate_sentences(
    loaded: LoadedModel,
    sentences: Sequence[str],
    *,
    beams: int | None = None,
    batch_size: int = 32,
    max_new_tokens: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[Translation]:
    """Translate sentences, never cutting a source, in batches of similar length.

    Args:
        loaded: the model and its tokenizer.
        sentences: source sentences; blank ones come back empty.
        beams: beam size; None takes the model's own.
        batch_size: sentences translated at a time.
        max_new_tokens: limit on each translation; None allows what any translation of that source needs.
        on_progress: called with the number of sentences that each batch finished.

    Returns:
        One Translation per sentence, in the order of `sentences`.

    Raises:
        TranslationError: a number is below 1, or a source is longer than the model's table of learned positions.
    """
    check_options(beams=beams, batch_size=batch_size, max_new_tokens=max_new_tokens)
    translations = [Translation(text="", source_tokens=0, complete=True)] * len(sentences)
    filled = [number for number, sentence in enumerate(sentences) if sentence.strip()]
    if on_progress and len(filled) < len(sentences):
        on_progress(len(sentences) - len(filled))
    token_ids = _tokenize(loaded, [sentences[number] for number in filled])
    _check_lengths(loaded, token_ids)
    by_length = sorted(range(len(filled)), key=lambda position: -len(token_ids[position]))
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        finished = _translate_batch(loaded, [token_ids[position] for position in batch], beams, max_new_tokens)
        for position, translation in zip(batch, finished, strict=True):
            translations[filled[position]] = translation
        if on_progress:
            on_progress(len(batch))
    return translations


def translate_stream(
    loaded: LoadedModel,
    windows: Iterable[list[str]],
    target: BinaryIO,
    *,
    beams: int | None = None,
    batch_size: int = 32,
    max_new_tokens: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    warn: Callable[[str], None] = lambda message: None,
) -> int:
    """Write one line of UTF-8 for every line that `windows` yields, and flush after each window.

    `warn` is given a sentence for each line that is longer than anything seen in training, as far as the model says
    what that was, and for each translation that the limit on new tokens cut off. Returns the number of lines.
    """
    count = 0
    for window in windows:
        translations = translate_sentences(
            loaded,
            window,
            beams=beams,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            on_progress=on_progress,
        )
        for number, translation in enumerate(translations, start=count + 1):
            _warn_about(loaded, number, translation, warn)
        target.write("".join(translation.text + "\n" for translation in translations).encode())
        target.flush()
        count += len(window)
    return count


def check_options(**options: int | None) -> None:
    """Raise TranslationError for the first option that is given and below 1."""
    for option, value in options.items():
        if value is not None and value < 1:
            raise TranslationError(f"{option} is {value}; it must be at least 1.")


def _tokenize(loaded: LoadedModel, sentences: list[str]) -> list[list[int]]:
    """Token ids of every sentence, whole whatever its length."""
    # verbose=False: model_max_length is a habit of other models, relative positions have no ceiling.
    return loaded.tokenizer(sentences, truncation=False, verbose=False)["input_ids"] if sentences else []


def _check_lengths(loaded: LoadedModel, token_ids: list[list[int]]) -> None:
    """Refuse a source that a table of learned absolute positions cannot number."""
    config = loaded.model.config
    longest = max(map(len, token_ids), default=0)
    if getattr(config, "absolute_position", None) == "learned" and longest > config.max_position_embeddings:
        raise TranslationError(
            f"A source of {longest} tokens is too long for {loaded.name}, whose learned absolute positions end at "
            f"{config.max_position_embeddings}."
        )


@torch.inference_mode()
def _translate_batch(
    loaded: LoadedModel, token_ids: list[list[int]], beams: int | None, max_new_tokens: int | None
) -> list[Translation]:
    inputs = loaded.tokenizer.pad({"input_ids": token_ids}, return_tensors="pt").to(loaded.model.device)
    outputs = loaded.model.generate(
        **inputs, generation_config=_generation_config(loaded.model, token_ids, beams, max_new_tokens)
    )
    ends = loaded.model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=outputs.device)
    complete = torch.isin(outputs[:, 1:], ends).any(dim=1).tolist()  # column 0 starts the decoder
    texts = loaded.tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return [
        Translation(text=LINE_BREAKS.sub(" ", text), source_tokens=len(ids), complete=ended)
        for text, ids, ended in zip(texts, token_ids, complete, strict=True)
    ]


def _generation_config(model: Any, token_ids: list[list[int]], beams: int | None, max_new_tokens: int | None) -> Any:
    """The model's own settings with the user's beam size and room for every source of the batch.

    Twice the longest source and 50 tokens more is room for any translation between languages that share a subword
    vocabulary, and soon ends a model that repeats itself, which holds up the rest of its batch.
    """
    own = model.generation_config
    # The field that the model's own settings use: the library warns where both are set. max_length counts the token
    # that starts the decoder.
    field, start = ("max_new_tokens", 0) if own.max_new_tokens else ("max_length", 1)
    changes: dict[str, Any] = {field: (max_new_tokens or 2 * max(map(len, token_ids)) + 50) + start}
    if beams:
        changes |= {"num_beams": beams, "do_sample": False}
    if beams == 1:
        changes |= {"length_penalty": 1.0}  # one that only beams know draws a warning
    config = copy.deepcopy(own)
    config.update(**changes)
    return config


def _warn_about(loaded: LoadedModel, number: int, translation: Translation, warn: Callable[[str], None]) -> None:
    trained_on = getattr(loaded.model.config, "longest_training_source", None)
    if trained_on and translation.source_tokens > trained_on:
        warn(
            f"line {number} has {translation.source_tokens} tokens, more than any source seen in training "
            f"({trained_on}); it was translated whole"
        )
    if not translation.complete:
        warn(f"line {number}: the translation was cut off at the limit on new tokens")
