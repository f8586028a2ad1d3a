"""The text of attention's kernels, for the types and numbers that code/attention.py puts before it."""

HEADS = """
// where a matrix [rows, n] begins; `heads`: how many lie beside each other, row by row, 1 where they follow each other
DEVICE long long start(int heads, long long matrix, int rows, int n)
{
    const unsigned m = (unsigned)matrix;
    return ((long long)(m / heads) * rows * heads + m % heads) * n;
}
"""
COMMON = """
struct Axes { int count; int size[6]; long long step[6]; };
struct Problem {
    int t, s, d, e, first, last;
    int q, k, v, y, dy, dq, dk, dv;  // heads that lie beside each other
    long long bias_row, bias_column;
    double scale, cap, kept;
    unsigned long long seed, start;
    unsigned threshold;
    Axes keys, biases, own, sharing, numbers;
};
DEVICE long long place(const Axes& axes, long long number)
{
    long long found = 0;
    for (int i = axes.count - 1; i >= 0; i--) {
        found += number % axes.size[i] * axes.step[i];
        number /= axes.size[i];
    }
    return found;
}
DEVICE long long all(const Axes& axes)
{
    long long found = 1;
    for (int i = 0; i < axes.count; i++) found *= axes.size[i];
    return found;
}

// `height` rows from `row` on, `apart` elements from one to the next, columns from `column` on, with zeros where the
// matrix [rows, columns] ends
template <int HEIGHT, int WIDTH> DEVICE void stage(
    S* to, int stride, const S* from, int apart, int row, int rows, int column, int columns, int width)
{
    for (int i = threadIdx.x; i < HEIGHT * (WIDTH / PACK); i += THREADS) {
        const int r = i / (WIDTH / PACK), c = i % (WIDTH / PACK) * PACK;
        if (c >= width) continue;
        Pack<S, PACK> x = {};
        if (row + r < rows && column + c < columns)
            x = *(const Pack<S, PACK>*)(from + (long long)(row + r) * apart + column + c);
        if (ROUNDED)
            for (int j = 0; j < PACK; j++) x.of[j] = put(widen(x.of[j]));
        *(Pack<S, PACK>*)(to + r * stride + c) = x;
    }
}
// c = x · yᵀ: rows of x from `row` on, a warp's sixteen in c; of y from `column` on.  `fresh`: the strip is another
DEVICE void scores(A (*c)[4], S* strip, S* tile, const S* x, int apart_x, int row, int rows,
                   const S* y, int apart_y, int column, int columns, int terms, bool fresh)
{
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
    for (int k = 0; k < terms; k += DC) {
        const int width = (min(DC, terms - k) + STEP - 1) / STEP * STEP;
        __syncthreads();
        if (fresh || terms > DC) stage<ROWS, DC>(strip, LX, x, apart_x, row, rows, k, terms, width);
        stage<COLS, DC>(tile, LX, y, apart_y, column, columns, k, terms, width);
        __syncthreads();
        times_rows<BLOCKS>(c, strip + (threadIdx.x >> 5) * 16 * LX, LX, tile, LX, width);
    }
}
// c += weights · z, for the columns of z from `first` on that a block has
DEVICE void gather(A (*c)[4], const S* weights, S* tile, const S* z, int apart, int row, int rows, int first,
                   int columns)
{
#pragma unroll
    for (int n = 0; n < CHUNKS; n++) {
        const int column = first + n * EC, width = (min(EC, columns - column) + 7) / 8 * 8;
        if (width <= 0) break;
        __syncthreads();
        stage<COLS, EC>(tile, LE, z, apart, row, rows, column, columns, width);
        __syncthreads();
        times_columns<EB>(c + n * EB, weights + (threadIdx.x >> 5) * 16 * LW, LW, tile, LE, COLS, width / 8);
    }
}
// a warp's own rows, written for `gather`
DEVICE void weigh(S* weights, const A (*c)[4])
{
    const int lane = threadIdx.x & 31;
    S* own = weights + ((threadIdx.x >> 5) * 16 + (lane >> 2)) * LW + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
        for (int i = 0; i < 4; i++) own[i / 2 * 8 * LW + 8 * j + i % 2] = put(c[j][i]);
}
DEVICE void clear(A (*c)[4])
{
#pragma unroll
    for (int j = 0; j < CHUNKS * EB; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
}
// the rows that a warp has added up, times 1 / by
DEVICE void keep(S* to, int apart, const A (*c)[4], int row, int rows, int first, int columns, const A* by)
{
#pragma unroll
    for (int j = 0; j < CHUNKS * EB; j++)
        for (int i = 0; i < 4; i++) {
            const int r = row + i / 2 * 8, k = first + 8 * j + 2 * (threadIdx.x & 3) + i % 2;
            if (r < rows && k < columns) to[(long long)r * apart + k] = narrow<S>(c[j][i] / by[i / 2]);
        }
}
DEVICE A over_four(A x) { x += __shfl_xor_sync(0xffffffffu, x, 1); return x + __shfl_xor_sync(0xffffffffu, x, 2); }

// query i's score with key j, if it sees it
DEVICE A score(A product, int i, int j, const Problem& p, const B* bias)
{
    A x = product * (A)p.scale;
    if (CAPS) x = tanh_of(x * (A)(1 / p.cap)) * (A)p.cap;
    return BIASED ? x + (A)widen(bias[min(i, p.t - 1) * p.bias_row + min(j, p.s - 1) * p.bias_column]) : x;
}
DEVICE bool sees(int i, int j, const Problem& p)
{
    return i < p.t && j < p.s && j - i >= p.first && j - i <= p.last;
}
// whether all of some queries see all of some keys: then nobody has to ask for each
DEVICE bool all_see(int i, int queries, int j, int keys, const Problem& p)
{
    return i + queries <= p.t && j + keys <= p.s && j - (i + queries - 1) >= p.first && j + keys - 1 - i <= p.last;
}
// what a score's gradient is times for that of the product
DEVICE A along(A product, const Problem& p)
{
    if (!CAPS) return (A)p.scale;
    const A x = tanh_of(product * (A)p.scale * (A)(1 / p.cap));
    return (1 - x * x) * (A)p.scale;
}
// which weights dropout keeps, for HEIGHT queries from `query` and WIDTH keys from `key` on: a bit each, a byte for
// eight numbers of the stream that begin at a multiple of eight
template <int HEIGHT, int WIDTH> DEVICE void draw(
    unsigned char* bits, int query, int key, unsigned long long first, const Problem& p, const unsigned long long* step)
{
    if (!DROPS) return;
    __syncthreads();  // the last ones have been read
    for (int i = threadIdx.x; i < HEIGHT * (WIDTH / 8 + 1); i += THREADS) {
        const unsigned long long number = first + (unsigned long long)(query + i / (WIDTH / 8 + 1)) * p.s + key;
        unsigned u[8], found = 0;
        philox(number / 8 + i % (WIDTH / 8 + 1), p.seed, *step, u);
        for (int j = 0; j < 8; j++) found |= (u[j] >= p.threshold) << j;
        bits[i] = (unsigned char)found;
    }
}
// 1 / (1 - ratio), or 0, for query `row` and key `column` of those that were drawn
template <int WIDTH> DEVICE A kept(
    const unsigned char* bits, int row, int column, int query, int key, unsigned long long first, const Problem& p)
{
    if (!DROPS) return 1;
    const int at = (int)((first + (unsigned long long)(query + row) * p.s + key) % 8) + column;
    return bits[row * (WIDTH / 8 + 1) + at / 8] >> at % 8 & 1 ? (A)p.kept : (A)0;
}
DEVICE unsigned long long first_number(const Problem& p, long long matrix)
{
    return p.start + place(p.numbers, matrix);
}

// a query's log-sum-exp, 0 where it sees no key, and its sum of y · dy; 0 behind the last one
DEVICE A total_of(const A* lse, int i, const Problem& p)
{
    const A found = i < p.t ? lse[i] : 0;
    return found == -infinity<A>() ? 0 : found;
}
DEVICE A delta_of(const A* delta, int i, const Problem& p) { return i < p.t ? delta[i] : 0; }
// a weight again, from the log-sum-exp; `some`: not all queries see all keys here
DEVICE A again(A product, int i, int j, const Problem& p, const B* bias, A total, bool some)
{
    const A x = score(product, i, j, p, bias);
    return (some && !sees(i, j, p)) || (BIASED && x == -infinity<A>()) ? 0 : exp_of(x - total);
}
// keys that queries from i to `end` may see; queries that may see keys from j to `end`
DEVICE int first_key(int i, const Problem& p) { return max(i + p.first, 0); }
DEVICE int last_key(int end, const Problem& p) { return min(min(end, p.t) + p.last, p.s); }
DEVICE int first_query(int j, const Problem& p) { return max(j - p.last, 0); }
DEVICE int last_query(int end, const Problem& p) { return min(min(end, p.s) - p.first, p.t); }
"""

