"""What the training loop costs: the recipe quickstart in Trainer, against the bare steps of its model on the same batches.

python benchmarks/training_loop.py [CORPUS ...] [--steps 31] [--rounds 12]

Both run on one thread and are timed by the processor time of the process, which other processes hardly change, from the
end of the first step: what comes before it, making the optimizer and planning the epoch, is done once. The bare steps are
forward, loss, backward and Adam on batches that are collated beforehand. The loop reads and collates them, computes the
norm of the gradients, sets the rate, and keeps the log; evaluations and saves are left out. Corpora are English and German,
the bundled one by default.
"""

import argparse
import random
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
from measure import machine, ratio, write
from transformers import TrainerCallback

from relpos.training.allocator import keep_freed_memory
from relpos.training.corpus import BUNDLED
from relpos.training.recipe import parse_arguments
from relpos.training.run_translation import make_trainer
from relpos.training.trainer import TranslationTrainer, smoothed_loss


class Stopwatch(TrainerCallback):
    """Processor seconds of a training from the end of its first step to the end of its last."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.begin = time.process_time()

    def on_train_end(self, args, state, control, **kwargs):
        self.seconds = time.process_time() - self.begin


def loop(trainer: TranslationTrainer) -> float:
    stopwatch = Stopwatch()
    trainer.add_callback(stopwatch)
    trainer.train()
    trainer.remove_callback(stopwatch)
    return stopwatch.seconds


def bare(trainer: TranslationTrainer, batches: list[dict[str, torch.Tensor]]) -> float:
    model = trainer.model.train()
    trainer.create_optimizer_and_scheduler(len(batches))
    smoothing = trainer.args.label_smoothing_factor
    for number, batch in enumerate(batches):
        if number == 1:
            begin = time.process_time()
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        smoothed_loss(model(**inputs, use_cache=False), batch["labels"], smoothing=smoothing).backward()
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
    return time.process_time() - begin


def measure(corpus: str, folder: str, steps: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Processor seconds of the loop and of the bare steps in each round, and the target tokens of a round."""
    fields = ["quickstart", "--output_dir", folder, "--max_steps", str(steps), "--report_to", "none"]
    fields += ["--train_corpus", corpus]
    trainer, _ = make_trainer(parse_arguments([*fields, "--logging_steps", "100"]))
    plan = list(islice(iter(trainer.batch_sampler), steps))
    columns = trainer.train_dataset.select_columns(["input_ids", "labels"])
    batches = [dict(trainer.data_collator([columns[row] for row in batch])) for batch in plan]
    runs = {loop: [], lambda trainer: bare(trainer, batches): []}
    for warm_up in [True] + [False] * rounds:
        for run in random.sample(list(runs), len(runs)):
            trainer.optimizer = trainer.lr_scheduler = None
            seconds = run(trainer)
            if not warm_up:
                runs[run].append(seconds)
    looped, stepped = runs.values()
    return looped, stepped, sum(int(batch["labels"].ne(-100).sum()) for batch in batches[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="*", default=[BUNDLED])
    parser.add_argument("--steps", type=int, default=31, help="updates of a round, of which the first does not count")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine()
    keep_freed_memory()
    rows = []
    for corpus in options.corpora:
        with tempfile.TemporaryDirectory() as folder:
            looped, stepped, tokens = measure(corpus, folder, options.steps, options.rounds)
        rows += [
            [Path(corpus).name, name, f"{tokens / statistics.median(times):,.0f}", ratio(times, stepped)]
            for name, times in (("Trainer's loop", looped), ("bare steps", stepped))
        ]
    note = (
        f"The recipe quickstart, {options.rounds} rounds of {options.steps - 1} updates each way on the same batches, on one "
        "thread. Times are processor time; ratios of those within a round: median (95 % interval)."
    )
    columns = ["corpus", "way", "target tokens per second", "time of this / time of the bare steps"]
    write("training_loop", "The training loop against its steps", columns, rows, facts, note)


if __name__ == "__main__":
    main()
