"""Two tiny models that were really trained in OpenNMT-py, against OpenNMT-py's recorded answers, and its faults.

The fixtures are made by make_fixtures_opennmt_py.py; test_peers.py makes them anew.
"""

import argparse
import shutil

import pytest
import torch
from safetensors.torch import save_file

from relpos import RelPosForConditionalGeneration, RelPosTokenizer
from relpos.conversion import convert
from relpos.conversion.files import ConversionError

MODELS = ["shared_sentencepiece", "separate_bpe"]


@pytest.fixture(scope="module")
def comparisons(load_converted, compare_with_answers, opennmt_py_fixtures):
    return {name: compare_with_answers(*load_converted(name), opennmt_py_fixtures / name) for name in MODELS}


class TestAnswers:
    """Ids of source and target are compared too, within `compare_with_answers`."""

    @pytest.mark.parametrize("name", MODELS)
    def test_log_probabilities_and_greedy_outputs(self, comparisons, name):
        comparisons[name].check_answers()

    @pytest.mark.parametrize("name", MODELS)
    def test_beam_outputs_differ_only_where_ours_scores_better(self, comparisons, name):
        """OpenNMT-py stops at the first ended hypothesis on top of its beam; `generate` goes on while one can be better."""
        comparisons[name].check_beams()


class TestFolder:
    def test_shared(self, load_converted):
        model, tokenizer = load_converted("shared_sentencepiece")
        config = model.config
        assert isinstance(tokenizer, RelPosTokenizer)
        assert (config.max_relative_position, config.relative_position_tied) == (6, True)
        assert (config.scale_embedding, config.layer_norm_eps, config.normalize_before) == (False, 1e-6, True)
        assert (config.share_encoder_decoder_embeddings, config.tie_word_embeddings) == (True, True)
        assert (config.attention_bias, config.mlp_bias, config.lm_head_bias) == (True, False, True)
        assert (config.source_language, config.target_language) == ("en", "de")
        assert model.generation_config.length_penalty == 1.0
        assert model.generation_config.num_beams == 5

    def test_separate(self, load_converted):
        config = load_converted("separate_bpe")[0].config
        assert (config.encoder_layers, config.decoder_layers) == (1, 2)
        assert (config.activation_function, config.layer_norm_eps) == ("gelu", 1e-5)
        assert config.vocab_size != config.decoder_vocab_size
        assert (config.share_encoder_decoder_embeddings, config.tie_word_embeddings) == (False, False)
        assert config.attention_bias is False

    def test_the_card_says_where_it_came_from_and_how_it_decodes(self, converted):
        card = (converted("shared_sentencepiece") / "README.md").read_text(encoding="utf-8")
        assert "OpenNMT-py, `model.pt`" in card
        assert "length penalty 'avg' with alpha 1, which is `length_penalty=1.0` here" in card

    def test_the_pipeline_translates(self, converted):
        from transformers import pipeline

        translate = pipeline("translation", model=str(converted("separate_bpe")))
        [result] = translate("Save the file.", max_new_tokens=8, num_beams=2)
        assert "@@" not in result["translation_text"]
        assert "</w>" not in result["translation_text"]


