"""Decoding: RelPos against itself without positions, Marian and T5, and the time of a step as the output grows.

python benchmarks/decoding.py [--size base] [--batch 16] [--seconds 60] [--modes greedy "beam 4" ...]
"""

import argparse
import statistics

import torch
from measure import in_turn, machine, ratio, write
from models import SIZES, build
from transformers import CompileConfig

KINDS = ["relpos", "relpos, no positions", "marian", "t5"]
SOURCE, NEW = 32, 48
COMPILED = CompileConfig()
COMPILED._compile_all_devices = True  # the library compiles on accelerators alone, unless it is told so
STATIC = {"cache_implementation": "static", "disable_compile": True}
MODES = {
    "greedy": {"num_beams": 1},
    "beam 4": {"num_beams": 4},
    "greedy, static cache": {"num_beams": 1, **STATIC},
    "beam 4, static cache": {"num_beams": 4, **STATIC},
    "greedy, static cache, compiled": {"num_beams": 1, "cache_implementation": "static", "compile_config": COMPILED},
}


def generator(model, batch: int, vocabulary: int, **settings):
    """A run of `generate` that always makes NEW tokens."""
    source = torch.randint(2, vocabulary, (batch, SOURCE), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(source)
    mask[: batch // 4, SOURCE // 2 :] = 0
    return lambda: model.generate(
        input_ids=source, attention_mask=mask, min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False, **settings
    )


@torch.no_grad()
def step(model, batch: int, vocabulary: int, length: int):
    """A run of one decoding step on a cache of `length` tokens, which it leaves as it was."""
    source, prefix, token = (torch.randint(2, vocabulary, (batch, n)) for n in (SOURCE, length, 1))
    encoded = model.get_encoder()(source)
    cache = model(encoder_outputs=encoded, decoder_input_ids=prefix, use_cache=True).cache

    @torch.no_grad()
    def run():
        model(encoder_outputs=encoded, decoder_input_ids=token, cache=cache)
        cache.self_attention_cache.crop(-1)  # the token that this step has added

    run()
    assert cache.get_seq_length() == length, "the cache grew"
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0, help="per mode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="all by default")
    options = parser.parse_args()
    facts, vocabulary = machine(), SIZES[options.size]["vocabulary"]
    models = {kind: build(kind, options.size).eval() for kind in KINDS}
    rows = []
    for mode in options.modes:
        runs = {kind: generator(model, options.batch, vocabulary, **MODES[mode]) for kind, model in models.items()}
        times = in_turn(runs, seconds=options.seconds)
        for kind in KINDS:
            speed = options.batch * NEW / statistics.median(times[kind])
            rows.append([mode, kind, f"{speed:.0f}", ratio(times[kind], times["relpos"])])
    note = (
        f"Size {options.size}, {options.batch} sources of {SOURCE} tokens, {NEW} new tokens each, float32. The "
        "last column is relpos's tokens per second divided by the other's, within a round: median (95 % "
        "interval)."
    )
    columns = ["mode", "model", "tokens per second", "speed of relpos / speed of this"]
    write(f"decoding_{options.size}", "Decoding", columns, rows, facts, note)

    lengths = [10, 50, 100, 200, 500]
    rows = [[kind] for kind in KINDS]
    for length in lengths:
        runs = {kind: step(model, options.batch, vocabulary, length) for kind, model in models.items()}
        times = in_turn(runs, seconds=options.seconds / 10)
        for kind, row in zip(KINDS, rows):
            milliseconds = statistics.median(times[kind]) * 1e3
            row.append(f"{milliseconds:.1f}: {ratio(times['relpos'], times[kind])}")
    note = (
        f"Size {options.size}, batch {options.batch}, by the number of tokens in the cache: milliseconds of one step, and "
        "the time of relpos's step divided by that, within a round: median (95 % interval)."
    )
    write(f"decoding_steps_{options.size}", "A decoding step", ["model", *map(str, lengths)], rows, facts, note)


if __name__ == "__main__":
    main()
