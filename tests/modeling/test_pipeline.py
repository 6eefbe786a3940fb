"""pipeline("translation"): the task that the package restores, and the pipeline behind it. Models of several languages
are `test_pipeline_languages.py`'s."""

import copy
import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import processors
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    M2M100Tokenizer,
    MarianMTModel,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    Pipeline,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForConditionalGeneration,
    pipeline,
    pipelines,
)
from transformers.pipelines.pt_utils import KeyDataset

import relpos
from relpos import RelPosConfig, RelPosForConditionalGeneration, TranslationPipeline
from relpos import pipeline_relpos as module
from relpos.configuration import preset

sys.path.insert(0, str(Path(__file__).parent))
from pipeline_parts import SOURCES, TARGETS, TINY, fast_tokenizer, marian, record_generate, texts_of

# ---------------------------------------------------------------------------------------------------------------------
# tokenizers and models
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return fast_tokenizer()


def overfit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Learn PAIRS by heart, so that every text has a translation of its own, which ends."""
    batch = tokenizer(SOURCES, text_target=TARGETS, padding=True, return_tensors="pt")
    batch["labels"].masked_fill_(batch["labels"] == tokenizer.pad_token_id, -100)
    batch.pop("token_type_ids", None)
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def trained(tokenizer) -> RelPosForConditionalGeneration:
    torch.manual_seed(0)
    return overfit(RelPosForConditionalGeneration(preset("tiny", vocab_size=len(tokenizer))), tokenizer)


@pytest.fixture
def translator(trained, tokenizer) -> TranslationPipeline:
    return pipeline("translation", model=trained, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def folder(trained, tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("relpos")
    trained.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run_without_package(script: str, *arguments: str, cwd: Path) -> str:
    """Run a script in a new process where `relpos` cannot be imported and no network is asked; its last line."""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['relpos'] = None\n{script}", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={
            "PATH": "",
            "HOME": str(cwd),
            "HF_HOME": str(cwd / "hub"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,  # a question about trust finds nobody to say yes
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------------------
# the task in Transformers
# ---------------------------------------------------------------------------------------------------------------------


def test_transformers_alone_refuses_the_task_and_the_file_alone_does_not_restore_it(tmp_path):
    """What `register_translation` relies on: if the library changes here, this test says so first."""
    script = """
import importlib.util
from transformers import pipeline, pipelines

def refused(task):
    try:
        pipeline(task)
    except KeyError as error:
        return "has been removed from transformers" in str(error)
    except ValueError:  # known, but no model was named
        return False

registry = pipelines.PIPELINE_REGISTRY
assert registry.supported_tasks is pipelines.SUPPORTED_TASKS
assert "translation" in pipelines.REMOVED_TASKS and "translation" not in registry.supported_tasks
assert refused("translation") and refused("translation_en_to_de") and refused("summarization")
others = {task: registry.check_task(task) for task in registry.get_supported_tasks()}

spec = importlib.util.spec_from_file_location("copy_of_pipeline_relpos", sys.argv[1])
copy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(copy)
assert refused("translation"), "loading the file must not change Transformers"

