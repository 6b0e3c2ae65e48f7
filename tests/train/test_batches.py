"""Which examples form a step: independent of ranks, accumulation, workers and the point of resumption."""

import pytest
import torch
from tiny_task import TinyData, TinyExamples

from intbmoe.tasks.recipe import TrainSettings
from intbmoe.train.build import doubts
from intbmoe.train.data import epoch_order, evaluation_batches, micro_batches, plan_batches, read_ahead
from intbmoe.train.errors import TrainingError


def steps_of(world, device_batch, first=0, examples=50):
    """{step: examples of the global batch, in order}, collected from the reads of all ranks."""
    settings = TrainSettings(batch=12, device_batch=device_batch, epochs=2.5)
    plan = plan_batches(examples, settings, world)
    steps = {}
    for rank in range(world):
        for read in micro_batches(plan, 7, rank, first):
            steps.setdefault(read.step, []).append((read.offset, read.indices))
    return {step: [index for _, part in sorted(parts) for index in part] for step, parts in steps.items()}


@pytest.mark.parametrize(("world", "device_batch"), [(1, 3), (1, 5), (2, None), (2, 2), (4, 1), (3, 4)])
def test_ranks_and_accumulation_share_out_the_same_steps(world, device_batch):
    assert steps_of(world, device_batch) == steps_of(1, None)


def test_an_epoch_reads_each_example_at_most_once_in_an_order_of_its_own():
    steps = steps_of(1, None)
    assert sorted(steps) == list(range(10))  # 2.5 epochs of 50 // 12 = 4 steps
    first, second = ([i for step in range(4 * e, 4 * e + 4) for i in steps[step]] for e in (0, 1))
    assert len(set(first)) == len(set(second)) == 48
    assert first != second
    assert first == epoch_order(50, 7, 0)[:48].tolist()
    assert epoch_order(50, 8, 0).tolist() != epoch_order(50, 7, 0).tolist()


@pytest.mark.parametrize("first", [1, 4, 9, 10])
def test_any_step_can_be_the_first(first):
    assert steps_of(2, 3, first) == {step: read for step, read in steps_of(2, 3).items() if step >= first}


def test_a_small_set_is_one_batch():
    assert [len(step) for step in steps_of(1, None, examples=5).values()] == [5, 5]


@pytest.mark.parametrize(("batch", "said"), [(5, []), (8, ["train.batch=8 is more than the 5 training examples"])])
def test_a_batch_larger_than_the_set_is_said(batch, said):
    settings = TrainSettings(batch=batch)
    found = doubts(settings, plan_batches(5, settings, 1), torch.device("cpu"))
    assert [doubt.partition(":")[0] for doubt in found] == said


@pytest.mark.parametrize(
    ("examples", "batch", "device_batch", "world", "message"),
    [
        (0, 4, None, 1, "empty"),
        (50, 9, None, 2, "train.batch"),
        (5, 8, None, 2, r"whole training set: train.batch=8"),
        (50, 14, 4, 1, r"device_batch=4: 2 would do"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(examples, batch, device_batch, world, message):
    with pytest.raises(TrainingError, match=message):
        plan_batches(examples, TrainSettings(batch=batch, device_batch=device_batch), world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_counts_each_example_once_and_keeps_ranks_together(world):
    ranks = [list(evaluation_batches(10, 3, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    counted = sorted(index for batches in ranks for indices, counts in batches if counts for index in indices)
    assert counted == list(range(10))
    assert all(indices for batches in ranks for indices, _ in batches)


def test_workers_change_neither_order_nor_content():
    examples = TinyExamples(TinyData(), "train")
    plan = plan_batches(len(examples), TrainSettings(batch=8, device_batch=4), 1)
    reads = {w: list(read_ahead(examples, micro_batches(plan, 3, 0, 2), 3, w)) for w in (0, 2)}
    assert len(reads[0]) == 6
    for (read, batch), (expected_read, expected) in zip(reads[2], reads[0], strict=True):
        assert read == expected_read
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_steps_stand_in_place_of_epochs():
    plan = plan_batches(50, TrainSettings(batch=12, epochs=2.5, steps=7, warmup=9.0), 1)
    assert (plan.steps, plan.steps_per_epoch) == (7, 4)
    with pytest.raises(ValueError, match=r"steps=0 is not allowed"):
        TrainSettings(steps=0)
