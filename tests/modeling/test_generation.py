"""Every way of `generate`: searches, prefixes, assistants, caches, streams, compiled steps, precisions.

That cached and uncached generation agree is `test_cache.py`'s."""

import io
import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    CompileConfig,
    EncoderDecoderCache,
    StaticCache,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.cache_utils import DynamicCache

from relpos import RelPosForConditionalGeneration
from relpos.configuration import preset

VARIANTS = {
    "shared": {},
    "keys": {"relative_position_values": False},
    "per-head": {"relative_position_per_head": True},
    "sinusoidal": {"max_relative_position": None, "absolute_position": "sinusoidal"},
    "relative-and-learned": {"absolute_position": "learned", "max_position_embeddings": 64},
}
SEARCHES = {
    "greedy": {},
    "beam": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.6},
    "no-repeat": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "num_beams": 2},
}


def build(name="shared", seed=1, loud=4, **fields):
    """An untrained model in float64, so that equal means equal. Its output layer is its own and its weights are loud:
    otherwise it says one token again and again, whatever the source is, and a wrong position could hide."""
    torch.manual_seed(seed)
    config = preset("tiny", tie_word_embeddings=False, **{**VARIANTS[name], **fields})
    model = RelPosForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for module in model.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(loud)
    return model


def sources(count=1, length=9):
    return torch.randint(2, 250, (count, length))


def varied(model):
    """The source, of twenty, whose greedy translation has the most different tokens, and that translation, [1, 21]; on
    some sources an untrained model says one token for ever, which no fault would change."""
    candidates = sources(20)
    outputs = model.generate(candidates, max_new_tokens=20, min_new_tokens=20)
    row = max(range(20), key=lambda row: outputs[row].unique().numel())
    assert outputs[row].unique().numel() > 6
    return candidates[row, None], outputs[row, None]


def log_probabilities(model, source, sequences):
    """[batch, targets - 1]: what the model, given the tokens before, says of each token after the first."""
    logits = model(input_ids=source, decoder_input_ids=sequences[:, :-1]).logits.log_softmax(-1)
    return logits.gather(-1, sequences[:, 1:, None])[..., 0]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_batch_gives_what_its_sentences_give_alone(name, search):
    model, options = build(name), {"max_new_tokens": 15, **SEARCHES[search]}
    sentences = [sources(length=length)[0] for length in (3, 11, 7)]
    alone = [model.generate(sentence[None], **options) for sentence in sentences]
    for side in ("left", "right"):
        batch, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
        for row, sentence in enumerate(sentences):
            place = slice(11 - len(sentence), None) if side == "left" else slice(len(sentence))
            batch[row, place], mask[row, place] = sentence, 1
        together = model.generate(batch, attention_mask=mask, **options)
        for expected, found in zip(alone, together.split(options.get("num_return_sequences", 1))):
            width = expected.shape[1]
            assert torch.equal(found[:, :width], expected), side
            # beams are filled up with </s> by the library where the padding's id is 0
            assert (found[:, width:] <= model.config.eos_token_id).all()


def test_the_score_of_a_beam_is_its_log_probability():
    model, source = build(), sources(3)
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8, "min_new_tokens": 8}
    found = model.generate(source, **options, length_penalty=0.6, return_dict_in_generate=True, output_scores=True)
    expected = log_probabilities(model, source.repeat_interleave(4, 0), found.sequences).sum(-1)
    # generate counts the new tokens; a penalty here is n^0.6
    torch.testing.assert_close(found.sequences_scores, expected / 8**0.6, check_dtype=False, atol=1e-4, rtol=1e-4)
    steps = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    torch.testing.assert_close(steps.sum(-1), expected, check_dtype=False, atol=1e-4, rtol=1e-4)
    by_source = found.sequences_scores.reshape(3, 4)
    assert (by_source.diff(dim=1) <= 0).all()
    for hypotheses in found.sequences.reshape(3, 4, -1):
        assert len({tuple(hypothesis.tolist()) for hypothesis in hypotheses}) == 4


def test_sampling_follows_its_seed():
    model, source = build(), sources(2)
    draw = lambda seed: (
        torch.manual_seed(seed),
        model.generate(source, do_sample=True, top_k=0, num_return_sequences=3, max_new_tokens=12),
    )[1]
    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
    assert draw(3).shape[0] == 6


