"""page.py: what it draws against the model itself, and the real page in headless Chromium, as wide as a desk or a phone."""

import re
import shutil
import signal
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

pytest.importorskip("gradio", reason="DID NOT RUN: gradio is not installed")

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from relpos import RelPosForConditionalGeneration
from relpos.configuration import preset
from relpos.model_cards import page

RELPOS = Path(sysconfig.get_path("scripts")) / "relpos"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def model(learned_model):
    return AutoModelForSeq2SeqLM.from_pretrained(learned_model).eval()


@pytest.fixture(scope="module")
def tokenizer(learned_model):
    return AutoTokenizer.from_pretrained(learned_model)


@pytest.fixture(scope="module")
def seen(model, tokenizer):
    return page.trace(model, tokenizer, "Save the file.", beams=4)


def test_trace_translates(seen):
    assert seen.translation == "Speichern Sie die Datei."
    assert seen.tokens["source"][-1] == seen.tokens["written"][-1] == "</s>"
    assert seen.tokens["read"] == ["(start)", *seen.tokens["written"][:-1]]


def test_weights_and_bias_are_those_of_the_model(model, tokenizer, seen):
    """The bias, recomputed from the layer's input by the literal sum of equation 4's second term."""
    inputs = tokenizer(["Save the file."], return_tensors="pt")
    states = {}
    layer = model.get_encoder().layers[0]
    hook = layer.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: states.update(kwargs, args=args), with_kwargs=True
    )
    weights = model(**inputs, labels=inputs["input_ids"], output_attentions=True).encoder_attentions[0][0]
    hook.remove()
    assert torch.allclose(seen.weights["encoder"][0], weights, atol=1e-6)
    assert torch.allclose(seen.weights["cross"].sum(-1), torch.ones(()), atol=1e-5)
    hidden = states["args"][0] if states["args"] else states["hidden_states"]
    attention, k = layer.self_attn, model.config.max_relative_position
    query = attention.q_proj(hidden)[0].view(-1, attention.num_heads, attention.head_dim)
    for head in range(attention.num_heads):
        for i in range(len(query)):
            for j in range(len(query)):
                row = attention.relative_keys[max(-k, min(k, j - i)) + k]
                expected = (query[i, head] @ row) / attention.head_dim**0.5
                assert seen.bias["encoder"][0, head, i, j].item() == pytest.approx(expected.item(), abs=1e-5)


def test_the_decoder_does_not_look_ahead(seen):
    ahead = torch.ones(seen.bias["decoder"].shape[-2:]).triu(1).bool()
    assert seen.bias["decoder"][..., ahead].isnan().all()
    assert seen.bias["decoder"][..., ~ahead].isfinite().all()
    assert (seen.weights["decoder"][..., ahead] == 0).all()


def test_drawing(seen):
    weights, bias = page.draw(seen, "encoder", 1, page.MEAN)
    count = len(seen.tokens["source"])
    assert weights.count("<rect") == bias.count("<rect") == count**2
    decoder = page.draw(seen, "decoder", 1, "2")[1]
    length = len(seen.tokens["written"])
    assert decoder.count("<rect") == length * (length + 1) // 2
    cross, note = page.draw(seen, "cross", 1, "1")
    assert cross.count("<rect") == length * count
    assert "no relative positions" in note
    assert page.draw(None, "encoder", 1, page.MEAN) == ("", "")


def test_labels_are_text_and_no_markup():
    drawn = page.heat_map(torch.tensor([[1.0]]), rows=["<script>"], columns=['a"b&c'], title="<b>")
    assert "<script>" not in drawn
    assert "<b>" not in drawn
    assert "&lt;script&gt;" in drawn


def test_colours_say_sign_and_size():
    drawn = page.heat_map(torch.tensor([[0.0, 2.0, -2.0]]), rows=["q"], columns=["a", "b", "c"], title="t", signed=True)
    assert re.findall(r'fill="rgb\((.*?)\)"', drawn) == ["255,255,255", "230,97,1", "94,60,153"]
    page.heat_map(torch.full((1, 1), torch.nan), rows=["q"], columns=["a"], title="nothing to see")


def test_long_sentences_are_drawn_to_a_limit(model, tokenizer):
    long = page.trace(model, tokenizer, "Save the file. " * 40, beams=1)
    assert len(long.tokens["source"]) == page.MOST_DRAWN
    assert page.draw(long, "encoder", 1, page.MEAN)[0].count("<rect") == page.MOST_DRAWN**2


@pytest.mark.parametrize("name", ["base-sinusoidal", "base"])
def test_models_without_relative_positions_and_with_a_table_for_each_head(name, tokenizer):
    small = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "vocab_size": len(tokenizer)}
    model = RelPosForConditionalGeneration(preset(name, **small)).eval()
    seen = page.trace(model, tokenizer, "Save it.", beams=1)
    bias = page.draw(seen, "encoder", 2, "8")[1]
    assert ("<rect" in bias) == (name == "base")
    assert ("no relative positions" in bias) == (name == "base-sinusoidal")
    page.build_page(model, tokenizer, name=name)


def test_a_port_that_is_taken(model, tokenizer):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(page.PageError, match=f"cannot be opened on port {port}"):
            page.serve_page(model, tokenizer, name="small", port=port, prevent_thread_lock=True, quiet=True)


@pytest.fixture(scope="module")
def address(learned_model):
    """The page that `relpos demo` serves, in a process of its own."""
    command = [RELPOS, "demo", learned_model, "--port", "0"]
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job would ignore Ctrl-C
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=listen)
    shown = []
    for line in process.stdout:
        shown.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            break
    else:
        pytest.fail(f"no page was opened: {''.join(shown)}")
    yield found[0]
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="DID NOT RUN: playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("DID NOT RUN: there is no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desk", "phone"])
def test_somebody_translates_and_looks(browser, address, width, height, tmp_path):
    tab = browser.new_page(viewport={"width": width, "height": height})
    tab.set_default_timeout(60_000)
    trouble, fetched = [], []
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.on("request", lambda request: fetched.append(request.url))
    tab.goto(address)
    tab.locator("#text textarea").fill("Save the file.\nClose the window.")
    tab.locator("#translate").click()
    tab.wait_for_function("document.querySelector('#translation textarea').value.includes('Fenster')")
    assert tab.locator("#translation textarea").input_value() == "Speichern Sie die Datei.\nSchließen Sie das Fenster."
    source = len(tab.locator("#weights svg text").all()) // 2
    assert tab.locator("#weights rect").count() == tab.locator("#bias rect").count() == source**2
    tab.screenshot(path=tmp_path / "encoder.png", full_page=True)

    tab.locator("#kind").get_by_text("Decoder to source").click()
    tab.locator("#bias").get_by_text("share no axis").wait_for()
    assert "Decoder to source" in tab.locator("#weights figcaption").inner_text()
    tab.screenshot(path=tmp_path / "cross.png", full_page=True)

    tab.locator("#text textarea").fill("   ")
    tab.locator("#translate").click()
    tab.get_by_text("There is no text to translate.").first.wait_for()
    boxes = [tab.locator(picture).bounding_box() for picture in ("#weights", "#bias")]
    assert (boxes[1]["y"] > boxes[0]["y"]) == (width < 640)  # below one another on a phone, side by side on a desk
    # wide pictures scroll by themselves; the page does not
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert trouble == []
    assert all(url.startswith((address, "data:", "blob:")) for url in fetched), fetched
    tab.close()
