"""What someone does with a saved folder who has never heard of the package `relpos`; run by `self_contained.py`.

Runs as the whole program of a process of its own, FOLDER AGAIN TEXT as its arguments, where AGAIN is a folder to save to,
and prints one line of JSON for each step: {"step": ..., "problem": null or a sentence, "answer": ...}.
"""

# ruff: noqa: E402 (the package is hidden before anything is imported)
import json
import re
import sys
from pathlib import Path

sys.modules["relpos"] = None  # an import fails as if the package had never been installed

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
folder, again, text = sys.argv[1:]
trust = {"trust_remote_code": True}


def load_config():
    config = AutoConfig.from_pretrained(folder, **trust)
    if not config.custom_pipelines:
        raise ValueError("config.json names no pipeline")


def load_tokenizer():
    return len(AutoTokenizer.from_pretrained(folder, **trust)(text)["input_ids"])


def load_model():
    AutoModel.from_pretrained(folder, **trust)


def load_full_model():
    _, report = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True, **trust)
    for name, keys in report.items():
        if keys:
            raise ValueError(f"{name.replace('_', ' ')}: {sorted(map(str, keys))[0]}")


def generate():
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, **trust)
    inputs = tokenizer([text], return_tensors="pt")
    return tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)[0]


def translate():
    translator = pipeline("translation", model=folder, **trust)
    # a model of several target languages must be told which, by the tag that its tokenizer has for it
    tags = sorted(token for token in translator.tokenizer.get_added_vocab() if re.fullmatch(">>.+<<", token))
    language = {"tgt_lang": tags[0][2:-2]} if tags else {}
    return translator(text, **language)[0]["translation_text"]


def tune_and_save():
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, **trust).train()
    inputs = tokenizer([text], text_target=[text], return_tensors="pt")
    model(**inputs).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(again)
    tokenizer.save_pretrained(again)
    reloaded = AutoModelForSeq2SeqLM.from_pretrained(again, **trust)
    AutoTokenizer.from_pretrained(again, **trust)
    if not all(map(torch.equal, model.state_dict().values(), reloaded.state_dict().values())):
        raise ValueError("the model that was saved again has other weights")
    for file in Path(folder).glob("*_relpos.py"):
        if not Path(again, file.name).is_file():
            raise ValueError(f"the folder that was saved again lacks {file.name}")


STEPS = {
    "AutoConfig": load_config,
    "AutoTokenizer": load_tokenizer,
    "AutoModel": load_model,
    "AutoModelForSeq2SeqLM, every weight in its place": load_full_model,
    "generate": generate,
    'pipeline("translation")': translate,
    "fine-tuning, saving and loading again": tune_and_save,
}

for step, run in STEPS.items():
    answer, problem = None, None
    try:
        answer = run()
    except Exception as error:
        problem = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    print(json.dumps({"step": step, "problem": problem, "answer": answer}), flush=True)
