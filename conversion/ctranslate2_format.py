"""Models of CTranslate2, in and out.

What is particular to them: projections of queries, keys and values are fused, weights may be quantised by row, names are
paths, and the subword model is not part of the folder. Reading needs no package; writing needs `ctranslate2`.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from relpos import RelPosConfig, RelPosForConditionalGeneration, RelPosTokenizer

from .converter import (
    Converter,
    Decoding,
    KeyTable,
    both_sides,
    count_layers,
    own_names,
    refuse,
    rename,
    require_weights,
)
from .ctranslate2_files import plain_name, read_binary, read_options, read_tokenizer, read_vocabularies
from .files import ConversionError, new_folder
from .segmenters import looks_segmented, tokenizer_sides

# Names with dots for slashes, and weight and bias for the gamma and beta of LayerNorm.
_SELF_ATTENTION = {
    "layer_norm": "self_attn_layer_norm",
    "linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_1": "self_attn.out_proj",
    "relative_position_keys": "self_attn.relative_keys",
    "relative_position_values": "self_attn.relative_values",
}
_CROSS_ATTENTION = {
    "layer_norm": "encoder_attn_layer_norm",
    "linear_0": "encoder_attn.q_proj",
    "linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "linear_2": "encoder_attn.out_proj",
}
_FEED_FORWARD = {"layer_norm": "final_layer_norm", "linear_0": "fc1", "linear_1": "fc2"}


def _layer(side: str, part: str, table: Mapping[str, str | tuple[str, ...]]) -> dict[str, str | tuple[str, ...]]:
    """The rows of one part of a layer, with the full names."""
    prefix = f"model.{side}.layers.*."
    return {
        f"{side}.layer_*.{part}.{theirs}": prefix + ours if isinstance(ours, str) else tuple(prefix + o for o in ours)
        for theirs, ours in table.items()
    }


_KEYS: KeyTable = {
    "encoder.embeddings_0": "model.encoder.embed_tokens",
    "decoder.embeddings": "model.decoder.embed_tokens",
    "decoder.projection": "lm_head",
    "encoder.layer_norm": "model.encoder.layer_norm",
    "decoder.layer_norm": "model.decoder.layer_norm",
    **_layer("encoder", "self_attention", _SELF_ATTENTION),
    **_layer("encoder", "ffn", _FEED_FORWARD),
    **_layer("decoder", "self_attention", _SELF_ATTENTION),
    **_layer("decoder", "attention", _CROSS_ATTENTION),
    **_layer("decoder", "ffn", _FEED_FORWARD),
}
_ACTIVATIONS = ["relu", "gelu_pytorch_tanh", "silu", "gelu", "quick_gelu", "tanh", "sigmoid"]
"""In the order of CTranslate2's enumeration."""
_ACTIVATION_IDS = {name: index for index, name in enumerate(_ACTIVATIONS)} | {"swish": 2, "gelu_new": 1}

# Settings that are variables of their own. RelPos has the first group; of the second it can express one value each.
_SETTINGS = ("num_heads", "pre_norm", "activation", "scale_embeddings", "alignment_layer", "alignment_heads")
_EXPRESSIBLE = {
    "embeddings_merge": (None, "several embeddings per source token"),  # of no effect where there is one
    "start_from_zero_embedding": (0, "a target that starts with zeros"),
    "scale_outputs": (1, "scaled outputs"),
    "multi_query_attention": (0, "keys and values shared by heads"),
    "alibi": (0, "ALiBi positions"),
    "alibi_use_positive_positions": (None, "ALiBi positions"),  # of no effect without alibi
    "scale_alibi": (None, "ALiBi positions"),
    # before version 3, in place of config.json
    "with_source_bos": (None, "a start token of sources"),
    "with_source_eos": (None, "an end token of sources"),
    "with_target_bos": (1, "a target that starts with the end token"),
    "user_decoder_start_tokens": (0, "start tokens that the caller gives"),
}
_SOURCE_EMBEDDING = "encoder.embeddings_0.weight"
_PADDING = ("<blank>", "<pad>")
_DEFAULT_EPSILON = 1e-5
"""What CTranslate2 takes where a model does not say."""


