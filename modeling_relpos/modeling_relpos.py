"""RelPos in PyTorch: an encoder-decoder Transformer whose self-attention knows relative positions (Shaw et al. 2018)."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_relpos import (
    FEW_CACHED,
    Padding,
    add_rows,
    attention_by_rows,
    attention_of_last_token,
    attention_of_tokens,
    relative_rows,
)
from .configuration_relpos import RelPosConfig
from .pipeline_relpos import TranslationPipeline  # noqa: F401 (so that the file travels with a saved model)

logger = logging.get_logger(__name__)


def shift_tokens_right(labels: torch.Tensor, pad_token_id: int, decoder_start_token_id: int) -> torch.Tensor:
    """Decoder inputs of teacher forcing: the labels moved one to the right behind the start token, -100 as padding.

    Args:
        labels: [batch, targets].

    Returns:
        [batch, targets].
    """
    shifted = labels.roll(1, dims=-1)
    shifted[:, :1] = decoder_start_token_id  # a slice, so that labels of no length pass
    return shifted.masked_fill(shifted == -100, pad_token_id)


def as_encoder_output(outputs: dict[str, Any] | tuple[torch.Tensor, ...]) -> BaseModelOutput:
    """An encoder's output of another class, or as a tuple, as the one that this model's encoder has."""
    if isinstance(outputs, dict):  # as all outputs of the library are
        return BaseModelOutput(**{field.name: outputs.get(field.name) for field in fields(BaseModelOutput)})
    return BaseModelOutput(*outputs)


def token_positions(
    attention_mask: torch.Tensor | None,
    past: torch.Tensor | int,
    length: int,
    device: torch.device,
    is_static: bool = False,
) -> torch.Tensor:
    """Absolute positions of the last `length` tokens, counted from the mask, so that padding on the left moves nothing.

    Args:
        attention_mask: [batch, past + length], zero at padding. Without it, or where it is a ready-made 4-D mask, tokens
            are counted from the start of the cache.
        past: Tokens in the cache.
        is_static: The cache is static. `generate` has then made the mask 4-D, and what a token sees of it is counted.

    Returns:
        [batch, length] or [1, length] of int64; 0 at padding on the left.
    """
    if is_static and attention_mask is not None and attention_mask.dim() == 4:
        seen = attention_mask[:, 0]
        seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
        return (seen.sum(-1) - 1).clamp(min=0)
    if attention_mask is None or attention_mask.dim() != 2:
        return (torch.arange(length, device=device) + past)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]


class RelPosSinusoidalPositions(nn.Module):
    """Sinusoidal positions of Vaswani et al. 2017, section 3.5, sines in the first half and cosines in the second.

    Computed from the positions at hand: there is no table, so no longest sequence, and nothing to save.
    """

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model = d_model

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[batch, length] -> [batch, length, d_model], float32."""
        exponent = torch.arange(0, self.d_model, 2, device=positions.device, dtype=torch.float32) / self.d_model
        angles = positions[..., None].float() * 10000.0**-exponent
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class RelPosLearnedPositions(nn.Embedding):
    """A learned vector for each of the first `max_position_embeddings` positions."""

    def check_length(self, length: int) -> None:
        """Raise ValueError where `length` tokens do not fit."""
        if length > self.num_embeddings:
            raise ValueError(
                f"The sequence may reach {length} tokens, but `max_position_embeddings` is {self.num_embeddings} and "
                "`absolute_position` is 'learned': shorten the input, lower `max_new_tokens`, or use a model with "
                "relative positions alone, which have no ceiling."
            )


def wants_weights(config: RelPosConfig, kwargs: dict) -> bool:
    """Whether attention weights are asked for, which the library's fused attention does not have."""
    wanted = bool(kwargs.get("output_attentions", config.output_attentions))
    if wanted and config._attn_implementation != "eager":
        logger.warning_once(
            f"`output_attentions` is set: attention runs by rows instead of '{config._attn_implementation}', which has no "
            "weights to return. The outputs are the same; it is slower on long sequences."
        )
    return wanted