copy.register_translation()
assert not refused("translation") and not refused("translation_en_to_de") and refused("summarization")
assert {task: registry.check_task(task) for task in others} == others
print("done")
"""
    assert run_without_package(script, module.__file__, cwd=tmp_path) == "done"


def test_private_names_that_the_pipeline_relies_on(translator):
    for method in ("_prepare_generate_kwargs", "_get_set_generation_params", "_sanitize_parameters"):
        assert callable(getattr(Pipeline, method))
    for attribute in ("_generate_kwargs", "_preprocess_params", "_forward_params", "_postprocess_params", "prefix"):
        assert attribute in vars(translator)
    for attribute in ("assistant_model", "assistant_tokenizer"):
        assert getattr(translator, attribute) is None
    for tokenizer in (MBartTokenizer, MBart50Tokenizer, NllbTokenizer, M2M100Tokenizer):
        assert callable(tokenizer._build_translation_inputs)


def test_registering_again_changes_nothing():
    registry = pipelines.PIPELINE_REGISTRY
    entry, check_task = registry.supported_tasks["translation"], registry.check_task
    spec = importlib.util.spec_from_file_location("second_copy_of_pipeline_relpos", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)

    module.register_translation()
    copy.register_translation()

    assert registry.supported_tasks["translation"] is entry
    assert entry["impl"] is TranslationPipeline
    assert registry.check_task is check_task
    assert not hasattr(TranslationPipeline, "_registered_impl")


@pytest.mark.parametrize(
    ("task", "pair"),
    [
        ("translation", None),
        ("translation_en_to_de", ("en", "de")),
        ("translation_en_XX_to_de_DE", ("en_XX", "de_DE")),
        ("translation_eng_Latn_to_deu_Latn", ("eng_Latn", "deu_Latn")),
    ],
)
def test_names_of_the_task(task, pair):
    name, entry, options = pipelines.check_task(task)
    assert (name, options) == ("translation", pair)
    assert entry["impl"] is TranslationPipeline
    assert entry["pt"] == (AutoModelForSeq2SeqLM,)
    assert "translation" in pipelines.get_supported_tasks()


@pytest.mark.parametrize("task", ["translation_", "translation_en", "translation_en_de", "translation_to_de"])
def test_names_that_are_no_task(task):
    with pytest.raises(KeyError, match=f"Unknown task '{task}'.*translation_xx_to_yy"):
        pipelines.check_task(task)


def test_other_removed_tasks_stay_removed():
    for task in ("summarization", "text2text-generation", "question-answering"):
        with pytest.raises(KeyError, match="has been removed"):
            pipeline(task)


def test_no_model_is_downloaded_unless_it_is_named():
    with pytest.raises(ValueError, match="default"):
        pipeline("translation")
    with pytest.raises(ValueError, match="default"):
        pipeline("translation_en_to_fr")


# ---------------------------------------------------------------------------------------------------------------------
# inputs and outputs
# ---------------------------------------------------------------------------------------------------------------------


def test_a_string_gives_a_list_of_one_dict(translator):
    assert translator(SOURCES[0]) == [{"translation_text": TARGETS[0]}]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 7])
@pytest.mark.parametrize("container", [list, tuple, lambda texts: Dataset.from_dict({"en": texts})["en"]])
def test_a_sequence_gives_one_dict_per_text(translator, container, batch_size):
    assert texts_of(translator(container(SOURCES), batch_size=batch_size)) == TARGETS


def test_an_empty_sequence_gives_an_empty_list(translator):
    assert translator([]) == translator(()) == translator([], batch_size=4, num_return_sequences=2, num_beams=2) == []


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SOURCES)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: (text for text in SOURCES),
        lambda: iter(SOURCES),
        lambda: map(str, SOURCES),
        lambda: KeyDataset(Dataset.from_dict({"en": SOURCES}), "en"),
        Stream,
    ],
    ids=["generator", "iterator", "map", "KeyDataset", "IterableDataset"],
)
def test_datasets_and_iterators_give_an_iterator(translator, make, batch_size):
    results = translator(make(), batch_size=batch_size)
    assert not isinstance(results, list)
    assert [texts_of(result) for result in results] == [[target] for target in TARGETS]


def test_empty_datasets_and_iterators_give_an_empty_iterator(translator):
    assert list(translator(KeyDataset(Dataset.from_dict({"en": []}), "en"))) == []
    assert list(translator(iter(()))) == []


def test_an_iterator_is_read_as_translations_are_asked_for(translator):
    read = []

    def source() -> Iterator[str]:
        for text in SOURCES:
            read.append(text)
            yield text

    results = iter(translator(source(), batch_size=2))
    assert texts_of(next(results)) == TARGETS[:1]
    assert len(read) <= 2


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_hypotheses_stay_with_their_text(trained, tokenizer, batch_size):
    # in float64, since padding changes the order of sums and could swap hypotheses of nearly equal scores
    translator = pipeline("translation", model=copy.deepcopy(trained).double(), tokenizer=tokenizer)
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 40}
    alone = [translator(text, **options) for text in SOURCES]
    assert [len(hypotheses) for hypotheses in alone] == [3] * len(SOURCES)
    assert len({result["translation_text"] for hypotheses in alone for result in hypotheses}) > 2 * len(SOURCES)
    assert translator(SOURCES, batch_size=batch_size, **options) == alone
    assert list(translator(iter(SOURCES), batch_size=batch_size, **options)) == alone


def test_token_ids(translator, tokenizer):
    (result,) = translator(SOURCES[0], return_tensors=True)
    assert set(result) == {"translation_token_ids"}
    assert tokenizer.decode(result["translation_token_ids"], skip_special_tokens=True) == TARGETS[0]

    results = translator(SOURCES, return_tensors=True, return_text=True, batch_size=2)
    assert [result["translation_text"] for result in results] == TARGETS
    assert all(isinstance(result["translation_token_ids"], torch.Tensor) for result in results)


def test_nothing_to_return_is_refused(translator):
    with pytest.raises(ValueError, match="`return_text` is False"):
        translator(SOURCES[0], return_text=False)


def test_spaces_are_cleaned_up_only_when_asked(translator, monkeypatch):
    monkeypatch.setattr(translator.model, "generate", lambda input_ids, **_: self_made)
    self_made = translator.tokenizer("Die Datei . ", return_tensors="pt")["input_ids"]
    assert translator(SOURCES[0])[0]["translation_text"].rstrip() == "Die Datei ."
    cleaned = translator(SOURCES[0], clean_up_tokenization_spaces=True)
    assert cleaned[0]["translation_text"].rstrip() == "Die Datei."


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_blank_text(translator, text):
    assert isinstance(translator(text)[0]["translation_text"], str)
    assert texts_of(translator([SOURCES[0], text, SOURCES[1]], batch_size=3))[::2] == TARGETS[:2]


def test_blank_text_of_a_tokenizer_without_special_tokens(trained):
    bare = fast_tokenizer()
    bare._tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert bare("")["input_ids"] == []
    assert len(pipeline("translation", model=trained, tokenizer=bare)(["", "Save"], batch_size=2)) == 2

    bare.eos_token = bare.pad_token = None
    with pytest.raises(ValueError, match=r"neither `eos_token` nor `pad_token`"):
        pipeline("translation", model=trained, tokenizer=bare)("")


@pytest.mark.parametrize(
    "wrong", [None, 7, b"Save the file.", {"text": "Save the file."}, {"Save"}, Dataset.from_dict({"en": SOURCES})]
)
def test_what_is_no_text_is_refused(translator, wrong):
    with pytest.raises(ValueError, match=f"is of type {type(wrong).__name__} and must be a string"):
        translator(wrong)


def test_what_is_no_text_in_a_list_is_refused_before_work_starts(translator, monkeypatch):
    calls = record_generate(monkeypatch, translator.model)
    with pytest.raises(ValueError, match="at index 1 is of type int"):
        translator([SOURCES[0], 7])
    with pytest.raises(ValueError, match="at index 0 is of type list"):
        translator([SOURCES])
    assert calls == []
    with pytest.raises(ValueError, match="is of type NoneType"):
        list(translator(iter([SOURCES[0], None])))


# ---------------------------------------------------------------------------------------------------------------------
# length
# ---------------------------------------------------------------------------------------------------------------------


def test_long_sources_are_never_cut_unless_asked(trained, tmp_path, monkeypatch):
    tokenizer = fast_tokenizer(model_max_length=8)
    tokenizer(SOURCES[4], truncation=True)  # leaves truncation switched on in the fast tokenizer
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"]["max_length"] == 8
    translator = pipeline("translation", model=trained, tokenizer=str(tmp_path))
    calls = record_generate(monkeypatch, trained)

    text = " ".join(SOURCES * 20)
    translator(text, max_new_tokens=2)
    translator([text], max_new_tokens=2, truncation=True)
    assert [call["input_ids"].shape[1] for call in calls] == [len(fast_tokenizer()(text)["input_ids"]), 8]
    assert calls[0]["input_ids"].shape[1] > 500


def test_a_source_beyond_the_table_of_positions_is_refused_or_cut(tokenizer, monkeypatch):
    model = marian(tokenizer)
    translator = pipeline("translation", model=model, tokenizer=tokenizer)
    calls = record_generate(monkeypatch, model)
    text = " ".join(SOURCES)
    with pytest.raises(ValueError, match=r"The source has \d+ tokens and the model has positions for 32: "):
        translator(text)
    assert calls == []
    translator(text, truncation=True)
    assert calls[0]["input_ids"].shape == (1, 32)


def test_positions_of_bart_are_counted_without_its_unused_rows(tokenizer, monkeypatch):
    model = BartForConditionalGeneration(
        BartConfig(**TINY, vocab_size=len(tokenizer), max_position_embeddings=12, pad_token_id=0, eos_token_id=1)
    ).eval()
    model.generation_config.max_length = None
    calls = record_generate(monkeypatch, model)
    translator = pipeline("translation", model=model, tokenizer=tokenizer)
    translator(SOURCES[4], truncation=True)
    assert calls[0]["input_ids"].shape == (1, 12)
    assert calls[0]["max_new_tokens"] == 12


def test_relative_positions_have_no_ceiling_and_learned_ones_do(tokenizer, monkeypatch):
    learned = RelPosForConditionalGeneration(
        preset("tiny", vocab_size=len(tokenizer), absolute_position="learned", max_position_embeddings=12)
    )
    with pytest.raises(ValueError, match="positions for 12"):
        pipeline("translation", model=learned, tokenizer=tokenizer)(" ".join(SOURCES))

    calls = record_generate(monkeypatch, learned)
    pipeline("translation", model=learned, tokenizer=tokenizer)("Save")
    assert calls[0]["max_new_tokens"] == 12


def test_length_without_any_setting_grows_with_the_source(translator, tokenizer, monkeypatch, recwarn):
    calls = record_generate(monkeypatch, translator.model)
    translator(SOURCES[0])
    translator(SOURCES, batch_size=len(SOURCES))
    lengths = [len(tokenizer(text)["input_ids"]) for text in SOURCES]
    assert [call["max_new_tokens"] for call in calls] == [2 * lengths[0] + 50, 2 * max(lengths) + 50]
    assert not [warning for warning in recwarn if "max_length" in str(warning.message)]


def test_a_generation_config_of_a_call_replaces_the_parameters_of_the_pipeline(trained, tokenizer, monkeypatch):
    calls = record_generate(monkeypatch, trained)
    translator = pipeline("translation", model=trained, tokenizer=tokenizer, max_new_tokens=2)
    assert translator(SOURCES[0])[0]["translation_text"] != TARGETS[0]
    assert texts_of(translator(SOURCES[0], generation_config=GenerationConfig(num_beams=2))) == TARGETS[:1]
    config = calls[-1]["generation_config"]
    assert (config.num_beams, config.max_new_tokens) == (2, 2 * len(tokenizer(SOURCES[0])["input_ids"]) + 50)


def test_length_that_the_model_or_the_user_sets_stands(tokenizer, monkeypatch):
    model = marian(tokenizer)
    model.generation_config = GenerationConfig(
        max_length=9, pad_token_id=0, eos_token_id=None, decoder_start_token_id=0
    )
    calls = record_generate(monkeypatch, model)
    translator = pipeline("translation", model=model, tokenizer=tokenizer)

    def length(**kwargs) -> int:
        return len(translator("Save", return_tensors=True, **kwargs)[0]["translation_token_ids"])

    assert length() == 9
    assert "max_new_tokens" not in calls[-1]
    assert length(max_length=5) == 5
    assert length(max_new_tokens=5) == 6
    assert length(generation_config=GenerationConfig(max_new_tokens=3)) == 4

    short = pipeline("translation", model=model, tokenizer=tokenizer, max_new_tokens=2, num_beams=2)
    assert short("Save", return_tensors=True)[0]["translation_token_ids"].shape == (3,)
    assert calls[-1]["num_beams"] == 2


def test_a_cut_translation_is_reported(tokenizer, translator, caplog, monkeypatch):
    model = marian(tokenizer, eos_token_id=None)
    model.generation_config.eos_token_id = None
    endless = pipeline("translation", model=model, tokenizer=tokenizer)
    monkeypatch.setattr(module.logger, "propagate", True)
    endless(SOURCES[:2], batch_size=2)
    assert "2 of 2 translations reached the limit of 33 tokens and may be cut" in caplog.text
    caplog.clear()

    endless("Save", max_new_tokens=3)  # the user's own limit
    translator(SOURCES)  # translations that end
    assert caplog.text == ""


# ---------------------------------------------------------------------------------------------------------------------
# generation
# ---------------------------------------------------------------------------------------------------------------------


def test_languages_have_no_effect_where_a_model_has_one_pair(trained, tokenizer):
    named = pipeline("translation_en_to_de", model=trained, tokenizer=tokenizer)
    assert texts_of(named(SOURCES)) == texts_of(named(SOURCES, src_lang="xx", tgt_lang="yy")) == TARGETS


def test_another_language_than_the_models_is_refused(trained, tokenizer, monkeypatch):
    monkeypatch.setattr(trained.config, "source_language", "en", raising=False)
    monkeypatch.setattr(trained.config, "target_language", "de_DE", raising=False)
    with pytest.raises(ValueError, match="`tgt_lang` is 'fr', and this model has 'de_DE'"):
        pipeline("translation_en_to_fr", model=trained, tokenizer=tokenizer)
    translator = pipeline("translation_en_to_de", model=trained, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="`src_lang` is 'de', and this model has 'en'"):
        translator(SOURCES, src_lang="de")
    assert texts_of(translator(SOURCES, src_lang="en-GB", tgt_lang="de")) == TARGETS


@pytest.mark.parametrize("given", ["call", "pipeline"])
def test_a_limit_on_new_tokens_is_no_reason_to_warn(trained, tokenizer, caplog, monkeypatch, given):
    """The model's own `max_length`, as ours are saved with."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(trained.generation_config, "max_length", 512)
    here, there = ({}, {"max_new_tokens": 2}) if given == "call" else ({"max_new_tokens": 2}, {})
    translator = pipeline("translation", model=trained, tokenizer=tokenizer, **here)
    assert translator(SOURCES[0], return_tensors=True, **there)[0]["translation_token_ids"].shape == (3,)
    assert "max_length" not in caplog.text


