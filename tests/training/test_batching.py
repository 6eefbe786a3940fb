import logging

import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from relpos.training.batching import TokenBatchSampler, sequence_lengths

LENGTHS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=120)


def sampler_of(pairs, **options):
    source, target = zip(*pairs)
    return TokenBatchSampler(source, target, **{"max_tokens": 100, **options})


@settings(max_examples=150)
@given(LENGTHS, st.integers(1, 200), st.integers(1, 150), st.integers(0, 3), st.integers(0, 5))
def test_every_epoch_has_every_pair_once_within_the_budget(pairs, max_tokens, window, seed, epoch):
    sampler = sampler_of(pairs, max_tokens=max_tokens, window=window, seed=seed)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(len(pairs)))
    for batch in batches:
        longest = max(max(pairs[index]) for index in batch)
        assert longest * len(batch) <= max_tokens or len(batch) == 1


@given(LENGTHS, st.integers(1, 6))
def test_the_number_of_batches_suits_the_processes(pairs, processes):
    if processes > len(pairs):
        with pytest.raises(ValueError, match="multiple_of"):
            sampler_of(pairs, multiple_of=processes)
        return
    sampler = sampler_of(pairs, multiple_of=processes)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert len(batches) % processes == 0
    assert sorted(index for batch in batches for index in batch) == list(range(len(pairs)))


def many_pairs(number=2000):
    random = np.random.default_rng(3)
    source = random.gamma(2, 8, number).astype(int) + 1
    return list(zip(source.tolist(), (source + random.integers(0, 6, number)).tolist()))


def test_epochs_differ_and_repeat():
    pairs = many_pairs()
    sampler, again = (sampler_of(pairs, max_tokens=500, seed=7) for _ in range(2))
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert epochs[0] == epochs[2] == list(again)
    assert len(epochs[0]) == len(epochs[1])
    assert epochs[0] != list(sampler_of(pairs, max_tokens=500, seed=8))
    # not only the order of the batches is new: most of them hold other pairs
    first, second = ({tuple(sorted(batch)) for batch in epoch} for epoch in epochs[:2])
    assert len(first & second) < len(first) / 4


def test_batches_waste_little_and_say_how_much():
    pairs = many_pairs()
    sampler = sampler_of(pairs, max_tokens=500)
    padded = [[max(pairs[i][side] for i in batch) * len(batch) for batch in sampler] for side in (0, 1)]
    real = [sum(pair[side] for pair in pairs) for side in (0, 1)]
    assert sampler.padding == pytest.approx([1 - real[side] / sum(padded[side]) for side in (0, 1)])
    assert max(sampler.padding) < 0.15
    assert max(sampler_of(pairs, max_tokens=500, window=1).padding) > 0.2


def test_long_pairs_are_kept_alone_and_named_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        sampler = sampler_of([(500, 2), (3, 3), (4, 900), (5, 5)])
        batches = list(sampler) + list(sampler)
    assert [0] in batches
    assert [2] in batches
    assert [record.message for record in caplog.records] == [
        "2 of 4 pairs are longer than max_tokens=100, the longest has 900 tokens; each of them becomes a batch of its own."
    ]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], []), {}, "empty"),
        (([1, 2], [1]), {}, "2 source_lengths but 1"),
        (([1], [1]), {"max_tokens": 0}, "max_tokens"),
        (([1], [1]), {"window": -1}, "window"),
        (([1], [1]), {"multiple_of": 0}, "multiple_of"),
    ],
)
def test_impossible_batches(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        TokenBatchSampler(*arguments, **{"max_tokens": 10, **options})


@given(LENGTHS, st.lists(st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.7]), min_size=120, max_size=120), st.integers(0, 3))
def test_copies_are_rounded_within_pairs_that_can_stand_in_for_one_another(pairs, copies, epoch):
    copies = np.array(copies[: len(pairs)])
    sampler = sampler_of(pairs, copies=copies)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    counts = np.bincount([index for batch in batches for index in batch], minlength=len(pairs))
    assert (counts >= np.floor(copies)).all()
    assert (counts <= np.ceil(copies)).all()
    assert abs(counts.sum() - copies.sum()) <= 0.5 + 1e-6
    for batch in batches:
        assert len(batch) * max(max(pairs[index]) for index in batch) <= 100 or len(batch) == 1


def test_what_comes_once_more_is_drawn_anew_for_each_epoch():
    sampler = sampler_of([(5, 5)] * 40 + [(7, 3)] * 10, copies=[1.25] * 40 + [1.0] * 10)
    total = np.zeros(50)
    for epoch in range(200):
        sampler.set_epoch(epoch)
        counts = np.bincount([index for batch in sampler for index in batch], minlength=50)
        assert sorted(counts.tolist()) == [1] * 40 + [2] * 10
        total += counts
    np.testing.assert_allclose(total[:40] / 200, 1.25, atol=0.15)
    assert (total[40:] == 200).all()


def test_copies_must_suit_the_pairs():
    with pytest.raises(ValueError, match="2 pairs but copies for 1"):
        sampler_of([(1, 1), (2, 2)], copies=[1.0])
    for wrong in (0.5, float("nan")):
        with pytest.raises(ValueError, match="copies must be at least 1"):
            sampler_of([(1, 1), (2, 2)], copies=[1.0, wrong])


def test_a_fingerprint_tells_other_batches():
    pairs = many_pairs(200)
    same = {sampler_of(pairs).fingerprint for _ in range(2)}
    assert len(same) == 1
    others = [sampler_of(pairs, seed=1), sampler_of(pairs, max_tokens=99), sampler_of(pairs[:-1])]
    others += [sampler_of(pairs, window=50), sampler_of([*pairs[:-1], (99, 99)]), sampler_of(pairs, copies=[1.5] * 200)]
    assert len(same | {sampler.fingerprint for sampler in others}) == 7


def collect(loader):
    return [batch.tolist() for batch in loader]


def loaders(sampler, processes):
    for rank in range(processes):
        loader = DataLoader(np.arange(len(sampler._source)), batch_sampler=sampler)
        yield prepare_data_loader(loader, num_processes=processes, process_index=rank, even_batches=False)


@pytest.mark.parametrize("processes", [1, 3])
def test_accelerate_shares_the_batches_out_and_resumes_in_the_middle(processes):
    sampler = sampler_of(many_pairs(300), max_tokens=300, multiple_of=processes)
    sampler.set_epoch(2)
    whole = list(sampler)
    shares = list(loaders(sampler, processes))
    assert {len(share) for share in shares} == {len(whole) // processes}
    for rank, share in enumerate(shares):
        share.set_epoch(2)
        assert collect(share) == whole[rank::processes]
        rest = skip_first_batches(share, 4)
        rest.set_epoch(2)
        sampler.set_epoch(2)
        assert collect(rest) == whole[rank::processes][4:]


def test_sequence_lengths():
    dataset = Dataset.from_dict({"input_ids": [[1] * length for length in (3, 0, 25, 1)]})
    assert sequence_lengths(dataset, "input_ids").tolist() == [3, 0, 25, 1]
    assert sequence_lengths(dataset.select([2, 0]), "input_ids").tolist() == [25, 3]
    assert sequence_lengths(dataset.select([]), "input_ids").tolist() == []
