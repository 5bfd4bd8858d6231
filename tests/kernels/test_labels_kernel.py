import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import configs, launched

from tilekern.kernels.labels import SPAN, SPEC
from tilekern.spec.targets import INTERPRETED

VOCABULARY, OP = 83, 3
INSIDE = (0, 1, VOCABULARY - 1)
OUTSIDE = (VOCABULARY, VOCABULARY + 1, -1, -2, -100, 2**31 - 1, -(2**31))
FAR = (2**31, 2**32 + 5, 2**46, -(2**40))


def run(labels, config, ignore_index=-100, blocks=1):
    """Return labels, their count, and the word for the host."""
    problem = SPEC.problem(rows=len(labels), wide=labels.dtype == torch.int64)
    seen = torch.zeros(1, dtype=torch.int64)
    inputs = {"target": labels, "ignore_index": ignore_index, "vocabulary": VOCABULARY, "op": OP, "seen": seen}
    outputs = launched(SPEC, problem, config, inputs, blocks)
    return outputs["labels"], outputs["counted"], int(seen)


def left(word):
    """Return the op and the label of a word."""
    number, label = divmod(word + SPAN // 2, SPAN)
    return number, label - SPAN // 2


def one_of_each():
    return configs(SPEC, SPEC.problem(rows=8, wide=True))[:2]


@examples(40)
@given(data=st.data())
def test_labels_outside_are_replaced_and_one_of_them_is_left_for_the_host(data):
    wide = data.draw(st.booleans())
    labels = data.draw(st.lists(st.sampled_from((*INSIDE, *OUTSIDE, *(FAR if wide else ()))), min_size=1, max_size=9))
    ignore_index = data.draw(st.sampled_from((-100, -1, 0, VOCABULARY, 2**31 - 1, -(2**31))))
    blocks = data.draw(st.sampled_from((1, 3)))
    given = torch.tensor(labels, dtype=torch.int64 if wide else torch.int32)
    found, counted, word = run(given, data.draw(st.sampled_from(one_of_each())), ignore_index, blocks)
    outside = {label for label in labels if label != ignore_index and not 0 <= label < VOCABULARY}
    assert int(counted.sum()) == sum(label != ignore_index for label in labels)
    for label, result in zip(labels, found.tolist(), strict=True):
        assert result == label if label not in outside else result < 0 and result != ignore_index
    assert left(word) in {(OP, label) for label in outside} if outside else word == 0


@pytest.mark.parametrize("place", [0, 5000, 40_000])
def test_any_block_finds_the_label_of_its_own_tiles(place):
    labels = torch.zeros(40_001, dtype=torch.int64)
    labels[::2], labels[place] = -100, VOCABULARY
    for config in one_of_each():
        found, counted, word = run(labels, config, blocks=4)
        assert (found == labels).sum() == len(labels) - 1
        assert (int(counted.sum()), left(word)) == (20_000 + (place % 2 == 0), (OP, VOCABULARY))


def test_blocks_that_find_labels_at_once_leave_one_of_them():
    labels = torch.full((20_000,), -7)
    for config in one_of_each():
        found, _, word = run(labels, config, blocks=4)
        assert left(word) == (OP, -7)
        assert bool((found == -1).all())


@pytest.mark.parametrize(("label", "shown"), [(2**62, 2**47 - 1), (-(2**63), 1 - 2**47)])
def test_the_op_is_told_whatever_the_label(label, shown):
    for config in one_of_each():
        assert left(run(torch.tensor([label]), config)[2]) == (OP, shown)


def test_many_labels_are_counted_by_many_blocks_and_few_by_one():
    few, many = (SPEC.problem(rows=rows, wide=True) for rows in (8192, 16384))
    for problem, counts in ((few, {1: 1, 8192: 1}), (many, {8193: 9, 10**6: 132})):
        grid = SPEC.device(problem, SPEC.default(problem, INTERPRETED)).grid
        assert {rows: grid({"rows": rows}, 132) for rows in counts} == counts
