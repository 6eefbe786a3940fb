"""Checkpoints of tensor2tensor's `transformer` with relative positions, read without TensorFlow.

What is particular to them: kernels are [input, output]; embedding tables are cut into shards; a learned vector, the target
space, is added to every source embedding; the decoder starts from zeros; padding (id 0) is embedded as zeros, though the
output layer, which may share the table, has a row for it. Source embeddings, target embeddings and output layer are
therefore three tables here. Versions before 1.4.3 have a table of relative positions per head, later ones share it.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from relpos import RelPosConfig, RelPosSubwordTextTokenizer

from .converter import Converter, Decoding, KeyTable, both_sides, count_layers, own_names, rename, require_weights
from .files import ConversionError, read_json, read_lines
from .tensorflow_checkpoint import TensorFlowCheckpoint, find_checkpoint, plain_weight

_PAD_ID, _EOS_ID = 0, 1
_SPECIAL_TOKENS = ["<pad>_", "<EOS>_"]
"""The first pieces of every vocabulary of subwords."""

_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "output_transform": "out_proj"}
_TABLES = {
    "dot_product_attention_relative.relative_positions_keys.embeddings": "relative_keys",
    "dot_product_attention_relative.relative_positions_values.embeddings": "relative_values",
}


def _attention(side: str, theirs: str, ours: str, norm: str) -> dict[str, str]:
    """The rows of one attention and its LayerNorm, which stands before it or after it."""
    foreign, own = f"{side}.layer_*.{theirs}", f"model.{side}.layers.*"
    return {
        **{f"{foreign}.multihead_attention.{a}": f"{own}.{ours}.{b}" for a, b in (_ATTENTION | _TABLES).items()},
        f"{foreign}.layer_prepostprocess.layer_norm": f"{own}.{norm}",
        f"{foreign}.layer_postprocess.layer_norm": f"{own}.{norm}",
    }


def _stack(side: str) -> dict[str, str]:
    """The rows of self-attention and feed-forward, and of the last LayerNorm."""
    foreign, own = f"{side}.layer_*.ffn", f"model.{side}.layers.*"
    return {
        **_attention(side, "self_attention", "self_attn", "self_attn_layer_norm"),
        f"{foreign}.conv1": f"{own}.fc1",
        f"{foreign}.conv2": f"{own}.fc2",
        f"{foreign}.layer_prepostprocess.layer_norm": f"{own}.final_layer_norm",
        f"{foreign}.layer_postprocess.layer_norm": f"{own}.final_layer_norm",
        f"{side}.layer_prepostprocess.layer_norm": f"model.{side}.layer_norm",
    }


# With dots for slashes, and weight and bias for kernel, layer_norm_scale and layer_norm_bias.
_KEYS: KeyTable = {
    **_stack("encoder"),
    **_stack("decoder"),
    **_attention("decoder", "encdec_attention", "encoder_attn", "encoder_attn_layer_norm"),
}
_BODY = "transformer/body/"
_PARAMETERS = {"kernel": "weight", "layer_norm_scale": "weight", "layer_norm_bias": "bias"}
_TARGET_SPACE = "target_space_embedding.weight"
_SHARD = re.compile(r"transformer/symbol_modality_\w+/(shared|input_emb|target_emb|softmax)/weights_(\d+)")
_SLOTS = ("/Adam", "/Adam_1", "/ExponentialMovingAverage")
_RELATIVE = "encoder.layer_0.self_attention.multihead_attention." + next(iter(_TABLES))

# Option: the values that RelPos can express, the default first, and what the others mean.
_EXPRESSIBLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "self_attention_type": (("dot_product", "dot_product_relative"), "another kind of self-attention"),
    "pos": (("timing", None, "none"), "absolute positions of another layout besides the relative ones"),
    "ffn_layer": (("dense_relu_dense", "conv_hidden_relu"), "another feed-forward layer"),
    "norm_type": (("layer",), "another normalisation"),
    "attention_key_channels": ((0,), "keys of another width"),
    "attention_value_channels": ((0,), "values of another width"),
    "attention_variables_3d": ((False,), "projections of another layout"),
    "causal_decoder_self_attention": ((True,), "a decoder that looks ahead"),
    "unidirectional_encoder": ((False,), "an encoder that does not look ahead"),
    "proximity_bias": ((False,), "a bias by distance"),
    "hard_attention_k": ((0,), "attention to the best keys alone"),
    "num_area_layers": ((0,), "attention to areas"),
    "prepend_mode": (("none",), "a decoder that reads the source as well"),
    "split_targets_chunk_length": ((0,), "targets in chunks"),
    "bottom": (({},), "another input layer"),
    "top": (({},), "another output layer"),
}
# How sub-layers are wrapped (n: LayerNorm, d: dropout, a: add the input), before and after them: whether that is pre-norm.
_WRAPPINGS = {("n", "da"): True, ("n", "a"): True, ("none", "dan"): False, ("none", "an"): False}


class Tensor2TensorConverter(Converter):
    """A tensor2tensor checkpoint.

    Args:
        source: The training's folder with its `hparams.json` (the latest checkpoint counts), or one checkpoint in it.
        vocabularies: Subword vocabularies of source and target, or the one of both. By default the only file
            `vocab.*` beside the checkpoint.
    """

    toolkit: ClassVar[str] = "tensor2tensor"

    def __init__(self, source: Path, *, vocabularies: Sequence[Path] = ()):
        super().__init__(source)
        prefix = find_checkpoint(source)
        self._steps = prefix.name.rpartition("-")[2]
        self._options = _read_options(prefix.with_name("hparams.json"))
        checkpoint = TensorFlowCheckpoint(prefix)
        self._embeddings = _read_embeddings(checkpoint, prefix)
        self._foreign = _foreign_weights(checkpoint, prefix)
        self._space = self._foreign.pop(_TARGET_SPACE, None)
        paths = both_sides("vocabularies", vocabularies) or [_find_vocabulary(prefix.parent)] * 2
        self._vocabularies = [read_vocabulary(path) for path in paths]

    def obstacles(self) -> list[str]:
        options = self._options
        found = [f"{name} (RelPos has no place for it)" for name in self._foreign if own_names(name, _KEYS) is None]
        found += [
            f"{name}={value!r} ({meaning})"
            for name, (allowed, meaning) in _EXPRESSIBLE.items()
            if (value := options.get(name, allowed[0])) not in allowed
        ]
        if options.get("pos", "timing") == "timing":
            found.append("pos='timing' (sinusoidal positions of another layout besides the relative ones)")
        if _RELATIVE not in self._foreign:
            found.append(f"self_attention_type={options.get('self_attention_type')!r} (no relative positions)")
        if self._wrapping not in _WRAPPINGS:
            before, after = self._wrapping
            found.append(
                f"layer_preprocess_sequence={before!r} and layer_postprocess_sequence={after!r} (neither pre-norm nor "
                "post-norm)"
            )
        return found

    def config(self) -> RelPosConfig:
        weights, options = self._foreign, self._options
        source, d_model = self._embeddings["source"].shape
        heads = options["num_heads"]
        table = weights[_RELATIVE]
        return RelPosConfig(
            vocab_size=source,
            decoder_vocab_size=self._embeddings["target"].shape[0],
            d_model=d_model,
            encoder_layers=count_layers(weights, "encoder.layer_"),
            decoder_layers=count_layers(weights, "decoder.layer_"),
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=weights["encoder.layer_0.ffn.conv1.weight"].shape[0],
            decoder_ffn_dim=weights["decoder.layer_0.ffn.conv1.weight"].shape[0],
            activation_function="relu",
            dropout=options.get("layer_prepostprocess_dropout", 0.1),
            attention_dropout=options.get("attention_dropout", 0.0),
            activation_dropout=options.get("relu_dropout", 0.0),
            max_relative_position=(table.shape[0] - 1) // 2,
            relative_position_per_head=self._per_head,
            normalize_before=_WRAPPINGS[self._wrapping],
            layer_norm_eps=options.get("norm_epsilon", 1e-6),
            scale_embedding=self._scale != 1,
            share_encoder_decoder_embeddings=False,
            tie_word_embeddings=False,
            attention_bias=False,
            lm_head_bias=False,
            pad_token_id=_PAD_ID,
            eos_token_id=_EOS_ID,
            decoder_start_token_id=_PAD_ID,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        weights = rename(self._foreign, _KEYS)
        if self._per_head:
            heads = self._options["num_heads"]
            for name, table in weights.items():
                if name.endswith(tuple(_TABLES.values())):
                    weights[name] = table.unflatten(1, (heads, -1)).transpose(0, 1)  # [heads, rows, head_dim]
        source, target = self._embeddings["source"].clone(), self._embeddings["target"].clone()
        if self._space is not None:
            # added after scaling; the one row in use is that of GENERIC, the space of all text problems since 1.4
            source += self._space[:, 0] / self._scale
        source[_PAD_ID] = target[_PAD_ID] = 0  # nor is the space seen at padding, which is masked
        return {
            **weights,
            "model.encoder.embed_tokens.weight": source,
            "model.decoder.embed_tokens.weight": target,
            "lm_head.weight": self._embeddings["output"],
        }

    def tokenizer(self) -> RelPosSubwordTextTokenizer:
        source, target = self._vocabularies
        return RelPosSubwordTextTokenizer(
            source_vocabulary=source,
            target_vocabulary=target,
            pad_token=_SPECIAL_TOKENS[_PAD_ID],
            eos_token=_SPECIAL_TOKENS[_EOS_ID],
        )

    def decoding(self) -> Decoding:
        """The defaults of its decoder, since checkpoints do not say: beam 4, alpha 0.6."""
        return Decoding(
            {"num_beams": 4, "length_penalty": 0.6, "max_length": 256},
            (
                "tensor2tensor keeps no decoding options in a checkpoint. The saved ones are the defaults of its decoder: "
                "4 beams and alpha 0.6. It divides a log-probability by ((5 + length) / 6)^0.6 and `generate` by "
                "length^0.6: the number was kept, but long translations are favoured more here. `relpos "
                "translate --gnmt-penalty 0.6` ranks by the former. It stops 50 tokens behind the length of the source, and the "
                "saved `max_length` is 256.",
                "tensor2tensor's `target_space_embedding` is part of the source embeddings here (its row 0, GENERIC).",
            ),
        )

    def facts(self) -> dict[str, Any]:
        return {"steps": int(self._steps)} if self._steps.isdecimal() else {}

    @property
    def _wrapping(self) -> tuple[str, str]:
        before = self._options.get("layer_preprocess_sequence", "none") or "none"
        return before, self._options.get("layer_postprocess_sequence", "dan") or "none"

    @property
    def _scale(self) -> float:
        """Factor of the embeddings."""
        scaled = self._options.get("multiply_embedding_mode", "sqrt_depth") == "sqrt_depth"
        return math.sqrt(self._embeddings["source"].shape[1]) if scaled else 1.0

    @property
    def _per_head(self) -> bool:
        return self._foreign[_RELATIVE].shape[1] * self._options["num_heads"] != self._embeddings["source"].shape[1]


def _read_options(path: Path) -> dict[str, Any]:
    """The hyperparameters of a training."""
    options = read_json(path, "hyperparameters")
    if not isinstance(options, dict) or not isinstance(options.get("num_heads"), int):
        raise ConversionError(f"The file {path} must hold the hyperparameters of a Transformer, num_heads among them.")
    return options


def _read_embeddings(checkpoint: TensorFlowCheckpoint, prefix: Path) -> dict[str, torch.Tensor]:
    """The tables of source, target and output, [tokens, d_model], whose shards are put together."""
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for name in checkpoint:
        if match := _SHARD.fullmatch(name):
            shards.setdefault(match[1], {})[int(match[2])] = checkpoint[name]
    tables = {name: torch.cat([parts[index] for index in sorted(parts)]) for name, parts in shards.items()}
    shared = tables.get("shared")
    found = {
        "source": tables.get("input_emb", shared),
        "target": tables.get("target_emb", shared),
        "output": tables.get("softmax", shared),
    }
    for side, table in found.items():
        if table is None:
            raise ConversionError(
                f"{prefix} is not a Transformer of tensor2tensor for text: it has no {side} embeddings."
            )
    return found


def _foreign_weights(checkpoint: TensorFlowCheckpoint, prefix: Path) -> dict[str, torch.Tensor]:
    """Weights of the layers by their names in them: dots for slashes, weight and bias, [output, input]."""
    weights = {}
    for name in checkpoint:
        if name.startswith(_BODY) and not name.endswith(_SLOTS):
            weights |= plain_weight(name.removeprefix(_BODY), checkpoint[name], _PARAMETERS)
    required = ("encoder.layer_0.ffn.conv1.weight", "decoder.layer_0.ffn.conv1.weight")
    require_weights(weights, required, f"{prefix} is not a Transformer of tensor2tensor")
    return weights


def _find_vocabulary(folder: Path) -> Path:
    found = sorted(folder.glob("vocab.*"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ConversionError(
            f"The folder {folder} must hold one vocabulary (a file vocab.*) and holds {names}; name it, or those of source "
            "and target, with --vocabularies."
        )
    return found[0]


def read_vocabulary(path: Path) -> list[str]:
    """Pieces of a subword vocabulary file, one a line, most in quotation marks.

    Raises:
        ConversionError: There is no such file, or it does not begin with the special tokens.
    """
    pieces = [_unquote(line.rstrip()) for line in read_lines(path, "vocabulary")]
    if pieces[: len(_SPECIAL_TOKENS)] != _SPECIAL_TOKENS:
        raise ConversionError(
            f"The vocabulary {path} must begin with {' and '.join(_SPECIAL_TOKENS)}: only tensor2tensor's vocabularies of "
            "subwords are read."
        )
    return pieces


def _unquote(line: str) -> str:
    quoted = any(line.startswith(mark) and line.endswith(mark) for mark in "'\"")
    return line[1:-1] if quoted else line


__all__ = ["Tensor2TensorConverter", "read_vocabulary"]
