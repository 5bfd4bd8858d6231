"""Paths of caches when a job changes its folder, and when its user has no home."""

import os
import pwd
import warnings
from pathlib import Path

import pytest

from tilekern.cache import CacheError, NoHome, Store, default_layers, user_root
from tilekern.cache.absolute_paths import absolute
from tilekern.cache.errors import NoSecret
from tilekern.cache.trust.policy import trust_roots
from tilekern.cache.trust.seals import secret


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Reset cached paths and warnings."""
    absolute.cache_clear()
    for name in ("TILEKERN_CACHE_DIR", "TILEKERN_CACHE_PATH", "TILEKERN_TRUST_ROOTS"):
        monkeypatch.delenv(name, raising=False)
    yield
    absolute.cache_clear()


@pytest.fixture(params=["no HOME", "an empty HOME"])
def no_home(request, monkeypatch):
    """A user without a home, as a container's that runs as any number."""

    def nobody(_):
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "an empty HOME":
        monkeypatch.setenv("HOME", "")


def test_a_relative_cache_keeps_its_first_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "packs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", "cache")
    monkeypatch.setenv("TILEKERN_CACHE_PATH", "packs")
    before = [str(layer.root) for layer in default_layers()[:2]]
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert user_root() == tmp_path / "cache"
    assert [str(layer.root) for layer in default_layers()[:2]] == before == [f"{tmp_path}/cache", f"{tmp_path}/packs"]


def test_a_relative_platform_folder_does_not_follow_the_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    before = user_root()
    monkeypatch.chdir("/")
    assert before.is_absolute()
    assert user_root() == before


def test_without_a_home_the_other_layers_are_read_with_one_warning(no_home, tmp_path, monkeypatch):
    (tmp_path / "packs").mkdir()
    monkeypatch.setenv("TILEKERN_CACHE_PATH", os.pathsep.join([str(tmp_path / "packs"), "~/more"]))
    with pytest.warns(UserWarning, match="set TILEKERN_CACHE_DIR to a folder") as said:
        names = [layer.name for layer in default_layers()]
    assert names[0] == str(tmp_path / "packs")
    assert "user" not in names
    assert sum(str(one.message).startswith("TILEKERN_CACHE_PATH: ~/more begins with ~") for one in said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default_layers()


def test_without_a_home_errors_say_what_to_set_and_there_are_no_trust_roots(no_home):
    with pytest.raises(CacheError, match="no home folder, and so none for a cache; set TILEKERN_CACHE_DIR"):
        user_root()
    assert secret() == b""
    assert trust_roots() == ()
    with pytest.raises(NoSecret, match="set XDG_CONFIG_HOME"):
        secret(make=True)


def test_a_home_in_a_setting_needs_one(no_home, monkeypatch):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", "~/cache")
    with pytest.raises(NoHome, match="give an absolute path"):
        user_root()


def test_a_home_that_is_a_file_gives_an_empty_cache(tmp_path, monkeypatch):
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert default_layers()[0].targets() == []
    assert list(Store(user_root()).entries()) == []


@pytest.mark.parametrize("name", ["new\nline", "ä 日本", "100%"])
def test_any_name_of_a_folder_will_do(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / name))
    assert user_root() == Path(tmp_path / name)
    assert default_layers()[0].targets() == []
