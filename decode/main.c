/* decode/main.c - towpath-decode: turns pages into tokens. */
#include "decode/server.h"

int main(int argc, char **argv)
{
    return work_run(&dec_role, argc, argv);
}
