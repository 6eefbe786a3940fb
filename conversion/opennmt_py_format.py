"""Checkpoints of OpenNMT-py, versions 2 and 3.

What is particular to them: one table per layer serves keys and values, embeddings are not scaled, sources have no end
token, and special tokens are called `<blank>` (padding), `<s>` (start of the target), `</s>` and `<unk>`.
"""

import argparse
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from relpos import RelPosConfig, RelPosTokenizer

from .converter import Converter, Decoding, KeyTable, both_sides, count_layers, rename, require_weights
from .files import ConversionError
from .segmenters import tokenizer_sides

_PAD, _BOS, _EOS, _UNK = "<blank>", "<s>", "</s>", "<unk>"

_ATTENTION = {
    "linear_query": "q_proj",
    "linear_keys": "k_proj",
    "linear_values": "v_proj",
    "final_linear": "out_proj",
}
_KEYS: KeyTable = {
    "encoder.embeddings.make_embedding.emb_luts.0": "model.encoder.embed_tokens",
    "decoder.embeddings.make_embedding.emb_luts.0": "model.decoder.embed_tokens",
    "encoder.transformer.*.layer_norm": "model.encoder.layers.*.self_attn_layer_norm",
    "encoder.transformer.*.feed_forward.layer_norm": "model.encoder.layers.*.final_layer_norm",
    "encoder.transformer.*.feed_forward.w_1": "model.encoder.layers.*.fc1",
    "encoder.transformer.*.feed_forward.w_2": "model.encoder.layers.*.fc2",
    "encoder.transformer.*.self_attn.relative_positions_embeddings.weight": "model.encoder.layers.*.self_attn.relative_keys",
    "encoder.layer_norm": "model.encoder.layer_norm",
    "decoder.transformer_layers.*.layer_norm_1": "model.decoder.layers.*.self_attn_layer_norm",
    "decoder.transformer_layers.*.layer_norm_2": "model.decoder.layers.*.encoder_attn_layer_norm",
    "decoder.transformer_layers.*.feed_forward.layer_norm": "model.decoder.layers.*.final_layer_norm",
    "decoder.transformer_layers.*.feed_forward.w_1": "model.decoder.layers.*.fc1",
    "decoder.transformer_layers.*.feed_forward.w_2": "model.decoder.layers.*.fc2",
    "decoder.transformer_layers.*.self_attn.relative_positions_embeddings.weight": "model.decoder.layers.*.self_attn.relative_keys",
    "decoder.layer_norm": "model.decoder.layer_norm",
    "generator": "lm_head",
    **{f"encoder.transformer.*.self_attn.{a}": f"model.encoder.layers.*.self_attn.{b}" for a, b in _ATTENTION.items()},
    **{
        f"decoder.transformer_layers.*.{theirs}.{a}": f"model.decoder.layers.*.{ours}.{b}"
        for theirs, ours in (("self_attn", "self_attn"), ("context_attn", "encoder_attn"))
        for a, b in _ATTENTION.items()
    },
}
# Version 2 has a LayerNorm of its own, and a generator with one more module.
_OLD_NAMES = {".a_2": ".weight", ".b_2": ".bias", "generator.0.": "generator."}

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu"}
# Option: the values that RelPos can express, the default first, and what the others mean.
_EXPRESSIBLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "model_task": (("seq2seq",), "not a translation model"),
    "model_type": (("text",), "sources are not text"),
    "encoder_type": (("transformer",), "not a Transformer"),
    "decoder_type": (("transformer",), "not a Transformer"),
    "self_attn_type": (("scaled-dot", "scaled-dot-flash"), "another kind of self-attention"),
    "position_encoding": ((False,), "absolute positions of another layout besides the relative ones"),
    "relative_positions_buckets": ((0,), "a bias by buckets, as in T5"),
    "pos_ffn_activation_fn": (tuple(_ACTIVATIONS), "another activation, or a gated feed-forward layer"),
    "layer_norm": (("standard",), "RMSNorm"),
    "parallel_residual": ((False,), "attention and feed-forward side by side"),
    "sliding_window": ((0,), "attention to a window"),
    "num_experts": ((0,), "a mixture of experts"),
    "multiquery": ((False,), "keys and values shared by heads"),
    "copy_attn": ((False,), "copying of source words"),
    "generator_function": (("softmax",), "another output function"),
    "n_src_feats": ((0,), "word features"),
    "lora_layers": (([], None), "LoRA layers, which must be merged first"),
    "lora_embedding": ((False,), "LoRA embeddings, which must be merged first"),
    "quant_layers": (([], None), "quantised layers"),
    "src_vocab_threshold": ((0,), "subword models limited to frequent pieces"),
    "tgt_vocab_threshold": ((0,), "subword models limited to frequent pieces"),
}
_OTHER_METHODS = {0: "no relative positions", -1: "rotary positions", -2: "ALiBi"}