# what kernels begin with: the block's strip, and a thread's place in it
_HEAD = """    alignas(32) __shared__ S strip[ROWS * LX], tile[TILE], weights[ROWS * LW];
    __shared__ unsigned char bits[DROPS ? MOST : 1];
    const int lane = threadIdx.x & 31, u = lane & 3;
    const int strips = (LENGTH + ROWS - 1) / ROWS;
    const long long matrix = blockIdx.x / strips;
    const int begin = (strips - 1 - (int)(blockIdx.x % strips)) * ROWS;
    const int own_row = (threadIdx.x >> 5) * 16 + (lane >> 2), row = begin + own_row, from = blockIdx.y * CHUNKS * EC;
"""
# the matrices of a matrix of queries
_QUERIES = """    q += start(p.q, matrix, p.t, p.d);
    k += start(p.k, place(p.keys, matrix), p.s, p.d);
    v += start(p.v, place(p.keys, matrix), p.s, p.e);
    if (bias) bias += place(p.biases, matrix);
    const unsigned long long first = first_number(p, matrix);
"""

_FORWARD = """
    A sum[CHUNKS * EB][4], most[2] = {-infinity<A>(), -infinity<A>()}, total[2] = {0, 0};
    clear(sum);
    bool fresh = true;
    const int end = last_key(begin + ROWS, p);
    for (int column = first_key(begin, p) / COLS * COLS; column < end; column += COLS, fresh = false) {
        A c[BLOCKS][4], now[2] = {most[0], most[1]}, shift[2], part[2] = {0, 0};
        draw<ROWS, COLS>(bits, begin, column, first, p, step);
        scores(c, strip, tile, q, p.q * p.d, begin, p.t, k, p.k * p.d, column, p.s, p.d, fresh);
        const bool some = !all_see(begin, ROWS, column, COLS, p);
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
            for (int i = 0; i < 4; i++) {
                const int query = row + i / 2 * 8, key = column + 8 * j + 2 * u + i % 2;
                c[j][i] = some && !sees(query, key, p) ? -infinity<A>() : score(c[j][i], query, key, p, bias);
                now[i / 2] = larger(now[i / 2], c[j][i]);
            }
        for (int i = 0; i < 2; i++) {
            now[i] = larger(now[i], __shfl_xor_sync(0xffffffffu, now[i], 1));
            now[i] = larger(now[i], __shfl_xor_sync(0xffffffffu, now[i], 2));
            shift[i] = now[i] == -infinity<A>() ? 0 : now[i];  // no key has been seen yet
            most[i] = exp_of(most[i] - shift[i]);
        }
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
            for (int i = 0; i < 4; i++) {
                c[j][i] = exp_of(c[j][i] - shift[i / 2]);
                part[i / 2] += c[j][i];
                c[j][i] *= kept<COLS>(bits, own_row + i / 2 * 8, 8 * j + 2 * u + i % 2, begin, column, first, p);
            }
        weigh(weights, c);
#pragma unroll
        for (int j = 0; j < CHUNKS * EB; j++)
            for (int i = 0; i < 4; i++) sum[j][i] *= most[i / 2];
        for (int i = 0; i < 2; i++) {
            total[i] = total[i] * most[i] + part[i];
            most[i] = now[i];
        }
        gather(sum, weights, tile, v, p.v * p.e, column, p.s, from, p.e);
    }
    for (int i = 0; i < 2; i++) {
        total[i] = over_four(total[i]);
        if (lse && blockIdx.y == 0 && u == 0 && row + i * 8 < p.t)
            lse[matrix * p.t + row + i * 8] = total[i] > 0 ? log_of(total[i]) + most[i] : log_of(total[i]);
        if (total[i] == 0) total[i] = 1;
    }
    keep(y + start(p.y, matrix, p.t, p.e), p.y * p.e, sum, row, p.t, from, p.e, total);
"""

