import json

import pytest
import torch

from relpos.training import checkpoints
from relpos.training.checkpoints import find_damage, whole_checkpoints


@pytest.fixture
def run(tmp_path, learned_model):
    for step in (4, 20, 100):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for file in learned_model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({"state": torch.ones(9)}, folder / name)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return tmp_path


def steps(run):
    return [int(folder.name.split("-")[1]) for folder in whole_checkpoints(run)]


def test_checkpoints_come_in_the_order_of_their_steps(run):
    (run / "checkpoint-7").write_text("a file")
    (run / "checkpoint-best").mkdir()
    (run / ".saving" / "checkpoint-120").mkdir(parents=True)
    assert steps(run) == [4, 20, 100]
    assert whole_checkpoints(run / "missing") == []


@pytest.mark.parametrize(
    "name",
    [
        "trainer_state.json",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "model.safetensors",
        "config.json",
    ],
)
def test_a_file_that_is_missing_or_cut_off_is_noticed(run, name, monkeypatch):
    warnings = []
    monkeypatch.setattr(checkpoints.logger, "warning", warnings.append)
    file = run / "checkpoint-100" / name
    content = file.read_bytes()
    for damaged in (content[:-20], content[:0]) if name != "config.json" else ():
        file.write_bytes(damaged)
        assert steps(run) == [4, 20]
    file.unlink()
    assert steps(run) == [4, 20]
    assert all("checkpoint-100 is not whole" in warning for warning in warnings)
    file.write_bytes(content)


def test_a_renamed_checkpoint_is_noticed(run):
    assert "of step 100" in find_damage(run / "checkpoint-100", step=200)


def test_the_sharded_state_of_fsdp_is_whole_once_its_metadata_is_written(run):
    folder = run / "checkpoint-100"
    (folder / "optimizer.pt").unlink()
    (folder / "model.safetensors").unlink()
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):
        (folder / name).mkdir()
        assert steps(run) == [4, 20]
        (folder / name / ".metadata").touch()
    assert steps(run) == [4, 20, 100]
