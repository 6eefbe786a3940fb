"""Renders the cards of the presets: `python -m relpos.model_cards.preset_cards FOLDER`."""

import sys
from pathlib import Path

from relpos.configuration import presets

from .card import render_preset_card


def write_preset_cards(folder: Path) -> list[Path]:
    """Write `<preset>.md` for every preset that is meant to be trained, and return the paths."""
    written = []
    for name in presets():
        if name != "tiny":  # which only the tests use
            written.append(Path(folder) / f"{name}.md")
            written[-1].write_text(render_preset_card(name).content.rstrip() + "\n", encoding="utf-8")
    return written


if __name__ == "__main__":
    print(*write_preset_cards(Path(sys.argv[1])), sep="\n")
