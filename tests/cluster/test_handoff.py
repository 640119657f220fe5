#!/usr/bin/env python3
"""What two processes compute together is what one computes alone, at every border of pages, windows and chunks; pairs that do not
fit are refused with one line. usage: test_handoff.py BUILD_DIR"""
import json
import os
import re
import shutil
import socket
import subprocess

import harness
from harness import Cluster, Job, MODEL, free_port, greedy_reference, token_ids, wait_for

N = 24
LENGTHS = [1, 3, 4, 63, 64, 65, 127, 128, 129, 255, 256, 257, 399, 400, 401, 2047, 2048]


def ask(cluster, ids, **more):
    status, answer = cluster.post("/v1/completions", **dict(dict(prompt=ids, temperature=0, max_tokens=N, ignore_eos=True,
                                                                logprobs=0), **more))
    assert status == 200, answer
    choice = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == N and choice["finish_reason"] == "length", answer
    return choice["text"], choice["logprobs"]["token_logprobs"]


def text_of(cluster, ids):
    """As an answer shows it: special tokens are left out."""
    with open(os.path.join(MODEL, "tokenizer.json")) as f:
        special = {t["id"] for t in json.load(f)["added_tokens"] if t["special"]}
    status, answer = cluster.post("/detokenize", tokens=[i for i in ids if i not in special])
    assert status == 200, answer
    return answer["prompt"]


def check(cluster, ids, want):
    """want: the ids and log-probabilities of one process."""
    text, logprobs = ask(cluster, ids)
    assert text == text_of(cluster, [i for i, _ in want]), (len(ids), text, [i for i, _ in want])
    worst = max(abs(a - b) for a, (_, b) in zip(logprobs, want))
    assert worst < 2e-4, (len(ids), worst)
    return text, logprobs


def test_equal_to_one_process(build):
    """KV-17, KV-18: several chunk sizes, one of them not a divisor of the page; every answer equal to the last bit."""
    prompts = {n: token_ids(n, n) for n in LENGTHS}
    want = {n: greedy_reference(build, prompts[n], N) for n in LENGTHS}
    exact = {}
    for chunk in (64, 200, 512):
        with Cluster(build, prefill_args=["--chunk-tokens", str(chunk)]) as c:
            for n in LENGTHS:
                got = check(c, prompts[n], want[n])
                assert exact.setdefault(n, got) == got, "chunks of %d change the answer to %d tokens" % (chunk, n)
            # two at once, of different lengths
            for a, b in ((2048, 257), (401, 400), (129, 2047)):
                jobs = [Job(ask, c, prompts[n]) for n in (a, b)]
                assert [j.result() for j in jobs] == [exact[a], exact[b]], (a, b)
            c.wait_idle()
            assert c.prefills[0].metric("move_bad_digests_total") == 0 and c.decodes[0].metric("move_bad_digests_total") == 0


def test_used_pools(build):
    """KV-17: pages in another order than on a fresh server, and prompts in company; the answers stay the same."""
    prompts = [token_ids(n, 7 * n) for n in (700, 1300, 257, 4, 520, 900)]
    with Cluster(build, workers=["--kv-pages", "40"]) as c:
        alone = [ask(c, p) for p in prompts]
        for seed in range(3):
            jobs = [Job(ask, c, token_ids(200 + 137 * i, 1000 + seed * 10 + i)) for i in range(5)]  # shifts the free lists
            jobs += [Job(ask, c, p) for p in prompts]
            got = [j.result() for j in jobs][5:]
            assert got == alone, "round %d" % seed
            assert [ask(c, p) for p in prompts] == alone
        c.wait_idle()


def test_memory_apart(build):
    """A device whose memory is not the host's: pages are copied out and in beside the passes, and the answers are those of one whose
    memory is; also when sequences end at their first token, or are given up on the way, and others take their pages."""
    prompts = [token_ids(n, 11 * n) for n in (700, 1300, 257, 4, 520, 900)]
    with Cluster(build, workers=["--kv-pages", "40"]) as c:
        want = [ask(c, p) for p in prompts]
    with Cluster(build, workers=["--kv-pages", "40", "--device", "apart:cpu"], prefill_args=["--chunk-tokens", "200"]) as c:
        assert [ask(c, p) for p in prompts] == want
        for seed in range(3):
            short = [Job(c.post, "/v1/completions", prompt=token_ids(150 + 90 * i, 2000 + seed * 10 + i), max_tokens=1)
                     for i in range(5)]
            jobs = [Job(ask, c, p) for p in prompts]
            assert [j.result() for j in jobs] == want, "round %d" % seed
            assert all(j.result()[0] == 200 for j in short), "round %d" % seed
        c.wait_idle()
        assert c.decodes[0].metric("move_bad_digests_total") == 0


