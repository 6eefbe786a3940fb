import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from relpos import cli
from relpos.training.averaging import AveragingError, average_checkpoints
from relpos.training.loading import ModelError


@pytest.fixture
def checkpoints(learned_model, tmp_path):
    """Three checkpoints of one model whose weights differ, with what Trainer leaves beside them."""
    folders = []
    for number in range(3):
        folder = tmp_path / f"checkpoint-{number + 1}"
        shutil.copytree(learned_model, folder)
        weights = {name: torch.randn_like(weight) for name, weight in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        for name in ("optimizer.pt", "training_args.bin", "trainer_state.json", "README.md"):
            (folder / name).write_text("of the training")
        folders.append(folder)
    return folders


def mean_of(folders):
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    return {name: torch.stack([part[name].double() for part in weights]).mean(0) for name in weights[0]}


def test_every_weight_is_the_mean(checkpoints, tmp_path):
    out = average_checkpoints(checkpoints, tmp_path / "out")
    averaged = load_file(out / "model.safetensors")
    expected = mean_of(checkpoints)
    assert averaged.keys() == expected.keys()
    for name, weight in averaged.items():
        assert torch.equal(weight, expected[name].to(weight.dtype)), name
    names = {file.name for file in out.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "modeling_relpos.py"} <= names
    assert not names & {"optimizer.pt", "training_args.bin", "trainer_state.json", "README.md"}
    assert not list(tmp_path.glob("*.partial"))
    model = AutoModelForSeq2SeqLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).vocab_size <= model.config.vocab_size


def test_the_sum_is_not_rounded_on_the_way(checkpoints, tmp_path):
    """In bfloat16, 256 + 1 is 256; the mean of 256 and six ones is 37.4."""
    folders = []
    for number in range(7):
        folder = shutil.copytree(checkpoints[0], tmp_path / f"half-{number}")
        weights = load_file(folder / "model.safetensors")
        value = 256.0 if number == 0 else 1.0
        filled = {name: torch.full_like(weight, value, dtype=torch.bfloat16) for name, weight in weights.items()}
        save_file(filled, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    out = average_checkpoints(folders, tmp_path / "out")
    for weight in load_file(out / "model.safetensors").values():
        assert weight.dtype == torch.bfloat16
        assert (weight == torch.tensor(262 / 7, dtype=torch.bfloat16)).all()


def test_shards_of_different_cuts_are_averaged_by_name(checkpoints, tmp_path):
    expected = mean_of(checkpoints)
    for folder, size in zip(checkpoints[1:], ("60KB", "100KB")):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size=size)
    out = average_checkpoints(checkpoints, tmp_path / "out")
    shards = sorted(out.glob("*.safetensors"))
    assert [file.name for file in shards] == sorted(file.name for file in checkpoints[-1].glob("*.safetensors"))
    assert len(shards) > 1
    averaged = {name: weight for file in shards for name, weight in load_file(file).items()}
    assert averaged.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name].float()) for name, weight in averaged.items())
    AutoModelForSeq2SeqLM.from_pretrained(out)


