"""The pair on disk, and commands run in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from smcjax.cli.main import main
from tests.checkpoints import Pair, write_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@dataclasses.dataclass(frozen=True)
class Result:
    """Holds a command's exit code, and its text on stdout and stderr."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def smcjax(capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs `smcjax` with the given arguments."""

    def run(*argv: str) -> Result:
        capfd.readouterr()
        try:
            code = main(argv)
        except SystemExit as ended:  # argparse: --help and wrong usage
            code = int(ended.code or 0)
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def models(pair: Pair) -> list[str]:
    """The options that name the pair and keep programs small."""
    return ["--model", pair.target, "--draft-model", pair.draft, "--max-model-len", "48", "--page-size", "4"]
