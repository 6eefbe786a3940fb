"""torch.export of the whole model, and ONNX: the encoder and the decoder's steps with their cache, run by ONNX Runtime."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.exporters import OnnxConfig, OnnxExporter
from transformers.exporters.base import ExportedModel
from transformers.modeling_outputs import BaseModelOutput

from relpos import RelPosForConditionalGeneration
from relpos.configuration import preset

VARIANTS = {
    "shared": {},
    "per-head": {"relative_position_per_head": True, "relative_position_values": False},
    "sinusoidal": {"absolute_position": "sinusoidal", "max_relative_position": None},
}


def build(name="shared", **fields):
    torch.manual_seed(1)
    config = preset("tiny", tie_word_embeddings=False, **VARIANTS[name], **fields)
    return RelPosForConditionalGeneration(config).eval()


def inputs(batch, sources):
    input_ids = torch.randint(2, 200, (batch, sources))
    mask = torch.ones_like(input_ids)
    mask[0, sources // 2 :] = 0
    return {"input_ids": input_ids, "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_torch_export_takes_any_sizes(name):
    model = build(name, encoder_layers=1, decoder_layers=1)
    batch, sources, targets = (torch.export.Dim(dim, min=2, max=512) for dim in ("batch", "sources", "targets"))
    arguments = {**inputs(3, 9), "decoder_input_ids": torch.randint(2, 200, (3, 6)), "use_cache": False}
    shapes = {
        "input_ids": {0: batch, 1: sources},
        "attention_mask": {0: batch, 1: sources},
        "decoder_input_ids": {0: batch, 1: targets},
        "use_cache": None,
    }
    program = torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=False).module()
    for size in ((2, 5, 11), (5, 40, 3)):
        arguments = {**inputs(*size[:2]), "decoder_input_ids": torch.randint(2, 200, (size[0], size[2]))}
        expected = model(**arguments, use_cache=False).logits
        found = program(**arguments, use_cache=False).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "decoder_layers"), [("shared", 2), ("sinusoidal", 1)])
def test_onnx_runtime_generates_the_same_tokens(name, decoder_layers, tmp_path):
    """Through Transformers' own exporter, which calls torch.onnx.export(dynamo=True) on each part. With two layers, each
    must find its own in the cache.

    The example has a prefix of three tokens: a size of 1 would be taken for one that never changes, and the cache that
    the decoding step is captured with is as long as the prefix.
    """
    model, example = build(name, encoder_layers=1, decoder_layers=decoder_layers), inputs(2, 7)
    example["decoder_input_ids"] = torch.randint(2, 200, (2, 3))
    dynamic = OnnxConfig(dynamic=True)
    OnnxExporter().export(model.get_encoder(), inputs(2, 7), dynamic).save_pretrained(tmp_path / "encoder")
    OnnxExporter().export_for_generation(model, example, dynamic).save_pretrained(tmp_path / "steps")
    encoder = ExportedModel.from_pretrained(tmp_path / "encoder")
    steps = ExportedModel.from_pretrained(tmp_path / "steps")

    others = inputs(3, 11)  # sizes that the exporter has not seen
    expected = model.generate(**others, max_new_tokens=15, min_new_tokens=15)
    assert expected.unique().numel() > 10, "too uniform to say anything"
    encoded = BaseModelOutput(encoder(**others).last_hidden_state)
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    tokens, step = expected[:, :1], "prefill"
    fed = tokens
    while tokens.shape[1] < expected.shape[1]:
        outputs = steps.runners[step](
            encoder_outputs=encoded,
            attention_mask=others["attention_mask"],
            decoder_input_ids=fed,
            cache=cache,
        )
        logits = outputs.logits[:, -1]
        logits[:, model.config.eos_token_id] = -torch.inf  # as min_new_tokens does
        fed, cache, step = logits.argmax(-1, keepdim=True), outputs.cache, "decode"
        tokens = torch.cat([tokens, fed], 1)
    assert torch.equal(tokens, expected)
