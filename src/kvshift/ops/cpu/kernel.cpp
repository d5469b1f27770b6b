// The operator on a CPU, forward and backward, in one pass over memory each.
//
// Letters: B batch, T positions, G heads, D head size, W window, Q rows of state per batch entry.
// Rows are numbered as in ops/boundaries.py: 0 .. T-1 are positions, -1 .. -Q are rows of the state from its end, and
// anything below is zero. Without a plan, lag j of position t reads row t - j. Strides are in elements; the elements of
// a head are contiguous.
//
// The interface is plain C, without Python or PyTorch, so that one binary works with every version of both. Products
// and sums are rounded in the same order as in torch_ops.py, which gives the same bits.

#include <immintrin.h>
#include <omp.h>

#include <cstdint>
#include <cstring>

namespace {

struct bfloat16 {
    uint16_t bits;
};

#ifdef __AVX512F__
constexpr int64_t vector_bytes = 64;
#else  // wider vectors than the machine has are emulated inefficiently
constexpr int64_t vector_bytes = 32;
#endif

template <class V>
inline V read(const void* x) {
    V value;
    std::memcpy(&value, x, sizeof value);
    return value;
}

typedef float Floats __attribute__((vector_size(vector_bytes)));
typedef double Doubles __attribute__((vector_size(vector_bytes)));

// x * y + z, rounded once, as PyTorch's addcmul does.
#ifdef __AVX512F__
inline Floats multiply_add(Floats x, Floats y, Floats z) { return (Floats)_mm512_fmadd_ps(x, y, z); }
inline Doubles multiply_add(Doubles x, Doubles y, Doubles z) { return (Doubles)_mm512_fmadd_pd(x, y, z); }
#else
inline Floats multiply_add(Floats x, Floats y, Floats z) { return (Floats)_mm256_fmadd_ps(x, y, z); }
inline Doubles multiply_add(Doubles x, Doubles y, Doubles z) { return (Doubles)_mm256_fmadd_pd(x, y, z); }
#endif

// Vectors of `size` elements: Packed as in memory, Wide as in the arithmetic.
template <class T>
struct Lanes {
    typedef T Wide __attribute__((vector_size(vector_bytes)));
    typedef Wide Packed;
    static constexpr int64_t size = vector_bytes / sizeof(T);
    static Wide spread(T a) { return a - Wide{}; }
    static Wide widen(Packed x) { return x; }
    static Packed narrow(Wide value) { return value; }
    static double sum(Wide value) {
        double total = 0;
        for (int64_t i = 0; i < size; ++i) total += value[i];
        return total;
    }
};

template <>
struct Lanes<_Float16> {
    typedef Floats Wide;
    typedef _Float16 Packed __attribute__((vector_size(vector_bytes / 2)));
    static constexpr int64_t size = vector_bytes / sizeof(float);
    static Wide spread(float a) { return a - Wide{}; }
    static Wide widen(Packed x) { return __builtin_convertvector(x, Wide); }
    static Packed narrow(Wide value) { return __builtin_convertvector(value, Packed); }
    static double sum(Wide value) { return Lanes<float>::sum(value); }
};

// Two neighbouring bfloat16 elements share a word. All arithmetic is elementwise or a sum over all elements, so even
// and odd elements can stay in separate vectors, which saves the permutations.
struct FloatPairs {
    Floats even, odd;
};
inline FloatPairs operator*(const FloatPairs& x, const FloatPairs& y) { return {x.even * y.even, x.odd * y.odd}; }
inline FloatPairs multiply_add(const FloatPairs& x, const FloatPairs& y, const FloatPairs& z) {
    return {multiply_add(x.even, y.even, z.even), multiply_add(x.odd, y.odd, z.odd)};
}

template <>
struct Lanes<bfloat16> {
    typedef FloatPairs Wide;
    typedef uint32_t Words __attribute__((vector_size(vector_bytes)));
    typedef Words Packed;
    static constexpr int64_t size = vector_bytes / sizeof(bfloat16);
    static Wide spread(float a) { return {a - Floats{}, a - Floats{}}; }
    static Wide widen(Packed x) { return {(Floats)(x << 16), (Floats)(x & 0xffff0000)}; }
    static Packed narrow(const Wide& value) { return (round(value.even) >> 16) | (round(value.odd) & 0xffff0000); }
    // Rounds to nearest, ties to even, in the upper half of each word. A NaN stays a NaN: it comes from a bfloat16 or
    // from a coefficient processed by `Row::weight`, so its lower half is zero and nothing is carried.
    static Words round(Floats value) {
        const Words bits = (Words)value;
        return bits + 0x7fff + ((bits >> 16) & 1);
    }
    static double sum(const Wide& value) { return Lanes<float>::sum(value.even) + Lanes<float>::sum(value.odd); }
};

// Writes past the cache, which saves reading the memory first. `y` must be aligned to the size of `value`.
template <class V>
inline void stream(void* y, V value) {
#ifdef __AVX512F__
    if constexpr (sizeof value == 64) _mm512_stream_si512((__m512i*)y, (__m512i)value);
#endif
    if constexpr (sizeof value == 32) _mm256_stream_si256((__m256i*)y, (__m256i)value);
    if constexpr (sizeof value == 16) _mm_stream_si128((__m128i*)y, (__m128i)value);
}

// The full vector of a head that begins at d.
template <class T, bool streams>
struct Whole {
    using L = Lanes<T>;
    int64_t d;
    auto load(const T* x) const { return L::widen(read<typename L::Packed>(x + d)); }
    void store(T* y, const typename L::Wide& value) const {
        const auto packed = L::narrow(value);
        if constexpr (streams) stream(y + d, packed);
        else std::memcpy(y + d, &packed, sizeof packed);
    }
};

// The rest of a head, shorter than a vector.
template <class T>
struct Rest {
    using L = Lanes<T>;
    int64_t d;
    size_t bytes;
    auto load(const T* x) const {
        typename L::Packed packed = {};
#ifdef __AVX512F__
        const __m512i filled = _mm512_maskz_loadu_epi8((1ull << bytes) - 1, x + d);
        std::memcpy(&packed, &filled, sizeof packed);
#else
        std::memcpy(&packed, x + d, bytes);
#endif
        return L::widen(packed);
    }
    void store(T* y, const typename L::Wide& value) const {
        const auto packed = L::narrow(value);
#ifdef __AVX512F__
        __m512i filled = {};
        std::memcpy(&filled, &packed, sizeof packed);
        _mm512_mask_storeu_epi8(y + d, (1ull << bytes) - 1, filled);
#else
        std::memcpy(y + d, &packed, bytes);
#endif
    }
};

// Calls `body` for every part of a head. Inlined and by reference, as copying its captures costs more than its work.
template <class T, bool streams, class Body>
[[gnu::always_inline]] inline void over_head(int64_t D, const Body& body) {
    constexpr int64_t size = Lanes<T>::size;
    int64_t d = 0;
    for (; d + size <= D; d += size) body(Whole<T, streams>{d});
    if (d < D) body(Rest<T>{d, (D - d) * sizeof(T)});
}

struct Shape {
    int64_t B, T, G, D, W, Q;
};

template <class T>
struct Rows {  // (B, rows, G, D), with the strides of the first three axes
    T* data;
    int64_t batch, row, head;
    T* at(int64_t b, int64_t r) const { return data + b * batch + r * row; }
};

// The arguments that kernel.py passes. `rows` are the sources of a plan in forward, and its readers in backward; null
// without a plan.
template <class T, class A>
struct Call {
    Shape n;
    int64_t threads;
    Rows<const T> x, state;
    const A* weights;  // (G, W)
    const int32_t* rows;
    T* y;
    // Forward only, and null except for a `Pool`: the row of the state, counted from the first, that each position of
    // x is written to; negative for none.
    const int32_t* kept;
    // Backward only. The gradient of the weights is summed over spans of rows, (spans, G, W); the size of scratch is
    // (threads, G, W, 128 bytes).
    Rows<const T> grad_y;
    T *grad_x, *grad_state;
    double* grad_weights;
    void* scratch;
    int64_t spans;
};

constexpr int64_t max_window = 16;
constexpr int64_t cache_line = 64, streamed_bytes = 1 << 21;  // smaller results stay in the cache

// One row of the output, (G, D): the sum of weight times term over the lags that have a term.
template <class T, class A, bool streams>
struct Row {
    using L = Lanes<T>;
    using Wide = typename L::Wide;

