"""Exports scored and translated by CTranslate2's own engine, and models of CTranslate2 read back."""

import argparse
import json
import shutil
import struct
from pathlib import Path

import ctranslate2
import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from relpos import RelPosConfig, RelPosForConditionalGeneration
from relpos.conversion import convert, export, load_engine
from relpos.conversion.ctranslate2_files import read_binary
from relpos.conversion.files import ConversionError

SOURCES = ["Save the file.", "Delete the selected row and the column beside it.", "Yes", "Ωmega ☃"]
TARGETS = ["Speichern Sie die Datei.", "Löschen Sie die gewählte Zeile und die Spalte daneben.", "Ja", "☃"]
SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
    "max_relative_position": 3,
}
VARIANTS = {
    "both tables": {},
    "keys alone": {"relative_position_values": False},
    "values alone": {"relative_position_keys": False},
    "tied, post-norm, large epsilon": {
        "relative_position_tied": True,
        "normalize_before": False,
        "layer_norm_eps": 1e-3,
        "scale_embedding": False,
    },
    "no biases, gelu": {
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": True,
        "activation_function": "gelu",
    },
    "three tables of embeddings": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    "one row": {"max_relative_position": 0},
    "more embeddings than tokens": {"vocab_size": 450},
}


@pytest.fixture
def save_model(learned_model, tmp_path):
    """A function: a saved folder of a random model whose every parameter matters."""

    def save(**fields):
        tokenizer = AutoTokenizer.from_pretrained(learned_model)
        model = RelPosForConditionalGeneration(RelPosConfig(**{**SIZES, "vocab_size": len(tokenizer), **fields}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 or "relative" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


def load(folder):
    return RelPosForConditionalGeneration.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def largest_difference(folder, exported):
    """Between the log-probabilities of the targets' tokens here and in CTranslate2."""
    model, tokenizer = load(folder)
    translator = ctranslate2.Translator(str(exported), compute_type="float32", intra_threads=1)
    tokens = [[tokenizer.tokenize(text) for text in texts] for texts in (SOURCES, TARGETS)]
    scores = translator.score_batch(*tokens, max_input_length=0)
    differences = []
    for source, target, score in zip(SOURCES, TARGETS, scores, strict=True):
        batch = tokenizer(source, text_target=target, return_tensors="pt")
        log_probs = model(**batch).logits.log_softmax(-1).gather(2, batch["labels"][..., None])[0, :, 0]
        differences.append((log_probs - torch.tensor(score.log_probs)).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_are_the_same_and_back_again_it_is_bitwise_the_same(save_model, tmp_path, name):
    folder = save_model(**VARIANTS[name])
    export(folder, tmp_path / "exported", toolkit="ctranslate2")
    assert largest_difference(folder, tmp_path / "exported") < 1e-4
    convert(tmp_path / "exported", tmp_path / "back", toolkit="ctranslate2")
    (model, tokenizer), (again, tokenizer_again) = load(folder), load(tmp_path / "back")
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in model.state_dict().items())
    changed = {key for key, value in model.config.to_dict().items() if again.config.to_dict().get(key) != value}
    assert changed <= {"_name_or_path"}
    assert tokenizer_again(SOURCES)["input_ids"] == tokenizer(SOURCES)["input_ids"]


@pytest.mark.parametrize("beams", [1, 4])
def test_its_engine_translates_the_same(learned_model, learned_pairs, tmp_path, beams):
    from relpos.training.loading import load_model
    from relpos.training.translation import translate_sentences

    export(learned_model, tmp_path / "exported", toolkit="ctranslate2")
    sources = [source for source, _ in learned_pairs]
    engine = load_engine(tmp_path / "exported", engine="ctranslate2")
    ours, theirs = (
        translate_sentences(loaded, sources, beams=beams) for loaded in (load_model(str(learned_model)), engine)
    )
    assert theirs == ours
    assert [translation.text for translation in theirs] == [target for _, target in learned_pairs]


@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [("float16", 2e-3), ("bfloat16", 2e-2), ("int16", 5e-3), ("int8", 3e-2), ("int8_float32", 3e-2)],
)
def test_other_weight_types_go_out_and_come_back(save_model, tmp_path, quantization, tolerance):
    folder = save_model()
    export(folder, tmp_path / "exported", toolkit="ctranslate2", quantization=quantization)
    binary = read_binary(tmp_path / "exported" / "model.bin")
    assert {tensor.dtype for name, tensor in binary.variables.items() if name.endswith("linear_0.weight")} <= {
        torch.float32,
        torch.float16,
        torch.bfloat16,
    }
    convert(tmp_path / "exported", tmp_path / "back", toolkit="ctranslate2")
    model, again = load(folder)[0].state_dict(), load(tmp_path / "back")[0].state_dict()
    for name, tensor in model.items():
        largest = tensor.abs().max()
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=float(tolerance * largest))
    small, whole = ((tmp_path / place / "model.bin") for place in ("exported", "whole"))
    export(folder, tmp_path / "whole", toolkit="ctranslate2")
    assert small.stat().st_size < whole.stat().st_size


