"""Writes fixtures/older: a small folder that the code of an older commit saved, with what that code answers.

mkdir older && git archive 766d4b6 | tar -x -C older && ln -s modeling_relpos older/relpos
PYTHONPATH=older python tests/model_cards/make_fixture_older.py older tests/model_cards/fixtures/older
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import relpos
from relpos import RelPosConfig, RelPosForConditionalGeneration

code, out = map(Path, sys.argv[1:])
assert Path(relpos.__file__).is_relative_to(code.resolve()), "this would record the answers of the present code"
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *alphabet])}
tokenizer = Tokenizer(models.BPE(vocabulary, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])

torch.manual_seed(0)
sides = {f"{side}_{field}": 2 for side in ("encoder", "decoder") for field in ("layers", "attention_heads")}
config = RelPosConfig(
    vocab_size=len(vocabulary), d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, max_relative_position=3, **sides
)
model = RelPosForConditionalGeneration(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)  # so that no two answers are alike
source, target = torch.randint(2, len(vocabulary), (2, 9)), torch.randint(2, len(vocabulary), (2, 4))
model.generation_config.max_length = 24
model.save_pretrained(out)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(out)
with torch.inference_mode():
    answers = {
        "source": source.tolist(),
        "target": target.tolist(),
        "generated": model.generate(source, num_beams=2, max_new_tokens=8).tolist(),
        "logits": model(input_ids=source, decoder_input_ids=target).logits.tolist(),
    }
(out / "answers.json").write_text(json.dumps(answers) + "\n")
