"""Two tiny models that were really trained in OpenNMT-tf, against OpenNMT-tf's recorded answers, and its faults.

The fixtures are made by make_fixtures_opennmt_tf.py; test_peers.py makes them anew.
"""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from relpos import RelPosForConditionalGeneration, RelPosTokenizer
from relpos.conversion import convert
from relpos.conversion.files import ConversionError
from relpos.conversion.opennmt_tf_description import read_description
from relpos.conversion.opennmt_tf_format import OpenNMTTFConverter, read_vocabulary

OPENNMT_TF = Path(__file__).parent / "fixtures" / "opennmt_tf"
MODELS = ["shared_sentencepiece", "separate_bpe"]

BPE = "codes.en", "codes.de"


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function: model, tokenizer and folder of a fixture's conversion, done once."""
    loaded = {}

    def converted(name):
        if name not in loaded:
            out = convert_fixture(OPENNMT_TF / name, tmp_path_factory.mktemp("converted") / name)
            model, tokenizer = RelPosForConditionalGeneration.from_pretrained(out), AutoTokenizer.from_pretrained(out)
            loaded[name] = model, tokenizer, out
        return loaded[name]

    return converted


def convert_fixture(folder, out, source="run", **options):
    if (folder / BPE[0]).is_file():
        options = {"subwords": [folder / name for name in BPE], **options}
    return convert(folder / source, out, toolkit="opennmt-tf", **{"config": folder / "config.yml", **options})


@pytest.fixture(scope="module")
def comparisons(load, compare_with_answers):
    return {name: compare_with_answers(*load(name)[:2], OPENNMT_TF / name) for name in MODELS}


class TestAnswers:
    """Ids of source and target are compared too, within `compare_with_answers`."""

    @pytest.mark.parametrize("name", MODELS)
    def test_log_probabilities_and_greedy_outputs(self, comparisons, name):
        comparisons[name].check_answers()

    @pytest.mark.parametrize("name", MODELS)
    def test_beam_outputs_differ_only_where_ours_scores_better(self, comparisons, name):
        """Both stop when all beams have ended, but `generate` keeps ended hypotheses apart from its beam."""
        comparisons[name].check_beams()


class TestFolder:
    def test_shared(self, load):
        model, tokenizer, _ = load("shared_sentencepiece")
        config, generation = model.config, model.generation_config
        assert isinstance(tokenizer, RelPosTokenizer)
        assert (config.max_relative_position, config.relative_position_tied) == (6, False)
        assert (config.d_model, config.encoder_attention_heads, config.encoder_ffn_dim) == (64, 4, 128)
        assert (config.scale_embedding, config.layer_norm_eps, config.normalize_before) == (True, 1e-3, True)
        assert (config.share_encoder_decoder_embeddings, config.tie_word_embeddings) == (True, True)
        assert (config.attention_bias, config.lm_head_bias) == (True, True)
        assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.1, 0.0, 0.0)
        assert (generation.num_beams, generation.length_penalty, generation.max_length) == (4, 0.2, 251)
        assert tokenizer("Open the file.")["input_ids"][-1] == config.eos_token_id

    def test_separate(self, load):
        config = load("separate_bpe")[0].config
        assert (config.encoder_layers, config.decoder_layers) == (1, 2)
        assert (config.activation_function, config.normalize_before) == ("gelu_pytorch_tanh", False)
        assert config.vocab_size != config.decoder_vocab_size
        assert (config.share_encoder_decoder_embeddings, config.tie_word_embeddings) == (False, False)
        assert (config.attention_bias, config.lm_head_bias) == (False, False)

    def test_the_card_says_where_it_came_from_and_how_it_decodes(self, load):
        card = (load("shared_sentencepiece")[2] / "README.md").read_text(encoding="utf-8")
        assert "OpenNMT-tf, `run`" in card
        assert "length penalty 0.2 of OpenNMT-tf divides by ((5 + length) / 6)^0.2" in card
        assert "800" in card

    def test_words_as_they_stand(self, tmp_path):
        out = convert_fixture(OPENNMT_TF / "separate_bpe", tmp_path / "out", subwords=())
        tokenizer = AutoTokenizer.from_pretrained(out)
        tokens = tokenizer.convert_ids_to_tokens(tokenizer("the  file?\tnosuchword </s>\n")["input_ids"])
        assert (tokens[0], tokens[-2:]) == ("the", ["<unk>", "<unk>"])
        assert "must come tokenized as in training" in (out / "README.md").read_text(encoding="utf-8")

    def test_a_checkpoint_by_its_prefix_and_vocabularies_by_name(self, load, tmp_path):
        folder = OPENNMT_TF / "separate_bpe"
        vocabularies = [folder / "vocab.en", folder / "vocab.de"]
        out = convert_fixture(folder, tmp_path / "out", "run/ckpt-800", config=None, vocabularies=vocabularies)
        model, expected = RelPosForConditionalGeneration.from_pretrained(out), load("separate_bpe")[0]
        assert all(a.equal(b) for a, b in zip(model.state_dict().values(), expected.state_dict().values(), strict=True))
        assert model.generation_config.length_penalty == 0


