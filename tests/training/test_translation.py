"""translation.py: order, blanks, batches, lengths and limits, with a model whose right answers are known."""

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig

from relpos import RelPosConfig, RelPosForConditionalGeneration
from relpos.training.loading import load_model
from relpos.training.translation import TranslationError, translate_sentences, translate_stream


@pytest.fixture(scope="module")
def loaded(learned_model):
    return load_model(str(learned_model))


@settings(max_examples=15)
@given(data=st.data())
def test_every_sentence_has_its_translation_at_its_place(loaded, learned_pairs, data):
    answers = {**dict(learned_pairs), "": "", " \t": ""}
    sentences = data.draw(st.lists(st.sampled_from(sorted(answers)), max_size=12))
    batch_size = data.draw(st.integers(1, 5))
    beams = data.draw(st.sampled_from([None, 1, 3]))
    done = []
    found = translate_sentences(loaded, sentences, batch_size=batch_size, beams=beams, on_progress=done.append)
    assert [translation.text for translation in found] == [answers[sentence] for sentence in sentences]
    assert all(translation.complete for translation in found)
    assert sum(done) == len(sentences)


def test_source_is_never_cut(loaded, monkeypatch):
    monkeypatch.setattr(loaded.tokenizer, "model_max_length", 5)
    (translation,) = translate_sentences(loaded, ["Save the file. " * 300])
    assert translation.source_tokens > 1000


def test_limit_of_new_tokens(loaded):
    (cut,) = translate_sentences(loaded, ["The table is empty."], max_new_tokens=2)
    assert not cut.complete
    assert "Die Tabelle ist leer.".startswith(cut.text)


@pytest.mark.parametrize(
    ("own", "given", "limit"),
    [
        ({"max_length": 101}, None, None),
        ({"max_new_tokens": 100}, None, None),
        ({"max_length": 5}, None, None),
        ({"max_new_tokens": 5}, None, None),
        ({}, None, None),
        ({"max_length": 101}, 7, 7),
        ({"max_new_tokens": 100}, 7, 7),
    ],
)
def test_limit_is_the_users_or_twice_the_source_and_50(learned_model, monkeypatch, capfd, own, given, limit):
    """With an end-of-sentence token that never comes, the model runs into the limit."""
    loaded = load_model(str(learned_model))
    loaded.model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **own)
    loaded.model.generation_config.suppress_tokens = [1]
    lengths = []
    decode = loaded.tokenizer.batch_decode
    monkeypatch.setattr(
        loaded.tokenizer,
        "batch_decode",
        lambda tokens, **options: lengths.append(tokens.shape[1]) or decode(tokens, **options),
    )
    (translation,) = translate_sentences(loaded, ["Yes"], max_new_tokens=given)
    assert lengths == [(limit or 2 * translation.source_tokens + 50) + 1]  # and the token that starts the decoder
    assert not translation.complete
    assert "Both `max_new_tokens`" not in capfd.readouterr().err


def test_output_has_no_line_breaks(loaded, monkeypatch):
    texts = ["one\ntwo\r\nthree\u2028four"]
    monkeypatch.setattr(loaded.tokenizer, "batch_decode", lambda *args, **kwargs: texts)
    (translation,) = translate_sentences(loaded, ["Yes"])
    assert translation.text == "one two three four"


@pytest.mark.parametrize("option", ["beams", "batch_size", "max_new_tokens"])
def test_numbers_below_one_are_refused(loaded, option):
    with pytest.raises(TranslationError, match=f"{option} is 0; it must be at least 1"):
        translate_sentences(loaded, ["Yes"], **{option: 0})


def test_learned_positions_refuse_a_source_that_is_too_long(loaded, learned_model):
    tokenizer = AutoTokenizer.from_pretrained(learned_model)
    config = RelPosConfig(
        vocab_size=len(tokenizer), d_model=8, absolute_position="learned", max_position_embeddings=12, encoder_layers=1
    )
    short = replace(loaded, model=RelPosForConditionalGeneration(config).eval(), name="short")
    with pytest.raises(TranslationError, match=r"too long for short, whose learned absolute positions end at 12\."):
        translate_sentences(short, ["Save the file. " * 20])


def test_stream_writes_a_line_for_a_line_and_names_the_unusual_ones(loaded, learned_pairs):
    long_line = " ".join(source for source, _ in learned_pairs)
    target, warnings = io.BytesIO(), []
    count = translate_stream(loaded, [["Yes", ""], [long_line, "Yes"]], target, warn=warnings.append)
    lines = target.getvalue().decode().split("\n")
    assert count == 4
    assert len(lines) == 5
    assert [lines[0], lines[1], lines[3], lines[4]] == ["Ja", "", "Ja", ""]
    longest = loaded.model.config.longest_training_source
    tokens = len(loaded.tokenizer(long_line)["input_ids"])
    assert warnings[0] == (
        f"line 3 has {tokens} tokens, more than any source seen in training ({longest}); it was translated whole"
    )
    assert all("line 3" in warning for warning in warnings)


def test_stream_names_what_was_cut_off(loaded):
    warnings = []
    translate_stream(loaded, [["The table is empty."]], io.BytesIO(), max_new_tokens=1, warn=warnings.append)
    assert warnings == ["line 1: the translation was cut off at the limit on new tokens"]