def test_token_types_do_not_reach_the_model(trained, monkeypatch):
    tokenizer = fast_tokenizer(model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    assert "token_type_ids" in tokenizer("Save")
    calls = record_generate(monkeypatch, trained)
    assert texts_of(pipeline("translation", model=trained, tokenizer=tokenizer)(SOURCES, batch_size=2)) == TARGETS
    assert all("attention_mask" in call and "token_type_ids" not in call for call in calls)


def test_padding_on_the_left(trained):
    translator = pipeline("translation", model=trained, tokenizer=fast_tokenizer(padding_side="left"), batch_size=3)
    assert texts_of(translator(SOURCES)) == TARGETS


def test_outputs_as_a_dictionary(translator):
    options = {"return_dict_in_generate": True, "output_scores": True, "num_beams": 2, "num_return_sequences": 2}
    results = translator(SOURCES, batch_size=2, **options)
    assert [texts_of(result)[0] for result in results] == TARGETS


def test_stop_strings(translator):
    assert translator(SOURCES[0], stop_strings=["Sie"])[0]["translation_text"] == "Speichern Sie"


def test_an_assistant_changes_nothing_but_time(trained, tokenizer, monkeypatch):
    calls = record_generate(monkeypatch, trained)
    torch.manual_seed(1)
    assistant = RelPosForConditionalGeneration(preset("tiny", vocab_size=len(tokenizer), decoder_layers=1)).eval()
    translator = pipeline("translation", model=trained, tokenizer=tokenizer, assistant_model=assistant)
    assert texts_of(translator(SOURCES)) == TARGETS
    assert calls[0]["assistant_model"] is assistant


def test_unknown_parameters_are_refused(translator):
    with pytest.raises(ValueError, match="num_beems"):
        translator(SOURCES[0], num_beems=4)


@pytest.mark.parametrize(
    "model",
    [
        BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)),
        GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1)),
        WhisperForConditionalGeneration(WhisperConfig(**TINY, num_mel_bins=4, vocab_size=50300, pad_token_id=0)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_model_that_does_not_translate_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match=f"`model` is a {type(model).__name__}.*encoder-decoder"):
        pipeline("translation", model=model, tokenizer=tokenizer)


