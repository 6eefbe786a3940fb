"""The pictures of a run: how its training went, and what its model learned about distance."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from relpos.model_cards.figures import PlotError, check_picture
from relpos.model_cards.plot import attention_bias, plot_attention_bias

from .curves import newest_model, plot_history, read_history
from .evaluation import choose_languages, open_held_out
from .loading import into_language, load_config, load_model

CURVES = "curves.png"
POSITIONS = "positions.png"
"""The name under which the model's card shows it."""
# Their average hardly changes with more of them.
SENTENCES = 500


def draw(
    run: str,
    output: Path | None = None,
    *,
    corpus: Sequence[str] | None = None,
    split: str = "validation",
    languages: str | None = None,
) -> Iterator[Path]:
    """Draw what there is of a run: its curves, where its folder holds a log, and the tables of its model, where that
    has relative positions in its scores.

    Args:
        run: folder of a training or of a saved model, or a model on the Hub as `user/name`.
        output: folder to write to; by default the run's, or the current one for a model on the Hub.
        corpus, split, languages: the text whose queries are averaged, as for `open_held_out` and `choose_languages`. A
            model of several target languages reads it for this one, by default its first, and the picture says which.

    Yields:
        The pictures, once each is written.

    Raises:
        PlotError: there is nothing to draw, or no matplotlib to draw with.
        ModelError, CorpusError, EvaluationError: the model or the corpus cannot be opened.
    """
    is_folder = Path(run).is_dir()
    folder = output or (Path(run) if is_folder else Path())
    check_picture(folder / CURVES)
    history = read_history(run) if is_folder else []
    model = newest_model(run) if is_folder else run
    config = load_config(str(model)) if model else None
    has_table = getattr(config, "max_relative_position", None) is not None and config.relative_position_keys
    if not history and not has_table:
        raise PlotError(
            f"There is nothing to draw of {run}: no log of a training, and no model with relative positions."
        )
    if history:
        yield plot_history(history, folder / CURVES, title=Path(run).resolve().name)
    if has_table:
        pair = choose_languages([str(model)], corpus=corpus, languages=languages, any_target=True)
        rows, _ = open_held_out(corpus, split=split, languages=pair)
        rows = rows.select(range(0, len(rows), -(-len(rows) // SENTENCES)))["translation"][:]
        loaded = load_model(str(model))
        title = f"sources for {pair[1]}" if loaded.languages else None
        loaded = into_language(loaded, pair[1] if loaded.languages else None)
        sources, targets = ([row[language] for row in rows] for language in pair)
        bias = attention_bias(loaded.model, loaded.tokenizer, sources, targets, source_prefix=loaded.source_prefix)
        yield plot_attention_bias(bias, folder / POSITIONS, title=title)
