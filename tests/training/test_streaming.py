import itertools
import json
import random

import pytest
from datasets import Dataset

from relpos.training.corpus import CorpusError, read_corpus
from relpos.training.recipe import RecipeError, parse_arguments
from relpos.training.run_translation import main
from relpos.training.streaming import StreamedBatches


@pytest.fixture
def corpus(letters, tmp_path):
    file = tmp_path / "corpus.tsv"
    file.write_text("\tleer\n" + letters(50))
    return file


def stream_of(number):
    random_lengths = random.Random(1)
    rows = {name: [[i] * random_lengths.randint(1, 20) for i in range(number)] for name in ("input_ids", "labels")}
    return Dataset.from_dict(rows).to_iterable_dataset()


def batches_of(number, count, **options):
    batches = StreamedBatches(stream_of(number), **{"max_tokens": 60, "window": 40, "seed": 1, **options})
    return list(itertools.islice(batches, count))


def pairs_of(batches):
    return [row["input_ids"][0] for batch in batches for row in batch]


def test_windows_come_one_after_the_other_and_again_from_the_start():
    batches = batches_of(100, 300)
    for batch in batches:
        longest = max(len(row[side]) for row in batch for side in row)
        assert longest * len(batch) <= 60
    pairs = pairs_of(batches)
    assert sorted(pairs[:40]) == list(range(40))
    assert sorted(pairs[40:80]) == list(range(40, 80))
    assert sorted(pairs[80:100]) == list(range(80, 100))
    assert sorted(pairs[100:140]) == list(range(40))
    assert pairs[100:140] != pairs[:40], "the next time is in another order"
    assert max(map(len, batches)) > 5
    assert batches == batches_of(100, 300)


def test_processes_share_the_batches_of_every_window():
    shares = [batches_of(100, 40, process=process, processes=3) for process in range(3)]
    together = [batch for group in zip(*shares) for batch in group]
    pairs = pairs_of(together)
    assert sorted(pairs[:40]) == list(range(40))
    assert sorted(pairs[40:80]) == list(range(40, 80))


def test_a_stream_too_short_to_share_is_refused():
    with pytest.raises(CorpusError, match="fewer than 3 pairs"):
        batches_of(2, 1, processes=3)
    nothing = stream_of(2).filter(lambda row: False)
    with pytest.raises(CorpusError, match="fewer than 1 pairs"):
        next(iter(StreamedBatches(nothing, max_tokens=60, window=40, seed=1)))


def test_corpora_are_read_while_iterating(corpus, tmp_path):
    rows = read_corpus(corpus, languages=("en", "de"), streaming=True)
    assert list(rows) == list(read_corpus(corpus, languages=("en", "de")))
    (tmp_path / "bad.tsv").write_text("a\tb\nno tab\n")
    reader = iter(read_corpus(tmp_path / "bad.tsv", languages=("en", "de"), streaming=True))
    assert next(reader) == {"translation": {"en": "a", "de": "b"}}
    with pytest.raises(CorpusError, match=r"bad\.tsv, line 2"):
        next(reader)


FIELDS = ["--model", "tiny", "--vocab_size", "420", "--max_tokens", "150", "--sort_window", "20", "--max_steps", "12"]
FIELDS += ["--save_steps", "4", "--logging_steps", "1", "--dropout", "0.1", "--use_cpu", "true", "--streaming", "true"]


def losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def test_a_stopped_run_on_streams_goes_on_exactly(corpus, tmp_path, stopped_at):
    arguments = [*FIELDS, "--train_corpus", str(corpus), f"en-fr={corpus}", "--output_dir"]
    whole = main([*arguments, str(tmp_path / "whole")])
    with stopped_at(8):
        main([*arguments, str(tmp_path / "stopped")])
    stopped = main([*arguments, str(tmp_path / "stopped")])
    assert losses(stopped) == losses(whole)
    assert len(losses(whole)) == 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["--num_train_epochs", "1"], "streaming needs max_steps"),
        (["--max_steps", "1", "--drop_duplicates", "true"], "drop_duplicates=True: it must be False"),
        (["--max_steps", "1", "--drop_wrong_language", "true"], "drop_wrong_language=True: it must be False"),
        (["--max_steps", "1", "--sampling_temperature", "5"], "sampling_temperature=5.0: it must be 1"),
        (["--max_steps", "1", "--dataloader_num_workers", "2"], "dataloader_num_workers=2: it must be 0"),
    ],
)
def test_what_a_stream_cannot_do(fields, message):
    with pytest.raises(RecipeError, match=message):
        parse_arguments(["--output_dir", "out", "--streaming", "true", *fields])