_BY_QUERY = """
    dy += start(p.dy, matrix, p.t, p.e);
    lse += matrix * p.t;
    delta += matrix * p.t;
    A sum[CHUNKS * EB][4];
    const A one[2] = {1, 1}, total[2] = {total_of(lse, row, p), total_of(lse, row + 8, p)};
    const A deltas[2] = {delta_of(delta, row, p), delta_of(delta, row + 8, p)};
    clear(sum);
    const int end = last_key(begin + ROWS, p);
    for (int column = first_key(begin, p) / COLS * COLS; column < end; column += COLS) {
        A c[BLOCKS][4], g[BLOCKS][4];
        draw<ROWS, COLS>(bits, begin, column, first, p, step);
        scores(c, strip, tile, q, p.q * p.d, begin, p.t, k, p.k * p.d, column, p.s, p.d, true);
        scores(g, strip, tile, dy, p.dy * p.e, begin, p.t, v, p.v * p.e, column, p.s, p.e, true);
        const bool some = !all_see(begin, ROWS, column, COLS, p);
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
            for (int i = 0; i < 4; i++) {
                const int query = row + i / 2 * 8, at = 8 * j + 2 * u + i % 2;
                const A w = again(c[j][i], query, column + at, p, bias, total[i / 2], some);
                const A down = g[j][i] * kept<COLS>(bits, own_row + i / 2 * 8, at, begin, column, first, p);
                c[j][i] = w * (down - deltas[i / 2]) * along(c[j][i], p);
            }
        weigh(weights, c);
        gather(sum, weights, tile, k, p.k * p.d, column, p.s, from, p.d);
    }
    keep(dq + start(p.dq, matrix, p.t, p.d), p.dq * p.d, sum, row, p.t, from, p.d, one);
"""

