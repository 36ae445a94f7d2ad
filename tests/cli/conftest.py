"""The pair on disk, and commands run in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from smcjax import LLM, SMC
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


@pytest.fixture(scope="session")
def _kept(pair: Pair) -> Iterator[None]:
    """Keeps the programs of `-N 3 -K 2` as long as the session lasts."""
    sizes = {"max_model_len": 48, "page_size": 4, "max_num_seqs": 1}
    with LLM(pair.target, draft_model=pair.draft, decoding=SMC(3, 2), **sizes):
        yield


@pytest.fixture
def models(pair: Pair, _kept: None) -> list[str]:
    """The options that name the pair and keep programs small."""
    return ["--model", pair.target, "--draft-model", pair.draft, "--max-model-len", "48", "--page-size", "4"]
