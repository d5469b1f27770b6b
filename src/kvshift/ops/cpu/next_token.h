// The next token of generation in one layer: shift, RMSNorm (optional) and rotation, the state and the cache.
//
// A step rounds wherever the separate operations of PyTorch round: after the shift, after the norm's product with the
// inverse and with the gain, and after each product of the rotation. This gives the same bits.
//
// Included by kernel.cpp, whose letters and rules hold here too.

inline float widen(float x) { return x; }
inline float widen(_Float16 x) { return float(x); }
inline float widen(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    return read<float>(&bits);
}

template <class T>
inline T narrow(float x) {
    return T(x);
}
template <>
inline bfloat16 narrow<bfloat16>(float x) {
    const uint32_t bits = read<uint32_t>(&x), rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return {x == x ? uint16_t(rounded >> 16) : uint16_t(0x7fc0)};
}
template <class T>
inline float rounded(float x) {
    return widen(narrow<T>(x));
}

constexpr int64_t max_size = 1024;  // of a head

// The record of a layer, made once by next_token.py. What is missing is null.
template <class T>
struct NextToken {
    int64_t B, H, G, D, Dv, threads;
    int64_t q_batch, q_head, k_batch, k_head, v_batch, v_head;  // strides of the projections
    Rows<T> k_state, v_state;                                   // one row each: read, then overwritten with k and v
    Rows<T> keys, values;                                       // the cache
    int64_t room;                                               // number of its rows
    int64_t* length;           // number of rows in use, which is incremented; if null, the caller passes it
    const float *alpha, *beta;  // (G, 2)
    const T *q_scale, *k_scale;
    float eps;
};

// The rotary tables of a token: (1, D), or (B, D) with a stride between sequences.
template <class T>
struct Tables {
    const T *cos, *sin;
    int64_t stride;
};

// y = weights[0] x + weights[1] state. Where a coefficient is zero, nothing is read.
template <class T>
inline void shift_head(const T* x, const T* state, const float* weights, float* y, int64_t D) {
    const float a = weights ? weights[0] : 1, b = weights ? weights[1] : 0;
    if (!weights) for (int64_t d = 0; d < D; ++d) y[d] = widen(x[d]);
    else if (b == 0 && a == 0) for (int64_t d = 0; d < D; ++d) y[d] = 0;
    else if (b == 0) for (int64_t d = 0; d < D; ++d) y[d] = rounded<T>(widen(x[d]) * a);
    else if (a == 0) for (int64_t d = 0; d < D; ++d) y[d] = rounded<T>(__builtin_fmaf(widen(state[d]), b, 0.0f));
    else for (int64_t d = 0; d < D; ++d) y[d] = rounded<T>(__builtin_fmaf(widen(state[d]), b, widen(x[d]) * a));
}

// y = y / sqrt(mean(y^2) + eps) * scale. PyTorch sums in four groups of eight lanes, which are then added in order.
template <class T>
inline void norm_head(float* y, const T* scale, float eps, int64_t D) {
    constexpr int64_t lanes = 8, groups = 4;
    float sums[groups][lanes] = {}, total = 0;
    const int64_t vectors = D / lanes, whole = vectors / groups * groups;
    for (int64_t i = 0; i < vectors; ++i) {
        float* group = sums[i < whole ? i % groups : 0];
        for (int64_t l = 0; l < lanes; ++l) group[l] += y[i * lanes + l] * y[i * lanes + l];
    }
    for (int64_t g = 1; g < groups; ++g)
        for (int64_t l = 0; l < lanes; ++l) sums[0][l] += sums[g][l];
    for (int64_t d = vectors * lanes; d < D; ++d) total += y[d] * y[d];
    for (int64_t l = 0; l < lanes; ++l) total += sums[0][l];
    const float root = _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(total / float(D) + eps))), inverse = 1 / root;
    for (int64_t d = 0; d < D; ++d) y[d] = rounded<T>(widen(scale[d]) * rounded<T>(y[d] * inverse));
}

// out = y cos + (-y[D/2:], y[:D/2]) sin.
template <class T>
inline void rotate_head(const float* y, const T* cos, const T* sin, T* out, int64_t D) {
    const int64_t half = D / 2;
    const auto one = [&](int64_t d, float other) {
        out[d] = narrow<T>(rounded<T>(y[d] * widen(cos[d])) + rounded<T>(other * widen(sin[d])));
    };
    for (int64_t d = 0; d < half; ++d) one(d, -y[d + half]);
    for (int64_t d = half; d < D; ++d) one(d, y[d - half]);
}

// Writes q_out (B, H, 1, D), the state and row `at` of the cache. Returns `at`, or -1, having written nothing, if the
// cache has no such row.
template <class T>
int64_t next_token(
    const NextToken<T>& n, const Tables<T>& tables, const T* q, const T* k, const T* v, T* q_out, int64_t at
) {
    if (n.length) at = *n.length;
    if (at < 0 || at >= n.room) return -1;
#pragma omp parallel for num_threads(n.threads) if (n.threads > 1) schedule(static)
    for (int64_t i = 0; i < n.B * (n.H + n.G); ++i) {
        float y[max_size];
        const int64_t b = i / (n.H + n.G), head = i % (n.H + n.G), g = head - n.H;
        const T *cos = tables.cos + b * tables.stride, *sin = tables.sin + b * tables.stride;
        if (g < 0) {
            shift_head<T>(q + b * n.q_batch + head * n.q_head, nullptr, nullptr, y, n.D);
            if (n.q_scale) norm_head(y, n.q_scale, n.eps, n.D);
            rotate_head(y, cos, sin, q_out + (b * n.H + head) * n.D, n.D);
            continue;
        }
        const T *k_head = k + b * n.k_batch + g * n.k_head, *v_head = v + b * n.v_batch + g * n.v_head;
        T* k_state = n.k_state.at(b, 0) + g * n.k_state.head;
        T* v_state = n.v_state.at(b, 0) + g * n.v_state.head;
        shift_head(k_head, k_state, n.alpha ? n.alpha + 2 * g : nullptr, y, n.D);
        if (n.k_scale) norm_head(y, n.k_scale, n.eps, n.D);
        rotate_head(y, cos, sin, n.keys.at(b, at) + g * n.keys.head, n.D);
        shift_head(v_head, v_state, n.beta ? n.beta + 2 * g : nullptr, y, n.Dv);
        T* value = n.values.at(b, at) + g * n.values.head;
        for (int64_t d = 0; d < n.Dv; ++d) value[d] = narrow<T>(y[d]);
        if (n.k_state.data) {
            std::memcpy(k_state, k_head, n.D * sizeof(T));
            std::memcpy(v_state, v_head, n.Dv * sizeof(T));
        }
    }
    if (n.length) ++*n.length;
    return at;
}
