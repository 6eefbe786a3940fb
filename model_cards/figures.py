"""How the package's pictures look: legible at 700 pixels of width, and told apart without seeing colours."""

import os
from pathlib import Path
from typing import Any

# Inches; at 100 points per inch, a page shows the picture at 700 pixels.
WIDTH = 7.0
# Okabe and Ito's colours without their yellow, which is too bright for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = "osD^vPX"
_SUFFIXES = (".png", ".svg", ".pdf")


class PlotError(ValueError):
    """A picture that cannot be drawn; the message says why, for the user."""


def check_picture(path: Path) -> None:
    """Raise PlotError for a picture that could not be drawn or written at the end of the work."""
    if path.suffix not in _SUFFIXES:
        raise PlotError(f"The picture {path} must end in .png, .svg or .pdf.")
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise PlotError(
            f"The picture {path} cannot be written: its folder is missing or read-only, or it is a folder itself."
        )
    new_figure(height=1)


def new_figure(*, height: float) -> Any:
    """An empty matplotlib Figure, `WIDTH` inches wide; raises PlotError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("Drawing needs matplotlib: pip install 'relpos[plot]'.") from None
    return Figure(figsize=(WIDTH, height), layout="constrained")


def line_style(number: int) -> dict[str, Any]:
    """Colour and marker of the n-th line of a panel."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.5,
    }


def save_figure(figure: Any, path: Path) -> Path:
    """Write a picture whole or not at all; its suffix, .png, .svg or .pdf, says in what form."""
    path = Path(path)
    check_picture(path)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format=path.suffix[1:], dpi=200)
    os.replace(partial, path)
    return path
