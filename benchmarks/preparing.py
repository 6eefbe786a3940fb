"""Time and memory of preparing millions of pairs for training: a corpus, repeated.

python benchmarks/preparing.py CORPUS.tsv.gz [--pairs 4500000]
"""

import argparse
import gzip
import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
from measure import machine, status, write

from relpos.training.batching import TokenBatchSampler, sequence_lengths
from relpos.training.preparation import make_tokenizer, read_corpora, tokenize_corpora
from relpos.training.recipe import DataArguments, ModelArguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="English and German, source and target with a tab between")
    parser.add_argument("--pairs", type=int, default=4_500_000)
    options = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        datasets.disable_progress_bars()
        corpus = repeat(options.corpus, Path(folder) / "corpus.tsv", options.pairs)
        rows = measure_stages(DataArguments(train_corpus=[str(corpus)], validation_corpus=None))
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    note = (
        f"{options.pairs:,} pairs, {options.corpus.name} repeated; {size / 2**30:.1f} GB on disk with the corpus itself. "
        "Memory is what the process holds of its own at most (RssAnon); pages of the Arrow files, which the system takes "
        "back when it needs them, are not counted."
    )
    write("preparing", "Preparing a large corpus", ["stage", "seconds", "GB at most"], rows, facts, note)


def repeat(corpus: Path, path: Path, pairs: int) -> Path:
    """Write so many lines of a corpus, from the start again after its end."""
    lines = gzip.decompress(corpus.read_bytes()).splitlines(keepends=True)
    with path.open("wb") as file:
        file.writelines(itertools.islice(itertools.cycle(lines), pairs))
    return path


def measure_stages(data: DataArguments) -> list[list[Any]]:
    """Rows of a stage, its seconds and its gigabytes."""
    rows: list[list[Any]] = [["loaded libraries", "", f"{status('RssAnon') / 2**30:.2f}"]]

    def stage(name: str, work: Callable[[], Any]) -> Any:
        result, seconds, peak = watch(work)
        rows.append([name, f"{seconds:.0f}", f"{peak / 2**30:.2f}"])
        print(*rows[-1], flush=True)
        return result

    corpora = stage("read and clean", lambda: read_corpora(data))
    tokenizer = stage("train the vocabulary", lambda: make_tokenizer(ModelArguments(), data, corpora))
    sets = stage("tokenize", lambda: tokenize_corpora(corpora, tokenizer, data))
    stage("tokenize, found again", lambda: tokenize_corpora(corpora, tokenizer, data))
    lengths = [sequence_lengths(sets.train, column) for column in ("input_ids", "labels")]
    sampler = stage("plan the batches", lambda: TokenBatchSampler(*lengths, max_tokens=4096))
    stage("an epoch of batches", lambda: sum(1 for _ in sampler))
    return rows


def watch(work: Callable[[], Any]) -> tuple[Any, float, int]:
    """What some work returns, its seconds, and the bytes of its own that the process held at most meanwhile."""
    done, peak = threading.Event(), 0

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, status("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    begin = time.perf_counter()
    try:
        result = work()
    finally:
        done.set()
        thread.join()
    return result, time.perf_counter() - begin, max(peak, status("RssAnon"))


if __name__ == "__main__":
    main()