_BY_KEY = """
    k += start(p.k, matrix, p.s, p.d);
    v += start(p.v, matrix, p.s, p.e);
    __shared__ A totals[COLS], deltas[COLS];
    A key_sum[CHUNKS * EB][4], value_sum[CHUNKS * EB][4];
    const A one[2] = {1, 1};
    clear(key_sum);
    clear(value_sum);
    const int end = last_query(begin + ROWS, p), many = (int)all(p.sharing);
    for (int n = 0; n < many; n++) {
        const long long own = place(p.own, matrix) + place(p.sharing, n), at_rows = own * p.t;
        const S *queries = q + start(p.q, own, p.t, p.d), *down = dy + start(p.dy, own, p.t, p.e);
        const B* biases = bias ? bias + place(p.biases, own) : bias;
        const unsigned long long first = first_number(p, own);
        for (int column = first_query(begin, p) / COLS * COLS; column < end; column += COLS) {
            A c[BLOCKS][4], g[BLOCKS][4], factor[BLOCKS][4];
            draw<COLS, ROWS>(bits, column, begin, first, p, step);
            for (int i = threadIdx.x; i < COLS; i += THREADS) {  // the last ones were read before the last products
                totals[i] = total_of(lse + at_rows, column + i, p);
                deltas[i] = delta_of(delta + at_rows, column + i, p);
            }
            scores(c, strip, tile, k, p.k * p.d, begin, p.s, queries, p.q * p.d, column, p.t, p.d, true);
            const bool some = !all_see(column, COLS, begin, ROWS, p);
#pragma unroll
            for (int j = 0; j < BLOCKS; j++)
                for (int i = 0; i < 4; i++) {
                    const int at = 8 * j + 2 * u + i % 2;
                    factor[j][i] = along(c[j][i], p);
                    g[j][i] = c[j][i] = again(c[j][i], column + at, row + i / 2 * 8, p, biases, totals[at], some);
                    g[j][i] *= kept<ROWS>(bits, at, own_row + i / 2 * 8, column, begin, first, p);
                }
            weigh(weights, g);
            gather(value_sum, weights, tile, down, p.dy * p.e, column, p.t, from, p.e);
            scores(g, strip, tile, v, p.v * p.e, begin, p.s, down, p.dy * p.e, column, p.t, p.e, true);
#pragma unroll
            for (int j = 0; j < BLOCKS; j++)
                for (int i = 0; i < 4; i++) {
                    const int at = 8 * j + 2 * u + i % 2;
                    const A x = g[j][i] * kept<ROWS>(bits, at, own_row + i / 2 * 8, column, begin, first, p);
                    c[j][i] = c[j][i] * (x - deltas[at]) * factor[j][i];
                }
            weigh(weights, c);
            gather(key_sum, weights, tile, queries, p.q * p.d, column, p.t, from, p.d);
        }
    }
    keep(dk + start(p.dk, matrix, p.s, p.d), p.dk * p.d, key_sum, row, p.s, from, p.d, one);
    keep(dv + start(p.dv, matrix, p.s, p.e), p.dv * p.e, value_sum, row, p.s, from, p.e, one);
"""