@pytest.fixture
def run(tmp_path):
    """A copy of a model's folder to change."""
    return shutil.copytree(OPENNMT_TF / "shared_sentencepiece", tmp_path / "copy")


def change_config(folder, **sections):
    path = folder / "config.yml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, changes in sections.items():
        config[name] |= changes
    path.write_text(yaml.safe_dump(config), encoding="utf-8")


class TestOptions:
    def refused(self, folder, match, **options):
        out = folder.parent / "out"
        with pytest.raises(ConversionError, match=match):
            convert_fixture(folder, out, **options)
        assert not out.exists()

    def test_every_inexpressible_option_is_named(self, run):
        description = run / "run" / "model_description.py"
        text = description.read_text(encoding="utf-8").replace(
            "position_encoder_class=None,", "ffn_activation=tf.nn.elu,"
        )
        description.write_text(text.replace("ffn_dropout=0.0", "ffn_dropout=RATE"), encoding="utf-8")
        tokenization = {"type": "OpenNMTTokenizer", "params": {"mode": "aggressive", "joiner_annotate": True}}
        change_config(run, data={"target_sequence_controls": {"start": False}, "target_tokenization": tokenization})
        self.refused(
            run,
            "position_encoder_class=SinusoidalPositionEncoder .*ffn_activation=tf.nn.elu .*ffn_dropout=RATE .*"
            "target_sequence_controls=.*target_tokenization=OpenNMTTokenizer.*joiner_annotate=True.*--subwords",
        )

    def test_decoding_options_without_a_counterpart_are_told(self, run):
        change_config(run, params={"coverage_penalty": 0.1, "minimum_decoding_length": 2, "length_penalty": 0})
        out = convert_fixture(run, run.parent / "out")
        model = RelPosForConditionalGeneration.from_pretrained(out)
        assert (model.generation_config.min_new_tokens, model.generation_config.length_penalty) == (2, 0.0)
        card = (out / "README.md").read_text(encoding="utf-8")
        assert "coverage_penalty=0.1" in card
        assert "ranks by the sum of log-probabilities" in card

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"length_penalty": "high"}, "length_penalty='high', which must be a number"),
            ({"beam_width": 0}, "beam_width=0, which must be a whole number of at least 1"),
            ({"beam_width": 5.5}, r"beam_width=5\.5, which must be a whole number"),
            ({"maximum_decoding_length": True}, "maximum_decoding_length=True, which must be a whole number"),
            ({"minimum_decoding_length": -1}, "minimum_decoding_length=-1, which must be a whole number of at least 0"),
            ({"minimum_decoding_length": 300}, "=300, which must be at most maximum_decoding_length=250"),
        ],
    )
    def test_decoding_options_that_cannot_be(self, run, params, message):
        change_config(run, params=params)
        self.refused(run, message)

    def test_parameters_of_a_tokenization_of_another_type(self, run):
        change_config(run, data={"source_tokenization": {"type": "SentencePieceTokenizer", "params": [1]}})
        self.refused(run, "The params of source_tokenization in the configuration .* must hold names with values")

    def test_a_start_token_of_sources(self, run):
        change_config(run, data={"source_sequence_controls": {"start": True, "end": False}})
        tokenizer = AutoTokenizer.from_pretrained(convert_fixture(run, run.parent / "out"))
        ids = tokenizer("Open")["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert ids[-1] != tokenizer.eos_token_id

    def test_no_relative_positions(self, run):
        converter = OpenNMTTFConverter(run / "run", config=run / "config.yml")
        for name in [name for name in converter._foreign if "relative_position" in name]:
            del converter._foreign[name]
        assert converter.obstacles() == ["maximum_relative_position=None (no relative positions)"]

    def test_no_vocabulary(self, run):
        self.refused(run, r"source vocabulary .* is not known: .*--config.*--vocabularies", config=None)

    def test_another_vocabulary(self, run):
        with (run / "shared.vocab").open("a", encoding="utf-8") as file:
            file.write("onemore\n")
        self.refused(run, "The vocabulary has 801 tokens, which makes 802 .* the model embeds 801")

    def test_a_token_twice(self, run):
        path = run / "shared.vocab"
        lines = path.read_text(encoding="utf-8").split("\n")
        path.write_text("\n".join([*lines[:9], lines[5], *lines[10:]]), encoding="utf-8")
        self.refused(run, f"is inconsistent: The source vocabulary holds {re.escape(repr(lines[5]))} twice")

    @pytest.mark.parametrize("entry", ["source_sequence_controls", "target_sequence_controls", "source_tokenization"])
    def test_an_entry_of_another_type(self, run, entry):
        change_config(run, data={entry: ["start", "end"]})
        self.refused(run, rf"The entry {entry} of the configuration .*config\.yml must hold names with values")

    def test_three_vocabularies(self, run):
        self.refused(run, "--vocabularies takes one file, .* not 3", vocabularies=[run / "shared.vocab"] * 3)

    def test_a_file_that_the_configuration_names_is_missing(self, run):
        (run / "subwords.model").unlink()
        self.refused(run, r"names the file subwords\.model, which is not beside it")

    @pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "\x00"])
    def test_a_damaged_configuration(self, run, content):
        (run / "config.yml").write_text(content, encoding="utf-8")
        self.refused(run, r"The configuration .*config\.yml")

    def test_no_description(self, run):
        (run / "run" / "model_description.py").unlink()
        self.refused(run, r"The description of the model .*model_description\.py cannot be read: No such file")

    def test_a_cut_off_checkpoint(self, run):
        path = run / "run" / "ckpt-800.data-00000-of-00001"
        path.write_bytes(path.read_bytes()[:100_000])
        self.refused(run, r"data-00000-of-00001 is cut off: it ends within model/")

    def test_a_checkpoint_of_something_else(self, run):
        for path in (OPENNMT_TF.parent / "tensor2tensor" / "types").glob("types.*"):
            shutil.copy(path, run / path.name.replace("types", "ckpt-1"))
        self.refused(run, "is not a Transformer of OpenNMT-tf 2", source="ckpt-1")


