"""tensor2tensor's attention, tokenizer and whole models against what it recorded itself, and the converter's faults.

The fixtures are made by make_fixtures_tensor2tensor.py; test_peers.py makes them anew.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from relpos import RelPosForConditionalGeneration, RelPosSubwordTextTokenizer
from relpos.attention_relpos import attention_by_rows, place_rows, relative_rows
from relpos.conversion import convert
from relpos.conversion.files import ConversionError
from relpos.conversion.tensor2tensor_format import Tensor2TensorConverter, read_vocabulary
from relpos.tokenization_subword_text_relpos import join_words, split_words

TENSOR2TENSOR = Path(__file__).parent / "fixtures" / "tensor2tensor"
MODELS = ["shared", "separate"]


def read(path):
    return json.loads((TENSOR2TENSOR / path).read_text(encoding="utf-8"))


def vocabularies(folder):
    """The options that name the vocabularies of a fixture; one that both sides share is found without."""
    return {} if folder.name == "shared" else {"vocabularies": [folder / "vocab.en", folder / "vocab.de"]}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function: model, tokenizer and folder of a fixture's conversion, done once."""
    loaded = {}

    def converted(name):
        if name not in loaded:
            folder = TENSOR2TENSOR / name
            out = tmp_path_factory.mktemp("converted") / name
            convert(folder, out, toolkit="tensor2tensor", **vocabularies(folder))
            model, tokenizer = RelPosForConditionalGeneration.from_pretrained(out), AutoTokenizer.from_pretrained(out)
            loaded[name] = model, tokenizer, out
        return loaded[name]

    return converted