def test_a_missing_tokenizer_is_refused(trained):
    with pytest.raises(ValueError, match="`tokenizer` is None"):
        TranslationPipeline(trained)


# ---------------------------------------------------------------------------------------------------------------------
# loading and saving
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["translation", "translation_en_to_de"])
def test_from_a_path_without_asking_for_trust(folder, task):
    for model in (folder, str(folder)):
        translator = pipeline(task, model=model)
        assert type(translator) is TranslationPipeline
        assert texts_of(translator(SOURCES)) == TARGETS


def test_device_map_and_dtype(folder):
    assert pipeline("translation", model=folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    translator = pipeline("translation", model=folder, device_map="auto")
    assert texts_of(translator(SOURCES, batch_size=2)) == TARGETS


def test_a_config_that_was_passed_can_still_be_saved(folder, tmp_path):
    config = RelPosConfig.from_pretrained(folder)
    translator = pipeline("translation", model=str(folder), config=config)
    assert texts_of(translator(SOURCES)) == TARGETS
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(config.to_json_string(use_diff=True))
    assert RelPosConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_a_pipeline_saves_a_folder_that_explains_itself(translator, tmp_path):
    translator.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["custom_pipelines"]["translation"]
    assert entry["impl"] == "pipeline_relpos.TranslationPipeline"
    assert entry["pt"] == ["AutoModelForSeq2SeqLM"]
    assert (tmp_path / "pipeline_relpos.py").read_bytes() == Path(module.__file__).read_bytes()
    assert texts_of(pipeline("translation", model=tmp_path)(SOURCES)) == TARGETS


def test_a_marian_pipeline_saves_no_demand_for_trust(tokenizer, tmp_path):
    pipeline("translation", model=marian(tokenizer), tokenizer=tokenizer).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "custom_pipelines" not in config
    assert "auto_map" not in config
    assert list(tmp_path.glob("*.py")) == []
    reloaded = pipeline("translation", model=tmp_path, trust_remote_code=False)
    assert isinstance(reloaded.model, MarianMTModel)
    assert len(reloaded(SOURCES[:2], max_new_tokens=2)) == 2


@pytest.mark.slow  # two processes that load everything anew
def test_without_the_package(folder, tmp_path):
    """The saved folder brings its own pipeline; saved from there and loaded again, it still does."""
    script = """
import json
from transformers import AutoModelForSeq2SeqLM, pipeline, pipelines

source, saved, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
try:
    pipeline("translation", model=source, trust_remote_code=False)
except ValueError:
    pass
else:
    raise AssertionError("code was run without trust")

translator = pipeline("translation", model=source, trust_remote_code=True)
results = [translator(texts, batch_size=2), translator(texts[0], num_beams=2, num_return_sequences=2)]
results.append([found[0] for found in translator(iter(texts))])
assert "translation" in pipelines.REMOVED_TASKS, "the folder's code must not change Transformers"
assert pipeline(model=source, trust_remote_code=True)(texts[0]) == results[0][:1]
translator.save_pretrained(saved)
print(json.dumps(results))
"""
    saved = tmp_path / "saved"
    arguments = str(saved), json.dumps(SOURCES)
    first = json.loads(run_without_package(script, str(folder), *arguments, cwd=tmp_path))
    assert texts_of(first[0]) == texts_of(first[2]) == TARGETS
    assert texts_of(first[1])[0] == TARGETS[0]
    assert (saved / "pipeline_relpos.py").read_bytes() == Path(module.__file__).read_bytes()
    again = json.loads(run_without_package(script, str(saved), str(tmp_path / "again"), arguments[1], cwd=tmp_path))
    assert again == first


def test_with_the_package_a_trusted_folder_works_as_well(folder):
    translator = pipeline("translation", model=folder, trust_remote_code=True)
    assert texts_of(translator(SOURCES)) == TARGETS


def test_the_file_can_travel():
    """It imports nothing but torch, Transformers and the standard library, and no sibling."""
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    assert get_relative_imports(module.__file__) == []
    assert set(get_imports(module.__file__)) - sys.stdlib_module_names == {"torch", "transformers"}
    assert relpos.TranslationPipeline is TranslationPipeline