def test_the_engine_limits_the_length_and_cuts_no_source(save_model, tmp_path):
    from relpos.training.translation import translate_sentences

    export(save_model(), tmp_path / "exported", toolkit="ctranslate2")
    engine = load_engine(tmp_path / "exported", engine="ctranslate2")
    [short] = translate_sentences(engine, ["word " * 400], max_new_tokens=3)
    assert short.source_tokens > 1024
    assert not short.complete


class TestEngineSettings:
    """What a generation config says, in CTranslate2 and in `generate`."""

    TEXTS = ("Save the file.", "Yes", "Delete the row")

    @pytest.fixture
    def translate_both(self, save_model, tmp_path):
        """A function: the ids that `generate` and the engine give for a generation config."""
        folder = save_model()
        model, tokenizer = load(folder)
        inputs = tokenizer(list(self.TEXTS), padding=True, return_tensors="pt")
        start = {"pad_token_id": model.config.pad_token_id, "eos_token_id": model.config.eos_token_id}
        start |= {"decoder_start_token_id": model.config.decoder_start_token_id, "renormalize_logits": True}

        def translate(**settings):
            config = GenerationConfig(**{"max_new_tokens": 6, **start, **settings})
            config.save_pretrained(folder)
            export(folder, tmp_path / "exported", toolkit="ctranslate2", force=True)
            engine = load_engine(tmp_path / "exported", engine="ctranslate2")
            expected = model.generate(**inputs, generation_config=config)
            return expected.tolist(), engine.model.generate(**inputs, generation_config=config).tolist()

        return translate

    @pytest.mark.parametrize("beams", [1, 4])
    def test_tokens_that_are_suppressed(self, translate_both, beams):
        plain, _ = translate_both(num_beams=beams)
        tokens = plain[0][1:3]
        for settings in ({"bad_words_ids": [tokens, [1]]}, {"suppress_tokens": tokens}, {"no_repeat_ngram_size": 1}):
            expected, found = translate_both(num_beams=beams, **settings)
            assert found == expected != plain

    @pytest.mark.parametrize("beams", [1, 4])
    @pytest.mark.parametrize("shortest", [{}, {"min_new_tokens": 1}, {"min_new_tokens": 3}, {"min_length": 3}])
    def test_lengths(self, translate_both, beams, shortest):
        with_end = {
            "max_new_tokens": None,
            "max_length": 5,
            "suppress_tokens": [0, *range(2, 390)],
        }  # the end is likely
        expected, found = translate_both(num_beams=beams, **with_end, **shortest)
        assert found == expected

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"forced_bos_token_id": 5, "max_time": 1.0}, r"forced_bos_token_id=5 .*; max_time=1\.0 "),
            ({"do_sample": True}, "do_sample=True .CTranslate2 has nothing like it"),
            ({"begin_suppress_tokens": [3]}, r"begin_suppress_tokens=\[3\]"),
            ({"eos_token_id": [1, 2]}, r"eos_token_id=\[1, 2\]"),
            ({"num_beams": 2, "repetition_penalty": 1.5}, r"repetition_penalty=1\.5 with num_beams=2"),
        ],
    )
    def test_what_it_cannot_do_is_refused(self, translate_both, settings, named):
        with pytest.raises(ConversionError, match=f"generation config of .*exported cannot be expressed: {named}"):
            translate_both(**settings)

    def test_a_repetition_penalty_of_the_best_token(self, translate_both):
        expected, found = translate_both(repetition_penalty=1.7)
        assert found == expected