def one_line(text, *parts):
    lines = [l for l in text.split("\n") if all(p in l for p in parts)]
    assert len(lines) == 1, "%d lines with %r in:\n%s" % (len(lines), parts, text)
    return lines[0]


def test_mismatched_workers(build):
    """KV-07: what cannot be exchanged is refused when it joins; one line names the field and both values."""
    with Cluster(build) as c:
        other = os.path.join(c.dir, "other")
        os.mkdir(other)
        for f in os.listdir(MODEL):
            source = os.path.join(MODEL, f)
            if f == "model.safetensors":  # one weight differs
                with open(source, "rb") as a, open(os.path.join(other, f), "wb") as b:
                    data = bytearray(a.read())
                    data[-5] ^= 1
                    b.write(data)
            elif os.path.isfile(source):
                os.symlink(source, os.path.join(other, f))
        config = os.path.join(c.dir, "config")
        os.mkdir(config)
        for f in os.listdir(MODEL):
            if f != "config.json" and os.path.isfile(os.path.join(MODEL, f)):
                os.symlink(os.path.join(MODEL, f), os.path.join(config, f))
        text = open(os.path.join(MODEL, "config.json")).read()
        with open(os.path.join(config, "config.json"), "w") as f:
            f.write(text.replace('"rope_theta": 10000', '"rope_theta": 20000'))
        cases = [("kv", ["--kv-dtype", "bf16"], ["kv_dtype", "fp8", "bf16"]),
                 ("ik", ["--index-keys", "fp8"], ["index_keys", "fp4", "fp8"]),
                 ("exact", ["--numerics", "exact"], ["refuses", "f32"]),
                 ("config", ["--model", config], ["model.fingerprint"])]
        for role in ("prefill", "decode"):
            for name, flags, parts in cases:
                w = c.worker(role, "%s-%s" % (name, role), *flags)
                c.others.append(w)
                w.start()
                w.wait_log(r"refuses: .*" + parts[0] if parts[0] != "refuses" else r"refuses: ", 20)
                line = one_line(w.log(), "refuses", *parts)
                assert re.search(r"\S+ is \S+, must be \S+ as of worker [pd]1", line), line
                assert c.request("GET", "/ready")[0] == 200 and w.name not in c.admin()
                assert w.alive()
                w.terminate()
                assert w.wait() == 0
        # numbers that must agree within a pair: it may join, for others like it, but is no pair with those of this cluster
        w = c.worker("prefill", "topk", "--index-topk", "65")
        c.others.append(w)
        w.start()
        line = c.router.wait_log(r"topk and d1 are no pair: .*").group(0)
        assert "index_topk" in line and "'65' and '64'" in line, line
        for one, other in ((w, "d1"), (c.decodes[0], "topk")):
            one.wait_log(r"no pair with %s: numerics\.index_topk: '65' and '64'" % other)
        wait_for("it is seen", lambda: "topk" in c.admin())
        pair = c.admin()["topk"]["pairs"][0]
        assert pair["proof"] == "refuted" and c.admin()["topk"]["state"] == "starting"
        assert pair["why"] == "numerics.index_topk: '65' and '64'", pair
        status, _ = c.chat("Who are you?")
        assert status == 200
        c.wait_idle()


