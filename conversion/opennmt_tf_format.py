"""Checkpoints of OpenNMT-tf, version 2, read without TensorFlow.

What is particular to them: kernels are [input, output], LayerNorm's epsilon is Keras's 1e-3, and `<unk>` is no line of a
vocabulary but the id behind its last. Two vocabularies seldom end at the same id, so `<unk>` moves to id 3 here, in the
weights as in the tokenizer. The checkpoint does not say how the model computes: that is the Python file
`model_description.py` beside it, which is read but never run. Vocabularies and tokenization are in the run's YAML file.
"""

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml

from relpos import RelPosConfig, RelPosTokenizer

from .converter import ConversionError, Converter, Decoding, KeyTable, own_names, rename
from .segmenters import load_segmenter, sentencepiece_segmenter, whitespace_segmenter
from .tensorflow_checkpoint import TensorFlowCheckpoint, find_checkpoint

_SPECIAL_TOKENS = ["<blank>", "<s>", "</s>"]
"""What every vocabulary begins with: padding, start and end."""
_UNK = "<unk>"
_UNK_ID = len(_SPECIAL_TOKENS)
_LAYER_NORM_EPS = 1e-3

_ATTENTION = {
    "linear_queries": "q_proj",
    "linear_keys": "k_proj",
    "linear_values": "v_proj",
    "linear_output": "out_proj",
}
_TABLES = {"relative_position_keys": "relative_keys", "relative_position_values": "relative_values"}


def _layer(side: str, theirs: str, ours: str, norm: str) -> dict[str, str]:
    """The rows of one attention and its LayerNorm, which stands before it or after it."""
    foreign, own = f"{side}.layers.*.{theirs}", f"model.{side}.layers.*"
    return {
        **{f"{foreign}.layer.{a}": f"{own}.{ours}.{b}" for a, b in (_ATTENTION | _TABLES).items()},
        f"{foreign}.input_layer_norm": f"{own}.{norm}",
        f"{foreign}.output_layer_norm": f"{own}.{norm}",
    }


def _feed_forward(side: str) -> dict[str, str]:
    foreign, own = f"{side}.layers.*.ffn", f"model.{side}.layers.*"
    return {
        f"{foreign}.layer.inner": f"{own}.fc1",
        f"{foreign}.layer.outer": f"{own}.fc2",
        f"{foreign}.input_layer_norm": f"{own}.final_layer_norm",
        f"{foreign}.output_layer_norm": f"{own}.final_layer_norm",
    }


# With dots for slashes, and weight and bias for kernel, gamma and beta.
_KEYS: KeyTable = {
    "examples_inputter.features_inputter.embedding": "model.encoder.embed_tokens.weight",
    "examples_inputter.labels_inputter.embedding": "model.decoder.embed_tokens.weight",
    "decoder.output_layer": "lm_head",
    "encoder.layer_norm": "model.encoder.layer_norm",
    "decoder.layer_norm": "model.decoder.layer_norm",
    **_layer("encoder", "self_attention", "self_attn", "self_attn_layer_norm"),
    **_feed_forward("encoder"),
    **_layer("decoder", "self_attention", "self_attn", "self_attn_layer_norm"),
    **_layer("decoder", "attention.0", "encoder_attn", "encoder_attn_layer_norm"),
    **_feed_forward("decoder"),
}
_SOURCE_EMBEDDING, _TARGET_EMBEDDING = list(_KEYS)[:2]
_BY_TOKEN = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")
"""Weights with a row for every token."""

_ACTIVATIONS = {
    "nn.relu": "relu",
    "activations.relu": "relu",
    "nn.gelu": "gelu",
    "activations.gelu": "gelu",
    "layers.gelu": "gelu_pytorch_tanh",
    "common.gelu": "gelu_pytorch_tanh",
    "nn.swish": "silu",
    "nn.silu": "silu",
}
"""By the last two parts of the function's name; OpenNMT-tf's own `gelu` is the approximation by tanh."""

