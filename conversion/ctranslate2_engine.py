"""Translates with an export for CTranslate2, behind the part of a model's interface that `relpos translate` uses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from relpos.training.loading import LoadedModel

from .ctranslate2_files import read_options, read_vocabularies
from .ctranslate2_format import import_ctranslate2
from .files import ConversionError


def load_engine(folder: str | Path, *, threads: int = 0) -> LoadedModel:
    """Open a folder that `relpos export --to ctranslate2` wrote.

    Args:
        folder: The export.
        threads: Threads of one translation; 0 leaves the number to CTranslate2.

    Raises:
        ConversionError: `ctranslate2` is not installed, the folder is no such export, or CTranslate2 cannot open it.
    """
    path = Path(folder)
    import_ctranslate2()
    for name in ("model.bin", "tokenizer_config.json", "generation_config.json"):
        if not (path / name).is_file():
            raise ConversionError(
                f"The model {folder} holds no {name}; --engine ctranslate2 reads what `relpos export --to ctranslate2` writes."
            )
    return LoadedModel(
        model=CTranslate2Model(path, threads=threads), tokenizer=AutoTokenizer.from_pretrained(path), name=str(folder)
    )


class CTranslate2Model:
    """An exported model with the few attributes of a Transformers model that translating needs.

    Args:
        folder: The export.
        threads: Threads of one translation; 0 leaves the number to CTranslate2.

    Raises:
        ConversionError: CTranslate2 cannot open the folder.
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
        try:
            self._translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=threads)
        except (RuntimeError, ValueError) as error:
            raise ConversionError(f"CTranslate2 cannot open the model {folder}: {error}.") from error

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any) -> torch.Tensor:
        """Translate a padded batch.

        Args:
            input_ids: [batch, sources].
            attention_mask: [batch, sources], zero at padding.
            generation_config: `num_beams`, `length_penalty`, `repetition_penalty`, `no_repeat_ngram_size`, and the
                limit on new tokens, as for `generate`.

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
            max_decoding_length=config.max_new_tokens or config.max_length,
            max_input_length=0,  # no source is ever cut
            return_end_token=True,
        )
        rows = [torch.tensor([self._start, *map(self._target_ids.__getitem__, r.hypotheses[0])]) for r in results]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=config.pad_token_id)

    def _tokens(self, ids: list[int]) -> list[str]:
        """Source tokens without what CTranslate2 adds."""
        tokens = [self._source[index] for index in ids]
        begin = 1 if self._source_bos is not None and tokens[:1] == [self._source_bos] else 0
        end = len(tokens) - 1 if self._source_eos is not None and tokens[-1:] == [self._source_eos] else len(tokens)
        return tokens[begin:end]