# a block has a strip of queries and a tile of keys of one bias, or all of those over which the bias is one number
_BY_BIAS = """    alignas(32) __shared__ S strip[ROWS * LX], tile[TILE];
    __shared__ A parts[4][COLS];
    __shared__ unsigned char bits[DROPS ? MOST : 1];
    const int lane = threadIdx.x & 31, u = lane & 3;
    const int strips = p.bias_row ? (p.t + ROWS - 1) / ROWS : 1, tiles = p.bias_column ? (p.s + COLS - 1) / COLS : 1;
    const int here = blockIdx.x / tiles % strips * ROWS, there = blockIdx.x % tiles * COLS;
    const long long matrix = blockIdx.x / tiles / strips;
    const int stop = p.bias_row ? min(here + ROWS, p.t) : p.t, many = (int)all(p.sharing);
    const int across = p.bias_column ? min(there + COLS, p.s) : p.s;
    A sum[BLOCKS][4];
    for (int j = 0; j < BLOCKS; j++) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0;
    for (int n = 0; n < many; n++) {
        const long long own = place(p.own, matrix) + place(p.sharing, n), keys = place(p.keys, own);
        const B* biases = bias + place(p.biases, own);
        const S *queries = q + start(p.q, own, p.t, p.d), *down_rows = dy + start(p.dy, own, p.t, p.e);
        const S *those = k + start(p.k, keys, p.s, p.d), *values = v + start(p.v, keys, p.s, p.e);
        const unsigned long long first = first_number(p, own);
        for (int begin = here; begin < stop; begin += ROWS) {
            const int own_row = (threadIdx.x >> 5) * 16 + (lane >> 2), row = begin + own_row;
            const A *lses = lse + own * p.t, *own_deltas = delta + own * p.t;
            const A total[2] = {total_of(lses, row, p), total_of(lses, row + 8, p)};
            const A deltas[2] = {delta_of(own_deltas, row, p), delta_of(own_deltas, row + 8, p)};
            const int low = max(there, first_key(begin, p) / COLS * COLS), end = min(across, last_key(begin + ROWS, p));
            for (int column = low; column < end; column += COLS) {
                A c[BLOCKS][4], g[BLOCKS][4];
                draw<ROWS, COLS>(bits, begin, column, first, p, step);
                scores(c, strip, tile, queries, p.q * p.d, begin, p.t, those, p.k * p.d, column, p.s, p.d, true);
                scores(g, strip, tile, down_rows, p.dy * p.e, begin, p.t, values, p.v * p.e, column, p.s, p.e, true);
                const bool some = !all_see(begin, ROWS, column, COLS, p);
#pragma unroll
                for (int j = 0; j < BLOCKS; j++)
                    for (int i = 0; i < 4; i++) {
                        const int query = row + i / 2 * 8, at = 8 * j + 2 * u + i % 2;
                        const A w = again(c[j][i], query, column + at, p, biases, total[i / 2], some);
                        const A down = g[j][i] * kept<COLS>(bits, own_row + i / 2 * 8, at, begin, column, first, p);
                        sum[j][i] += w * (down - deltas[i / 2]);
                    }
            }
        }
    }
    dbias += place(p.biases, place(p.own, matrix));
    if (p.bias_column == 0) {
        for (int i = 0; i < 2; i++) {
            A x = 0;
            for (int j = 0; j < BLOCKS; j++) x += sum[j][2 * i] + sum[j][2 * i + 1];
            sum[0][2 * i] = over_four(x);
        }
    }
    const int row = (threadIdx.x >> 5) * 16 + (lane >> 2), wide = p.bias_column ? COLS : 1;
    if (p.bias_row) {
        for (int j = 0; j < BLOCKS; j++)
            for (int i = 0; i < 4; i++) {
                const int r = here + row + i / 2 * 8, c = 8 * j + 2 * u + i % 2;
                if (r < p.t && c < wide && there + c < p.s)
                    dbias[r * p.bias_row + (there + c) * p.bias_column] = narrow<B>(sum[j][i]);
            }
        return;
    }
    for (int j = 0; j < BLOCKS; j++)
        for (int i = 0; i < 2; i++) {
            A x = sum[j][i] + sum[j][i + 2];
            for (int o = 4; o < 32; o *= 2) x += __shfl_xor_sync(0xffffffffu, x, o);
            if (lane < 4) parts[threadIdx.x >> 5][8 * j + 2 * u + i] = x;
        }
    __syncthreads();
    for (int c = threadIdx.x; c < wide; c += THREADS)
        if (there + c < p.s)
            dbias[(there + c) * p.bias_column] = narrow<B>(parts[0][c] + parts[1][c] + parts[2][c] + parts[3][c]);
"""

