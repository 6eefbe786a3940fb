"""Translates with an export for CTranslate2, behind the part of a model's interface that `relpos translate` uses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from relpos.training.loading import LoadedModel

from .converter import refuse
from .ctranslate2_files import read_options, read_tokenizer, read_vocabularies
from .ctranslate2_format import import_ctranslate2
from .files import ConversionError

# Settings of a generation config that CTranslate2 has nothing like, with the values that change no translation.
_DROPPED: dict[str, tuple[Any, ...]] = {
    "do_sample": (None, False),
    "num_return_sequences": (None, 1),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}),
    "constraints": (None, []),
    "force_words_ids": (None, []),
    "exponential_decay_length_penalty": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "stop_strings": (None, []),
    "max_time": (None,),
}


def load_engine(folder: str | Path, *, threads: int = 0) -> LoadedModel:
    """Open a folder that `relpos export --to ctranslate2` wrote.

    Args:
        folder: The export.
        threads: Threads of one translation; 0 leaves the number to CTranslate2.

    Raises:
        ConversionError: `ctranslate2` is not installed, the folder is no such export or damaged, or its generation config
            asks for what CTranslate2 cannot do (all is named).
    """
    path = Path(folder)
    import_ctranslate2()
    for name in ("model.bin", "tokenizer_config.json", "generation_config.json"):
        if not (path / name).is_file():
            raise ConversionError(
                f"The model {folder} holds no {name}; --engine ctranslate2 reads what `relpos export --to ctranslate2` writes."
            )
    return LoadedModel(model=CTranslate2Model(path, threads=threads), tokenizer=read_tokenizer(path), name=str(folder))


class CTranslate2Model:
    """An exported model with the few attributes of a Transformers model that translating needs.

    Args:
        folder: The export.
        threads: Threads of one translation; 0 leaves the number to CTranslate2.

    Raises:
        ConversionError: CTranslate2 cannot open the folder, or do what its generation config says.
    """

    device = torch.device("cpu")

    def __init__(self, folder: Path, *, threads: int = 0):
        ctranslate2 = import_ctranslate2()
        options = read_options(folder)
        self._source, self._target = read_vocabularies(folder)
        self._target_ids = {token: index for index, token in enumerate(self._target)}
        # what CTranslate2 adds to sources by itself, and the tokenizer has added already
        self._source_bos = options["bos_token"] if options["add_source_bos"] else None
        self._source_eos = options["eos_token"] if options["add_source_eos"] else None
        self._start = self._target_ids[options["decoder_start_token"]]
        self.config = SimpleNamespace(longest_training_source=options["longest_training_source"])
        self.generation_config = GenerationConfig.from_pretrained(folder)
        refuse(_obstacles(self.generation_config), f"The generation config of {folder}")
        try:
            self._translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=threads)
        except (RuntimeError, ValueError) as error:
            raise ConversionError(f"CTranslate2 cannot open the model {folder}: {error}.") from error

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any) -> torch.Tensor:
        """Translate a padded batch.

        CTranslate2 takes tokens out before it normalises, so beams are ranked as with `renormalize_logits`.

        Args:
            input_ids: [batch, sources].
            attention_mask: [batch, sources], zero at padding.
            generation_config: `num_beams`, `length_penalty`, `repetition_penalty`, `no_repeat_ngram_size`,
                `bad_words_ids`, `suppress_tokens`, and the limits on new tokens, as for `generate`.

        Returns:
            [batch, 1 + targets]: the start token, the best hypothesis with its end token, and padding.
        """
        config = generation_config
        results = self._translator.translate_batch(
            [self._tokens(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True)],
            beam_size=config.num_beams or 1,
            length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
            repetition_penalty=config.repetition_penalty or 1.0,
            no_repeat_ngram_size=config.no_repeat_ngram_size or 0,
            suppress_sequences=self._suppressed(config),
            # neither counts the start token nor, of a minimum, the end token
            max_decoding_length=config.max_new_tokens or config.max_length - 1,
            min_decoding_length=max(config.min_new_tokens or 0, (config.min_length or 0) - 1, 0),
            max_input_length=0,  # no source is ever cut
            return_end_token=True,
        )
        rows = [torch.tensor([self._start, *map(self._target_ids.__getitem__, r.hypotheses[0])]) for r in results]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=config.pad_token_id)

    def _suppressed(self, config: Any) -> list[list[str]]:
        """Sequences that no translation may hold; as in `generate`, the end token is none of them."""
        sequences = [ids for ids in config.bad_words_ids or [] if ids != [config.eos_token_id]]
        sequences += [[index] for index in config.suppress_tokens or []]
        return [[self._target[index] for index in ids] for ids in sequences]

    def _tokens(self, ids: list[int]) -> list[str]:
        """Source tokens without what CTranslate2 adds."""
        tokens = [self._source[index] for index in ids]
        begin = 1 if self._source_bos is not None and tokens[:1] == [self._source_bos] else 0
        end = len(tokens) - 1 if self._source_eos is not None and tokens[-1:] == [self._source_eos] else len(tokens)
        return tokens[begin:end]


def _obstacles(config: GenerationConfig) -> list[str]:
    """What of a generation config CTranslate2 would leave out, or do otherwise."""
    values = {name: getattr(config, name, None) for name in _DROPPED}
    found = [
        f"{name}={value!r} (CTranslate2 has nothing like it)"
        for name, value in values.items()
        if value not in _DROPPED[name]
    ]
    if isinstance(config.eos_token_id, list) and len(config.eos_token_id) > 1:
        found.append(f"eos_token_id={config.eos_token_id} (one token ends a translation)")
    if config.repetition_penalty not in (None, 1.0) and (config.num_beams or 1) > 1:
        found.append(
            f"repetition_penalty={config.repetition_penalty} with num_beams={config.num_beams} (CTranslate2 penalises "
            "logits, and `generate` the log-probabilities of beams)"
        )
    return found
