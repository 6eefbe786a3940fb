# Copyright 2026 The RelPos authors. Licensed under the Apache License, Version 2.0.
"""Configuration of RelPos: an encoder-decoder Transformer with the relative position representations of Shaw et al. 2018."""

from typing import Any

import transformers

# Checked here and not in the package's __init__, which the Hub does not serve, and before anything is imported that older
# versions lack. They hand the cache over under another name: a model would generate wrong text without a word.
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 24):
    raise ImportError(
        f"RelPos needs transformers 5.24 or newer and found {transformers.__version__}: "
        "run `pip install --upgrade 'transformers>=5.24,<6'`."
    )

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

# How a saved folder names its own code, for people who load it without this package.
_AUTO_MAP = {
    "AutoConfig": "configuration_relpos.RelPosConfig",
    "AutoModel": "modeling_relpos.RelPosModel",
    "AutoModelForSeq2SeqLM": "modeling_relpos.RelPosForConditionalGeneration",
}
_ABSOLUTE_POSITIONS = ("none", "sinusoidal", "learned")


def _custom_pipelines() -> dict[str, dict[str, Any]]:
    """A fresh entry each time: `transformers.pipeline` writes classes into the one that it is given."""
    return {"translation": {"impl": "pipeline_relpos.TranslationPipeline", "pt": ["AutoModelForSeq2SeqLM"]}}


