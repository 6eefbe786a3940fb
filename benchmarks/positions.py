"""Relative against sinusoidal positions: the recipe quickstart with either, at equal steps and at equal time.

    python benchmarks/positions.py train FOLDER --seed 1 [--corpus CORPUS.tsv.gz]    # twenty minutes of one core
    python benchmarks/positions.py time FOLDER                                       # on a quiet machine
    python benchmarks/positions.py compare FOLDER

Corpora are English and German; the bundled one by default. Each becomes a folder within FOLDER, with its held-out pairs,
the tokenizer that both models share, and their runs, which see the same batches in the same order. `time` and `compare`
are for all that were trained. The rate falls with the inverse square root of the step, so that any step of a run is like
the last one: the faster model goes on for as long as the other took.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from measure import Ratio, in_turn, machine, ratio, write
from transformers import AutoTokenizer

from relpos.training.corpus import BUNDLED, bundled_splits, hold_out, read_corpus
from relpos.training.evaluation import read_held_out, score_translations, translate_corpus
from relpos.training.loading import load_model
from relpos.training.metric import BLEU
from relpos.training.preparation import make_tokenizer, read_corpora
from relpos.training.recipe import parse_arguments
from relpos.training.run_translation import main as train
from relpos.training.run_translation import make_trainer
from relpos.training.significance import compare_systems
from relpos.training.trainer import save_tokenizer, smoothed_loss

LANGUAGES = ("en", "de")
RECIPE = {
    "max_length": 60,
    "max_tokens": 1500,
    "lr_scheduler_type": "inverse_sqrt",
    "warmup_steps": 200,
}
SAVES = {"save_strategy": "steps", "save_steps": 200, "report_to": "none"}
# Each with the best of the rates 1.5e-3, 3e-3 and 6e-3 after 800 steps on the bundled corpus, held-out BLEU: relative 9.0 at
# 3e-3, 10.4 and 10.9 at 6e-3 (two seeds); sinusoidal 5.8, 7.5, and 4.9 and 9.0 at 6e-3, where it swings from step to step.
MODELS = {
    "relative": {"max_relative_position": 16, "absolute_position": "none", "learning_rate": 6e-3},
    "sinusoidal": {"max_relative_position": "null", "absolute_position": "sinusoidal", "learning_rate": 3e-3},
}
COLUMNS = ["corpus", "seed", "at equal", *(f"{model} {what}" for what in ("steps", "BLEU") for model in MODELS)]
COLUMNS += ["relative - sinusoidal", "p of the paired bootstrap"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "time", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", default=BUNDLED)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="to train now")
    parser.add_argument("--steps", type=int, default=2000, help=f"a multiple of {SAVES['save_steps']}")
    options = parser.parse_args()
    if options.action == "train":
        folder = options.folder / Path(options.corpus).name.split(".")[0]
        prepare(options.corpus, folder)
        for model in options.models:
            train(run_arguments(folder, model, options.seed, options.steps))
    elif options.action == "time":
        time_steps(options.folder)
    else:
        compare(options.folder, options.steps)


def prepare(corpus: str, folder: Path) -> None:
    """Hold out 1,000 pairs, and train the vocabulary on the others."""
    if (folder / "tokenizer").exists():
        return
    pairs = None if corpus == BUNDLED else read_corpus(corpus, languages=LANGUAGES)
    splits = hold_out(pairs, validation=500, test=1000) if pairs else bundled_splits()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        rows = ("\t".join(row["translation"][language] for language in LANGUAGES) for row in splits[name])
        (folder / f"{name}.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    run = parse_arguments(["quickstart", "--train_corpus", str(folder / "train.tsv"), "--output_dir", str(folder)])
    save_tokenizer(make_tokenizer(run.model, run.data, read_corpora(run.data)), folder / "tokenizer")


def run_arguments(folder: Path, model: str, seed: int, steps: int, **fields: Any) -> list[str]:
    """The recipe of a run and its fields, as on the command line."""
    fields = {**RECIPE, **SAVES, **MODELS[model], "seed": seed, "max_steps": steps, **fields}
    fields |= {"tokenizer": folder / "tokenizer", "train_corpus": folder / "train.tsv"}
    fields.setdefault("output_dir", run_folder(folder, model, seed))
    return ["quickstart", *itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in fields.items())]


def run_folder(folder: Path, model: str, seed: int) -> Path:
    return folder / f"{model}-{seed}"


def corpora(folder: Path) -> list[Path]:
    """The folders of the corpora that were prepared."""
    return sorted(tokenizer.parent for tokenizer in folder.glob("*/tokenizer"))


def time_steps(folder: Path) -> None:
    """Write how many times as long as the other's a step of the relative model takes, on the same batches in turn."""
    for corpus in corpora(folder):
        times = in_turn({model: steps_of(corpus, model) for model in MODELS}, seconds=50)
        found = ratio(times["relative"], times["sinusoidal"])
        print(corpus.name, found)
        (corpus / "step_times.json").write_text(json.dumps(found))