def test_what_has_no_average_is_refused(checkpoints, learned_model, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(AveragingError, match="two checkpoints or more, not 1"):
        average_checkpoints(checkpoints[:1], out)
    with pytest.raises(AveragingError, match="checkpoint-1 is named twice"):
        average_checkpoints([checkpoints[0], tmp_path / "x" / ".." / "checkpoint-1"], out)
    with pytest.raises(AveragingError, match="no checkpoint folder"):
        average_checkpoints([checkpoints[0], tmp_path / "missing"], out)
    with pytest.raises(AveragingError, match="one of the checkpoints"):
        average_checkpoints(checkpoints, checkpoints[0], force=True)
    (tmp_path / "letters").mkdir()
    with pytest.raises(AveragingError, match="give --force"):
        average_checkpoints(checkpoints, tmp_path / "letters")
    with pytest.raises(AveragingError, match="holds no model"):
        average_checkpoints(checkpoints, tmp_path / "letters", force=True)
    assert not out.exists()


def test_different_models_are_named_with_their_difference(checkpoints, tmp_path):
    first, second, third = checkpoints
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps({**config, "max_relative_position": 5, "transformers_version": "6"}))
    with pytest.raises(AveragingError, match="max_relative_position is 4 in one and 5 in the other"):
        average_checkpoints([first, second], tmp_path / "out")
    weights = load_file(third / "model.safetensors")
    name = sorted(weights)[3]
    save_file({**weights, name: weights[name].half()}, third / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AveragingError, match=rf"{name} is F32 of .* in one and F16 of"):
        average_checkpoints([first, third], tmp_path / "out")
    del weights[name]
    save_file(weights, third / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AveragingError, match=rf"{name} is F32 of .* in one and missing in the other"):
        average_checkpoints([first, third], tmp_path / "out")
    (third / "model.safetensors").write_bytes((first / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ModelError, match="cut off"):
        average_checkpoints([first, third], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_different_tokenizers_are_refused(checkpoints, tmp_path):
    file = checkpoints[1] / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"][-1]["content"] += "x"
    file.write_text(json.dumps(content))
    with pytest.raises(AveragingError, match=r"checkpoint-1 and .*checkpoint-2 have different tokenizers"):
        average_checkpoints(checkpoints, tmp_path / "out")


def test_a_full_disk_is_one_sentence(checkpoints, tmp_path, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("relpos.training.averaging._write_average", full_disk)
    with pytest.raises(AveragingError, match=r"could not be written to .*out \(\[Errno 28\] No space left on device\)"):
        average_checkpoints(checkpoints, tmp_path / "out")
    assert not list(tmp_path.glob("*.partial"))


def test_an_average_that_fails_leaves_nothing_and_force_replaces(checkpoints, tmp_path, monkeypatch):
    out = average_checkpoints(checkpoints[:2], tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr("relpos.training.averaging._mean", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        average_checkpoints(checkpoints, out, force=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))
    monkeypatch.undo()
    average_checkpoints(checkpoints, out, force=True)
    assert (out / "model.safetensors").read_bytes() != before


def test_the_command(checkpoints, tmp_path, monkeypatch, capsys):
    def average(*arguments):
        monkeypatch.setattr(sys, "argv", ["relpos", "average", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        return exited.value.code

    out = tmp_path / "out"
    assert average(*checkpoints, "-o", out) == 0
    expected = mean_of(checkpoints)
    assert all(
        torch.equal(weight, expected[name].float()) for name, weight in load_file(out / "model.safetensors").items()
    )
    assert average(*checkpoints, "-o", out) == 2
    assert capsys.readouterr().err == f"relpos: The output {out} exists; give --force to replace it.\n"
    assert average(*checkpoints, "-o", out, "--force") == 0


MEASURE = """
import sys, threading
from pathlib import Path
from relpos.training.averaging import average_checkpoints

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

average_checkpoints(sys.argv[2:4], sys.argv[1] + "-first")  # what libraries load when they are first used
done, peak, before = threading.Event(), 0, own()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, own())

thread = threading.Thread(target=watch)
thread.start()
average_checkpoints(sys.argv[2:], sys.argv[1])
done.set()
thread.join()
print(peak - before)
"""


def test_memory_does_not_grow_with_the_model_or_the_number_of_checkpoints(checkpoints, tmp_path):
    """Four files of 64 MB, of 16 tensors each. Mapped pages of the files do not count: the system takes them back."""
    weights = {f"layer{number}": torch.full((1024, 1024), float(number)) for number in range(16)}
    folders = []
    for number in range(4):
        folder = shutil.copytree(checkpoints[0], tmp_path / f"large-{number}")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(str(folder))
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(out), *folders], capture_output=True, text=True, check=True, timeout=300
    )
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("layer7"), weights["layer7"])
    assert int(done.stdout) < 128_000, "kilobytes: two of the four files"
