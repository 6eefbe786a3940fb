"""The model: positions, masks, loss, initial values, outputs, resizing."""

import math

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from relpos import RelPosForConditionalGeneration, RelPosModel
from relpos.configuration import preset

VARIANTS = {
    "shared": {},
    "keys": {"relative_position_values": False},
    "values": {"relative_position_keys": False},
    "per-head": {"relative_position_per_head": True},
    "tied": {"relative_position_tied": True},
    "k0": {"max_relative_position": 0},
    "post-norm": {"normalize_before": False},
    "sinusoidal": {"max_relative_position": None, "absolute_position": "sinusoidal"},
    "relative-and-learned": {"absolute_position": "learned", "max_position_embeddings": 64},
    "no-bias": {"attention_bias": False, "mlp_bias": False, "lm_head_bias": True},
    "separate": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 200, "scale_embedding": False},
}


def build(name="shared", **fields):
    return RelPosForConditionalGeneration(preset("tiny", **{**VARIANTS[name], **fields})).eval()


def batch(model, size=3, sources=9, targets=7):
    high = model.config.decoder_vocab_size
    return (
        torch.randint(2, model.config.vocab_size, (size, sources)),
        torch.randint(2, high, (size, targets)),
    )


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_on_either_side_changes_nothing(name, implementation):
    model = build(name)
    model.set_attn_implementation(implementation)
    source, target = batch(model, size=1)
    alone = model(input_ids=source, decoder_input_ids=target).logits
    for sides in [("left", "left"), ("right", "right"), ("left", "right"), ("right", "left")]:
        source_mask, target_mask = torch.zeros(2, 9 + 4), torch.zeros(2, 7 + 3)
        sources, targets = torch.zeros(2, 9 + 4, dtype=torch.long), torch.zeros(2, 7 + 3, dtype=torch.long)
        place = lambda side, length, total: slice(total - length, total) if side == "left" else slice(0, length)
        at, to = place(sides[0], 9, 13), place(sides[1], 7, 10)
        sources[0, at], source_mask[0, at] = source[0], 1
        targets[0, to], target_mask[0, to] = target[0], 1
        sources[1], source_mask[1] = torch.randint(2, 200, (13,)), 1
        targets[1], target_mask[1] = torch.randint(2, 200, (10,)), 1
        padded = model(
            input_ids=sources,
            attention_mask=source_mask,
            decoder_input_ids=targets,
            decoder_attention_mask=target_mask,
        ).logits
        torch.testing.assert_close(padded[:1, to], alone, atol=1e-5, rtol=1e-5)
        assert padded.isfinite().all()


