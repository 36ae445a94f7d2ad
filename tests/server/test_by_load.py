"""A server whose exact decoders take turns by a profile: its name, who answers, and what replies and figures say."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from smcjax import SMC, Auto, Autoregressive, Rejection
from smcjax.cli.main import main
from smcjax.engine.fingerprints import fingerprints
from smcjax.planner import Profile
from smcjax.server.models import Models, load, with_exact
from smcjax.sparse import SparseVerification
from tests.checkpoints import Pair
from tests.planner.tables import measured
from tests.server.conftest import MAX_MODEL_LEN, Running, running

ALONE, DRAFTING = "target alone", "rejection, K=2"
NAME = "pair:auto"
ASK: dict[str, Any] = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "smc": {}}


@pytest.fixture(scope="module")
def profile(models: Models) -> Profile:
    """A profile of the pair, by which one request is best drafted for and two are not."""
    whose = fingerprints(models.all[0].llm.llm.models)
    rows = (
        measured(Autoregressive(), {1: 9.0, 2: 1.0}, context=32),
        measured(Rejection(2), {1: 1.0, 2: 9.0}, context=32),
    )
    return Profile(whose.device, whose.model, whose.draft, rows, jax="0")


@pytest.fixture(scope="module")
def path(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "pair.json"
    profile.save(path)
    return path


@pytest.fixture(scope="module")
def by_load(pair_on_disk: Pair, path: Path) -> Iterator[Running]:
    """SMC, rejection under its own name, and decoders that take turns, which are the exact one."""
    made = load(
        pair_on_disk.target,
        with_exact([SMC(4, 3), Rejection(3)], by_load=True),
        name="pair",
        profile=path,
        draft_model=pair_on_disk.draft,
        max_num_seqs=2,
        max_model_len=MAX_MODEL_LEN,
        page_size=4,
    )
    with running(made) as server:
        yield server
    asyncio.run(made.close())


def asked(by_load: Running, **fields: Any) -> dict[str, Any]:
    with by_load.http() as http:
        response = http.post("/v1/completions", json={**ASK, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def figures(by_load: Running) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
    """Cycles by model and decoder, and switches by model."""
    with by_load.http() as http:
        samples = [
            one for family in text_string_to_metric_families(http.get("/metrics").text) for one in family.samples
        ]
    cycles = {
        (one.labels["model_name"], one.labels["decoder"]): one.value
        for one in samples
        if one.name == "smcjax_batch_cycles_total"
    }
    switches = {one.labels["model_name"]: one.value for one in samples if one.name == "smcjax_strategy_switches_total"}
    return cycles, switches


def test_who_is_exact() -> None:
    assert with_exact([SMC()], by_load=True) == [SMC(), Auto()]
    assert with_exact([SMC(), Rejection(6)], by_load=True) == [SMC(), Rejection(6), Auto()]
    assert with_exact([Auto()], by_load=True) == [Auto()]
    exact, shared = SparseVerification(), SparseVerification("shared", 4)
    assert with_exact([SMC(sparse=exact)], by_load=True)[1] == Auto(sparse=exact)
    assert with_exact([SMC(sparse=shared, approximate=True)], by_load=True)[1] == Auto()


def test_it_is_listed(by_load: Running) -> None:
    with by_load.http() as http:
        listed = {one["id"]: one["smc"] for one in http.get("/v1/models").json()["data"]}
    assert list(listed) == ["pair", "pair:smc-n4-k3", "pair:rejection-k3", NAME]
    assert listed[NAME] == {"decoder": NAME, "decoding": "auto", "exact": True, "strategies": [ALONE, DRAFTING]}


@pytest.mark.slow
def test_replies_and_figures_say_who_decoded(by_load: Running) -> None:
    """SMC's greedy request goes to the decoders by load. Alone it is drafted for; a second one changes that."""
    by_load.llm(NAME).warm_up(use_tqdm=False)  # or the first one runs in a batch for two
    one = asked(by_load, model="pair", temperature=0)
    assert one["model"] == NAME
    assert re.fullmatch(r"smcjax-auto-[0-9a-f]{8}", one["system_fingerprint"])
    assert one["smc"]["routed"].startswith("temperature is 0")
    assert one["smc"]["strategies"] == [ALONE, DRAFTING]
    mine = one["smc"]["cycles_by"]
    assert list(mine) == [DRAFTING]
    cycles, switches = figures(by_load)
    assert cycles[NAME, DRAFTING] == mine[DRAFTING]
    assert cycles[NAME, ALONE] == 0
    assert switches == {NAME: 0}, "decoders that take no turns have none"
    both = asked(by_load, model=NAME, n=2, seed=1, max_tokens=60, ignore_eos=True)["smc"]["choices"]
    alone = [one["cycles_by"].get(ALONE, 0) for one in both]  # the first may have had cycles before the second came
    cycles, switches = figures(by_load)
    assert switches[NAME] >= 1
    assert max(alone) <= cycles[NAME, ALONE] <= sum(alone), "cycles of both count once"
    assert cycles["pair:rejection-k3", "rejection, K=3"] == 0
    assert cycles["pair:smc-n4-k3", "SMC, N=4, K=3"] == 0


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
            [SMC(4, 3), Auto()],
            profile=tmp_path / "other.json",
            draft_model=pair_on_disk.draft,
            page_size=4,
        )
    [owner] = made
    with pytest.raises(ValueError, match=r"^this LLM is closed"):
        owner.llm.metrics()


def test_metrics_of_the_others(http: httpx.Client) -> None:
    """Without a profile there is no figure of switches, and each decoder has its own cycles."""
    text = http.get("/metrics").text
    assert "smcjax_strategy_switches_total{" not in text
    assert 'smcjax_batch_cycles_total{decoder="target alone",model_name="pair:autoregressive"}' in text