DELTA = """    const long long row = (long long)blockIdx.x * 8 + (threadIdx.x >> 5);
    if (row >= rows) return;
    y += start(of_y, row / t, t, n) + row % t * of_y * n;
    dy += start(of_dy, row / t, t, n) + row % t * of_dy * n;
    A x = 0;
    for (int j = threadIdx.x & 31; j < n; j += 32) x = fma_of(widen(y[j]), widen(dy[j]), x);
    x = warp_reduce(x, Plus());
    if ((threadIdx.x & 31) == 0) delta[row] = x;
"""

_INPUTS = "const S* q, const S* k, const S* v, const B* bias, const unsigned long long* step"
_DOWN = "const A* lse, const A* delta, const S* dy"
#: kernel → what it is given before the problem, and its body
KERNELS = {
    "forward": (f"{_INPUTS}, S* y, A* lse", _HEAD.replace("LENGTH", "p.t") + _QUERIES + _FORWARD),
    "by_query": (f"{_INPUTS}, {_DOWN}, S* dq", _HEAD.replace("LENGTH", "p.t") + _QUERIES + _BY_QUERY),
    "by_key": (f"{_INPUTS}, {_DOWN}, S* dk, S* dv", _HEAD.replace("LENGTH", "p.s") + _BY_KEY),
    "by_bias": (f"{_INPUTS}, {_DOWN}, B* dbias", _BY_BIAS),
}
