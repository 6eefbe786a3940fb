"""What the training loop costs: the recipe quickstart in Trainer, against the bare steps of its model on the same batches.

python benchmarks/training_loop.py [--steps 80] [--rounds 3]

Both run on one thread and are timed by the processor time of the process, which other processes hardly change. The bare
steps are forward, loss, backward and Adam on batches that are collated beforehand. The loop reads and collates them,
computes the norm of the gradients, sets the rate, and keeps the log; evaluations and saves are left out.
"""

import argparse
import random
import statistics
import tempfile
import time
from itertools import islice

import torch
from measure import machine, ratio, write
from transformers import TrainerCallback

from relpos.training.allocator import keep_freed_memory
from relpos.training.recipe import parse_arguments
from relpos.training.run_translation import make_trainer
from relpos.training.trainer import TranslationTrainer, smoothed_loss


class Stopwatch(TrainerCallback):
    """Processor seconds of a training from before its first batch is read to the end of its last step."""

    def on_train_begin(self, args, state, control, **kwargs):
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
    begin = time.process_time()
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        smoothed_loss(model(**inputs, use_cache=False), batch["labels"], smoothing=smoothing).backward()
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
    return time.process_time() - begin


def measure(folder: str, steps: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Processor seconds of the loop and of the bare steps in each round, and the target tokens of a round."""
    fields = ["quickstart", "--output_dir", folder, "--max_steps", str(steps), "--report_to", "none"]
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
    return looped, stepped, sum(int(batch["labels"].ne(-100).sum()) for batch in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=80, help="updates of a round; with few, the start of a training weighs more"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        looped, stepped, tokens = measure(folder, options.steps, options.rounds)
    rows = [
        [name, f"{tokens / statistics.median(times):,.0f}", ratio(times, stepped)]
        for name, times in (("Trainer's loop", looped), ("bare steps", stepped))
    ]
    note = (
        f"The recipe quickstart on the bundled corpus, {options.rounds} rounds of {options.steps} updates each way on the "
        "same batches, on one thread. Times are processor time; ratios of those within a round: median (95 % interval)."
    )
    columns = ["way", "target tokens per second", "time of this / time of the bare steps"]
    write("training_loop", "The training loop against its steps", columns, rows, facts, note)


if __name__ == "__main__":
    main()