class TestDescription:
    def read(self, tmp_path, text):
        (tmp_path / "model_description.py").write_text(text, encoding="utf-8")
        return read_description(tmp_path / "model_description.py")

    def test_a_model_of_the_catalog(self, tmp_path):
        text = 'from opennmt import models\nmodel = lambda: models.get_model_from_catalog("{}")\n'
        assert self.read(tmp_path, text.format("TransformerRelative"))["position_encoder_class"] == "None"
        assert self.read(tmp_path, text.format("TransformerBig"))["position_encoder_class"] != "None"
        with pytest.raises(ConversionError, match="must build one Transformer of OpenNMT-tf, as `model`"):
            self.read(tmp_path, text.format("NMTMediumV1"))

    @pytest.mark.parametrize(
        "text",
        [
            "model = Transformer({})",
            "model = lambda: opennmt.models.Transformer({})",
            'def model():\n    """A model."""\n    return Transformer({})',
            "class M(Transformer):\n    def __init__(self):\n        super().__init__({})\nmodel = M",
            'class M(Transformer):\n    """A."""\n    def __init__(self):\n        super().__init__({})\n'
            "    def auto_config(self, replicas=1):\n        return change(super().auto_config())\nmodel = lambda: M()",
        ],
    )
    def test_the_ways_to_build_one(self, tmp_path, text):
        text = '"""A description."""\nimport opennmt\nfrom opennmt.models import Transformer\n' + text
        assert self.read(tmp_path, text.format("dropout=0.3"))["dropout"] == "0.3"

    def test_positional_arguments(self, tmp_path):
        text = "model = lambda: opennmt.models.Transformer(opennmt.inputters.WordEmbedder(64), CharConvEmbedder(64))"
        arguments = self.read(tmp_path, text)
        assert arguments["source_inputter"] == "opennmt.inputters.WordEmbedder(64)"
        assert arguments["target_inputter"] == "CharConvEmbedder(64)"

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("model = lambda: Transformer(None, None, 6)", "cannot be told without running it"),
            ("model = lambda: Transformer(**options)", "cannot be told without running it"),
            ("class M(Transformer): pass\nmodel = lambda: M(num_layers=2)", "cannot be told without running it"),
            ("model = Transformer()\nmodel = Transformer()", "must build one Transformer"),
            ("class M(Transformer): pass\nmodel = M", "must build one Transformer"),
            ("def model(): pass", "must build one Transformer"),
            ("model = lambda: change(Transformer())", "must build one Transformer"),
            ("model = (", "not a Python file"),
            ("a = Transformer()\nmodel = Transformer()", "Line 1 "),
            ("model = Transformer()\nmodel.encoder = None", "Line 2 "),
            ("import opennmt\nopennmt.layers.LayerNorm = None\nmodel = lambda: Transformer()", "Line 2 "),
            ("def model():\n    m = Transformer()\n    m.encoder = None\n    return m", "Line 2 "),
            ("@change\ndef model():\n    return Transformer()", "Line 2 "),
            ("class M(Mixin, Transformer): pass\nmodel = M", "Line 1 "),
            ("class M(Transformer):\n    def call(self): ...\nmodel = M", "Line 2 "),
            ("class M(Transformer):\n    call = other\nmodel = M", "Line 2 "),
            (
                "class M(Transformer):\n    def __init__(self):\n        super().__init__()\n        self.encoder = None\nmodel = M",
                "Line 4 ",
            ),
        ],
    )
    def test_what_reading_cannot_tell(self, tmp_path, text, match):
        with pytest.raises(ConversionError, match=match):
            self.read(tmp_path, text)


class TestVocabulary:
    @pytest.mark.parametrize(
        ("content", "match"),
        [
            (b"", "must begin with <blank>, <s>, </s>"),
            (b"<s>\n<blank>\n</s>\n", "must begin with"),
            (b"<blank>\n<s>\n</s>\n<unk>\n", "holds <unk>, which has an id of its own"),
            (b"<blank>\n<s>\n</s>\n\xff\n", "not UTF-8"),
        ],
    )
    def test_faults(self, tmp_path, content, match):
        (tmp_path / "vocab").write_bytes(content)
        with pytest.raises(ConversionError, match=match):
            read_vocabulary(tmp_path / "vocab")

    def test_only_line_feeds_end_a_token(self, tmp_path):
        (tmp_path / "vocab").write_bytes("<blank>\r\n<s>\r\n</s>\r\na\u2028b\n".encode())
        assert read_vocabulary(tmp_path / "vocab") == ["<blank>", "<s>", "</s>", "<unk>", "a\u2028b"]
