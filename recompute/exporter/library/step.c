/* The interface of a training step; NAME.h describes it.  The tables above this text are generated. */

#ifndef STEP_FREESTANDING
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#if defined(__GNUC__)
#define STEP_API __attribute__((visibility("default")))
#else
#define STEP_API
#endif

enum { OK, BAD_DATA, BAD_FILE, BAD_CALL, BAD_PROCESSOR };
enum { STATUS_WORDS = 3 };

/* -- errors ----------------------------------------------------------------------------------------------------- */

static char message[512];

static int equal(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

static void say(const char *text)
{
    size_t n = 0;
    while (n < sizeof message && message[n])
        n++;
    while (*text && n + 1 < sizeof message)
        message[n++] = *text++;
    message[n] = 0;
}

static void say_number(int64_t number)
{
    char digits[24], *at = digits + sizeof digits;
    uint64_t rest = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    *--at = 0;
    do
        *--at = (char)('0' + rest % 10);
    while (rest /= 10);
    if (number < 0)
        *--at = '-';
    say(at);
}

static int fail(int code, const char *a, const char *b, const char *c)
{
    message[0] = 0;
    say(a), say(b), say(c);
    return code;
}

/* The first feature that kernels use and this processor or its system lacks; 0: none.  This text is compiled for any
 * processor of the target, so that it can say so where the kernels would end the process. */
static const char *lacking(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
#define NEEDS(feature) if (!__builtin_cpu_supports(feature)) return feature;
    FEATURES
#undef NEEDS
#endif
    return 0;
}

/* Whether nothing can be done in this memory, or on this processor. */
static int unusable(const void *memory)
{
    const char *feature = lacking();
    if (feature)
        return fail(BAD_PROCESSOR, "the step was built for processors with ", feature, ", and this one lacks it");
    if (!memory || (uintptr_t)memory % ALIGNMENT)
        return fail(BAD_CALL, "the memory has to begin at a multiple of 64 bytes", "", "");
    return OK;
}

/* Between runs, memory that has weights says so, at a place where no input or output lies. */
static void mark(void *memory, uint64_t value) { memcpy((char *)memory + MARK, &value, sizeof value); }

/* Whether nothing can be done in this memory, or it has no weights of this step. */
static int not_ready(const void *memory)
{
    uint64_t value;
    int code = unusable(memory);
    if (code)
        return code;
    memcpy(&value, (const char *)memory + MARK, sizeof value);
    return value == MARK_VALUE ? OK : fail(BAD_CALL, "the memory has no weights of this step: initialise it first", "", "");
}

/* what a kernel could not compute with: its status is a code, the number, and the limit or axis that it is for */
static int bad_data(const int64_t *status, const char *where)
{
    static const char *const not_finite[] = {"nan", "inf", "-inf"};
    message[0] = 0;
    switch (status[0]) {
    case 1: say("label "), say_number(status[1]), say(" is outside the "), say_number(status[2]), say(" classes"); break;
    case 2: say("index "), say_number(status[1]), say(" is outside an axis of "), say_number(status[2]); break;
    case 3: say("the loss is "), say(not_finite[status[1] < 0 || status[1] > 2 ? 0 : status[1]]); break;
    case 4: say("label "), say_number(status[1]), say(" is the blank"); break;
    case 5: say("length "), say_number(status[1]), say(" is outside of "), say_number(status[2]), say(" steps"); break;
    default: say("a kernel failed with status "), say_number(status[0]);
    }
    say(", in "), say(where);
    return BAD_DATA;
}

/* -- rounding: portable bits are rounded to nearest, and subnormal numbers count, whatever the caller has set ------- */

#if PORTABLE && defined(__x86_64__)
enum { AS_IEEE_754 = 0x1F80 };
static uint64_t rounding(void) { return __builtin_ia32_stmxcsr(); }
static void round_as(uint64_t mode) { __builtin_ia32_ldmxcsr((unsigned)mode); }
#elif PORTABLE && defined(__aarch64__)
enum { AS_IEEE_754 = 0 };
static uint64_t rounding(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void round_as(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
enum { AS_IEEE_754 = 0 };
static uint64_t rounding(void) { return 0; }
static void round_as(uint64_t mode) { (void)mode; }
#endif

/* -- running ---------------------------------------------------------------------------------------------------- */

static int run(void *memory, const struct call *calls, size_t count)
{
    int64_t words[MOST_WORDS], status[STATUS_WORDS] = {0, 0, 0};
    const int64_t bases[] = {0, (int64_t)(uintptr_t)memory, (int64_t)(uintptr_t)step_data, (int64_t)(uintptr_t)status};
    uint64_t mode = rounding();
    size_t i, k;
    int code = not_ready(memory);
    if (code)
        return code;
    round_as(AS_IEEE_754);
    for (i = 0; i < count && !status[0]; i++) {
        const struct call *c = calls + i;
        for (k = 0; k < c->words; k++) {
            uint32_t word = all_words[c->first + k], kind = all_kinds[c->first + k];
            words[k] = (kind & WIDE ? wide_words[word] : (int64_t)word) + bases[kind & 3];
        }
        kernels[c->kernel](words, 0, c->work);
        if (status[0])
            code = bad_data(status, texts + c->where);
    }
    round_as(mode);
    mark(memory, MARK_VALUE);
    return code;
}

static const struct value *find(const struct value *values, size_t count, const char *name)
{
    size_t i;
    for (i = 0; name && i < count; i++)
        if (equal(texts + values[i].name, name))
            return values + i;
    fail(BAD_CALL, "there is no value '", name ? name : "", "'");
    return 0;
}

static void *place(const void *memory, const struct value *values, size_t count, const char *name)
{
    const struct value *v = unusable(memory) ? 0 : find(values, count, name);
    return v ? (char *)memory + v->at : 0;
}

STEP_API size_t step_memory(void) { return MEMORY; }
STEP_API const char *step_error(void) { return message; }
STEP_API int step_run(void *memory) { return run(memory, step_calls, STEP_CALLS); }
STEP_API int step_evaluate(void *memory) { return run(memory, evaluation_calls, EVALUATION_CALLS); }
STEP_API void *step_input(void *memory, const char *name) { return place(memory, inputs, INPUTS, name); }
STEP_API const void *step_output(const void *memory, const char *name) { return place(memory, outputs, OUTPUTS, name); }
STEP_API void *step_value(void *memory, const char *name) { return place(memory, weights, WEIGHTS, name); }
STEP_API void *step_evaluation_input(void *memory, const char *name)
{
    return place(memory, evaluation_inputs, EVALUATION_INPUTS, name);
}
STEP_API const void *step_evaluation_output(const void *memory, const char *name)
{
    return place(memory, evaluation_outputs, EVALUATION_OUTPUTS, name);
}
