/* Weights: a safetensors file, here or in memory.  It comes behind step.c. */

struct source {
    const unsigned char *bytes; /* the file's contents, or 0: read `file` */
    void *file;
    uint64_t size, at; /* of the whole, and of the next byte */
    uint64_t end;      /* of the header */
};

static int next(struct source *s) /* the next byte of the header; -1 at its end */
{
    if (s->at >= s->end)
        return -1;
    s->at++;
#ifndef STEP_FREESTANDING
    if (!s->bytes)
        return getc((FILE *)s->file);
#endif
    return s->bytes[s->at - 1];
}

static int token(struct source *s) /* the next byte that is no space */
{
    int c;
    do
        c = next(s);
    while (c == ' ' || c == '\t' || c == '\n' || c == '\r');
    return c;
}

static int32_t unit(struct source *s) /* four hexadecimal digits; -1 where they are none */
{
    int32_t code = 0;
    int k, c;
    for (k = 0; k < 4; k++) {
        c = next(s);
        if (c >= '0' && c <= '9')
            code = code << 4 | (c - '0');
        else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'))
            code = code << 4 | ((c | 0x20) - 'a' + 10);
        else
            return -1;
    }
    return code;
}

/* What is behind a backslash, in UTF-8; how many bytes that are, 0 where it is nothing, or the end of a text in C. */
static int escaped(struct source *s, char *to)
{
    static const char plain[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    int k, c = next(s), more;
    int32_t code, low;
    for (k = 0; plain[k]; k++)
        if (plain[k] == c)
            return to[0] = meant[k], 1;
    if (c != 'u' || (code = unit(s)) <= 0)
        return 0;
    if (code >= 0xD800 && code < 0xE000) { /* two halves of a character */
        if (code >= 0xDC00 || next(s) != '\\' || next(s) != 'u' || (low = unit(s)) < 0xDC00 || low >= 0xE000)
            return 0;
        code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00));
    }
    if (code < 0x80)
        return to[0] = (char)code, 1;
    more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    to[0] = (char)(0xFF00 >> (more + 1) | code >> 6 * more);
    for (k = 1; k <= more; k++)
        to[k] = (char)(0x80 | (code >> 6 * (more - k) & 0x3F));
    return more + 1;
}

/* A text behind its first quote into `to`, cut at `room` - 1 bytes; 0 where it ends in the middle, or is none. */
static int text(struct source *s, char *to, size_t room)
{
    size_t n = 0;
    char bytes[4];
    int c, k, count;
    for (c = next(s); c != '"'; c = next(s)) {
        if (c < ' ') /* the end, or what a text may not contain */
            return 0;
        bytes[0] = (char)c;
        count = c == '\\' ? escaped(s, bytes) : 1;
        if (!count)
            return 0;
        for (k = 0; k < count && n + 1 < room; k++)
            to[n++] = bytes[k];
    }
    to[n] = 0;
    return 1;
}

/* Whole numbers up to `]` into `to`, at most `most`; how many there are, or -1. */
static int numbers(struct source *s, uint64_t *to, int most)
{
    int n = 0, c = token(s);
    if (c != '[')
        return -1;
    c = token(s);
    if (c == ']')
        return 0;
    for (;;) {
        uint64_t value = 0;
        if (c < '0' || c > '9' || n == most)
            return -1;
        for (; c >= '0' && c <= '9'; c = next(s)) {
            if (value > (UINT64_MAX - 9) / 10)
                return -1;
            value = value * 10 + (uint64_t)(c - '0');
        }
        to[n++] = value;
        if (c == ' ')
            c = token(s);
        if (c == ']')
            return n;
        if (c != ',')
            return -1;
        c = token(s);
    }
}

static int metadata(struct source *s) /* an object of texts is skipped */
{
    char ignored[2];
    int c = token(s);
    if (c != '{')
        return 0;
    for (c = token(s); c == '"'; c = token(s)) {
        if (!text(s, ignored, sizeof ignored) || token(s) != ':' || token(s) != '"' || !text(s, ignored, sizeof ignored))
            return 0;
        c = token(s);
        if (c != ',')
            break;
    }
    return c == '}';
}

static int is_other(const struct value *v, const char *what) { return fail(BAD_FILE, "the file's '", texts + v->name, what); }

