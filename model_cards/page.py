"""A page to translate with a model and to see what its heads attend to: `relpos demo`, and the app.py of a Space.

It needs gradio, PyTorch and Transformers and not the package `relpos`, since on the Hub the model brings its own code. As
a Space it shows the model that README.md beside it lists.
"""

import copy
import html
import math
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

try:
    import gradio as gr
except ImportError:
    raise ImportError("The page needs gradio: run `pip install 'relpos[demo]'`.") from None

LONGEST_TEXT = 2000  # characters
MOST_DRAWN = 40  # tokens on a side
CELL = 22  # pixels
LETTER = 7  # pixels, about
NARROWEST = 320  # pixels that a box needs; on a phone they stand below one another
WEIGHT, BELOW, ABOVE = (33, 102, 172), (94, 60, 153), (230, 97, 1)  # blue, purple, orange
SOURCE, WRITTEN, READ = "source", "written", "read"
# what is drawn: name, and the tokens of its rows (queries) and columns (keys)
KINDS = {
    "encoder": ("Encoder", SOURCE, SOURCE),
    "decoder": ("Decoder", WRITTEN, READ),
    "cross": ("Decoder to source", WRITTEN, SOURCE),
}
MEAN = "mean of the heads"
THEME = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # nothing is fetched
CSS = ".heat {overflow-x: auto} .heat svg {background: #fff; border-radius: 6px}"


class PageError(ValueError):
    """A page that cannot be opened; the message is one sentence for the user."""


