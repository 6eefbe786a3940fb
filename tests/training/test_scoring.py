"""scoring.py: log-probabilities equal to one pair at a time in float64, whatever the batches; order, streaming, faults."""

import io
import json
import math

import pytest
import torch

from relpos.training import scoring
from relpos.training.loading import load_model
from relpos.training.scoring import score_pairs, write_scores
from relpos.training.sentences import TranslationError
from relpos.training.translation import translate_n_best

STRANGE = [("Yes", "Nein"), ("", "Ja"), ("Yes", ""), ("Save the file. " * 20, "Speichern " * 30)]


@pytest.fixture(scope="module")
def loaded(learned_model):
    return load_model(str(learned_model))


@pytest.fixture(scope="module")
def expected(loaded, learned_pairs):
    """The literal sum over the tokens of one pair alone, in float64."""
    model = load_model(loaded.name).model.double()
    values = []
    for source, target in learned_pairs + STRANGE:
        inputs = loaded.tokenizer(source, return_tensors="pt")
        labels = loaded.tokenizer(target)["input_ids"]
        start = torch.tensor([[model.config.decoder_start_token_id, *labels[:-1]]])
        with torch.inference_mode():
            probabilities = model(**inputs, decoder_input_ids=start).logits[0].softmax(-1)
        values.append([math.log(probabilities[place, token]) for place, token in enumerate(labels)])
    return values


@pytest.mark.parametrize(("max_tokens", "window"), [(4096, 4096), (40, 4096), (1, 4096), (100, 5)])
def test_every_pair_has_its_log_probability_at_its_place(
    loaded, learned_pairs, expected, monkeypatch, max_tokens, window
):
    monkeypatch.setattr(scoring, "PAIRS_PER_WINDOW", window)
    pairs = learned_pairs + STRANGE
    done = []
    scores = list(score_pairs(loaded, pairs, max_tokens=max_tokens, on_progress=done.append))
    assert sum(done) == len(pairs)
    for score, values in zip(scores, expected, strict=True):
        assert score.token_log_probabilities == pytest.approx(values, abs=2e-4)
        assert score.log_probability == pytest.approx(sum(values), abs=1e-3)
        assert score.per_token == pytest.approx(sum(values) / len(values), abs=2e-4)


def test_what_was_learned_is_likely_and_what_was_not_is_not(loaded, learned_pairs):
    right = list(score_pairs(loaded, learned_pairs))
    wrong = list(score_pairs(loaded, [(source, "Ja, die Spalte.") for source, _ in learned_pairs]))
    assert all(score.per_token > -0.1 for score in right)
    assert all(score.per_token < -1 for score in wrong)


def test_batches_keep_the_budget_and_lose_nothing():
    sources = [[0] * length for length in (3, 9, 1, 4, 4, 30, 2)]
    targets = [[0] * length for length in (2, 3, 8, 4, 5, 1, 2)]
    batches = list(scoring._batches(sources, targets, 20))
    assert sorted(row for batch in batches for row in batch) == list(range(7))
    longest = [max(len(source), len(target)) for source, target in zip(sources, targets)]
    sizes = [len(batch) * max(longest[row] for row in batch) for batch in batches]
    assert sizes[0] == 30  # longer than the budget, alone
    assert all(size <= 20 for size in sizes[1:])


def test_pairs_are_taken_as_they_are_needed(loaded, monkeypatch):
    monkeypatch.setattr(scoring, "PAIRS_PER_WINDOW", 3)
    taken = []
    scores = score_pairs(loaded, (taken.append(number) or ("Yes", "Ja") for number in range(1_000_000)))
    assert [next(scores).log_probability for _ in range(4)]
    assert len(taken) == 6
    assert not list(score_pairs(loaded, []))


def test_a_search_gives_the_same_log_probabilities(loaded, learned_pairs):
    sources = [source for source, _ in learned_pairs]
    found = translate_n_best(loaded, sources, n_best=3, beams=4, scores=True)
    inputs = loaded.tokenizer(sources, padding=True, return_tensors="pt")
    options = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.0, "do_sample": False}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    plain = loaded.model.generate(**inputs, **options)
    by_text = dict(
        zip(loaded.tokenizer.batch_decode(plain.sequences, skip_special_tokens=True), plain.sequences_scores)
    )
    shared = [one for beam in found for one in beam if one.text in by_text]
    assert len(shared) > 10
    for one in shared:
        assert one.log_probability == pytest.approx(by_text[one.text].item(), abs=1e-3)


def test_lines(loaded):
    target = io.BytesIO()
    (score,) = score_pairs(loaded, [("Yes", "Ja")])
    write_scores([score], target)
    write_scores([score], target, as_json=True)
    text, line = target.getvalue().decode().splitlines()
    assert [float(column) for column in text.split("\t")] == pytest.approx(
        [score.log_probability, score.per_token], abs=1e-4
    )
    assert json.loads(line)["token_log_probabilities"] == pytest.approx(score.token_log_probabilities)


def test_what_cannot_be_scored(loaded):
    with pytest.raises(TranslationError, match="max_tokens is 0"):
        list(score_pairs(loaded, [("Yes", "Ja")], max_tokens=0))
