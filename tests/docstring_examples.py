"""A pytest plugin: one default model for tests and for examples in docstrings, which run in folders of their own.

No conftest: pytest finds the examples in ``tl_headmaps/``, where the one of ``tests/`` does not count.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from typing import Any

import pytest

_LOADERS = ("load_default_model", "load_model")


@pytest.fixture(scope="session")
def default_model() -> Any:
    from tl_headmaps import load_default_model

    return load_default_model(device="cpu")


@pytest.fixture
def clean_catalogue() -> Any:
    """Predicates that a test or an example adds are gone afterwards."""
    from tl_headmaps.naming.catalogue import catalogue, forget

    before = {entry.name for entry in catalogue()}
    yield
    for entry in catalogue():
        if entry.name not in before:
            forget(entry.name)


def _loads_a_model(item: pytest.DoctestItem) -> bool:
    assert item.dtest is not None
    return any(loader in example.source for example in item.dtest.examples for loader in _LOADERS)


def pytest_itemcollected(item: pytest.Item) -> None:
    """An example that loads a model needs it as much as a test does."""
    if isinstance(item, pytest.DoctestItem) and _loads_a_model(item):
        item.add_marker("model")


@pytest.fixture(autouse=True)
def as_a_user(request: pytest.FixtureRequest) -> None:
    """An example may write files and add predicates, and loading the default model costs it nothing."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    # Asked for here and not as arguments: tests need none of this.
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.chdir(request.getfixturevalue("tmp_path"))
    request.getfixturevalue("clean_catalogue")
    if request.node.get_closest_marker("model"):
        model = request.getfixturevalue("default_model")
        for place in ("tl_headmaps", "tl_headmaps.capture.loading"):
            monkeypatch.setattr(f"{place}.load_default_model", lambda device=None: model)