@strict
class RelPosConfig(PreTrainedConfig):
    r"""
    Configuration of [`RelPosModel`] and [`RelPosForConditionalGeneration`]. Fields carry the names of BART and Marian
    where the meaning is the same. The defaults are the base model of Shaw et al. 2018 (arXiv 1803.02155, section 4.1)
    with tables shared by the heads.

    Args:
        vocab_size (`int`): Size of the source vocabulary, and of the target's where that is not given.
        decoder_vocab_size (`int`, *optional*): Size of the target vocabulary; `vocab_size` by default, and whenever that
            is assigned to a configuration whose embeddings are shared.
        d_model (`int`): Width of the layers.
        encoder_layers, decoder_layers (`int`): Number of layers.
        encoder_attention_heads, decoder_attention_heads (`int`): Number of heads; each must divide `d_model`.
        encoder_ffn_dim, decoder_ffn_dim (`int`): Inner width of the feed-forward layers.
        activation_function (`str`): Activation of the feed-forward layers, a name that Transformers knows.
        dropout (`float`): Dropout of the embeddings and of every sub-layer's output.
        attention_dropout (`float`): Dropout of the attention weights.
        activation_dropout (`float`): Dropout after the activation of the feed-forward layers.
        max_relative_position (`int`, *optional*): The clipping distance k of the paper, at least 0. `None`: the model
            has no relative positions.
        relative_position_keys (`bool`): Have the table a^K, which enters the scores (equation 4).
        relative_position_values (`bool`): Have the table a^V, which enters the outputs (equation 3).
        relative_position_per_head (`bool`): Tables of shape [heads, 2k + 1, head_dim] instead of [2k + 1, head_dim].
        relative_position_tied (`bool`): One table serves keys and values, as in OpenNMT-py.
        absolute_position (`str`): What is added to the embeddings: `"none"`, `"sinusoidal"` or `"learned"`.
        max_position_embeddings (`int`, *optional*): Number of rows of the learned absolute positions. The other
            positions have no ceiling.
        normalize_before (`bool`): LayerNorm before every sub-layer and once at the end (pre-norm), or after every
            residual sum (post-norm, as in Vaswani et al. 2017).
        layer_norm_eps (`float`): Epsilon of LayerNorm. Toolkits differ: 1e-6 in OpenNMT-py and tensor2tensor, 1e-5 in
            PyTorch, 1e-3 in OpenNMT-tf.
        scale_embedding (`bool`): Multiply embeddings by sqrt(d_model).
        share_encoder_decoder_embeddings (`bool`): One embedding table for source and target.
        tie_word_embeddings (`bool`): The output layer uses the target's embedding table.
        attention_bias, mlp_bias, lm_head_bias (`bool`): Biases of the attention projections, of the feed-forward layers
            and of the output layer.
        init_std (`float`): Standard deviation of embeddings that are not scaled; scaled ones start at d_model^-0.5.
        use_cache (`bool`): Return the cache of keys and values.
        pad_token_id, eos_token_id, bos_token_id, decoder_start_token_id: Special tokens. The decoder starts with
            `pad_token_id` unless told otherwise.

    Raises:
        ValueError: A value, or a combination of values, that no model can have, or a field about positions that is not
            listed here; the message names the field, the value and what is allowed. Checked again when a model is built, since fields can be assigned in between.

    Example:

    ```python
    >>> from relpos import RelPosConfig, RelPosForConditionalGeneration

    >>> config = RelPosConfig(vocab_size=8000, max_relative_position=16)
    >>> model = RelPosForConditionalGeneration(config)
    ```"""

    model_type = "relpos"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012 (the library's own way)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
        # T5's name, by which the library's example scripts know a model without a longest sequence
        "relative_attention_max_distance": "max_relative_position",
    }
    _auto_class = "AutoConfig"

    vocab_size: int = 32768
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 1024
    decoder_ffn_dim: int = 1024
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    max_relative_position: int | None = 16
    relative_position_keys: bool = True
    relative_position_values: bool = True
    relative_position_per_head: bool = False
    relative_position_tied: bool = False
    absolute_position: str = "none"
    max_position_embeddings: int | None = None
    normalize_before: bool = True
    layer_norm_eps: float = 1e-6
    scale_embedding: bool = True
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    lm_head_bias: bool = False
    init_std: float = 0.02
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    bos_token_id: int | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs):
        self._refuse_unknown_positions(kwargs)
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.pad_token_id
        super().__post_init__(**kwargs)
        self.validate_relpos()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # one table serves both sides, as in `config.vocab_size = len(tokenizer)`
        if name == "vocab_size" and self.__dict__.get("share_encoder_decoder_embeddings"):
            self.decoder_vocab_size = value

    @property
    def custom_pipelines(self) -> dict[str, dict[str, Any]]:
        """The pipeline that a saved folder carries; nothing where the task is registered, so that nobody who has the
        package is asked to trust the folder's copy of it."""
        from transformers.pipelines import PIPELINE_REGISTRY

        return {} if "translation" in PIPELINE_REGISTRY.supported_tasks else _custom_pipelines()

    @custom_pipelines.setter
    def custom_pipelines(self, value: Any) -> None:
        """Ignored: the entry follows from the code that travels with the folder, not from what a file or a pipeline
        object says."""

    def to_dict(self) -> dict[str, Any]:
        """The configuration as it is written to files, with the names of the code that travels with a saved folder."""
        output = super().to_dict()
        # an entry with "--" names the repository that a model once came from
        own = {name: code for name, code in (output.get("auto_map") or {}).items() if "--" not in code}
        return {**output, "auto_map": {**_AUTO_MAP, **own}, "custom_pipelines": _custom_pipelines()}

    def validate_relpos(self) -> None:
        """Refuse what no model can have.

        Raises:
            ValueError: Names the field, its value and what is allowed.
        """
        self._check_sizes()
        self._check_rates()
        self._check_positions()
        self._check_vocabularies()

    @staticmethod
    def _refuse_unknown_positions(fields: dict[str, Any]) -> None:
        """Fields that are no field of this class are kept, as in all of Transformers. Not those about positions: a
        misspelt one, or one of a later version, would give another model without a word."""
        for name in fields:
            if name.startswith(("relative_", "max_relative_", "absolute_")):
                raise ValueError(
                    f"`{name}` is no field of RelPosConfig: its name is misspelt, or it needs a newer version of RelPos."
                )

    def _require(self, condition: bool, field: str, allowed: str) -> None:
        if not condition:
            raise ValueError(f"`{field}` is {getattr(self, field)!r} and must be {allowed}.")

    def _check_sizes(self) -> None:
        for field in ("vocab_size", "decoder_vocab_size", "d_model"):
            self._require(getattr(self, field) >= 1, field, "at least 1")
        for side in ("encoder", "decoder"):
            self._require(getattr(self, f"{side}_layers") >= 1, f"{side}_layers", "at least 1")
            self._require(getattr(self, f"{side}_ffn_dim") >= 1, f"{side}_ffn_dim", "at least 1")
            heads = f"{side}_attention_heads"
            self._require(
                getattr(self, heads) >= 1 and self.d_model % getattr(self, heads) == 0,
                heads,
                f"a divisor of `d_model`, which is {self.d_model}",
            )

    def _check_rates(self) -> None:
        from transformers.activations import ACT2FN

        for field in ("dropout", "attention_dropout", "activation_dropout"):
            self._require(0 <= getattr(self, field) < 1, field, "at least 0 and less than 1")
        self._require(self.layer_norm_eps > 0, "layer_norm_eps", "greater than 0")
        self._require(self.init_std >= 0, "init_std", "at least 0")
        self._require(
            self.activation_function in ACT2FN,
            "activation_function",
            "an activation that Transformers knows, such as 'relu' or 'gelu'",
        )

    def _check_positions(self) -> None:
        k = self.max_relative_position
        self._require(k is None or k >= 0, "max_relative_position", "at least 0, or None for no relative positions")
        tables = self.relative_position_keys, self.relative_position_values
        if k is not None and not any(tables):
            raise ValueError(
                f"`max_relative_position` is {k}, but `relative_position_keys` and `relative_position_values` are both "
                "False: set one of them to True, or `max_relative_position` to None."
            )
        for field in ("relative_position_per_head", "relative_position_tied"):
            self._require(
                k is not None or not getattr(self, field), field, "False where `max_relative_position` is None"
            )
        self._require(
            all(tables) or not self.relative_position_tied,
            "relative_position_tied",
            "False unless `relative_position_keys` and `relative_position_values` are both True",
        )
        self._require(
            self.absolute_position in _ABSOLUTE_POSITIONS, "absolute_position", f"one of {_ABSOLUTE_POSITIONS}"
        )
        if self.absolute_position == "sinusoidal":
            self._require(self.d_model % 2 == 0, "d_model", "even where `absolute_position` is 'sinusoidal'")
        if self.absolute_position == "learned":
            self._require(
                (self.max_position_embeddings or 0) >= 1,
                "max_position_embeddings",
                "at least 1 where `absolute_position` is 'learned'",
            )

    def _check_vocabularies(self) -> None:
        if self.share_encoder_decoder_embeddings:
            self._require(
                self.decoder_vocab_size == self.vocab_size,
                "decoder_vocab_size",
                f"`vocab_size`, which is {self.vocab_size}, where `share_encoder_decoder_embeddings` is True",
            )
        vocabulary = min(self.vocab_size, self.decoder_vocab_size)
        eos = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        for field, ids in {
            "pad_token_id": [self.pad_token_id],
            "decoder_start_token_id": [self.decoder_start_token_id],
            "bos_token_id": [self.bos_token_id],
            "eos_token_id": eos,
        }.items():
            self._require(
                all(i is None or 0 <= i < vocabulary for i in ids),
                field,
                f"within the vocabulary, at least 0 and less than {vocabulary}",
            )
        self._require(self.pad_token_id is not None, "pad_token_id", "a token of the vocabulary")


__all__ = ["RelPosConfig"]