class CTranslate2Converter(Converter):
    """A CTranslate2 folder of a Transformer with relative positions, of any weight type.

    Args:
        source: The folder, with `model.bin` and its vocabularies.
        subwords: Subword models of source and target, or the one of both. By default the tokenizer that an export by
            RelPos has left in the folder.
    """

    toolkit: ClassVar[str] = "CTranslate2"

    def __init__(self, source: Path, *, subwords: Sequence[Path] = ()):
        super().__init__(source)
        self._subwords = both_sides("subwords", subwords)
        self._binary = read_binary(source / "model.bin")
        self._options = read_options(source)
        for token in ("bos", "eos"):
            if self._setting("", f"with_source_{token}", default=0):
                self._options[f"add_source_{token}"] = True
        self._vocabularies = read_vocabularies(source)

    def obstacles(self) -> list[str]:
        if self._binary.kind != "TransformerSpec":
            return [f"the model is a {self._binary.kind} and must be a TransformerSpec"]
        found = []
        for name, tensor in self._binary.variables.items():
            setting = name.rpartition(".")[2]
            if _is_setting(name):
                allowed, meaning = _EXPRESSIBLE.get(setting, (None, ""))
                if allowed is not None and tensor.item() != allowed:
                    found.append(f"{name}={tensor.item()} ({meaning})")
            elif own_names(name, _KEYS) is None:
                found.append(f"{name} (RelPos has no place for it)")
        if not any(name.endswith(".relative_position_keys") for name in self._binary.variables):
            found.append("it has no relative positions")
        for name in ("activation", "pre_norm"):
            encoder, decoder = (self._setting(side, name, default=0) for side in ("encoder", "decoder"))
            if encoder != decoder:
                found.append(f"{name} is {encoder} in the encoder and {decoder} in the decoder")
        return found + self._obstacles_of_scales() + self._obstacles_of_vocabularies()

    def _obstacles_of_scales(self) -> list[str]:
        require_weights(self._binary.variables, [_SOURCE_EMBEDDING], f"The model {self.source} is no Transformer")
        encoder, decoder = (self._embedding_factor(side) for side in ("encoder", "decoder"))
        if encoder != decoder:
            return [f"scale_embeddings is {encoder:.6g} in the encoder and {decoder:.6g} in the decoder"]
        if encoder not in (1.0, self._root_of_width):
            return [f"scale_embeddings={encoder:.6g} (must be 1 or the root of the width, {self._root_of_width:.6g})"]
        return []

    def _obstacles_of_vocabularies(self) -> list[str]:
        found = []
        for field in ("eos_token",) if self._own_tokenizer else ("unk_token", "eos_token"):
            token = self._options[field]
            ids = [vocabulary.index(token) if token in vocabulary else None for vocabulary in self._vocabularies]
            if None in ids or ids[0] != ids[1]:
                found.append(f"{field}={token!r} has the id {ids[0]} in the source and {ids[1]} in the target")
        if self._options["decoder_start_token"] not in self._vocabularies[1]:
            found.append(f"decoder_start_token={self._options['decoder_start_token']!r} (not in the target vocabulary)")
        if self._options["add_source_bos"] and self._options["bos_token"] not in self._vocabularies[0]:
            found.append(f"bos_token={self._options['bos_token']!r} (not in the source vocabulary)")
        return found

    def config(self) -> RelPosConfig:
        weights, (source, target) = self._renamed, self._vocabularies
        embeddings = weights["model.encoder.embed_tokens.weight"], weights["model.decoder.embed_tokens.weight"]
        return RelPosConfig(
            vocab_size=len(source),
            decoder_vocab_size=len(target),
            d_model=embeddings[0].shape[1],
            encoder_layers=count_layers(weights, "model.encoder.layers."),
            decoder_layers=count_layers(weights, "model.decoder.layers."),
            encoder_attention_heads=self._setting("encoder", "num_heads"),
            decoder_attention_heads=self._setting("decoder", "num_heads"),
            encoder_ffn_dim=weights["model.encoder.layers.0.fc1.weight"].shape[0],
            decoder_ffn_dim=weights["model.decoder.layers.0.fc1.weight"].shape[0],
            activation_function=_ACTIVATIONS[self._setting("decoder", "activation", default=0)],
            **_position_fields(weights),
            normalize_before=bool(self._setting("decoder", "pre_norm", default=1)),
            layer_norm_eps=self._options["layer_norm_epsilon"] or _DEFAULT_EPSILON,
            scale_embedding=self._embedding_factor("decoder") == self._root_of_width,
            share_encoder_decoder_embeddings=source == target and torch.equal(*embeddings),
            tie_word_embeddings=torch.equal(weights["lm_head.weight"], embeddings[1]),
            attention_bias="model.encoder.layers.0.self_attn.q_proj.bias" in weights,
            mlp_bias="model.encoder.layers.0.fc1.bias" in weights,
            lm_head_bias="lm_head.bias" in weights,
            pad_token_id=self._own_tokenizer.pad_token_id if self._own_tokenizer else target.index(self._pad_token()),
            eos_token_id=target.index(self._options["eos_token"]),
            decoder_start_token_id=target.index(self._options["decoder_start_token"]),
        )

    def weights(self) -> dict[str, torch.Tensor]:
        fields = _position_fields(self._renamed)
        unused = [] if fields["relative_position_keys"] else [".relative_keys"]
        if fields["relative_position_tied"] or not fields["relative_position_values"]:
            unused.append(".relative_values")
        return {name: tensor for name, tensor in self._renamed.items() if not name.endswith(tuple(unused))}

    @cached_property
    def _renamed(self) -> dict[str, torch.Tensor]:
        """All weights under RelPos's names, with the tables of zeros that stand for none."""
        foreign = {name: tensor for name, tensor in self._binary.variables.items() if not _is_setting(name)}
        return rename(foreign, _KEYS)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._own_tokenizer:
            return self._own_tokenizer
        options = self._options
        for side, vocabulary in zip(("source", "target"), self._vocabularies):
            if not self._subwords and looks_segmented(vocabulary):
                raise ConversionError(
                    f"The {side} vocabulary of {self.source} holds pieces of a subword model, which is not in the folder; "
                    "name it with --subwords."
                )
        return RelPosTokenizer(
            **tokenizer_sides(self._vocabularies, self._subwords),
            add_source_bos=options["add_source_bos"],
            add_source_eos=options["add_source_eos"],
            unk_token=options["unk_token"],
            pad_token=self._pad_token(),
            eos_token=options["eos_token"],
            bos_token=options["bos_token"],
        )

    @cached_property
    def _own_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that an export has left in the folder, where no subword models were named."""
        if self._subwords or not (self.source / "tokenizer_config.json").is_file():
            return None
        tokenizer = read_tokenizer(self.source)
        sizes = [len(vocabulary) for vocabulary in self._vocabularies]
        if _export_vocabularies(tokenizer, *sizes) != self._vocabularies:
            raise ConversionError(
                f"The tokenizer in {self.source} does not have the tokens of the model's vocabularies."
            )
        return tokenizer

    def decoding(self) -> Decoding:
        """CTranslate2's defaults, since its models do not say."""
        return Decoding(
            {"num_beams": 2, "length_penalty": 1.0},
            (
                "CTranslate2 keeps no decoding options in a model. The saved ones are its defaults: 2 beams and length "
                "penalty 1, which means the same here (a hypothesis's log-probability divided by its length).",
            ),
        )

    def _setting(self, side: str, name: str, *, default: int | None = None) -> int:
        """A whole number among the variables."""
        found = self._variable(side, name)
        if found is None and default is None:
            raise ConversionError(f"The model {self.source} does not say its {side}.{name}.")
        return default if found is None else int(found.item())

    def _variable(self, side: str, name: str) -> torch.Tensor | None:
        """A variable of a side; in old models those of both sides stand at the top."""
        variables = self._binary.variables
        return variables.get(f"{side}.{name}", variables.get(name))

    def _embedding_factor(self, side: str) -> float:
        """What a side multiplies its embeddings by: a float is the factor itself, and another type says whether it is the
        root of their width, as it is without a word."""
        scale = self._variable(side, "scale_embeddings")
        if scale is None or not scale.is_floating_point():
            return self._root_of_width if scale is None or scale.item() else 1.0
        is_root = math.isclose(scale.item(), self._root_of_width, rel_tol=torch.finfo(torch.float32).eps)
        return self._root_of_width if is_root else scale.item()

    @property
    def _root_of_width(self) -> float:
        return math.sqrt(self._binary.variables[_SOURCE_EMBEDDING].shape[-1])

    def _pad_token(self) -> str:
        """CTranslate2 has no padding token. Without one, padding is `<unk>`: the mask hides it all the same."""
        source, target = self._vocabularies
        for token in _PADDING:
            if token in source and token in target and source.index(token) == target.index(token):
                return token
        return self._options["unk_token"]