    int64_t count = 0;
    int64_t lags[max_window], heads[max_window];  // heads: strides of the heads
    const T* terms[max_window];

    void add(const T* term, int64_t head, int64_t lag) {
        lags[count] = lag;
        heads[count] = head;
        terms[count++] = term;
    }

    // Writes y. With `sums`, (G, W), also adds the products of x, (G, D), with every term to them.
    template <bool with_sums>
    void write(T* y, const A* weights_GW, const Shape& n, const T* x = nullptr, int64_t x_head = 0,
               Wide* sums_GW = nullptr) const {
        for (int64_t g = 0; g < n.G; ++g, y += n.D, x += x_head) {
            const A* weights = weights_GW + g * n.W;
            Wide* sums = with_sums ? sums_GW + g * n.W : nullptr;
            if (count == 2 && reads(weights, 0) && reads(weights, 1)) {
                const T *p = terms[0] + g * heads[0], *q = terms[1] + g * heads[1];
                const Wide a = weight(weights, 0), b = weight(weights, 1);
                Wide with_p = {}, with_q = {};
                if constexpr (with_sums) with_p = sums[lags[0]], with_q = sums[lags[1]];
                over_head<T, streams>(n.D, [&](auto at) {
                    const Wide first = at.load(p), second = at.load(q);
                    at.store(y, multiply_add(b, second, a * first));
                    if constexpr (with_sums) {
                        const Wide here = at.load(x);
                        with_p = multiply_add(first, here, with_p);
                        with_q = multiply_add(second, here, with_q);
                    }
                });
                if constexpr (with_sums) sums[lags[0]] = with_p, sums[lags[1]] = with_q;
            } else {
                over_head<T, streams>(n.D, [&](auto at) {
                    Wide total = {};
                    for (int64_t i = 0; i < count; ++i) {
                        if (!with_sums && !reads(weights, i)) continue;
                        const Wide a = weight(weights, i), p = at.load(terms[i] + g * heads[i]);
                        if (reads(weights, i)) total = i == 0 ? a * p : multiply_add(a, p, total);
                        if constexpr (with_sums) sums[lags[i]] = multiply_add(p, at.load(x), sums[lags[i]]);
                    }
                    at.store(y, total);
                });
            }
        }
    }

