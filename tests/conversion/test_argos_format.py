"""Packages of Argos Translate: written, used as Argos Translate uses them, and read back."""

import json
import zipfile

import ctranslate2
import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer

from relpos import RelPosForConditionalGeneration
from relpos.conversion import convert, export
from relpos.conversion.files import ConversionError

SENTENCES = ["Save the file.", "Delete the selected row and the column beside it.", "  two  spaces", "Ωmega ☃"]


@pytest.fixture(scope="module")
def package(converted, tmp_path_factory):
    out = tmp_path_factory.mktemp("packages") / "en_de.argosmodel"
    return export(converted("shared_sentencepiece"), out, toolkit="argos", quantization="float32")


def test_it_is_laid_out_as_argos_translate_wants_it(package):
    with zipfile.ZipFile(package) as archive:
        names = set(archive.namelist())
        metadata = json.loads(archive.read("translate-en_de-1_0/metadata.json"))
    files = {"metadata.json", "README.md", "sentencepiece.model", "model/config.json", "model/model.bin"}
    assert names == {f"translate-en_de-1_0/{name}" for name in (*files, "model/shared_vocabulary.json")}
    assert (metadata["from_code"], metadata["to_code"]) == ("en", "de")
    assert metadata["package_version"] == "1.0"


def test_used_as_argos_translate_uses_it_it_translates_like_the_model(package, load_converted, tmp_path):
    """Argos Translate gives CTranslate2 what SentencePiece cuts, with 4 beams and length penalty 0.2."""
    with zipfile.ZipFile(package) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "translate-en_de-1_0"
    subwords = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
    translator = ctranslate2.Translator(str(folder / "model"), intra_threads=1)
    tokens = [subwords.encode(sentence, out_type=str) for sentence in SENTENCES]
    results = translator.translate_batch(tokens, beam_size=4, length_penalty=0.2, max_decoding_length=40)
    model, tokenizer = load_converted("shared_sentencepiece")
    for sentence, result in zip(SENTENCES, results, strict=True):
        batch = tokenizer(sentence, return_tensors="pt")
        output = model.generate(**batch, num_beams=4, length_penalty=0.2, max_new_tokens=40, early_stopping=False)
        assert subwords.decode_pieces(result.hypotheses[0]) == tokenizer.decode(output[0], skip_special_tokens=True)


def test_back_again_it_is_bitwise_the_same(package, load_converted, tmp_path):
    out = convert(package, tmp_path / "out", toolkit="argos")
    model, tokenizer = RelPosForConditionalGeneration.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    expected, expected_tokenizer = load_converted("shared_sentencepiece")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in expected.state_dict().items())
    assert tokenizer(SENTENCES, text_target=SENTENCES) == expected_tokenizer(SENTENCES, text_target=SENTENCES)
    assert (model.config.source_language, model.config.target_language) == ("en", "de")
    assert (model.generation_config.num_beams, model.generation_config.length_penalty) == (4, 0.2)
    assert "length penalty 0.2" in (out / "README.md").read_text(encoding="utf-8")


def test_the_same_model_gives_the_same_bytes(converted, package, tmp_path):
    again = export(
        converted("shared_sentencepiece"), tmp_path / "a.argosmodel", toolkit="argos", quantization="float32"
    )
    assert again.read_bytes() == package.read_bytes()


def test_int8_is_the_default_and_versions_can_be_given(converted, package, tmp_path):
    out = export(
        converted("shared_sentencepiece"),
        tmp_path / "out.argosmodel",
        toolkit="argos",
        languages=("eng", "de_CH"),
        package_version="1.2",
    )
    assert out.stat().st_size < 0.6 * package.stat().st_size
    with zipfile.ZipFile(out) as archive:
        assert "translate-eng_de_CH-1_2/metadata.json" in archive.namelist()


class TestExportFaults:
    def test_no_languages(self, learned_model, tmp_path):
        model = RelPosForConditionalGeneration.from_pretrained(learned_model)
        model.config.target_language = None
        model.save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(learned_model).save_pretrained(tmp_path / "model")
        with pytest.raises(ConversionError, match=r"codes of two languages, as in --languages en,de, .* are: en"):
            export(tmp_path / "model", tmp_path / "out.argosmodel", toolkit="argos")
        with pytest.raises(ConversionError, match="codes of two languages"):
            export(tmp_path / "model", tmp_path / "out.argosmodel", toolkit="argos", languages=("../x", "de"))
        assert not (tmp_path / "out.argosmodel").exists()

    def test_a_vocabulary_that_sentencepiece_cannot_express(self, learned_model, tmp_path):
        with pytest.raises(ConversionError, match="from a Unigram vocabulary, and this one is of type BPE"):
            export(learned_model, tmp_path / "out.argosmodel", toolkit="argos")
        assert list(tmp_path.iterdir()) == []

    def test_two_subword_models(self, converted, tmp_path):
        with pytest.raises(ConversionError, match="one subword model, and this model has one for each side"):
            export(converted("separate_bpe"), tmp_path / "out.argosmodel", toolkit="argos")

    def test_it_does_not_overwrite(self, converted, tmp_path):
        (tmp_path / "out.argosmodel").write_text("old")
        with pytest.raises(ConversionError, match="exists; pass --force"):
            export(converted("shared_sentencepiece"), tmp_path / "out.argosmodel", toolkit="argos")
        assert (tmp_path / "out.argosmodel").read_text() == "old"


