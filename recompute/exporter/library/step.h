/* @ABOUT@
 *
 * All functions work on @BYTES@ bytes of memory that the caller provides, which begin at a multiple of 64.  They
 * allocate nothing and start no thread; several memories can train at the same time.  What returns an int returns 0,
 * or 1 for data that the step cannot use (a label that is no class, say), 2 for a file, 3 for arguments, 4 for a
 * processor that lacks what the kernels need; step_error then says what is wrong.  What returns a pointer returns a null
 * pointer there.  A step that fails on its data has changed no weights.  Running or saving memory that has no weights yet
 * is an error, 3: step_init or step_load comes first.
 *
 * Inputs of a step, which is to be filled before each run:
 * THE_INPUTS
 * Outputs of a step, to be read after a run, before the next one or an evaluation:
 * THE_OUTPUTS
 * Inputs of an evaluation:
 * THE_EVALUATION_INPUTS
 * Outputs of an evaluation:
 * THE_EVALUATION_OUTPUTS
 */
#ifndef STEP_H
#define STEP_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The bytes of memory that a step needs; what lies behind them is never touched. */
size_t step_memory(void);

/* Reads weights and optimizer state from a safetensors file; nothing is changed before all of it was checked. */
int step_init(void *memory, const char *weights);
/* The same from the contents of such a file. */
int step_load(void *memory, const void *weights, size_t size);

/* Where an input's elements go. */
void *step_input(void *memory, const char *name);
/* One training step. */
int step_run(void *memory);
/* Where an output's elements are. */
const void *step_output(const void *memory, const char *name);

/* The same in inference mode; weights stay as they are. */
void *step_evaluation_input(void *memory, const char *name);
int step_evaluate(void *memory);
const void *step_evaluation_output(const void *memory, const char *name);

/* A weight or a state of the optimizer, such as its learning rate: it can be read and set between steps. */
void *step_value(void *memory, const char *name);

/* Writes weights and optimizer state to a safetensors file, which takes the place of an earlier one when it is whole. */
int step_save(const void *memory, const char *weights);
/* The size of such a file, and the same into memory of that size. */
size_t step_size(void);
int step_store(const void *memory, void *weights);

/* What was wrong with the last call that failed, in any memory. */
const char *step_error(void);

/* The inputs of a step, and the loss among its outputs. */
#define STEP_INPUTS @COUNT@
#define STEP_LOSS @LOSS@
static const struct { const char *name; size_t bytes; } step_inputs[] = {@NAMED@};

#ifdef __cplusplus
}
#endif
#endif