def is_step(hidden_states: torch.Tensor) -> bool:
    """Whether these, [batch, queries, d_model], are a single query on CPU."""
    return hidden_states.shape[1] == 1 and hidden_states.device.type == "cpu" and not is_tracing(hidden_states)


def check_clipping_distance(name: str, saved: torch.Size, own: torch.Size) -> None:
    """Refuse a table of another clipping distance: its rows mean other offsets, so that no resizing is right.

    Args:
        name: Name of a parameter; only tables of relative positions are looked at.
        saved: Its shape in the checkpoint; `own`: its shape in the model, [2k + 1, head_dim] or [heads, 2k + 1, head_dim].

    Raises:
        ValueError: Names both distances.
    """
    if name.endswith(("relative_keys", "relative_values")) and saved[-2] != own[-2]:
        raise ValueError(
            f"The checkpoint was trained with a `max_relative_position` of {saved[-2] // 2}, and the model has "
            f"{own[-2] // 2} (`{name}`): use the checkpoint's own configuration."
        )


def _absolute_positions(config: RelPosConfig) -> nn.Module | None:
    if config.absolute_position == "sinusoidal":
        return RelPosSinusoidalPositions(config.d_model)
    if config.absolute_position == "learned":
        return RelPosLearnedPositions(config.max_position_embeddings, config.d_model)
    return None


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without positions for Transformers' attention interface: [batch, heads, length, dim] in, [batch, queries,
    heads, dim] and the weights out."""
    output, weights = attention_by_rows(query, key, value, scaling=scaling, mask=attention_mask, dropout=dropout)
    return output.transpose(1, 2), weights


class RelPosAttention(nn.Module):
    """Multi-head attention: self-attention with relative positions where the configuration has them, or cross-attention,
    which has none, since source and target indices share no axis."""

    def __init__(
        self,
        config: RelPosConfig,
        num_heads: int,
        *,
        is_cross_attention: bool = False,
        is_causal: bool = False,
        layer_idx: int | None = None,
    ):
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.head_dim = config.d_model // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_dropout
        self.is_causal = is_causal
        self.is_cross_attention = is_cross_attention
        self.layer_idx = layer_idx

        width, bias = config.d_model, config.attention_bias
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)

        self.tied = config.relative_position_tied
        self.relative_keys = self._new_table(config.relative_position_keys)
        self.relative_values = self._new_table(config.relative_position_values and not self.tied)

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *args: Any) -> None:
        for name, table in self.named_parameters(recurse=False):
            if prefix + name in state_dict:
                check_clipping_distance(prefix + name, state_dict[prefix + name].shape, table.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _new_table(self, wanted: bool) -> nn.Parameter | None:
        k = self.config.max_relative_position
        if not wanted or k is None or self.is_cross_attention:
            return None
        heads = (self.num_heads,) if self.config.relative_position_per_head else ()
        return nn.Parameter(torch.empty(*heads, 2 * k + 1, self.head_dim))

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        padding: Padding | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states: [batch, queries, d_model].
            key_value_states: [batch, keys, d_model], the encoder's output in cross-attention.
            attention_mask: Broadcastable to [batch, heads, queries, keys], boolean or additive.
            rows: [queries, keys] or [batch, queries, keys], the table row of every pair in self-attention with tables; or
                [keys] for a single query, of which a_ij are to be added to its keys and values. Without them, the queries
                are the tokens of the keys, or the last one of them.
            padding: Where the real tokens are, where queries and keys are the same ones without rows; None where all are
                real. It stands in place of `attention_mask`.
            cache: The cache, which this call extends by its own keys and values.

        Returns:
            [batch, queries, d_model], and the weights [batch, heads, queries, keys] where they were computed.
        """
        query = self._heads(self.q_proj(hidden_states))
        key, value = self._keys_and_values(hidden_states, key_value_states, cache)
        dropout = self.dropout if self.training else 0.0
        key_table, value_table = self.relative_keys, self.relative_keys if self.tied else self.relative_values
        if rows is not None and rows.dim() == 1:
            key, value = add_rows(key, key_table, rows), add_rows(value, value_table, rows)
            key_table = value_table = None
        tables = {"scaling": self.scaling, "key_table": key_table, "value_table": value_table}
        if key_table is None and value_table is None:
            output, weights = self._interface(query, kwargs)(
                self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
            )
            return self.out_proj(output.flatten(2)), weights
        if rows is None and query.shape[2] == key.shape[2]:
            output = attention_of_tokens(query, key, value, padding=padding, is_causal=self.is_causal, **tables)
            weights = None
        elif rows is None:
            output, weights = attention_of_last_token(query, key, value, mask=attention_mask, dropout=dropout, **tables)
        else:
            output, weights = attention_by_rows(
                query, key, value, rows=rows, mask=attention_mask, dropout=dropout, **tables
            )
        return self.out_proj(output.transpose(1, 2).flatten(2)), weights

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        states = states.view(*states.shape[:-1], self.num_heads, self.head_dim)
        return states.transpose(1, 2)  # [batch, heads, length, dim]

    def _keys_and_values(
        self, hidden_states: torch.Tensor, key_value_states: torch.Tensor | None, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [batch, heads, keys, dim] each, with those of the cache. The encoder's are computed once."""
        encoder_decoder = isinstance(cache, EncoderDecoderCache)
        if self.is_cross_attention and encoder_decoder and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        states = key_value_states if self.is_cross_attention else hidden_states
        key, value = self._heads(self.k_proj(states)), self._heads(self.v_proj(states))
        if encoder_decoder and self.is_cross_attention:
            key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        elif cache is not None and not self.is_cross_attention:
            own = cache.self_attention_cache if encoder_decoder else cache
            key, value = own.update(key, value, self.layer_idx)
        return key, value

    def _interface(self, query: torch.Tensor, kwargs: dict) -> Callable:
        if wants_weights(self.config, kwargs) or query.numel() == 0:  # the library's sdpa takes no empty tensor
            return eager_attention_forward
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)


