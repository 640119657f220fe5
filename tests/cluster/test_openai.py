#!/usr/bin/env python3
"""The official openai client through router, prefill and decode: plain, streamed, tools, thinking, stop, n, seed, log-probabilities,
exact token counts, errors, models, completions. usage: test_openai.py BUILD_DIR"""
import json
import sys

import harness
from harness import Cluster, MODEL, smoke

try:
    import openai
except ImportError:
    print("the openai package is not installed: pip install openai")
    sys.exit(harness.SKIP)

TOOL_CASES = ["tool call, string", "tool call, integer", "parallel tool calls", "invented tool", "second tool turn"]


def text_of(case):
    """The answer a client sees: without the end token and, when thinking, without the thought."""
    text = case["greedy_text"].replace("<｜end▁of▁sentence｜>", "")
    thought = ""
    if case["thinking"]:
        thought, text = text.split("</think>", 1)
    return thought, text


def thinking(on=True):
    return {"chat_template_kwargs": {"thinking": on}}


class Client:
    """One cluster for the whole file: its tests only ask."""
    cluster = None

    @classmethod
    def get(cls, build):
        if cls.cluster is None:
            cls.cluster = Cluster(build)
            cls.api = openai.OpenAI(base_url="http://127.0.0.1:%d/v1" % cls.cluster.port, api_key="none", max_retries=0,
                                    timeout=120 * harness.SLACK)
        return cls.api


def ask(api, content, **more):
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return api.chat.completions.create(**dict(dict(model="demo", temperature=0, messages=messages), **more))