  private:
    // True if the coefficient is not zero. If it is, not even an infinity or the sign of a zero is taken from the term.
    bool reads(const A* weights, int64_t i) const { return weights[lags[i]] != 0; }

    // The coefficient in every lane. A NaN is replaced by the one whose lower half is zero (see `round`).
    Wide weight(const A* weights, int64_t i) const {
        const A a = weights[lags[i]];
        return L::spread(a == a ? a : A(__builtin_nan("")));
    }
};

// True if a result like x should bypass the cache: if it is large and its heads are aligned to cache lines.
template <class T>
inline bool should_stream(const Shape& n, const T* y) {
    return n.B * n.T * n.G * n.D * int64_t(sizeof(T)) >= streamed_bytes && n.D * sizeof(T) % cache_line == 0 &&
           reinterpret_cast<uintptr_t>(y) % cache_line == 0;
}

template <class T, class A, bool streams>
void forward(const Call<T, A>& call) {
    const Shape& n = call.n;
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
    {
#pragma omp for schedule(static) nowait
        for (int64_t bt = 0; bt < n.B * n.T; ++bt) {
            const int64_t b = bt / n.T, t = bt % n.T;
            Row<T, A, streams> row;
            for (int64_t j = 0; j < n.W; ++j) {
                const int64_t r = call.rows ? call.rows[bt * n.W + j] : t - j;
                if (r >= 0) row.add(call.x.at(b, r), call.x.head, j);
                else if (r >= -n.Q) row.add(call.state.at(b, n.Q + r), call.state.head, j);
            }
            row.template write<false>(call.y + bt * n.G * n.D, call.weights, n);
        }
        if constexpr (streams) _mm_sfence();
    }
}

// Writes positions of x into the state. Must follow `forward`, which reads the previous contents.
template <class T, class A>
void keep(const Call<T, A>& call) {
    const Shape& n = call.n;
    for (int64_t bt = 0; bt < n.B * n.T; ++bt) {
        if (call.kept[bt] < 0) continue;
        const T* from = call.x.at(bt / n.T, bt % n.T);
        T* to = const_cast<T*>(call.state.at(bt / n.T, call.kept[bt]));
        for (int64_t g = 0; g < n.G; ++g) {
            std::memcpy(to + g * call.state.head, from + g * call.x.head, n.D * sizeof(T));
        }
    }
}

// Every row of the state and of x gathers the gradients of the positions that read it. The same pass computes the
// gradient of the coefficients for each span; the caller adds these. The bits do not depend on the number of threads.
template <class T, class A, bool streams>
void backward(const Call<T, A>& call) {
    using L = Lanes<T>;
    const Shape& n = call.n;
    const int64_t rows = n.B * (n.Q + n.T), coefficients = n.G * n.W, size = n.G * n.D;
    const int64_t span = (rows + call.spans - 1) / call.spans;
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
    {
        auto* sums = static_cast<typename L::Wide*>(call.scratch) + omp_get_thread_num() * coefficients;
#pragma omp for schedule(static) nowait
        for (int64_t s = 0; s < call.spans; ++s) {
            std::memset(sums, 0, coefficients * sizeof *sums);
            const int64_t end = rows < (s + 1) * span ? rows : (s + 1) * span;
            for (int64_t br = s * span; br < end; ++br) {
                const int64_t b = br / (n.Q + n.T), r = br % (n.Q + n.T), t = r - n.Q;
                Row<T, A, streams> row;
                for (int64_t j = 0; j < n.W; ++j) {
                    const int64_t reader = call.rows ? call.rows[br * n.W + j] : t + j;
                    if (reader >= 0 && reader < n.T) row.add(call.grad_y.at(b, reader), call.grad_y.head, j);
                }
                const Rows<const T>& read = t < 0 ? call.state : call.x;
                T* grad = t < 0 ? call.grad_state + (b * n.Q + r) * size : call.grad_x + (b * n.T + t) * size;
                row.template write<true>(grad, call.weights, n, read.at(b, t < 0 ? r : t), read.head, sums);
            }
            for (int64_t c = 0; c < coefficients; ++c) call.grad_weights[s * coefficients + c] = L::sum(sums[c]);
        }
        if constexpr (streams) _mm_sfence();
    }
}

#include "next_token.h"

}  // namespace

