import pytest
from cache_samples import outcome
from hypothesis import given
from hypothesis import strategies as st

from tilekern.cache import CacheError, parse_problem_key, problem_key

NAMES = st.sampled_from(["rows", "columns", "_", "Z9", "dtype", "x" * 30, "kv_heads"])
VALUES = st.one_of(
    st.integers(-(10**17), 10**17), st.booleans(), st.none(), st.sampled_from(["bfloat16", "a.b-c+d", "00"])
)


def test_a_key_is_one_line_in_the_order_of_the_problem():
    problem = {"rows": 8192, "columns": 4096, "dtype": "bfloat16", "bias": False, "window": None}
    key = problem_key(problem)
    assert key == "rows=8192,columns=4096,dtype=bfloat16,bias=False,window=None"
    assert list(parse_problem_key(key).items()) == list(problem.items())


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=6))
def test_a_key_reads_back_as_the_problem(problem):
    read = parse_problem_key(problem_key(problem))
    assert list(read.items()) == list(problem.items())
    assert [type(value) for value in read.values()] == [type(value) for value in problem.values()]


@given(st.text(max_size=40))
def test_any_text_is_a_problem_or_an_error(text):
    problem, error = outcome(lambda: parse_problem_key(text))
    assert (problem_key(problem) == text) if problem else ("\n" not in error)


@pytest.mark.parametrize(
    "problem",
    [
        {},
        {"rows": 1.5},
        {"rows": "a/b"},
        {"rows": ""},
        {"rows": "a,b"},
        {"rows": "12"},
        {"rows": "True"},
        {"rows": "None"},
        {"rows": 10**18},
        {"rows": 10**5000},
        {"../rows": 1},
        {"": 1},
        {"rows": "x" * 300},
        {"rows": [1]},
    ],
)
def test_a_problem_that_cannot_be_a_name_is_refused(problem):
    with pytest.raises(CacheError) as caught:
        problem_key(problem)
    assert "\n" not in str(caught.value)
