// What kernels translated from Python are made of (../code/python_text.py): whole numbers, arrays, blocks of elements.
// A kernel declares `Size`, the type of sizes, LANES, the threads of an item, and WHOLE, whether blocks are vectors.

// -- whole numbers: those of an unsigned type are not negative; sums and products take 64 bits, as in Python ----------

template <class V> constexpr bool natural = (V)-1 > (V)0;
template <bool N> struct Wide_ { typedef long long type; };
template <> struct Wide_<true> { typedef unsigned long long type; };
template <class A, class B> using Wide = typename Wide_<natural<A> && natural<B>>::type;
template <bool B, class T, class F> struct Either_ { typedef T type; };
template <class T, class F> struct Either_<false, T, F> { typedef F type; };
template <bool B> struct Where_ {};
template <> struct Where_<true> { typedef int type; };
template <class V, class U> constexpr bool holds = (natural<U> || !natural<V>)
    && (sizeof(V) == 8 || sizeof(U) < sizeof(V) || (sizeof(U) == sizeof(V) && natural<U> == natural<V>));
template <class V> struct Whole {
    V v;
    Whole() = default;
    __device__ __forceinline__ constexpr explicit Whole(V x) : v(x) {}
    template <class U, class = typename Where_<holds<V, U>>::type>
    __device__ __forceinline__ constexpr Whole(Whole<U> x) : v((V)x.v) {}
    __device__ __forceinline__ constexpr explicit operator bool() const { return v != 0; }
};
typedef Whole<unsigned long long> Natural;
typedef Whole<long long> Integer;
DEVICE constexpr Natural operator""_n(unsigned long long v) { return Natural(v); }

#define BINARY(op, ...)                                                                                                \
    template <class A, class B> DEVICE constexpr auto operator op(Whole<A> a, Whole<B> b)                              \
    {                                                                                                                  \
        typedef __VA_ARGS__ W;                                                                                         \
        return Whole<W>((W)a.v op (W)b.v);                                                                             \
    }
BINARY(+, Wide<A, B>)
BINARY(*, Wide<A, B>)
BINARY(-, long long)
BINARY(|, Wide<A, B>)
BINARY(^, Wide<A, B>)
BINARY(&, typename Either_<natural<A> && (sizeof(A) < sizeof(B) || !natural<B>), A,
                           typename Either_<natural<B>, B, long long>::type>::type)
BINARY(<<, Wide<A, A>)
BINARY(>>, A)
#define COMPARISON(op)                                                                                                 \
    template <class A, class B> DEVICE constexpr bool operator op(Whole<A> a, Whole<B> b)                              \
    {                                                                                                                  \
        return (Wide<A, B>)a.v op (Wide<A, B>)b.v;                                                                     \
    }
COMPARISON(<)
COMPARISON(<=)
COMPARISON(>)
COMPARISON(>=)
COMPARISON(==)
COMPARISON(!=)
#undef BINARY
#undef COMPARISON
template <class A> DEVICE constexpr Integer operator-(Whole<A> a) { return Integer(-(long long)a.v); }