def test_the_longest_training_source_goes_with_it(learned_model, tmp_path):
    longest = RelPosForConditionalGeneration.from_pretrained(learned_model).config.longest_training_source
    export(learned_model, tmp_path / "exported", toolkit="ctranslate2")
    assert load_engine(tmp_path / "exported", engine="ctranslate2").model.config.longest_training_source == longest


@pytest.fixture
def convert_directly(opennmt_py_fixtures, tmp_path):
    """A function: an OpenNMT-py model converted by CTranslate2's own converter."""

    def run(name, **options):
        with torch.serialization.safe_globals([argparse.Namespace]):
            checkpoint = torch.load(opennmt_py_fixtures / name / "model.pt", weights_only=True)
        # its converter knows "scaled-dot" alone; "scaled-dot-flash" is the same attention by another kernel
        checkpoint["opt"].self_attn_type = "scaled-dot"
        torch.save(checkpoint, tmp_path / "scaled-dot.pt")
        converter = ctranslate2.converters.OpenNMTPyConverter(
            str(tmp_path / "scaled-dot.pt"), unsafe_deserialization=True
        )
        return Path(converter.convert(str(tmp_path / "direct"), **options))

    return run


@pytest.mark.parametrize("name", ["shared_sentencepiece", "separate_bpe"])
def test_from_opennmt_py_it_equals_the_direct_way_with_the_epsilon_mended(
    converted, convert_directly, opennmt_py_fixtures, tmp_path, name
):
    exported = export(converted(name), tmp_path / "exported", toolkit="ctranslate2")
    direct = convert_directly(name)
    config = json.loads((direct / "config.json").read_text())
    assert config["layer_norm_epsilon"] is None  # the engine would take 1e-5
    mended = json.loads((exported / "config.json").read_text())["layer_norm_epsilon"]
    (direct / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": mended}))
    sentences = json.loads((opennmt_py_fixtures / name / "answers.json").read_text(encoding="utf-8"))["sentences"][:20]
    _, tokenizer = load(converted(name))
    outputs = []
    for folder, notation in ((exported, tokenizer), (direct, None)):
        translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
        sources = [notation.tokenize(s["source"]) if notation else s["source_tokens"] for s in sentences]
        results = translator.translate_batch(sources, beam_size=4, return_scores=True, max_decoding_length=60)
        vocabulary = vocabulary_of(folder)
        outputs.append(
            [
                ([vocabulary.index(token) for token in r.hypotheses[0]], pytest.approx(r.scores[0], abs=1e-5))
                for r in results
            ]
        )
    assert outputs[0] == outputs[1]


def vocabulary_of(folder):
    path = folder / "target_vocabulary.json"
    return json.loads((path if path.is_file() else folder / "shared_vocabulary.json").read_text(encoding="utf-8"))


class TestFaults:
    def test_what_ctranslate2_cannot_express(self, save_model, tmp_path):
        folder = save_model(
            relative_position_per_head=True, absolute_position="sinusoidal", activation_function="leaky_relu"
        )
        with pytest.raises(ConversionError, match="cannot be expressed") as error:
            export(folder, tmp_path / "exported", toolkit="ctranslate2")
        for reason in (
            "relative_position_per_head=True (CTranslate2 has one table for all heads)",
            "absolute_position='sinusoidal'",
            "activation_function='leaky_relu'",
        ):
            assert reason in str(error.value)
        assert not (tmp_path / "exported").exists()

    def test_no_relative_positions(self, save_model, tmp_path):
        folder = save_model(max_relative_position=None, absolute_position="none")
        with pytest.raises(ConversionError, match="max_relative_position=None"):
            export(folder, tmp_path / "exported", toolkit="ctranslate2")

    def test_unknown_quantization(self, learned_model, tmp_path):
        with pytest.raises(ConversionError, match="no quantization 'int4'; there are int8, "):
            export(learned_model, tmp_path / "exported", toolkit="ctranslate2", quantization="int4")

    def test_another_kind_of_model(self, tmp_path):
        (tmp_path / "marian").mkdir()
        (tmp_path / "marian" / "config.json").write_text('{"model_type": "marian"}')
        with pytest.raises(ConversionError, match="is of type 'marian'"):
            export(tmp_path / "marian", tmp_path / "exported", toolkit="ctranslate2")

    def test_an_engine_needs_an_export(self, learned_model):
        with pytest.raises(ConversionError, match=r"holds no model\.bin; --engine ctranslate2 reads what"):
            load_engine(learned_model, engine="ctranslate2")


@pytest.fixture(scope="module")
def exported(learned_model, tmp_path_factory):
    return export(learned_model, tmp_path_factory.mktemp("exports") / "learned", toolkit="ctranslate2")


@pytest.fixture
def copy(exported, tmp_path):
    """A copy of an export to damage, and the function that converts it."""
    shutil.copytree(exported, tmp_path / "copy")
    return tmp_path / "copy", lambda **options: convert(
        tmp_path / "copy", tmp_path / "out", toolkit="ctranslate2", **options
    )


class TestDamage:
    @pytest.mark.parametrize("size", [0, 3, 30, 2000, -1])
    def test_cut_off(self, copy, size):
        folder, read = copy
        data = (folder / "model.bin").read_bytes()
        (folder / "model.bin").write_bytes(data[:size])
        with pytest.raises(ConversionError, match="is cut off"):
            read()

    def test_too_long(self, copy):
        folder, read = copy
        with (folder / "model.bin").open("ab") as file:
            file.write(b"x")
        with pytest.raises(ConversionError, match="goes on after its end"):
            read()

    def test_unknown_version(self, copy):
        folder, read = copy
        data = (folder / "model.bin").read_bytes()
        (folder / "model.bin").write_bytes(struct.pack("<I", 99) + data[4:])
        with pytest.raises(ConversionError, match="is of version 99; versions 4 to 6 are known"):
            read()

    @pytest.mark.parametrize("name", ["model.bin", "shared_vocabulary.json"])
    def test_a_file_is_missing(self, copy, name):
        folder, read = copy
        (folder / name).unlink()
        with pytest.raises(
            ConversionError, match=r"model\.bin cannot be read|no source_vocabulary\.json and no shared"
        ):
            read()

    def test_a_vocabulary_of_another_size(self, copy):
        folder, read = copy
        path = folder / "shared_vocabulary.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))[:-1]), encoding="utf-8")
        with pytest.raises(ConversionError, match="The tokenizer has 400 source tokens and the model embeds only 399"):
            read()

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("config.json", "{", "is not JSON, or it is cut off"),
            ("config.json", "[]", "must hold an object"),
            ("config.json", '{"decoder_start_token": "<start>"}', "decoder_start_token='<start>' .not in the target"),
            ("shared_vocabulary.json", "{}", "must hold a list of tokens"),
        ],
    )
    def test_damaged_text(self, copy, name, text, message):
        folder, read = copy
        (folder / name).write_text(text)
        with pytest.raises(ConversionError, match=message):
            read()

    @pytest.mark.parametrize("text", [None, "", "{", "{}", "[]", "\xff"])
    def test_a_damaged_tokenizer(self, copy, text):
        folder, read = copy
        (folder / "tokenizer.json").unlink()
        if text is not None:
            (folder / "tokenizer.json").write_text(text, encoding="latin-1")
        for opening in (read, lambda: load_engine(folder, engine="ctranslate2")):
            with pytest.raises(
                ConversionError,
                match=r"The tokenizer in .*copy cannot be opened: one of its files is missing or damaged",
            ):
                opening()

    def test_pieces_without_a_subword_model(self, converted, tmp_path):
        folder = export(converted("shared_sentencepiece"), tmp_path / "copy", toolkit="ctranslate2")
        (folder / "tokenizer_config.json").unlink()
        with pytest.raises(ConversionError, match=r"holds pieces of a subword model, .* --subwords"):
            convert(folder, tmp_path / "out", toolkit="ctranslate2")


