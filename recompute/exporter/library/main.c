/* An example: NAME WEIGHTS.safetensors [STEPS [BATCHES [TRAINED.safetensors]]]
 *
 * Trains on the batches of a file, from its beginning again at its end: each is the inputs' elements, one input after
 * the other in the order of NAME.h.  Without a file the inputs are zeros.  Compile it with
 *
 *     cc -O2 main.c libstep.a -lm -o step
 */
#include "NAME.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int stop(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, step_error());
    return 1;
}

int main(int count, char **given)
{
    int steps = count > 2 ? atoi(given[2]) : 10, i, k;
    FILE *batches = count > 3 ? fopen(given[3], "rb") : NULL;
    size_t size = (step_memory() + 63) / 64 * 64;
    void *memory = aligned_alloc(64, size);
    if (count < 2 || !memory || (count > 3 && !batches)) {
        fprintf(stderr, "usage: %s WEIGHTS.safetensors [STEPS [BATCHES [TRAINED.safetensors]]]\n", given[0]);
        return 2;
    }
    if (step_init(memory, given[1]))
        return stop("init");
    for (i = 0; i < steps; i++) {
        for (k = 0; k < STEP_INPUTS; k++) {
            void *input = step_input(memory, step_inputs[k].name);
            if (!batches) {
                memset(input, 0, step_inputs[k].bytes);
            } else if (fread(input, 1, step_inputs[k].bytes, batches) != step_inputs[k].bytes) {
                rewind(batches);
                if (k || fread(input, 1, step_inputs[k].bytes, batches) != step_inputs[k].bytes) {
                    fprintf(stderr, "'%s' ends in the middle of a batch\n", given[3]);
                    return 1;
                }
            }
        }
        if (step_run(memory))
            return stop("run");
        printf("%d %.9g\n", i, *(const float *)step_output(memory, STEP_LOSS));
    }
    if (count > 4 && step_save(memory, given[4]))
        return stop("save");
    free(memory);
    return 0;
}
