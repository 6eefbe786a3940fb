"""The translation pipeline that Transformers 5 removed, for RelPos models and for every other text-to-text model.

Loading this file changes nothing in Transformers: the Hub serves it with each model. `register_translation` brings the
task back, and the package calls it on import.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from types import GeneratorType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, Pipeline, pipelines
from transformers.utils import ModelOutput, logging

logger = logging.get_logger(__name__)

_TASK = "translation"
_GENERATION_PARAMETERS = vars(GenerationConfig()).keys()
_LENGTH_LIMITS = {"max_length", "max_new_tokens"}
_TAG = re.compile(r">>(.+)<<")


def register_translation() -> None:
    """Make `pipeline("translation")` and `pipeline("translation_xx_to_yy")` work in this process.

    Does nothing where the task is there already, be it by an earlier call, by a second copy of this file or by another
    package. Every other task stays as it is, removed ones removed.
    """
    # The library asks this table before it asks its registry.
    pipelines.REMOVED_TASKS.pop(_TASK, None)
    registry = pipelines.PIPELINE_REGISTRY
    if _TASK in registry.supported_tasks:
        return
    # Not by `register_pipeline`: it leaves its entry on the class as well, whence `save_pretrained` writes it into the
    # config of any model, so that a Marian folder would ask its users to trust code that it does not need.
    registry.supported_tasks[_TASK] = {
        "impl": TranslationPipeline,
        "pt": (AutoModelForSeq2SeqLM,),
        "default": {},  # no model is downloaded unless it was named
        "type": "text",
    }
    registry.check_task = _accept_language_pairs(registry.check_task)


def _accept_language_pairs(check_task: Callable[[str], tuple]) -> Callable[[str], tuple]:
    """Wrap the registry's `check_task`, which knows tasks by their exact names only."""

    def check(task: str) -> tuple[str, dict, Any]:
        if not task.startswith(f"{_TASK}_"):
            return check_task(task)
        pair = _language_pair(task)
        if pair is None:
            raise KeyError(
                f"Unknown task {task!r}: a translation task is named 'translation' or 'translation_xx_to_yy'."
            )
        name, entry, _ = check_task(_TASK)
        return name, entry, pair

    return check


def _language_pair(task: str) -> tuple[str, str] | None:
    """Source and target of `translation_en_to_de`, `translation_en_XX_to_de_DE`, ...; None where none is named."""
    match = re.fullmatch(rf"{_TASK}_(.+?)_to_(.+)", task)
    return (match[1], match[2]) if match else None


def _primary(language: str) -> str:
    """The language of a code without its region or script."""
    return re.split("[-_]", language)[0].lower()


def language_tags(tokenizer: Any) -> dict[str, int]:
    """Target languages that a tokenizer has tag tokens for, `>>de<<` at the start of a source, with the tokens' ids.

    So mark Marian and RelPos models of several target languages what to translate into; other tokenizers have none.
    """
    tokens = {*tokenizer.get_added_vocab(), *getattr(tokenizer, "supported_language_codes", ())}
    tags = sorted(filter(_TAG.fullmatch, tokens))
    return {_TAG.fullmatch(tag)[1]: tokenizer.convert_tokens_to_ids(tag) for tag in tags}