@pytest.mark.parametrize("name", VARIANTS)
def test_eager_and_sdpa_agree(name):
    model = build(name)
    source, target = batch(model)
    mask = torch.ones_like(source)
    mask[0, 5:] = 0
    logits = {}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        logits[implementation] = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    torch.testing.assert_close(logits["eager"], logits["sdpa"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_source_that_is_all_padding_gives_finite_numbers_and_zero_attention(name, implementation):
    model = build(name)
    model.set_attn_implementation(implementation)
    source, target = batch(model)
    mask = torch.ones_like(source)
    mask[1] = 0
    outputs = model(input_ids=source, attention_mask=mask, decoder_input_ids=target, output_attentions=True)
    assert outputs.logits.isfinite().all()
    assert not any(weights[1].any() for weights in outputs.cross_attentions + outputs.encoder_attentions)
    without = model(input_ids=source, attention_mask=mask, decoder_input_ids=target)
    torch.testing.assert_close(without.logits, outputs.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_decoder_does_not_look_ahead(name):
    model = build(name)
    source, target = batch(model)
    changed = target.clone()
    changed[:, 4:] = 5
    logits = [model(input_ids=source, decoder_input_ids=t).logits for t in (target, changed)]
    torch.testing.assert_close(logits[0][:, :4], logits[1][:, :4])
    assert not torch.allclose(logits[0][:, 4:], logits[1][:, 4:])


def test_the_order_of_the_source_matters_only_with_positions():
    for name, blind in [("shared", False), ("sinusoidal", False), ("k0", True)]:
        model = build(name)
        source, target = batch(model, size=1)
        flipped = [model(input_ids=s, decoder_input_ids=target).logits for s in (source, source.flip(1))]
        assert torch.allclose(*flipped, atol=1e-5) is blind, name


def test_a_token_sees_which_side_a_neighbour_is_on():
    """The model's own tables, set so that the encoder's first layer copies from exactly one back: only sign j - i will do."""
    model = RelPosModel(
        preset("tiny", encoder_layers=1, encoder_attention_heads=1, relative_position_values=False)
    ).eval()
    attention = model.encoder.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        attention.q_proj.bias.fill_(1.0)
        attention.relative_keys.zero_()
        attention.relative_keys[model.config.max_relative_position - 1] = 100.0  # one back
    source = torch.randint(2, 200, (1, 6))
    weights = model(input_ids=source, decoder_input_ids=source, output_attentions=True).encoder_attentions[0]
    assert weights[0, 0, 1:].argmax(-1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["shared", "sinusoidal"])
def test_attentions_are_returned(name, implementation):
    model = build(name)
    model.set_attn_implementation(implementation)
    source, target = batch(model)
    outputs = model(
        input_ids=source, decoder_input_ids=target, output_attentions=True, output_hidden_states=True, use_cache=True
    )
    layers, heads = model.config.encoder_layers, model.config.encoder_attention_heads
    shapes = {
        "encoder_attentions": (3, heads, 9, 9),
        "decoder_attentions": (3, heads, 7, 7),
        "cross_attentions": (3, heads, 7, 9),
    }
    for field, shape in shapes.items():
        assert [tuple(weights.shape) for weights in outputs[field]] == [shape] * layers, field
        for weights in outputs[field]:
            torch.testing.assert_close(weights.sum(-1), torch.ones(shape[:-1]), atol=1e-5, rtol=0)
    assert len(outputs.encoder_hidden_states) == len(outputs.decoder_hidden_states) == layers + 1
    plain = model(input_ids=source, decoder_input_ids=target)
    assert plain.encoder_attentions is None
    torch.testing.assert_close(plain.logits, outputs.logits, atol=1e-5, rtol=1e-5)


def test_tuples():
    model = build()
    source, target = batch(model)
    as_dict = model(input_ids=source, decoder_input_ids=target)
    as_tuple = model(input_ids=source, decoder_input_ids=target, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], as_dict.logits)
    encoded = model.get_encoder()(source, return_dict=False)
    assert torch.equal(model(encoder_outputs=encoded, decoder_input_ids=target).logits, as_dict.logits)


@pytest.mark.parametrize("pooled", [None, 1])
def test_an_encoders_output_of_another_class(pooled):
    model = build()
    source, target = batch(model)
    expected = model(input_ids=source, decoder_input_ids=target, output_hidden_states=True)
    encoded = model.get_encoder()(source, output_hidden_states=True)
    encoded = BaseModelOutputWithPooling(encoded.last_hidden_state, pooled and encoded[0][:, 0], encoded.hidden_states)
    for outputs in (encoded, dict(encoded)):
        found = model(encoder_outputs=outputs, decoder_input_ids=target)
        assert torch.equal(found.logits, expected.logits)
        for states, wanted in zip(found.encoder_hidden_states, expected.encoder_hidden_states, strict=True):
            assert torch.equal(states, wanted)


def test_embeddings_in_place_of_ids():
    model = build()
    source, target = batch(model)
    expected = model(input_ids=source, decoder_input_ids=target).logits
    table = model.get_input_embeddings()
    given = model(inputs_embeds=table(source), decoder_inputs_embeds=table(target)).logits
    assert torch.equal(given, expected)
    with pytest.raises(ValueError, match="either `input_ids` or `inputs_embeds`"):
        model(input_ids=source, inputs_embeds=table(source), decoder_input_ids=target)
    with pytest.raises(ValueError, match="either `input_ids` or `inputs_embeds`"):
        model(input_ids=source)


def test_loss_is_the_mean_over_the_labels_that_count():
    model = build()
    source, labels = batch(model)
    labels[0, 4:], labels[1, 2:] = -100, -100
    outputs = model(input_ids=source, labels=labels)
    log_probabilities = outputs.logits.double().log_softmax(-1)
    counted = [-log_probabilities[b, t, labels[b, t]] for b in range(3) for t in range(7) if labels[b, t] != -100]
    torch.testing.assert_close(outputs.loss.double(), sum(counted) / len(counted), atol=1e-5, rtol=1e-5)
    divided = model(input_ids=source, labels=labels, num_items_in_batch=torch.tensor(50)).loss
    torch.testing.assert_close(divided.double(), sum(counted) / 50, atol=1e-5, rtol=1e-5)
    assert outputs.cache is None

    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted[0].tolist() == [0, *labels[0, :4].tolist(), 0, 0]
    given = model(input_ids=source, labels=labels, decoder_input_ids=shifted).loss
    torch.testing.assert_close(given, outputs.loss)
    assert model.prepare_decoder_input_ids_from_labels(labels[:, :0]).shape == (3, 0)


def test_no_cache_is_built_in_training():
    model = build().train()
    source, target = batch(model)
    assert model(input_ids=source, decoder_input_ids=target).cache is None
    assert model.eval()(input_ids=source, decoder_input_ids=target).cache is not None


def test_initial_values():
    model = RelPosForConditionalGeneration(preset("base", encoder_layers=1, decoder_layers=1))
    embeddings = model.model.shared.weight
    assert not embeddings[0].any()
    assert embeddings[1:].std().item() == pytest.approx(512**-0.5, rel=0.02)
    table = model.model.encoder.layers[0].self_attn.relative_keys
    assert table.shape == (8, 33, 64)
    bound = math.sqrt(6 / (33 + 64))
    assert bound * 0.99 < table.abs().max().item() <= bound * 1.0001
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            bound = math.sqrt(6 / (module.in_features + module.out_features))
            assert bound * 0.99 < module.weight.abs().max().item() <= bound * 1.0001
            assert module.bias is None or not module.bias.any()
        if isinstance(module, nn.LayerNorm):
            assert module.eps == model.config.layer_norm_eps
            assert (module.weight == 1).all()
            assert not module.bias.any()
    unscaled = RelPosModel(preset("tiny", scale_embedding=False, init_std=0.07, vocab_size=5000))
    assert unscaled.shared.weight[1:].std().item() == pytest.approx(0.07, rel=0.02)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_is_initialised_and_trained(name):
    config = preset("tiny", **VARIANTS[name])
    with torch.device("meta"):
        empty = RelPosForConditionalGeneration(config)
    model = empty.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    for module in model.modules():
        module._is_hf_initialized = False
    for parameter in model.parameters():
        parameter._is_hf_initialized = False
    model.init_weights()
    assert all(p.isfinite().all() for p in model.parameters())
    source, labels = batch(model)
    model(input_ids=source, labels=labels).loss.backward()
    untrained = {n for n, p in model.named_parameters() if p.grad is None}
    assert not untrained
    flat = {n for n, p in model.named_parameters() if not p.grad.any()}
    # a softmax does not see what all its scores have in common, and with one row for all pairs a^K is such
    assert all("k_proj.bias" in n or (name == "k0" and "relative_keys" in n) for n in flat), flat


def test_gradient_checkpointing_gives_the_same_gradients():
    model = build("per-head").train()
    source, labels = batch(model)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(input_ids=source, labels=labels).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(plain, checkpointed)


def test_any_length_works_with_relative_positions():
    model = build()
    long = torch.randint(2, 200, (1, 700))
    assert model(input_ids=long, decoder_input_ids=long).logits.isfinite().all()


def test_a_learned_table_that_is_too_short_says_so():
    model = build("relative-and-learned")
    long, short = torch.randint(2, 200, (1, 65)), torch.randint(2, 200, (1, 5))
    with pytest.raises(ValueError, match="`max_position_embeddings` is 64"):
        model(input_ids=long, decoder_input_ids=short)
    with pytest.raises(ValueError, match="`max_position_embeddings` is 64"):
        model(input_ids=short, decoder_input_ids=long)
    with pytest.raises(ValueError, match="`max_position_embeddings` is 64"):
        model.generate(short, max_new_tokens=80, min_new_tokens=80)
    with pytest.raises(ValueError, match="`max_position_embeddings` is 64"):
        model.generate(short, max_new_tokens=80, cache_implementation="static", disable_compile=True)
    assert model.generate(short, max_new_tokens=63, min_new_tokens=63).shape == (1, 64)


def test_sinusoidal_positions_are_those_of_vaswani():
    from relpos.modeling_relpos import RelPosSinusoidalPositions

    table = RelPosSinusoidalPositions(6)(torch.tensor([[0, 1, 50]]))[0].double()
    for position, vector in zip([0, 1, 50], table):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert vector[i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert vector[3 + i].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_empty_sequences_and_batches():
    model = build()
    model.set_attn_implementation("eager")  # the library's own sdpa function, in cross-attention, takes no empty tensor
    source, target = batch(model)
    assert model(input_ids=source[:0], decoder_input_ids=target[:0]).logits.shape == (0, 7, 256)
    assert model(input_ids=source, decoder_input_ids=target[:, :0]).logits.shape == (3, 0, 256)
    assert model(input_ids=source[:, :0], decoder_input_ids=target).logits.isfinite().all()


def test_resizing_a_shared_vocabulary():
    model = build()
    source, target = batch(model)
    before = model(input_ids=source, decoder_input_ids=target).logits
    model.resize_token_embeddings(300, mean_resizing=False)
    assert model.config.vocab_size == model.config.decoder_vocab_size == 300
    after = model(input_ids=source, decoder_input_ids=target).logits
    assert after.shape[-1] == 300
    torch.testing.assert_close(after[..., :256], before)
    tables = {id(t) for t in (model.model.shared.weight, model.model.encoder.embed_tokens.weight)}
    tables |= {id(model.model.decoder.embed_tokens.weight), id(model.lm_head.weight)}
    assert len(tables) == 1


@pytest.mark.parametrize("tie", [True, False])
def test_resizing_separate_vocabularies(tie):
    model = build("separate", tie_word_embeddings=tie, lm_head_bias=True)
    source, target = batch(model)
    before = model(input_ids=source, decoder_input_ids=target).logits
    model.resize_token_embeddings(300, mean_resizing=False)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (300, 200)
    torch.testing.assert_close(model(input_ids=source, decoder_input_ids=target).logits, before)
    model.resize_decoder_token_embeddings(210)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (300, 210)
    after = model(input_ids=source, decoder_input_ids=target).logits
    assert after.shape[-1] == 210
    torch.testing.assert_close(after[..., :200], before)
    assert (model.lm_head.weight is model.model.decoder.embed_tokens.weight) is tie
    model(input_ids=torch.tensor([[299]]), decoder_input_ids=torch.tensor([[209]]))


def test_resizing_the_decoder_alone_needs_its_own_vocabulary():
    with pytest.raises(ValueError, match="share_encoder_decoder_embeddings"):
        build().resize_decoder_token_embeddings(300)
