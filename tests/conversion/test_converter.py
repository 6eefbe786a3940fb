from pathlib import Path

import pytest
import torch

from relpos import RelPosConfig, RelPosForConditionalGeneration
from relpos.conversion import convert, export, load_engine, open_source, sources, targets
from relpos.conversion.converter import both_sides, build_model, count_layers, own_names, refuse, rename
from relpos.conversion.files import ConversionError

SMALL = {
    "vocab_size": 11,
    "d_model": 8,
    "max_relative_position": 2,
    **{f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")},
}


class TestNames:
    table = {  # noqa: RUF012
        "enc.layer_*.attn.qkv": ("encoder.*.q", "encoder.*.k", "encoder.*.v"),
        "enc.layer_*.attn": "encoder.*.attention",
        "enc.layer_*.attn.table": "encoder.*.relative",
        "enc.steps": None,
    }

    def test_a_module_keeps_the_last_part_of_its_weights_names(self):
        assert own_names("enc.layer_13.attn.bias", self.table) == ["encoder.13.attention.bias"]

    def test_a_fused_weight_has_several_names(self):
        assert own_names("enc.layer_2.attn.qkv.weight", self.table) == [f"encoder.2.{x}.weight" for x in "qkv"]

    def test_a_weight_of_its_own_goes_before_its_module(self):
        assert own_names("enc.layer_0.attn.table", self.table) == ["encoder.0.relative"]

    def test_what_is_not_needed_and_what_is_unknown_differ(self):
        assert own_names("enc.steps", self.table) == []
        assert own_names("enc.step", self.table) is None
        assert own_names("enc.layer_x.attn.bias", self.table) is None

    def test_renaming_splits_in_order(self):
        fused = torch.arange(12.0).reshape(6, 2)
        renamed = rename({"enc.layer_1.attn.qkv.weight": fused, "enc.steps": torch.ones(1)}, self.table)
        assert list(renamed) == ["encoder.1.q.weight", "encoder.1.k.weight", "encoder.1.v.weight"]
        assert torch.equal(renamed["encoder.1.k.weight"], fused[2:4])

    def test_every_unknown_weight_is_named(self):
        with pytest.raises(ConversionError, match=r"the weight a; .* the weight b"):
            rename({"a": torch.ones(1), "b": torch.ones(1)}, self.table)

    def test_a_fused_weight_that_does_not_divide_is_refused(self):
        with pytest.raises(ConversionError, match=r"\[7, 2\] does not divide into 3"):
            rename({"enc.layer_1.attn.qkv.weight": torch.ones(7, 2)}, self.table)

    def test_layers_are_counted_by_their_numbers(self):
        names = [*(f"enc.layer_{number}.a" for number in range(12)), "enc.layer_norm.a", "dec.layer_20.a"]
        assert count_layers(names, "enc.layer_") == 12
        assert count_layers(names, "other.layer_") == 0

    @pytest.mark.parametrize("numbers", [["0", "999999999"], ["1", "2"], ["0", "01"], ["0", "\u0661"], ["9" * 5000]])
    def test_numbers_of_layers_without_gaps(self, numbers):
        with pytest.raises(ConversionError, match=r"enc\.layer_\* must be numbered from 0 to \d, and \d is missing"):
            count_layers([f"enc.layer_{number}.a" for number in numbers], "enc.layer_")

    def test_one_file_serves_both_sides(self):
        assert both_sides("subwords", []) is None
        assert both_sides("subwords", ["a"]) == (Path("a"), Path("a"))
        assert both_sides("subwords", ["a", "b"]) == (Path("a"), Path("b"))
        with pytest.raises(ConversionError, match=r"--subwords takes one file, or one of .* not 3"):
            both_sides("subwords", ["a", "b", "c"])


class TestBuilding:
    def weights(self, **fields):
        return RelPosForConditionalGeneration(RelPosConfig(**SMALL, **fields)).state_dict()

    def test_the_model_has_exactly_the_weights(self):
        weights = self.weights()
        model = build_model(RelPosConfig(**SMALL), weights)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
        assert model.lm_head.weight is model.model.shared.weight
        assert not model.training

    def test_half_precision_becomes_single(self):
        model = build_model(RelPosConfig(**SMALL), {name: w.half() for name, w in self.weights().items()})
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def test_a_shared_table_may_come_under_either_name(self):
        weights = self.weights()
        shared = weights.pop("model.shared.weight")
        model = build_model(RelPosConfig(**SMALL), weights)
        assert torch.equal(model.model.shared.weight, shared)

    def test_weights_that_should_be_tied_and_are_not_are_refused(self):
        weights = self.weights(tie_word_embeddings=False)
        with pytest.raises(ConversionError, match=r"lm_head\.weight should be the same as"):
            build_model(RelPosConfig(**SMALL), weights)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda weights: weights.pop("model.encoder.layers.1.fc1.bias"), r"layers\.1\.fc1\.bias is missing"),
            (lambda weights: weights.update(extra=torch.ones(1)), "extra is not part of the model"),
            (
                lambda weights: weights.update({"model.decoder.layer_norm.bias": torch.ones(9)}),
                r"layer_norm\.bias has the shape \[9\] instead of \[8\]",
            ),
        ],
    )
    def test_weights_that_do_not_fit_are_named(self, change, message):
        weights = dict(self.weights())
        change(weights)
        with pytest.raises(ConversionError, match=message):
            build_model(RelPosConfig(**SMALL), weights)


class TestRegistry:
    def test_the_toolkits(self):
        assert sources() == ["argos", "ctranslate2", "opennmt-py", "opennmt-tf", "tensor2tensor"]
        assert targets() == ["argos", "ctranslate2"]

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (
                lambda tmp: convert(tmp, tmp / "out", toolkit="marian"),
                "no toolkit 'marian' to convert from; there are argos,",
            ),
            (
                lambda tmp: export(tmp, tmp / "out", toolkit="marian"),
                "no toolkit 'marian' to export to; there are argos,",
            ),
            (
                lambda tmp: load_engine(tmp, engine="marian"),
                "no toolkit 'marian' to translate with; there are ctranslate2",
            ),
            (lambda tmp: convert(tmp / "no", tmp / "out", toolkit="opennmt-py"), "no OpenNMT-py model .*no"),
            (
                lambda tmp: open_source(tmp, toolkit="argos", allow_pickle=True),
                "--allow-pickle has no meaning for argos",
            ),
            (lambda tmp: convert(tmp, tmp / "out", toolkit="argos", languages=("en",)), "takes two codes"),
        ],
    )
    def test_what_cannot_be_is_one_sentence(self, tmp_path, call, message):
        with pytest.raises(ConversionError, match=message):
            call(tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("write", [convert, export])
    def test_force_does_not_replace_the_source(self, tmp_path, write):
        (tmp_path / "config.json").touch()
        for source in (tmp_path, tmp_path / "model"):
            with pytest.raises(ConversionError, match="or a part of it; name another output"):
                write(source, tmp_path, toolkit="ctranslate2", force=True)
        assert (tmp_path / "config.json").exists()

    def test_options_that_were_not_given_do_not_count(self, tmp_path):
        with pytest.raises(ConversionError, match="no Argos package"):
            open_source(tmp_path / "no", toolkit="argos", allow_pickle=False, subwords=())

    def test_all_obstacles_are_named(self):
        with pytest.raises(ConversionError, match=r"The model m cannot be expressed: a=1; b=2\."):
            refuse(["a=1", "b=2"], "The model m")
        refuse([], "The model m")
