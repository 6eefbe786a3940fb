"""Models of one size for the benchmarks: RelPos, the same without positions, Marian and T5."""

import torch
import transformers

from relpos import RelPosConfig, RelPosForConditionalGeneration

SIZES = {
    "base": {"d_model": 512, "layers": 6, "heads": 8, "ffn": 1024, "vocabulary": 32768, "k": 16},
    "demo": {"d_model": 128, "layers": 2, "heads": 4, "ffn": 512, "vocabulary": 4000, "k": 16},
}


def _sides(**fields) -> dict:
    return {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in fields.items()}


def build(kind: str, size: str, dropout: float = 0.1) -> torch.nn.Module:
    """A model with random weights.

    Args:
        kind: "relpos", "relpos, no positions", "marian" or "t5".
        size: "base", the paper's, or "demo".
    """
    torch.manual_seed(0)
    s = SIZES[size]
    sides = _sides(layers=s["layers"], attention_heads=s["heads"], ffn_dim=s["ffn"])
    shared = {"vocab_size": s["vocabulary"], "d_model": s["d_model"], "pad_token_id": 0, "eos_token_id": 1}
    if kind.startswith("relpos"):
        k = None if "no positions" in kind else s["k"]
        config = RelPosConfig(**shared, **sides, dropout=dropout, max_relative_position=k)
        return RelPosForConditionalGeneration(config)
    if kind == "marian":
        config = transformers.MarianConfig(
            **shared, **sides, dropout=dropout, activation_function="relu", decoder_start_token_id=0,
            max_position_embeddings=1024, scale_embedding=True,
        )  # fmt: skip
        return transformers.MarianMTModel(config)
    if kind == "t5":
        config = transformers.T5Config(
            **shared, d_kv=s["d_model"] // s["heads"], d_ff=s["ffn"], num_layers=s["layers"], num_heads=s["heads"],
            dropout_rate=dropout, feed_forward_proj="relu", decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)
    raise ValueError(f"`kind` is {kind!r} and must be 'relpos', 'relpos, no positions', 'marian' or 't5'.")