class RelPosSubLayers(GradientCheckpointingLayer):
    """What encoder and decoder layers share: residual sub-layers, before or after LayerNorm, and the feed-forward one."""

    def __init__(self, config: RelPosConfig, ffn_dim: int):
        super().__init__()
        self.normalize_before = config.normalize_before
        self.dropout = config.dropout
        self.activation_dropout = config.activation_dropout
        self.activation_fn = ACT2FN[config.activation_function]
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.fc1 = nn.Linear(config.d_model, ffn_dim, bias=config.mlp_bias)
        self.fc2 = nn.Linear(ffn_dim, config.d_model, bias=config.mlp_bias)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def residual(
        self, hidden_states: torch.Tensor, norm: nn.LayerNorm, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """x + dropout(f(norm(x))), or norm(x + dropout(f(x))) in post-norm; [batch, length, d_model]."""
        output = sublayer(norm(hidden_states) if self.normalize_before else hidden_states)
        output = hidden_states + nn.functional.dropout(output, p=self.dropout, training=self.training)
        return output if self.normalize_before else norm(output)

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[batch, length, d_model] -> [batch, length, d_model]."""
        inner = self.activation_fn(self.fc1(hidden_states))
        return self.fc2(nn.functional.dropout(inner, p=self.activation_dropout, training=self.training))


class RelPosEncoderLayer(RelPosSubLayers):
    """Self-attention and feed-forward."""

    def __init__(self, config: RelPosConfig, layer_idx: int):
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = RelPosAttention(config, config.encoder_attention_heads, layer_idx=layer_idx)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        padding: Padding | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """[batch, sources, d_model] -> the same; see `RelPosAttention.forward` for mask, rows and padding."""
        hidden_states = self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda states: self.self_attn(states, attention_mask=attention_mask, rows=rows, padding=padding, **kwargs)[
                0
            ],
        )
        return self.residual(hidden_states, self.final_layer_norm, self.feed_forward)


class RelPosDecoderLayer(RelPosSubLayers):
    """Causal self-attention, attention to the encoder, and feed-forward."""

    def __init__(self, config: RelPosConfig, layer_idx: int):
        super().__init__(config, config.decoder_ffn_dim)
        heads = config.decoder_attention_heads
        self.self_attn = RelPosAttention(config, heads, is_causal=True, layer_idx=layer_idx)
        self.encoder_attn = RelPosAttention(config, heads, is_cross_attention=True, layer_idx=layer_idx)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        padding: Padding | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """[batch, targets, d_model] -> the same; the encoder's states are [batch, sources, d_model]."""
        hidden_states = self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda states: self.self_attn(
                states, attention_mask=attention_mask, rows=rows, padding=padding, cache=cache, **kwargs
            )[0],
        )
        if encoder_hidden_states is not None:
            hidden_states = self.residual(
                hidden_states,
                self.encoder_attn_layer_norm,
                lambda states: self.encoder_attn(
                    states, encoder_hidden_states, attention_mask=encoder_attention_mask, cache=cache, **kwargs
                )[0],
            )
        return self.residual(hidden_states, self.final_layer_norm, self.feed_forward)