/* One tensor's entry: its type, shape and size have to be the step's.  `at`: where its bytes begin. */
static int entry(struct source *s, const struct value *v, uint64_t *at)
{
    uint64_t found[MOST_AXES];
    char key[16], type[16];
    int seen = 0, n, i, c = token(s);
    if (c != '{')
        return is_other(v, "' is no tensor");
    for (c = token(s); c == '"'; c = token(s)) {
        if (!text(s, key, sizeof key) || token(s) != ':')
            return is_other(v, "' has a damaged entry");
        if (equal(key, "dtype")) {
            if (token(s) != '"' || !text(s, type, sizeof type) || !equal(type, texts + v->type))
                return is_other(v, "' has another element type than the step's");
            seen |= 1;
        } else if (equal(key, "shape")) {
            n = numbers(s, found, MOST_AXES);
            for (i = 0; n == (int)v->axes && i < n && found[i] == shapes[v->shape + i]; i++)
                ;
            if (n != (int)v->axes || i < n)
                return is_other(v, "' has another shape than the step's");
            seen |= 2;
        } else if (equal(key, "data_offsets")) {
            if (numbers(s, found, 2) != 2 || found[0] > found[1] || found[1] - found[0] != v->bytes
                || found[1] > s->size - s->end)
                return is_other(v, "' has another size than the step's, or ends outside of the file");
            *at = found[0];
            seen |= 4;
        } else {
            return is_other(v, "' has a damaged entry");
        }
        c = token(s);
        if (c != ',')
            break;
    }
    return c == '}' && seen == 7 ? OK : is_other(v, "' has a damaged entry");
}

/* Reads the header and checks all of it; `at`: where each of the step's tensors begins behind it. */
static int header(struct source *s, uint64_t *at)
{
    char name[LONGEST_NAME + 2];
    size_t i = 0, k, seen = 0;
    int c = token(s), code;
    for (k = 0; k < WEIGHTS; k++)
        at[k] = UINT64_MAX;
    if (c != '{')
        return fail(BAD_FILE, "the file is no safetensors file", "", "");
    for (c = token(s); c == '"'; c = token(s)) {
        if (!text(s, name, sizeof name) || token(s) != ':')
            return fail(BAD_FILE, "the file's header is damaged", "", "");
        if (equal(name, "__metadata__")) {
            if (!metadata(s))
                return fail(BAD_FILE, "the file's metadata is damaged", "", "");
        } else {
            for (k = 0; k < WEIGHTS && !equal(texts + weights[i].name, name); k++)
                i = (i + 1) % WEIGHTS; /* from the last one on: files are often in the step's order */
            if (k == WEIGHTS)
                return fail(BAD_FILE, "the file has '", name, "', which the step has not");
            if (at[i] != UINT64_MAX)
                return is_other(weights + i, "' is there twice");
            if ((code = entry(s, weights + i, at + i)))
                return code;
            seen++;
        }
        c = token(s);
        if (c != ',')
            break;
    }
    if (c != '}' || token(s) != -1)
        return fail(BAD_FILE, "the file's header is damaged", "", "");
    for (k = 0; seen < WEIGHTS && k < WEIGHTS; k++)
        if (at[k] == UINT64_MAX)
            return fail(BAD_FILE, "the file has no '", texts + weights[k].name, "'");
    for (i = 0; i < WEIGHTS; i++)
        for (k = 0; k < WEIGHTS; k++) /* begins inside of another one */
            if (k != i && weights[i].bytes && at[i] >= at[k] && at[i] - at[k] < weights[k].bytes)
                return is_other(weights + i, "' shares bytes with another tensor");
    return OK;
}

static int begun(struct source *s, const unsigned char *first)
{
    uint64_t n = 0;
    int i;
    for (i = 7; i >= 0; i--)
        n = n << 8 | first[i];
    if (s->size < 8 || n > s->size - 8)
        return fail(BAD_FILE, "the file is cut, or no safetensors file", "", "");
    s->at = 8, s->end = 8 + n;
    return OK;
}

static void put_constants(void *memory)
{
    size_t k;
    for (k = 0; k < CONSTANTS; k++)
        memcpy((char *)memory + constants[k].to, step_data + constants[k].from, constants[k].bytes);
}

STEP_API int step_load(void *memory, const void *bytes, size_t size)
{
    uint64_t at[WEIGHTS + 1];
    struct source s = {0, 0, 0, 0, 0};
    size_t k;
    int code = unusable(memory);
    s.bytes = (const unsigned char *)bytes, s.size = size;
    if (code || (code = !bytes || size < 8 ? fail(BAD_FILE, "the file is cut", "", "") : begun(&s, s.bytes))
        || (code = header(&s, at)))
        return code;
    put_constants(memory);
    for (k = 0; k < WEIGHTS; k++)
        memcpy((char *)memory + weights[k].at, s.bytes + s.end + at[k], weights[k].bytes);
    mark(memory, MARK_VALUE);
    return OK;
}

