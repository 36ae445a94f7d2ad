"""The script that measures recall models: what is right, what answers state, and where a sparse model looks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.tasks import recall

pytest.importorskip("flax")
pytest.importorskip("optax")
import recall_data as data
import recall_measure

TARGET = Path(__file__).resolve().parents[1] / "data" / "recall" / "target"


def words(ids: np.ndarray) -> str:
    return "".join(recall.vocabulary()[index] for index in ids)


def test_answers_are_what_weighs() -> None:
    """In a document of two rounds: the answers and ends of text of both, and nothing else."""
    rng = np.random.default_rng(2)
    stretches, told = recall.document(rng, 700, "train", 2)
    ids = recall.tokens(np.random.default_rng(2), 700, "train", 2)[None]
    for mask in (recall_measure.in_answers(ids), np.asarray(recall_measure.in_answers(jnp.asarray(ids, jnp.int32)))):
        following = words(ids[0, 1:][mask[0, :-1]])
        wanted = "".join("\n" + words(np.concatenate(one.answers)) + "<eos>" for one in told)
        assert following == wanted
    assert len(stretches) == 2


def test_lines_are_judged_token_by_token() -> None:
    ids = data.make_rows(5, 2, 512, "eval", 1, several=False)
    guesses = np.roll(ids, -1, axis=1)
    right = recall_measure.lines_right(ids, guesses)
    assert right == [[True] * 8] * 2
    (places,) = np.nonzero(recall_measure.in_answers(ids)[1, :-1])
    guesses[1, places[4]] += 1  # in the second document's first line: behind the heading, number, space and key
    assert recall_measure.lines_right(ids, guesses) == [[True] * 8, [False] + [True] * 7]


def test_facts_that_answers_state_are_found_where_they_were_told() -> None:
    """As the text of the document has them, read by expressions."""
    (ids,) = data.make_rows(7, 1, 1024, "eval", 1, several=False)
    stated = recall_measure.facts_stated(ids)
    told, answers = words(ids).split("answers")
    value = dict(re.findall(r"((?:[A-Z]\d){2})=((?:[A-Z]\d){2}|\d+)", told))
    wanted = [(key, value[key]) for key in re.findall(r"((?:[A-Z]\d){2})=", answers)]
    found = [(words(ids[place - 2 : place]), words(ids[fact : fact + 2])) for place, fact in stated]
    assert [key for key, _ in found] == [key for key, _ in wanted]
    assert all(text.startswith(number) for (_, text), (_, number) in zip(found, wanted, strict=True))
    assert all(place > len(ids) * 0.5 for place, _ in stated)
    assert len(stated) >= 16


@pytest.mark.slow
def test_a_sparse_model_needs_the_blocks_that_it_selects(capsys: pytest.CaptureFixture[str]) -> None:
    """Its 8 blocks of 64 are all of 512 tokens, so drawing them changes nothing there; at 1,024 it does."""
    recall_measure.main([str(TARGET), "--lengths", "512", "1024", "--documents", "4", "--tokens", "2048"])
    *reports, _, heading, _, _, short, long = capsys.readouterr().out.splitlines()
    del heading
    one, two = (json.loads(line) for line in reports[:2])
    assert one["lines"] == one["random"]
    assert one["selected"]["share"] == 1.0
    assert two["lines"]["share"] > two["random"]["share"] + 0.2
    assert 0.5 < two["selected"]["share"] < 1.0
    assert short.startswith("| target | 512 | ")
    assert long.startswith("| target | 1,024 | ")
