/* tests/kernels/parity_test.c - every op gives the same bits in every instruction set, with any
 * number of threads, and however its rows are cut into calls.
 *
 * The first run (plain C, one thread, one piece) is what all others must equal.
 */
#include "tests/kernels/op_cases.h"
#include "tests/support/check.h"

#include "kernels/cpu/team.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct kern_dev *devs[KERN_CPU_N_ISA][4];

static void run_case(const struct op_case *c, struct op_run *r, int isa, int threads, int piece,
                     int variant)
{
    *r = (struct op_run){
        .ops = &kern_cpu,
        .s = kern_dev_stream(devs[isa][threads]),
        .piece = piece,
        .variant = variant,
        .twin = true,
        .cut = (uint64_t)(threads + 3 * isa + variant) * UINT64_C(0xd1342543de82ef95) + 1};
    op_case_run(c, r);
}

static void test_parity(void **state)
{
    const struct op_case *c = *state;
    const bool product = c == &op_cases[OP_CASE_linear] || c == &op_cases[OP_CASE_linears] ||
                         c == &op_cases[OP_CASE_attend] || c == &op_cases[OP_CASE_moe] ||
                         c == &op_cases[OP_CASE_ffn];
    for (int v = 0; v < op_case_variants(c); v++) {
        struct op_run first, r;
        run_case(c, &first, 0, 1, 0, v);
        for (int isa = 0; isa <= (int)kern_cpu_best_isa(); isa++) {
            if (isa == KERN_CPU_AMX && product) {
                /* Sums in another order, the same for all rows; amx_test says which. */
                free(first.out);
                run_case(c, &first, isa, 1, 0, v);
            }
            for (int threads = 1; threads <= 3; threads++) {
                if (isa == 0 && threads == 2) continue;
                static const int pieces[] = {-1, 0, 1};
                run_case(c, &r, isa, threads, pieces[(threads + isa) % 3], v);
                if (r.n != first.n || (r.n && memcmp(r.out, first.out, r.n) != 0)) {
                    size_t at_byte = 0;
                    while (at_byte < r.n && r.out[at_byte] == first.out[at_byte]) at_byte++;
                    fail_msg("%s variant %d, isa %d, %d threads, piece %d: byte %zu of %zu differs",
                             c->name, v, isa, threads, r.piece, at_byte, first.n);
                }
                free(r.out);
            }
        }
        free(first.out);
    }
}

/* usage: parity_test [OP]      one op only */
int main(int argc, char **argv)
{
    for (int isa = 0; isa <= (int)kern_cpu_best_isa(); isa++)
        for (int t = 1; t <= 3; t++)
            if (kern_dev_open_cpu(&devs[isa][t], t, (enum kern_cpu_isa)isa, NULL) < 0) return 1;
    struct CMUnitTest tests[N_OP_CASES];
    for (int i = 0; i < N_OP_CASES; i++)
        tests[i] = (struct CMUnitTest){op_cases[i].name, test_parity, NULL, NULL,
                                       (void *)(uintptr_t)&op_cases[i]};
    TEST_CHOOSE(argc, argv, tests);
    int failed = cmocka_run_group_tests_name("kernels/parity", tests, NULL, NULL);
    for (int isa = 0; isa <= (int)kern_cpu_best_isa(); isa++)
        for (int t = 1; t <= 3; t++) kern_dev_close(devs[isa][t]);
    return failed;
}