@pytest.mark.parametrize("name", VARIANTS)
def test_assisted_decoding_gives_the_greedy_tokens(name):
    model = build(name)
    source, expected = varied(model)
    smaller = build(name, seed=2, decoder_layers=1, encoder_layers=1)
    for assistant in (smaller, build(name)):
        steps = []
        handle = model.model.decoder.register_forward_hook(lambda *_, steps=steps: steps.append(1))
        found = model.generate(source, assistant_model=assistant, max_new_tokens=20, min_new_tokens=20)
        handle.remove()
        assert torch.equal(found, expected)
    assert len(steps) < 20, "the assistant that agrees was not believed"


def test_candidates_looked_up_in_the_prefix_give_the_greedy_tokens():
    model = build()
    source, expected = varied(model)
    options = {"max_new_tokens": 20, "min_new_tokens": 20}
    assert torch.equal(model.generate(source, prompt_lookup_num_tokens=3, **options), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_prefix_of_several_tokens_is_continued(name):
    model = build(name)
    source, whole = varied(model)
    found = model.generate(source, decoder_input_ids=whole[:, :8], max_new_tokens=13, min_new_tokens=13)
    assert torch.equal(found, whole)
    other = torch.tensor([[0, 17, 40, 3], [0, 9, 9, 77]])
    found = model.generate(source.repeat(2, 1), decoder_input_ids=other, max_new_tokens=6, num_beams=3)
    assert torch.equal(found[:, :4], other)


def test_tokens_can_be_forced():
    model, source = build(), sources(2)
    found = model.generate(source, forced_bos_token_id=17, forced_eos_token_id=33, max_new_tokens=9, min_new_tokens=9)
    assert found[:, 1].tolist() == [17, 17]
    assert found[:, -1].tolist() == [33, 33]
    even = list(range(4, 256, 2))
    found = model.generate(source, prefix_allowed_tokens_fn=lambda *_: even, max_new_tokens=9, num_beams=2)
    assert (found[:, 1:] % 2 == 0).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_generation_goes_on_from_a_returned_cache(name):
    model = build(name)
    source, whole = varied(model)
    first = model.generate(source, max_new_tokens=7, min_new_tokens=7, return_dict_in_generate=True)
    assert first.cache.get_seq_length() == 7  # all but the last token
    lengths = []
    model.model.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    # without a mask of the full length, the library takes the tokens for new ones; of every encoder-decoder
    found = model.generate(
        source,
        decoder_input_ids=first.sequences,
        decoder_attention_mask=torch.ones_like(first.sequences),
        cache=first.cache,
        max_new_tokens=13,
        min_new_tokens=13,
    )
    assert torch.equal(found, whole)
    assert set(lengths) == {1}, "what the cache holds was computed again"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_scores_attentions_and_states_are_returned(implementation):
    model, source = build(), sources(2)
    model.set_attn_implementation(implementation)
    found = model.generate(
        source,
        max_new_tokens=5,
        min_new_tokens=5,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_attentions=True,
        output_hidden_states=True,
    )
    heads, layers = model.config.decoder_attention_heads, model.config.decoder_layers
    assert [tuple(weights.shape) for weights in found.encoder_attentions] == [(2, heads, 9, 9)] * layers
    assert len(found.scores) == len(found.decoder_attentions) == len(found.decoder_hidden_states) == 5
    for step in range(5):
        assert [tuple(w.shape) for w in found.decoder_attentions[step]] == [(2, heads, 1, step + 1)] * layers
        assert [tuple(w.shape) for w in found.cross_attentions[step]] == [(2, heads, 1, 9)] * layers
        for weights in (*found.decoder_attentions[step], *found.cross_attentions[step]):
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    logits = model(input_ids=source, decoder_input_ids=found.sequences[:, :-1]).logits
    torch.testing.assert_close(torch.stack(found.logits, 1), logits, check_dtype=False, atol=1e-5, rtol=1e-5)


def test_asking_for_attentions_says_which_computation_runs(caplog):
    model, source = build(), sources()
    library = logging.getLogger("relpos.modeling_relpos")
    library.warning_once.cache_clear()
    options = {"max_new_tokens": 3, "return_dict_in_generate": True}
    model.set_attn_implementation("eager")
    model.generate(source, output_attentions=True, **options)
    model.set_attn_implementation("sdpa")
    model.generate(source, **options)
    assert not caplog.records
    model.generate(source, output_attentions=True, **options)
    (record,) = caplog.records  # once is enough
    assert "`output_attentions`" in record.message
    assert "'sdpa'" in record.message


def test_streams(learned_model, learned_pairs):
    tokenizer, model = (
        AutoTokenizer.from_pretrained(learned_model),
        AutoModelForSeq2SeqLM.from_pretrained(learned_model),
    )
    source, target = learned_pairs[1]
    inputs = tokenizer(source, return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True, timeout=60)
    model.generate(**inputs, streamer=streamer, max_new_tokens=60)
    pieces = list(streamer)
    assert "".join(pieces) == target
    assert len(pieces) > 2
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", written)
        model.generate(**inputs, streamer=TextStreamer(tokenizer, skip_special_tokens=True), max_new_tokens=60)
    assert written.getvalue().strip() == target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the library's offloaded cache needs a CUDA device")
def test_an_offloaded_cache_gives_the_same_tokens():
    model, source = build().to("cuda"), sources(2).to("cuda")
    expected = model.generate(source, max_new_tokens=12)
    cache = EncoderDecoderCache(DynamicCache(config=model.config, offloading=True), DynamicCache(config=model.config))
    assert torch.equal(model.generate(source, max_new_tokens=12, cache=cache), expected)


REFUSED_BY_THE_LIBRARY = {
    "quantised cache": ({"cache_implementation": "quantized"}, ValueError, "quantized cache"),
    "diverse beams": (
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        ValueError,
        "group-beam-search",
    ),
    "constrained beams": ({"num_beams": 4, "force_words_ids": [[5]]}, ValueError, "constrained-beam-search"),
}


@pytest.mark.parametrize("what", REFUSED_BY_THE_LIBRARY)
def test_what_transformers_itself_no_longer_has_is_refused_by_it(what):
    """The first for every encoder-decoder; the other two became code on the Hub, which it runs only when trusted."""
    options, error, message = REFUSED_BY_THE_LIBRARY[what]
    with pytest.raises(error, match=message):
        build().generate(sources(), max_new_tokens=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "per-head", "relative-and-learned"])
