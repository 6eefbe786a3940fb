"""Reload a saved model as its users do and show it at work: `python -m relpos.training.show_translations MODEL`."""

import argparse
import sys
from collections.abc import Sequence

import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import relpos

from .corpus import CorpusError
from .evaluation import EvaluationError, parse_languages, read_held_out
from .loading import ModelError, check_folder


def main(argv: Sequence[str] | None = None) -> None:
    """Translate held-out sentences of the bundled corpus and print source, reference and translation together."""
    parser = argparse.ArgumentParser(prog="python -m relpos.training.show_translations", description=__doc__)
    parser.add_argument("model", help="folder of a saved model")
    parser.add_argument("-n", "--number", type=int, default=5, help="how many sentences (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.number < 1:
        parser.error(f"--number must be at least 1, not {arguments.number}.")
    try:
        Console(highlight=False).print(show(arguments.model, arguments.number))
    except (ModelError, CorpusError, EvaluationError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def show(folder: str, number: int) -> Table:
    """A table of `number` sentences, evenly spaced over the test set, with their references and translations.

    The model is loaded by `AutoModelForSeq2SeqLM` and used through `pipeline("translation")`, with the generation
    settings that it was saved with.
    """
    relpos.register()
    transformers.logging.disable_progress_bar()
    check_folder(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    languages = parse_languages(None, model.config)
    sources, references, name = read_held_out(None, split="test", languages=languages)
    chosen = [len(sources) * (2 * place + 1) // (2 * number) for place in range(min(number, len(sources)))]
    translate = pipeline("translation", model=model, tokenizer=tokenizer)
    outputs = translate([sources[row] for row in chosen], batch_size=8)
    table = Table(title=f"{type(model).__name__} from {folder}, {name}", show_lines=True, title_justify="left")
    for heading in ("source", "reference", "translation"):
        table.add_column(heading, ratio=1, overflow="fold")
    for row, output in zip(chosen, outputs):
        # as plain text: brackets in a sentence are not rich's markup
        table.add_row(*map(Text, (sources[row], references[row], output["translation_text"])))
    return table


if __name__ == "__main__":
    main()
