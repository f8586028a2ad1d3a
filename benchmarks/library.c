/* Times the steps of a library: WEIGHTS STEPS.  Prints the median of processor milliseconds a step. */
#include "step.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static int order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int count, char **given)
{
    int steps = count > 2 ? atoi(given[2]) : 1, i, k;
    double *times = malloc(sizeof *times * (size_t)steps);
    void *memory = aligned_alloc(64, (step_memory() + 63) / 64 * 64);
    if (step_init(memory, given[1]))
        return 1;
    for (i = 0; i < steps; i++) {
        double begin;
        for (k = 0; k < STEP_INPUTS; k++)
            memset(step_input(memory, step_inputs[k].name), 0, step_inputs[k].bytes);
        begin = now();
        if (step_run(memory))
            return 1;
        times[i] = now() - begin;
    }
    qsort(times, (size_t)steps, sizeof *times, order);
    printf("%.4f\n", times[steps / 2]);
    return 0;
}