// a // b and a % b, towards minus infinity; numbers of 32 bits are divided as such
template <class A, class B> DEVICE constexpr auto floor_of(Whole<A> a, Whole<B> b)
{
    if constexpr (natural<A> && natural<B>) {
        typedef typename Either_<(sizeof(A) > sizeof(B)), A, B>::type W;
        return Whole<A>((A)((W)a.v / (W)b.v));
    } else {
        const long long q = (long long)a.v / (long long)b.v, r = (long long)a.v % (long long)b.v;
        return Integer(q - (r != 0 && (r < 0) != ((long long)b.v < 0)));
    }
}
template <class A, class B> DEVICE constexpr auto rest_of(Whole<A> a, Whole<B> b)
{
    if constexpr (natural<A> && natural<B>) {
        typedef typename Either_<(sizeof(A) > sizeof(B)), A, B>::type W;
        return Whole<B>((B)((W)a.v % (W)b.v));
    } else {
        const long long r = (long long)a.v % (long long)b.v;
        return Integer(r != 0 && (r < 0) != ((long long)b.v < 0) ? r + (long long)b.v : r);
    }
}
template <class A, class B> DEVICE constexpr auto min_of(Whole<A> a, Whole<B> b)
{
    typedef Whole<Wide<A, B>> W;
    return (W)a < (W)b ? (W)a : (W)b;
}
template <class A, class B> DEVICE constexpr auto max_of(Whole<A> a, Whole<B> b)
{
    typedef Wide<A, B> W;
    typedef typename Wide_<natural<A> || natural<B>>::type R;
    return Whole<R>((R)((W)a.v > (W)b.v ? (W)a.v : (W)b.v));
}
// the type of a loop's number
template <class A, class B> DEVICE constexpr auto from_(Whole<A> a, Whole<B> b)
{
    return Whole<typename Either_<sizeof(A) == 4 && sizeof(B) == 4 && natural<A> && natural<B>, A, Wide<A, A>>::type>(a);
}

// -- conversions ------------------------------------------------------------------------------------------------------

template <class T> struct Plain_ { typedef T type; };
template <class T> struct Plain_<T&> { typedef T type; };
template <class T> struct Plain_<T&&> { typedef T type; };
template <class T> struct Plain_<const T> { typedef T type; };
template <class T> struct Plain_<const T&> { typedef T type; };
template <class T> using Plain = typename Plain_<T>::type;

struct Nothing {};
template <class T, class X> DEVICE T as(X x) { return (T)x; }
template <class T, class V> DEVICE T as(Whole<V> x) { return (T)x.v; }
template <class T> DEVICE T as(Nothing) { return T(0); }
// a whole number as an element of V
template <class V, class X> DEVICE Whole<V> whole(X x) { return Whole<V>((V)as<Whole<V>>(x).v); }
template <class V, class U> DEVICE Whole<V> whole(Whole<U> x) { return Whole<V>((V)x.v); }
template <class T, class U> constexpr bool same = false;
template <class T> constexpr bool same<T, T> = true;
// a variable's first value: whole numbers get 64 bits
template <class T> DEVICE T variable(T x) { return x; }
template <class V> DEVICE auto variable(Whole<V> x) { return Whole<Wide<V, V>>(x); }
// what a variable takes: its type, a narrower whole number, a float where it is a double
template <class T, class U> DEVICE void assign(T& to, const U& x) 
{
    static_assert(same<T, U>, "a variable changes its type");
    to = x;
}
template <class V, class U> DEVICE void assign(Whole<V>& to, const Whole<U>& x) { to = x; }
DEVICE void assign(double& to, float x) { to = x; }

// -- arrays -----------------------------------------------------------------------------------------------------------

// elements as numbers: floats of 16 bits as float, small integers as whole numbers
DEVICE float load(float x) { return x; }
DEVICE double load(double x) { return x; }
DEVICE float load(f16 x) { return widen(x); }
DEVICE float load(bf16 x) { return widen(x); }
DEVICE bool load(bool x) { return x; }
DEVICE unsigned long long load(unsigned long long x) { return x; }
DEVICE uint4 load(uint4 x) { return x; }
DEVICE Whole<int> load(signed char x) { return Whole<int>(x); }
DEVICE Whole<int> load(short x) { return Whole<int>(x); }
DEVICE Whole<int> load(int x) { return Whole<int>(x); }
DEVICE Integer load(long long x) { return Integer(x); }
DEVICE Whole<unsigned> load(unsigned char x) { return Whole<unsigned>(x); }
DEVICE Whole<unsigned> load(unsigned short x) { return Whole<unsigned>(x); }
DEVICE Whole<unsigned> load(unsigned x) { return Whole<unsigned>(x); }
template <class T, class X> DEVICE T stored(X x) { return narrow<T>(x); }
template <class T, class V> DEVICE T stored(Whole<V> x)
{
    if constexpr (same<T, f16> || same<T, bf16>) return narrow<T>((double)x.v);
    else return (T)x.v;
}
template <class T> DEVICE T stored(bool x) { return narrow<T>((float)x); }

