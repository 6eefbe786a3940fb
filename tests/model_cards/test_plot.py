"""The picture of what a model learned about distance."""

import pytest
import torch
from transformers import AutoTokenizer

from relpos import RelPosForConditionalGeneration
from relpos.configuration import preset
from relpos.model_cards import plot
from relpos.model_cards.plot import PlotError, attention_bias, plot_attention_bias


@pytest.fixture
def model_and_tokenizer(learned_model):
    return RelPosForConditionalGeneration.from_pretrained(learned_model), AutoTokenizer.from_pretrained(learned_model)


def test_bias_is_what_queries_give_to_an_offset(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    source = "Yes"
    bias = attention_bias(model, tokenizer, [source], ["Ja"])
    attention, queries = model.model.encoder.layers[0].self_attn, []
    attention.q_proj.register_forward_hook(lambda module, inputs, output: queries.append(output))
    model.get_encoder()(**tokenizer(source, return_tensors="pt"))
    heads = queries[0][0].view(-1, attention.num_heads, attention.head_dim)  # [queries, heads, dim]
    table = attention.relative_keys if attention.relative_keys.dim() == 3 else attention.relative_keys[None]
    expected = (heads[:, :, None] * table).sum(-1).mean(0) * attention.head_dim**-0.5
    torch.testing.assert_close(bias["encoder"][0], expected - expected.mean(-1, keepdim=True), atol=1e-5, rtol=1e-4)


def test_the_decoder_has_no_offsets_ahead_and_no_hook_stays(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    bias = attention_bias(model, tokenizer, ["Yes"] * 2, ["Ja"] * 2)
    k = model.config.max_relative_position
    assert bias["decoder"][..., k + 1 :].isnan().all()
    assert bias["decoder"][..., : k + 1].isfinite().all()
    assert not any(module._forward_hooks for module in model.modules())


def test_a_prefix_is_read_before_every_source(model_and_tokenizer):
    _, tokenizer = model_and_tokenizer
    targets = ["Ja", "Speichern Sie die Datei."]
    expected = attention_bias(*model_and_tokenizer, ["Save the file.", "Save the selected row"], targets)
    prefix = tokenizer("Save")["input_ids"][:-1]
    found = attention_bias(*model_and_tokenizer, [" the file.", " the selected row"], targets, source_prefix=prefix)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_picture_is_drawn_whole(model_and_tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    titles, save = [], plot.save_figure
    monkeypatch.setattr(
        plot, "save_figure", lambda figure, path: titles.append(figure.get_suptitle()) or save(figure, path)
    )
    bias = attention_bias(*model_and_tokenizer, ["Yes"], ["Ja"])
    for title in (None, "sources for de"):
        path = plot_attention_bias(bias, tmp_path / "positions.png", title=title)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert [file.name for file in tmp_path.iterdir()] == ["positions.png"]
    assert titles == ["", "sources for de"]


def test_what_cannot_be_drawn_is_said(model_and_tokenizer, tmp_path):
    model, tokenizer = model_and_tokenizer
    with pytest.raises(PlotError, match=r"must end in \.png"):
        plot_attention_bias({}, tmp_path / "positions.gif")
    with pytest.raises(PlotError, match="0 sources and 1 targets"):
        attention_bias(model, tokenizer, [], ["Ja"])
    blind = RelPosForConditionalGeneration(preset("tiny", relative_position_keys=False))
    with pytest.raises(PlotError, match="no relative positions in its attention scores"):
        attention_bias(blind, tokenizer, ["Yes"], ["Ja"])
