"""/v1/completions by OpenAI's client: what `LLM.generate` gives, whole and streamed, in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from smcjax import SamplingParams
from smcjax.server.requests.sampling import seed_of
from tests.server.conftest import EXACT_NAME, MAX_MODEL_LEN, SMC_NAME, Running, events_of


def test_the_answer_is_the_engines(server: Running, client: openai.OpenAI) -> None:
    reply = client.completions.create(model="pair", prompt="ab", max_tokens=20, seed=5, temperature=0.8)
    params = SamplingParams(max_tokens=20, seed=5, temperature=0.8)
    output = server.llm().generate("ab", params, use_tqdm=False)[0]
    (choice,) = reply.choices
    assert choice.text == output.outputs[0].text
    assert choice.finish_reason == output.outputs[0].finish_reason
    assert reply.model == SMC_NAME
    assert reply.object == "text_completion"
    assert reply.usage is not None
    counted = reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens
    generated = len(output.outputs[0].token_ids)
    assert counted == (2, generated, 2 + generated)
    other = client.completions.create(model="pair", prompt="ab", max_tokens=20, seed=6, temperature=0.8)
    assert other.choices[0].text != choice.text  # a control


def test_prompts_in_every_form_and_order(client: openai.OpenAI) -> None:
    def texts(prompt: Any) -> list[str]:
        reply = client.completions.create(
            model="pair", prompt=prompt, seed=1, max_tokens=6, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        return [choice.text for choice in reply.choices]

    one, two = texts("ab"), texts("cde")
    assert one != two
    assert texts(["ab", "cde"]) == one + two
    assert texts(["cde", "ab"]) == two + one
    assert texts([64 + 1, 65 + 1]) == texts([[65, 66]])
    assert texts([[65, 66], [67]]) == texts([65, 66]) + texts([67])


def test_choices_are_requests_of_their_own(server: Running, client: openai.OpenAI) -> None:
    reply = client.completions.create(model="pair", prompt=["ab", "c"], seed=3, n=3, max_tokens=12)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 3
    seeds = [seed_of(3, choice) for choice in range(3)]
    assert len({*seeds}) == 3
    assert seeds[0] == 3
    generated = 0
    for index, choice in enumerate(reply.choices):
        params = SamplingParams(max_tokens=12, seed=seeds[index % 3])
        answer = server.llm().generate("ab" if index < 3 else "c", params, use_tqdm=False)[0].outputs[0]
        assert choice.text == answer.text
        generated += len(answer.token_ids)
    assert reply.usage.completion_tokens == generated


@pytest.mark.parametrize(
    ("prompt", "body"),
    [
        ("ab", {"n": 2}),
        (["a", "bc"], {"stop": ["k", "qq", "zx"]}),
        (["a", "bc"], {"temperature": 0.0, "logprobs": 2, "echo": True}),
        ("ab", {"n": 2, "logprobs": 0, "echo": True, "extra_body": {"prompt_logprobs": 1}}),
    ],
)
def test_chunks_make_up_the_reply(client: openai.OpenAI, body: dict[str, Any], prompt: Any) -> None:
    fields: dict[str, Any] = {"model": "pair", "prompt": prompt, "seed": 2, "max_tokens": 40, **body}
    reply = client.completions.create(**fields)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**fields, stream=True, stream_options=options))
    assert len({chunk.id for chunk in chunks}) == 1
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == reply.usage
    for choice in reply.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
        assert joined([piece.logprobs for piece in pieces]) == joined([choice.logprobs])
        scores = [piece.prompt_logprobs for piece in pieces if hasattr(piece, "prompt_logprobs")]
        assert rounded(scores) == rounded([choice.prompt_logprobs] if hasattr(choice, "prompt_logprobs") else [])
        assert not any(stop in choice.text for stop in body.get("stop", ()))


def rounded(value: Any) -> Any:
    """`value` with its numbers rounded as far as two programs agree."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 3))


def joined(parts: list[Any]) -> tuple[list[str], list[int], list[float], list[list[str]]]:
    """Log-probabilities of pieces, one behind the other; numbers rounded as far as two programs agree."""
    there = [part for part in parts if part is not None]
    return (
        [token for part in there for token in part.tokens],
        [offset for part in there for offset in part.text_offset],
        [round(x, 3) for part in there for x in part.token_logprobs if x is not None],
        [sorted(top or ()) for part in there for top in part.top_logprobs or ()],
    )


def test_a_stream_ends_once(http: httpx.Client) -> None:
    body = {"prompt": "ab", "stream": True, "seed": 1}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response)
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["choices"] for event in events[:-1])