class TestAttention:
    """`dot_product_attention_relative`, whose queries come scaled."""

    @pytest.mark.parametrize("case", read("attention.json")[:-1], ids=lambda case: case["name"])
    def test_output(self, case):
        arrays = {name: torch.tensor(value) for name, value in case.items() if isinstance(value, list)}
        output, _ = self.attention(case, **arrays)
        torch.testing.assert_close(output, arrays["output"], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("case", read("attention.json")[:-1], ids=lambda case: case["name"])
    def test_a_table_per_head_is_one_head_after_the_other(self, case):
        """As in versions before 1.4.3. Each head gets tables of its own, the recorded ones times a factor."""
        arrays = {name: torch.tensor(value) for name, value in case.items() if isinstance(value, list)}
        factors = torch.tensor([1.0, -2.0, 0.5])[:, None, None]
        tables = {name: arrays[name] * factors for name in ("key_table", "value_table")}
        together, _ = self.attention(case, **arrays | tables)
        for head in range(3):
            alone = {name: arrays[name][:, head : head + 1] for name in ("query", "key", "value")}
            alone |= {name: table[head] for name, table in tables.items()}
            torch.testing.assert_close(together[:, head : head + 1], self.attention(case, **alone)[0])

    def attention(self, case, *, query, key, value, key_table, value_table, output=None):
        keys, k = key.shape[2], key_table.shape[-2] // 2
        positions = torch.arange(keys)
        rows = relative_rows(positions[-query.shape[2] :], positions, k)
        mask = positions <= positions[:, None] if case["causal"] else None
        tables = {"key_table": key_table, "value_table": value_table}
        return attention_by_rows(query, key, value, scaling=1.0, rows=rows, mask=mask, **tables)

    def test_inner_product(self):
        case = read("attention.json")[-1]
        x, y, z, expected = (torch.tensor(case[name]) for name in ("x", "y", "z", "output"))
        edges = z.reshape(25, 4)  # every pair of positions has a vector of its own
        product = x @ y.transpose(-1, -2) + place_rows(x @ edges.t(), torch.arange(25).reshape(5, 5))
        torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def comparisons(load, compare_with_answers):
    return {name: compare_with_answers(*load(name)[:2], TENSOR2TENSOR / name) for name in MODELS}


class TestAnswers:
    """Ids of source and target are compared too, within `compare_with_answers`."""

    @pytest.mark.parametrize("name", MODELS)
    def test_log_probabilities_and_greedy_outputs(self, comparisons, name):
        comparisons[name].check_answers()

    @pytest.mark.parametrize("name", MODELS)
    def test_beam_outputs_differ_only_by_the_rule_of_the_search(self, load, comparisons, name):
        """By tensor2tensor's rule this model finds all of its hypotheses; by that of `generate`, nearly all of the best."""
        model, tokenizer, _ = load(name)
        for sentence in read(f"{name}/answers.json")["sentences"]:
            batch = tokenizer(sentence["source"], return_tensors="pt")
            expected = [hypothesis["ids"] for hypothesis in sentence["beam_4"]]
            assert search_as_tensor2tensor(model, batch) == expected
        assert len(comparisons[name].beam_differs) <= 10, len(comparisons[name].beam_differs)


@torch.inference_mode()
def search_as_tensor2tensor(model, batch, *, beams=4, longest=100):
    """The hypotheses of tensor2tensor's beam search, best first: those that end among the `2 * beams` best candidates of
    a step count, where `generate` takes those among the best `beams`."""
    encoded = model.get_encoder()(**batch).last_hidden_state
    growing, ended = [(0.0, [])], []
    while len(growing[0][1]) < longest and not (len(ended) == beams and ended[-1][0] > growing[0][0]):
        ids = torch.tensor([[model.config.decoder_start_token_id, *ids] for _, ids in growing])
        outputs = model(
            encoder_outputs=(encoded.expand(len(ids), -1, -1),),
            attention_mask=batch["attention_mask"].expand(len(ids), -1),
            decoder_input_ids=ids,
        )
        sums = outputs.logits[:, -1].log_softmax(-1) + torch.tensor([[score] for score, _ in growing])
        best, places = sums.flatten().topk(2 * beams)
        rows, tokens = places // sums.shape[1], places % sums.shape[1]
        candidates = [
            (score, [*growing[row][1], token])
            for score, row, token in zip(best.tolist(), rows.tolist(), tokens.tolist(), strict=True)
        ]
        ending = [candidate for candidate in candidates if candidate[1][-1] == model.config.eos_token_id]
        ended = sorted(ended + ending, key=lambda hypothesis: -hypothesis[0])[:beams]
        growing = [candidate for candidate in candidates if candidate not in ending][:beams]
    return [ids for _, ids in ended or growing]


class TestFolder:
    def test_shared(self, load):
        model, tokenizer, _ = load("shared")
        config = model.config
        assert isinstance(tokenizer, RelPosSubwordTextTokenizer)
        assert (config.max_relative_position, config.relative_position_per_head) == (5, False)
        assert (config.encoder_layers, config.decoder_layers, config.encoder_attention_heads) == (2, 2, 4)
        assert (config.normalize_before, config.layer_norm_eps, config.scale_embedding) == (True, 1e-6, True)
        assert (config.attention_bias, config.mlp_bias, config.lm_head_bias) == (False, True, False)
        assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (0, 1, 0)
        assert not model.model.decoder.embed_tokens.weight[0].any()
        assert model.lm_head.weight[0].any()
        assert torch.equal(model.model.decoder.embed_tokens.weight[1:], model.lm_head.weight[1:])
        assert not torch.equal(model.model.encoder.embed_tokens.weight[1:], model.lm_head.weight[1:])

    def test_separate(self, load):
        config = load("separate")[0].config
        assert (config.encoder_layers, config.decoder_layers) == (1, 2)
        assert (config.normalize_before, config.max_relative_position) == (False, 3)
        assert config.vocab_size != config.decoder_vocab_size

    def test_the_card_says_where_it_came_from_and_how_it_decodes(self, load):
        model, _, out = load("shared")
        card = (out / "README.md").read_text(encoding="utf-8")
        assert "tensor2tensor, `shared`" in card
        assert "((5 + length) / 6)^0.6" in card
        assert (model.generation_config.num_beams, model.generation_config.length_penalty) == (4, 0.6)

    def test_the_pipeline_translates(self, load):
        from transformers import pipeline

        translate = pipeline("translation", model=str(load("shared")[2]))
        [result] = translate("Save the file.", max_new_tokens=8)
        assert "_" not in result["translation_text"]


class TestTokenizer:
    @pytest.mark.parametrize("name", MODELS)
    def test_all_sorts_of_text(self, load, name):
        tokenizer = load(name)[1]
        for entry in read(f"{name}/texts.json"):
            text, (source, target) = entry["text"], entry["sides"]
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == source["ids"], text
            assert tokenizer(text_target=text, add_special_tokens=False)["input_ids"] == target["ids"], text
            assert tokenizer.decode(target["ids"]) == target["decoded"], text
            assert tokenizer.decode(source["ids"], use_source_tokenizer=True) == source["decoded"], text

    def test_words(self):
        assert split_words(' Dude - that\'s 2 "cool"') == [" ", "Dude", " - ", "that", "'", "s", "2", ' "', "cool", '"']
        assert join_words(["Dude", " - ", "that", "'", "s", "so", "cool", "."]) == "Dude - that's so cool."
        assert join_words([]) == ""

    def test_a_character_without_a_piece_of_its_own(self):
        vocabulary = ["<pad>_", "<EOS>_", *"\\_u;0123456789", "ab"]
        tokenizer = RelPosSubwordTextTokenizer(vocabulary, vocabulary)
        ids = tokenizer("abb", add_special_tokens=False)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "\\", "9", "8", ";", "_"]
        assert tokenizer.decode(ids) == "abb"

    def test_escapes_that_are_no_character(self):
        vocabulary = ["<pad>_", "<EOS>_", *"\\_u;0123456789"]
        tokenizer = RelPosSubwordTextTokenizer(vocabulary, vocabulary)
        assert tokenizer.decode(tokenizer.convert_tokens_to_ids(list("\\9999999;_"))) == "\u3013"

    def test_a_vocabulary_that_cannot_escape(self):
        with pytest.raises(ValueError, match=r"The source vocabulary lacks 7 ; \\, which escapes"):
            RelPosSubwordTextTokenizer(["<pad>_", "<EOS>_", *"_u012345689"], ["<pad>_", "<EOS>_", *"\\_u;0123456789"])

    def test_long_words_take_no_longer_than_their_length(self, load):
        tokenizer = load("shared")[1]
        assert tokenizer.decode(tokenizer("ab" * 100_000)["input_ids"], skip_special_tokens=True) == "ab" * 100_000


