"""Writes what the reference's splits and character classes give: python3 make_split.py > split.vectors

Source: `tokenizers` 0.23.3 (Oniguruma, Unicode 16). Lines, fields between tabs:
  split  PATTERN  BEHAVIOUR  INVERT  TEXT  PIECES   pieces joined by |
  class  PATTERN  N  HASH                           which of all code points match: how many, and the
                                                    hash of make_vectors.py over them
"""
import numpy
from tokenizers import Regex, pre_tokenizers

PATTERNS = [" ", r"\d+", "(?=b)", "b*", "(?i:'s)|[A-Z]{2,3}", r"\s+(?!\S)|\s+", r"(?<=a)b", "a+?"]
TEXTS = ["  a b  c ", "12ab345", "abba", "A'S ABCDé's", "a \n\t b", "é1bb2"]
BEHAVIOURS = ["isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"]
CLASSES = [r"\p{L}", r"\p{M}", r"\p{N}", r"\p{P}", r"\p{S}", r"\s", r"\p{Lu}", r"\p{Ll}", r"\p{Lt}", r"\p{Lm}",
           r"\p{Lo}", r"\p{Nd}", r"[^\r\n\p{L}\p{P}\p{S}]"]


def escape(s):
    return s.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def matching(pattern):
    split = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    points = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    for i in range(0, len(points), 50000):
        for piece, _ in split.pre_tokenize_str("".join(map(chr, points[i:i + 50000]))):
            yield from map(ord, piece)


def main():
    for pattern in PATTERNS:
        for behaviour in BEHAVIOURS:
            for invert in (0, 1):
                split = pre_tokenizers.Split(Regex(pattern), behavior=behaviour, invert=bool(invert))
                for text in TEXTS:
                    pieces = "|".join(p for p, _ in split.pre_tokenize_str(text))
                    print("split", pattern, behaviour, invert, escape(text), escape(pieces), sep="\t")
    for pattern in CLASSES:
        found = sorted(matching(pattern))
        h = 0xCBF29CE484222325
        for b in numpy.array(found, "<i4").tobytes():
            h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
        print("class", pattern, len(found), "%016x" % h, sep="\t")


main()