class TestScaleOfEmbeddings:
    """CTranslate2 takes a float for the factor itself, and an int8 for a flag."""

    @pytest.fixture
    def read(self, copy, monkeypatch):
        """A function: the configuration of a copy whose model has these values of `scale_embeddings`."""
        folder, _ = copy
        binary = read_binary(folder / "model.bin")
        monkeypatch.setattr("relpos.conversion.ctranslate2_format.read_binary", lambda path: binary)

        def config(encoder, decoder):
            binary.variables["encoder.scale_embeddings"] = torch.tensor(encoder)
            binary.variables["decoder.scale_embeddings"] = torch.tensor(decoder)
            convert(folder, folder.parent / "out", toolkit="ctranslate2", force=True)
            return RelPosConfig.from_pretrained(folder.parent / "out")

        return config

    def test_one_and_the_root_of_the_width(self, read, learned_model):
        width = RelPosConfig.from_pretrained(learned_model).d_model
        assert read(1.0, 1.0).scale_embedding is False
        assert read(width**0.5, width**0.5).scale_embedding is True

    def test_another_factor(self, read):
        with pytest.raises(ConversionError, match=r"scale_embeddings=2\.5 .must be 1 or the root of the width"):
            read(2.5, 2.5)

    def test_two_factors(self, read):
        with pytest.raises(ConversionError, match=r"scale_embeddings is 2\.5 in the encoder and 1 in the decoder"):
            read(2.5, 1.0)


