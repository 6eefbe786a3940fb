"""The facts of a model that follow from its configuration: parameter counts, and where the position parameters are."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from safetensors import safe_open
from transformers import AutoModelForSeq2SeqLM

BARS = "▁▂▃▄▅▆▇█"
WIDEST_DRAWING = 65  # offsets in one line of a terminal


def inspect_model(config: Any, *, name: str, folder: Path | None = None) -> dict[str, Any]:
    """Facts of a model, from its configuration and the headers of its weight files; no weights are loaded.

    Args:
        config: the model's configuration.
        name: what to call the model.
        folder: the saved folder, where there is one with weights.

    Returns:
        `name`, `architecture` (label to value), `parameters` (part to number of values), `positions` (sentences),
        `tables` (a dictionary per position parameter: name, shape, and `norms` by row where weights are saved).
    """
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    return {
        "name": name,
        "architecture": _describe_architecture(config) | _describe_weights(folder),
        "parameters": count_parameters(model),
        "positions": describe_positions(config),
        "tables": _position_tables(model, folder),
    }


def inspection_report(facts: dict[str, Any]) -> Group:
    """The facts of `inspect_model` for a terminal."""
    architecture = Table(title=facts["name"], title_justify="left", show_header=False)
    for label, value in facts["architecture"].items():
        architecture.add_row(label, str(value))
    parameters = Table(title="Parameters", title_justify="left", show_header=False)
    parameters.add_column()
    parameters.add_column(justify="right")
    for part, count in facts["parameters"].items():
        parameters.add_row(part, f"{count:,}")
    positions = [Text(sentence) for sentence in facts["positions"]]
    return Group(architecture, parameters, Text("Positions", style="italic"), *positions, *_table_report(facts))


def count_parameters(model: torch.nn.Module) -> dict[str, int]:
    """Number of parameters by part; a tied parameter counts once, where it is first used."""
    counts = Counter(dict.fromkeys(("embeddings", "encoder", "decoder", "output", "positions"), 0))
    for name, parameter in model.named_parameters():
        counts[_part_of(name)] += parameter.numel()
    return {"total": counts.total(), **counts}


def describe_positions(config: Any) -> list[str]:
    """Sentences that say how the positions of a model work."""
    k = getattr(config, "max_relative_position", None)
    sentences = []
    if k is not None:
        terms = {
            "keys (scores)": config.relative_position_keys,
            "values (outputs)": config.relative_position_values,
        }
        sharing = "one table per head" if config.relative_position_per_head else "one table shared by the heads"
        tied = ", the same table for both" if config.relative_position_tied else ""
        sentences += [
            f"Relative positions in encoder and decoder self-attention, clipped at k = {k}: {2 * k + 1} learned "
            f"vectors, one for each offset from {k} back to {k} ahead.",
            f"They enter the {' and the '.join(term for term, on in terms.items() if on)}; in every layer "
            f"{sharing}{tied}.",
        ]
    else:
        sentences.append("There are no relative positions.")
    sentences.append(
        {
            "none": "Nothing is added to the embeddings, so the length of a sentence has no ceiling.",
            "sinusoidal": "Sinusoidal absolute positions are added to the embeddings.",
            "learned": f"Learned absolute positions are added to the embeddings, for at most "
            f"{getattr(config, 'max_position_embeddings', None)} tokens.",
        }.get(getattr(config, "absolute_position", ""), f"The model is no RelPos model but {config.model_type!r}.")
    )
    return sentences


def _describe_architecture(config: Any) -> dict[str, Any]:
    """The fields that make the size and the shape of the model, in words."""
    describe = {
        "type": f"{config.model_type}, encoder-decoder Transformer",
        "layers": f"{config.encoder_layers} encoder, {config.decoder_layers} decoder",
        "d_model": config.d_model,
        "heads": _both(config.encoder_attention_heads, config.decoder_attention_heads),
        "feed-forward": f"{_both(config.encoder_ffn_dim, config.decoder_ffn_dim)}, {config.activation_function}",
        "vocabulary": _both(config.vocab_size, getattr(config, "decoder_vocab_size", None) or config.vocab_size),
    }
    if hasattr(config, "normalize_before"):
        describe["normalisation"] = (
            f"{'before' if config.normalize_before else 'after'} every sub-layer, epsilon {config.layer_norm_eps}"
        )
    languages = [getattr(config, field, None) for field in ("source_language", "target_language")]
    if all(languages):
        describe["languages"] = " to ".join(languages)
    if trained_on := getattr(config, "longest_training_source", None):
        describe["longest training source"] = f"{trained_on} tokens"
    return describe


def _describe_weights(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    files = sorted(folder.glob("*.safetensors"))
    dtypes = {tensors.get_slice(name).get_dtype() for tensors in _open(files) for name in tensors.keys()}  # noqa: SIM118
    size = sum(file.stat().st_size for file in files) / 1e6
    return {"weights": f"{', '.join(sorted(dtypes))}, {size:,.1f} MB in {len(files)} file{'s' * (len(files) > 1)}"}


def _position_tables(model: torch.nn.Module, folder: Path | None) -> list[dict[str, Any]]:
    """Every position parameter with its shape, and the mean length of its rows where weights are saved."""
    shapes = {name: list(value.shape) for name, value in model.named_parameters() if _part_of(name) == "positions"}
    norms = {}
    for tensors in _open(sorted(folder.glob("*.safetensors")) if folder else []):
        for name in shapes.keys() & set(tensors.keys()):
            rows = tensors.get_tensor(name).float().norm(dim=-1)  # [rows] or [heads, rows]
            norms[name] = rows.reshape(-1, rows.shape[-1]).mean(dim=0).tolist()
    return [{"name": name, "shape": shape, "norms": norms.get(name)} for name, shape in shapes.items()]


def _table_report(facts: dict[str, Any]) -> list[Table | Text]:
    if not facts["tables"]:
        return []
    report = Table(show_edge=False, pad_edge=False)
    report.add_column("position parameter")
    report.add_column("shape")
    drawn = any(table["norms"] for table in facts["tables"])
    if drawn:
        report.add_column("mean length of each offset's vector, furthest back to furthest ahead", overflow="fold")
    for table in facts["tables"]:
        report.add_row(table["name"], str(table["shape"]), *([draw_bars(table["norms"] or [])] if drawn else []))
    return [report]


def draw_bars(values: list[float]) -> str:
    """A line of bars, the highest for the greatest value; a long line shows its middle, the nearest offsets."""
    cut = max(0, len(values) - WIDEST_DRAWING) // 2
    shown = values[cut : len(values) - cut]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    step = (high - low) / (len(BARS) - 1) or 1.0
    bars = "".join(BARS[round((value - low) / step)] for value in shown)
    return f"…{bars}…" if cut else bars


def _part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, by its name."""
    if "relative_" in name or "embed_positions" in name:
        return "positions"
    if "lm_head" in name or "final_logits_bias" in name:
        return "output"
    if "embed_tokens" in name or ".shared." in name:
        return "embeddings"
    return "encoder" if ".encoder." in name else "decoder"


def _both(encoder: int, decoder: int) -> str:
    return f"{encoder:,}" if encoder == decoder else f"{encoder:,} encoder, {decoder:,} decoder"


def _open(files: list[Path]):
    """Each safetensors file, opened in turn."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
