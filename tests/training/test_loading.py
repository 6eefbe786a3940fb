"""loading.py: a saved folder is complete, or refused with the name of what is missing or does not fit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from relpos.training.loading import ModelError, find_config, load_config, load_model


@pytest.fixture
def folder(learned_model, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(learned_model, tmp_path / "model")


def _change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_whole_folder(folder):
    loaded = load_model(str(folder))
    assert not loaded.model.training
    assert loaded.model.config.model_type == "relpos"
    assert loaded.tokenizer("Yes")["input_ids"][-1] == loaded.model.config.eos_token_id


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_missing_file(folder, file):
    (folder / file).unlink()
    with pytest.raises(ModelError, match=file):
        load_model(str(folder))


def test_missing_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_model(str(folder))
    assert find_config(str(folder))[1] == folder  # its architecture can be looked at all the same


@pytest.mark.parametrize("kept", [0, 7, 1000, 0.99])
def test_truncated_weights(folder, kept):
    weights = (folder / "model.safetensors").read_bytes()
    length = kept if isinstance(kept, int) else int(kept * len(weights))
    (folder / "model.safetensors").write_bytes(weights[:length])
    for open_model in (load_model, find_config):
        with pytest.raises(ModelError, match=r"model\.safetensors is cut off or damaged"):
            open_model(str(folder))


def test_truncated_config(folder):
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config[:50])
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(str(folder))


def test_impossible_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_relative_position": -1}))
    with pytest.raises(ModelError, match="max_relative_position"):
        load_config(str(folder))


def test_weights_without_a_parameter(folder, capfd):
    name = "model.decoder.layers.0.self_attn.relative_keys"
    _change_weights(folder, lambda weights: weights.pop(name))
    with pytest.raises(ModelError, match=f"incomplete: {name} is missing"):
        load_model(str(folder))
    assert capfd.readouterr().err == ""  # the sentence is not buried in the library's own report


def test_weights_of_another_clipping_distance(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_relative_position": 8}))
    with pytest.raises(ModelError, match=r"`max_relative_position` of 4, and the model has 8"):
        load_model(str(folder))


def test_shards(folder):
    loaded = load_model(str(folder))
    (folder / "model.safetensors").unlink()
    loaded.model.save_pretrained(folder, max_shard_size="200KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    for name, value in load_model(str(folder)).model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name])
    shards[-1].unlink()
    with pytest.raises(ModelError, match=f"{shards[-1].name} is missing"):
        load_model(str(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json is not an index of weight files"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["./none", "/none", "a/b/c", "~/none"])
def test_folder_that_is_not_there(name):
    with pytest.raises(ModelError, match=f"The model folder {name} does not exist"):
        load_model(name)


def test_name_that_is_neither_a_folder_nor_on_the_hub():
    with pytest.raises(ModelError, match="nothing is neither a folder nor the name of a model on the Hub"):
        find_config("nothing")


def test_file_in_place_of_a_folder(folder):
    with pytest.raises(ModelError, match="is a file; a saved model is a folder"):
        load_model(str(folder / "config.json"))


def test_name_that_the_hub_does_not_give():
    with pytest.raises(ModelError, match="nobody/nothing cannot be opened and is no folder here either") as caught:
        load_model("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_preset_has_a_configuration_and_no_weights():
    config, folder = find_config("tiny")
    assert config.model_type == "relpos"
    assert folder is None
