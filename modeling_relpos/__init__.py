"""Shaw relative position representations for Transformers. Importing it registers the Auto classes and the pipeline."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration_relpos import RelPosConfig
    from .modeling_relpos import RelPosForConditionalGeneration, RelPosModel
    from .pipeline_relpos import TranslationPipeline
    from .tokenization_relpos import RelPosTokenizer
    from .tokenization_subword_text_relpos import RelPosSubwordTextTokenizer


def register() -> None:
    """Make this package's classes known to Transformers; done on import, and harmless to repeat."""
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )
    from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES

    from .configuration_relpos import RelPosConfig
    from .modeling_relpos import RelPosForConditionalGeneration, RelPosModel
    from .pipeline_relpos import TranslationPipeline, register_translation
    from .tokenization_relpos import RelPosTokenizer
    from .tokenization_subword_text_relpos import RelPosSubwordTextTokenizer

    AutoConfig.register("relpos", RelPosConfig, exist_ok=True)
    AutoModel.register(RelPosConfig, RelPosModel, exist_ok=True)
    AutoModelForSeq2SeqLM.register(RelPosConfig, RelPosForConditionalGeneration, exist_ok=True)
    # By name alone, not for the configuration's class: most RelPos models have an ordinary fast tokenizer.
    for tokenizer in (RelPosTokenizer, RelPosSubwordTextTokenizer):
        REGISTERED_TOKENIZER_CLASSES[tokenizer.__name__] = tokenizer
    register_translation()
    # `register` above serves look-ups by configuration class; the library's tests and some tools look by model type
    MODEL_MAPPING_NAMES["relpos"] = RelPosModel.__name__
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["relpos"] = RelPosForConditionalGeneration.__name__
    classes = (
        RelPosConfig,
        RelPosForConditionalGeneration,
        RelPosModel,
        RelPosSubwordTextTokenizer,
        RelPosTokenizer,
        TranslationPipeline,
    )
    globals().update({exported.__name__: exported for exported in classes})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    return globals()[name]


# Python imports this file before cli.py, and the `relpos` command answers --help without loading PyTorch: there, the
# classes are registered when a verb first needs them.
if Path(sys.argv[0] if sys.argv else "").stem != "relpos":
    register()

__all__ = [
    "RelPosConfig",
    "RelPosForConditionalGeneration",
    "RelPosModel",
    "RelPosSubwordTextTokenizer",
    "RelPosTokenizer",
    "TranslationPipeline",
]
