"""Shaw relative position representations for Transformers. Importing it registers the Auto classes and the pipeline."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .configuration_relpos import RelPosConfig
from .modeling_relpos import RelPosForConditionalGeneration, RelPosModel
from .pipeline_relpos import TranslationPipeline, register_translation

AutoConfig.register("relpos", RelPosConfig, exist_ok=True)
AutoModel.register(RelPosConfig, RelPosModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(RelPosConfig, RelPosForConditionalGeneration, exist_ok=True)
register_translation()

__all__ = ["RelPosConfig", "RelPosForConditionalGeneration", "RelPosModel", "TranslationPipeline"]
