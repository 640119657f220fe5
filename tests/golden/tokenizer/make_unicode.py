"""Prints the table of common/text/unicode.c: code points whose general category, as Hugging Face's
regex engine sees it, is not that of Unicode 13 (the oldest one a supported PCRE2 knows).

    python3 make_unicode.py categories > categories.json      # needs tokenizers
    python3.10 make_unicode.py table categories.json          # Python 3.10 has Unicode 13

Source: `tokenizers` 0.23.3 (whose engine is Oniguruma) asked for \\p{..} of every code point.
"""
import json
import sys
import unicodedata

CATEGORIES = ("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf "
              "Co").split()


def categories():
    from tokenizers import Regex, pre_tokenizers
    points = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    found = {}
    for name in CATEGORIES:
        split = pre_tokenizers.Split(Regex(r"\p{%s}" % name), behavior="removed", invert=True)
        for i in range(0, len(points), 100000):
            for piece, _ in split.pre_tokenize_str("".join(map(chr, points[i:i + 100000]))):
                for c in piece:
                    found[str(ord(c))] = name
    return found


def table(theirs):
    if unicodedata.unidata_version != "13.0.0":
        sys.exit("make_unicode.py: want Unicode 13.0.0 (Python 3.10), have "
                 + unicodedata.unidata_version)
    ranges = []
    for c in range(0x110000):
        if 0xD800 <= c <= 0xDFFF:
            continue
        cat = theirs.get(str(c), "Cn")
        if cat == unicodedata.category(chr(c)):
            continue
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == cat:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, cat])
    for lo, hi, cat in ranges:
        print("    {0x%04x, 0x%04x, %s_%d}," % (lo, hi, cat, len(chr(lo).encode())))


def main():
    if sys.argv[1:] == ["categories"]:
        json.dump(categories(), sys.stdout)
    elif len(sys.argv) == 3 and sys.argv[1] == "table":
        with open(sys.argv[2], encoding="utf-8") as f:
            table(json.load(f))
    else:
        sys.exit(__doc__)


main()
