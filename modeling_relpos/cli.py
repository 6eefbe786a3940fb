"""The `relpos` command: one verb per function, each a call into the package. Imports are inside the verbs, so that
`--help` answers without loading PyTorch."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="relpos",
    help="Train, evaluate, use and look into translation models with relative positions (Shaw et al. 2018).",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A saved folder, or a model on the Hub (user/name).")]
BatchSize = Annotated[int, typer.Option(min=1, help="Sentences translated at a time.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Limit on each translation in tokens.", show_default="twice the source and 50 more"),
]
Languages = Annotated[
    str | None, typer.Option(help="Source and target language, as en,de.", show_default="what the model says")
]
GnmtPenalty = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=10,
        metavar="EXPONENT",
        help="Rank finished beams by log-probability / ((5 + tokens) / 6)^EXPONENT, as the paper did with 0.6.",
        show_default="the model's length_penalty",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT.")]
CorpusOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Held-out text, as `relpos train` takes it: TSV, JSON lines or TMX (also .gz), a dataset, or the two files of "
        "a parallel corpus, each with --corpus. en-fr=NAME says its languages, too.",
        show_default="the bundled corpus",
    ),
]
Split = Annotated[str, typer.Option(help="Part of the bundled corpus or of a dataset.")]
CorpusLanguages = Annotated[
    str | None,
    typer.Option(
        help="Source and target language of the corpus, as en,de.", show_default="what --corpus says, or the model"
    ),
]


def main() -> None:
    """Run the command; an error that the user can mend ends with one sentence on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False) or 0
    except typer.TyperException as error:  # unknown or impossible options
        code = _fail(error.format_message())
    except ValueError as error:
        # The package's own error classes are written for users; any other error is a bug and shows its traceback.
        if type(error).__module__.partition(".")[0] != "relpos":
            raise
        code = _fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        code = _fail(f"There is no room for {error.filename or 'the output'}: {error.strerror}.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or what is left would fail again at exit
    except ImportError as error:
        # Raised by hand where a library is missing or too old, and says what to install; a bug in an import has a name.
        if error.name:
            raise
        code = _fail(str(error))
    sys.exit(code)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[RECIPE] [--FIELD VALUE]...",
)
def train(context: typer.Context) -> None:
    """Train a model by a recipe, the name of one that comes with RelPos or a YAML file.

    --FIELD VALUE changes any field of the recipe, such as --max_steps 1000, and `python -m
    relpos.training.run_translation --help` lists them all.
    """
    from relpos.training import run_translation

    run_translation.main(context.args)


@app.command()
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Saved folders, or models on the Hub; the first is the baseline."),
    ],
    corpus: CorpusOption = None,
    split: Split = "test",
    languages: CorpusLanguages = None,
    beams: Annotated[str, typer.Option(help="Beam sizes, with commas between.")] = "1,4",
    batch_size: BatchSize = 32,
    max_new_tokens: MaxNewTokens = None,
    gnmt_penalty: GnmtPenalty = None,
    tokenized: Annotated[
        bool, typer.Option("--tokenized", help="Add BLEU of tokens with split compounds, as older papers report it.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="File to write everything to as well.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture to draw: BLEU by the length of the source.")] = None,
    card: Annotated[bool, typer.Option("--card", help="Put the scores on the card of each MODEL, a folder.")] = False,
) -> None:
    """Score models on held-out text: BLEU, chrF and TER with signatures and confidence intervals, and BLEU by the length
    of the source; test whether further models differ from the first."""
    from relpos.model_cards import figures
    from relpos.training import evaluation, significance

    beam_sizes = evaluation.parse_beams(beams)
    if plot:
        figures.check_picture(plot)
    evaluation.check_request(models, json=json, tokenized=tokenized, card=card)
    pair = evaluation.choose_languages(models, corpus=corpus, languages=languages)
    for remark in evaluation.remarks_on_languages(models, pair):
        _say(remark)
    sources, references, name = evaluation.read_held_out(corpus, split=split, languages=pair)
    with _progress("translating", len(sources) * len(beam_sizes) * len(models), shown=True) as on_progress:
        translated = evaluation.translate_by_models(
            models,
            sources,
            language=pair[1],
            beams=beam_sizes,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            gnmt_penalty=gnmt_penalty,
            on_progress=on_progress,
        )
    tokens_of = pair[1] if tokenized else None
    results = [evaluation.evaluate_corpus(one, sources, references, tokenized=tokens_of) for one in translated]
    comparisons = significance.compare_by_beams(translated, references)
    title = f"{models[0] if len(models) == 1 else f'{len(models)} models'} on {name}, {len(sources):,} pairs"
    _print(evaluation.results_table(results, title=title))
    _print(evaluation.lengths_table(results))
    for comparison in comparisons:
        _print(significance.comparison_table(comparison))
    typer.echo("\n".join(evaluation.results_notes(results) + significance.comparison_notes(comparisons)))
    if json:
        content = {"corpus": name, "languages": pair, "results": results, "comparisons": comparisons}
        evaluation.write_json(json, content)
    if plot:
        evaluation.plot_by_length(results, plot, title=title)
    if card:
        evaluation.add_to_cards(results, corpus=name)


@app.command()
def translate(
    model: Model,
    input: Annotated[Path | None, typer.Option(help="File to read.", show_default="standard input")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write.", show_default="standard output")] = None,
    batch_size: BatchSize = 32,
    beams: Annotated[int | None, typer.Option(min=1, help="Beam size.", show_default="the model's own")] = None,
    max_new_tokens: MaxNewTokens = None,
    to: Annotated[
        str | None, typer.Option(metavar="LANGUAGE", help="Target language, where the model has several.")
    ] = None,
    n_best: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Write the N best translations of each line, behind its number and a tab."
        ),
    ] = None,
    scores: Annotated[
        bool,
        typer.Option("--scores", help="Put log-probability and its mean per token in front, with tabs between."),
    ] = False,
    gnmt_penalty: GnmtPenalty = None,
    engine: Annotated[
        str | None,
        typer.Option(help="ctranslate2: MODEL is what `relpos export` wrote.", show_default="Transformers"),
    ] = None,
) -> None:
    """Translate line by line: one line of output for one line of input, of any length; with --n-best N, N lines."""
    from relpos import conversion
    from relpos.training import line_files, loading, translation

    with line_files.open_input(input) as source, line_files.open_output(output, warn=_say, source=input) as target:
        loaded = conversion.load_engine(model, engine=engine) if engine else loading.load_model(model)
        loaded = loading.into_language(loaded, to)
        with _progress("translating", source.count, shown=not target.isatty()) as on_progress:
            translation.translate_stream(
                loaded,
                source.windows(batch_size * translation.BATCHES_PER_WINDOW),
                target,
                beams=beams,
                batch_size=batch_size,
                max_new_tokens=max_new_tokens,
                n_best=n_best,
                scores=scores,
                gnmt_penalty=gnmt_penalty,
                on_progress=on_progress,
                warn=_say,
            )


