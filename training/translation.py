"""Translates sentences and streams of lines: as many lines come out as go in, in the same order."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from transformers import GenerationConfig

from .loading import LoadedModel
from .scoring import MAX_TOKENS, token_log_probabilities
from .sentences import TranslationError, check_lengths, check_options, tokenize

# Sentences are sorted by length within a window of this many batches, so that a batch has little padding.
BATCHES_PER_WINDOW = 16
# What any common reader takes for the end of a line (str.splitlines knows the same set).
LINE_BREAKS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")


@dataclass(frozen=True)
class Translation:
    """One translated sentence.

    Attributes:
        text: the translation on one line.
        source_tokens: length of the source in tokens, `</s>` included; 0 for a blank sentence, which no model sees.
        complete: the model ended the sentence itself; False if the limit on new tokens cut it off.
        target_tokens: length of the translation in tokens, `</s>` included.
        log_probability: natural logarithm of the translation's probability, as `relpos.training.scoring` computes it;
            None where it was not asked for.
    """

    text: str
    source_tokens: int
    complete: bool
    target_tokens: int = 0
    log_probability: float | None = None

    def gnmt_score(self, alpha: float) -> float:
        """The log-probability divided by ((5 + tokens) / 6)^alpha (Wu et al. 2016, equation 14)."""
        return self.log_probability / ((5 + self.target_tokens) / 6) ** alpha


def translate_sentences(loaded: LoadedModel, sentences: Sequence[str], **options: Any) -> list[Translation]:
    """Translate sentences, never cutting a source, in batches of similar length.

    Args:
        loaded: the model and its tokenizer.
        sentences: source sentences; blank ones come back empty.
        options: those of `translate_n_best` but for n_best, such as beams.

    Returns:
        One Translation per sentence, in the order of `sentences`.

    Raises:
        TranslationError: as `translate_n_best`.
    """
    return [best for best, *_ in translate_n_best(loaded, sentences, n_best=1, **options)]


def translate_n_best(
    loaded: LoadedModel,
    sentences: Sequence[str],
    *,
    n_best: int,
    beams: int | None = None,
    batch_size: int = 32,
    max_new_tokens: int | None = None,
    gnmt_penalty: float | None = None,
    scores: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> list[list[Translation]]:
    """Translate sentences as `translate_sentences` does, and keep several translations of each.

    Args:
        loaded: the model and its tokenizer.
        sentences: source sentences.
        n_best: translations of each sentence, at most the beam size.
        beams: beam size; None takes the model's own.
        batch_size: sentences translated at a time.
        max_new_tokens: limit on each translation; None allows what any translation of that source needs.
        gnmt_penalty: the exponent of GNMT's length penalty, by which the beams that were finished are ranked anew; 0.6
            in Shaw et al. 2018. The search goes by the library's own penalty, n^exponent, with the same exponent. None
            leaves its order, and the model's own penalty.
        scores: give each translation its log-probability, for which the model reads it once more.
        on_progress: called with the number of sentences that each batch finished.

    Returns:
        For each sentence its translations, best first; for a blank one the empty translation alone.

    Raises:
        TranslationError: a number is out of its range, a source is longer than the model's table of learned positions,
            or the engine tells no log-probabilities.
    """
    _check_search(loaded, n_best=n_best, beams=beams, gnmt_penalty=gnmt_penalty, scores=scores)
    check_options(batch_size=batch_size, max_new_tokens=max_new_tokens)
    blank = Translation(text="", source_tokens=0, complete=True, log_probability=0.0 if scores else None)
    translations = [[blank]] * len(sentences)
    filled = [number for number, sentence in enumerate(sentences) if sentence.strip()]
    if on_progress and len(filled) < len(sentences):
        on_progress(len(sentences) - len(filled))
    token_ids = tokenize(loaded, [sentences[number] for number in filled])
    check_lengths(loaded, token_ids)
    by_length = sorted(range(len(filled)), key=lambda position: -len(token_ids[position]))
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        ids = [token_ids[position] for position in batch]
        config = _generation_config(loaded.model, ids, beams, max_new_tokens)
        for position, found in zip(batch, _translate_batch(loaded, ids, config, n_best, gnmt_penalty, scores)):
            translations[filled[position]] = found
        if on_progress:
            on_progress(len(batch))
    return translations


def translate_stream(
    loaded: LoadedModel,
    windows: Iterable[list[str]],
    target: BinaryIO,
    *,
    n_best: int | None = None,
    scores: bool = False,
    warn: Callable[[str], None] = lambda message: None,
    **options: Any,
) -> int:
    """Write one line of UTF-8 for every line that `windows` yields, and flush after each window.

    Args:
        loaded: the model and its tokenizer.
        windows: lists of source sentences.
        target: where the lines are written to.
        n_best: write this many lines for every line, best first, each behind the number of its line and a tab.
        scores: put the log-probability of a translation and its mean per token in front of it, with tabs between.
        warn: is given a sentence for each line that is longer than anything seen in training, as far as the model says
            what that was, and for each translation that the limit on new tokens cut off.
        options: further ones of `translate_n_best`, such as beams.

    Returns:
        The number of source lines.
    """
    count = 0
    for window in windows:
        translations = translate_n_best(loaded, window, n_best=n_best or 1, scores=scores, **options)
        lines = []
        for number, found in enumerate(translations, start=count + 1):
            _warn_about(loaded, number, found[0], warn)
            columns = [str(number)] if n_best else []
            lines += ["\t".join([*columns, *_score_columns(one, scores), one.text]) + "\n" for one in found]
        target.write("".join(lines).encode())
        target.flush()
        count += len(window)
    return count


def _score_columns(translation: Translation, scores: bool) -> list[str]:
    if not scores:
        return []
    total = translation.log_probability
    return [f"{total:.4f}", f"{total / max(translation.target_tokens, 1):.4f}"]


def _check_search(
    loaded: LoadedModel, *, n_best: int, beams: int | None, gnmt_penalty: float | None, scores: bool
) -> None:
    check_options(n_best=n_best, beams=beams)
    size = beams or loaded.model.generation_config.num_beams or 1
    if n_best > size:
        raise TranslationError(f"n_best is {n_best}; it must be at most the number of beams, which is {size}.")
    if gnmt_penalty is not None and not 0 <= gnmt_penalty <= 10:
        raise TranslationError(f"gnmt_penalty is {gnmt_penalty}; it must be between 0 and 10, such as 0.6.")
    if (n_best > 1 or scores or gnmt_penalty is not None) and not isinstance(loaded.model, torch.nn.Module):
        raise TranslationError(
            f"The engine of {loaded.name} gives one translation without its log-probability; several of them, scores "
            "and GNMT's penalty need a model in Transformers."
        )


@torch.inference_mode()
def _translate_batch(
    loaded: LoadedModel,
    token_ids: list[list[int]],
    config: GenerationConfig,
    n_best: int,
    gnmt_penalty: float | None,
    scores: bool,
) -> list[list[Translation]]:
    """The translations of a batch of sources, those of each best first."""
    returned = n_best
    if rerank := gnmt_penalty is not None and (config.num_beams or 1) > 1:
        returned = config.num_beams
        config.update(length_penalty=gnmt_penalty)
    if returned > 1:  # which an engine need not know
        config.update(num_return_sequences=returned)
    inputs = loaded.tokenizer.pad({"input_ids": token_ids}, return_tensors="pt").to(loaded.model.device)
    outputs = loaded.model.generate(**inputs, generation_config=config)  # [batch * returned, 1 + targets]
    lengths, complete = _measure(outputs, config)
    log_probabilities = _log_probabilities(loaded.model, inputs, outputs, lengths) if scores or rerank else None
    texts = loaded.tokenizer.batch_decode(outputs, skip_special_tokens=True)
    translations = [
        Translation(
            text=LINE_BREAKS.sub(" ", text),
            source_tokens=len(token_ids[row // returned]),
            complete=complete[row],
            target_tokens=lengths[row],
            log_probability=log_probabilities[row] if log_probabilities else None,
        )
        for row, text in enumerate(texts)
    ]
    found = [translations[start : start + returned] for start in range(0, len(translations), returned)]
    if rerank:
        found = [sorted(beam, key=lambda one: -one.gnmt_score(gnmt_penalty))[:n_best] for beam in found]
    return found


def _measure(outputs: torch.Tensor, config: GenerationConfig) -> tuple[list[int], list[bool]]:
    """Length of each hypothesis in tokens, its end token included, and whether it has one."""
    tokens = outputs[:, 1:]  # column 0 starts the decoder
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    is_end = torch.isin(tokens, torch.tensor(ends, device=outputs.device))
    before_end = (is_end.cumsum(1) - is_end.long()) == 0
    # a hypothesis without an end has only padding of the longer ones behind it
    padding = (tokens == config.pad_token_id).flip(1).cumprod(1).flip(1).bool() & ~is_end
    return (before_end & ~padding).sum(1).tolist(), is_end.any(1).tolist()


def _log_probabilities(
    model: Any, inputs: Mapping[str, torch.Tensor], outputs: torch.Tensor, lengths: list[int]
) -> list[float]:
    """Log-probability of each row of `outputs`, a few rows at a time: the logits of all would be the largest tensor."""
    returned = len(outputs) // len(inputs["input_ids"])
    rows_at_once = max(MAX_TOKENS // max(outputs.shape[1], inputs["input_ids"].shape[1]), 1)
    totals: list[float] = []
    for rows in torch.arange(len(outputs), device=outputs.device).split(rows_at_once):
        own = {name: tensor[rows // returned] for name, tensor in inputs.items()}
        values = token_log_probabilities(model, own, outputs[rows, :-1], outputs[rows, 1:])
        totals += [sum(row[:length]) for row, length in zip(values.tolist(), lengths[len(totals) :])]
    return totals


def _generation_config(
    model: Any, token_ids: list[list[int]], beams: int | None, max_new_tokens: int | None
) -> GenerationConfig:
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
