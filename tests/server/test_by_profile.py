"""A server whose exact decoder is chosen by a profile: its name, who answers, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from smcjax import SMC, Auto, Autoregressive, Rejection
from smcjax.cli.main import main
from smcjax.engine.load.fingerprints import fingerprints
from smcjax.planner import Profile
from smcjax.server.models import Models, load, with_exact
from smcjax.sparse.verification import SparseVerification
from tests.checkpoints import Pair
from tests.planner.tables import measured
from tests.server.conftest import MAX_MODEL_LEN, Running, running

NAME = "pair:rejection-n2-k2"


@pytest.fixture(scope="module")
def profile(models: Models) -> Profile:
    """A profile of the pair, by which two candidates are best."""
    whose = fingerprints(models.all[0].llm.llm.models)
    times = {Autoregressive(): 9.0, Rejection(2): 3.0, Rejection(2, n_candidates=2): 1.0}
    rows = tuple(measured(one, {1: ms}, context=32) for one, ms in times.items())
    return Profile(whose.device, whose.model, whose.draft, rows, jax="0")


@pytest.fixture(scope="module")
def path(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "pair.json"
    profile.save(path)
    return path


@pytest.fixture(scope="module")
def by_profile(pair_on_disk: Pair, path: Path) -> Iterator[Running]:
    """SMC, and the exact decoder that the profile says."""
    made = load(
        pair_on_disk.target,
        with_exact([SMC(4, 3)], path),
        name="pair",
        draft_model=pair_on_disk.draft,
        max_num_seqs=2,
        max_model_len=MAX_MODEL_LEN,
        page_size=4,
    )
    with running(made) as server:
        yield server
    asyncio.run(made.close())


def test_who_is_exact() -> None:
    assert with_exact([SMC()], "p") == [SMC(), Auto(profile="p")]
    assert with_exact([SMC(), Rejection(6)]) == [SMC(), Rejection(6)]
    assert with_exact([Auto(profile="p")], "p") == [Auto(profile="p")]
    exact, shared = SparseVerification(), SparseVerification("shared", 4)
    assert with_exact([SMC(sparse=exact)], "p")[1] == Auto(sparse=exact, profile="p")
    assert with_exact([SMC(sparse=shared, approximate=True)], "p")[1] == Auto(profile="p")


def test_it_is_listed(by_profile: Running) -> None:
    with by_profile.http() as http:
        listed = {one["id"]: one["smc"] for one in http.get("/v1/models").json()["data"]}
    assert list(listed) == ["pair", "pair:smc-n4-k3-c0.1", NAME]
    assert listed["pair:smc-n4-k3-c0.1"]["control"] == 0.1
    assert listed[NAME] == {"decoder": NAME, "decoding": "rejection", "exact": True, "n_candidates": 2, "gamma": 2}


@pytest.mark.slow
def test_it_answers_what_smc_refuses(by_profile: Running) -> None:
    ask = {"prompt": "ab", "max_tokens": 8, "ignore_eos": True, "smc": {}, "model": "pair", "temperature": 0}
    with by_profile.http() as http:
        response = http.post("/v1/completions", json=ask)
        figures = http.get("/metrics").text
    assert response.status_code == 200, response.text
    one: dict[str, Any] = response.json()
    assert one["model"] == NAME
    assert one["smc"]["routed"].startswith("temperature is 0")
    of = f'decoder="{Rejection(2, n_candidates=2)}",model_name="{NAME}"'
    assert f"smcjax_batch_cycles_total{{{of}}}" in figures


def test_what_is_refused(
    pair_on_disk: Pair, profile: Profile, path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pair = ["--model", pair_on_disk.target, "--draft-model", pair_on_disk.draft, "--port", "0", "--page-size", "4"]

    def said(*options: str, of: Profile | None = None) -> str:
        if of is not None:
            of.save(tmp_path / "other.json")
            options = (*options, "--profile", str(tmp_path / "other.json"))
        capfd.readouterr()
        assert main(["serve", *pair, *options]) != 0
        return capfd.readouterr().err.strip().split("\n")[-1]

    assert "--decoding of serve must name a decoder, got auto" in said("--decoding", "auto")
    assert "--profile is given and an exact decoder is named" in said(
        "--also", "Rejection(gamma=4)", "--profile", str(path)
    )
    assert "does not exist" in said("--profile", str(tmp_path / "none"))
    assert "a population is asked for" in said("--decoding", "auto", "-N", "4", "--profile", str(path))
    assert "profile is of a clock and this device is" in said(of=dataclasses.replace(profile, device="a clock"))
    assert "profile is of another model" in said(of=dataclasses.replace(profile, model="another"))
    assert "profile is of another --draft-model" in said(of=dataclasses.replace(profile, draft="another"))


def test_those_who_fail_leave_no_weights(
    pair_on_disk: Pair, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first decoder's models are given back where a later one is refused."""
    import smcjax.server.models as module

    made: list[Any] = []
    init = module.AsyncLLM.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(module.AsyncLLM, "__init__", noted)
    dataclasses.replace(profile, model="another").save(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"^profile is of another model"):
        load(
            pair_on_disk.target,
            [SMC(4, 3), Auto(profile=tmp_path / "other.json")],
            draft_model=pair_on_disk.draft,
            page_size=4,
        )
    [owner] = made
    with pytest.raises(ValueError, match=r"^this LLM is closed"):
        owner.llm.metrics()


def test_batch_cycles_of_each_decoder(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    assert 'smcjax_batch_cycles_total{decoder="target alone",model_name="pair:autoregressive"}' in text