#ifndef KVSHIFT_SOURCES  // compiled by hand
#define KVSHIFT_SOURCES 0
#endif
extern "C" const uint32_t kvshift_sources = KVSHIFT_SOURCES;  // checksum of these files, from hatch_build.py

#define KVSHIFT_KERNELS(NAME, T, A)                                                                                  \
    extern "C" void kvshift_forward_##NAME(const Call<T, A>& call) {                                                 \
        (should_stream(call.n, call.y) ? forward<T, A, true> : forward<T, A, false>)(call);                          \
        if (call.kept) keep(call);                                                                                   \
    }                                                                                                                \
    extern "C" void kvshift_backward_##NAME(const Call<T, A>& call) {                                                \
        const bool streams = should_stream(call.n, call.grad_x) && should_stream(call.n, call.grad_state);           \
        (streams ? backward<T, A, true> : backward<T, A, false>)(call);                                              \
    }

KVSHIFT_KERNELS(float32, float, float)
KVSHIFT_KERNELS(float64, double, double)
KVSHIFT_KERNELS(bfloat16, bfloat16, float)
KVSHIFT_KERNELS(float16, _Float16, float)

#define KVSHIFT_NEXT_TOKEN(NAME, T)                                                                                  \
    extern "C" int64_t kvshift_next_token_##NAME(                                                                    \
        const NextToken<T>& layer, const Tables<T>& tables, const T* q, const T* k, const T* v, T* q_out, int64_t at \
    ) {                                                                                                              \
        return next_token(layer, tables, q, k, v, q_out, at);                                                        \
    }

KVSHIFT_NEXT_TOKEN(float32, float)
KVSHIFT_NEXT_TOKEN(bfloat16, bfloat16)
KVSHIFT_NEXT_TOKEN(float16, _Float16)
