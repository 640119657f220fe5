/* ctl/main.c - towpath-ctl: picks the subcommand. */
#include "common/base/err.h"
#include "common/net/files.h"
#include "deploy/ctl/chat.h"
#include "deploy/ctl/drain.h"
#include "deploy/ctl/eval.h"
#include "deploy/ctl/explain.h"
#include "deploy/ctl/flags.h"
#include "deploy/ctl/needle.h"
#include "deploy/ctl/numerics.h"
#include "deploy/ctl/status.h"
#include "deploy/ctl/verify.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *about;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"eval", "run the engine in this process on token ids; dump logits, hidden states, scores",
     ctl_eval_main},
    {"explain", "replay a recorded request: is the answer the model's, or did the way change it",
     ctl_explain_main},
    {"numerics", "audit kernels, formats and the hand-over on this checkpoint and device",
     ctl_numerics_main},
    {"status", "show whether the router serves, and its workers", ctl_status_main},
    {"drain", "give a worker no new work and wait until it has gone", ctl_drain_main},
    {"chat", "ask the served model; the answer as it comes", ctl_chat_main},
    {"verify", "three standing checks: tools, a told secret, a value among 8K tokens",
     ctl_verify_main},
    {"needle", "sweep of recall over lengths, depths, texts, key types, top-k; heat map",
     ctl_needle_main},
};

static int run(int argc, char **argv)
{
    const size_t n = sizeof commands / sizeof *commands;
    if (argc > 1)
        for (size_t i = 0; i < n; i++)
            if (!strcmp(argv[1], commands[i].name)) return commands[i].run(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "--version")) {
        tow_print_version("towpath-ctl");
        return CTL_EXIT_GOOD;
    }
    if (argc > 2 && !strcmp(argv[1], "help")) {
        for (size_t i = 0; i < n; i++)
            if (!strcmp(argv[2], commands[i].name))
                return commands[i].run(2, (char *[]){argv[2], (char[]){"--help"}, NULL});
        argv++; /* named as unknown below */
        argc--;
    }
    int help = argc > 1 &&
               (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help"));
    FILE *to = help ? stdout : stderr;
    if (argc > 1 && !help) fprintf(to, "towpath-ctl: no command '%s'\n", argv[1]);
    fprintf(to, "usage: towpath-ctl COMMAND [flags]   (COMMAND --help lists its flags)\n");
    for (size_t i = 0; i < n; i++) fprintf(to, "  %-8s %s\n", commands[i].name, commands[i].about);
    return help ? CTL_EXIT_GOOD : CTL_EXIT_FAILED;
}

/* Fails too when the answer did not reach standard output (a full disk): a script that reads the
 * exit status alone would take it for given. */
int main(int argc, char **argv)
{
    struct tow_err err;
    if (net_stack_check(&err) < 0) { /* of which eval and explain need as much as a worker */
        fprintf(stderr, "towpath-ctl: %s\n", err.msg);
        return CTL_EXIT_FAILED;
    }
    const int status = run(argc, argv);
    const bool failed = ferror(stdout) != 0;
    errno = 0;
    if (fflush(stdout) == 0 && !failed) return status;
    fprintf(stderr, "towpath-ctl: standard output cannot be written%s%s\n", errno ? ": " : "",
            errno ? strerror(errno) : "");
    return CTL_EXIT_FAILED;
}
