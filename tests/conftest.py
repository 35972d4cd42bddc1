"""Shared, read-only models: the default model is opened once for the whole run."""

import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from importlib.metadata import version
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tests", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("tests")

TL_MAJOR = int(version("transformer-lens").split(".")[0])


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def same_checks() -> None:
    """The type checker looks at one random item of a container: the same one in every run."""
    random.seed(0)


@pytest.fixture(scope="session")
def default_model() -> Any:
    from tl_headmaps import load_default_model

    return load_default_model(device="cpu")


@pytest.fixture(scope="session")
def default_weights(default_model: Any) -> Any:
    from tl_headmaps import HeadWeights

    return HeadWeights.from_model(default_model)


@pytest.fixture
def clean_catalogue() -> Any:
    """Predicates that a test adds are gone afterwards."""
    from tl_headmaps.naming.catalogue import catalogue, forget

    before = {entry.name for entry in catalogue()}
    yield
    for entry in catalogue():
        if entry.name not in before:
            forget(entry.name)
