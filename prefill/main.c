/* prefill/main.c - towpath-prefill: turns prompts into KV pages. */
#include "prefill/server.h"

int main(int argc, char **argv)
{
    return work_run(&pre_role, argc, argv);
}
