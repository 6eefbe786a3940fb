"""How much of the batches is padding, by how they are cut: no model, only lengths.

python benchmarks/padding.py [CORPUS.tsv.gz ...] [--max-tokens 4096]
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from measure import machine, write

from relpos.training.batching import TokenBatchSampler, sequence_lengths
from relpos.training.corpus import BUNDLED
from relpos.training.preparation import make_tokenizer, read_corpora, tokenize_corpora
from relpos.training.recipe import DataArguments, ModelArguments

WINDOWS = [1_000, 10_000, 100_000]
VOCABULARY = 8000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="*", help="English and German, beside the bundled one")
    parser.add_argument("--max-tokens", type=int, default=4096)
    options = parser.parse_args()
    facts = machine()
    rows = [row for corpus in (BUNDLED, *options.corpus) for row in rows_of(corpus, options.max_tokens)]
    note = (
        f"Share of padding in all tokens of an epoch, with a vocabulary of {VOCABULARY:,}. By tokens: at most "
        f"{options.max_tokens:,} with padding on each side, cut from windows of so many pairs that are sorted by length. By "
        "pairs: batches of one number of pairs, as many as the largest window's have on average, in random order."
    )
    write("padding", "Padding", ["corpus", "batches", "number", "sources", "targets"], rows, facts, note)


def rows_of(corpus: str, max_tokens: int) -> list[list[Any]]:
    """Rows of the table for one corpus."""
    source, target = lengths_of(corpus)
    name, rows = Path(corpus).name.split(".")[0], []
    for window in WINDOWS:
        sampler = TokenBatchSampler(source, target, max_tokens=max_tokens, window=window)
        rows.append(
            [f"{name}, {len(source):,} pairs", f"by tokens, windows of {window:,}", len(sampler), *sampler.padding]
        )
    number = len(sampler)
    order = np.random.default_rng(0).permutation(len(source))
    padding = [random_padding(side[order], number) for side in (source, target)]
    rows.append([rows[0][0], "by pairs, in random order", number, *padding])
    return [[*row[:3], *(f"{share:.1%}" for share in row[3:])] for row in rows]


def lengths_of(corpus: str) -> list[np.ndarray]:
    """Tokens of each source and of each target."""
    data = DataArguments(train_corpus=[corpus], subword_sentences=50_000)
    corpora = read_corpora(data)
    tokenizer = make_tokenizer(ModelArguments(vocab_size=VOCABULARY), data, corpora)
    rows = tokenize_corpora(corpora, tokenizer, data).train
    return [sequence_lengths(rows, column) for column in ("input_ids", "labels")]


def random_padding(lengths: np.ndarray, batches: int) -> float:
    """Share of padding where lengths are cut into so many batches as they come."""
    padded = sum(len(batch) * batch.max() for batch in np.array_split(lengths, batches))
    return 1 - lengths.sum() / padded


if __name__ == "__main__":
    main()
