"""Saving and loading: every way of tying, bitwise, with the package and without it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from relpos import RelPosConfig, RelPosForConditionalGeneration, RelPosModel
from relpos.configuration import preset

TYING = {
    "all": {},
    "embeddings": {"tie_word_embeddings": False},
    "output": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 200},
    "nothing": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    "tables": {"relative_position_tied": True, "relative_position_per_head": True, "lm_head_bias": True},
}


def tables(model):
    return [
        model.model.encoder.embed_tokens.weight,
        model.model.decoder.embed_tokens.weight,
        model.lm_head.weight,
    ]


@pytest.mark.parametrize("tying", TYING)
def test_reload_is_bitwise_and_tied_alike(tying, tmp_path):
    model = RelPosForConditionalGeneration(preset("tiny", **TYING[tying])).eval()
    model.save_pretrained(tmp_path)
    again, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is RelPosForConditionalGeneration
    assert not any(report.values()), report
    assert dict(again.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for (name, ours), (_, theirs) in zip(model.state_dict().items(), again.state_dict().items()):
        assert torch.equal(ours, theirs), name
    same = lambda m: [a is b for a in tables(m) for b in tables(m)]
    assert same(model) == same(again)
    source, labels = torch.randint(2, 200, (2, 5)), torch.randint(2, 200, (2, 5))
    assert torch.equal(
        model(input_ids=source, labels=labels).logits, again.eval()(input_ids=source, labels=labels).logits
    )


@pytest.mark.parametrize("tying", TYING)
def test_a_tied_table_is_written_once(tying, tmp_path):
    model = RelPosForConditionalGeneration(preset("tiny", **TYING[tying]))
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert sum(t.numel() for t in written.values()) == sum(p.numel() for p in model.parameters())


def test_a_shared_table_stays_one_when_it_is_trained_after_a_reload(tmp_path):
    RelPosForConditionalGeneration(preset("tiny", tie_word_embeddings=False)).save_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    source = torch.randint(2, 200, (2, 5))
    model(input_ids=source, labels=source).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.equal(model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight)
    assert not torch.equal(model.lm_head.weight, model.model.shared.weight)


@pytest.mark.parametrize("name", ["base", "minimal", "big-sinusoidal"])
def test_base_model_and_full_model_load_each_others_folders(name, tmp_path):
    small = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 100}
    model = RelPosForConditionalGeneration(preset(name, **small))
    model.save_pretrained(tmp_path / "full")
    base = AutoModel.from_pretrained(tmp_path / "full")
    assert type(base) is RelPosModel
    assert torch.equal(base.shared.weight, model.model.shared.weight)
    base.save_pretrained(tmp_path / "base")
    full = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    for (parameter, ours), (_, theirs) in zip(model.named_parameters(), full.named_parameters()):
        assert torch.equal(ours, theirs), parameter


def test_dtypes(tmp_path):
    RelPosForConditionalGeneration(preset("tiny")).to(torch.bfloat16).save_pretrained(tmp_path)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_a_folder_explains_itself(tmp_path):
    RelPosModel(preset("tiny")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_relpos.RelPosConfig",
        "AutoModel": "modeling_relpos.RelPosModel",
        "AutoModelForSeq2SeqLM": "modeling_relpos.RelPosForConditionalGeneration",
    }
    code = {p.name for p in tmp_path.glob("*.py")}
    attention = {"attention_relpos.py", "near_far_relpos.py", "skewed_relpos.py"}
    assert code == {*attention, "configuration_relpos.py", "modeling_relpos.py", "pipeline_relpos.py"}
    assert type(AutoConfig.from_pretrained(tmp_path)) is RelPosConfig


def test_the_hubs_files_import_only_torch_and_transformers():
    import ast
    from pathlib import Path

    import relpos

    allowed = {"torch", "transformers", "huggingface_hub", "tokenizers", *sys.stdlib_module_names}
    for path in Path(relpos.__file__).parent.glob("*_relpos.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] in allowed, path
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1, path
                assert "." not in node.module, path


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["relpos"] = None  # as if it had never been installed
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
folder, again = sys.argv[1:]
try:
    AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("code was run without trust")
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
assert config.custom_pipelines, "the folder's pipeline is all there is"
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
saved = torch.load(folder + "/expected.pt", weights_only=True)
assert torch.equal(model(input_ids=saved["source"], decoder_input_ids=saved["target"]).logits, saved["logits"])
assert torch.equal(model.generate(saved["source"], max_new_tokens=12), saved["generated"])
model.save_pretrained(again)  # and what is saved there works again
model = AutoModelForSeq2SeqLM.from_pretrained(again, trust_remote_code=True).eval()
assert torch.equal(model(input_ids=saved["source"], decoder_input_ids=saved["target"]).logits, saved["logits"])
print(sorted(m for m in sys.modules if m.startswith("relpos")))
"""


def test_a_folder_works_without_the_package(tmp_path):
    model = RelPosForConditionalGeneration(preset("tiny")).eval()
    folder, again = tmp_path / "model", tmp_path / "again"
    model.save_pretrained(folder)
    source, target = torch.randint(2, 250, (2, 7)), torch.randint(2, 250, (2, 5))
    torch.save(
        {
            "source": source,
            "target": target,
            "logits": model(input_ids=source, decoder_input_ids=target).logits.detach(),
            "generated": model.generate(source, max_new_tokens=12),
        },
        folder / "expected.pt",
    )
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(folder), str(again)],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "['relpos']"
    assert (again / "attention_relpos.py").is_file()


def test_the_folders_own_code_can_be_used_beside_the_package(tmp_path):
    """Two copies of the code in one process: the remote configuration's class is not the remote model's, nor ours."""
    model = RelPosForConditionalGeneration(preset("tiny")).eval()
    model.save_pretrained(tmp_path)
    # in a process of its own, since transformers keeps remote classes
    code = """
import sys, relpos
from transformers import AutoModelForSeq2SeqLM
remote = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
local = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])
print(type(local).__module__, type(remote).__module__.split(".")[0])
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[0] == "relpos.modeling_relpos"