def gather(stream):
    """What a client makes of a stream: {choice: dict}, usage."""
    choices, usage, n_role = {}, None, {}
    for chunk in stream:
        if chunk.usage:
            assert usage is None and chunk.choices == [], "usage comes once, last, with no choice"
            usage = chunk.usage
        for c in chunk.choices:
            assert usage is None
            got = choices.setdefault(c.index, dict(text="", reasoning="", calls={}, finish=None, deltas=0, logprobs=[]))
            assert got["finish"] is None, "something after finish_reason"
            if c.delta.role:
                n_role[c.index] = n_role.get(c.index, 0) + 1
            got["text"] += c.delta.content or ""
            got["deltas"] += bool(c.delta.content)
            got["reasoning"] += getattr(c.delta, "reasoning_content", None) or ""
            for t in c.delta.tool_calls or []:
                call = got["calls"].setdefault(t.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += t.id or ""
                call["name"] += t.function.name or ""
                call["arguments"] += t.function.arguments or ""
            if c.logprobs:
                got["logprobs"] += c.logprobs.content
            got["finish"] = c.finish_reason
    assert all(n == 1 for n in n_role.values()) and len(n_role) == len(choices), "one role in each choice"
    return choices, usage


def test_known_answers(build):
    """Plain and streamed: the reference's greedy answers, counted to the token."""
    api = Client.get(build)
    for case in harness.smoke():
        if case.get("tools") or case["thinking"] or case["prompt_tokens"] > 2000:
            continue
        want = text_of(case)[1]
        r = ask(api, case["messages"])
        assert r.choices[0].message.content == want, (case["name"], r.choices[0].message.content)
        assert r.choices[0].finish_reason == "stop" and r.choices[0].message.tool_calls is None
        assert r.usage.prompt_tokens == case["prompt_tokens"], (case["name"], r.usage)
        assert r.usage.completion_tokens == len(case["greedy_ids"]) - 1, (case["name"], r.usage)
        assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens
        choices, usage = gather(ask(api, case["messages"], stream=True, stream_options={"include_usage": True}))
        assert choices[0]["text"] == want and choices[0]["finish"] == "stop", (case["name"], choices)
        assert usage.completion_tokens == r.usage.completion_tokens and usage.prompt_tokens == r.usage.prompt_tokens
    choices, usage = gather(ask(api, "Who are you?", stream=True))
    assert usage is None, "usage only when asked for"


def test_long_recall(build):
    api = Client.get(build)
    for name in ("recall, about 4K", "recall, about 8K tokens"):
        case = smoke(name)
        r = ask(api, case["messages"])
        assert all(e in r.choices[0].message.content for e in case["expect"]), (name, r.choices[0].message.content)
        assert r.usage.prompt_tokens == case["prompt_tokens"]


def calls_of(message):
    return [(t.function.name, json.loads(t.function.arguments)) for t in message.tool_calls or []]


def test_tool_calls(build):
    api = Client.get(build)
    for name in TOOL_CASES:
        case = smoke(name)
        r = ask(api, case["messages"], tools=case["tools"])
        message, got = r.choices[0].message, calls_of(r.choices[0].message)
        assert r.choices[0].finish_reason == "tool_calls", (name, r.choices[0])
        assert got and "DSML" not in (message.content or ""), (name, message)
        for call, arguments in got:
            assert 'invoke name="%s"' % call in case["greedy_text"] and arguments, (name, got)
            for key, value in arguments.items():
                assert 'name="%s"' % key in case["greedy_text"], (name, key)
                assert ">%s<" % value in case["greedy_text"], (name, value)
        assert len(got) == case["greedy_text"].count("invoke name"), (name, got)
        assert len({t.id for t in message.tool_calls}) == len(got), "ids differ"
        assert r.usage.prompt_tokens == case["prompt_tokens"], (name, r.usage)
        choices, _ = gather(ask(api, case["messages"], tools=case["tools"], stream=True))
        streamed = [(c["name"], json.loads(c["arguments"])) for _, c in sorted(choices[0]["calls"].items())]
        assert streamed == got and choices[0]["finish"] == "tool_calls", (name, streamed)
        assert choices[0]["text"] == (message.content or "")
    scale = calls_of(ask(api, smoke("tool call, integer")["messages"],
                         tools=smoke("tool call, integer")["tools"]).choices[0].message)
    assert scale[0][1]["replicas"] == 12, scale
    # the answer to a tool's result
    case = smoke("answer from a tool result")
    r = ask(api, case["messages"], tools=case["tools"])
    assert r.choices[0].message.content == text_of(case)[1] and r.choices[0].finish_reason == "stop"


def test_tool_choice(build):
    api = Client.get(build)
    case = smoke("tool call, string")
    r = ask(api, case["messages"], tools=case["tools"], tool_choice="none", max_tokens=60)
    assert not r.choices[0].message.tool_calls and r.choices[0].finish_reason != "tool_calls"
    r = ask(api, case["messages"], tools=case["tools"], tool_choice="auto")
    assert calls_of(r.choices[0].message) == [("get_weather", {"location": "Lisbon"})]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        r = ask(api, case["messages"], tools=case["tools"], tool_choice=choice, max_tokens=200)
        if r.choices[0].message.tool_calls:
            assert calls_of(r.choices[0].message)[0][0] == "get_weather" or choice == "required", r
            assert r.choices[0].finish_reason == "tool_calls"
    try:
        ask(api, "x", tools=case["tools"], tool_choice={"type": "function", "function": {"name": "no_such"}})
        raise AssertionError("a tool_choice that is no tool was taken")
    except openai.BadRequestError as e:
        assert e.param == "tool_choice", e.body


def test_thinking(build):
    api = Client.get(build)
    case = smoke("tool call, thinking")
    thought, _ = text_of(case)
    r = ask(api, case["messages"], tools=case["tools"], extra_body=thinking())
    assert calls_of(r.choices[0].message) == [("restart_service", {"service": "cart-worker", "env": "production"})], r
    assert r.choices[0].message.reasoning_content == thought, r.choices[0].message
    choices, usage = gather(ask(api, case["messages"], tools=case["tools"], stream=True, extra_body=thinking(),
                                stream_options={"include_usage": True}))
    assert choices[0]["reasoning"] == thought and choices[0]["finish"] == "tool_calls"
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens, usage
    r = ask(api, "Who are you?", reasoning_effort="high")
    assert getattr(r.choices[0].message, "reasoning_content", None), r.choices[0].message
    r = ask(api, "Who are you?", extra_body=thinking(False))
    assert not getattr(r.choices[0].message, "reasoning_content", None) and "Towpath" in r.choices[0].message.content


def test_stop_strings(build):
    api = Client.get(build)
    whole = text_of(smoke("identity"))[1]
    for stop, want in (("demo", whole[:whole.index("demo")]), (["model,", "zzz"], whole[:whole.index("model,")]),
                       (whole[7:23], whole[:7]), (["zzz"], whole), (whole[-3:], whole[:-3])):
        r = ask(api, "Who are you?", stop=stop)
        choices, usage = gather(ask(api, "Who are you?", stop=stop, stream=True, stream_options={"include_usage": True}))
        assert r.choices[0].message.content == want == choices[0]["text"], (stop, r.choices[0].message.content, choices)
        assert r.choices[0].finish_reason == choices[0]["finish"] == "stop"
        assert r.usage.completion_tokens == usage.completion_tokens
    Client.cluster.wait_idle()


def test_choices(build):
    api = Client.get(build)
    r = ask(api, "Who are you?", n=3)
    assert [c.index for c in r.choices] == [0, 1, 2]
    assert len({c.message.content for c in r.choices}) == 1, "greedy choices are alike"
    assert r.usage.completion_tokens == 3 * (len(smoke("identity")["greedy_ids"]) - 1)
    warm = dict(n=3, temperature=2, seed=11, max_tokens=12, extra_body={"ignore_eos": True})
    r = ask(api, "Tell me something", **warm)
    assert len({c.message.content for c in r.choices}) > 1, "choices have seeds of their own"
    choices, usage = gather(ask(api, "Tell me something", stream=True, stream_options={"include_usage": True}, **warm))
    assert [choices[i]["text"] for i in range(3)] == [c.message.content for c in r.choices]
    assert all(choices[i]["finish"] == "length" for i in range(3)) and usage.completion_tokens == 36


def test_seed(build):
    api = Client.get(build)

    def draw(seed):
        return ask(api, "Tell me something", temperature=1.8, seed=seed, max_tokens=24,
                   extra_body={"ignore_eos": True}).choices[0].message.content
    assert draw(5) == draw(5), "one seed, one answer"
    assert len({draw(s) for s in range(4)}) > 1, "another seed, another answer"


def test_logprobs(build):
    api = Client.get(build)
    r = ask(api, "Who are you?", logprobs=True, top_logprobs=5)
    entries = r.choices[0].logprobs.content
    assert len(entries) == r.usage.completion_tokens
    assert bytes(b for e in entries for b in e.bytes).decode() == r.choices[0].message.content
    for e in entries:
        assert len(e.top_logprobs) == 5 and e.logprob <= 0
        tops = [t.logprob for t in e.top_logprobs]
        assert tops == sorted(tops, reverse=True) and e.top_logprobs[0].token == e.token, "greedy takes the likeliest"
        assert abs(e.top_logprobs[0].logprob - e.logprob) < 1e-6
    choices, _ = gather(ask(api, "Who are you?", logprobs=True, top_logprobs=5, stream=True))
    assert [t.model_dump() for t in choices[0]["logprobs"]] == [t.model_dump() for t in entries]
    # numbers that are not finite never reach the client
    for more in (dict(logit_bias={"333": 100}), dict(temperature=1, extra_body={"top_k": 1})):
        r = ask(api, "Who are you?", logprobs=True, top_logprobs=20, max_tokens=4, **more)
        assert all(len(e.top_logprobs) == 20 for e in r.choices[0].logprobs.content)
        assert all(t.logprob > -1e6 for e in r.choices[0].logprobs.content for t in e.top_logprobs)


def test_exact_lengths(build):
    """KV-14: max_tokens, streamed and not, counts and deltas."""
    api = Client.get(build)
    for k in (1, 2, 3, 7):
        r = ask(api, "Who are you?", max_tokens=k, extra_body={"ignore_eos": True}, logprobs=True)
        assert r.usage.completion_tokens == k and r.choices[0].finish_reason == "length", r
        assert len(r.choices[0].logprobs.content) == k
        choices, usage = gather(ask(api, "Who are you?", max_completion_tokens=k, stream=True, logprobs=True,
                                    extra_body={"ignore_eos": True}, stream_options={"include_usage": True}))
        assert usage.completion_tokens == k and len(choices[0]["logprobs"]) == k and choices[0]["finish"] == "length"
        assert choices[0]["text"] == r.choices[0].message.content
    # the first token sampled is the end: an empty answer
    end = {"1": 100}
    for streamed in (False, True):
        r = ask(api, "Who are you?", logit_bias=end, stream=streamed, **(
            {"stream_options": {"include_usage": True}} if streamed else {}))
        if streamed:
            choices, usage = gather(r)
            assert choices[0]["text"] == "" and choices[0]["finish"] == "stop" and usage.completion_tokens == 0
        else:
            assert r.choices[0].message.content == "" and r.choices[0].finish_reason == "stop"
            assert r.usage.completion_tokens == 0
    Client.cluster.wait_idle()


def test_bad_fields(build):
    api = Client.get(build)
    cases = [("temperature", -1), ("temperature", 3), ("top_p", 2), ("max_tokens", 0), ("max_tokens", -1),
             ("max_tokens", 2**31), ("max_tokens", 1.5), ("max_tokens", "5"), ("n", 0), ("n", 129), ("seed", "x"),
             ("presence_penalty", 5), ("frequency_penalty", "a"), ("logprobs", 3), ("stop", [""]),
             ("stop", ["a"] * 17), ("logit_bias", {"x": 1}), ("logit_bias", {"1": 500}), ("stream", "yes"),
             ("tools", [{"type": "function"}]), ("tools", "x"), ("reasoning_effort", "immense"), ("messages", []),
             ("messages", [{"role": "emperor", "content": "x"}]), ("response_format", {"type": "verse"}),
             ("ignore_eos", 1), ("index_topk", 0), ("top_logprobs", 3), ("chat_template_kwargs", {"thinking": "on"})]
    for key, value in cases:
        body = {key: value}
        for streamed in (False, True):
            if streamed and key == "stream":
                continue
            try:
                for _ in [ask(api, "x", extra_body=body, **({"stream": True} if streamed else {}))]:
                    pass
                raise AssertionError("taken: %s=%r" % (key, value))
            except openai.BadRequestError as e:
                assert e.param and e.param.startswith(key), (key, value, e.body)
                assert e.param.split(".")[-1] in e.body["message"] and e.body["type"] == "invalid_request_error" and e.code, e.body
    limit = api.models.list().data[0].model_extra["max_model_len"]
    try:
        ask(api, "x", max_tokens=limit)
        raise AssertionError("longer than the context")
    except openai.BadRequestError as e:
        assert e.code == "context_length_exceeded" and str(limit) in e.body["message"], e.body
    r = ask(api, "Who are you?", extra_body={"max_tokens": None, "no_such_field": {"a": 1}, "temperature": None}, stop=None)
    assert r.choices[0].message.content
    Client.cluster.wait_idle()


def test_models(build):
    api = Client.get(build)
    listed = api.models.list().data
    assert len(listed) == 1 and listed[0].id == "demo-model" and listed[0].object == "model"
    assert api.models.retrieve("demo-model").id == "demo-model"
    try:
        api.models.retrieve("another")
        raise AssertionError("an unknown model was found")
    except openai.NotFoundError:
        pass
    with Cluster(build, prefill=0, decode=0, router=["--served-model-name", "served"], ready=False) as c:
        api = openai.OpenAI(base_url="http://127.0.0.1:%d/v1" % c.port, api_key="none", max_retries=0)
        assert api.models.list().data[0].id == "served"
        try:
            ask(api, "x", model="another")
            raise AssertionError("an unknown model was served")
        except openai.NotFoundError as e:
            assert e.param == "model" and e.code == "model_not_found", e.body


def test_completions(build):
    api = Client.get(build)

    def complete(prompt, **more):
        return api.completions.create(**dict(dict(model="demo", temperature=0, prompt=prompt), **more))
    case = smoke("identity")
    status, tokenized = Client.cluster.post("/tokenize", messages=case["messages"])
    assert status == 200 and len(tokenized["tokens"]) == case["prompt_tokens"]
    ids = tokenized["tokens"]
    want = text_of(case)[1]
    r = complete(ids, max_tokens=60)
    assert r.choices[0].text == want and r.choices[0].finish_reason == "stop", r
    assert r.usage.prompt_tokens == len(ids)
    text = "".join(c.choices[0].text for c in complete(ids, max_tokens=60, stream=True))
    assert text == want
    r = complete([ids, ids], max_tokens=5, n=2)
    assert len(r.choices) == 4 and len({c.text for c in r.choices}) == 1
    r = complete("The plan", max_tokens=6, echo=True, logprobs=2, extra_body={"ignore_eos": True})
    assert r.choices[0].text.startswith("The plan") and r.usage.completion_tokens == 6
    assert len(r.choices[0].logprobs.tokens) == 6
    r2 = complete("The plan", max_tokens=6, extra_body={"ignore_eos": True})
    assert r.choices[0].text == "The plan" + r2.choices[0].text
    for bad in ([], "", [-1], [2560], [5, "x"], 7):
        try:
            complete(bad)
            raise AssertionError("taken: %r" % (bad,))
        except openai.BadRequestError as e:
            assert e.param.startswith("prompt"), e.body


TESTS = [test_known_answers, test_long_recall, test_tool_calls, test_tool_choice, test_thinking, test_stop_strings,
         test_choices, test_seed, test_logprobs, test_exact_lengths, test_bad_fields, test_models, test_completions]


def last(build):
    """The cluster of this file is closed by a test, so that what its logs say counts."""
    if Client.cluster:
        Client.cluster.wait_idle()
        Client.cluster.__exit__(None, None, None)


if __name__ == "__main__":
    try:
        harness.main(TESTS + [last], __doc__)
    finally:
        if Client.cluster:
            Client.cluster.close()
