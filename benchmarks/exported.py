"""The export for CTranslate2 against `generate`: tokens per second on the CPU, by weight type.

python benchmarks/exported.py [--size base] [--batch 16] [--seconds 60]
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import ctranslate2
import torch
from measure import in_turn, machine, ratio, write
from models import SIZES, build
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from relpos.conversion import export

SOURCE, NEW = 32, 48
QUANTIZATIONS = ["float32", "int8"]


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Any tokenizer of the right size: an export needs a name for every embedding."""
    words = ["<pad>", "</s>", *(f"w{index}" for index in range(size - 2))]
    model = models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), pad_token="<pad>", eos_token="</s>", unk_token="w0"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0, help="per beam size")
    options = parser.parse_args()
    facts, size = machine(), SIZES[options.size]["vocabulary"]
    model, tokenizer = build("relpos", options.size).eval(), word_tokenizer(size)
    sources = torch.randint(2, size, (options.batch, SOURCE), generator=torch.Generator().manual_seed(0))
    words = [tokenizer.convert_ids_to_tokens(row.tolist()) for row in sources]
    rows = []
    with tempfile.TemporaryDirectory() as work:
        model.save_pretrained(f"{work}/model")
        tokenizer.save_pretrained(f"{work}/model")
        engines = {}
        for kind in QUANTIZATIONS:
            folder = export(f"{work}/model", f"{work}/{kind}", toolkit="ctranslate2", quantization=kind)
            engines[kind] = ctranslate2.Translator(
                str(folder), compute_type=kind, intra_threads=torch.get_num_threads()
            )
        file_sizes = {kind: Path(work, kind, "model.bin").stat().st_size / 1e6 for kind in QUANTIZATIONS}
        for beams in (1, 4):
            times = in_turn(contestants(model, engines, sources, words, beams), seconds=options.seconds)
            for name, taken in times.items():
                speed = options.batch * NEW / statistics.median(taken)
                megabytes = f"{file_sizes[name]:.0f}" if name in file_sizes else ""
                rows.append([beams, name, megabytes, f"{speed:.0f}", ratio(times["generate"], taken)])
    note = (
        f"Size {options.size}, {options.batch} sources of {SOURCE} tokens, {NEW} new tokens each. `generate` is PyTorch in "
        "float32 without compilation; the others are CTranslate2 with weights of that type, on as many threads. The last "
        "column is their tokens per second divided by generate's, within a round: median (95 % interval)."
    )
    columns = ["beams", "by", "model in MB", "tokens per second", "speed of this / speed of generate"]
    write(f"exported_{options.size}", "Export for CTranslate2", columns, rows, facts, note)


def contestants(model, engines, sources, words, beams: int) -> dict:
    """Runs that always make NEW tokens per source."""
    exactly = {"min_new_tokens": NEW, "max_new_tokens": NEW}
    mask = torch.ones_like(sources)
    runs = {
        "generate": lambda: model.generate(
            input_ids=sources, attention_mask=mask, num_beams=beams, do_sample=False, **exactly
        )
    }
    for kind, engine in engines.items():
        runs[kind] = lambda engine=engine: engine.translate_batch(
            words, beam_size=beams, min_decoding_length=NEW, max_decoding_length=NEW
        )
    return runs


if __name__ == "__main__":
    main()
