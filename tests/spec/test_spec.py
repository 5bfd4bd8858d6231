"""Problems, configs, buckets and search spaces as plain data."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.spec import (
    Array,
    ArrayParameter,
    Config,
    Constraint,
    Dimension,
    Implementation,
    Problem,
    ScalarParameter,
    Space,
    bucket,
    cdiv,
    parameters_of,
)
from tilekern.spec.space import DANGEROUS
from tilekern.spec.targets import resolve

H200, A100 = resolve("H200"), resolve("A100")


@given(st.integers(1, 1 << 40))
def test_a_bucket_is_the_least_power_of_two_that_is_not_below(size):
    found = bucket(size)
    assert found >= size
    assert found & (found - 1) == 0
    assert found < 2 * size
    assert bucket(found) == found


def test_the_bucket_of_nothing_is_one():
    assert bucket(0) == bucket(1) == 1


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_cdiv_rounds_up(numerator, denominator):
    assert (cdiv(numerator, denominator) - 1) * denominator < numerator <= cdiv(numerator, denominator) * denominator


def test_points_are_ordered_mappings_with_a_key():
    point = Problem(rows=8, columns=3, dtype="float32")
    assert list(point) == ["rows", "columns", "dtype"]
    assert point.key == "rows=8,columns=3,dtype=float32"
    assert repr(point) == "Problem(rows=8,columns=3,dtype=float32)"
    assert len(point) == 3
    assert dict(point)["columns"] == 3
    with pytest.raises(KeyError):
        point["depth"]


def test_points_are_equal_by_value_and_kind():
    assert Config(a=1, b=2) == Config({"a": 1}, b=2)
    assert hash(Config(a=1, b=2)) == hash(Config({"a": 1, "b": 2}))
    assert Config(a=1) != Config(a=2)
    assert Config(a=1) != Problem(a=1)
    assert Config(a=1) != {"a": 1}
    assert len({Config(a=1), Config(a=1), Config(a=2)}) == 2


def test_points_cannot_be_changed_but_copied_with_changes():
    config = Config(a=1, b=2)
    with pytest.raises(TypeError):
        config["a"] = 3
    changed = config.but(b=5, c=6)
    assert type(changed) is Config
    assert dict(changed) == {"a": 1, "b": 5, "c": 6}
    assert dict(config) == {"a": 1, "b": 2}


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda point: pickle.loads(pickle.dumps(point))])
def test_points_survive_the_way_to_a_worker_process(again):
    for point in (Problem(rows=8, dtype="float32"), Config(tma=True, latency=None)):
        assert again(point) == point
        assert type(again(point)) is type(point)


def test_equal_points_whose_values_stand_in_another_order_hash_alike():
    assert Config(a=1, b=2) == Config(b=2, a=1)
    assert hash(Config(a=1, b=2)) == hash(Config(b=2, a=1))


def test_candidates_are_the_allowed_part_of_the_product_in_a_fixed_order():
    odd = Constraint("b must be odd", lambda _problem, config, _target: config["b"] % 2 == 1)
    space = Space(lambda problem: {"a": [1, problem["n"]], "b": [1, 2, 3]}, (odd,))
    found = [dict(config) for config in space.candidates(Problem(n=7), H200)]
    assert found == [{"a": 1, "b": 1}, {"a": 1, "b": 3}, {"a": 7, "b": 1}, {"a": 7, "b": 3}]
    assert space.violated(Problem(n=7), Config(a=1, b=2), H200) == "b must be odd"
    assert space.violated(Problem(n=7), Config(a=1, b=3), H200) is None


def test_dangerous_points_are_out_of_every_space():
    space = Space(lambda _problem: {"num_ctas": [None, 1, 2], "occupancy": [None, 1, 2, 15, 16, 32]})
    found = [(config["num_ctas"], config["occupancy"]) for config in space.candidates(Problem(), H200)]
    assert (2, 1) in found
    assert (1, 15) in found
    assert all((ctas or 1) == 1 or (occupancy or 1) == 1 for ctas, occupancy in found)
    assert all((occupancy or 1) < 16 for _, occupancy in found)
    assert all((config["num_ctas"] or 1) == 1 for config in space.candidates(Problem(), A100))
    assert all(constraint.reason for constraint in DANGEROUS)


def scaled(x, y, factor, tile_n):
    """Stands for a device function."""


@pytest.mark.parametrize(
    ("names", "constants", "words"),
    [
        (("x", "y", "factor"), ("tile_n",), None),
        (("y", "x", "factor"), ("tile_n",), "scaled: parameter 1 of the kernel is 'x', its implementation gives 'y'; "),
        (("x", "y", "factor"), ("tile_m",), "parameter 4 of the kernel is 'tile_n', its implementation gives 'tile_m'"),
        (("x", "y", "factor"), (), "parameter 4 of the kernel is 'tile_n', its implementation gives nothing more"),
        (
            ("x", "y", "factor"),
            ("tile_n", "b"),
            "parameter 5 of the kernel is nothing more, its implementation gives 'b'",
        ),
        (("x", "factor"), ("tile_n",), "parameter 2 of the kernel is 'y', its implementation gives 'factor'"),
    ],
)
def test_an_implementation_gives_a_device_function_its_parameters_by_name_and_in_order(names, constants, words):
    arrays = [ArrayParameter(name, "float32", 1) for name in names if name in ("x", "y")]
    scalars = [ScalarParameter(name, "float32") for name in names if name == "factor"]

    def made():
        return Implementation(scaled, (*arrays, *scalars), tuple((name, 1) for name in constants), lambda *_: 1)

    if words is None:
        assert made().function is scaled
        return
    with pytest.raises(TypeError) as refused:
        made()
    assert words in str(refused.value)


def test_axes_of_a_parameter_that_only_the_inputs_for_checks_size_may_have_any_size():
    dimensions = (Dimension("rows", "bucketed"), Dimension("columns", "exact"), Dimension("dtype", "dtype"))
    arrays = (Array("table", "dtype", ("vocabulary", "columns")), Array("y", "dtype", ("rows", "2*columns"), "output"))
    problem = Problem(rows=3, columns=8, dtype="float32").but(vocabulary=7)
    table, y = parameters_of(arrays, dimensions, problem)
    assert (table.shape, table.extent) == ((None, 8), 8)
    assert y.shape == (3, 16)
