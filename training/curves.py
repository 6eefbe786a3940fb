"""How a training went, from the log that Trainer keeps: loss and BLEU over the steps, as a picture."""

import json
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from relpos.model_cards.figures import PlotError, check_picture, line_style, new_figure, save_figure


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """The entries of the log of a run, from the latest of its folder and its checkpoints; empty where there is none.

    Raises:
        PlotError: the file is damaged.
    """
    run, histories = Path(run), []
    for file in [run / TRAINER_STATE_NAME, *run.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")]:
        if not file.is_file():
            continue
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            histories.append((int(state["global_step"]), list(state["log_history"])))
        except (ValueError, LookupError, TypeError) as error:
            raise PlotError(f"The log {file} is damaged, or is no state of a training ({error}).") from error
    return max(histories, key=lambda history: history[0], default=(0, []))[1]


def newest_model(run: str | Path) -> Path | None:
    """The folder of a run itself, where it holds a model, else its newest checkpoint that does."""
    checkpoints = Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    numbered = [(int(folder.name.rpartition("-")[2]), folder) for folder in checkpoints if folder.name[11:].isdecimal()]
    candidates = [Path(run), *(folder for _, folder in sorted(numbered, reverse=True))]
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def plot_history(history: list[dict[str, Any]], path: Path, *, title: str) -> Path:
    """Draw the loss of training and validation, and BLEU where the run evaluated by translating.

    Args:
        history: `log_history` of a Trainer's state.
        path: the picture to write, .png, .svg or .pdf.
        title: what stands above.

    Raises:
        PlotError: the log has no losses, or the picture cannot be written.
    """
    check_picture(path)
    training, validation, bleu = (_curve(history, name) for name in ("loss", "eval_loss", "eval_bleu"))
    if not training and not validation:
        raise PlotError("The log of the training has no losses yet, so there is nothing to draw.")
    figure = new_figure(height=4.6 if bleu else 3.0)
    panels = figure.subplots(2 if bleu else 1, sharex=True, squeeze=False)[:, 0]
    for number, (label, curve) in enumerate({"training": training, "validation": validation}.items()):
        if curve:
            style = line_style(number) | (
                {"marker": "", "zorder": 1} if label == "training" and len(curve) > 30 else {}
            )
            panels[0].plot(*zip(*curve), label=label, **style)
    panels[0].set_ylabel("loss, nats per token")
    panels[0].legend()
    if bleu:
        panels[1].plot(*zip(*bleu), **line_style(1))
        panels[1].annotate(f"{bleu[-1][1]:.1f}", bleu[-1], xytext=(0, 6), textcoords="offset points", ha="center")
        panels[1].set_ylabel("BLEU, validation")
        panels[1].set_ylim(0, 1.15 * max(max(value for _, value in bleu), 1))
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    for panel in panels:
        panel.grid(color="0.9")
    panels[0].set_title(title)
    return save_figure(figure, path)


def _curve(history: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Steps and values; of two values of one step, such as that of an averaged model at the end, the last."""
    return sorted({entry["step"]: entry[name] for entry in history if name in entry and "step" in entry}.items())