template <class T, int N> struct Array {
    T* p;
    Size shape[N];
    typedef T element;
    __device__ __forceinline__ auto size() const
    {
        if constexpr (N == 1) return shape[0];
        else {
            Natural n = 1_n;
            for (int i = 0; i < N; i++) n = n * shape[i];
            return n;
        }
    }
};
template <class X> using Element = decltype(load(typename Plain<X>::element()));
template <class T, int N, class... I> DEVICE long long offset(const Array<T, N>& x, I... at)
{
    const long long places[] = {(long long)at.v...};
    long long found = 0;
    for (int i = 0; i < (int)sizeof...(I); i++) found = found * (long long)x.shape[i].v + places[i];
    return found;
}
template <class T, int N, class... I> DEVICE auto at_(const Array<T, N>& x, I... at)
{
    if constexpr (sizeof...(I) == N) return load(x.p[offset(x, at...)]);
    else {
        constexpr int M = N - (int)sizeof...(I);
        Array<T, M> part;
        long long each = 1;
        for (int i = 0; i < M; i++) each *= (part.shape[i] = x.shape[N - M + i]).v;
        part.p = x.p + offset(x, at...) * each;
        return part;
    }
}
template <class T, int N, class X, class... I> DEVICE void put_(const Array<T, N>& x, X value, I... at)
{
    static_assert(sizeof...(I) == N, "an element is stored");
    x.p[offset(x, at...)] = stored<T>(value);
}
template <class T, class A, class B> DEVICE Array<T, 1> cut_(const Array<T, 1>& x, A begin, B end)
{
    return Array<T, 1>{x.p + begin.v, {Size((decltype(Size::v))(end.v - begin.v))}};
}
// what sizes are divided by: those of 32 bits by a product (see parts.py)
template <bool Small> struct Divided_ : Size {};
template <> struct Divided_<true> : Size { unsigned times, shift; };
typedef Divided_<sizeof(Size) == 4> Divisor;
template <class A, bool S> DEVICE Size floor_of(Whole<A> n, Divided_<S> d)
{
    if constexpr (S) return Size((__umulhi((unsigned)n.v, d.times) + (unsigned)n.v) >> d.shift);
    else return Size((decltype(Size::v))n.v / d.v);
}
template <class A, bool S> DEVICE Size rest_of(Whole<A> n, Divided_<S> d)
{
    return Size((decltype(Size::v))n.v - floor_of(n, d).v * d.v);
}
// columns of matrices, as rows
template <class T> struct Strided {
    T* p;
    Size step, count;
    typedef T element;
    __device__ __forceinline__ Size size() const { return count; }
};
template <class T, class I> DEVICE auto at_(const Strided<T>& x, I i) { return load(x.p[(long long)i.v * x.step.v]); }
template <class T, class X, class I> DEVICE void put_(const Strided<T>& x, X value, I i)
{
    x.p[(long long)i.v * x.step.v] = stored<T>(value);
}
template <class T> struct Columns {
    T* p;
    Size shape[3];
    typedef T element;
};
template <class T, class I> DEVICE Strided<T> at_(const Columns<T>& x, I r)
{
    const auto matrix = (Size)floor_of(r, x.shape[2]), column = (Size)rest_of(r, x.shape[2]);
    return {x.p + (long long)matrix.v * x.shape[1].v * x.shape[2].v + column.v, x.shape[2], x.shape[1]};
}
// a table of rows of numbers, without memory: loops are written out before the compiler looks into that
template <class V, int C, V... each> struct Constants {};
template <class V, int C, V... each, class I, class J> DEVICE auto at_(const Constants<V, C, each...>&, I i, J j)
{
    V found = 0;
    int k = 0;
    ((found = (int)(i.v * C + j.v) == k++ ? each : found), ...);
    return load(found);
}
// an operand that is not there
struct Absent {
    Size shape[1] = {Size(0)};
    typedef float element;
    __device__ __forceinline__ constexpr Natural size() const { return 0_n; }
};
template <class... I> DEVICE Nothing at_(const Absent&, I...) { return {}; }
template <class... I> DEVICE Nothing at_(Nothing, I...) { return {}; }
template <class X, class... I> DEVICE void put_(const Absent&, X, I...) {}
template <class X, class... I> DEVICE void put_(Nothing, X, I...) {}