def _is_setting(name: str) -> bool:
    """Whether a variable is a number that says how the model computes: at the top, or the encoder's or decoder's."""
    side, _, setting = name.rpartition(".")
    return side in ("", "encoder", "decoder") and (setting in _SETTINGS or setting in _EXPRESSIBLE)


def _position_fields(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Which tables a model has. CTranslate2 always has both: equal ones are one, and zeros stand for none."""
    keys = [tensor for name, tensor in weights.items() if name.endswith(".relative_keys")]
    values = [tensor for name, tensor in weights.items() if name.endswith(".relative_values")]
    tied = len(keys) == len(values) and all(torch.equal(*tables) for tables in zip(keys, values))
    has_values = tied or any(table.any() for table in values)
    return {
        "max_relative_position": (keys[0].shape[0] - 1) // 2,
        "relative_position_keys": not has_values or tied or any(bool(table.any()) for table in keys),
        "relative_position_values": bool(has_values),
        "relative_position_tied": tied,
    }


def export_ctranslate2(model: Path, out: Path, *, quantization: str = "float32", force: bool = False) -> Path:
    """Write a RelPos model for CTranslate2, with its tokenizer and generation config beside it.

    Args:
        model: A saved RelPos folder.
        out: The folder to write, which appears whole or not at all.
        quantization: How CTranslate2 keeps the weights: float32, float16, int8, int8_float32, ...
        force: Replace `out` where it is a saved model.

    Returns:
        `out`.

    Raises:
        ConversionError: `ctranslate2` is not installed, `out` is taken, there is no such quantization, or the model has
            options that CTranslate2 cannot express (all are named).
    """
    with new_folder(out, force=force) as folder:
        loaded, tokenizer = load_relpos(model)
        write_ctranslate2(loaded, tokenizer, folder, quantization=quantization)
        tokenizer.save_pretrained(folder)
        loaded.generation_config.save_pretrained(folder)
    return out


def write_ctranslate2(
    model: RelPosForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path, *, quantization: str
) -> None:
    """Write the files that CTranslate2 itself reads; raises ConversionError as `export_ctranslate2` does."""
    model_spec = import_ctranslate2().specs.model_spec
    if quantization not in model_spec.ACCEPTED_MODEL_TYPES:
        known = ", ".join(model_spec.ACCEPTED_MODEL_TYPES)
        raise ConversionError(f"There is no quantization {quantization!r}; there are {known}.")
    refuse(inexpressible(model.config), "The model")
    spec = _build_spec(model, tokenizer)
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))


def load_relpos(folder: Path) -> tuple[RelPosForConditionalGeneration, PreTrainedTokenizerBase]:
    """A saved RelPos model and its tokenizer; raises ModelError of `relpos.training.loading`, or ConversionError."""
    from relpos.training.loading import load_config, load_model

    kind = load_config(str(folder)).model_type
    if kind != "relpos":
        raise ConversionError(f"The model {folder} is of type {kind!r}; only RelPos models are exported.")
    loaded = load_model(str(folder))
    return loaded.model.float().cpu(), loaded.tokenizer


def import_ctranslate2() -> Any:
    """The package; raises ConversionError where it is not installed."""
    try:
        import ctranslate2
    except ImportError as error:
        raise ConversionError("CTranslate2 is not installed: run `pip install 'relpos[ctranslate2]'`.") from error
    return ctranslate2


def inexpressible(config: RelPosConfig) -> list[str]:
    """Options of a RelPos model that CTranslate2 does not have."""
    found = []
    if config.max_relative_position is None:
        found.append("max_relative_position=None (its other positions end at a fixed length)")
    if config.relative_position_per_head:
        found.append("relative_position_per_head=True (CTranslate2 has one table for all heads)")
    if config.absolute_position != "none":
        found.append(
            f"absolute_position={config.absolute_position!r} (CTranslate2 has no other positions beside relative ones)"
        )
    if config.activation_function not in _ACTIVATION_IDS:
        found.append(f"activation_function={config.activation_function!r} (it has {', '.join(_ACTIVATION_IDS)})")
    if isinstance(config.eos_token_id, list) and len(config.eos_token_id) > 1:
        found.append(f"eos_token_id={config.eos_token_id} (one token ends a translation)")
    return found


def _build_spec(model: RelPosForConditionalGeneration, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A `TransformerSpec` with all weights, vocabularies and special tokens."""
    from ctranslate2.specs import TransformerSpec, transformer_spec

    config = model.config
    options = {
        "pre_norm": config.normalize_before,
        "activation": _ACTIVATION_IDS[config.activation_function],
        "relative_position": True,
    }
    spec = TransformerSpec(
        transformer_spec.TransformerEncoderSpec(config.encoder_layers, config.encoder_attention_heads, **options),
        transformer_spec.TransformerDecoderSpec(config.decoder_layers, config.decoder_attention_heads, **options),
    )
    spec.encoder.scale_embeddings = spec.decoder.scale_embeddings = config.scale_embedding
    _fill_spec(spec, _with_all_tables(model))
    source, target = _export_vocabularies(tokenizer, config.vocab_size, config.decoder_vocab_size)
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    bos, eos = _source_ends(tokenizer)
    spec.config.unk_token = tokenizer.unk_token or "<unk>"
    spec.config.bos_token = tokenizer.bos_token or target[config.decoder_start_token_id]
    spec.config.eos_token = target[_eos_id(config)]
    spec.config.decoder_start_token = target[config.decoder_start_token_id]
    spec.config.add_source_bos, spec.config.add_source_eos = bos, eos
    spec.config.layer_norm_epsilon = config.layer_norm_eps  # otherwise 1e-5, whatever the model has
    if (longest := getattr(config, "longest_training_source", None)) is not None:
        spec.config.add_attribute("longest_training_source", longest)
    return spec


def _with_all_tables(model: RelPosForConditionalGeneration) -> dict[str, torch.Tensor]:
    """The model's weights with both tables in every layer: a tied one twice, and zeros for one that it lacks."""
    weights = dict(model.state_dict())
    config = model.config
    for name in [name for name in weights if name.endswith(".self_attn.q_proj.weight")]:
        prefix = name.removesuffix("q_proj.weight")
        keys, values = (weights.get(prefix + table) for table in ("relative_keys", "relative_values"))
        if config.relative_position_tied:
            values = keys
        present = keys if keys is not None else values
        weights[prefix + "relative_keys"] = keys if keys is not None else torch.zeros_like(present)
        weights[prefix + "relative_values"] = values if values is not None else torch.zeros_like(present)
    return weights


def _fill_spec(spec: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Give every variable of a spec its value by the key table, read from right to left."""
    from ctranslate2.specs import model_spec

    def fill(layer: Any, name: str, _value: Any) -> None:
        parts = own_names(plain_name(name), _KEYS)
        if parts and all(part in weights for part in parts):
            tensor = torch.cat([weights[part] for part in parts]) if len(parts) > 1 else weights[parts[0]]
            setattr(layer, name.rpartition("/")[2], tensor.numpy())

    model_spec.visit_spec(spec, fill)


def _export_vocabularies(
    tokenizer: PreTrainedTokenizerBase, source_size: int, target_size: int
) -> tuple[list[str], list[str]]:
    """Tokens of source and target by id; embeddings beyond the tokenizer's get names that no text has."""
    if isinstance(tokenizer, RelPosTokenizer):
        sides = tokenizer.get_vocabulary("source"), tokenizer.get_vocabulary("target")
    else:
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        sides = list(tokens), list(tokens)
    for side, tokens, size in zip(("source", "target"), sides, (source_size, target_size)):
        if len(tokens) > size:
            raise ConversionError(f"The tokenizer has {len(tokens)} {side} tokens and the model embeds only {size}.")
        tokens.extend(f"<unused {index}>" for index in range(len(tokens), size))
    return sides


def _source_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether the tokenizer begins sources with its start token, and ends them with its end token.

    Raises:
        ConversionError: It adds other tokens, which CTranslate2 would not.
    """
    plain, full = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    for bos in (False, True):
        for eos in (False, True):
            begin = [tokenizer.bos_token_id] if bos else []
            if begin + plain + ([tokenizer.eos_token_id] if eos else []) == full:
                return bos, eos
    added = tokenizer.convert_ids_to_tokens(full)
    raise ConversionError(
        f"The tokenizer turns 'a' into {added}, and CTranslate2 can only add its bos_token and eos_token."
    )


def _eos_id(config: RelPosConfig) -> int:
    return config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