@pytest.fixture
def repacked(package, tmp_path):
    """A function: the package with members replaced (None: left out), converted."""

    def convert_repacked(changes):
        with zipfile.ZipFile(package) as original:
            members = {name.partition("/")[2]: original.read(name) for name in original.namelist()} | changes
        with zipfile.ZipFile(tmp_path / "changed.argosmodel", "w") as archive:
            for name, data in members.items():
                if data is not None:
                    archive.writestr(name if name.startswith(("/", "..")) else f"package/{name}", data)
        return convert(tmp_path / "changed.argosmodel", tmp_path / "out", toolkit="argos")

    yield convert_repacked
    assert {path.name for path in tmp_path.iterdir()} <= {"changed.argosmodel", "out"}


class TestImportFaults:
    @pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "model/../../evil", "..\\evil", "C:evil"])
    def test_paths_that_lead_out(self, repacked, name):
        with pytest.raises(ConversionError, match="not safe to unpack"):
            repacked({name: b"x"})

    def test_links(self, repacked, package, tmp_path):
        with zipfile.ZipFile(tmp_path / "changed.argosmodel", "w") as archive:
            link = zipfile.ZipInfo("package/model/model.bin")
            link.external_attr = 0o120777 << 16
            archive.writestr(link, "/etc/hostname")
        with pytest.raises(ConversionError, match="not safe to unpack"):
            convert(tmp_path / "changed.argosmodel", tmp_path / "out", toolkit="argos")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"metadata.json": None}, "holds no folder with a metadata.json"),
            ({"metadata.json": b"{"}, "metadata.json is not JSON"),
            ({"metadata.json": b"[]"}, "metadata.json must hold an object"),
            ({"metadata.json": b'{"target_prefix": "__de__"}'}, "target_prefix='__de__'"),
            ({"metadata.json": b'{"type": "sbd"}'}, "type='sbd'"),
            ({"sentencepiece.model": None}, "holds no sentencepiece.model"),
            ({"sentencepiece.model": b"\xff"}, "not a SentencePiece model"),
            ({"model/model.bin": None}, "model.bin cannot be read"),
            ({"model/model.bin": b"x"}, "is cut off"),
            ({"model/shared_vocabulary.json": None}, "no source_vocabulary.json"),
            ({"model/a": b"x", "model/a/b": b"x"}, "is damaged: a file in it has the name of a folder"),
            ({"model/a/b": b"x", "model/a": b"x"}, "is damaged: a file in it has the name of a folder"),
        ],
    )
    def test_what_is_missing_or_damaged(self, repacked, tmp_path, changes, message):
        with pytest.raises(ConversionError, match=message.replace(".", r"\.")):
            repacked(changes)
        assert not (tmp_path / "out").exists()

    def test_a_member_that_cannot_be_decompressed(self, tmp_path):
        file = tmp_path / "damaged.argosmodel"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("metadata.json", "sentencepiece.model"):
                archive.writestr(f"en_de/{name}", "text " * 100)
        data = bytearray(file.read_bytes())
        start = 30 + len("en_de/metadata.json")  # behind the member's header
        data[start : start + 4] = b"\xff" * 4
        file.write_bytes(data)
        with pytest.raises(ConversionError, match="not a zip file, or it is damaged"):
            convert(file, tmp_path / "out", toolkit="argos")
        assert not (tmp_path / "out").exists()

    def test_a_damaged_zip(self, package, tmp_path):
        data = package.read_bytes()
        for damaged in (data[: len(data) // 2], b"", data[:5000] + bytes(200) + data[5200:]):
            (tmp_path / "damaged.argosmodel").write_bytes(damaged)
            with pytest.raises(ConversionError, match="not a zip file, or it is damaged"):
                convert(tmp_path / "damaged.argosmodel", tmp_path / "out", toolkit="argos")
        assert not (tmp_path / "out").exists()
