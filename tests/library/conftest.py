"""The library, built once for all processes of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.library import built


@pytest.fixture(scope="session")
def of_the_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder that the processes of a run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base


@pytest.fixture(scope="session")
def library(of_the_run: Path) -> Path:
    """The library without codes, which is built in seconds."""
    return built.once(of_the_run / "plain", ())


@pytest.fixture(scope="session")
def whole_library(of_the_run: Path) -> Path:
    """The library as users build it, which takes minutes."""
    return built.once(of_the_run / "whole", None)