def steps_of(corpus: Path, model: str) -> Callable[[], None]:
    """One update of a new model with each call, on the batches of a run one after another."""
    run = parse_arguments(run_arguments(corpus, model, 1, 1000, output_dir=corpus / "timed"))
    trainer, _ = make_trainer(run)
    trainer.create_optimizer_and_scheduler(run.training.max_steps)
    rows = trainer.train_dataset.select_columns(["input_ids", "labels"])
    batches = iter(trainer.batch_sampler)

    def step() -> None:
        batch = trainer.data_collator([rows[row] for row in next(batches)])
        labels = batch.pop("labels")
        outputs = trainer.model(**batch, use_cache=False)
        smoothed_loss(outputs, labels, smoothing=run.training.label_smoothing_factor).backward()
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.model.zero_grad()

    trainer.model.train()
    return step


def compare(folder: Path, steps: int) -> None:
    """Go on with the faster model, translate the held-out pairs with both, and write the table."""
    facts, rows, ratios = machine(), [], []
    for corpus in corpora(folder):
        ratios.append((corpus.name, Ratio(*json.loads((corpus / "step_times.json").read_text()))))
        for seed in (1, 2):
            if all((run_folder(corpus, model, seed) / f"checkpoint-{steps}").exists() for model in MODELS):
                rows += compare_runs(corpus, seed, steps, ratios[-1][1].median)
    rates = ", ".join(f"{name} {fields['learning_rate']}" for name, fields in MODELS.items())
    note = (
        f"The recipe quickstart with {', '.join(f'{name} {value}' for name, value in RECIPE.items())}: encoder–decoders of "
        "2 + 2 layers of 128 with relative positions (k = 16) or with sinusoidal ones, the same tokenizer, and the same "
        "batches in the same order. BLEU of those of 1,000 held-out pairs that are within max_length, greedy, ± half the "
        "95 % interval of the bootstrap. Steps were timed in turn on the same batches: a step with relative positions takes "
        f"{' and '.join(f'{found} times as long on {name}' for name, found in ratios)} (median, 95 % interval). "
        f"Peak rates, the best of three for each after 800 steps: {rates}. The intervals are about the choice of sentences; "
        "the models themselves move from step to step."
    )
    write("positions", "Relative against sinusoidal positions", COLUMNS, rows, facts, note)


def compare_runs(corpus: Path, seed: int, steps: int, slowdown: float) -> list[list[Any]]:
    """Rows of the table for one seed: at equal steps, and at equal time."""
    equal_steps = {model: run_folder(corpus, model, seed) / f"checkpoint-{steps}" for model in MODELS}
    faster, longer = ("sinusoidal", slowdown) if slowdown > 1 else ("relative", 1 / slowdown)
    more_steps = round(steps * longer)
    longer_run = corpus / f"{faster}-{seed}-from-{steps}-to-{more_steps}"
    begin = {"resume_from_checkpoint": equal_steps[faster], "output_dir": longer_run}
    if not (longer_run / "config.json").exists():
        train(run_arguments(corpus, faster, seed, more_steps, **begin))
    equal_time = {**equal_steps, faster: longer_run}
    taken = dict.fromkeys(MODELS, steps)
    return [
        [corpus.name, seed, "steps", *taken.values(), *scores(corpus, equal_steps)],
        [corpus.name, seed, "time", *{**taken, faster: more_steps}.values(), *scores(corpus, equal_time)],
    ]


def scores(corpus: Path, models: dict[str, Path]) -> list[str]:
    """BLEU of the relative and of the sinusoidal model with their intervals, the difference, and its p."""
    sources, references = held_out(corpus)
    texts = {name: translations(folder, sources) for name, folder in models.items()}
    bleu = [score_translations(texts[name], references, metrics=(BLEU,))[0] for name in MODELS]
    (against_sinusoidal,) = compare_systems([(name, texts[name]) for name in reversed(MODELS)], references)["systems"]
    test = next(score for score in against_sinusoidal["metrics"] if score["metric"] == "BLEU")
    shown = [f"{score['score']:.1f} ± {score['confidence']:.1f}" for score in bleu]
    return [*shown, f"{test['difference']:+.1f}", f"{test['bootstrap_p']:.3f}"]


def held_out(corpus: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sources and references that are no longer than what was trained on: to go beyond it is another question."""
    sources, references, _ = read_held_out([str(corpus / "test.tsv")], split="test", languages=LANGUAGES)
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    lengths = [max(map(len, tokenizer(list(pair))["input_ids"])) for pair in zip(sources, references)]
    kept = [pair for pair, length in zip(zip(sources, references), lengths) if length <= RECIPE["max_length"]]
    return tuple(zip(*kept))


@cache
def translations(folder: Path, sources: tuple[str, ...]) -> list[str]:
    """What the model in a folder makes of the sources, greedily."""
    (translated,) = translate_corpus(load_model(str(folder)), sources, beams=(1,))
    return translated.texts


if __name__ == "__main__":
    main()