class RelPosPreTrainedModel(PreTrainedModel):
    """Initial values, and what Transformers needs to know of RelPos."""

    config: RelPosConfig
    config_class = RelPosConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ["RelPosEncoderLayer", "RelPosDecoderLayer"]  # noqa: RUF012

    def __init__(self, config: RelPosConfig, *inputs, **kwargs):
        config.validate_relpos()  # fields may have been assigned since the configuration was made
        super().__init__(config, *inputs, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # LayerNorm, biases, the padding rows
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding) and self.config.scale_embedding:
            init.normal_(module.weight, std=self.config.d_model**-0.5)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, RelPosAttention):
            for table in (module.relative_keys, module.relative_values):
                if table is not None:
                    # Xavier over [2k + 1, head_dim], head by head: xavier_uniform_ would count the heads as well
                    bound = math.sqrt(6 / (table.shape[-2] + table.shape[-1]))
                    init.uniform_(table, -bound, bound)

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """The library's last look at what was loaded: here, tables of another clipping distance are refused, even where
        `ignore_mismatched_sizes` would draw them anew."""
        super()._adjust_missing_and_unexpected_keys(loading_info)
        mismatched = loading_info.mismatched_keys
        loading_info.mismatched_keys = set()  # or the library would raise on top of this
        for name, saved, own in sorted(mismatched):
            check_clipping_distance(name, saved, own)
        loading_info.mismatched_keys = mismatched

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Names of tied parameters and of those that they follow. The library drops every tie where
        `tie_word_embeddings` is False; here that field speaks of the output layer alone, and each model lists just the
        ties that it has."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        pad, eos = self.config.pad_token_id, self.config.eos_token_id
        eos = eos[0] if isinstance(eos, list) else eos
        input_ids = torch.tensor([[2, 3, 4, eos], [2, eos, pad, pad]], device=self.device)
        return {"input_ids": input_ids, "attention_mask": input_ids.ne(pad), "decoder_input_ids": input_ids}