def test_worker_of_another_model(build):
    """Alone with a router whose model it does not serve, it is refused all the same: ids of one tokenizer mean nothing to the other."""
    with Cluster(build, start=False) as c:
        # the router's folder is the other one, so that the workers' weights fit their own: one word of the tokenizer differs,
        # and then the numbers of config.json too
        other = os.path.join(c.dir, "other-model")
        os.mkdir(other)
        for f in ("config.json", "tokenizer.json", "generation_config.json"):
            shutil.copy(os.path.join(MODEL, f), other)
        with open(os.path.join(other, "tokenizer.json"), "a") as f:
            f.write("\n")
        argv, flags = c.router.argv, lambda folder: ["--model", folder] + argv[2:]
        assert argv[0] == "--model", argv
        c.router.argv = flags(other)
        c.router.start().wait_up()
        for w in c.workers:
            w.start().wait_up()
            line = w.wait_log(r"refuses: model\.tokenizer is ([0-9a-f]{16}), must be ([0-9a-f]{16}) as in this router's --model: "
                              r"it serves another model, 'other-model' and not 'demo-model'")
            assert line.group(1) != line.group(2)
            one_line(c.router.log(), "worker %s is refused: model.tokenizer is %s" % (w.name, line.group(1)), "another model")
            status, _, text = harness.http_call(w.port, "GET", "/ready")
            assert status == 503 and b"refuses: model.tokenizer is" in text and b"'other-model'" in text, text
        seen = json.loads(c.request("GET", "/admin/refused")[2])
        assert {f["name"]: f["field"] for f in seen} == {"p1": "model.tokenizer", "d1": "model.tokenizer"}, seen
        assert c.request("GET", "/ready")[0] == 503 and c.admin() == {}
        shown = subprocess.run([os.path.join(harness.ROOT, build, "bin", "towpath-ctl"), "status", "--url",
                                "http://127.0.0.1:%d" % c.port], stdout=subprocess.PIPE).stdout.decode()
        assert re.search(r"^refused decode worker d1: model\.tokenizer is .*'other-model' and not 'demo-model'", shown, re.M), shown
        # a larger vocabulary is said first; of a folder of weights alone, without a tokenizer, the numbers still tell
        with open(os.path.join(MODEL, "config.json")) as f:
            config = json.load(f)
        with open(os.path.join(other, "config.json"), "w") as f:
            json.dump(dict(config, vocab_size=config["vocab_size"] + 128), f)
        bare = os.path.join(c.dir, "bare")
        os.mkdir(bare)
        for f in ("config.json", "model.safetensors"):
            os.symlink(os.path.join(MODEL, f), os.path.join(bare, f))
        c.router.restart()
        w = c.worker("decode", "weights-only", "--model", bare)
        c.others.append(w)
        w.start()
        w.wait_log(r"refuses: model\.vocab_size is %d, must be %d as in this router's --model" %
                   (config["vocab_size"], config["vocab_size"] + 128))
        # the router gets the right folder: they join by themselves, and the weights alone will do
        c.router.argv = flags(MODEL)
        c.router.restart()
        c.wait_ready()
        wait_for("the one without a tokenizer has joined", lambda: w.name in c.admin())
        assert c.chat("Who are you?")[0] == 200
        assert json.loads(c.request("GET", "/admin/refused")[2]) == []


def test_join_token(build):
    def secret(folder, name, text, mode=0o600):
        path = os.path.join(folder, name)
        with open(path, "w") as f:
            f.write(text)
        os.chmod(path, mode)
        return path
    with Cluster(build, start=False) as c:
        right, wrong = secret(c.dir, "right", "sentinel-right-4711\n"), secret(c.dir, "wrong", "sentinel-wrong-4712\n")
        c.router.argv += ["--join-token-file", right]
        for w in c.workers:
            w.argv += ["--join-token-file", right]
        c.router.start().wait_up()
        for w in c.workers:
            w.start()
        c.wait_ready()
        assert c.chat("Who are you?")[0] == 200
        for flags in ([], ["--join-token-file", wrong]):
            w = c.worker("decode", "stranger", *flags)
            c.others.append(w)
            w.start()
            w.wait_log(r"refuses: join_token")
            one_line(w.log(), "refuses", "join_token")
            assert "stranger" not in c.admin()
            # the router says it too: once in its log, and to whoever asks
            one_line(c.router.log(), "decode worker stranger is refused: join_token is %s" % ("another" if flags else "none"))
            seen = {f["why"]: f for f in json.loads(c.request("GET", "/admin/refused")[2])}
            assert all(f["name"] == "stranger" and f["field"] == "join_token" for f in seen.values()), seen
            w.wait_up()
            status, _, text = harness.http_call(w.port, "GET", "/ready")
            assert status == 503 and b"refuses: join_token is" in text and c.control.encode() in text, text
            w.kill()
        # OP-06: no secret in a log or a command line; a file that others may read is refused
        for p in c.all + c.others:
            assert "sentinel" not in p.log(), p.name
        for path in ("/metrics", "/admin/workers"):
            assert b"sentinel" not in c.request("GET", path)[2]
        w = c.worker("decode", "careless", "--join-token-file", secret(c.dir, "open", "sentinel-open\n", 0o644))
        c.others.append(w)
        w.start()
        assert w.wait() != 0 and "join-token-file" in w.log() and "sentinel-open" not in w.log()
    # a router that has none takes no worker that has one: it would make no pair with those that have none
    with Cluster(build, start=False) as c:
        right = secret(c.dir, "right", "sentinel-right-4711\n")
        c.decodes[0].argv += ["--join-token-file", right]
        c.router.start().wait_up()
        for w in c.workers:
            w.start().wait_up()
        c.decodes[0].wait_log(r"refuses: join_token is one, must be none: .*--join-token-file")
        c.router.wait_log(r"decode worker d1 is refused: join_token is one, must be none")
        status, _, text = harness.http_call(c.decodes[0].port, "GET", "/ready")
        assert status == 503 and b"this router has no --join-token-file" in text, text
        shown = subprocess.run([os.path.join(harness.ROOT, build, "bin", "towpath-ctl"), "status", "--url",
                                "http://127.0.0.1:%d" % c.port], stdout=subprocess.PIPE).stdout.decode()
        assert re.search(r"^refused decode worker d1: join_token is one, must be none: .* \(times: \d+\)$", shown, re.M), shown
        assert "sentinel" not in shown + c.router.log() + c.decodes[0].log()
        c.decodes[0].argv = c.decodes[0].argv[:-2]
        c.decodes[0].restart()
        c.wait_ready()
        assert json.loads(c.request("GET", "/admin/refused")[2]) == []


