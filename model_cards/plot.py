"""What a model has learned about distance, as a picture."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


class PlotError(ValueError):
    """The picture cannot be drawn; the message says why, for the user."""


def attention_bias(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    batch_size: int = 32,
) -> dict[str, torch.Tensor]:
    """What queries give to an offset on average, before they see any key: the mean of q . a^K_r / sqrt(d), the second
    term of equation 4 of Shaw et al. 2018.

    Args:
        model: A RelPos model with a table for keys.
        sources, targets: Sentences and their translations, which the decoder reads as in training.

    Returns:
        For "encoder" and "decoder" a tensor [layers, heads, 2k + 1], each head's mean over the offsets taken off, since
        the softmax does not see it. The decoder's offsets above 0 are never used and NaN.

    Raises:
        PlotError: The model has no relative positions in its scores, or there is no text.
    """
    if model.config.max_relative_position is None or not model.config.relative_position_keys:
        raise PlotError("The model has no relative positions in its attention scores, so there is nothing to draw.")
    if not sources or len(sources) != len(targets):
        raise PlotError(f"There are {len(sources)} sources and {len(targets)} targets; one of each is needed at least.")
    model = model.eval()
    means = {name: _MeanQuery(layer.self_attn) for name, layer in _layers(model).items()}
    with ExitStack() as hooks, torch.inference_mode():
        for mean in means.values():
            hooks.callback(mean.hook.remove)
        for start in range(0, len(sources), batch_size):
            batch = tokenizer(
                list(sources[start : start + batch_size]),
                text_target=list(targets[start : start + batch_size]),
                padding=True,
                return_tensors="pt",
            ).to(model.device)
            labels = batch.pop("labels")
            real = {"encoder": batch["attention_mask"].bool(), "decoder": labels != tokenizer.pad_token_id}
            for (side, _), mean in means.items():
                mean.real = real[side]
            decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
            model(**{k: batch[k] for k in ("input_ids", "attention_mask")}, decoder_input_ids=decoder_input_ids)
    bias = {
        side: torch.stack([mean.bias() for (own, _), mean in means.items() if own == side])
        for side in ("encoder", "decoder")
    }
    bias["decoder"][..., model.config.max_relative_position + 1 :] = torch.nan
    return {side: values - values.nanmean(-1, keepdim=True) for side, values in bias.items()}


class _MeanQuery:
    """The mean query of a self-attention over the real tokens that pass through it."""

    def __init__(self, attention: torch.nn.Module) -> None:
        self.attention = attention
        self.total, self.count, self.real = 0.0, 0, None
        self.hook = attention.q_proj.register_forward_hook(self._add)

    def _add(self, module: torch.nn.Module, args: Any, query: torch.Tensor) -> None:
        self.total = self.total + query[self.real].double().sum(0)
        self.count += int(self.real.sum())

    def bias(self) -> torch.Tensor:
        """[heads, 2k + 1]."""
        query = (self.total / self.count).view(self.attention.num_heads, 1, -1)  # [heads, 1, head_dim]
        table = self.attention.relative_keys.detach().double()  # [2k + 1, head_dim], or one for each head
        return ((query * table).sum(-1) * self.attention.scaling).float()


def _layers(model: PreTrainedModel) -> dict[tuple[str, int], torch.nn.Module]:
    stacks = {"encoder": model.get_encoder().layers, "decoder": model.get_decoder().layers}
    return {(side, index): layer for side, layers in stacks.items() for index, layer in enumerate(layers)}


def plot_attention_bias(bias: dict[str, torch.Tensor], path: str | Path) -> Path:
    """Draw `attention_bias`'s answer, one panel a layer and one line a head.

    Args:
        path: The picture to write, .png, .svg or .pdf.

    Raises:
        PlotError: The suffix is none of these, or matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise PlotError(f"The picture {path} must end in .png, .svg or .pdf.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("Drawing needs matplotlib: pip install 'relpos[plot]'.") from None
    layers = max(len(values) for values in bias.values())
    figure = Figure(figsize=(1.2 + 2.9 * layers, 5.2), layout="constrained")
    axes = figure.subplots(2, layers, sharex=True, sharey=True, squeeze=False)
    for row, (side, values) in zip(axes, bias.items()):
        for layer, panel in enumerate(row):
            if layer < len(values):
                _draw_layer(panel, values[layer], title=f"{side} layer {layer + 1}")
            else:
                panel.set_visible(False)
        row[0].set_ylabel("score added on average")
    for panel in axes[-1]:
        panel.set_xlabel("offset of the key, j - i")
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format=path.suffix[1:], dpi=140)
    os.replace(partial, path)
    return path


def _draw_layer(panel: Any, values: torch.Tensor, *, title: str) -> None:
    """One panel: values [heads, 2k + 1]."""
    k = values.shape[-1] // 2
    for head, line in enumerate(values.tolist()):
        panel.plot(range(-k, k + 1), line, marker=".", linewidth=1.2, label=f"head {head + 1}")
    panel.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    panel.set_title(title, fontsize=10)
    if len(values) <= 8:
        panel.legend(fontsize=7, frameon=False)


__all__ = ["PlotError", "attention_bias", "plot_attention_bias"]
