/* A library of a step in memory between two pages that nobody may touch: WEIGHTS STEPS BATCH TRAINED front|back [up].
 * "up": in a thread that rounds up and takes subnormal numbers for zero, as it still does afterwards.
 * Prints the bits of each step's loss, of an evaluation, and of one more step from the file that was saved. */
#include "step.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int stop(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, step_error());
    exit(1);
}

static void *guarded(int front)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size = step_memory(), pages = (size + page - 1) / page * page;
    char *all = mmap(NULL, pages + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(all, 0xFF, pages + 2 * page); /* not a number, wherever something is read before it is written */
    mprotect(all, page, PROT_NONE);
    mprotect(all + page + pages, page, PROT_NONE);
    return front ? all + page : all + page + (pages - size) / 64 * 64;
}

static void feed(void *memory, const char *path, void *(*input)(void *, const char *))
{
    FILE *file = fopen(path, "rb");
    int k;
    for (k = 0; k < STEP_INPUTS; k++) {
        void *to = input(memory, step_inputs[k].name);
        if (to ? fread(to, 1, step_inputs[k].bytes, file) != step_inputs[k].bytes
               : fseek(file, (long)step_inputs[k].bytes, SEEK_CUR))
            stop("feed");
    }
    fclose(file);
}

static void show(const void *loss)
{
    uint32_t bits;
    memcpy(&bits, loss, 4);
    printf("%08x\n", bits);
}

#ifdef __aarch64__
static uint64_t rounding(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void round_up(void) { __asm__ volatile("msr fpcr, %0" : : "r"(rounding() | 1 << 24 | 1 << 22)); }
#else
static uint64_t rounding(void) { return __builtin_ia32_stmxcsr() & 0xFFC0; }
static void round_up(void) { __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040 | 0x4000); }
#endif

int main(int count, char **given)
{
    int i, front = count > 5 && !strcmp(given[5], "front");
    void *memory = guarded(front), *other = guarded(!front);
    uint64_t mode;
    if (count > 6)
        round_up();
    mode = rounding();
    if (step_init(memory, given[1]))
        stop("init");
    for (i = 0; i < atoi(given[2]); i++) {
        feed(memory, given[3], step_input);
        if (step_run(memory))
            stop("run");
        show(step_output(memory, STEP_LOSS));
    }
    feed(memory, given[3], step_evaluation_input);
    if (step_evaluate(memory))
        stop("evaluate");
    show(step_evaluation_output(memory, STEP_LOSS));
    if (step_save(memory, given[4]) || step_init(other, given[4]))
        stop("save");
    feed(other, given[3], step_input);
    if (step_run(other))
        stop("run");
    show(step_output(other, STEP_LOSS));
    printf("%zu\n", step_memory());
    return rounding() != mode;
}