def test_ports(build):
    """KV-10: a port that is taken ends the program at once, with a line naming port and setting."""
    with socket.socket() as s, Cluster(build, start=False) as c:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        for flag, value, program in (("--http", "127.0.0.1:%d" % port, "router"),
                                     ("--control", "tcp://127.0.0.1:%d" % port, "router"),
                                     ("--status", "127.0.0.1:%d" % port, "prefill"),
                                     ("--status", "127.0.0.1:%d" % port, "decode")):
            p = c.router if program == "router" else c.worker(program, "taken-" + program)
            argv, p.argv = p.argv, p.argv + [flag, value]
            if p is not c.router:
                c.others.append(p)
            p.start()
            assert p.wait(15) == 1, "%s %s: exit %s" % (program, flag, p.popen.returncode)
            assert str(port) in p.log() and flag.strip("-") in p.log(), p.log()
            p.argv = argv
    # many of each on one host at the same moment: nothing overlaps
    control = "tcp://127.0.0.1:%d" % free_port()
    with Cluster(build, prefill=2, decode=2, control=control) as c:
        assert len({p.port for p in c.all}) == 5
        assert c.chat("Who are you?")[0] == 200


def fault_places():
    """Of the libraries of a worker, by their source."""
    for folder, _, files in os.walk(os.path.join(harness.ROOT, "common")):
        for name in files:
            with open(os.path.join(folder, name), encoding="utf-8") as f:
                yield from re.findall(r'tow_fault\("([a-z.]+)"\)|= "(mover\.[a-z]+)"', f.read()) if name.endswith(".c") else ()