def test_a_compiled_step_has_no_graph_break_and_is_compiled_once(name):
    model = build(name)
    source, expected = varied(model)
    expected = expected[:, :13]
    encoded = model.get_encoder()(source)
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    step = torch.compile(model.forward, backend=counter, fullgraph=True, dynamic=False)
    cache = EncoderDecoderCache(StaticCache(config=model.config, max_cache_len=16), DynamicCache(config=model.config))
    tokens, graphs = expected[:, :1], []
    with torch.no_grad():
        for position in range(12):
            last = tokens[:, -1:].clone(memory_format=torch.contiguous_format)  # strides are compiled in
            run = step if position else model.forward  # the first fills the cross-attention cache, once
            logits = run(encoder_outputs=encoded, decoder_input_ids=last, cache=cache).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
            graphs.append(counter.frame_count)
    assert torch.equal(tokens, expected)
    assert graphs[-1] == graphs[3], f"graphs after each step: {graphs}"
    assert graphs[-1] <= 2, f"graphs after each step: {graphs}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "relative-and-learned"])
def test_generate_compiles_its_step(name):
    """generate's own switch, which CPUs have only by this private field."""
    model, source = build(name).float(), sources(2)
    expected = model.generate(source, max_new_tokens=12, min_new_tokens=12)
    torch.compiler.reset()
    compiling = CompileConfig(fullgraph=True, mode="default")
    compiling._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    found = model.generate(
        source, max_new_tokens=12, min_new_tokens=12, cache_implementation="static", compile_config=compiling
    )
    assert torch.equal(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_half_precision_is_finite_and_close(name, dtype, implementation):
    model, source = build(name, loud=1).float(), sources(3, 40)
    model.set_attn_implementation(implementation)
    target, mask = sources(3, 30), torch.ones_like(source)
    mask[0, 10:], mask[1, :] = 0, 0
    options = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}
    exact = model(**options).logits
    half = model.to(dtype)
    logits = half(**options).logits
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    # relative to the spread of the logits: bfloat16 keeps 8 bits, float16 11
    error = (logits.float() - exact).abs().max() / exact.std()
    assert error < {torch.float16: 0.05, torch.bfloat16: 0.3}[dtype], error
    assert half.generate(source, attention_mask=mask, max_new_tokens=5, num_beams=2).shape[0] == 3