class TranslationPipeline(Pipeline):
    """Translate text with any encoder-decoder model that reads and writes text.

    Answers as the pipeline of Transformers 4 did: see `__call__`.

    Languages are named by `src_lang=` and `tgt_lang=`, here or in a call, or by the task's name
    (`translation_en_to_de`), in the codes of the model's tokenizer. Models of many languages (mBART, NLLB, M2M100) need
    both; a model whose sources begin with a tag for the target's language (RelPos, Marian) needs `tgt_lang`; a T5 takes
    its prefix and its settings for the pair from its config (`task_specific_params`); a model of one pair needs neither.

    Generation parameters (`num_beams`, `max_new_tokens`, ...) are those of `generate`, here or in a call. Where neither
    the user nor the model's generation config limits the length, a translation has at most 2 n + 50 tokens for the n
    tokens of the longest source in its batch, or as many as the model has positions for. Vaswani et al. 2017 decode up
    to n + 50; the factor leaves room for languages that need more tokens than the source's.

    Args:
        model ([`PreTrainedModel`]): An encoder-decoder model with `generate`.
        tokenizer ([`PreTrainedTokenizerBase`]): Its tokenizer.
        src_lang, tgt_lang (`str`, *optional*): Languages of source and target.
        kwargs: Those of [`Pipeline`] (`device`, `batch_size`, `num_workers`, ...), of `__call__` and of `generate`.

    Raises:
        ValueError: The model does not translate text, the tokenizer is missing, or it has no such language.

    Example:

    ```python
    >>> import relpos
    >>> from transformers import pipeline

    >>> translator = pipeline("translation", model="path/to/model")
    >>> translator("Save the file.")
    [{'translation_text': 'Speichern Sie die Datei.'}]
    >>> translator(["Save the file.", "Close the window."], batch_size=2, num_beams=4)
    [{'translation_text': 'Speichern Sie die Datei.'}, {'translation_text': 'Schließen Sie das Fenster.'}]
    ```"""

    _pipeline_calls_generate = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = self.model
        if not (model.can_generate() and model.config.is_encoder_decoder and model.main_input_name == "input_ids"):
            raise ValueError(
                f"`model` is a {type(model).__name__}, and translation needs an encoder-decoder model that reads and "
                "generates text, such as AutoModelForSeq2SeqLM loads."
            )
        if self.tokenizer is None:
            raise ValueError("`tokenizer` is None, and translation needs the tokenizer of the model.")
        self._tags = language_tags(self.tokenizer)
        for name, language in zip(("src_lang", "tgt_lang"), _language_pair(self.task) or ()):
            if name not in self._preprocess_params:
                self._check_language(name, language)
                self._preprocess_params[name] = self._forward_params[name] = language

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Translate one text, or many.

        Args:
            inputs: A string; a list or another sequence of strings (a column of a dataset, say); or, to be read as
                translations are asked for, a torch `Dataset` (`KeyDataset` makes one of a column) or an iterator of
                strings.
            return_text (`bool`, *optional*): Answer with `translation_text`: the default unless `return_tensors`.
            return_tensors (`bool`, *optional*, defaults to `False`): Answer with `translation_token_ids`, a tensor of
                [length] with padding at its end.
            clean_up_tokenization_spaces (`bool`, *optional*, defaults to `False`): Remove spaces before punctuation.
            truncation (`bool` or `str`, *optional*, defaults to `False`): How the tokenizer cuts long sources. Nothing
                is ever cut unless asked for.
            src_lang, tgt_lang (`str`, *optional*): Languages of source and target.
            batch_size (`int`, *optional*): Number of texts that the model translates at once, 1 by default.
            kwargs: Generation parameters, as for `generate`.

        Returns:
            For a string, the list of its hypotheses: one `dict`, or `num_return_sequences` of them, the best first. For
            a sequence, a list with one entry per text: its `dict`, or with `num_return_sequences` above 1 the list of
            its hypotheses. An empty sequence gives an empty list. For a dataset or an iterator, an iterator over one
            list of hypotheses per text.

        Raises:
            ValueError: An input is no string, a language is missing or unknown, or a source is longer than the table of
                positions of the model.
        """
        if isinstance(inputs, (str, bytes)) or not isinstance(inputs, (Sequence, Iterator, torch.utils.data.Dataset)):
            _check_text(inputs)
            return super().__call__(inputs, **kwargs)
        if isinstance(inputs, Sequence):
            return self._translate_list(list(inputs), **kwargs)
        if isinstance(inputs, Iterator):
            # The library streams generators, and no other iterator.
            inputs = inputs if isinstance(inputs, GeneratorType) else (text for text in inputs)
        elif hasattr(inputs, "__len__") and len(inputs) == 0:
            return iter(())  # the library looks at the first item
        return super().__call__(inputs, **kwargs)

    def _translate_list(self, texts: list[str], **kwargs: Any) -> list:
        for index, text in enumerate(texts):
            _check_text(text, f" at index {index}")
        if not texts:
            return []
        results = super().__call__(texts, **kwargs)
        return [result[0] for result in results] if all(len(result) == 1 for result in results) else results

    def _sanitize_parameters(
        self,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        truncation: bool | str | None = None,
        return_text: bool | None = None,
        return_tensors: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        languages = _given(src_lang=src_lang, tgt_lang=tgt_lang)
        for name, language in languages.items():
            self._check_language(name, language)
        if return_text is False and not return_tensors:
            raise ValueError("`return_text` is False without `return_tensors=True`, which leaves nothing to return.")
        postprocess = _given(
            return_text=return_text,
            return_tensors=return_tensors,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
        )
        # The languages decide on the prefix of the source and on settings of the generation.
        return {**languages, **_given(truncation=truncation)}, {**languages, **generate_kwargs}, postprocess

    def _check_language(self, name: str, language: str) -> None:
        """Refuse a language that the model does not have, and a code that the tokenizer does not have: most of them would
        read it as the unknown token."""
        tags = language_tags(self.tokenizer)
        if tags and name == "tgt_lang" and language not in tags:
            raise ValueError(f"`{name}` is {language!r}, which this model has no tag for; it knows {list(tags)}.")
        own = getattr(self.model.config, "source_language" if name == "src_lang" else "target_language", None)
        if isinstance(own, str) and _primary(own) != _primary(language):
            raise ValueError(f"`{name}` is {language!r}, and this model has {own!r}.")
        if not hasattr(self.tokenizer, "_build_translation_inputs"):
            return
        tokens = {*getattr(self.tokenizer, "lang_code_to_id", ()), *self.tokenizer.get_added_vocab()}
        codes = {token for token in tokens if not token.startswith("<")}
        # SeamlessM4T and PLBart have tokens like `__eng__` and take `eng`.
        codes |= {code.strip("_") for code in codes}
        if language not in codes:
            known = sorted(code for code in codes if not code.startswith("__"))
            raise ValueError(f"`{name}` is {language!r}, which this tokenizer does not know; it knows {known}.")

    def _settings_of_pair(self, src_lang: str | None, tgt_lang: str | None) -> dict[str, Any]:
        """What the model's config sets for a pair of languages: T5's prefix, beams, ..."""
        tasks = getattr(self.model.config, "task_specific_params", None) or {}
        task = f"{_TASK}_{src_lang}_to_{tgt_lang}" if src_lang and tgt_lang else _TASK
        pairs = sorted(name for name in tasks if _language_pair(name))
        if pairs and (src_lang or tgt_lang) and task not in pairs:
            logger.warning_once(
                f"The model's config has no settings for {src_lang=} and {tgt_lang=}, but for {', '.join(pairs)}."
            )
        return tasks.get(task) or {}

    def preprocess(
        self,
        text: str,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        truncation: bool | str = False,
    ) -> dict[str, Any]:
        """Tokenize one source.

        Returns:
            `input_ids` and `attention_mask` of [1, length], and for models of many languages `forced_bos_token_id`.
        """
        _check_text(text)
        text = (self._settings_of_pair(src_lang, tgt_lang).get("prefix", self.prefix) or "") + text
        options = {"return_tensors": "pt", "truncation": truncation}
        limit = _position_limit(self.model.get_encoder())
        if truncation and limit is not None and limit < self.tokenizer.model_max_length:
            options["max_length"] = limit
        # Tokenizers of many languages mark the source's language and name the token that starts the target.
        if (build := getattr(self.tokenizer, "_build_translation_inputs", None)) is not None:
            inputs = build(text, src_lang=src_lang, tgt_lang=tgt_lang, **options)
        else:
            inputs = self.tokenizer(text, **options)
        inputs.pop("token_type_ids", None)  # `generate` refuses what the model does not take
        if self._tags:
            self._tag(inputs, tgt_lang)
        if inputs["input_ids"].shape[1] == 0:
            inputs.update(self._end_of_sequence())
        length = inputs["input_ids"].shape[1]
        if limit is not None and length > limit:
            raise ValueError(
                f"The source has {length} tokens and the model has positions for {limit}: split the text, or pass "
                "`truncation=True` to drop its end."
            )
        return inputs

    def _tag(self, inputs: dict[str, torch.Tensor], tgt_lang: str | None) -> None:
        """Put the tag of the target language before a source, [1, length], that has none."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if ids.shape[1] and ids[0, 0].item() in self._tags.values():
            return
        if tgt_lang is None:
            raise ValueError(f"`tgt_lang` must say which language to translate into; this model knows {[*self._tags]}.")
        inputs["input_ids"] = torch.cat([ids.new_tensor([[self._tags[tgt_lang]]]), ids], dim=1)
        inputs["attention_mask"] = torch.cat([mask.new_ones(1, 1), mask], dim=1)

    def _end_of_sequence(self) -> dict[str, torch.Tensor]:
        """What an empty text is where the tokenizer adds no token of its own: models cannot read no token at all."""
        tokens = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        token = next((token for token in tokens if token is not None), None)
        if token is None:
            raise ValueError(
                "The text is empty, and the tokenizer has neither `eos_token` nor `pad_token` to stand for it."
            )
        return {"input_ids": torch.tensor([[token]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}

    def _forward(
        self,
        model_inputs: dict[str, Any],
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        **generate_kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Generate translations of a padded batch of sources.

        Returns:
            `output_ids` of [batch, num_return_sequences, length].
        """
        batch_size, source_length = model_inputs["input_ids"].shape
        forced_bos = model_inputs.pop("forced_bos_token_id", None)
        if isinstance(forced_bos, list):  # one per text of the batch, and all of one call have the same target language
            forced_bos = forced_bos[0]
        user = generate_kwargs
        if "generation_config" not in user:  # which replaces the pipeline's parameters as a whole
            user = {**self._generate_kwargs, **user}
        own = self._parameters_not_set(
            {
                **self._settings_of_pair(src_lang, tgt_lang),
                "max_new_tokens": self._default_max_new_tokens(source_length),
            },
            by=user,
        )
        if forced_bos is not None and "forced_bos_token_id" not in user:
            own["forced_bos_token_id"] = forced_bos
        arguments = self._prepare_generate_kwargs(generate_kwargs, **own)
        if "max_new_tokens" in arguments:
            arguments.setdefault("max_length", None)  # or `generate` warns of the one that the model has
        output_ids = self.model.generate(**model_inputs, **arguments, **self._helpers(arguments))
        if isinstance(output_ids, ModelOutput):
            output_ids = output_ids.sequences
        if user.get("generation_config") is None and not _LENGTH_LIMITS & user.keys():
            self._warn_of_cut(output_ids, self._get_set_generation_params(arguments))
        return {"output_ids": output_ids.reshape(batch_size, -1, output_ids.shape[-1])}

    def _default_max_new_tokens(self, source_length: int) -> int:
        length = 2 * source_length + 50
        limit = _position_limit(self.model.get_decoder())
        return length if limit is None else min(length, limit)

    def _parameters_not_set(self, defaults: dict[str, Any], *, by: dict[str, Any]) -> dict[str, Any]:
        """The generation parameters among `defaults` that neither the user nor the model's generation config sets."""
        known = self._get_set_generation_params(by)
        own = {}
        for name, value in defaults.items():
            # Two limits of the length at once would be a contradiction: the first one stands.
            limited = name in _LENGTH_LIMITS and _LENGTH_LIMITS & (known.keys() | own.keys())
            if name in _GENERATION_PARAMETERS and name not in known and not limited:
                own[name] = value
        return own

    def _helpers(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Objects that `generate` needs for some parameters and that a pipeline has at hand."""
        helpers = _given(assistant_model=self.assistant_model, assistant_tokenizer=self.assistant_tokenizer)
        if self.assistant_tokenizer is not None or "stop_strings" in self._get_set_generation_params(arguments):
            helpers["tokenizer"] = self.tokenizer
        return {name: helper for name, helper in helpers.items() if name not in arguments}

    def _warn_of_cut(self, output_ids: torch.Tensor, parameters: dict[str, Any]) -> None:
        """Say so where translations, [hypotheses, length], ran into a limit that the user did not set."""
        new_tokens = parameters.get("max_new_tokens")  # to which the token that starts the target is added
        limit = parameters["max_length"] if new_tokens is None else new_tokens + 1
        if output_ids.shape[1] < limit:
            return
        cut = (output_ids[:, -1] != parameters.get("pad_token_id")).sum().item()
        if cut:
            logger.warning(
                f"{cut} of {output_ids.shape[0]} translations reached the limit of {limit} tokens and may be cut: pass "
                "a larger `max_new_tokens`."
            )

    def postprocess(
        self,
        model_outputs: dict[str, torch.Tensor],
        return_text: bool | None = None,
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """Decode the hypotheses of one source, `output_ids` of [1, num_return_sequences, length]."""
        records = []
        for output_ids in model_outputs["output_ids"][0]:
            record = {}
            if return_tensors:
                record["translation_token_ids"] = output_ids
            if return_text or not (return_tensors or return_text is False):
                record["translation_text"] = self.tokenizer.decode(
                    output_ids,
                    skip_special_tokens=True,
                    clean_up_tokenization_spaces=clean_up_tokenization_spaces,
                )
            records.append(record)
        return records


def _given(**arguments: Any) -> dict[str, Any]:
    """The arguments that were given, so that a call replaces only those of the pipeline that it names."""
    return {name: value for name, value in arguments.items() if value is not None}


def _check_text(text: Any, where: str = "") -> None:
    if not isinstance(text, str):
        raise ValueError(
            f"The input{where} is of type {type(text).__name__} and must be a string: pass a string, a sequence, an "
            "iterator or a torch Dataset of strings (for one column of a dataset, `dataset['name']` or `KeyDataset`)."
        )


def _position_limit(coder: nn.Module) -> int | None:
    """Number of positions of an encoder or decoder that looks them up in a table; None where there is no such limit.

    Tables of positions are called `embed_positions` throughout Transformers. BART's has unused rows at its start, and
    M2M100 extends its own, which is no `nn.Embedding`.
    """
    table = getattr(coder, "embed_positions", None)
    return table.num_embeddings - getattr(table, "offset", 0) if isinstance(table, nn.Embedding) else None


__all__ = ["TranslationPipeline", "language_tags", "register_translation"]
