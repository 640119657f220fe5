/* base/fault.c - a small table of places under one lock; nobody looks at it unless a test has armed
 * something. Names are compared as text, not by address: one place may be compiled into two
 * files. */
#include "common/base/fault.h"

#include "common/base/buf.h"
#include "common/base/err.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ARMED = 16, MAX_PLACES = 256, NAME_BYTES = 48 };

struct armed {
    char name[NAME_BYTES]; /* "*" matches every place */
    uint64_t nth, passes;
    bool always;
    enum tow_fault_act act;
};

struct place {
    char name[NAME_BYTES];
    uint64_t passes;
};

_Atomic int tow_fault_on;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct armed armed[MAX_ARMED];
static size_t n_armed;
static struct place places[MAX_PLACES];
static size_t n_places;
static uint64_t all_passes, n_fired;

static struct place *find_place(const char *name)
{
    for (size_t i = 0; i < n_places; i++)
        if (!strcmp(places[i].name, name)) return &places[i];
    return NULL;
}

static void count_pass(const char *name)
{
    struct place *p = find_place(name);
    if (!p) {
        tow_assert(n_places < MAX_PLACES && strlen(name) < NAME_BYTES);
        p = &places[n_places++];
        strcpy(p->name, name);
        p->passes = 0;
    }
    p->passes++;
    all_passes++;
}

bool tow_fault_hit(const char *name)
{
    bool acts = false;
    enum tow_fault_act act = TOW_FAULT_FAIL;
    pthread_mutex_lock(&lock);
    count_pass(name);
    for (size_t i = 0; i < n_armed; i++) {
        struct armed *a = &armed[i];
        if (strcmp(a->name, "*") != 0 && strcmp(a->name, name) != 0) continue;
        a->passes++;
        if (a->passes == a->nth || (a->always && a->passes > a->nth)) {
            acts = true;
            act = a->act;
        }
    }
    if (acts) n_fired++;
    pthread_mutex_unlock(&lock);
    if (!acts) return false;
    if (act == TOW_FAULT_FAIL) return true;
    while (act == TOW_FAULT_HANG) pause();
    raise(act == TOW_FAULT_KILL ? SIGKILL : SIGSTOP);
    return false;
}

int tow_fault_arm(const char *name, uint64_t nth, bool always, enum tow_fault_act act,
                  struct tow_err *err)
{
    size_t len = strlen(name);
    if (len == 0 || len >= NAME_BYTES)
        return tow_fail(err, TOW_EINVAL, "fault '%s': a name has 1 to %d bytes", name,
                        NAME_BYTES - 1);
    if (nth == 0) return tow_fail(err, TOW_EINVAL, "fault '%s': passes count from 1", name);
    int rc = 0;
    pthread_mutex_lock(&lock);
    if (n_armed == MAX_ARMED) {
        rc = tow_fail(err, TOW_EFULL, "fault '%s': %d are armed already", name, MAX_ARMED);
    } else {
        struct armed *a = &armed[n_armed++];
        *a = (struct armed){.nth = nth, .always = always, .act = act};
        memcpy(a->name, name, len + 1);
        atomic_store(&tow_fault_on, 1);
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

static int bad_text(const char *item, size_t len, struct tow_err *err)
{
    return tow_fail(
        err, TOW_EINVAL,
        "fault '%.*s': must be NAME=N[+][:fail|kill|stop|hang] with N from 1, comma-separated",
        (int)(len < 200 ? len : 200), item);
}

static int arm_item(const char *item, size_t len, struct tow_err *err)
{
    const char *eq = memchr(item, '=', len), *end = item + len;
    if (!eq || eq == item || (size_t)(eq - item) >= NAME_BYTES) return bad_text(item, len, err);
    char name[NAME_BYTES];
    memcpy(name, item, (size_t)(eq - item));
    name[eq - item] = 0;

    uint64_t nth = 0;
    const char *p = eq + 1;
    for (; p < end && *p >= '0' && *p <= '9' && nth < UINT64_MAX / 10 - 1; p++)
        nth = nth * 10 + (uint64_t)(*p - '0');
    bool always = p < end && *p == '+';
    if (always) p++;
    enum tow_fault_act act = TOW_FAULT_FAIL;
    if (p < end) {
        static const char *const words[] = {":fail", ":kill", ":stop", ":hang"};
        int i = 0;
        while (i < 4 && ((size_t)(end - p) != strlen(words[i]) || memcmp(p, words[i], 5) != 0)) i++;
        if (i == 4) return bad_text(item, len, err);
        act = (enum tow_fault_act)i;
    }
    if (nth == 0) return bad_text(item, len, err);
    return tow_fault_arm(name, nth, always, act, err);
}

int tow_fault_arm_text(const char *text, struct tow_err *err)
{
    for (;;) {
        size_t len = strcspn(text, ",");
        int rc = arm_item(text, len, err);
        if (rc < 0) return rc;
        if (!text[len]) return 0;
        text += len + 1;
    }
}

void tow_fault_watch(void)
{
    atomic_store(&tow_fault_on, 1);
}

void tow_fault_reset(void)
{
    pthread_mutex_lock(&lock);
    atomic_store(&tow_fault_on, 0);
    n_armed = n_places = 0;
    all_passes = n_fired = 0;
    pthread_mutex_unlock(&lock);
}

uint64_t tow_fault_passes(const char *name)
{
    pthread_mutex_lock(&lock);
    const struct place *p = find_place(name);
    uint64_t n = !strcmp(name, "*") ? all_passes : p ? p->passes : 0;
    pthread_mutex_unlock(&lock);
    return n;
}

uint64_t tow_fault_fired(void)
{
    pthread_mutex_lock(&lock);
    uint64_t n = n_fired;
    pthread_mutex_unlock(&lock);
    return n;
}

void tow_fault_print(struct tow_buf *out)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < n_places; i++)
        tow_buf_printf(out, "%s %llu\n", places[i].name, (unsigned long long)places[i].passes);
    pthread_mutex_unlock(&lock);
}