# Transforms of the text: the first cut it into pieces, the second act in training alone. Any other changes what the
# model is given, and a tokenizer that does not know of it would give something else.
_SUBWORD_TRANSFORMS = {"sentencepiece", "bpe"}
_TRAINING_TRANSFORMS = {"filtertoolong", "switchout", "tokendrop", "tokenmask", "bart", "clean"}


class OpenNMTPyConverter(Converter):
    """An OpenNMT-py checkpoint.

    Args:
        source: The `.pt` file; weights in safetensors are looked for beside it.
        subwords: Subword models of source and target, or the one of both. By default those that the checkpoint names,
            beside it or where it says.
        allow_pickle: Read a checkpoint with classes other than its options, which can run any code.
    """

    toolkit: ClassVar[str] = "OpenNMT-py"

    def __init__(self, source: Path, *, subwords: Sequence[Path] = (), allow_pickle: bool = False):
        super().__init__(source)
        self._subwords = both_sides("subwords", subwords)
        self._checkpoint = _load_checkpoint(source, allow_pickle)
        self._options: dict[str, Any] = vars(self._checkpoint["opt"])
        self._foreign = _foreign_weights(self._checkpoint, source)
        self._vocabularies = _vocabularies(self._checkpoint["vocab"])

    def obstacles(self) -> list[str]:
        found = [
            f"{name}={value!r} ({meaning})"
            for name, (allowed, meaning) in _EXPRESSIBLE.items()
            if (value := self._options.get(name, allowed[0])) not in allowed
        ]
        distance = self._options.get("max_relative_positions", 0)
        if not isinstance(distance, int):
            found.append(f"max_relative_positions={distance!r} (not a whole number)")
        elif distance <= 0:
            found.append(f"max_relative_positions={distance} ({_OTHER_METHODS.get(distance, 'unknown')})")
        heads, kv_heads = self._options.get("heads", 8), self._options.get("num_kv", 0)
        if kv_heads not in (0, heads):
            found.append(f"num_kv={kv_heads} (keys and values shared by groups of the {heads} heads)")
        known = _SUBWORD_TRANSFORMS | _TRAINING_TRANSFORMS
        transforms = [transform for transform in self._transforms() if transform not in known]
        if transforms and not self._subwords:
            found.append(
                f"transforms={transforms} (they change the text; where the pieces are those of a subword model all the "
                "same, name it with --subwords)"
            )
        for token in (_UNK, _PAD, _EOS):
            ids = [vocabulary.index(token) if token in vocabulary else None for vocabulary in self._vocabularies]
            if None in ids or ids[0] != ids[1]:
                found.append(f"the token {token} has the id {ids[0]} in the source and {ids[1]} in the target")
        if self._start_token() not in self._vocabularies[1]:
            found.append(f"decoder_start_token={self._start_token()!r} (not in the vocabulary)")
        return found

    def config(self) -> RelPosConfig:
        source, target = self._vocabularies
        options = self._options
        attention_biases = [name for name in self._foreign if name.endswith("linear_keys.bias")]
        return RelPosConfig(
            vocab_size=len(source),
            decoder_vocab_size=len(target),
            d_model=self._foreign["encoder.layer_norm.weight"].shape[0],
            encoder_layers=count_layers(self._foreign, "encoder.transformer."),
            decoder_layers=count_layers(self._foreign, "decoder.transformer_layers."),
            encoder_attention_heads=options.get("heads", 8),
            decoder_attention_heads=options.get("heads", 8),
            encoder_ffn_dim=self._foreign["encoder.transformer.0.feed_forward.w_1.weight"].shape[0],
            decoder_ffn_dim=self._foreign["decoder.transformer_layers.0.feed_forward.w_1.weight"].shape[0],
            activation_function=_ACTIVATIONS[options.get("pos_ffn_activation_fn", "relu")],
            dropout=_first(options.get("dropout", 0.1)),
            attention_dropout=_first(options.get("attention_dropout", options.get("dropout", 0.1))),
            activation_dropout=_first(options.get("dropout", 0.1)),  # OpenNMT-py drops out there as well
            max_relative_position=options["max_relative_positions"],
            relative_position_tied=True,
            normalize_before=True,
            layer_norm_eps=options.get("norm_eps", 1e-6),
            scale_embedding=False,
            share_encoder_decoder_embeddings=bool(options.get("share_embeddings", False)),
            tie_word_embeddings=bool(options.get("share_decoder_embeddings", False)),
            attention_bias=bool(attention_biases),
            mlp_bias="encoder.transformer.0.feed_forward.w_1.bias" in self._foreign,
            lm_head_bias="generator.bias" in self._foreign,
            pad_token_id=target.index(_PAD),
            eos_token_id=target.index(_EOS),
            bos_token_id=target.index(_BOS) if _BOS in target else None,
            decoder_start_token_id=target.index(self._start_token()),
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return rename(self._foreign, _KEYS)

    def tokenizer(self) -> RelPosTokenizer:
        sides = tokenizer_sides(self._vocabularies, [self._subword_model(index) for index in range(2)])
        return RelPosTokenizer(**sides, unk_token=_UNK, pad_token=_PAD, eos_token=_EOS, bos_token=_BOS)

    def decoding(self) -> Decoding:
        """The defaults of its translate command, since checkpoints do not say: beam 5, scores divided by the length."""
        notes = [
            "OpenNMT-py keeps no decoding options in a checkpoint. The saved ones are the defaults of its translate "
            "command: 5 beams and the length penalty 'avg' with alpha 1, which is `length_penalty=1.0` here (both divide a "
            "hypothesis's log-probability by its length with the end token). Its search stops once the best beam has "
            "ended, the one of `generate` once no better hypothesis can come.",
        ]
        if not any(self._subword_model(index) for index in range(2)):
            notes.append("The text must come tokenized as in training, with spaces between the tokens.")
        return Decoding({"num_beams": 5, "length_penalty": 1.0}, tuple(notes))

    def facts(self) -> dict[str, Any]:
        state = self._checkpoint.get("optim")
        steps = state.get("training_step") if isinstance(state, dict) else None
        return {"steps": steps - 1} if isinstance(steps, int) and steps > 1 else {}

    def _start_token(self) -> str:
        vocabulary = self._checkpoint["vocab"]
        named = vocabulary.get("decoder_start_token") if isinstance(vocabulary, dict) else None
        return named or self._options.get("decoder_start_token") or _BOS

    def _transforms(self) -> list[str]:
        """Names of the transforms that any corpus went through, in the order of the options."""
        corpora = self._options.get("data") or {}
        if not isinstance(corpora, dict) or not all(isinstance(corpus, dict) for corpus in corpora.values()):
            raise ConversionError(f"The checkpoint {self.source} says data={corpora!r}, which must be corpora by name.")
        listed: list[str] = []
        for options in (self._options, *corpora.values()):
            transforms = options.get("transforms") or []
            if not isinstance(transforms, list):
                raise ConversionError(
                    f"The checkpoint {self.source} says transforms={transforms!r}, which must be a list."
                )
            listed += transforms
        return list(dict.fromkeys(listed))

    def _subword_model(self, index: int) -> Path | None:
        """The subword model of the source (0) or the target (1); None where words were fed as they stood."""
        if self._subwords:
            return self._subwords[index]
        if not _SUBWORD_TRANSFORMS & set(self._transforms()):
            return None
        names = [self._options.get(f"{side}_subword_model") for side in ("src", "tgt")]
        name = names[index] or names[0]
        if not name:
            raise ConversionError(f"The checkpoint {self.source} names no subword model; name it with --subwords.")
        for path in (self.source.parent / Path(name).name, Path(name)):
            if path.is_file():
                return path
        raise ConversionError(
            f"The subword model {Path(name).name} is not beside the checkpoint {self.source}; name it with --subwords."
        )


def _load_checkpoint(path: Path, allow_pickle: bool) -> dict[str, Any]:
    if not path.exists():
        raise ConversionError(f"There is no OpenNMT-py model {path}.")
    if path.is_dir():
        raise ConversionError(f"{path} is a folder; an OpenNMT-py model is a .pt file.")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            checkpoint = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        raise ConversionError(_explain_pickle(path, error)) from error
    except (ImportError, AttributeError) as error:
        raise ConversionError(f"The checkpoint {path} needs a package that is not installed: {error}.") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ConversionError(f"{path} is not an OpenNMT-py checkpoint, or it is cut off.") from error
    if (
        not isinstance(checkpoint, dict)
        or not isinstance(checkpoint.get("opt"), argparse.Namespace)
        or "vocab" not in checkpoint
    ):
        raise ConversionError(f"{path} is not an OpenNMT-py checkpoint: it holds no options and vocabulary.")
    return checkpoint


def _explain_pickle(path: Path, error: pickle.UnpicklingError) -> str:
    """What torch says in a page, in a sentence."""
    message = str(error)
    marker = "Unsupported global: GLOBAL "
    if marker not in message:
        return f"{path} is not an OpenNMT-py checkpoint, or it is cut off."
    name = message.split(marker, 1)[1].split()[0]
    return (
        f"The checkpoint {path} holds a {name}, which is not loaded from untrusted files; pass --allow-pickle if you "
        "trust it to run code."
    )


def _foreign_weights(checkpoint: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Weights by their names in version 3."""
    if "model" in checkpoint:
        weights, generator = checkpoint["model"], checkpoint.get("generator") or {}
        for part in (weights, generator):
            if not isinstance(part, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in part.values()):
                raise ConversionError(f"The checkpoint {path} is damaged: its weights must be tensors by name.")
        weights = weights | {f"generator.{name}": tensor for name, tensor in generator.items()}
    else:
        weights = _load_safetensors(path.with_suffix(".safetensors"), path)
    for old, new in _OLD_NAMES.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    required = ("encoder.layer_norm.weight", "encoder.transformer.0.feed_forward.w_1.weight")
    require_weights(weights, required, f"{path} is not a Transformer of OpenNMT-py")
    return weights


def _load_safetensors(path: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise ConversionError(f"The checkpoint {checkpoint} holds no weights, and there is no {path.name} beside it.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ConversionError(f"The weight file {path} is cut off or damaged: {error}.") from error


def _vocabularies(vocab: Any) -> tuple[list[str], list[str]]:
    """Tokens of source and target in the order of their ids: lists in version 3, torchtext's fields in version 2."""
    try:
        sides = vocab["src"], vocab["tgt"]
        if all(isinstance(side, list) for side in sides):
            return sides
        source, target = (list(side.fields[0][1].vocab.itos) for side in sides)
        return source, target
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConversionError("The checkpoint holds no vocabulary of source and target.") from error


def _first(rate: Any) -> float:
    """Dropout may follow a schedule, a list of rates; the first is the one it was tuned with."""
    first = rate[0] if isinstance(rate, list) and rate else rate
    if not isinstance(first, int | float):
        raise ConversionError(f"The checkpoint says dropout={rate!r}, which must be a rate or a list of rates.")
    return float(first)
