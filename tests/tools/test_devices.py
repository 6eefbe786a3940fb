"""Ways to hold a model: offloaded to disk, quantised to eight bits."""

import warnings

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from relpos import RelPosForConditionalGeneration
from relpos.configuration import preset


@pytest.mark.parametrize("name", ["shared", "separate"])
def test_device_map_with_an_offload_folder(name, tmp_path):
    fields = {"shared": {}, "separate": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}}[name]
    model = RelPosForConditionalGeneration(preset("tiny", encoder_layers=4, decoder_layers=4, **fields)).eval()
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    source = torch.randint(2, 200, (2, 9))
    expected = model.generate(source, max_new_tokens=10, min_new_tokens=10, num_beams=2)
    offloaded = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": "150KB"}, offload_folder=tmp_path / "offload"
    )
    assert "disk" in offloaded.hf_device_map.values(), offloaded.hf_device_map
    assert "cpu" in offloaded.hf_device_map.values(), offloaded.hf_device_map
    found = offloaded.generate(source, max_new_tokens=10, min_new_tokens=10, num_beams=2)
    assert torch.equal(found, expected)


def test_eight_bit_linears_translate_alike(learned_model, learned_pairs):
    tokenizer, model = (
        AutoTokenizer.from_pretrained(learned_model),
        AutoModelForSeq2SeqLM.from_pretrained(learned_model),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's successor is a package of its own, torchao
        small = torch.ao.quantization.quantize_dynamic(model.eval(), {torch.nn.Linear}, dtype=torch.qint8)
    quantised = [m for m in small.modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear)]
    assert len(quantised) > 15
    inputs = tokenizer([source for source, _ in learned_pairs], padding=True, return_tensors="pt")
    texts = tokenizer.batch_decode(small.generate(**inputs, max_new_tokens=80), skip_special_tokens=True)
    assert texts == [target for _, target in learned_pairs]