def test_bad_settings(build):
    """A value that cannot be right stops the program with a line naming the flag and the right range. --check-config
    says the same line, unless only the network shows it."""
    with Cluster(build, start=False) as c:
        open_dir = os.path.join(c.dir, "open")
        os.mkdir(open_dir)
        os.chmod(open_dir, 0o777)
        zero = os.path.join(c.dir, "zero")  # of its text a C string would be empty: no secret at all
        with open(zero, "wb") as f:
            f.write(b"\0secret\n")
        os.chmod(zero, 0o600)
        for program, flags, parts in (("router", ["--max-queued", "0"], ["max-queued", "1"]),
                                      ("router", ["--queue-timeout", "nan"], ["queue-timeout"]),
                                      ("router", ["--http", "127.0.0.1:99999"], ["http"]),
                                      ("router", ["--control", "udp://x"],
                                       ["--control: 'udp://x'", "tcp://ADDR:PORT or ipc:///PATH"]),
                                      ("router", ["--control", "tcp://nohost"],
                                       ["--control: 'tcp://nohost'", "tcp://ADDR:PORT or ipc:///PATH"]),
                                      ("router", ["--control", "ipc://here"],
                                       ["--control: 'ipc://here'", "tcp://ADDR:PORT or ipc:///PATH"]),
                                      ("router", ["--control", "tcp://192.0.2.1:7000"],
                                       ["--control: ", "tcp://192.0.2.1:7000", "cannot listen"]),
                                      ("decode", ["--join", "tcp://127.0.0.1:7000,tcp://x:99999"],
                                       ["--join: 'tcp://x:99999'", "tcp://ADDR:PORT or ipc:///PATH"]),
                                      ("decode", ["--join", "tcp://127.0.0.1:0"], ["--join: tcp://127.0.0.1:0", "1 to 65535"]),
                                      ("decode", ["--join", "tcp://a:1,tcp://a:1"], ["--join: tcp://a:1 stands there twice"]),
                                      ("prefill", ["--join-token-file", zero], ["--join-token-file", "zero byte, at 0"]),
                                      ("router", ["--join-token-file", zero], ["--join-token-file", "zero byte, at 0"]),
                                      ("router", ["--api-key-file", zero], ["--api-key-file " + zero + ":1", "byte 0"]),
                                      ("prefill", ["--max-pending-tokens", "15"], ["--max-pending-tokens: '15'", "16 to"]),
                                      ("prefill", ["--chunk-tokens", "0"], ["chunk-tokens", "1"]),
                                      ("prefill", ["--kv-dtype", "fp7"], ["kv-dtype", "fp8"]),
                                      ("decode", ["--max-batch", "-1"], ["max-batch"]),
                                      ("decode", ["--context-length", "100000000"], ["context-length"]),
                                      ("decode", ["--model", "/nowhere"], ["--model: /nowhere/config.json: "]),
                                      ("decode", ["--no-such-flag"], ["no-such-flag"]),
                                      ("decode", ["--name", "a b"], ["name"]),
                                      ("decode", ["--kv-pages", "2", "--context-length", "65536"],
                                       ["--context-length 65536: ", "2 pages of 256 tokens hold 512"]),
                                      ("prefill", ["--kv-pages", "2000000000"], ["--kv-pages", "MiB"]),
                                      ("decode", ["--fault", "kv.get=1,engine.stop=1"], ["--fault", "'engine.stop'"]),
                                      ("prefill", ["--fault", "send.HALLO=1"], ["--fault", "'send.HALLO'"]),
                                      ("prefill", ["--fault", "send.HELLO=0"], ["--fault", "send.HELLO=0"]),
                                      ("decode", ["--device", "mirror:cpu"], ["--device mirror:cpu", "towpath-ctl"]),
                                      ("prefill", ["--device", "mirror:cuda:0"], ["--device mirror:cuda:0", "cuda:N"]),
                                      ("decode", ["--device", "gpu"], ['--device "gpu": must be "cpu" or "cuda:N"']),
                                      ("decode", ["--device", "cuda:00"], ['--device "cuda:00": must be "cpu" or "cuda:N", N from 0 to 255']),
                                      ("decode", ["--kv-pages", "20000000", "--max-batch", "64"],
                                       ["--kv-pages 20000000: with 256 tails (--max-batch 64) that is"]),
                                      ("decode", ["--index-keys", "f32"], ["--index-keys f32", "exact"]),
                                      ("router", ["--api-key-file", "/nowhere"], ["--api-key-file /nowhere"]),
                                      ("router", ["--api-key-file", "/dev/null"], ["--api-key-file /dev/null"]),
                                      ("router", ["--record-dir", open_dir], ["--record-dir " + open_dir, "0700"]),
                                      ("router", ["--record-dir", "/dev/null"], ["--record-dir /dev/null"]),
                                      ("router", ["--record-dir", "/nowhere/r"], ["--record-dir /nowhere/r"])):
            said = set()
            for check in ([], ["--check-config"]) if "cannot listen" not in parts else ([],):
                p = harness.Process(c, program, "bad", ["--model", MODEL] + flags + check)
                c.others = [p]
                p.start()
                assert p.wait(15) != 0 and all(x in p.log() for x in parts), (flags, check, p.log())
                lines = p.log().strip().split("\n")
                assert len(lines) <= 3, p.log()
                said.add(re.sub(r", of \d+ MiB .*", "", lines[-1].split(" ", 1)[1]))  # free, or in all
            assert len(said) == 1, said
        # what is right passes, and leaves nothing behind
        keys, records = os.path.join(c.dir, "keys"), os.path.join(c.dir, "records")
        with open(keys, "w") as f:
            f.write("a-key\n")
        places = sorted({a or b for a, b in fault_places()})
        assert len(places) > 10
        for program, flags in (("router", ["--api-key-file", keys, "--record-dir", records]),
                               ("decode", ["--kv-pages", "2", "--context-length", "512"]),
                               ("prefill", ["--numerics", "exact"]),
                               *(("decode", ["--fault", ",".join(x + "=1" for x in places[i:i + 16])])
                                 for i in range(0, len(places), 16))):
            p = harness.Process(c, program, "good", ["--model", MODEL, "--check-config"] + flags)
            c.others = [p]
            p.start()
            assert p.wait(15) == 0, p.log()
        assert not os.path.exists(records)


if __name__ == "__main__":
    harness.main([test_equal_to_one_process, test_used_pools, test_memory_apart, test_mismatched_workers, test_worker_of_another_model,
                  test_join_token, test_ports, test_bad_settings], __doc__)
