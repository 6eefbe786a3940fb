"""PEFT: LoRA on the projections and on the tables of relative positions, saved, merged, reloaded."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSeq2SeqLM

from relpos import RelPosForConditionalGeneration
from relpos.configuration import preset

# One after the other, not together: PEFT 0.21 does not unload a layer inside another that it wraps.
TARGETS = {
    "projections": ({"target_modules": ["q_proj", "v_proj"]}, {"q_proj.weight", "v_proj.weight"}),
    "tables": (
        {"target_modules": [], "target_parameters": ["self_attn.relative_keys", "self_attn.relative_values"]},
        {"relative_keys", "relative_values"},
    ),
}


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("what", TARGETS)
def test_lora(what, per_head, tmp_path):
    targets, expected_changes = TARGETS[what]
    base = RelPosForConditionalGeneration(preset("tiny", relative_position_per_head=per_head))
    base.save_pretrained(tmp_path / "base")
    frozen = {name: value.clone() for name, value in base.state_dict().items()}
    batch = {"input_ids": torch.randint(2, 200, (4, 7)), "labels": torch.randint(2, 200, (4, 6))}
    before = base.eval()(**batch).loss.item()

    adapted = get_peft_model(base, LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, **targets))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    for _ in range(20):
        adapted(**batch).loss.backward()
        assert all(parameter.grad is not None for parameter in trained)
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval()
    expected = adapted(**batch)
    assert expected.loss.item() < 0.9 * before
    adapted.save_pretrained(tmp_path / "adapter")

    reloaded = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(reloaded.eval()(**batch).logits, expected.logits, atol=1e-5, rtol=1e-5)
    tokens = adapted.generate(input_ids=batch["input_ids"], max_new_tokens=8)

    merged = adapted.merge_and_unload()
    assert type(merged) is RelPosForConditionalGeneration
    assert merged.state_dict().keys() == frozen.keys()
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, frozen[name])}
    assert {name.partition("_attn.")[2] for name in changed} == expected_changes
    merged.save_pretrained(tmp_path / "merged")
    alone = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(alone(**batch).logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(alone.generate(batch["input_ids"], max_new_tokens=8), tokens)
