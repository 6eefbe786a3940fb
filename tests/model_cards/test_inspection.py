"""inspection.py: counts that add up, positions in words, and the drawing of the tables."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MarianConfig

from relpos.configuration import preset, presets
from relpos.model_cards.inspection import BARS, count_parameters, describe_positions, draw_bars, inspect_model


@pytest.mark.parametrize("name", presets())
def test_counts_are_those_of_the_model(name):
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(preset(name))
    counts = count_parameters(model)
    total = counts.pop("total")
    assert total == sum(counts.values()) == model.num_parameters()


def test_position_parameters_of_the_papers_big_model():
    """Section 4.1: k = 8, tables shared by the heads, so 17 vectors of 64 in each of 12 layers, for keys and values."""
    facts = inspect_model(preset("big"), name="big")
    assert facts["parameters"]["positions"] == 12 * 2 * 17 * 64
    assert {tuple(table["shape"]) for table in facts["tables"]} == {(17, 64)}
    assert len(facts["tables"]) == 24


def test_untied_output_and_separate_embeddings_count_apart():
    tied = inspect_model(preset("tiny"), name="tiny")["parameters"]
    config = preset("tiny", tie_word_embeddings=False, share_encoder_decoder_embeddings=False)
    apart = inspect_model(config, name="apart")["parameters"]
    assert apart["embeddings"] == 2 * tied["embeddings"]
    assert apart["output"] == tied["embeddings"]
    assert apart["encoder"] == tied["encoder"]


def test_learned_absolute_positions_are_position_parameters():
    config = preset("tiny", absolute_position="learned", max_position_embeddings=50)
    facts = inspect_model(config, name="learned")
    assert any(table["shape"] == [50, config.d_model] for table in facts["tables"])
    assert "for at most 50 tokens" in facts["positions"][-1]


@pytest.mark.parametrize(
    ("changes", "words", "absent"),
    [
        ({}, ["k = 4", "9 learned vectors", "keys (scores) and the values (outputs)", "shared by the heads"], "same"),
        ({"relative_position_values": False}, ["keys (scores)"], "values"),
        ({"relative_position_keys": False}, ["values (outputs)"], "keys"),
        ({"relative_position_per_head": True}, ["one table per head"], "shared"),
        ({"relative_position_tied": True}, ["the same table for both"], "per head"),
        ({"max_relative_position": None, "absolute_position": "sinusoidal"}, ["no relative", "Sinusoidal"], "clipped"),
    ],
)
def test_positions_in_words(changes, words, absent):
    text = " ".join(describe_positions(preset("tiny", **changes)))
    assert all(word in text for word in words)
    assert absent not in text


def test_weights_are_looked_at_where_they_are(learned_model):
    config = preset("tiny")
    facts = inspect_model(_config_of(learned_model), name="learned", folder=learned_model)
    assert facts["architecture"]["weights"].startswith("F32, ")
    weights = AutoModelForSeq2SeqLM.from_pretrained(learned_model).state_dict()
    for table in facts["tables"]:
        assert table["norms"] == pytest.approx(weights[table["name"]].norm(dim=-1).tolist(), rel=1e-5)
    assert all(table["norms"] is None for table in inspect_model(config, name="tiny")["tables"])


def test_other_models_have_no_relative_positions():
    config = MarianConfig(vocab_size=50, d_model=8, encoder_layers=1, decoder_layers=1, pad_token_id=0)
    config.encoder_attention_heads = config.decoder_attention_heads = 2
    assert describe_positions(config) == [
        "There are no relative positions.",
        "The model is no RelPos model but 'marian'.",
    ]
    assert inspect_model(config, name="marian")["parameters"]["total"] > 0


def test_bars():
    assert draw_bars([0.0, 0.5, 1.0]) == BARS[0] + BARS[4] + BARS[-1]
    assert draw_bars([2.0, 2.0]) == BARS[0] * 2
    assert draw_bars([]) == ""
    wide = draw_bars([float(value == 100) for value in range(201)])
    assert wide.startswith("…")
    assert wide.endswith("…")
    assert wide[len(wide) // 2] == BARS[-1]  # the token itself stays in the middle


def _config_of(folder):
    from relpos import RelPosConfig

    return RelPosConfig.from_pretrained(folder)
