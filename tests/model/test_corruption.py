"""A corrupted model directory loads, or is refused in one sentence: never another error, a wait, or memory without end.

Derandomised and short; `corruption.py` has been run over 100,000 directories by hand.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from smcjax.engine.load.loading import load_models
from smcjax.errors import CheckpointError
from tests.limits import at_most_more, within
from tests.model.corruption import corrupt, write_bases

PER_PART = 100


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = write_bases(tmp_path_factory.mktemp("bases"))
    for directory in made:
        assert use(directory) == ""
    return made


def use(directory: Path) -> str:
    """Loads the model and takes a text through its tokenizer; the complaint, or nothing."""
    try:
        models = load_models(directory, None, needs_draft=False, dtype="float32")
    except CheckpointError as error:
        return str(error)
    if models.tokenizer is not None:
        try:
            models.tokenizer.decode(models.tokenizer.encode("Hello wörld"))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("part", range(2))
def test_corrupted_directories(part: int, bases: list[Path], tmp_path: Path) -> None:
    refused = 0
    for seed in range(part * PER_PART, (part + 1) * PER_PART):
        rng = random.Random(seed)
        directory = tmp_path / "model"
        shutil.copytree(rng.choice(bases), directory)
        what = f"{seed}: {corrupt(directory, rng)}"
        try:
            with within(10), at_most_more(2048):
                message = use(directory).replace(str(directory), "")
        except BaseException as error:
            error.add_note(what)
            raise
        assert message.isprintable(), what  # one line, and no commands for a terminal
        assert len(message) < 500, what
        refused += bool(message)
        shutil.rmtree(directory)
    assert PER_PART // 4 < refused < PER_PART  # corrupted enough to be refused, not so much that it always is