@app.command()
def score(
    model: Model,
    corpus: CorpusOption = None,
    split: Split = "test",
    languages: CorpusLanguages = None,
    output: Annotated[Path | None, typer.Option(help="File to write.", show_default="standard output")] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines, with each token's log-probability.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a batch per side, with padding.")] = 4096,
) -> None:
    """Tell how likely a model finds given translations: one line for one pair, its log-probability and, behind a tab,
    the mean per token. Logarithms are natural, and `</s>` is a token."""
    from relpos.training import evaluation, line_files, loading, scoring

    pair = evaluation.choose_languages([model], corpus=corpus, languages=languages)
    for remark in evaluation.remarks_on_languages([model], pair):
        _say(remark)
    corpus_rows, _ = evaluation.open_held_out(corpus, split=split, languages=pair)
    with line_files.open_output(output, warn=_say) as target:
        loaded = loading.load_model(model)
        loaded = loading.into_language(loaded, pair[1] if loaded.languages else None)
        with _progress("scoring", len(corpus_rows), shown=not target.isatty()) as on_progress:
            texts = (tuple(row["translation"][language] for language in pair) for row in corpus_rows)
            scores = scoring.score_pairs(loaded, texts, max_tokens=max_tokens, on_progress=on_progress)
            scoring.write_scores(scores, target, as_json=json)


@app.command()
def plot(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder of a training, a saved model, or a model on the Hub.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder to write the pictures to.", show_default="RUN, or the current folder")
    ] = None,
    corpus: CorpusOption = None,
    split: Split = "validation",
    languages: CorpusLanguages = None,
) -> None:
    """Draw curves.png, how the loss and BLEU of a training went, and positions.png, what each head of its model adds on
    average to the score of a key by its offset, over sentences of the corpus."""
    from relpos.training import pictures

    for picture in pictures.draw(run, output, corpus=corpus, split=split, languages=languages):
        typer.echo(picture)


@app.command()
def average(
    checkpoints: Annotated[list[str], typer.Argument(metavar="CHECKPOINTS", help="Saved folders of one model.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")],
    force: Force = False,
) -> None:
    """Write the model whose weights are the means of those of several checkpoints."""
    from relpos.training import averaging

    averaging.average_checkpoints(checkpoints, out, force=force)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="File or folder of the model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    toolkit: Annotated[
        str, typer.Option("--from", help="opennmt-py, opennmt-tf, tensor2tensor, ctranslate2 or argos.")
    ],
    subwords: Annotated[
        list[Path] | None,
        typer.Option(
            help="Subword model of both languages, or twice: source, target.", show_default="the source's own"
        ),
    ] = None,
    vocabularies: Annotated[
        list[Path] | None,
        typer.Option(help="Vocabulary of both languages, or twice: source, target.", show_default="the source's own"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="opennmt-tf: the YAML file of the training.")] = None,
    languages: Languages = None,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Trust the file to run code.")] = False,
    force: Force = False,
) -> None:
    """Convert a model of another toolkit into a folder that Transformers loads."""
    from transformers.utils import logging

    from relpos import conversion

    logging.disable_progress_bar()
    conversion.convert(
        source,
        out,
        toolkit=toolkit,
        subwords=tuple(subwords or ()),
        vocabularies=tuple(vocabularies or ()),
        config=config,
        languages=_codes(languages),
        allow_pickle=allow_pickle,
        force=force,
    )