class RelPosStack(RelPosPreTrainedModel):
    """What encoder and decoder share: embeddings, absolute positions, the last LayerNorm."""

    def __init__(self, config: RelPosConfig, vocab_size: int):
        super().__init__(config)
        self.dropout = config.dropout
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model, config.pad_token_id)
        self.embed_positions = _absolute_positions(config)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.normalize_before else None
        self.gradient_checkpointing = False

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def look_up(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """[batch, length] ids, or [batch, length, d_model] in their place -> [batch, length, d_model], scaled."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either `input_ids` or `inputs_embeds` (for a decoder, `decoder_...`), not both.")
        if inputs_embeds is not None:
            return inputs_embeds * self.embed_scale
        try:
            return self.embed_tokens(input_ids) * self.embed_scale
        except IndexError as error:  # on CPU; an accelerator would have to wait for the answer to such a question
            low, high = input_ids.min().item(), input_ids.max().item()
            raise ValueError(
                f"The token ids reach from {low} to {high} and must be at least 0 and less than the size of the "
                f"vocabulary, {self.embed_tokens.num_embeddings}: use the tokenizer that was saved with the model."
            ) from error

    def add_positions(
        self,
        embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past: torch.Tensor | int = 0,
        capacity: int | None = None,
    ) -> torch.Tensor:
        """Input of the first layer: embeddings with their absolute positions, if the model has such, after dropout.

        Args:
            embeddings: [batch, length, d_model].
            attention_mask: [batch, past + length], zero at padding.
            past: Tokens in the cache; `capacity` is the most that the sequence can have, where the cache is static.

        Returns:
            [batch, length, d_model].
        """
        if self.embed_positions is not None:
            length = embeddings.shape[1]
            if isinstance(self.embed_positions, RelPosLearnedPositions):
                self.embed_positions.check_length(length + past if capacity is None else capacity)
            positions = token_positions(attention_mask, past, length, embeddings.device, is_static=capacity is not None)
            embeddings = embeddings + self.embed_positions(positions).to(embeddings.dtype)
        return nn.functional.dropout(embeddings, p=self.dropout, training=self.training)

    def attends_to_itself(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> bool:
        """Whether self-attention without a cache may be left to `attention_of_tokens`, which returns no weights, drops
        none, runs on CPU, and takes no masks but those of padding."""
        batch, length = hidden_states.shape[:2]
        return (
            self.config.max_relative_position is not None
            and self.config._attn_implementation == "sdpa"
            and not wants_weights(self.config, kwargs)
            and not (self.training and self.config.attention_dropout > 0)
            and hidden_states.device.type == "cpu"
            and (attention_mask is None or attention_mask.shape == (batch, length))
            and not is_tracing(hidden_states)  # compilers fuse the plain operations themselves
        )

    def rows(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor | None:
        """Table row of every pair, [queries, keys]; None where the model has no tables."""
        k = self.config.max_relative_position
        return None if k is None else relative_rows(query_positions, key_positions, k)

    def finish(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The LayerNorm after a pre-norm stack; nothing in post-norm."""
        return hidden_states if self.layer_norm is None else self.layer_norm(hidden_states)


class RelPosEncoder(RelPosStack):
    """The encoder."""

    _can_record_outputs = {"hidden_states": RelPosEncoderLayer, "attentions": RelPosAttention}  # noqa: RUF012

    def __init__(self, config: RelPosConfig):
        super().__init__(config, config.vocab_size)
        self.layers = nn.ModuleList([RelPosEncoderLayer(config, i) for i in range(config.encoder_layers)])
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """
        Args:
            input_ids: [batch, sources].
            attention_mask: [batch, sources], zero at padding, which may be on either side.
            inputs_embeds: [batch, sources, d_model], in place of `input_ids`.
        """
        hidden_states = self.add_positions(self.look_up(input_ids, inputs_embeds), attention_mask)
        mask = rows = padding = None
        if self.attends_to_itself(hidden_states, attention_mask, kwargs):
            padding = Padding.of(attention_mask)
        else:
            mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
            )
            positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            rows = self.rows(positions, positions)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=mask, rows=rows, padding=padding, **kwargs)
        return BaseModelOutput(last_hidden_state=self.finish(hidden_states))


