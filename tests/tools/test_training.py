"""Tools around a training step: torch.compile, gradient checkpointing, two processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from relpos import RelPosForConditionalGeneration
from relpos.configuration import preset

VARIANTS = {
    "shared": {},
    "per-head": {"relative_position_per_head": True, "relative_position_values": False},
    "sinusoidal": {"absolute_position": "sinusoidal", "max_relative_position": None},
}


def build(name="shared", **fields):
    return RelPosForConditionalGeneration(preset("tiny", **{**VARIANTS[name], **fields})).train()


def batch(size=4, sources=9, targets=7):
    labels = torch.randint(2, 200, (size, targets))
    labels[0, targets // 2 :] = -100
    input_ids = torch.randint(2, 200, (size, sources))
    mask = torch.ones_like(input_ids)
    mask[1, sources // 2 :] = 0
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def gradients(model, forward=None, **inputs):
    model.zero_grad()
    torch.manual_seed(3)  # dropout
    loss = (model if forward is None else forward)(**inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_compiled_training_step_has_the_same_gradients(name):
    model = build(name, encoder_layers=1, decoder_layers=1)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(model, fullgraph=True, dynamic=True)
    for inputs in (batch(), batch(5, 12, 10), batch(3, 17, 4)):
        expected = gradients(model, **inputs)
        found = gradients(model, step, **inputs)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2, "every shape was compiled anew"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_gradient_checkpointing_has_the_same_gradients(name, reentrant):
    model, inputs = build(name, dropout=0.3), batch()
    expected = gradients(model, **inputs)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(gradients(model, **inputs), expected)


TWO_PROCESSES = Path(__file__).with_name("two_processes.py")


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path):
    """By DDP and by FSDP."""
    model, inputs = build(), batch(size=6)
    items = inputs["labels"].ne(-100).sum()
    expected = gradients(model, num_items_in_batch=items, **inputs)
    del expected["loss"]
    model.save_pretrained(tmp_path / "model")
    torch.save(inputs, tmp_path / "inputs.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*command, str(TWO_PROCESSES), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    for how in ("ddp", "fsdp"):
        found = torch.load(tmp_path / f"{how}.pt", weights_only=True)
        assert found.keys() == expected.keys(), how
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4, msg=lambda shown, how=how: f"{how}: {shown}")