STEP_API size_t step_size(void) { return FILE_BYTES; }

STEP_API int step_store(const void *memory, void *bytes)
{
    char *to = (char *)bytes;
    size_t k;
    int code = not_ready(memory);
    if (code)
        return code;
    if (!to)
        return fail(BAD_CALL, "there is no memory to write the file to", "", "");
    memcpy(to, file_header, HEADER_BYTES);
    to += HEADER_BYTES;
    for (k = 0; k < WEIGHTS; k++) { /* in the file's order */
        memcpy(to, (const char *)memory + weights[k].at, weights[k].bytes);
        to += weights[k].bytes;
    }
    return OK;
}

#ifdef STEP_FREESTANDING

/* The product of numbers of 128 bits, which LLVM calls where the machine has none: by halves of 64-bit words. */
unsigned __int128 __multi3(unsigned __int128 a, unsigned __int128 b)
{
    union { unsigned __int128 whole; uint64_t word[2]; } x, y, z;
    uint64_t low, middle, other, mask = 0xFFFFFFFF;
    x.whole = a, y.whole = b;
    low = (x.word[0] & mask) * (y.word[0] & mask);
    middle = (x.word[0] >> 32) * (y.word[0] & mask) + (low >> 32);
    other = (x.word[0] & mask) * (y.word[0] >> 32) + (middle & mask);
    z.word[0] = other << 32 | (low & mask);
    z.word[1] = (x.word[0] >> 32) * (y.word[0] >> 32) + (middle >> 32) + (other >> 32)
        + x.word[0] * y.word[1] + x.word[1] * y.word[0];
    return z.whole;
}

#else

static int opened(void *memory, FILE *file, const char *path)
{
    uint64_t at[WEIGHTS + 1];
    unsigned char first[8];
    struct source s = {0, 0, 0, 0, 0};
    long end;
    size_t k;
    int code;
    if (fseek(file, 0, SEEK_END) || (end = ftell(file)) < 8 || fseek(file, 0, SEEK_SET)
        || fread(first, 1, 8, file) != 8)
        return fail(BAD_FILE, "cannot read '", path, "'");
    s.file = file, s.size = (uint64_t)end;
    if ((code = begun(&s, first)) || (code = header(&s, at)))
        return code;
    mark(memory, 0);
    put_constants(memory);
    for (k = 0; k < WEIGHTS; k++) /* all is there and of the right size */
        if (fseek(file, (long)(s.end + at[k]), SEEK_SET)
            || fread((char *)memory + weights[k].at, 1, weights[k].bytes, file) != weights[k].bytes)
            return fail(BAD_FILE, "cannot read '", path, "' to its end: initialise again");
    mark(memory, MARK_VALUE);
    return OK;
}

STEP_API int step_init(void *memory, const char *path)
{
    FILE *file;
    int code = unusable(memory);
    if (code)
        return code;
    file = path ? fopen(path, "rb") : 0;
    if (!file)
        return fail(BAD_FILE, "cannot open '", path ? path : "", "'");
    code = opened(memory, file, path);
    fclose(file);
    return code;
}

STEP_API int step_save(const void *memory, const char *path)
{
    char beside[1024];
    struct stat there;
    size_t k, n = 0;
    FILE *file;
    int good, code = not_ready(memory);
    if (code)
        return code;
    while (path && path[n] && n + 5 < sizeof beside)
        beside[n] = path[n], n++;
    if (!n || path[n])
        return fail(BAD_CALL, "a file's name has 1 to 1,018 bytes", "", "");
    if (!stat(path, &there) && !S_ISREG(there.st_mode)) /* a rename would put a file in a device's place */
        return fail(BAD_FILE, "'", path, "' is no plain file: it stays as it is");
    memcpy(beside + n, ".tmp", 5);
    file = fopen(beside, "wb");
    if (!file)
        return fail(BAD_FILE, "cannot write '", beside, "'");
    good = fwrite(file_header, 1, HEADER_BYTES, file) == HEADER_BYTES;
    for (k = 0; good && k < WEIGHTS; k++)
        good = fwrite((const char *)memory + weights[k].at, 1, weights[k].bytes, file) == weights[k].bytes;
    good = good && !fflush(file) && !fsync(fileno(file)); /* on the disk, before it takes the earlier one's place */
    good = !fclose(file) && good && !rename(beside, path);
    if (!good)
        remove(beside);
    return good ? OK : fail(BAD_FILE, "cannot write '", path, "'");
}

#endif
