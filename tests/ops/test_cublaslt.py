"""Products by cuBLASLt, whose functions are stand-ins: what each call hands it, and how often it is asked."""

import pytest
import torch

from tilekern.ops import cublaslt

STREAM = 77


class Library:
    """Notes the addresses that a description holds, and those of each product."""

    def __init__(self, is_served=True):
        self.is_served, self.asked, self.assigned, self.products, self.scales = is_served, 0, 0, [], {}

    def __getitem__(self, name):
        return getattr(self, name)

    def __getattr__(self, name):
        own = {"DescSetAttribute": self.assign, "AlgoGetHeuristic": self.ask, "": self.multiply}
        return own.get(name.removeprefix("cublasLtMatmul"), lambda *_: 0)

    def assign(self, _, name, value, size):
        name = getattr(name, "value", name)
        if name in (cublaslt._SCALES_A, cublaslt._SCALES_B, cublaslt._BIAS):
            assert getattr(size, "value", size) == 8
            self.scales[name] = value._obj.value
            self.assigned += 1
        return 0

    def ask(self, *given):
        self.asked += 1
        given[-1]._obj.value = int(self.is_served)
        return 0

    def multiply(self, *given):
        b, a, c, d, stream = (given[n].value for n in (3, 5, 8, 10, 15))
        factors = given[2]._obj.value, given[7]._obj.value
        scales = tuple(self.scales[name] for name in (cublaslt._SCALES_B, cublaslt._SCALES_A))
        assert c == d
        self.products.append((a, b, *scales, c, self.scales.get(cublaslt._BIAS), factors, stream))
        return 0


@pytest.fixture
def stand_in(monkeypatch):
    def put(**given):
        library = Library(**given)
        monkeypatch.setattr(cublaslt, "_library", lambda: library)
        return library

    monkeypatch.setattr(cublaslt, "_thread", cublaslt._Thread())
    monkeypatch.setattr(cublaslt, "_current_device", lambda: -1)
    monkeypatch.setattr(cublaslt, "_stream_of", lambda _: STREAM)
    monkeypatch.setattr(cublaslt, "_ALIGNED", 4)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 5)
    return put


def operands(m=32, n=48, k=64):
    sides = (m, k), (n, k)
    return *(torch.zeros(side, dtype=torch.float8_e4m3fn) for side in sides), torch.ones(m), torch.ones(n)


def test_each_call_has_its_own_addresses_and_the_library_is_asked_once(stand_in):
    library, calls = stand_in(), []
    for given in (operands(), operands()):
        for _ in range(2):
            c = cublaslt.scaled_product(*given)
            assert c.shape == (32, 48)
            assert c.dtype == torch.bfloat16
            calls.append((*(x.data_ptr() for x in (*given, c)), None, (1.0, 0.0), STREAM))
    assert library.products == calls
    assert library.asked == 1
    # Of scales at the addresses of the call before nothing is said again.
    assert library.assigned == 4


def test_a_bias_and_an_addend_are_handed_on(stand_in):
    library, given = stand_in(), operands()
    for _ in range(2):
        bias, addend = torch.zeros(48).bfloat16(), torch.zeros(32, 48).bfloat16()
        assert cublaslt.scaled_product(*given, bias, addend) is addend
        addresses = [x.data_ptr() for x in (*given, addend, bias)]
        assert library.products[-1] == (*addresses, (1.0, 1.0), STREAM)
    cublaslt.scaled_product(*given)
    assert library.asked == 2, "another kind of product"


def test_what_the_library_does_not_serve_is_none(stand_in, monkeypatch):
    library, given = stand_in(is_served=False), operands()
    assert cublaslt.scaled_product(*given) is None
    assert not library.products
    stand_in()
    moved = torch.zeros(65, dtype=torch.uint8)[1:].view(torch.float8_e4m3fn).view(1, 64)
    assert cublaslt.scaled_product(moved, *given[1:]) is None
    addend = torch.zeros(32 * 48 + 1).bfloat16()[1:].view(32, 48)
    assert cublaslt.scaled_product(*given, None, addend) is None
    monkeypatch.setattr(cublaslt, "_current_device", lambda: 1)
    assert cublaslt.scaled_product(*given) is None
