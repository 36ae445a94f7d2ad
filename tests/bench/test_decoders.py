"""The comparison of decoders: all answer the same problems, exact ones are called so, the plot has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smcjax import SMC, Autoregressive, Rejection, SparseVerification
from smcjax.bench import decoders
from smcjax.bench.decoders import DRAFT, TARGET, Contender, contenders, markdown
from smcjax.cli.commands.bench_engine import USUAL
from smcjax.cli.main import main
from smcjax.tasks.questions import LONGEST_ANSWER
from tests.checkpoints import write_pair


def test_contenders() -> None:
    chosen = contenders(USUAL)
    assert [one.name for one in chosen[:2]] == [TARGET, DRAFT]
    assert [one.exact for one in chosen] == [True, False, True, True, False, False]
    assert tuple(one.decoding for one in chosen[2:]) == USUAL
    assert [one.name for one in contenders([SMC(8, 4, control=1.0, early_end=True)])[2:]] == [
        "SMC, N=8, K=4, control 1, early end"
    ]
    assert contenders([SMC(8, 4, control=1.0, early_end=True)])[2].exact


def test_the_majority_of_several() -> None:
    """The majority of exact answers is no sample of the target."""
    one, majority, smc = contenders([Rejection(4), SMC(8, 4, control=1.0)], [3])[2:]
    assert (majority.decoding, majority.answers) == (Rejection(4), 3)
    assert [one.exact, majority.exact, smc.exact] == [True, False, True]
    assert smc.answers == 1


def test_contenders_that_verify_alike() -> None:
    """The target alone has the schedule, the draft nothing; a schedule leaves a rejection exact."""
    schedule = SparseVerification("merged", 4, schedule=2)
    target, draft, other = contenders([Rejection(4, sparse=schedule)])
    assert (target.decoding, draft.decoding) == (Autoregressive(SparseVerification(schedule=2)), Autoregressive())
    assert [target.exact, draft.exact, other.exact] == [True, False, True]
    assert not contenders([Rejection(4, sparse=SparseVerification("shared", 4))])[2].exact


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LONGEST_ANSWER, "words", 24)
    pair = write_pair(tmp_path)
    plot, saved = tmp_path / "frontier.svg", tmp_path / "decoders.json"
    small = ["--model", pair.target, "--draft-model", pair.draft, "-n", "2", "--max-num-seqs", "1", "--answers", "2"]
    small += ["--max-model-len", "448"]
    small += ["--decoding", "Rejection(gamma=1)", "SMC(n_particles=2, gamma=1, control=0)"]
    assert main(["bench", "decoders", *small, "--save", str(saved), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    rows = json.loads(saved.read_text())["rows"]
    assert [row["decoder"] for row in rows] == [
        TARGET,
        DRAFT,
        "rejection, K=1",
        "majority of 2 answers of rejection, K=1",
        "SMC, N=2, K=1",
    ]
    alone, _, rejection, both, smc = rows
    assert both["generated_tokens"] > rejection["generated_tokens"]
    assert smc["mean_log_evidence"] < 2
    assert rejection["exact"]
    # One token a question is drawn before its first cycle; the last runs may reach beyond the end.
    assert alone["generated_tokens"] == alone["cycles"] + 2
    most = rejection["cycles"] * (1 + rejection["mean_accepted_length"]) + 2
    assert rejection["cycles"] + 2 < rejection["generated_tokens"] <= most
    assert smc["mean_ess"] is not None
    assert all(0 <= row["ci_low"] <= row["accuracy"] <= row["ci_high"] <= 1 for row in rows)
    assert markdown(rows) in out
    drawn = plot.read_text()
    assert "<svg" in drawn


@pytest.mark.parametrize(("draft", "alone"), [("recall-eagle", False), ("ngram", False), ("recall", True)])
def test_drafts_that_need_the_target(draft: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head, and drafts that are looked up, have no row of their own; a model has, the negative control."""
    asked: list[str] = []

    def compare(chosen: list[Contender], *_: object, **__: object) -> None:
        asked.extend(one.name for one in chosen)
        raise RuntimeError("enough")

    monkeypatch.setattr(decoders, "compare", compare)
    pair = ["--task", "recall", "--model", "recall", "--draft-model", draft]
    assert main(["bench", "decoders", "--decoding", "Rejection(gamma=3)", *pair]) == 1
    assert asked == [TARGET, *[DRAFT] * alone, "rejection, K=3"]


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    refused = [
        (["-n", "0"], "--num-problems: must be a whole number from 1"),
        (["--plot", "x.txt"], "--plot must end in .svg, .png or .pdf, got x.txt"),
        (["--model", "here"], "--model and --draft-model go together; give both, or neither for the bundled pair."),
        (["--task", "recall", "--draft-model", "here"], "--model and --draft-model go together"),
        (["--decoding", "Rejection(tree=(0,))"], "--decoding: tree must be children per depth"),
        (
            ["--decoding", "Rejection(sparse=SparseVerification(schedule=2))"],
            "this target has no layer that selects any",
        ),
        (["--decoding", "SMC()", "SMC(control=2)"], "--decoding: control must be a number from 0 to 1"),
        (["--decoding", "auto"], "must be smc, rejection, autoregressive, or one with options as in Python"),
        (["--decoding", "SMC()", "--temperature", "0"], "--temperature is 0, where every draft"),
    ]
    for arguments, message in refused:
        assert main(["bench", "decoders", *arguments]) == 2
        assert message in capsys.readouterr().err
