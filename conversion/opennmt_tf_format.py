"""Checkpoints of OpenNMT-tf, version 2, read without TensorFlow.

What is particular to them: kernels are [input, output], LayerNorm's epsilon is Keras's 1e-3, and `<unk>` is no line of a
vocabulary but the id behind its last. Two vocabularies seldom end at the same id, so `<unk>` moves to id 3 here, in the
weights as in the tokenizer. The checkpoint does not say how the model computes: that is the Python file
`model_description.py` beside it, which is read but never run. Vocabularies and tokenization are in the run's YAML file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml

from relpos import RelPosConfig, RelPosTokenizer

from .converter import Converter, Decoding, KeyTable, both_sides, count_layers, own_names, rename, require_weights
from .files import ConversionError, read_lines, read_text
from .opennmt_tf_description import read_description
from .segmenters import tokenizer_sides
from .tensorflow_checkpoint import TensorFlowCheckpoint, find_checkpoint, plain_weight

_SIDES = ("source", "target")
_SPECIAL_TOKENS = ["<blank>", "<s>", "</s>"]
"""What every vocabulary begins with: padding, start and end."""
_UNK = "<unk>"
_UNK_ID = len(_SPECIAL_TOKENS)
_LAYER_NORM_EPS = 1e-3
_DESCRIPTION = "model_description.py"
_VARIABLE = "/.ATTRIBUTES/VARIABLE_VALUE"
_PARAMETERS = {"kernel": "weight", "gamma": "weight", "beta": "bias"}
_SENTENCEPIECE_OPTIONS = {"mode", "sp_model_path", "sp_nbest_size", "sp_alpha"}  # the last two act in training alone

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

_WHOLE_NUMBERS = {"beam_width": (4, 1), "minimum_decoding_length": (0, 0), "maximum_decoding_length": (250, 1)}
"""Decoding options with OpenNMT-tf's defaults, and the least that they may be."""
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
        prefix = find_checkpoint(source)
        self._config_file = Path(config) if config else None
        self._options = _read_config(self._config_file) if self._config_file else {}
        self._subwords = both_sides("subwords", subwords)
        self._steps = prefix.name.rpartition("-")[2]
        self._foreign = _foreign_weights(TensorFlowCheckpoint(prefix), prefix)
        self._arguments = read_description(prefix.with_name(_DESCRIPTION))
        named = both_sides("vocabularies", vocabularies)
        paths = named or [self._vocabulary_path(side) for side in _SIDES]
        self._vocabularies = [read_vocabulary(path) for path in paths]

    def obstacles(self) -> list[str]:
        found = [f"{name} (RelPos has no place for it)" for name in self._foreign if own_names(name, _KEYS) is None]
        if not any(name.endswith(".relative_position_keys") for name in self._foreign):
            found.append("maximum_relative_position=None (no relative positions)")
        found += _obstacles_of_description(self._arguments)
        controls = self._section("target_sequence_controls")
        if controls and not (controls.get("start") and controls.get("end")):
            found.append(f"target_sequence_controls={controls} (targets without a start or an end token)")
        for side in _SIDES:
            reason = None if self._subwords else _obstacle_of_tokenization(*self._tokenization(side))
            if reason:
                found.append(f"{side}_tokenization={reason}")
        return found

    def config(self) -> RelPosConfig:
        weights, arguments = self._foreign, self._arguments
        table = weights["encoder.layers.0.self_attention.layer.relative_position_keys"]
        d_model = weights[_SOURCE_EMBEDDING].shape[1]
        heads = max(d_model // table.shape[1], 1)
        return RelPosConfig(
            vocab_size=len(self._vocabularies[0]),
            decoder_vocab_size=len(self._vocabularies[1]),
            d_model=d_model,
            encoder_layers=count_layers(weights, "encoder.layers."),
            decoder_layers=count_layers(weights, "decoder.layers."),
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=weights["encoder.layers.0.ffn.layer.inner.bias"].shape[0],
            decoder_ffn_dim=weights["decoder.layers.0.ffn.layer.inner.bias"].shape[0],
            activation_function=_activation(arguments["ffn_activation"]),
            dropout=_number(arguments["dropout"]),
            attention_dropout=_number(arguments["attention_dropout"]),
            activation_dropout=_number(arguments["ffn_dropout"]),
            max_relative_position=(table.shape[0] - 1) // 2,
            normalize_before="encoder.layer_norm.weight" in weights,
            layer_norm_eps=_LAYER_NORM_EPS,
            scale_embedding=True,
            share_encoder_decoder_embeddings=_TARGET_EMBEDDING not in weights,
            tie_word_embeddings="decoder.output_layer.weight" not in weights,
            attention_bias="encoder.layers.0.self_attention.layer.linear_queries.bias" in weights,
            lm_head_bias="decoder.output_layer.bias" in weights,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        weights = rename(self._foreign, _KEYS)
        for name, tensor in weights.items():
            if name.endswith(_BY_TOKEN):
                side = 0 if name.startswith("model.encoder") else 1
                weights[name] = self._move_unknown(tensor, len(self._vocabularies[side]))
        return weights

    def _move_unknown(self, rows: torch.Tensor, size: int) -> torch.Tensor:
        """Rows by token with the last one, that of `<unk>`, at its id here.

        Raises:
            ConversionError: There are not as many rows as tokens, so that the last one would be another token's.
        """
        if rows.shape[0] != size:
            raise ConversionError(
                f"The vocabulary has {size - 1} tokens, which makes {size} with {_UNK}, and the model embeds "
                f"{rows.shape[0]}: they do not belong together."
            )
        return torch.cat([rows[:_UNK_ID], rows[-1:], rows[_UNK_ID:-1]])

    def tokenizer(self) -> RelPosTokenizer:
        subwords = self._subwords or [self._named_subwords(side) for side in _SIDES]
        controls = self._section("source_sequence_controls")
        return RelPosTokenizer(
            **tokenizer_sides(self._vocabularies, subwords, ascii_spaces=True),
            add_source_bos=bool(controls.get("start")),
            add_source_eos=bool(controls.get("end")),
            unk_token=_UNK,
            pad_token=_SPECIAL_TOKENS[0],
            bos_token=_SPECIAL_TOKENS[1],
            eos_token=_SPECIAL_TOKENS[2],
        )

    def decoding(self) -> Decoding:
        """What the YAML file says, and OpenNMT-tf's defaults for what it does not."""
        params = self._options.get("params") or {}
        beams, shortest, longest = (_whole_number(params, name, *limits) for name, limits in _WHOLE_NUMBERS.items())
        if shortest > longest:
            raise ConversionError(
                f"The configuration says minimum_decoding_length={shortest}, which must be at most "
                f"maximum_decoding_length={longest}."
            )
        penalty = _length_penalty(params)
        settings = {"num_beams": beams, "length_penalty": float(penalty), "max_length": longest + 1}  # with the start
        if shortest:
            settings["min_new_tokens"] = shortest
        notes = [_explain_penalty(penalty)]
        if "beam_width" not in params:
            notes.append("The beam of 4 is what OpenNMT-tf's --auto_config sets; no configuration said otherwise.")
        notes += [
            f"{name}={params[name]!r} of OpenNMT-tf has no counterpart in `generate`."
            for name, default in _NO_COUNTERPART.items()
            if params.get(name, default) != default
        ]
        if not self._subwords and any(not self._tokenization(side)[0] for side in _SIDES):
            notes.append("The text must come tokenized as in training, with spaces between the tokens.")
        return Decoding(settings, tuple(notes))

    def facts(self) -> dict[str, Any]:
        return {"steps": int(self._steps)} if self._steps.isdecimal() else {}

    @property
    def _data(self) -> dict[str, Any]:
        return self._options.get("data") or {}

    def _section(self, name: str) -> dict[str, Any]:
        """An entry of the configuration's data that has names and values of its own; empty where there is none."""
        section = self._data.get(name) or {}
        if not isinstance(section, dict):
            raise ConversionError(
                f"The entry {name} of the configuration {self._config_file} must hold names with values."
            )
        return section

    def _tokenization(self, side: str) -> tuple[str, dict[str, Any]]:
        """Kind and parameters of the tokenizer of a side; no kind where the text is split at spaces."""
        name = f"{side}_tokenization"
        config = self._data.get(name)
        if isinstance(config, str):
            is_json = config.lstrip().startswith("{")
            config = _parse_config(config, name) if is_json else _read_config(self._locate(config))
        else:
            config = self._section(name)
        if not config:
            return "", {}
        if not config.get("type"):
            return "OpenNMTTokenizer", config
        params = config.get("params") or {}
        if not isinstance(params, dict):
            raise ConversionError(
                f"The params of {name} in the configuration {self._config_file} must hold names with values."
            )
        return config["type"], params

    def _named_subwords(self, side: str) -> Path | None:
        """The SentencePiece model that the configuration names for a side; None where it splits text at spaces."""
        path = _sentencepiece_path(*self._tokenization(side))
        return self._locate(str(path)) if path else None

    def _vocabulary_path(self, side: str) -> Path:
        name = self._data.get(f"{side}_vocabulary")
        if not name:
            raise ConversionError(
                f"The {side} vocabulary of {self.source} is not known: name the run's YAML file with --config, or the "
                "files of the vocabularies with --vocabularies."
            )
        return self._locate(str(name))

    def _locate(self, name: str) -> Path:
        """A file that the configuration names: from its folder, from here, or beside it or the checkpoint."""
        folder, run = self._config_file.parent, self.source if self.source.is_dir() else self.source.parent
        for path in (folder / name, Path(name), folder / Path(name).name, run / Path(name).name):
            if path.is_file():
                return path
        raise ConversionError(f"The configuration names the file {name}, which is not beside it.")


def _obstacles_of_description(arguments: dict[str, str]) -> list[str]:
    found = []
    if arguments["position_encoder_class"] != "None":
        value = arguments["position_encoder_class"]
        found.append(f"position_encoder_class={value} (absolute positions of another layout besides the relative ones)")
    if _activation(arguments["ffn_activation"]) is None:
        found.append(f"ffn_activation={arguments['ffn_activation']} (another activation)")
    for side in ("source_inputter", "target_inputter"):
        kind = arguments[side].split("(")[0].rpartition(".")[2]
        if kind not in ("None", "WordEmbedder"):
            found.append(f"{side}={kind} (more than the embedding of a token)")
    found += [
        f"{name}={arguments[name]} (not a rate that can be read without running {_DESCRIPTION})"
        for name in ("dropout", "attention_dropout", "ffn_dropout")
        if _number(arguments[name]) is None
    ]
    return found


def _obstacle_of_tokenization(kind: str, params: dict[str, Any]) -> str | None:
    """What of a tokenization a `tokenizers` object cannot do, or None."""
    if kind in ("", "SpaceTokenizer") or _sentencepiece_path(kind, params):
        return None
    shown = f"{kind}({', '.join(f'{name}={value!r}' for name, value in params.items())})"
    return f"{shown} (only SentencePiece and text split at spaces are read; name a subword model with --subwords)"


def _sentencepiece_path(kind: str, params: dict[str, Any]) -> str | None:
    """The model of a tokenization that is SentencePiece and nothing else."""
    if kind == "SentencePieceTokenizer":
        return params.get("model")
    alone = kind == "OpenNMTTokenizer" and params.get("mode") == "none" and not params.keys() - _SENTENCEPIECE_OPTIONS
    return params.get("sp_model_path") if alone else None


def _whole_number(params: dict[str, Any], name: str, default: int, least: int) -> int:
    value = params.get(name, default)
    if type(value) is not int or value < least:  # a bool is an int, too
        raise ConversionError(
            f"The configuration says {name}={value!r}, which must be a whole number of at least {least}."
        )
    return value


def _length_penalty(params: dict[str, Any]) -> float:
    value = params.get("length_penalty", 0)
    if not isinstance(value, int | float):
        raise ConversionError(f"The configuration says length_penalty={value!r}, which must be a number.")
    return value


def _explain_penalty(penalty: float) -> str:
    if not penalty:
        return "OpenNMT-tf's search ranks by the sum of log-probabilities, as `length_penalty=0.0` does here."
    return (
        f"The length penalty {penalty} of OpenNMT-tf divides by ((5 + length) / 6)^{penalty} and the one of `generate` by "
        f"length^{penalty}: the number was kept, but long translations are favoured more here. `relpos translate "
        f"--gnmt-penalty {penalty}` ranks by the former."
    )


def _foreign_weights(checkpoint: TensorFlowCheckpoint, prefix: Path) -> dict[str, torch.Tensor]:
    """Weights by their names in the model: dots for slashes, weight and bias, [output, input]."""
    weights = {}
    for name in checkpoint:
        if name.startswith("model/") and "/.OPTIMIZER_SLOT/" not in name:
            path = name.removeprefix("model/").removesuffix(_VARIABLE)
            weights |= plain_weight(path, checkpoint[name], _PARAMETERS)
    required = (_SOURCE_EMBEDDING, "encoder.layers.0.ffn.layer.inner.bias", "decoder.layers.0.ffn.layer.inner.bias")
    require_weights(weights, required, f"{prefix} is not a Transformer of OpenNMT-tf 2")
    return weights


def read_vocabulary(path: Path) -> list[str]:
    """Tokens of a vocabulary file, one a line, with `<unk>` at its id here.

    Raises:
        ConversionError: There is no such file, it does not begin with the special tokens, or holds `<unk>`.
    """
    tokens = read_lines(path, "vocabulary")
    if tokens[:_UNK_ID] != _SPECIAL_TOKENS:
        raise ConversionError(f"The vocabulary {path} must begin with {', '.join(_SPECIAL_TOKENS)}, a line each.")
    if _UNK in tokens:
        raise ConversionError(f"The vocabulary {path} holds {_UNK}, which has an id of its own.")
    return [*_SPECIAL_TOKENS, _UNK, *tokens[_UNK_ID:]]


def _activation(function: str) -> str | None:
    """Name here of an activation function by its name there, such as `tf.nn.relu`; None if RelPos has no such."""
    return _ACTIVATIONS.get(".".join(function.split(".")[-2:]))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read_config(path: Path) -> dict[str, Any]:
    return _parse_config(read_text(path, "configuration"), str(path))


def _parse_config(text: str, name: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConversionError(f"The configuration {name} is not YAML.") from error
    if not isinstance(config, dict):
        raise ConversionError(f"The configuration {name} must hold names with values.")
    for section in ("data", "params"):
        if not isinstance(config.get(section) or {}, dict):
            raise ConversionError(f"The section {section} of the configuration {name} must hold names with values.")
    return config