// an item's own element, which its thread stores
template <class T> struct Own {
    T value = {};
    typedef T element;
};
template <class T, class X, class... I> DEVICE void put_(Own<T>& x, X value, I...) { x.value = stored<T>(value); }

// eight elements from `first` on, read at once, or written at once when their scope ends
template <class T> struct Taken {
    Pack<T, 8> of;
    long long first;
    typedef T element;
    __device__ __forceinline__ constexpr Natural size() const { return 8_n; }
};
template <class T> struct Given : Taken<T> {
    T* to;
    __device__ __forceinline__ Given(T* p, long long at) : Taken<T>{{}, at}, to(p + at) {}
    Given(const Given&) = delete;
    __device__ __forceinline__ ~Given() { *(Pack<T, 8>*)to = this->of; }
};
template <class T, class I> DEVICE auto at_(const Taken<T>& x, I i) { return load(x.of.of[(long long)i.v - x.first]); }
template <class T, class X, class I> DEVICE void put_(Given<T>& x, X value, I i)
{
    x.of.of[(long long)i.v - x.first] = stored<T>(value);
}
template <class T, class I> DEVICE auto taken_(const Array<T, 1>& x, I first)
{
    if constexpr (WHOLE) return Taken<T>{*(const Pack<T, 8>*)(x.p + first.v), (long long)first.v};
    else return x;
}
template <class T, class I> DEVICE auto given_(const Array<T, 1>& x, I first)
{
    if constexpr (WHOLE) return Given<T>(x.p, (long long)first.v);
    else return x;
}
// a place in an array of five axes; `here`: how many there are along the first, which are `step` apart
template <class T> struct Place {
    T* p;
    decltype(Size::v) at, step, here;
};
template <class T, class L, class D, class H, class W> DEVICE auto at_(const Array<T, 5>& x, L lead, D d, H h, W w)
{
    typedef decltype(Size::v) I;
    const I plane = x.shape[2].v * x.shape[3].v * x.shape[4].v;
    const I at = ((I)lead.v * x.shape[1].v + (I)d.v) * plane + ((I)h.v * x.shape[3].v + (I)w.v) * x.shape[4].v;
    return Place<T>{x.p, at, x.shape[1].v * plane, x.shape[0].v - (I)lead.v};
}
template <class T> struct Piece {
    T of[8];
    typedef T element;
};
template <class T> struct Filled : Piece<decltype(widen(T()))> {
    T* to;
    decltype(Size::v) step, here, block;
    template <class C, class B> __device__ __forceinline__ Filled(const Place<T>& x, C c, B n)
        : to(x.p + (x.at + (decltype(x.at))c.v)), step(x.step), here(x.here), block(n.v) {}
    Filled(const Filled&) = delete;
    __device__ __forceinline__ ~Filled()
    {
        if constexpr (WHOLE) {
            Pack<T, 8> all;
            for (int l = 0; l < 8; l++) all.of[l] = narrow<T>(this->of[l]);
            *(Pack<T, 8>*)to = all;
        } else
            for (int l = 0; l < 8; l++)
                if (l < block && l < here) to[l * step] = narrow<T>(this->of[l]);
    }
};
template <class T, class I> DEVICE auto at_(const Piece<T>& x, I i) { return load(x.of[i.v]); }
template <class T, class X, class I> DEVICE void put_(Piece<T>& x, X value, I i) { x.of[i.v] = stored<T>(value); }
template <class T, class C, class B> DEVICE auto taken_(const Place<T>& x, C c, B block)
{
    const T* p = x.p + (x.at + (decltype(x.at))c.v);
    Piece<Plain<T>> found = {};
    if constexpr (WHOLE) {
        const auto all = *(const Pack<Plain<T>, 8>*)p;
        for (int l = 0; l < 8; l++) found.of[l] = all.of[l];
    } else
        for (int l = 0; l < 8; l++)
            if (l < block.v && l < x.here) found.of[l] = p[l * x.step];
    return found;
}
template <class T, class C, class B> DEVICE auto given_(const Place<T>& x, C c, B block) { return Filled<T>(x, c, block); }
template <class C, class B> DEVICE Piece<float> taken_(Nothing, C, B) { return {}; }
template <class C, class B> DEVICE Nothing given_(Nothing x, C, B) { return x; }
// an item's own eight numbers
template <class T> struct Scratch { typedef T element; };
template <class T, class I> DEVICE Piece<T> at_(const Scratch<T>&, I) { return {}; }
// a lane's first number of a range
template <class A, class B, class S> DEVICE auto from_(Whole<A> a, Whole<B> b, S step)
{
    auto first = from_(a, b);
    first.v += (threadIdx.x % LANES) * step;
    return first;
}
#define ALONE (threadIdx.x % LANES == 0)
// the least of a type
template <class X> DEVICE auto lowest(const X&)
{
    typedef typename X::element T;
    if constexpr (same<T, float> || same<T, double>) return -infinity<T>();
    else return load(natural<T> ? T(0) : (T)(1ull << (8 * sizeof(T) - 1)));
}
template <class A, class B> DEVICE bool inside(A i, B n) { return (decltype(n.v))i.v < n.v; }
template <class X> DEVICE auto length(const X& x) { return x.shape[0]; }
template <class I> DEVICE Absent given_(const Absent& x, I) { return x; }

