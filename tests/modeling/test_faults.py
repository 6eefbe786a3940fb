"""Inputs and checkpoints at or beyond the edge: the right answer, or one clear error before any work."""

import json
import re
import shutil

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from relpos import RelPosConfig, RelPosForConditionalGeneration
from relpos.configuration import preset

VARIANTS = {
    "shared": {},
    "per-head": {"relative_position_per_head": True},
    "tied": {"relative_position_tied": True},
    "k0": {"max_relative_position": 0},
    "sinusoidal": {"max_relative_position": None, "absolute_position": "sinusoidal"},
    "relative-and-learned": {"absolute_position": "learned", "max_position_embeddings": 64},
}
IMPLEMENTATIONS = ["eager", "sdpa"]


def build(name="shared", implementation="sdpa", **fields):
    model = RelPosForConditionalGeneration(preset("tiny", **{**VARIANTS[name], **fields})).eval()
    model.set_attn_implementation(implementation)
    return model


def ids(*shape):
    return torch.randint(2, 200, shape)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("sizes", [(0, 5, 4), (2, 0, 4), (2, 5, 0), (2, 0, 0), (1, 1, 1), (0, 0, 0)], ids=str)
def test_empty_batches_and_lengths_of_zero_and_one(name, implementation, sizes):
    batch, source_length, target_length = sizes
    model = build(name, implementation).train()
    sources, targets = ids(batch, source_length), ids(batch, target_length)
    outputs = model(input_ids=sources, attention_mask=torch.ones_like(sources), labels=targets)
    assert outputs.logits.shape == (batch, target_length, 256)
    assert outputs.loss.isfinite()
    outputs.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters()), "a parameter without a gradient holds up DDP"
    if batch:
        assert model.eval().generate(sources, max_new_tokens=3, min_new_tokens=3).shape == (batch, 4)
    else:
        with pytest.raises(ValueError, match="The batch is empty"):
            model.eval().generate(sources, max_new_tokens=3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_rows_that_are_all_padding_disturb_nothing(name, implementation):
    model = build(name, implementation).train()
    sources, labels = ids(3, 7), ids(3, 6)
    mask = torch.ones_like(sources)
    gradients = {}
    for rows in ([0, 2], [0, 1, 2]):
        mask[1], labels[1] = 0, -100
        model.zero_grad()
        loss = model(input_ids=sources[rows], attention_mask=mask[rows], labels=labels[rows]).loss
        loss.backward()
        gradients[len(rows)] = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    for without, with_padding in zip(*gradients.values()):
        torch.testing.assert_close(with_padding, without, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("counted", [None, 0, torch.tensor(12)], ids=str)
def test_labels_of_only_minus_100_teach_nothing(counted):
    model = build().train()
    loss = model(input_ids=ids(2, 5), labels=torch.full((2, 4), -100), num_items_in_batch=counted).loss
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("per_head", [False, True])
def test_a_clipping_distance_beyond_the_sequence_is_as_good_as_the_longest_offset(per_head, implementation):
    far = build("shared", implementation, max_relative_position=50, relative_position_per_head=per_head)
    near = build("shared", implementation, max_relative_position=6, relative_position_per_head=per_head)
    middle = far.state_dict()
    for name in middle:
        if name.endswith(("relative_keys", "relative_values")):
            middle[name] = middle[name].narrow(-2, 50 - 6, 13)
    near.load_state_dict(middle)
    sources, targets = ids(2, 7), ids(2, 7)
    outputs = [model(input_ids=sources, decoder_input_ids=targets).logits for model in (far, near)]
    torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-5)
    assert far.generate(sources, max_new_tokens=5).shape[0] == 2


@pytest.mark.parametrize("bad", [256, 10_000, -1, -100])
def test_tokens_outside_the_vocabulary(bad):
    model = build()
    good, wrong = ids(2, 5), ids(2, 5)
    wrong[1, 2] = bad
    expected = re.escape(f"from {min(bad, wrong.min().item())} to {max(bad, wrong.max().item())}") + ".*vocabulary, 256"
    with pytest.raises(ValueError, match=expected):
        model(input_ids=wrong, decoder_input_ids=good)
    with pytest.raises(ValueError, match=expected):
        model(input_ids=good, decoder_input_ids=wrong)
    with pytest.raises(ValueError, match=expected):
        model.generate(wrong, max_new_tokens=3)


def test_a_label_outside_the_vocabulary():
    labels = ids(2, 5)
    labels[0, -1] = 256  # the last label is no input of the decoder
    with pytest.raises(IndexError, match="256 is out of bounds"):
        build()(input_ids=ids(2, 5), labels=labels)


def test_an_accumulated_loss_with_a_batch_that_teaches_nothing():
    """Two batches that count as one update, one of which has no label: its share is zero, the other's is unchanged."""
    model = build()
    sources, labels = ids(4, 5), ids(4, 6)
    labels[2:] = -100
    together = model(input_ids=sources, labels=labels).loss
    halves = [
        model(input_ids=s, labels=t, num_items_in_batch=12).loss for s, t in zip(sources.split(2), labels.split(2))
    ]
    torch.testing.assert_close(sum(halves), together)


@pytest.fixture
def folder(tmp_path):
    """A model of k = 16 saved in several shards."""
    torch.manual_seed(0)
    RelPosForConditionalGeneration(preset("tiny", max_relative_position=16)).save_pretrained(
        tmp_path / "model", max_shard_size="40KB"
    )
    return tmp_path / "model"


TWO_DISTANCES = "`max_relative_position` of 16, and the model has 8 "


@pytest.mark.parametrize("ignore", [False, True])
def test_a_checkpoint_of_another_clipping_distance_is_refused(folder, ignore):
    with pytest.raises(ValueError, match=TWO_DISTANCES):
        AutoModelForSeq2SeqLM.from_pretrained(folder, max_relative_position=8, ignore_mismatched_sizes=ignore)
    config = AutoConfig.from_pretrained(folder)
    config.max_relative_position = 8
    with pytest.raises(ValueError, match=TWO_DISTANCES):
        RelPosForConditionalGeneration.from_pretrained(folder, config=config, ignore_mismatched_sizes=ignore)


def test_a_configuration_file_with_another_clipping_distance_is_refused(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_relative_position": 8}))
    with pytest.raises(ValueError, match=TWO_DISTANCES):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_a_state_dict_of_another_clipping_distance_is_refused(folder):
    saved = AutoModelForSeq2SeqLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=TWO_DISTANCES):
        build(max_relative_position=8).load_state_dict(saved.state_dict(), strict=False)
    config = preset("tiny", max_relative_position=8)
    with pytest.raises(ValueError, match=TWO_DISTANCES):
        RelPosForConditionalGeneration.from_pretrained(None, config=config, state_dict=saved.state_dict())
    per_head = {"relative_position_per_head": True}
    with pytest.raises(ValueError, match=TWO_DISTANCES):
        build(max_relative_position=8, **per_head).load_state_dict(
            build(max_relative_position=16, **per_head).state_dict()
        )


def test_other_sizes_that_do_not_fit_are_the_librarys_business(folder):
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForSeq2SeqLM.from_pretrained(folder, encoder_ffn_dim=32)


def shards(folder):
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) > 2
    return found