class RelPosDecoder(RelPosStack):
    """The decoder."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": RelPosDecoderLayer,
        "attentions": OutputRecorder(RelPosAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(RelPosAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: RelPosConfig):
        super().__init__(config, config.decoder_vocab_size)
        self.layers = nn.ModuleList([RelPosDecoderLayer(config, i) for i in range(config.decoder_layers)])
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """
        Args:
            input_ids: [batch, targets], those after the cache.
            attention_mask: [batch, cached + targets], zero at padding, or a ready-made 4-D mask.
            encoder_hidden_states: [batch, sources, d_model].
            encoder_attention_mask: [batch, sources], zero at padding.
            cache: Keys and values of earlier targets and of the source.
            inputs_embeds: [batch, targets, d_model], in place of `input_ids`.
            use_cache: Return a cache, made here if none is given.
        """
        embeddings = self.look_up(input_ids, inputs_embeds)
        if use_cache and cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        own_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        past, keys, capacity = self._cache_lengths(own_cache, embeddings)

        hidden_states = self.add_positions(embeddings, attention_mask, past, capacity)
        mask = rows = padding = None
        new_tokens = isinstance(past, int) and past == 0 and keys == hidden_states.shape[1]
        if new_tokens and self.attends_to_itself(hidden_states, attention_mask, kwargs):
            padding = Padding.of(attention_mask)
        else:
            mask = create_causal_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask, cache=own_cache
            )
            key_positions = torch.arange(keys, device=hidden_states.device)
            query_positions = torch.arange(hidden_states.shape[1], device=hidden_states.device) + past
            rows = self.rows(query_positions, key_positions)
            if rows is not None and is_step(hidden_states):
                if keys * hidden_states.numel() <= FEW_CACHED:
                    rows = rows[0]
                elif isinstance(past, int) and 0 < past == keys - 1 and not self.config.relative_position_per_head:
                    rows = None  # the query is the last of the keys; a static cache has more
            if mask is None and hidden_states.shape[1] > 1 and (rows is not None or wants_weights(self.config, kwargs)):
                # the library left it to the fused kernel: a query sees what is not ahead of it
                mask = key_positions <= query_positions[:, None]
        encoder_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                mask,
                encoder_hidden_states,  # by position: reentrant checkpointing gives no gradient to keyword arguments
                encoder_attention_mask=encoder_mask,
                rows=rows,
                padding=padding,
                cache=cache,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.finish(hidden_states), cache=cache if use_cache else None
        )

    @staticmethod
    def _cache_lengths(cache: Cache | None, embeddings: torch.Tensor) -> tuple[torch.Tensor | int, int, int | None]:
        """Tokens in the cache, keys that attention will see, and the capacity where that is fixed.

        Read before any layer runs, and turned into positions at once: a static cache hands out its live counter, which
        the first layer moves before the second one looks.
        """
        if cache is None:
            return 0, embeddings.shape[1], None
        past = cache.get_seq_length()
        if isinstance(past, torch.Tensor):
            past = past.to(embeddings.device)
        capacity = cache.get_max_length(0)
        return past, cache.get_mask_sizes(embeddings.shape[1], 0)[0], capacity if capacity > 0 else None


class RelPosModel(RelPosPreTrainedModel):
    """Encoder and decoder without an output layer."""

    _auto_class = "AutoModel"

    def __init__(self, config: RelPosConfig):
        super().__init__(config)
        self._tied_weights_keys = {}
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
            self._tied_weights_keys = {
                "encoder.embed_tokens.weight": "shared.weight",
                "decoder.embed_tokens.weight": "shared.weight",
            }
        self.encoder = RelPosEncoder(config)
        self.decoder = RelPosDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The shared embeddings, or the source's where source and target have their own."""
        return self.shared if self.config.share_encoder_decoder_embeddings else self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = value
            self.decoder.embed_tokens = value

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """
        Args:
            input_ids: [batch, sources].
            attention_mask: [batch, sources], zero at padding, which may be on either side.
            decoder_input_ids: [batch, targets], those after the cache.
            decoder_attention_mask: [batch, cached + targets], zero at padding, or a ready-made 4-D mask.
            encoder_outputs: The encoder's output, if it has run before.
            cache: Keys and values of earlier targets and of the source.
            inputs_embeds, decoder_inputs_embeds: [batch, length, d_model], in place of the ids.
            use_cache: Return a cache; the configuration's `use_cache` by default, and no cache in training.
        """
        if use_cache is None and self.training:
            use_cache = False
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = as_encoder_output(encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            cache=decoder_outputs.cache,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class RelPosForConditionalGeneration(RelPosPreTrainedModel, GenerationMixin):
    """RelPos with an output layer: translation, or any other sequence to sequence task."""

    _auto_class = "AutoModelForSeq2SeqLM"

    def __init__(self, config: RelPosConfig):
        super().__init__(config)
        self.model = RelPosModel(config)
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=config.lm_head_bias)
        embeddings = "shared" if config.share_encoder_decoder_embeddings else "decoder.embed_tokens"
        self._tied_weights_keys = {"lm_head.weight": f"model.{embeddings}.weight"} if config.tie_word_embeddings else {}
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the vocabulary, or the source's where source and target have their own (the target's is
        `resize_decoder_token_embeddings`'s). Arguments as in the library."""
        if not self.config.share_encoder_decoder_embeddings:
            # the model without its output layer, which belongs to the target
            return self.model.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self._fit_lm_head()
        return embeddings

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the target vocabulary of a model whose source has its own.

        Raises:
            ValueError: Source and target share their vocabulary.
        """
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError(
                "`share_encoder_decoder_embeddings` is True: use `resize_token_embeddings`, which resizes both sides."
            )
        source = self.config.vocab_size
        embeddings = self.model.decoder.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.config.vocab_size, self.config.decoder_vocab_size = source, embeddings.num_embeddings
        self._fit_lm_head()
        return embeddings

    @torch.no_grad()
    def _fit_lm_head(self) -> None:
        """Give the output layer as many rows as the target vocabulary has, new ones with its mean."""
        old, size = self.lm_head, self.config.decoder_vocab_size
        kept = min(old.out_features, size)
        new = nn.Linear(
            old.in_features, size, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype
        )
        for old_rows, new_rows in ((old.weight, new.weight), (old.bias, new.bias)):
            if old_rows is not None:
                new_rows[:kept] = old_rows[:kept]
                new_rows[kept:] = old_rows.mean(0)
                new_rows.requires_grad_(old_rows.requires_grad)
        new._is_hf_initialized = True  # or a later `post_init` would draw it anew
        self.lm_head = new
        self.tie_weights()

    def prepare_inputs_for_generation(self, input_ids: torch.LongTensor, **kwargs: Any) -> dict[str, Any]:
        if len(input_ids) == 0:
            raise ValueError("The batch is empty: `generate` needs at least one source.")
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _reorder_cache(self, cache: Cache, beam_idx: torch.LongTensor) -> Cache:
        """Called by the library's beam search, where a model has it: let the keys and values of earlier targets follow
        their beams, [batch * beams] indices. Those of the source are the same for all beams of a sentence, and stay:
        copying them, as the library does for all models, took a twelfth of the time of beam search at the demo's size."""
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        own.reorder_cache(beam_idx)
        return cache

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """[batch, targets] -> [batch, targets]: the labels behind the start token."""
        return shift_tokens_right(labels, self.config.pad_token_id, self.config.decoder_start_token_id)

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """
        Args:
            labels: [batch, targets], -100 where nothing is to be learned. The decoder's inputs are made from them where
                they are not given.
            num_items_in_batch: The number of labels that count in all batches of one update. The loss is then the sum
                over this batch divided by it, which is how Trainer makes accumulated batches weigh the same; without it
                the loss is this batch's mean.

        The other arguments are those of [`RelPosModel.forward`].
        """
        if labels is not None:
            use_cache = False if use_cache is None else use_cache
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs: Seq2SeqModelOutput = self.model(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None if labels is None else self._loss(logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    @staticmethod
    def _loss(
        logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        # the library's own loss for this class name would shift the labels a second time
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        labels = labels.to(logits.device).flatten()
        count = labels.ne(-100).sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        # a batch in which nothing is to be learned has the loss 0, not the mean of no number
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / count.to(logits.device).clamp(min=1)


__all__ = ["RelPosForConditionalGeneration", "RelPosModel", "RelPosPreTrainedModel"]
