"""The model on a GPU, where attention runs by rows: the same numbers as on CPU."""

import pytest
import torch

from relpos import RelPosForConditionalGeneration
from relpos.configuration import preset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def run(model, device, dtype):
    torch.manual_seed(0)
    source, target = torch.randint(2, 200, (3, 300)), torch.randint(2, 200, (3, 40))
    mask = torch.ones_like(source)
    mask[1, :100], mask[2, 200:] = 0, 0
    model = model.to(device, dtype)
    model.zero_grad()
    loss = model(source.to(device), mask.to(device), labels=target.to(device)).loss
    loss.backward()
    return loss.detach().cpu(), {name: p.grad.cpu().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("per_head", [False, True])
def test_equals_the_cpu(per_head):
    model = RelPosForConditionalGeneration(preset("tiny", dropout=0.0, relative_position_per_head=per_head)).train()
    expected, gradients = run(model, "cpu", torch.float64)
    loss, found = run(model, "cuda", torch.float64)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_precisions(dtype):
    model = RelPosForConditionalGeneration(preset("tiny", dropout=0.0)).train()
    expected, _ = run(model, "cpu", torch.float64)
    loss, gradients = run(model, "cuda", dtype)
    assert abs(loss.double() - expected) < 8 * torch.finfo(dtype).eps * expected
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_generation_equals_the_cpu():
    torch.manual_seed(0)
    model = RelPosForConditionalGeneration(preset("tiny", dropout=0.0)).double().eval()
    source = torch.randint(2, 200, (2, 12))
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 4}
    expected = model.generate(source, **options)
    assert torch.equal(model.cuda().generate(source.cuda(), **options).cpu(), expected)