@pytest.fixture
def training(tmp_path):
    """A copy of a training's folder to change."""
    return shutil.copytree(TENSOR2TENSOR / "shared", tmp_path / "shared")


def change_options(folder, **changes):
    path = folder / "hparams.json"
    options = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(options), encoding="utf-8")


class TestOptions:
    def refused(self, folder, match, source="", **options):
        out = folder.parent / "out"
        with pytest.raises(ConversionError, match=match):
            convert(folder / source, out, toolkit="tensor2tensor", **options)
        assert not out.exists()

    def test_every_inexpressible_option_is_named(self, training):
        change_options(
            training, self_attention_type="dot_product_relative_v2", pos="timing", layer_postprocess_sequence="dz"
        )
        self.refused(
            training,
            "self_attention_type='dot_product_relative_v2' .*pos='timing' .*layer_preprocess_sequence='n' and "
            "layer_postprocess_sequence='dz'",
        )

    def test_no_relative_positions(self, training):
        change_options(training, self_attention_type="dot_product")
        converter = Tensor2TensorConverter(training)
        for name in [name for name in converter._foreign if "relative_positions" in name]:
            del converter._foreign[name]
        assert converter.obstacles() == ["self_attention_type='dot_product' (no relative positions)"]

    def test_tables_per_head(self, training):
        """As in versions before 1.4.3: [rows, heads * head_dim]. Two heads of the recorded width make such a table."""
        change_options(training, num_heads=1)
        converter = Tensor2TensorConverter(training)
        name = "encoder.layer_0.self_attention.multihead_attention.dot_product_attention_relative.relative_positions_{}.embeddings"
        for index in range(2):
            for side in ("encoder", "decoder"):
                for kind in ("keys", "values"):
                    key = name.format(kind).replace("encoder", side).replace("layer_0", f"layer_{index}")
                    converter._foreign[key] = torch.arange(11 * 32.0).reshape(11, 32)
        converter._options["num_heads"] = 4
        assert converter.config().relative_position_per_head
        table = converter.weights()["model.decoder.layers.1.self_attn.relative_values"]
        assert table.shape == (4, 11, 8)
        assert table[2, 3].tolist() == [3 * 32 + 2 * 8 + i for i in range(8)]

    def test_no_options(self, training):
        (training / "hparams.json").unlink()
        self.refused(training, r"The hyperparameters .*hparams\.json cannot be read: No such file")

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"num_heads": 4'])
    def test_damaged_options(self, training, content):
        (training / "hparams.json").write_text(content, encoding="utf-8")
        self.refused(training, r"hparams\.json (is not JSON, or it is cut off|must hold the hyperparameters)")

    def test_no_vocabulary_and_two(self, training):
        shutil.copy(training / "vocab.subwords", training / "vocab.other")
        self.refused(training, r"must hold one vocabulary .* holds vocab\.other, vocab\.subwords; .*--vocabularies")
        for path in training.glob("vocab.*"):
            path.unlink()
        self.refused(training, r"must hold one vocabulary .* and holds none")

    def test_a_piece_twice(self, training):
        path = training / "vocab.subwords"
        lines = path.read_text(encoding="utf-8").split("\n")
        path.write_text("\n".join([*lines[:-2], lines[5], ""]), encoding="utf-8")
        self.refused(training, "is inconsistent: The source vocabulary holds .* twice")

    def test_a_larger_vocabulary(self, training):
        with (training / "vocab.subwords").open("a", encoding="utf-8") as file:
            file.writelines(f"'more{number}'\n" for number in range(9))
        self.refused(training, "source tokens and the model embeds .*: they do not belong together")

    def test_a_cut_off_checkpoint(self, training):
        path = training / "model.ckpt-800.data-00000-of-00001"
        path.write_bytes(path.read_bytes()[:1000])
        self.refused(training, "data-00000-of-00001 is cut off: it ends within transformer/")

    def test_a_checkpoint_of_something_else(self, training):
        for path in (TENSOR2TENSOR / "types").glob("types.*"):
            shutil.copy(path, training / path.name)
        self.refused(training, "is not a Transformer of tensor2tensor for text: it has no source embeddings", "types")


class TestVocabulary:
    @pytest.mark.parametrize(
        ("content", "match"),
        [
            (b"", "must begin with <pad>_ and <EOS>_"),
            (b"<pad>\n<EOS>\nword\n", "must begin with"),
            (b"'<pad>_'\n'<EOS>_'\n\xff\n", "not UTF-8"),
        ],
    )
    def test_faults(self, tmp_path, content, match):
        (tmp_path / "vocab.x").write_bytes(content)
        with pytest.raises(ConversionError, match=match):
            read_vocabulary(tmp_path / "vocab.x")

    def test_quotation_marks(self, tmp_path):
        (tmp_path / "vocab.x").write_bytes("'<pad>_'\n'<EOS>_'\n' '\n'''\n\"a'\"\nb_\n'\u2028'\n".encode())
        assert read_vocabulary(tmp_path / "vocab.x")[2:] == [" ", "'", "a'", "b_", "\u2028"]