@app.command()
def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder, or .argosmodel file, to write.")],
    toolkit: Annotated[str, typer.Option("--to", help="ctranslate2 or argos.")],
    quantization: Annotated[
        str | None,
        typer.Option(help="float32, float16, int8, int8_float32, ...", show_default="float32, or int8 for argos"),
    ] = None,
    languages: Languages = None,
    force: Force = False,
) -> None:
    """Write a model in the format of another toolkit."""
    from relpos import conversion

    conversion.export(model, out, toolkit=toolkit, quantization=quantization, languages=_codes(languages), force=force)


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A saved folder, a preset, or a model on the Hub (user/name).")
    ],
) -> None:
    """Show the architecture of a model, its parameter counts, and where the position parameters are."""
    from relpos.model_cards import inspection
    from relpos.training import loading

    config, folder = loading.find_config(model)
    _print(inspection.inspection_report(inspection.inspect_model(config, name=model, folder=folder)))


@app.command()
def check(model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved folder.")]) -> None:
    """Prove that a folder works for people without this package, as it would be pushed."""
    with _staged(model) as staged:
        _check(staged, name=str(model))


@app.command()
def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved folder.")],
    name: Annotated[str, typer.Argument(metavar="USER/NAME", help="Where to push it on the Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    license: Annotated[
        str | None, typer.Option(help="Licence of the model, as the Hub names it, such as apache-2.0; kept with MODEL.")
    ] = None,
    space: Annotated[bool, typer.Option("--space", help="Push the page of `relpos demo` as a Space, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files and their sizes.")] = False,
) -> None:
    """Put a model on the Hub with its code, tokenizer and card, in one commit, after `relpos check`."""
    from relpos.model_cards import card, publishing

    publishing.check_name(name)
    with _staged(model, name=name, facts={"license": license}) as staged, TemporaryDirectory() as scratch:
        licence = card.read_facts(staged.folder).get("license")
        page = publishing.stage_space(Path(scratch), name=name, license=licence) if space else None
        _print(publishing.staged_table(staged, title=name))
        if page:
            _print(publishing.staged_table(page, title=f"Space {name}"))
        if missing := card.missing_facts(staged.folder):
            _say(f"the card does not say: {'; '.join(missing)}")
        if dry_run:
            return
        publishing.check_access(name, private=private)
        _check(staged, name=str(model))
        if license:
            card.write_card(model, {"license": license})  # for the next push
        typer.echo(publishing.push(staged, name, private=private))
        if page:
            typer.echo(publishing.push(page, name, private=private, space=True))
        if page and private:
            _say("the Space reads a private model once its settings on the Hub have a secret HF_TOKEN")


@app.command()
def demo(
    model: Model,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes any.")] = 7860,
) -> None:
    """Open a page on this machine to translate with a model and see what its heads attend to."""
    from relpos.model_cards import page
    from relpos.training import loading

    loaded = loading.load_model(model)
    name = Path(model).resolve().name if Path(model).is_dir() else model
    page.serve_page(loaded.model, loaded.tokenizer, name=name, port=port)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the versions and exit.")] = False,
) -> None:
    if show_version:
        packages = ("relpos", "transformers", "torch")
        typer.echo(", ".join(f"{package} {version(package)}" for package in packages))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@contextmanager
def _progress(label: str, total: int | None, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr where that is a terminal; yields the function that moves it on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _staged(model: Path, **options: Any) -> Iterator[Any]:
    """What of a folder belongs on the Hub, in a temporary folder; see `publishing.stage`."""
    from relpos import register
    from relpos.model_cards import publishing

    register()
    with TemporaryDirectory() as folder:
        yield publishing.stage(model, Path(folder), **options)


def _check(staged: Any, *, name: str) -> None:
    """Print what `relpos check` finds; raises CheckError where something does not work."""
    from transformers.utils import logging

    from relpos.model_cards import self_contained

    logging.disable_progress_bar()
    findings = self_contained.check_folder(staged.folder)
    _print(self_contained.findings_table(findings, title=name))
    self_contained.raise_problems(findings, name=name)


def _codes(languages: str | None) -> tuple[str, ...]:
    return tuple(code.strip() for code in languages.split(",")) if languages else ()


def _print(report: Any) -> None:
    """Something that rich draws, on standard output: as wide as the terminal, 120 columns in a file."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(report)


def _say(message: str) -> None:
    """A message for the user on stderr; a progress bar that is shown moves below it."""
    print(f"relpos: {message}", file=sys.stderr, flush=True)


def _fail(message: str) -> int:
    _say(message)
    return 2
