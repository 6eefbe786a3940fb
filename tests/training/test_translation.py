"""translation.py: order, blanks, batches, lengths and limits, with a model whose right answers are known."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from relpos import RelPosConfig, RelPosForConditionalGeneration
from relpos.configuration import preset
from relpos.training.loading import LoadedModel, load_model
from relpos.training.translation import TranslationError, translate_n_best, translate_sentences, translate_stream


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


@pytest.fixture(scope="module")
def spelling():
    """A random model of eight words, few enough to write down every translation of at most three tokens."""
    words = ["<pad>", "</s>", *"abcdef"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    torch.manual_seed(3)
    model = RelPosForConditionalGeneration(preset("tiny", vocab_size=8, decoder_vocab_size=8)).double().eval()
    for parameter in model.parameters():
        parameter.data *= 1.5  # or every word would be about as likely as any other
    model.generation_config = GenerationConfig(
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, suppress_tokens=[0], num_beams=64
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    return LoadedModel(model=model, tokenizer=tokenizer, name="spelling")


def every_translation(loaded, source, length):
    """Log-probabilities of all token sequences that end within `length` tokens, or are cut off there, one at a time."""
    inputs = loaded.tokenizer(source, return_tensors="pt")
    found, open_ones = {}, {(): 0.0}
    for place in range(length):
        extended = {}
        for prefix, total in open_ones.items():
            start = torch.tensor([[0, *prefix]])
            with torch.inference_mode():
                values = loaded.model(**inputs, decoder_input_ids=start).logits[0, -1].log_softmax(-1).tolist()
            for token in range(1, 8):
                finished = token == 1 or place == length - 1
                (found if finished else extended)[(*prefix, token)] = total + values[token]
        open_ones = extended
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_gnmts_penalty_ranks_as_all_translations_written_down(spelling, alpha):
    sources = ["a b c", "f", "d d d e"]
    options = {"n_best": 5, "max_new_tokens": 3, "scores": True}
    found = translate_n_best(spelling, sources, gnmt_penalty=alpha, **options)
    for source, beam in zip(sources, found):
        scores = {
            ids: total / ((5 + len(ids)) / 6) ** alpha for ids, total in every_translation(spelling, source, 3).items()
        }
        best = sorted(scores, key=scores.get, reverse=True)[:5]
        assert [one.text for one in beam] == [spelling.tokenizer.decode(ids, skip_special_tokens=True) for ids in best]
        assert [one.gnmt_score(alpha) for one in beam] == pytest.approx([scores[ids] for ids in best], abs=1e-4)
        assert [one.target_tokens for one in beam] == list(map(len, best))
        assert [one.complete for one in beam] == [ids[-1] == 1 for ids in best]


def test_gnmts_penalty_is_another_than_the_librarys(spelling):
    """Of the same exponent, it favours long translations less."""
    options = {"n_best": 20, "max_new_tokens": 3}
    spelling.model.generation_config.length_penalty = 1.5
    (plain,), (ranked,) = (
        translate_n_best(spelling, ["a b c"], **options, **gnmt) for gnmt in ({}, {"gnmt_penalty": 1.5})
    )
    spelling.model.generation_config.length_penalty = 1.0
    assert sum(one.target_tokens for one in ranked) < sum(one.target_tokens for one in plain)


def test_n_best_translations_come_best_first_and_differ(loaded, learned_pairs):
    sources = ["", *(source for source, _ in learned_pairs)]
    found = translate_n_best(loaded, sources, n_best=3, beams=4, batch_size=3)
    assert [beam[0].text for beam in found[1:]] == [target for _, target in learned_pairs]
    assert [one.text for one in found[0]] == [""]
    assert all(len({one.text for one in beam}) == 3 for beam in found[1:])
    assert all(one.log_probability is None for beam in found for one in beam)
    scored = translate_n_best(loaded, sources, n_best=3, beams=4, scores=True, max_new_tokens=20)
    penalty = loaded.model.generation_config.length_penalty or 1.0
    for beam in scored:
        ranks = [one.log_probability / max(one.target_tokens, 1) ** penalty for one in beam]
        assert ranks == sorted(ranks, reverse=True)


def test_lines_of_n_best_have_the_number_and_the_scores(loaded):
    target = io.BytesIO()
    count = translate_stream(loaded, [["Yes"], ["", "Open the file."]], target, n_best=2, beams=2, scores=True)
    assert count == 3
    rows = [line.split("\t") for line in target.getvalue().decode().splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"]
    assert [rows[place][3] for place in (0, 2, 3)] == ["Ja", "", "Öffnen Sie die Datei."]
    ((best,),) = translate_n_best(loaded, ["Yes"], n_best=1, beams=2, scores=True)
    assert [float(value) for value in rows[0][1:3]] == pytest.approx(
        [best.log_probability, best.log_probability / best.target_tokens], abs=1e-4
    )


def test_scores_alone_stand_before_the_one_translation(loaded):
    target = io.BytesIO()
    translate_stream(loaded, [["Yes"]], target, scores=True)
    total, per_token, text = target.getvalue().decode().removesuffix("\n").split("\t")
    assert text == "Ja"
    assert float(total) < float(per_token) < 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_best": 5, "beams": 4}, "n_best is 5; it must be at most the number of beams, which is 4"),
        ({"n_best": 2, "beams": 1}, "which is 1"),
        ({"n_best": 0}, "n_best is 0"),
        ({"n_best": 1, "gnmt_penalty": -1.0}, "gnmt_penalty is -1.0"),
        ({"n_best": 1, "gnmt_penalty": float("nan")}, "gnmt_penalty is nan"),
    ],
)
def test_searches_that_are_none(loaded, options, message):
    with pytest.raises(TranslationError, match=message):
        translate_n_best(loaded, ["Yes"], **options)


@pytest.mark.parametrize("options", [{"n_best": 2}, {"n_best": 1, "scores": True}, {"n_best": 1, "gnmt_penalty": 0.6}])
def test_an_engine_without_log_probabilities_says_so(loaded, options):
    engine = SimpleNamespace(generation_config=GenerationConfig(num_beams=4))
    with pytest.raises(TranslationError, match="need a model in Transformers"):
        translate_n_best(replace(loaded, model=engine), ["Yes"], **options)