@pytest.fixture
def checkpoint(opennmt_py_fixtures, tmp_path):
    """A copy of a checkpoint to change: its content, and a function that writes it and converts it."""
    folder = opennmt_py_fixtures / "shared_sentencepiece"
    shutil.copy(folder / "subwords.model", tmp_path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(folder / "model.pt", weights_only=True)

    def write(**options):
        torch.save(content, tmp_path / "model.pt")
        return convert(tmp_path / "model.pt", tmp_path / "out", toolkit="opennmt-py", **options)

    return content, write


class TestOtherCheckpoints:
    def test_weights_in_safetensors_beside_it(self, checkpoint, load_converted, tmp_path):
        content, write = checkpoint
        weights = content.pop("model")
        weights |= {f"generator.{name}": tensor for name, tensor in content.pop("generator").items()}
        save_file({name: tensor.clone() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
        assert_same(RelPosForConditionalGeneration.from_pretrained(write()), load_converted("shared_sentencepiece")[0])

    def test_names_of_version_2(self, checkpoint, load_converted):
        content, write = checkpoint
        old = {".layer_norm.weight": ".layer_norm.a_2", ".layer_norm.bias": ".layer_norm.b_2"}
        for new, name in old.items():
            content["model"] = {key.replace(new, name): tensor for key, tensor in content["model"].items()}
        content["generator"] = {f"0.{name}": tensor for name, tensor in content["generator"].items()}
        for option in ("norm_eps", "num_kv", "layer_norm", "parallel_residual", "model_task", "sliding_window"):
            delattr(content["opt"], option)
        assert_same(RelPosForConditionalGeneration.from_pretrained(write()), load_converted("shared_sentencepiece")[0])

    def test_half_precision_and_a_whole_optimizer(self, checkpoint):
        content, write = checkpoint
        content["model"] = {name: tensor.half() for name, tensor in content["model"].items()}
        content["generator"] = {name: tensor.half() for name, tensor in content["generator"].items()}
        content["optim"]["optimizer"]["state"] = {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3)}}
        model = RelPosForConditionalGeneration.from_pretrained(write())
        assert model.dtype == torch.float32
        assert torch.equal(model.lm_head.bias, content["generator"]["bias"].float())

    def test_words_as_they_stand(self, checkpoint):
        content, write = checkpoint
        content["opt"].transforms = []
        content["opt"].data["corpus"]["transforms"] = ["filtertoolong"]
        out = write()
        tokenizer = RelPosTokenizer.from_pretrained(out)
        assert tokenizer.convert_ids_to_tokens(tokenizer("▁the  ▁file </s>")["input_ids"]) == ["▁the", "▁file", "<unk>"]
        assert "must come tokenized as in training" in (out / "README.md").read_text(encoding="utf-8")

    def test_subwords_can_be_named(self, checkpoint, opennmt_py_fixtures, tmp_path):
        _, write = checkpoint
        (tmp_path / "subwords.model").unlink()
        with pytest.raises(ConversionError, match=r"subwords\.model is not beside the checkpoint .* --subwords"):
            write()
        write(subwords=[opennmt_py_fixtures / "shared_sentencepiece" / "subwords.model"])

    def test_it_does_not_overwrite(self, checkpoint, tmp_path):
        _, write = checkpoint
        write()
        with pytest.raises(ConversionError, match="exists; pass --force"):
            write()
        write(force=True)


class TestFaults:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"max_relative_positions": -1}, ["max_relative_positions=-1 (rotary"]),
            ({"max_relative_positions": -2}, ["max_relative_positions=-2 (ALiBi"]),
            ({"max_relative_positions": 0}, ["max_relative_positions=0 (no relative positions)"]),
            (
                {"layer_norm": "rms", "num_kv": 2, "copy_attn": True, "pos_ffn_activation_fn": "silu", "heads": 4},
                ["layer_norm='rms' (", "num_kv=2 (", "copy_attn=True (", "pos_ffn_activation_fn='silu' ("],
            ),
            (
                {"position_encoding": True, "encoder_type": "brnn"},
                ["position_encoding=True (", "encoder_type='brnn' ("],
            ),
            ({"transforms": ["onmt_tokenize", "prefix"]}, ["transforms=['onmt_tokenize', 'prefix'] ("]),
        ],
    )
    def test_every_option_that_cannot_be_expressed_is_named(self, checkpoint, tmp_path, options, named):
        content, write = checkpoint
        vars(content["opt"]).update(options)
        with pytest.raises(ConversionError, match="cannot be expressed") as error:
            write()
        for text in named:
            assert text in str(error.value)
        assert not (tmp_path / "out").exists()

    def test_special_tokens_at_two_places(self, checkpoint):
        content, write = checkpoint
        target = list(content["vocab"]["tgt"])
        target[1], target[3] = target[3], target[1]
        content["vocab"]["tgt"] = target
        with pytest.raises(ConversionError, match="<blank> has the id 1 in the source and 3 in the target"):
            write()

    def test_sizes_that_do_not_fit(self, checkpoint):
        content, write = checkpoint
        content["vocab"]["tgt"] = content["vocab"]["src"] = content["vocab"]["src"][:-1]
        with pytest.raises(ConversionError, match=r"shared\.weight has the shape \[896, 64\] instead of \[895, 64\]"):
            write()

    def test_a_table_of_another_size(self, checkpoint):
        content, write = checkpoint
        content["opt"].max_relative_positions = 7
        with pytest.raises(ConversionError, match=r"relative_keys has the shape \[13, 16\] instead of \[15, 16\]"):
            write()

    def test_weights_that_relpos_does_not_know(self, checkpoint):
        content, write = checkpoint
        content["model"]["encoder.transformer.0.self_attn.linear_gate.weight"] = torch.ones(1)
        with pytest.raises(ConversionError, match=r"no place for the weight encoder.*linear_gate\.weight"):
            write()

    def test_options_that_no_model_can_have(self, checkpoint):
        content, write = checkpoint
        content["opt"].heads = 5
        with pytest.raises(ConversionError, match=r"is inconsistent: .*encoder_attention_heads"):
            write()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_relative_positions": None}, r"max_relative_positions=None .not a whole number"),
            ({"max_relative_positions": "6"}, r"max_relative_positions='6' .not a whole number"),
            ({"dropout": None}, "dropout=None, which must be a rate or a list of rates"),
            ({"dropout": []}, r"dropout=\[\], which must be a rate or a list of rates"),
            ({"data": {"c": None}}, "data={'c': None}, which must be corpora by name"),
            ({"data": "c"}, "data='c', which must be corpora by name"),
            ({"transforms": "sentencepiece"}, "transforms='sentencepiece', which must be a list"),
        ],
    )
    def test_an_option_of_another_type(self, checkpoint, options, message):
        content, write = checkpoint
        vars(content["opt"]).update(options)
        with pytest.raises(ConversionError, match=message):
            write()

    @pytest.mark.parametrize(
        "change", [{"model": None}, {"model": [1]}, {"generator": [1]}, {"model": {"encoder.layer_norm.weight": 3}}]
    )
    def test_weights_of_another_type(self, checkpoint, change):
        content, write = checkpoint
        content.update(change)
        with pytest.raises(ConversionError, match="is damaged: its weights must be tensors by name"):
            write()

    def test_a_decoder_is_missing(self, checkpoint):
        content, write = checkpoint
        content["model"] = {name: tensor for name, tensor in content["model"].items() if "decoder.transf" not in name}
        with pytest.raises(ConversionError, match=r"has no decoder\.transformer_layers\.0\.feed_forward\.w_1\.weight"):
            write()

    @pytest.mark.parametrize("part", ["opt", "vocab"])
    def test_a_part_is_missing(self, checkpoint, part):
        content, write = checkpoint
        del content[part]
        with pytest.raises(ConversionError, match="holds no options and vocabulary"):
            write()

    def test_options_of_another_type(self, checkpoint):
        content, write = checkpoint
        content["opt"] = vars(content["opt"])
        with pytest.raises(ConversionError, match="holds no options and vocabulary"):
            write()

    def test_no_weights_anywhere(self, checkpoint):
        content, write = checkpoint
        del content["model"]
        with pytest.raises(ConversionError, match=r"holds no weights, and there is no model\.safetensors"):
            write()

    def test_no_target_vocabulary(self, checkpoint):
        content, write = checkpoint
        del content["vocab"]["tgt"]
        with pytest.raises(ConversionError, match="no vocabulary of source and target"):
            write()

    def test_an_unknown_class_needs_trust(self, checkpoint):
        content, write = checkpoint
        content["optim"]["scaler"] = argparse.ArgumentError
        with pytest.raises(ConversionError, match=r"holds a argparse\.ArgumentError.*--allow-pickle"):
            write()
        write(allow_pickle=True)

    @pytest.mark.parametrize("size", [0, 100, 500_000])
    def test_a_file_that_is_cut_off(self, opennmt_py_fixtures, tmp_path, size):
        data = (opennmt_py_fixtures / "shared_sentencepiece" / "model.pt").read_bytes()
        (tmp_path / "model.pt").write_bytes(data[:size])
        with pytest.raises(ConversionError, match="not an OpenNMT-py checkpoint, or it is cut off"):
            convert(tmp_path / "model.pt", tmp_path / "out", toolkit="opennmt-py")
        assert not (tmp_path / "out").exists()

    def test_a_folder(self, tmp_path):
        with pytest.raises(ConversionError, match=r"is a folder; an OpenNMT-py model is a \.pt file"):
            convert(tmp_path, tmp_path / "out", toolkit="opennmt-py")

    def test_subwords_that_are_none(self, checkpoint, tmp_path):
        _, write = checkpoint
        (tmp_path / "subwords.model").write_text("#version: 0.1\n")
        with pytest.raises(ConversionError, match=r"must begin with '#version: 0\.2'"):
            write()
        (tmp_path / "subwords.model").write_text("#version: 0.2\na b c\n")
        with pytest.raises(ConversionError, match=r"Line 2 of the BPE codes .* must hold two pieces and holds 3"):
            write()
        (tmp_path / "subwords.model").write_bytes(b"\x0a\xff\x01")
        with pytest.raises(ConversionError, match="SentencePiece model"):
            write()


