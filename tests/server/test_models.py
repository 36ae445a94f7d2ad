"""Names of virtual models, the exact one among them, and the texts and bytes of tokens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import openai
import pytest

from smcjax import LLM
from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.engine.load.loading import bundled_model
from smcjax.server.models import Models, VirtualModel, base_name, label_of, load, with_exact
from smcjax.server.replies.tokens import TokenTexts
from smcjax.sparse.verification import SparseVerification
from smcjax.tokenizer.tokenizer import Tokenizer
from tests.checkpoints import Pair
from tests.planner.tables import Blind
from tests.server.conftest import EXACT_NAME, SMC_NAME


@pytest.mark.parametrize(
    ("decoding", "label"),
    [
        (SMC(), "smc-n8-k8-c0.1"),
        (SMC(control=0), "smc-n8-k8"),
        (SMC(n_particles=32, gamma=4, control=0.1), "smc-n32-k4-c0.1"),
        (SMC(power=2.0), "smc-n8-k8-c0.1-p2"),
        (SMC(early_end=True), "smc-n8-k8-c0.1-early"),
        (SMC(pipelined=True), "smc-n8-k8-pipelined"),
        (Rejection(), "rejection-k4"),
        (Rejection(n_candidates=2, gamma=3), "rejection-n2-k3"),
        (Rejection(tree=(2, 1)), "rejection-tree2x1"),
        (Autoregressive(), "autoregressive"),
        (Blind(gamma=4), "blind-gamma4"),
        (Blind(gamma=8), "blind-gamma8"),
    ],
)
def test_labels(decoding: Decoding, label: str) -> None:
    assert label_of(decoding) == label


@pytest.mark.parametrize(
    ("decoding", "beside"),
    [
        (SMC(), {}),
        (SMC(pipelined=True), {"control": 0.0, "pipelined": True}),
        (SMC(select="best"), {"select": "best"}),
    ],
)
def test_descriptions_say_what_is_unusual(decoding: SMC, beside: dict[str, float]) -> None:
    served = SimpleNamespace(llm=SimpleNamespace(decoding=decoding))
    usual = {"decoder": "m", "decoding": "smc", "exact": False, "n_particles": 8, "gamma": 8, "control": 0.1}
    assert VirtualModel("m", served).description() == usual | beside


def test_there_is_an_exact_one() -> None:
    assert with_exact([SMC()]) == [SMC(), Rejection()]
    assert with_exact([SMC(), Autoregressive()]) == [SMC(), Autoregressive()]
    assert with_exact([Rejection(gamma=7)]) == [Rejection(gamma=7)]
    exact = SparseVerification()
    assert with_exact([SMC(sparse=exact)])[1] == Rejection(sparse=exact)
    assert with_exact([SMC(control=1.0)])[1] == Rejection()  # for temperature 0, which it refuses


@pytest.mark.parametrize(
    ("model", "name"),
    [(None, "bundled"), ("a/b/", "b"), ("/x/model.gguf", "model.gguf"), ("org/name", "name"), ("smollm2", "smollm2")],
)
def test_the_pairs_name(model: str | None, name: str) -> None:
    assert base_name(model) == name


def test_two_of_one_name(models: Models) -> None:
    twice = [models.all[0].llm] * 2
    with pytest.raises(ValueError, match=f"two decoders would both be called {SMC_NAME}"):
        Models("pair", twice)


def test_programs_are_compiled_when_it_is_asked_for(pair_on_disk: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Decoding] = []
    monkeypatch.setattr(LLM, "warm_up", lambda llm: asked.append(llm.decoding))
    decoders = [SMC(2, 2), Autoregressive()]
    for at_start in (True, False):
        options = {"max_num_seqs": 1, "max_model_len": 32, "page_size": 4, "compile_at_start": at_start}
        asyncio.run(load(pair_on_disk.target, decoders, draft_model=pair_on_disk.draft, **options).close())
        assert asked == decoders


def test_a_profile_is_for_auto() -> None:
    with pytest.raises(ValueError, match=r"^profile is given and an exact decoder is named; leave one of them out"):
        with_exact([Autoregressive()], "profile.json")


def test_devices_are_those_of_the_decoder_that_needs_them(pair_on_disk: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first, the pipelined one loads the models."""

    def no_devices() -> None:
        raise ValueError("two devices are looked for.")

    monkeypatch.setattr("smcjax.engine.llm.two_devices", no_devices)
    decoders = [Rejection(2), SMC(2, 2, pipelined=True)]
    with pytest.raises(ValueError, match=r"^two devices are looked for"):
        load(pair_on_disk.target, decoders, draft_model=pair_on_disk.draft)


def test_listed(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["pair", SMC_NAME, EXACT_NAME]
    one = client.models.retrieve(SMC_NAME)
    assert one.owned_by == "smcjax"
    assert (one.model_extra or {})["smc"]["n_particles"] == 4
    assert http.get("/version").json().keys() == {"version"}


def test_texts_and_bytes_of_tokens() -> None:
    """A text's tokens' bytes are the text's; what is no whole character says its bytes."""
    tokenizer = Tokenizer.load(bundled_model("target"))
    assert tokenizer is not None
    texts = TokenTexts(tokenizer)
    for text in ("Tom has 3 apples.", " héllo ≠ 😀", "a  b\n"):
        tokens = [token for token in tokenizer.encode(text) if token in tokenizer.text_ids]
        assert b"".join(map(texts.bytes_of, tokens)).decode() == text
        parts = [texts.text_of(token) for token in tokens]
        assert not any("\ufffd" in part for part in parts)
        assert any(part.startswith("bytes:\\x") for part in parts) == (not text.isascii())
    assert TokenTexts(None).text_of(17) == "17"


def test_texts_of_tokens_that_begin_with_a_space() -> None:
    """Where the decoder strips the first one."""
    tokenizer = Tokenizer.load(bundled_model("target"))
    assert tokenizer is not None
    tokens = tokenizer.encode("has has")
    assert TokenTexts(tokenizer).text_of(tokens[-1]) == " has"
