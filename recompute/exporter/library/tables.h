/* A training step in C: tables of its calls and values, then its interface.  Generated. */
#define _POSIX_C_SOURCE 200112L /* fsync, fileno */
#include <stddef.h>
#include <stdint.h>
#ifdef STEP_FREESTANDING
#define memcpy __builtin_memcpy
#else
#include <string.h>
#endif
#include "NAME.h"

typedef void kernel(const int64_t *, int64_t, int64_t);

/* A kernel's call: its words begin at `first`; `where`: the operator, if it can fail.  A word's kind says what it is
 * relative to: nothing, the step's memory, the constants, the status of the run; and WIDE: it is in the table of words
 * of 64 bits.  Texts are places in the table of texts, and there is nothing that a loader would have to relocate. */
struct call {
    int64_t work;
    uint32_t first, where;
    uint32_t kernel, words;
};
enum { WIDE = 4 };

/* A value's place in memory; of weights also the type, as safetensors names it, and the shape. */
struct value {
    size_t at, bytes;
    uint32_t name, type, shape, axes;
};

/* A constant's place in memory and in the library. */
struct copy {
    size_t to, from, bytes;
};