def test_parts_of_characters_are_never_shown(server: Running, client: openai.OpenAI) -> None:
    """At this temperature all 256 bytes come; what is streamed is what the whole is decoded to."""
    open_ends = 0
    for seed in range(6):
        params = SamplingParams(max_tokens=60, seed=seed, temperature=900.0, ignore_eos=True)
        tokens = server.llm(EXACT_NAME).generate("é", params, use_tqdm=False)[0].outputs[0]
        stream = client.completions.create(
            model=EXACT_NAME,
            prompt="é",
            max_tokens=60,
            seed=seed,
            temperature=900.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = "".join(choice.text for chunk in stream for choice in chunk.choices)
        assert text == tokens.text
        tokenizer = server.llm().tokenizer
        assert tokenizer is not None
        by_token = "".join(tokenizer.decode([token]) for token in tokens.token_ids)
        open_ends += by_token != text
    assert open_ends  # a control: token by token it would be another text


def test_characters_of_several_tokens_come_whole(server: Running, client: openai.OpenAI) -> None:
    """A token is a byte here, so that a cycle may end anywhere within an emoji."""
    said = "h😀é漢字👩‍🚀!"
    tokenizer = server.llm().tokenizer
    assert tokenizer is not None
    by_token = [tokenizer.decode([token]) for token in tokenizer.encode(said)]
    assert "\ufffd" in "".join(by_token), "a control"
    for seed in range(3):
        extra = {"guided_choice": [said, said * 2]}
        fields: dict[str, Any] = {
            "model": SMC_NAME,
            "prompt": "ab",
            "max_tokens": 80,
            "seed": seed,
            "extra_body": extra,
        }
        pieces = [choice.text for chunk in client.completions.create(**fields, stream=True) for choice in chunk.choices]
        assert "".join(pieces) in (said, said * 2)
        assert len([piece for piece in pieces if piece]) > 1
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_stop_of_several_tokens_is_never_shown(client: openai.OpenAI) -> None:
    """It is a part of what would be said, at every place within a cycle; not even its beginning comes."""
    fields: dict[str, Any] = {"model": SMC_NAME, "prompt": "ab", "max_tokens": 24, "seed": 5}
    fields["extra_body"] = {"ignore_eos": True}
    free = client.completions.create(**fields, temperature=0.8).choices[0].text
    hit = 0
    for at in range(2, 10):
        stop = free[at : at + 3]
        asked = {**fields, "stop": [stop], "temperature": 0.8}
        whole = client.completions.create(**asked).choices[0]
        chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
        text = "".join(chunk.text for chunk in chunks)
        assert text == whole.text
        assert stop not in text
        if chunks[-1].finish_reason == "stop":
            hit += 1
            assert len(text) < len(free)
    assert hit >= 4


def test_as_many_alternatives_as_were_asked_for(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": EXACT_NAME, "max_tokens": 2, "seed": 1, "temperature": 1}
    messages: Any = [{"role": "user", "content": "hi"}]
    for most in (0, 20):
        logprobs = client.completions.create(prompt="ab", logprobs=most, **fields).choices[0].logprobs
        assert logprobs is not None
        assert [len(top) for top in logprobs.top_logprobs or [{}] * 2] == [most] * 2
        reply = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=most, **fields)
        assert reply.choices[0].logprobs is not None
        assert [len(one.top_logprobs) for one in reply.choices[0].logprobs.content or []] == [most] * 2


def test_echo_scores_the_prompt(server: Running, client: openai.OpenAI) -> None:
    """As lm-eval asks: log-probabilities of a text under the target's own law."""
    reply = client.completions.create(
        model=EXACT_NAME, prompt="abcab", max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
    wanted = server.llm(EXACT_NAME).generate("abcab", params, use_tqdm=False)[0]
    choice = reply.choices[0]
    assert choice.text == "abcab" + wanted.outputs[0].text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert wanted.prompt_logprobs is not None
    scores = [*wanted.prompt_logprobs[1:], *(wanted.outputs[0].logprobs or [])]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(scores, abs=1e-4)
    tokens = choice.logprobs.tokens
    shown = len("".join(tokens[-6:-1]))
    assert choice.logprobs.text_offset[-1] == shown == 5


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_does_not_show_special_tokens(server: Running, http: httpx.Client, stream: bool) -> None:
    """As one that begins each prompt, nor do answers: they take no place, so that all others stand where they are."""
    tokenizer = server.llm().tokenizer
    assert tokenizer is not None
    special, plain = tokenizer.special_tokens["</s>"], tokenizer.encode("ab")
    asked = {"model": EXACT_NAME, "prompt": [special, *plain], "max_tokens": 9, "ignore_eos": True, "seed": 1}
    asked |= {"logit_bias": {str(special): 4}, "echo": True, "logprobs": 0, "stream": stream}
    response = http.post("/v1/completions", json=asked)
    replies = [json.loads(one) for one in events_of(response)[:-1]] if stream else [response.json()]
    choices = [reply["choices"][0] for reply in replies]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    text, tokens = "".join(choice["text"] for choice in choices), [one for part in parts for one in part["tokens"]]
    offsets = [one for part in parts for one in part["text_offset"]]
    assert text.startswith("ab")
    assert offsets[:3] == [0, 0, 1]
    name = tokens[0]
    assert name in tokens[3:-1], "a control: an answer that has one"
    shown = [(token, offset) for token, offset in zip(tokens, offsets, strict=True) if token != name]
    assert all(text[offset:].startswith(token) for token, offset in shown)
    assert len("".join(token for token, _ in shown)) == len(text)


def test_prompt_logprobs_by_id(http: httpx.Client) -> None:
    body = {"model": EXACT_NAME, "prompt": "abc", "max_tokens": 1, "prompt_logprobs": 2}
    entries = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert all(2 <= len(entry) <= 3 for entry in entries[1:])
    assert [next(iter(entry.values()))["decoded_token"] for entry in entries[1:]] == ["b", "c"]


def test_two_numbers_of_alternatives_to_the_prompt(http: httpx.Client) -> None:
    """`echo` has as many as `logprobs` says, in front of the answer, and `prompt_logprobs` its own, by id."""
    body = {"model": EXACT_NAME, "prompt": "abc", "max_tokens": 1, "echo": True}
    for logprobs, by_id in ((None, 2), (0, 2), (3, 1), (3, None)):
        asked = {**body, "logprobs": logprobs, "prompt_logprobs": by_id}
        choice = http.post("/v1/completions", json=asked).json()["choices"][0]
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            tops = choice["logprobs"]["top_logprobs"] or [None, {}, {}, {}]
            assert tops[0] is None
            assert [len(top) for top in tops[1:]] == [logprobs] * 3
            assert len(choice["logprobs"]["tokens"]) == 4
        assert ("prompt_logprobs" in choice) == (by_id is not None)
        assert all(by_id <= len(entry) <= by_id + 1 for entry in choice.get("prompt_logprobs", [])[1:])
        assert len(choice.get("prompt_logprobs", "abc")) == 3


def test_a_bias_goes_to_an_exact_decoder_and_decides(server: Running, http: httpx.Client) -> None:
    tokenizer = server.llm().tokenizer
    assert tokenizer is not None
    token = tokenizer.vocab["k"]
    body = {"model": SMC_NAME, "prompt": "ab", "max_tokens": 5, "ignore_eos": True, "logit_bias": {str(token): 100}}
    reply = http.post("/v1/completions", json=body).json()
    assert (reply["model"], reply["choices"][0]["text"]) == (EXACT_NAME, "kkkkk")
    assert "logit_bias changes the distribution" in reply["smc"]["routed"]


def test_a_request_brings_its_own_control(http: httpx.Client) -> None:
    body = {"model": SMC_NAME, "prompt": "ab", "max_tokens": 12, "smc": {"control": 1}}
    reply = http.post("/v1/completions", json=body).json()
    assert reply["smc"]["control"] == 1
    assert reply["smc"]["log_evidence"] == pytest.approx(0, abs=1e-4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"smc": {"control": 2}}, "smc.control"),
    ({"response_format": {"type": "json"}}, "response_format"),
    ({"response_format": {"type": "grammar", "grammar": "root ::= a"}}, "response_format"),
    ({"response_format": {"type": "grammar", "grammar": 'start: "a" start'}}, "response_format"),
    ({"response_format": {"type": "grammar", "grammar": "start:", "max_depth": 101}}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "a"}, "guided_choice": ["b"]}, "guided_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "a{17}"}}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "a"}, "stop": "x"}, "stop"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"guided_grammar": "x"}, "guided_grammar"),
    ({"guided_grammar": 'start: "a"', "guided_regex": "a"}, "guided_grammar"),
    ({"guided_json": "{"}, "guided_json"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [5000]}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ({"prompt": "a" * MAX_MODEL_LEN}, "prompt"),
    ({"stop": ["x"], "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"smc": {"particle": True}}, "smc.particle"),
    ({"tempature": 1}, "tempature"),
]


def test_what_cannot_be_honoured_is_refused(http: httpx.Client) -> None:
    """In JSON, before any stream begins."""
    for body, param in REFUSED:
        response = http.post("/v1/completions", json={"prompt": "ab", **body, "stream": True})
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_values_that_ask_for_nothing(client: openai.OpenAI) -> None:
    neutral: dict[str, Any] = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "best_of": 1,
        "echo": False,
    }
    fields: dict[str, Any] = {"model": "pair", "prompt": "ab", "seed": 9}
    # What sglang-router 0.3 adds to a request.
    neutral["extra_body"] = {
        "no_stop_trim": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "return_hidden_states": False,
        "continue_final_message": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
    }
    plain, with_neutral = client.completions.create(**fields), client.completions.create(**fields, **neutral)
    assert plain.choices[0].text == with_neutral.choices[0].text


def test_an_overlong_prompt_is_told_the_sizes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="has 200 tokens and max_model_len is 96") as caught:
        client.completions.create(model="pair", prompt="a" * 200, stream=True)
    assert caught.value.code == "context_length_exceeded"
