"""RelPosConfig: what it refuses, what it writes, and the presets."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from relpos import RelPosConfig, RelPosForConditionalGeneration
from relpos.configuration import preset, presets, recipe, recipes

REFUSED = [
    ({"max_relative_position": -1}, "`max_relative_position` is -1"),
    ({"relative_position_keys": False, "relative_position_values": False}, "`max_relative_position` is 16"),
    ({"d_model": 30, "encoder_attention_heads": 4}, "`encoder_attention_heads` is 4"),
    ({"decoder_attention_heads": 0}, "`decoder_attention_heads` is 0"),
    ({"max_relative_position": None, "relative_position_per_head": True}, "`relative_position_per_head` is True"),
    ({"max_relative_position": None, "relative_position_tied": True}, "`relative_position_tied` is True"),
    ({"relative_position_tied": True, "relative_position_values": False}, "`relative_position_tied` is True"),
    ({"absolute_position": "rotary"}, "`absolute_position` is 'rotary'"),
    ({"absolute_position": "learned"}, "`max_position_embeddings` is None"),
    (
        {"absolute_position": "sinusoidal", "d_model": 15, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
        "15",
    ),
    ({"dropout": 1.0}, "`dropout` is 1.0"),
    ({"attention_dropout": -0.1}, "`attention_dropout` is -0.1"),
    ({"layer_norm_eps": 0.0}, "`layer_norm_eps` is 0.0"),
    ({"activation_function": "relo"}, "`activation_function` is 'relo'"),
    ({"encoder_layers": 0}, "`encoder_layers` is 0"),
    ({"decoder_ffn_dim": -3}, "`decoder_ffn_dim` is -3"),
    ({"vocab_size": 0}, "`vocab_size` is 0"),
    ({"decoder_vocab_size": 99}, "`decoder_vocab_size` is 99"),
    ({"pad_token_id": 32768}, "`pad_token_id` is 32768"),
    ({"pad_token_id": None}, "`pad_token_id` is None"),
    ({"eos_token_id": [1, -2]}, "`eos_token_id` is"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refuses_what_no_model_can_have(fields, message):
    with pytest.raises(ValueError, match=r"must be|set one") as error:
        RelPosConfig(**fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_changed_configuration_is_checked_again_when_a_model_is_built(fields, message):
    config = preset("tiny", max_relative_position=16)
    for field, value in fields.items():
        setattr(config, field, value)
    # fields of the preset may differ from the defaults, so only the field that is wrong is looked for
    with pytest.raises(ValueError, match=r"must be|set one"):
        RelPosForConditionalGeneration(config)


@pytest.mark.parametrize(
    "fields", [{"encoder_layers": "6"}, {"max_relative_position": 1.5}, {"relative_position_keys": "yes"}]
)
def test_refuses_wrong_types(fields):
    with pytest.raises(StrictDataclassError, match=next(iter(fields))):
        RelPosConfig(**fields)


def test_a_changed_configuration_is_not_saved(tmp_path):
    config = RelPosConfig()
    config.max_relative_position = -3
    with pytest.raises(StrictDataclassError, match="max_relative_position"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_the_smallest_models_are_allowed():
    RelPosConfig(max_relative_position=0)
    RelPosConfig(max_relative_position=None)
    RelPosConfig(max_relative_position=None, relative_position_keys=False, relative_position_values=False)
    RelPosConfig(share_encoder_decoder_embeddings=False, decoder_vocab_size=7, vocab_size=5)


def test_defaults_follow_from_other_fields():
    config = RelPosConfig(vocab_size=100, pad_token_id=7)
    assert config.decoder_vocab_size == 100
    assert config.decoder_start_token_id == 7
    assert config.hidden_size == config.d_model
    assert config.relative_attention_max_distance == config.max_relative_position
    assert RelPosConfig(pad_token_id=7, decoder_start_token_id=0).decoder_start_token_id == 0


@pytest.mark.parametrize("load", [RelPosConfig, AutoConfig])
@pytest.mark.parametrize("name", presets())
def test_presets_round_trip(name, load, tmp_path):
    config = preset(name)
    config.save_pretrained(tmp_path)
    again = load.from_pretrained(tmp_path)
    assert type(again) is RelPosConfig
    ours, theirs = config.to_dict(), again.to_dict()
    for fields in (ours, theirs):
        fields.pop("_name_or_path", None)
    assert ours == theirs


@pytest.mark.parametrize("name", presets())
def test_presets_state_everything(name):
    from relpos import configuration

    fields = json.loads((configuration._FOLDER / f"{name}.json").read_text())
    default = RelPosConfig()
    stated_by_type = {"decoder_vocab_size", "is_encoder_decoder", "use_cache", "transformers_version"}
    own = set(RelPosConfig.__annotations__) - stated_by_type
    assert own <= set(fields), f"{name} leaves {own - set(fields)} to the defaults"
    assert all(hasattr(default, field) for field in fields), "an unknown field"
    assert RelPosConfig.from_pretrained(configuration._FOLDER / f"{name}.json").d_model == fields["d_model"]


def test_presets_are_the_papers_models():
    base, big, minimal = preset("base"), preset("big"), preset("minimal")
    assert (base.d_model, base.encoder_layers, base.encoder_attention_heads, base.encoder_ffn_dim) == (512, 6, 8, 1024)
    assert (base.max_relative_position, base.relative_position_per_head, base.dropout) == (16, True, 0.1)
    assert (big.d_model, big.encoder_layers, big.encoder_attention_heads, big.encoder_ffn_dim) == (1024, 6, 16, 4096)
    assert (big.max_relative_position, big.relative_position_per_head, big.dropout) == (8, False, 0.3)
    assert (minimal.max_relative_position, minimal.relative_position_values) == (2, False)
    for name in ("base-sinusoidal", "big-sinusoidal"):
        assert (preset(name).max_relative_position, preset(name).absolute_position) == (None, "sinusoidal")


def test_preset_takes_overrides_and_names_what_there_is():
    assert preset("tiny", vocab_size=99).vocab_size == 99
    with pytest.raises(ValueError, match=r"no preset 'bse'.*base"):
        preset("bse")
    with pytest.raises(ValueError, match=r"no preset '../base'"):
        preset("../base")
    with pytest.raises(ValueError, match="no recipe 'x'"):
        recipe("x")
    assert all(recipe(name).is_file() for name in recipes())


def test_files_name_the_code_and_loaded_configurations_ask_for_no_trust(tmp_path):
    config = RelPosConfig()
    config.auto_map = {"AutoModel": "someone/else--modeling_relpos.RelPosModel", "AutoTokenizer": ["a.B", None]}
    config.custom_pipelines = {"translation": {"impl": RelPosConfig, "pt": (RelPosConfig,)}}  # as pipeline() leaves it
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"} <= set(written["auto_map"])
    assert "--" not in json.dumps(written["auto_map"])
    assert written["auto_map"]["AutoTokenizer"] == ["a.B", None]
    assert written["custom_pipelines"]["translation"]["impl"] == "pipeline_relpos.TranslationPipeline"
    assert RelPosConfig.from_pretrained(tmp_path).custom_pipelines == {}
