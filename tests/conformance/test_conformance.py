"""Transformers' own tests of a model, run against RelPos and, for comparison, against Marian.

`library_suite.py` beside this file fetches the library's test classes; without them this module is skipped. One
configuration is part of the ordinary suite, the others carry the marker `conformance` (`make conformance`).

A test that fails on RelPos may be excepted here only if it fails on Marian as well, by a strict `xfail` with the reason.
There is none: the only one is Marian's.
"""

import sys
import unittest
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import MarianConfig, MarianModel, MarianMTModel, PreTrainedConfig

from relpos import RelPosConfig, RelPosForConditionalGeneration, RelPosModel

sys.path.insert(0, str(Path(__file__).parent))
import library_suite

if not library_suite.is_here():
    pytest.skip(
        "Transformers' own tests did not run: `python tests/conformance/library_suite.py` fetches them.",
        allow_module_level=True,
    )

ConfigTester = library_suite.load("test_configuration_common").ConfigTester
GenerationTesterMixin = library_suite.load("generation.test_utils").GenerationTesterMixin
ModelTesterMixin = library_suite.load("test_modeling_common").ModelTesterMixin
TrainingTesterMixin = library_suite.load("test_training_mixin").TrainingTesterMixin

# What a model of either kind is made of here, by the names that both configurations have.
SIZES = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "decoder_start_token_id": 3,
}


class EncoderDecoderTester:
    """The library's word for what hands its tests a configuration and inputs."""

    batch_size = 13
    seq_length = encoder_seq_length = decoder_seq_length = 7
    is_training = True
    hidden_size = SIZES["d_model"]
    num_hidden_layers = SIZES["encoder_layers"]
    num_attention_heads = SIZES["encoder_attention_heads"]

    def __init__(self, config_class: type[PreTrainedConfig], **fields):
        self.config_class, self.fields = config_class, {**SIZES, **fields}

    def get_config(self) -> PreTrainedConfig:
        return self.config_class(**self.fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        sources, targets = torch.randint(4, SIZES["vocab_size"], (2, self.batch_size, self.seq_length))
        sources[:, -1] = SIZES["eos_token_id"]
        ones = torch.ones_like(sources)
        inputs = {
            "input_ids": sources,
            "attention_mask": ones,
            "decoder_input_ids": targets,
            "decoder_attention_mask": ones.clone(),
        }
        return self.get_config(), inputs


class LibraryTests(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    """All shared tests that apply to an encoder-decoder."""

    is_encoder_decoder = True
    config_class: ClassVar[type[PreTrainedConfig]]
    fields: ClassVar[dict[str, Any]] = {}

    @property
    def model_tester(self) -> EncoderDecoderTester:
        return EncoderDecoderTester(self.config_class, **self.fields)

    # Hooks of the training test, whose own batch is a decoder-only model's: a prompt and how it goes on. Here the prompt
    # is the source, and the target goes on from the start token.

    def _get_trainable_model_class(self):
        return self.all_model_classes[-1]

    def _create_text_training_batch(self, batch_size, seq_length, vocab_size):
        start = SIZES["decoder_start_token_id"]
        targets = (torch.arange(seq_length) % 19 + start + 1).repeat(batch_size, 1)
        sources = targets.roll(1, dims=1)
        sources[:, 0] = start
        mask = torch.zeros_like(sources)
        mask[:, 0] = 1  # the test generates from the first token alone, and compares with all of `input_ids`
        return {"input_ids": sources, "attention_mask": mask, "labels": targets}

    def test_config(self):
        ConfigTester(self, config_class=self.config_class, **SIZES, **self.fields).run_common_tests()


class RelPosTests(LibraryTests):
    config_class = RelPosConfig
    all_model_classes = (RelPosModel, RelPosForConditionalGeneration)


class TestKeysAndValues(RelPosTests, unittest.TestCase):
    fields: ClassVar[dict[str, Any]] = {"max_relative_position": 3}


@pytest.mark.conformance
class TestKeys(RelPosTests, unittest.TestCase):
    fields: ClassVar[dict[str, Any]] = {"max_relative_position": 3, "relative_position_values": False}


@pytest.mark.conformance
class TestPerHead(RelPosTests, unittest.TestCase):
    fields: ClassVar[dict[str, Any]] = {"max_relative_position": 3, "relative_position_per_head": True}


@pytest.mark.conformance
class TestSinusoidal(RelPosTests, unittest.TestCase):
    fields: ClassVar[dict[str, Any]] = {"max_relative_position": 3, "absolute_position": "sinusoidal"}


@pytest.mark.conformance
class TestMarian(LibraryTests, unittest.TestCase):
    config_class = MarianConfig
    all_model_classes = (MarianModel, MarianMTModel)
    fields: ClassVar[dict[str, Any]] = {"max_position_embeddings": 100}

    @pytest.mark.xfail(
        strict=True,
        reason="the norm of its gradients falls by about 65 % in 300 steps, and the test asks for 90 %: with weights that "
        "start at a standard deviation of 0.02 Marian learns the pattern more slowly",
    )
    def test_training_overfit(self):
        super().test_training_overfit()