@pytest.mark.slow
def test_two_epochs_of_trainer_make_it_better(load_converted, tmp_path):
    """OpenNMT-py -> RelPos -> Seq2SeqTrainer. The fixture saw each sentence of its corpus less than once, and has a BLEU
    of 1 on short ones that were held out; two epochs of 2,500 others make it 3."""
    import sacrebleu
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from relpos.training.corpus import bundled_splits

    model, tokenizer = load_converted("shared_sentencepiece")
    splits = bundled_splits()
    train, held_out = (
        [pair for pair in splits[name]["translation"] if 2 < len(pair["en"]) < 30] for name in ("train", "test")
    )
    train, held_out = train[:: len(train) // 2400], held_out[:200]
    batches = [held_out[start : start + 50] for start in range(0, len(held_out), 50)]

    def bleu():
        texts = []
        for batch in batches:
            inputs = tokenizer([pair["en"] for pair in batch], padding=True, return_tensors="pt")
            outputs = model.eval().generate(**inputs, num_beams=1, max_new_tokens=40, length_penalty=None)
            texts += tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return sacrebleu.corpus_bleu(texts, [[pair["de"] for pair in held_out]]).score

    before = bleu()
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        warmup_steps=30,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [dict(tokenizer(pair["en"], text_target=pair["de"])) for pair in train]
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    Seq2SeqTrainer(model, arguments, train_dataset=rows, data_collator=collator).train()
    after = bleu()
    assert after > before + 1, (before, after)


def assert_same(model, expected):
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in expected.state_dict().items())
