"""The same recipe on one process and on two, started by torchrun."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from relpos.training.checkpoints import whole_checkpoints
from relpos.training.run_translation import main

FIELDS = {
    "model": "tiny",
    "vocab_size": 420,
    "max_tokens": 150,
    "tokens_per_step": 300,  # two batches: one on each of two processes, or one after the other
    "max_steps": 6,
    "save_steps": 3,
    "logging_steps": 1,
    "warmup_steps": 4,
    "learning_rate": 1e-3,
    "generation_max_length": 10,
    "per_device_eval_batch_size": 10,  # of 61: the last of the seven batches is one process's alone
}
if torch.accelerator.is_available():
    FIELDS["use_cpu"] = "true"  # elsewhere nobody has to say so
PROCESSES = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Each process is the only one of its machine, as far as it knows. The vocabulary is the first one's.
MACHINES = """
import os
import sys

from relpos.training import run_translation

os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
if os.environ["RANK"] != "0":
    del run_translation.make_tokenizer
try:
    run_translation.main([part.replace("RANK", os.environ["RANK"]) for part in sys.argv[1:]])
except run_translation.RecipeError as error:
    sys.exit(f"error: {error}")
"""


@pytest.fixture(scope="module")
def corpus(letters, tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "corpus.tsv"
    file.write_text(letters(61))
    return file


def arguments(corpus, folder, **fields):
    given = {**FIELDS, "train_corpus": corpus, "validation_corpus": corpus, "output_dir": folder, **fields}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def log_of(folder):
    """The losses of the six steps, and what the validation at the end gave."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    losses = torch.tensor([entry["loss"] for entry in history if "loss" in entry])
    (validation,) = [entry for entry in history if "eval_loss" in entry]
    assert len(losses) == 6
    return losses, validation


def same_log(folder, other):
    (ours, validation), (theirs, expected) = log_of(folder), log_of(other)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-4)
    assert validation["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert validation["eval_bleu"] == pytest.approx(expected["eval_bleu"], abs=0.5)


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    return main(arguments(corpus, tmp_path_factory.mktemp("runs") / "alone"))


@pytest.fixture
def machines(tmp_path):
    script = tmp_path / "machines.py"
    script.write_text(MACHINES)
    return [str(script)]


def train_in_two_processes(corpus, folder, program=("-m", "relpos.training.run_translation"), **fields):
    process = start_two_processes(corpus, folder, program, **fields)
    assert process.returncode == 0, process.stderr[:6000]
    return process.stdout


def start_two_processes(corpus, folder, program, **fields):
    command = [*PROCESSES, *program, *arguments(corpus, folder, **fields)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.terminate()  # by which torchrun ends what it started, too
            process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def same_model(one, other):
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-3)


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_accumulation(corpus, alone, machines, tmp_path):
    """DDP as Trainer sets it up, which fails on a parameter without a gradient."""
    folder = tmp_path / "both"
    output = train_in_two_processes(corpus, folder, machines, ddp_find_unused_parameters="false")
    assert "on 2 x cpu" in output
    assert output.count("The model is in") == 1
    same_log(folder, alone)
    same_model(folder, alone)

    # one process goes on from what two have saved
    shutil.rmtree(folder / "checkpoint-6")
    (folder / "config.json").unlink()
    main(arguments(corpus, folder, ddp_find_unused_parameters="false"))
    same_log(folder, alone)
    same_model(folder, alone)


@pytest.mark.slow
def test_machines_that_do_not_see_the_same_folder_are_told_so(corpus, alone, machines, tmp_path):
    shutil.copytree(alone, tmp_path / "0")
    process = start_two_processes(corpus, tmp_path / "RANK", machines)
    assert process.returncode != 0
    assert "does not hold the same on all machines: put it on a disk that they share" in process.stderr


@pytest.mark.slow
def test_what_fsdp_saves_is_loaded_by_one_process(corpus, alone, tmp_path):
    folder = tmp_path / "sharded"
    train_in_two_processes(corpus, folder, fsdp="true")
    same_log(folder, alone)
    same_model(folder, alone)
    assert [path.name for path in whole_checkpoints(folder)] == ["checkpoint-3", "checkpoint-6"]
    same_model(folder / "checkpoint-3", alone / "checkpoint-3")
    for saved in (folder, folder / "checkpoint-6"):
        model, info = AutoModelForSeq2SeqLM.from_pretrained(saved, output_loading_info=True)
        assert type(model).__name__ == "RelPosForConditionalGeneration"
        assert model.config.architectures == ["RelPosForConditionalGeneration"]
        assert not any(info.values())