def test_a_missing_shard(folder):
    missing = shards(folder)[1]
    missing.unlink()
    with pytest.raises(OSError, match=re.escape(missing.name)):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_truncated_shard(folder, kept):
    damaged = shards(folder)[1]
    data = damaged.read_bytes()
    damaged.write_bytes(data[: int(len(data) * kept)] if isinstance(kept, float) else data[:kept])
    with pytest.raises((SafetensorError, OSError)):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_a_missing_index(folder):
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_a_configuration_with_fields_of_a_newer_version(folder, tmp_path):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "source_language": "en", "routing": {"experts": 3}}))
    config = AutoConfig.from_pretrained(folder)
    assert config.source_language == "en"
    AutoModelForSeq2SeqLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["routing"] == {"experts": 3}

    for unknown in (
        "relative_position_decay",
        "relative_position_value",
        "max_relative_positions",
        "absolute_positions",
    ):
        path.write_text(json.dumps({**fields, unknown: True}))
        with pytest.raises(ValueError, match=f"`{unknown}` is no field of RelPosConfig"):
            AutoModelForSeq2SeqLM.from_pretrained(folder)
        with pytest.raises(ValueError, match=f"`{unknown}` is no field of RelPosConfig"):
            RelPosConfig(**{unknown: True})


def test_a_configuration_that_is_not_json(folder):
    shutil.copy(shards(folder)[0], folder / "config.json")
    with pytest.raises(OSError, match=r"config\.json"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