class TestForeignModels:
    """Models that another converter has made, without a tokenizer in the folder."""

    @pytest.fixture
    def foreign(self, convert_directly):
        return convert_directly("shared_sentencepiece", quantization="int8")

    def test_with_its_subword_model(self, foreign, opennmt_py_fixtures, load_converted, tmp_path):
        subwords = opennmt_py_fixtures / "shared_sentencepiece" / "subwords.model"
        model, tokenizer = load(convert(foreign, tmp_path / "out", toolkit="ctranslate2", subwords=[subwords]))
        expected, expected_tokenizer = load_converted("shared_sentencepiece")
        assert model.config.relative_position_tied
        assert model.config.layer_norm_eps == 1e-5  # what CTranslate2 takes for it, since the model does not say
        assert model.config.decoder_start_token_id == expected.config.decoder_start_token_id
        assert tokenizer(SOURCES, text_target=TARGETS) == expected_tokenizer(SOURCES, text_target=TARGETS)
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=float(0.02 * tensor.abs().max()))

    def test_vocabularies_and_options_of_version_2(self, foreign, opennmt_py_fixtures, tmp_path):
        tokens = json.loads((foreign / "shared_vocabulary.json").read_text(encoding="utf-8"))
        (foreign / "shared_vocabulary.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
        (foreign / "shared_vocabulary.json").unlink()
        (foreign / "config.json").unlink()
        subwords = opennmt_py_fixtures / "shared_sentencepiece" / "subwords.model"
        _, tokenizer = load(convert(foreign, tmp_path / "out", toolkit="ctranslate2", subwords=[subwords]))
        assert tokenizer.get_vocabulary("source") == tokens

    def test_without_relative_positions(self, tmp_path):
        spec = ctranslate2.specs.TransformerSpec.from_config(1, 2)
        spec.encoder.position_encodings.encodings = spec.decoder.position_encodings.encodings = torch.ones(4, 8).numpy()
        fill_with_ones(spec, d_model=8, ffn=4, vocab=4)
        for register in (spec.register_source_vocabulary, spec.register_target_vocabulary):
            register(["<unk>", "<s>", "</s>", "a"])
        spec.validate()
        (tmp_path / "absolute").mkdir()
        spec.save(str(tmp_path / "absolute"))
        with pytest.raises(ConversionError, match="cannot be expressed") as error:
            convert(tmp_path / "absolute", tmp_path / "out", toolkit="ctranslate2")
        assert "it has no relative positions" in str(error.value)
        assert "encoder.position_encodings.encodings (RelPos has no place for it)" in str(error.value)


def fill_with_ones(spec, *, d_model, ffn, vocab):
    shapes = {
        "embeddings_0/weight": (vocab, d_model),
        "embeddings/weight": (vocab, d_model),
        "projection/weight": (vocab, d_model),
        "ffn/linear_0/weight": (ffn, d_model),
        "ffn/linear_1/weight": (d_model, ffn),
        "self_attention/linear_0/weight": (3 * d_model, d_model),
        "attention/linear_1/weight": (2 * d_model, d_model),
    }

    def fill(layer, name, value):
        if value is None:
            known = next((shape for ending, shape in shapes.items() if name.endswith(ending)), None)
            shape = known or ((d_model,) if name.endswith(("gamma", "beta")) else (d_model, d_model))
            setattr(layer, name.rpartition("/")[2], torch.ones(shape).numpy())

    ctranslate2.specs.model_spec.visit_spec(spec, fill)