# What the arguments of `opennmt.models.Transformer` are where a description does not give them, as far as they cannot be
# told from the weights.
_DEFAULTS = {
    "source_inputter": "None",
    "target_inputter": "None",
    "dropout": "0.1",
    "attention_dropout": "0.1",
    "ffn_dropout": "0.1",
    "ffn_activation": "tf.nn.relu",
    "position_encoder_class": "SinusoidalPositionEncoder",
}
_RELATIVE = {"position_encoder_class": "None", "maximum_relative_position": "20"}
_CATALOG = {
    "Transformer": {},
    "TransformerBase": {},
    "TransformerBaseSharedEmbeddings": {},
    "TransformerBig": {},
    "TransformerBigSharedEmbeddings": {},
    "TransformerRelative": _RELATIVE,
    "TransformerBaseRelative": _RELATIVE,
    "TransformerBigRelative": _RELATIVE,
}
"""The models that OpenNMT-tf knows by name, with what they set of these arguments."""

# Decoding options without a counterpart: where they are not these values, the model card says so.
_NO_COUNTERPART = {
    "coverage_penalty": 0,
    "sampling_topk": 1,
    "replace_unknown_target": False,
    "decoding_noise": None,
    "decoding_subword_token": None,
}


class OpenNMTTFConverter(Converter):
    """An OpenNMT-tf checkpoint.

    Args:
        source: The run's folder (its latest checkpoint counts), or one checkpoint in it.
        config: The YAML file that the model was trained with: its vocabularies, tokenization and decoding options.
        vocabularies: Vocabulary files of source and target, or the one of both, in place of those in `config`.
        subwords: Subword models of source and target, or the one of both, in place of the tokenization in `config`.
    """

    toolkit: ClassVar[str] = "OpenNMT-tf"

    def __init__(
        self,
        source: Path,
        *,
        config: Path | None = None,
        vocabularies: Sequence[Path] = (),
        subwords: Sequence[Path] = (),
    ):
        super().__init__(source)
        for option, paths in (("vocabularies", vocabularies), ("subwords", subwords)):
            if len(paths) > 2:
                raise ConversionError(
                    f"--{option} takes one file, or one of the source and one of the target, not {len(paths)}."
                )
        self._config_file = Path(config) if config else None
        self._options = _read_config(self._config_file) if self._config_file else {}
        self._subwords = [Path(path) for path in subwords]
        prefix = find_checkpoint(source)
        self._steps = prefix.name.rpartition("-")[2]
        self._foreign = _foreign_weights(TensorFlowCheckpoint(prefix), prefix)
        self._arguments = read_description(prefix.with_name("model_description.py"))
        paths = [Path(path) for path in vocabularies] or [self._named("vocabulary", side) for side in ("source", "target")]
        self._vocabularies = [read_vocabulary(path) for path in (paths[0], paths[-1])]

    def obstacles(self) -> list[str]:
        found = [f"{name} (RelPos has no place for it)" for name in self._foreign if own_names(name, _KEYS) is None]
        if not any(name.endswith(".relative_position_keys") for name in self._foreign):
            found.append("maximum_relative_position=None (no relative positions)")
        return found + self._obstacles_of_description() + self._obstacles_of_data()

    def _obstacles_of_description(self) -> list[str]:
        arguments = self._arguments
        found = []
        if arguments["position_encoder_class"] != "None":
            value = arguments["position_encoder_class"]
            found.append(f"position_encoder_class={value} (absolute positions of another layout besides the relative ones)")
        if _activation(arguments["ffn_activation"]) is None:
            found.append(f"ffn_activation={arguments['ffn_activation']} (another activation)")
        for side in ("source_inputter", "target_inputter"):
            if arguments[side] != "None" and "WordEmbedder(" not in arguments[side].replace("ParallelInputter", ""):
                found.append(f"{side}={arguments[side]} (not the embedding of one sequence of tokens)")
        for rate in ("dropout", "attention_dropout", "ffn_dropout"):
            if _number(arguments[rate]) is None:
                found.append(f"{rate}={arguments[rate]} (not a number that can be read without running the file)")
        return found

    def _obstacles_of_data(self) -> list[str]:
        data = self._data()
        found = []
        controls = data.get("target_sequence_controls")
        if controls and not (controls.get("start") and controls.get("end")):
            found.append(f"target_sequence_controls={controls} (targets without a start or an end token)")
        for side in ("source", "target"):
            if data.get(f"{side}_embedding"):
                pass  # pretrained embeddings have become the weights
            problem = None if self._subwords else _obstacle_of_tokenization(self._tokenization(side))
            if problem:
                found.append(f"{side}_tokenization={problem}; with --subwords another subword model takes its place")
        return found
