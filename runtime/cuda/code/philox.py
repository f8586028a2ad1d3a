"""The random stream of ops/random as kernels draw it: bit-identical to the processor's."""

#: Philox4x64-10 (Salmon et al. 2011): the four words of a block of the stream (seed, step)
PHILOX_WORDS = """
DEVICE void philox_words(unsigned long long block, unsigned long long seed, unsigned long long step,
                         unsigned long long* words)
{
    const unsigned long long m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
    unsigned long long c0 = block + 1, c1 = 0, c2 = 0, c3 = 0;
    for (int i = 0; i < 10; i++) {
        const unsigned long long h0 = __umul64hi(c0, m0), l0 = c0 * m0, h1 = __umul64hi(c2, m1), l1 = c2 * m1;
        c0 = h1 ^ c1 ^ seed;
        c1 = l1;
        c2 = h0 ^ c3 ^ step;
        c3 = l0;
        seed += 0x9E3779B97F4A7C15ull;
        step += 0xBB67AE8584CAA73Bull;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}
"""
#: numbers 8 · block ... 8 · block + 7 of the stream, 24 bits each
PHILOX = (
    PHILOX_WORDS
    + """
DEVICE void philox(unsigned long long block, unsigned long long seed, unsigned long long step, unsigned* u)
{
    unsigned long long words[4];
    philox_words(block, seed, step, words);
    for (int i = 0; i < 4; i++) {
        u[2 * i] = (unsigned)words[i] >> 8;
        u[2 * i + 1] = (unsigned)(words[i] >> 32) >> 8;
    }
}
"""
)
