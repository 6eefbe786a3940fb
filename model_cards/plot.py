"""What a model has learned about distance, as a picture."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .figures import PlotError, check_picture, new_figure, save_figure


def attention_bias(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    source_prefix: Sequence[int] = (),
    batch_size: int = 32,
) -> dict[str, torch.Tensor]:
    """What queries give to an offset on average, before they see any key: the mean of q . a^K_r / sqrt(d), the second
    term of equation 4 of Shaw et al. 2018.

    Args:
        model: A RelPos model with a table for keys.
        sources, targets: Sentences and their translations, which the decoder reads as in training.
        source_prefix: Tokens in front of every source, such as the tag of a target language.

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
            rows = slice(start, start + batch_size)
            source_ids = [[*source_prefix, *ids] for ids in tokenizer(list(sources[rows]))["input_ids"]]
            target_ids = tokenizer(text_target=list(targets[rows]))["input_ids"]
            batch = tokenizer.pad({"input_ids": source_ids}, return_tensors="pt").to(model.device)
            labels = tokenizer.pad({"input_ids": target_ids}, return_tensors="pt").to(model.device)["input_ids"]
            real = {"encoder": batch["attention_mask"].bool(), "decoder": labels != tokenizer.pad_token_id}
            for (side, _), mean in means.items():
                mean.real = real[side]
            decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
            model(**batch, decoder_input_ids=decoder_input_ids)
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


def plot_attention_bias(bias: dict[str, torch.Tensor], path: str | Path, *, title: str | None = None) -> Path:
    """Draw `attention_bias`'s answer: a row of cells for each head, a column for each offset, the encoder's layers on
    the left and the decoder's on the right.

    Args:
        path: The picture to write, .png, .svg or .pdf.
        title: What stands above.

    Raises:
        PlotError: The suffix is none of these, or matplotlib is not installed.
    """
    path = Path(path)
    check_picture(path)
    layers = max(len(values) for values in bias.values())
    heads = max(values.shape[1] for values in bias.values())
    k = bias["encoder"].shape[-1] // 2
    figure = new_figure(height=0.9 + layers * (0.45 + 0.16 * max(heads, 4)))
    if title:
        figure.suptitle(title, fontsize=10)
    # the decoder never looks ahead
    axes = figure.subplots(layers, 2, squeeze=False, gridspec_kw={"width_ratios": [2 * k + 1, k + 1]})
    drawn = torch.cat([values[..., : k + 1].flatten() for values in bias.values()] + [bias["encoder"].flatten()])
    strongest = max(drawn.abs().max().item(), 1e-6)
    for (side, values), column, offsets in zip(bias.items(), axes.T, (2 * k + 1, k + 1)):
        for layer, panel in enumerate(column):
            if layer < len(values):
                cells = panel.pcolormesh(values[layer, :, :offsets], cmap="PuOr_r", vmin=-strongest, vmax=strongest)
                _label(panel, k, offsets, len(values[layer]), title=f"{side}, layer {layer + 1}")
            else:
                panel.set_visible(False)
        column[len(values) - 1].set_xlabel("offset of the key")  # the decoder's panels hold no more
    figure.colorbar(cells, ax=axes, location="bottom", shrink=0.5, aspect=40, label="added to the score on average")
    return save_figure(figure, path)


def _label(panel: Any, k: int, offsets: int, heads: int, *, title: str) -> None:
    """Name the rows and columns of a panel; the first and the last column stand for all offsets beyond them."""
    step = max(k // 2, 1)
    shown = [offset for offset in range(-k, k + 1, step) if offset + k < offsets]
    names = {-k: f"≤ −{k}", k: f"≥ {k}", 0: "0"} if k else {0: "any"}
    panel.set_xticks(
        [offset + k + 0.5 for offset in shown], [names.get(offset, f"{offset}".replace("-", "−")) for offset in shown]
    )
    every = 1 if heads <= 8 else 2
    panel.set_yticks([head + 0.5 for head in range(0, heads, every)], range(1, heads + 1, every))
    panel.set_title(title, fontsize=9)
    panel.set_ylabel("head", fontsize=8)
    panel.tick_params(labelsize=8, length=2)
    panel.invert_yaxis()


__all__ = ["PlotError", "attention_bias", "plot_attention_bias"]