@dataclass
class Trace:
    """What a model did with one sentence.

    Attributes:
        translation: its text.
        tokens: labels of the tokens of the source, of those that the decoder wrote, and of those that it read, which are
            the same one step later.
        weights: attention weights by kind, [layers, heads, queries, keys].
        bias: what positions add to the scores, q_i . a^K_(j - i) / sqrt(d), by kind; none for a model without them.
    """

    translation: str
    tokens: dict[str, list[str]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    bias: dict[str, torch.Tensor] = field(default_factory=dict)


@torch.inference_mode()
def trace(model: Any, tokenizer: Any, text: str, *, beams: int, language: str | None = None) -> Trace:
    """Translate one sentence and look at every attention on the way.

    The decoder is run once more over the finished translation, which gives the weights that it had while writing.

    Args:
        language: the target language, for a model of several.
    """
    ids = tokenizer(text)["input_ids"]
    if language:
        ids = [_languages(tokenizer)[language], *ids]
    inputs = {"input_ids": torch.tensor([ids], device=model.device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    written = model.generate(**inputs, generation_config=_generation_config(model, inputs["input_ids"], beams))[0]
    translation = tokenizer.decode(written, skip_special_tokens=True)
    queries: dict[tuple[str, int], torch.Tensor] = {}
    with ExitStack() as hooks:
        for key, attention in _self_attentions(model).items():
            keep = lambda module, args, output, key=key: queries.update({key: output[0]})
            hooks.callback(attention.q_proj.register_forward_hook(keep).remove)
        output = model(**inputs, decoder_input_ids=written[None, :-1], output_attentions=True)
    names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    weights = {kind: torch.stack(output[name])[:, 0] for kind, name in names.items()}
    read = _labels(tokenizer, written[:-1])
    return Trace(
        translation=translation,
        tokens={
            SOURCE: _labels(tokenizer, inputs["input_ids"][0], source=True),
            WRITTEN: _labels(tokenizer, written[1:]),
            READ: ["(start)", *read[1:]],
        },
        weights={kind: _drawn(values) for kind, values in weights.items()},
        bias=_position_bias(model, queries),
    )


def _languages(tokenizer: Any) -> dict[str, int]:
    """The target languages that a tokenizer has tag tokens for, `>>de<<`, with the tokens' ids."""
    tags = sorted(token for token in tokenizer.get_added_vocab() if re.fullmatch(">>.+<<", token))
    return {tag[2:-2]: tokenizer.convert_tokens_to_ids(tag) for tag in tags}


def _generation_config(model: Any, source: torch.Tensor, beams: int) -> Any:
    """The model's own settings for this many beams, with room for twice the source and 50 tokens more."""
    config = copy.deepcopy(model.generation_config)
    config.update(num_beams=beams, do_sample=False, max_new_tokens=None, max_length=2 * source.shape[1] + 51)
    if beams == 1:
        config.update(length_penalty=1.0)
    return config


def _self_attentions(model: Any) -> dict[tuple[str, int], Any]:
    stacks = {"encoder": model.get_encoder().layers, "decoder": model.get_decoder().layers}
    return {(side, i): layer.self_attn for side, layers in stacks.items() for i, layer in enumerate(layers)}


def _position_bias(model: Any, queries: dict[tuple[str, int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """[layers, heads, queries, keys] for "encoder" and "decoder"; NaN where the decoder cannot look."""
    k = model.config.max_relative_position
    if k is None or not model.config.relative_position_keys:
        return {}
    bias: dict[str, list[torch.Tensor]] = {"encoder": [], "decoder": []}
    for (side, layer), attention in sorted(_self_attentions(model).items()):
        query = (
            queries[side, layer].unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
        )  # [heads, queries, head_dim]
        by_row = query @ attention.relative_keys.transpose(-1, -2) * attention.scaling  # [heads, queries, 2k + 1]
        position = torch.arange(query.shape[1], device=query.device)
        offset = position[None, :] - position[:, None]  # j - i
        rows = (offset.clamp(-k, k) + k).expand(len(query), -1, -1)
        values = by_row.gather(-1, rows)
        bias[side].append(values.masked_fill(offset > 0, torch.nan) if side == "decoder" else values)
    return {side: _drawn(torch.stack(values)) for side, values in bias.items()}


def _drawn(values: torch.Tensor) -> torch.Tensor:
    return values[..., :MOST_DRAWN, :MOST_DRAWN].float().cpu()


def _labels(tokenizer: Any, ids: torch.Tensor, *, source: bool = False) -> list[str]:
    """Readable names of tokens; a part of a letter, which has no text, goes by its name in the vocabulary."""
    labels = []
    for token in ids[:MOST_DRAWN].tolist():
        text = tokenizer.decode([token], use_source_tokenizer=True) if source else tokenizer.decode([token])
        labels.append(text.strip() if text.strip() and "\ufffd" not in text else tokenizer.convert_ids_to_tokens(token))
    return labels


def draw(seen: Trace | None, kind: str, layer: int, head: str) -> tuple[str, str]:
    """The weights of one layer and head, and what positions add to its scores, as HTML; empty before a translation.

    Args:
        kind: a name of KINDS.
        layer: counted from 1.
        head: a number counted from 1, or MEAN.
    """
    if seen is None or not seen.weights:
        return "", ""
    label, rows, columns = KINDS[kind]
    choose = lambda values: values[layer - 1].mean(0) if head == MEAN else values[layer - 1, int(head) - 1]
    sides = {"rows": seen.tokens[rows], "columns": seen.tokens[columns]}
    title = f"{label}, layer {layer}, {head if head == MEAN else f'head {head}'}"
    weights = heat_map(choose(seen.weights[kind]), **sides, title=f"{title}: attention weights")
    if kind == "cross":
        return weights, "<p>Between source and translation there are no relative positions: they share no axis.</p>"
    if kind not in seen.bias:
        return weights, "<p>This model has no relative positions in its scores.</p>"
    bias = heat_map(choose(seen.bias[kind]), **sides, title=f"{title}: what positions add to the scores", signed=True)
    return weights, bias


def heat_map(values: torch.Tensor, *, rows: list[str], columns: list[str], title: str, signed: bool = False) -> str:
    """A matrix [rows, columns] as SVG: white to blue from 0 to the greatest value or, `signed`, purple below 0 and orange
    above, as in `positions.png`. Cells that are not finite stay empty."""
    finite = values[values.isfinite()]
    limit = float(finite.abs().max()) if finite.numel() else 0.0
    rows, columns = [_shortened(label) for label in rows], [_shortened(label) for label in columns]
    left, top = LETTER * max(map(len, rows)) + 10, LETTER * max(map(len, columns)) + 14
    width, height = left + CELL * len(columns) + top // 2, top + CELL * len(rows)  # the last label leans to the right
    escaped = html.escape(title)
    parts = [
        f'<figure class="heat" style="margin:0"><figcaption>{escaped}, at most {limit:.2f}</figcaption>'
        f'<svg width="{width}" height="{height}" role="img" aria-label="{escaped}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">'
    ]
    for i, label in enumerate(rows):
        parts.append(f'<text x="{left - 6}" y="{top + CELL * i + 15}" text-anchor="end">{html.escape(label)}</text>')
    for j, label in enumerate(columns):
        place = f"translate({left + CELL * j + 15} {top - 6}) rotate(-60)"
        parts.append(f'<text transform="{place}">{html.escape(label)}</text>')
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            if math.isfinite(value):
                strength = value / limit if limit else 0.0
                colour = _colour(strength, ABOVE if signed else WEIGHT)
                place = f'x="{left + CELL * j}" y="{top + CELL * i}" width="{CELL - 1}" height="{CELL - 1}"'
                says = html.escape(f"{rows[i]} → {columns[j]}: {value:.3f}")
                parts.append(f'<rect {place} fill="{colour}"><title>{says}</title></rect>')
    return "".join([*parts, "</svg></figure>"])


def _colour(strength: float, full: tuple[int, int, int]) -> str:
    """From white at 0 to the full colour at 1, or to BELOW at -1."""
    full = full if strength >= 0 else BELOW
    return f"rgb({','.join(str(round(255 - abs(strength) * (255 - part))) for part in full)})"


def _shortened(label: str) -> str:
    return label if len(label) <= 12 else f"{label[:11]}…"


def build_page(model: Any, tokenizer: Any, *, name: str) -> gr.Blocks:
    """The page for a RelPos model in evaluation mode and its tokenizer."""
    config = model.config
    heads = [MEAN, *map(str, range(1, max(config.encoder_attention_heads, config.decoder_attention_heads) + 1))]

    def translate(
        text: str, beams: float, language: str | None, kind: str, layer: int, head: str
    ) -> tuple[str, Trace, str, str]:
        sentences = [line for line in text.splitlines() if line.strip()]
        if not sentences:
            raise gr.Error("There is no text to translate.", duration=5)
        seen = [trace(model, tokenizer, sentence, beams=int(beams), language=language) for sentence in sentences]
        translation = "\n".join(one.translation for one in seen)
        return translation, seen[0], *draw(seen[0], kind, *_within(kind, layer, head))

    def redraw(seen: Trace | None, kind: str, layer: int, head: str) -> tuple[str, str]:
        return draw(seen, kind, *_within(kind, layer, head))

    def _within(kind: str, layer: int, head: str) -> tuple[int, str]:
        """A layer and a head that this side has."""
        side = "encoder" if kind == "encoder" else "decoder"
        last = getattr(config, f"{side}_attention_heads")
        return min(layer, getattr(config, f"{side}_layers")), head if head == MEAN else str(min(int(head), last))

    targets = list(_languages(tokenizer))
    sides = [getattr(config, side, None) for side in ("source_language", "target_language")]
    direction = " to ".join(side if isinstance(side, str) else ", ".join(side) for side in sides if side)
    with gr.Blocks(title=f"{name} – RelPos", analytics_enabled=False) as page:
        gr.Markdown(f"# {name}\n" + (f"Translates from {direction}." if all(sides) else ""))
        with gr.Row():
            box = {"lines": 3, "min_width": NARROWEST}
            text = gr.Textbox(label="Text", max_length=LONGEST_TEXT, autofocus=True, elem_id="text", **box)
            translation = gr.Textbox(label="Translation", interactive=False, elem_id="translation", **box)
        with gr.Row(equal_height=True):
            own_beams = min(model.generation_config.num_beams or 1, 8)
            beams = gr.Slider(1, 8, value=own_beams, step=1, label="Beams", elem_id="beams")
            language = gr.Dropdown(targets, value=next(iter(targets), None), label="Into", visible=len(targets) > 1)
            button = gr.Button("Translate", variant="primary", elem_id="translate")
        gr.Markdown("## What the heads attend to\nOf the first line of the text. Rows are queries, columns are keys.")
        with gr.Row():
            choices = [(label, kind) for kind, (label, *_) in KINDS.items()]
            kind = gr.Radio(choices, value="encoder", label="Attention", elem_id="kind")
            layers = list(range(1, max(config.encoder_layers, config.decoder_layers) + 1))
            layer = gr.Dropdown(layers, value=1, label="Layer", elem_id="layer")
            head = gr.Dropdown(heads, value=MEAN, label="Head", elem_id="head")
        with gr.Row():
            pictures = []
            for picture in ("weights", "bias"):
                with gr.Column(min_width=NARROWEST):
                    pictures.append(gr.HTML(elem_id=picture))
        seen = gr.State()
        view = [kind, layer, head]
        gr.on(
            [button.click, text.submit],
            translate,
            inputs=[text, beams, language, *view],
            outputs=[translation, seen, *pictures],
            api_name="translate",
        )
        gr.on([part.change for part in view], redraw, inputs=[seen, *view], outputs=pictures, api_name="draw")
    return page


def serve_page(model: Any, tokenizer: Any, *, name: str, port: int | None = None, **options: Any) -> Any:
    """Open the page on this machine and keep it open until the process is stopped.

    Args:
        name: what to call the model.
        port: of the page; None or 0 take any that is free.
        options: those of gradio's `launch`.

    Raises:
        PageError: the port is taken.
    """
    page = build_page(model, tokenizer, name=name)
    options |= {"theme": gr.themes.Default(**THEME), "css": CSS, "footer_links": [], "state_session_capacity": 100}
    try:
        return page.launch(server_port=port or None, **options)
    except OSError as error:
        raise PageError(
            f"The page cannot be opened on port {port}, which something else uses: choose another."
        ) from error


if __name__ == "__main__":
    from huggingface_hub import RepoCard
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    (shown,) = RepoCard.load(Path(__file__).with_name("README.md")).data.models
    serve_page(
        AutoModelForSeq2SeqLM.from_pretrained(shown, trust_remote_code=True).eval(),
        AutoTokenizer.from_pretrained(shown, trust_remote_code=True),
        name=shown,
    )