// -- several results of a function ------------------------------------------------------------------------------------

template <class A, class B, class C, class D> struct Many { A a; B b; C c; D d; };
template <class A, class B> DEVICE auto many(A a, B b) { return Many<A, B, Nothing, Nothing>{a, b}; }
template <class A, class B, class C> DEVICE auto many(A a, B b, C c) { return Many<A, B, C, Nothing>{a, b, c}; }
template <class A, class B, class C, class D> DEVICE auto many(A a, B b, C c, D d) { return Many<A, B, C, D>{a, b, c, d}; }
template <int I, class A, class B, class C, class D> DEVICE auto part_(const Many<A, B, C, D>& x)
{
    if constexpr (I == 0) return x.a;
    else if constexpr (I == 1) return x.b;
    else if constexpr (I == 2) return x.c;
    else return x.d;
}
template <int I, class X> DEVICE auto part_(const X& x) { return at_(x, Natural(I)); }

// -- numbers ----------------------------------------------------------------------------------------------------------

template <class V> DEVICE Natural abs_of(Whole<V> x) { return Natural((unsigned long long)(x.v < 0 ? -(long long)x.v : x.v)); }
DEVICE float abs_of(float x) { return fabsf(x); }
DEVICE double abs_of(double x) { return fabs(x); }
DEVICE float floored(float x) { return floorf(x); }
DEVICE double floored(double x) { return floor(x); }
DEVICE float ceiled(float x) { return ceilf(x); }
DEVICE double ceiled(double x) { return ceil(x); }
DEVICE float cos_of(float x) { return cosf(x); }
DEVICE double cos_of(double x) { return cos(x); }
DEVICE double sin_of(double x) { return sin(x); }

// -- sums over the threads of an item ---------------------------------------------------------------------------------

template <class T, class F> DEVICE T reduced_(T x, F f)
{
    static_assert(LANES >= 32, "parts of a warp reduce nothing");
    if constexpr (LANES == 32) return warp_reduce(x, f);
    else return block_reduce(x, f);
}
