/* ctl/haystack.c - see haystack.h. Words come from the small lists below: an operator's world of
 * services, machines and settings, so that the fact is one among its like. Files look like files
 * because GROUP units in a row are written in one style. */
#include "deploy/ctl/haystack.h"

#include "common/base/err.h"
#include "common/base/hash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    GROUP = 8, /* units of one file */
    MAX_UNITS = 1 << 20,
    MAX_UNIT = 1024, /* bytes */
    MAX_COUNTS = 64, /* asks of the tokenizer for one text */
    REDRAWS = 64,
};

const char *const ctl_filler_names[] = {"words", "prose", "config", "code", "logs", "mixed", NULL};

int ctl_filler_find(const char *name)
{
    for (int i = 0; i < CTL_FILLERS; i++)
        if (!strcmp(ctl_filler_names[i], name)) return i;
    return -1;
}

/* ------------------------------------------------------------------ numbers */

uint64_t ctl_rng_next(struct ctl_rng *r)
{
    uint64_t x = r->state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint32_t ctl_rng_below(struct ctl_rng *r, uint32_t n)
{
    return (uint32_t)((ctl_rng_next(r) >> 32) * n >> 32);
}

static int between(struct ctl_rng *r, int lo, int hi)
{
    return lo + (int)ctl_rng_below(r, (uint32_t)(hi - lo + 1));
}

static struct ctl_rng rng_of(uint64_t seed, const char *what, uint32_t i)
{
    struct ctl_rng r = {tow_hash64_seed(what, strlen(what), seed) + i * 0x2545f4914f6cdd1du};
    ctl_rng_next(&r);
    return r;
}

/* ------------------------------------------------------------------ words */

#define LIST(name, ...) static const char *const name[] = {__VA_ARGS__}
#define PICK(r, list)   ((list)[ctl_rng_below((r), (uint32_t)(sizeof(list) / sizeof *(list)))])

LIST(things, "billing", "cart", "search", "orders", "users", "mail", "media", "stock", "ledger",
     "quota", "audit", "report", "image", "video", "price", "profile", "session", "event", "metric",
     "backup", "export", "import", "invoice", "payment", "refund", "catalog", "review", "chat",
     "feed", "map", "weather", "vault", "token", "cache", "queue", "batch", "stream", "index",
     "relay", "signal");
LIST(parts, "api", "worker", "gateway", "service", "job", "sync", "store", "proxy", "agent",
     "runner", "scheduler", "router", "monitor", "writer", "reader", "loader");
LIST(adjectives, "amber", "brave", "calm", "clear", "crisp", "early", "fresh", "gentle", "golden",
     "grand", "green", "happy", "keen", "late", "light", "mellow", "noble", "pale", "proud",
     "quick", "quiet", "rapid", "royal", "silver", "smooth", "solid", "steady", "swift", "warm",
     "wild");
LIST(nouns, "badger", "beacon", "birch", "bison", "brook", "canyon", "cedar", "cliff", "comet",
     "crane", "creek", "eagle", "falcon", "forest", "fox", "glacier", "hill", "island", "lake",
     "lantern", "maple", "meadow", "moon", "oak", "otter", "pine", "planet", "pond", "raven",
     "ridge", "river", "stone", "tiger", "valley", "wave", "willow", "wolf");
LIST(firsts, "Ada", "Alan", "Anna", "Ben", "Carl", "Clara", "David", "Elena", "Emil", "Felix",
     "Grace", "Hugo", "Ida", "Jonas", "Julia", "Leo", "Maria", "Nina", "Olga", "Paul", "Rosa",
     "Sara", "Tara", "Vera");
LIST(lasts, "Bauer", "Berg", "Braun", "Costa", "Diaz", "Fischer", "Garcia", "Hansen", "Keller",
     "Klein", "Kumar", "Lang", "Lopez", "Mori", "Novak", "Olsen", "Patel", "Rossi", "Sato",
     "Schmidt", "Silva", "Stein", "Weber", "Wolf");
LIST(cities, "Athens", "Berlin", "Boston", "Cairo", "Dublin", "Geneva", "Hamburg", "Lima", "Lisbon",
     "London", "Madrid", "Oslo", "Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Vienna",
     "Zurich");
LIST(envs, "production", "staging", "production", "staging", "dev");
LIST(common, "the", "a", "of", "to", "and", "in", "is", "for", "on", "with", "this", "that", "when",
     "after", "before", "node", "disk", "load", "time", "check", "start", "stop", "restart",
     "system", "data", "file", "change", "team", "note", "keep", "value", "limit", "rate", "error",
     "ready", "done", "state", "plan", "step", "first", "next", "last", "open", "read", "write",
     "move", "small", "large", "fast", "slow", "old", "new", "main", "test", "build", "page",
     "table", "entry", "model", "request", "answer");
LIST(verbs, "watched", "moved", "checked", "found", "left", "passed", "reached", "kept", "built",
     "opened", "read", "followed");
LIST(times, "before noon", "after the test", "in the morning", "on the first day", "for a while",
     "when the load was small", "until the next change", "at the end of the week");
LIST(levels, "INFO", "WARN", "DEBUG", "NOTICE");
/* One token each in most vocabularies, so that padding can reach any count. */
LIST(pads, "the", "and", "of", "to", "in", "is", "for", "on", "a", "with", "that", "this");

struct field {
    const char *key, *spoken;
    void (*put)(struct ctl_rng *r, char *to, size_t cap);
    bool number;
};

static void put_token(struct ctl_rng *r, char *to, size_t cap)
{
    static const char alnum[] = "abcdefghijklmnopqrstuvwxyz0123456789";
    static const char upper[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    char x[13] = {0};
    int form = between(r, 0, 2);
    for (int i = 0; i < 12; i++)
        x[i] = form == 1 ? upper[ctl_rng_below(r, 36)] : alnum[ctl_rng_below(r, 36)];
    if (form == 0)
        snprintf(to, cap, "%s-%s-%d", PICK(r, adjectives), PICK(r, nouns), between(r, 100, 9999));
    else if (form == 1)
        snprintf(to, cap, "%.4s-%.4s-%.4s", x, x + 4, x + 8);
    else
        snprintf(to, cap, "tk-%.10s", x);
}

static void put_port(struct ctl_rng *r, char *to, size_t cap)
{
    snprintf(to, cap, "%d", between(r, 1024, 65535));
}

static void put_replicas(struct ctl_rng *r, char *to, size_t cap)
{
    snprintf(to, cap, "%d", between(r, 1, 64));
}

static void put_owner(struct ctl_rng *r, char *to, size_t cap)
{
    const char *first = PICK(r, firsts);
    snprintf(to, cap, "%s %s", first, PICK(r, lasts));
}

static void put_version(struct ctl_rng *r, char *to, size_t cap)
{
    int a = between(r, 0, 12), b = between(r, 0, 30);
    snprintf(to, cap, "%d.%d.%d", a, b, between(r, 0, 40));
}

static void put_region(struct ctl_rng *r, char *to, size_t cap)
{
    static const char *const lands[] = {"eu", "us", "ap", "sa"}, *const sides[] = {"west", "east",
                                                                                   "north",
                                                                                   "south"};
    const char *land = PICK(r, lands), *side = PICK(r, sides);
    snprintf(to, cap, "%s-%s-%d", land, side, between(r, 1, 3));
}

static void put_timeout(struct ctl_rng *r, char *to, size_t cap)
{
    int n = between(r, 2, 999);
    snprintf(to, cap, "%d%s", n, between(r, 0, 1) ? "ms" : "s");
}

static void put_memory(struct ctl_rng *r, char *to, size_t cap)
{
    snprintf(to, cap, "%dMi", 64 << between(r, 0, 3));
}

static void put_site(struct ctl_rng *r, char *to, size_t cap)
{
    snprintf(to, cap, "%s", PICK(r, cities));
}

static void put_address(struct ctl_rng *r, char *to, size_t cap)
{
    int a = between(r, 0, 255), b = between(r, 0, 255);
    snprintf(to, cap, "10.%d.%d.%d", a, b, between(r, 1, 254));
}

static const struct field fields[] = {
    {"deploy_token", "deploy token", put_token, false},
    {"port", "port", put_port, true},
    {"replicas", "replica count", put_replicas, true},
    {"owner", "owner", put_owner, false},
    {"version", "version", put_version, false},
    {"region", "region", put_region, false},
    {"timeout", "timeout", put_timeout, false},
    {"memory", "memory limit", put_memory, false},
    {"api_key", "API key", put_token, false},
    {"password", "password", put_token, false},
    {"site", "site", put_site, false},
    {"address", "address", put_address, false},
};
enum { N_FIELDS = sizeof fields / sizeof *fields, MAX_FIELDS = 4, FACT_FIELD = 0 };

/* One service in one environment, and what is set for it. */
struct entry {
    char service[48];
    const char *env;
    int n;
    struct {
        const struct field *field;
        char value[48];
    } set[MAX_FIELDS];
};

static void draw_service(struct ctl_rng *r, char *to, size_t cap)
{
    const char *a = PICK(r, things), *b = PICK(r, adjectives);
    if (between(r, 0, 2))
        snprintf(to, cap, "%s-%s", a, PICK(r, parts));
    else
        snprintf(to, cap, "%s-%s", b, PICK(r, nouns));
}

static void draw_entry(struct ctl_rng *r, struct entry *e, int n_fields)
{
    draw_service(r, e->service, sizeof e->service);
    e->env = PICK(r, envs);
    e->n = n_fields;
    uint32_t first = ctl_rng_below(r, N_FIELDS);
    for (int i = 0; i < n_fields; i++) {
        e->set[i].field = &fields[(first + (uint32_t)i * 5) % N_FIELDS]; /* 5 and 12: no repeats */
        e->set[i].field->put(r, e->set[i].value, sizeof e->set[i].value);
    }
}

/* ------------------------------------------------------------------ how entries are written */

enum style { INI, MANIFEST, ENV, TOML, TABLE, PYTHON, CSTRUCT, LOG, SENTENCES, LOOSE };

static enum style style_of(const struct ctl_hay *h, uint32_t unit)
{
    static const enum style config[] = {INI, MANIFEST, ENV, TOML}, code[] = {PYTHON, CSTRUCT},
                            mixed[] = {INI, LOG, TABLE, MANIFEST, PYTHON, LOG, TOML, ENV};
    struct ctl_rng r = rng_of(h->seed, "style", unit / GROUP);
    switch (h->filler) {
    case CTL_FILL_WORDS: return LOOSE;
    case CTL_FILL_PROSE: return SENTENCES;
    case CTL_FILL_CONFIG: return PICK(&r, config);
    case CTL_FILL_CODE: return PICK(&r, code);
    case CTL_FILL_LOGS: return LOG;
    case CTL_FILL_MIXED:
    case CTL_FILLERS: break;
    }
    return PICK(&r, mixed);
}

static void put_upper(struct tow_buf *b, const char *s)
{
    for (; *s; s++)
        tow_buf_putc(b, *s == '-' ? '_' : *s >= 'a' && *s <= 'z' ? (char)(*s - 'a' + 'A') : *s);
}

static void put_under(struct tow_buf *b, const char *s)
{
    for (; *s; s++) tow_buf_putc(b, *s == '-' ? '_' : *s);
}

static void put_stamp(struct ctl_rng *r, struct tow_buf *b)
{
    int month = between(r, 1, 12), day = between(r, 1, 28), hour = between(r, 0, 23);
    int minute = between(r, 0, 59), second = between(r, 0, 59);
    tow_buf_printf(b, "2026-%02d-%02d %02d:%02d:%02d %s ", month, day, hour, minute, second,
                   PICK(r, levels));
}

static void put_entry(struct ctl_rng *r, enum style style, const struct entry *e, struct tow_buf *b)
{
    switch (style) {
    case INI: tow_buf_printf(b, "[%s.%s]\n", e->env, e->service); break;
    case MANIFEST:
        tow_buf_printf(b, "kind: Deployment\nmetadata:\n  name: %s\n  namespace: %s\nspec:\n",
                       e->service, e->env);
        break;
    case ENV: tow_buf_printf(b, "# %s %s\n", e->service, e->env); break;
    case TOML:
        tow_buf_printf(b, "resource \"service\" \"%s\" {\n  environment = \"%s\"\n", e->service,
                       e->env);
        break;
    case TABLE:
        tow_buf_puts(b, "| service | env |");
        for (int i = 0; i < e->n; i++) tow_buf_printf(b, " %s |", e->set[i].field->key);
        tow_buf_puts(b, "\n|");
        for (int i = 0; i < e->n + 2; i++) tow_buf_puts(b, " --- |");
        tow_buf_printf(b, "\n| %s | %s |", e->service, e->env);
        break;
    case PYTHON: tow_buf_printf(b, "CONFIG[\"%s\", \"%s\"] = {\n", e->env, e->service); break;
    case CSTRUCT:
        tow_buf_puts(b, "static const struct config ");
        put_under(b, e->service);
        tow_buf_printf(b, "_%s = {\n", e->env);
        break;
    case LOG:
    case SENTENCES:
    case LOOSE: break;
    }
    for (int i = 0; i < e->n; i++) {
        const struct field *f = e->set[i].field;
        const char *v = e->set[i].value, *q = f->number ? "" : "\"", *s = f->number ? "" : "'";
        switch (style) {
        case INI: tow_buf_printf(b, "%s = %s\n", f->key, v); break;
        case MANIFEST: tow_buf_printf(b, "  %s: %s\n", f->key, v); break;
        case ENV:
            put_upper(b, e->service);
            tow_buf_putc(b, '_');
            put_upper(b, f->key);
            tow_buf_printf(b, "=%s\n", v);
            break;
        case TOML: tow_buf_printf(b, "  %s = %s%s%s\n", f->key, q, v, q); break;
        case TABLE: tow_buf_printf(b, " %s |", v); break;
        case PYTHON: tow_buf_printf(b, "    '%s': %s%s%s,\n", f->key, s, v, s); break;
        case CSTRUCT: tow_buf_printf(b, "    .%s = %s%s%s,\n", f->key, q, v, q); break;
        case LOG:
            put_stamp(r, b);
            tow_buf_printf(b, "[%s/%s] %s is %s\n", e->env, e->service, f->key, v);
            break;
        case SENTENCES:
        case LOOSE:
            tow_buf_printf(b, "%sThe %s of %s in %s is %s.", i ? " " : "", f->spoken, e->service,
                           e->env, v);
            break;
        }
    }
    switch (style) {
    case INI: tow_buf_puts(b, "\n"); break;
    case MANIFEST: tow_buf_puts(b, "---\n"); break;
    case ENV:
    case TABLE: tow_buf_puts(b, "\n"); break;
    case TOML: tow_buf_puts(b, "}\n\n"); break;
    case PYTHON: tow_buf_puts(b, "}\n"); break;
    case CSTRUCT: tow_buf_puts(b, "};\n\n"); break;
    case LOG: break;
    case SENTENCES:
    case LOOSE: tow_buf_puts(b, " "); break;
    }
}

static void put_words(struct ctl_rng *r, int n, struct tow_buf *b)
{
    for (int i = 0; i < n; i++) {
        const char *w = between(r, 0, 3) ? PICK(r, common) : PICK(r, nouns);
        tow_buf_printf(b, "%s%s", i ? " " : "", w);
    }
}

static void put_sentence(struct ctl_rng *r, uint32_t unit, struct tow_buf *b)
{
    const char *a = PICK(r, adjectives), *n = PICK(r, nouns), *m = PICK(r, nouns);
    const char *v = PICK(r, verbs), *t = PICK(r, times), *c = PICK(r, cities), *p = PICK(r, firsts);
    switch (between(r, 0, 4)) {
    case 0: tow_buf_printf(b, "%s %s the %s %s %s.", p, v, a, n, t); break;
    case 1: tow_buf_printf(b, "In %s the %s was %s, and the %s was old.", c, n, a, m); break;
    case 2: tow_buf_printf(b, "The team in %s %s a %s near the %s %s.", c, v, n, m, t); break;
    case 3:
        tow_buf_printf(b, "When %s %s the %s, it was %s and the %s was not ready.", p, v, n, a, m);
        break;
    default: tow_buf_printf(b, "A %s %s is no %s, as %s said %s.", a, n, m, p, t); break;
    }
    tow_buf_puts(b, unit % GROUP == GROUP - 1 ? "\n\n" : " ");
}

static void put_file_name(struct ctl_rng *r, enum style style, struct tow_buf *b)
{
    static const char *const ends[] = {"ini", "yaml", "env", "tf", "md", "py", "c", "log"};
    if (style > LOG) return;
    const char *t = PICK(r, things);
    tow_buf_printf(b, "\n--- %s/%s.%s ---\n", t, PICK(r, nouns), ends[style]);
}

static void draw_unit(const struct ctl_hay *h, uint32_t unit, struct ctl_rng *r, struct tow_buf *b)
{
    enum style style = style_of(h, unit);
    if (unit % GROUP == 0) put_file_name(r, style, b);
    struct entry e;
    if (style == LOOSE) {
        put_words(r, between(r, 9, 15), b);
        tow_buf_puts(b, ". ");
    } else if (style == SENTENCES && between(r, 0, 4)) {
        put_sentence(r, unit, b);
    } else if (style == LOG && !between(r, 0, 2)) {
        put_stamp(r, b);
        put_words(r, between(r, 4, 8), b);
        tow_buf_putc(b, '\n');
    } else {
        bool line = style == LOG || style == SENTENCES;
        draw_entry(r, &e, line ? 1 : between(r, 2, MAX_FIELDS));
        put_entry(r, style, &e, b);
    }
}

/* ------------------------------------------------------------------ the haystack */

/* Letters that no vocabulary has as one word. */
static void put_strange(struct ctl_rng *r, char *to, size_t cap)
{
    char w[2][8] = {{0}};
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 6; k++) w[i][k] = (char)('a' + between(r, 0, 25));
    snprintf(to, cap, "%s-%s", w[0], w[1]);
}

void ctl_hay_init(struct ctl_hay *h, enum ctl_filler filler, uint64_t seed, struct ctl_hard hard)
{
    memset(h, 0, sizeof *h);
    h->filler = filler;
    h->seed = seed;
    h->hard = hard;
    tow_buf_init(&h->units, 0);
    struct ctl_rng r = rng_of(seed, "fact", 0);
    if (hard.strange) {
        put_strange(&r, h->service, sizeof h->service);
        put_strange(&r, h->value, sizeof h->value);
    } else {
        draw_service(&r, h->service, sizeof h->service);
        put_token(&r, h->value, sizeof h->value);
    }
    snprintf(h->question, sizeof h->question, "What is the %s of %s in production?",
             fields[FACT_FIELD].spoken, h->service);
}

void ctl_hay_fini(struct ctl_hay *h)
{
    tow_buf_fini(&h->units);
    free(h->ends);
    h->ends = NULL;
}

static bool gives_away(const struct ctl_hay *h, const struct tow_buf *b)
{
    struct tow_buf upper, under; /* as two of the styles spell a service */
    tow_buf_init(&upper, 0);
    tow_buf_init(&under, 0);
    put_upper(&upper, h->service);
    put_under(&under, h->service);
    bool yes = !b->data || !upper.data || !under.data || strstr(b->data, h->service) ||
               strstr(b->data, upper.data) || strstr(b->data, under.data) ||
               strstr(b->data, h->value);
    tow_buf_fini(&upper);
    tow_buf_fini(&under);
    return yes;
}

static int grow(struct ctl_hay *h, uint32_t n, struct tow_err *err)
{
    struct tow_buf b;
    tow_buf_init(&b, MAX_UNIT);
    int rc = 0;
    while (rc == 0 && h->n < n) {
        struct ctl_rng r = rng_of(h->seed, "unit", h->n);
        int tries = 0;
        do {
            tow_buf_clear(&b);
            draw_unit(h, h->n, &r, &b);
        } while (!tow_buf_failed(&b) && gives_away(h, &b) && ++tries < REDRAWS);
        uint32_t *more = tow_grow(h->ends, h->n, &h->cap, 256, sizeof *h->ends);
        if (more) h->ends = more;
        if (b.data) tow_buf_put(&h->units, b.data, b.len);
        if (!more || tow_buf_failed(&b) || tow_buf_failed(&h->units) || tries == REDRAWS)
            rc = tow_fail(err, TOW_ENOMEM, "haystack: no memory for %u units", n);
        else
            h->ends[h->n++] = (uint32_t)h->units.len;
    }
    tow_buf_fini(&b);
    return rc;
}

/* Units before the fact: the border nearest to depth percent of the bytes. */
static uint32_t units_before(const struct ctl_hay *h, uint32_t n, int depth)
{
    if (n == 0) return 0;
    uint64_t want = (uint64_t)h->ends[n - 1] * (uint64_t)depth / 100;
    uint32_t i = 0;
    while (i < n && h->ends[i] <= want) i++;
    uint64_t below = i ? h->ends[i - 1] : 0;
    if (i < n && h->ends[i] - want < want - below) i++;
    return i;
}

/* An entry that stands between units. */
struct inserted {
    uint32_t before; /* units in front of it */
    struct entry entry;
};

static int by_place(const void *a, const void *b)
{
    const struct inserted *x = a, *y = b;
    return (x->before > y->before) - (x->before < y->before);
}

/* The fact first, then its decoys; how many. */
static int draw_inserted(const struct ctl_hay *h, uint32_t n_units, int depth, struct inserted *in)
{
    static const char *const where[CTL_MAX_DECOYS + 1] = {"production", "staging", "dev", "canary",
                                                          "test"};
    struct ctl_rng r = rng_of(h->seed, "decoys", 0);
    int n = 1 + h->hard.decoys;
    for (int i = 0; i < n; i++) {
        struct entry *e = &in[i].entry;
        /* 37 and 101: decoys spread over the text, each elsewhere than the fact */
        in[i].before = units_before(h, n_units, (depth + 37 * i) % 101);
        *e = (struct entry){.env = where[i], .n = 1};
        snprintf(e->service, sizeof e->service, "%s", h->service);
        e->set[0].field = &fields[FACT_FIELD];
        do {
            if (i == 0)
                snprintf(e->set[0].value, sizeof e->set[0].value, "%s", h->value);
            else if (h->hard.strange)
                put_strange(&r, e->set[0].value, sizeof e->set[0].value);
            else
                put_token(&r, e->set[0].value, sizeof e->set[0].value);
        } while (i > 0 && strstr(e->set[0].value, h->value));
    }
    qsort(in, (size_t)n, sizeof *in, by_place);
    return n;
}

int ctl_hay_put(struct ctl_hay *h, uint32_t n_units, uint32_t n_pad, int depth, struct tow_buf *out,
                struct tow_err *err)
{
    int rc = grow(h, n_units, err);
    if (rc < 0) return rc;
    struct inserted in[CTL_MAX_DECOYS + 1] = {0};
    const int n = draw_inserted(h, n_units, depth, in);
    struct ctl_rng r = rng_of(h->seed, "stamp", 0);
    size_t at = 0, end = n_units ? h->ends[n_units - 1] : 0;

    tow_buf_puts(out, "Read these files.\n\n");
    for (int i = 0; i < n; i++) {
        uint32_t before = in[i].before;
        size_t cut = before ? h->ends[before - 1] : 0;
        if (cut > at) tow_buf_put(out, h->units.data + at, cut - at);
        at = cut;
        /* In the style of what stands before it; it starts no file of its own. */
        put_entry(&r, style_of(h, before ? before - 1 : 0), &in[i].entry, out);
    }
    if (end > at) tow_buf_put(out, h->units.data + at, end - at);
    if (n_pad) tow_buf_puts(out, "\n");
    for (uint32_t i = 0; i < n_pad; i++) {
        const size_t n_pads = sizeof pads / sizeof *pads;
        tow_buf_printf(out, "%s%s", i ? " " : "", pads[i % n_pads]);
    }
    tow_buf_printf(out, "\n\n%s", h->question);
    return tow_buf_failed(out) ? tow_fail(err, TOW_ENOMEM, "haystack: no memory for the text") : 0;
}

/* ------------------------------------------------------------------ to a length in tokens */

struct fit {
    struct ctl_hay *h;
    int depth, n_counts;
    ctl_count_tokens count;
    void *ctx;
    struct tow_buf *out;
};

static int measure(struct fit *f, uint32_t n_units, uint32_t n_pad, int64_t *tokens,
                   struct tow_err *err)
{
    tow_buf_clear(f->out);
    f->n_counts++;
    int rc = ctl_hay_put(f->h, n_units, n_pad, f->depth, f->out, err);
    return rc < 0 ? rc : f->count(f->ctx, f->out->data, f->out->len, tokens, err);
}

/* The most units that fit: *units, and the tokens that the text then has. */
static int fit_units(struct fit *f, int64_t want, uint32_t *units, int64_t *have,
                     struct tow_err *err)
{
    uint32_t lo = 0, hi = MAX_UNITS; /* lo fits, hi does not */
    int64_t at_lo, at_hi = 0, base;
    int rc = measure(f, 0, 0, &at_lo, err);
    if (rc < 0) return rc;
    base = at_lo;
    if (at_lo > want)
        return tow_fail(err, TOW_EINVAL,
                        "a prompt of %lld tokens: fact and question alone make %lld",
                        (long long)want, (long long)at_lo);
    double per_unit = 24;
    while (hi - lo > 1 && f->n_counts < MAX_COUNTS) {
        /* Where the mean size of a unit says; bisection once both ends are near each other. */
        double guess = hi == MAX_UNITS || at_hi - at_lo > 400
                           ? lo + (double)(want - at_lo) / per_unit
                           : (lo + hi) / 2.0;
        uint32_t n = guess < lo + 1.0 ? lo + 1 : guess >= hi ? hi - 1 : (uint32_t)guess;
        int64_t tokens;
        rc = measure(f, n, 0, &tokens, err);
        if (rc < 0) return rc;
        if (n > 0 && tokens > base) per_unit = (double)(tokens - base) / n;
        if (tokens <= want) {
            lo = n;
            at_lo = tokens;
        } else {
            hi = n;
            at_hi = tokens;
        }
    }
    *units = lo;
    *have = at_lo;
    return 0;
}

int ctl_hay_fit(struct ctl_hay *h, int depth, int64_t n_tokens, ctl_count_tokens count, void *ctx,
                struct tow_buf *out, struct tow_err *err)
{
    struct fit f = {.h = h, .depth = depth, .count = count, .ctx = ctx, .out = out};
    uint32_t units = 0;
    int64_t have = 0;
    int rc = fit_units(&f, n_tokens, &units, &have, err);
    if (rc < 0) return rc;
    /* The rest in short words; where their number steps over the count, a unit less and more
     * words. */
    for (f.n_counts = 0; f.n_counts < MAX_COUNTS;) {
        int64_t pad = 0, low = -1, high = INT64_MAX; /* pads known to be too few, too many */
        while (f.n_counts < MAX_COUNTS) {
            rc = measure(&f, units, (uint32_t)pad, &have, err);
            if (rc < 0 || have == n_tokens) return rc;
            if (have < n_tokens)
                low = pad;
            else
                high = pad;
            if (high - low <= 1) break;
            pad += n_tokens - have;
            if (pad <= low) pad = low + 1;
            if (pad >= high) pad = high - 1;
        }
        if (units == 0) break;
        units--;
    }
    return tow_fail(err, TOW_EINVAL, "no text of this kind has exactly %lld tokens",
                    (long long)n_tokens);
}
