/* Work of a decoder layer in bfloat16 on CPUs beside its large products: elementwise, one pass over memory each, attention, and the products with
an adapter's rank. Built and called by kernels.py.

Letters: T tokens, E width of a row, H query heads, K key-value heads, G = H / K, D head size, V vocabulary.
Sums and functions are computed in float32; results are rounded to nearest even, as torch rounds. NaN stays NaN: a run ends by it. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

#define PRAGMA(words) _Pragma(#words)
#define PARALLEL(condition) PRAGMA(omp parallel for schedule(static) if (condition))
#define MANY 16384 /* elements below which threads cost more than they give */

static inline float widen(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

/* A NaN of arithmetic, or of a widened bfloat16, ends in 16 zero bits and so stays NaN. */
static inline bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* e^x to 2 ulp of float32 for -87 <= x <= 88, clamped outside. */
static inline float exponential(float x) {
    x = -87.0f > x ? -87.0f : x;
    x = 88.0f < x ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693145752f;
    r -= n * 1.42860677e-6f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* ---- RMSNorm (arXiv:1910.07467): y = weight * (x * rstd), with the product in brackets rounded, as transformers rounds it */

void norm_forward(const bf16 *x, const bf16 *weight, float eps, int64_t rows, int64_t width, bf16 *y, float *rstd) {
    PARALLEL(rows * width > MANY)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *from = x + row * width;
        bf16 *to = y + row * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += widen(from[i]) * widen(from[i]);
        float factor = 1.0f / sqrtf(sum / (float)width + eps);
        rstd[row] = factor;
#pragma omp simd
        for (int64_t i = 0; i < width; i++)
            to[i] = narrow(widen(weight[i]) * widen(narrow(widen(from[i]) * factor)));
    }
}

void norm_backward(const bf16 *grad, const bf16 *x, const bf16 *weight, const float *rstd, int64_t rows, int64_t width, bf16 *d_x) {
    PARALLEL(rows * width > MANY)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *g = grad + row * width, *from = x + row * width;
        bf16 *to = d_x + row * width;
        float factor = rstd[row], sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += widen(g[i]) * widen(weight[i]) * widen(from[i]);
        float share = sum * factor * factor / (float)width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++)
            to[i] = narrow(factor * (widen(g[i]) * widen(weight[i]) - widen(from[i]) * share));
    }
}

/* The same for float32 values and weights, whose result is rounded once, as under autocast. */
void wide_norm_forward(const float *x, const float *weight, float eps, int64_t rows, int64_t width, bf16 *y, float *rstd) {
    PARALLEL(rows * width > MANY)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * width;
        bf16 *to = y + row * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += from[i] * from[i];
        float factor = 1.0f / sqrtf(sum / (float)width + eps);
        rstd[row] = factor;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = narrow(weight[i] * (from[i] * factor));
    }
}

/* The gradients of x and of the weight; a column's sum runs over the rows in order, for any number of threads. */
void wide_norm_backward(const bf16 *grad, const float *x, const float *weight, const float *rstd, int64_t rows, int64_t width, float *d_x,
                        float *d_weight) {
    PARALLEL(rows * width > MANY)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *g = grad + row * width;
        const float *from = x + row * width;
        float *to = d_x + row * width;
        float factor = rstd[row], sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += widen(g[i]) * weight[i] * from[i];
        float share = sum * factor * factor / (float)width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = factor * (widen(g[i]) * weight[i] - from[i] * share);
    }
    memset(d_weight, 0, width * sizeof(float));
    PARALLEL(rows * width > MANY)
    for (int64_t begin = 0; begin < width; begin += 64) {
        int64_t end = begin + 64 < width ? begin + 64 : width;
        for (int64_t row = 0; row < rows; row++) {
            const bf16 *g = grad + row * width;
            const float *from = x + row * width;
            float factor = rstd[row];
#pragma omp simd
            for (int64_t i = begin; i < end; i++) d_weight[i] += widen(g[i]) * (from[i] * factor);
        }
    }
}

/* ---- SwiGLU (arXiv:2002.05202): silu(gate) * up. Rows of gate and up are `stride` elements apart. */

#ifdef __AVX512BF16__
/* Both give the number of elements that they have computed, a multiple of 32; the others are left to the caller. */
static int64_t gate_vectors(const bf16 *g, const bf16 *u, int64_t width, bf16 *to);
static int64_t gate_vectors_back(const bf16 *d, const bf16 *g, const bf16 *u, int64_t width, bf16 *to_gate, bf16 *to_up, bf16 *to);
#else
#define gate_vectors(...) 0
#define gate_vectors_back(...) 0
#endif

void gate_forward(const bf16 *gate, const bf16 *up, int64_t stride, int64_t rows, int64_t width, bf16 *out) {
    PARALLEL(rows * width > MANY)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *g = gate + row * stride, *u = up + row * stride;
        bf16 *to = out + row * width;
#pragma omp simd
        for (int64_t i = gate_vectors(g, u, width, to); i < width; i++) {
            float value = widen(g[i]);
            to[i] = narrow(widen(narrow(value * sigmoid(value))) * widen(u[i]));
        }
    }
}

/* Gives the forward's output once more, so that it need not be kept. */
void gate_backward(const bf16 *grad, const bf16 *gate, const bf16 *up, int64_t stride, int64_t rows, int64_t width, bf16 *d_gate,
                   bf16 *d_up, int64_t d_stride, bf16 *out) {
    PARALLEL(rows * width > MANY)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *d = grad + row * width, *g = gate + row * stride, *u = up + row * stride;
        bf16 *to_gate = d_gate + row * d_stride, *to_up = d_up + row * d_stride, *to = out + row * width;
#pragma omp simd
        for (int64_t i = gate_vectors_back(d, g, u, width, to_gate, to_up, to); i < width; i++) {
            float value = widen(g[i]), s = sigmoid(value), above = widen(u[i]), given = widen(d[i]);
            float activated = widen(narrow(value * s));
            to[i] = narrow(activated * above);
            to_up[i] = narrow(given * activated);
            to_gate[i] = narrow(given * above * s * (1.0f + value * (1.0f - s)));
        }
    }
}

/* ---- int8 weights: each row times its scale */

void dequantize(const int8_t *packed, const float *scale, int64_t rows, int64_t width, bf16 *out) {
    PARALLEL(rows * width > MANY)
    for (int64_t row = 0; row < rows; row++) {
        const int8_t *from = packed + row * width;
        bf16 *to = out + row * width;
        float factor = scale[row];
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = narrow((float)from[i] * factor);
    }
}

/* ---- GPTQ and AWQ: codes of 2, 4 or 8 bits, the first in the lowest of a byte, less the zero point of their group, times its scale */

static void dequantize_group(const uint8_t *codes, float scale, float zero, int64_t size, int64_t bits, bf16 *to) {
    if (bits == 4) {
#pragma omp simd
        for (int64_t i = 0; i < size / 2; i++) {
            to[2 * i] = narrow(((float)(codes[i] & 15) - zero) * scale);
            to[2 * i + 1] = narrow(((float)(codes[i] >> 4) - zero) * scale);
        }
    } else if (bits == 8) {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = narrow(((float)codes[i] - zero) * scale);
    } else {
        for (int64_t i = 0; i < size; i++) {
            int code = codes[i * bits >> 3] >> (i * bits & 7) & ((1 << bits) - 1);
            to[i] = narrow(((float)code - zero) * scale);
        }
    }
}

/* places, or NULL: where among the codes of a row each input is */
void dequantize_groups(const uint8_t *packed, const float *scales, const uint8_t *zeros, const int64_t *places, int64_t rows,
                       int64_t width, int64_t groups, int64_t bits, bf16 *out) {
    int64_t size = width / groups;
    PARALLEL(rows * width > MANY)
    for (int64_t row = 0; row < rows; row++) {
        bf16 in_order[places ? width : 1], *to = out + row * width, *values = places ? in_order : to;
        for (int64_t g = 0; g < groups; g++) {
            int64_t at = row * groups + g;
            const uint8_t *codes = packed + at * size * bits / 8;
            dequantize_group(codes, scales[at], (float)zeros[at], size, bits, values + g * size);
        }
        for (int64_t i = 0; places && i < width; i++) to[i] = in_order[places[i]];
    }
}

/* ---- attention. Packed layout: the rows of a group have L places each, and a row is (K, L, G, D), or (K, L, D) of keys and values.
The key-value head k of token t is at place start[t] + k * length[t]. Pads are left as they are. */

static inline void rotate(const bf16 *from, const float *cosine, const float *sine, float scale, float sign, int64_t size, bf16 *to) {
    int64_t half = size / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = widen(from[i]), b = widen(from[i + half]);
        to[i] = narrow(scale * (a * cosine[i] - sign * b * sine[sign > 0 ? i : i + half]));
        to[i + half] = narrow(scale * (b * cosine[i + half] + sign * a * sine[sign > 0 ? i + half : i]));
    }
}

/* Rotates (RoPE) and scales queries, rotates keys, and packs them with the values. */
void pack(const bf16 *q, const bf16 *k, const bf16 *v, int64_t q_stride, int64_t k_stride, int64_t v_stride, const float *cosine,
          const float *sine, float scale, const int64_t *start, const int64_t *length, int64_t tokens, int64_t heads, int64_t kv,
          int64_t size, bf16 *queries, bf16 *keys, bf16 *values) {
    int64_t group = heads / kv;
    PARALLEL(tokens * heads * size > MANY)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t head = 0; head < kv; head++) {
            int64_t place = start[t] + head * length[t];
            for (int64_t g = 0; g < group; g++)
                rotate(q + t * q_stride + (head * group + g) * size, cosine + t * size, sine + t * size, scale, 1.0f, size,
                       queries + (place * group + g) * size);
            rotate(k + t * k_stride + head * size, cosine + t * size, sine + t * size, 1.0f, 1.0f, size, keys + place * size);
            memcpy(values + place * size, v + t * v_stride + head * size, size * sizeof(bf16));
        }
}

/* The gradients of q, k and v from those of what was packed. */
void unpack(const bf16 *d_queries, const bf16 *d_keys, const bf16 *d_values, const float *cosine, const float *sine, float scale,
            const int64_t *start, const int64_t *length, int64_t tokens, int64_t heads, int64_t kv, int64_t size, bf16 *d_q, bf16 *d_k,
            bf16 *d_v, int64_t stride) {
    int64_t group = heads / kv;
    PARALLEL(tokens * heads * size > MANY)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t head = 0; head < kv; head++) {
            int64_t place = start[t] + head * length[t];
            for (int64_t g = 0; g < group; g++)
                rotate(d_queries + (place * group + g) * size, cosine + t * size, sine + t * size, scale, -1.0f, size,
                       d_q + t * stride + (head * group + g) * size);
            rotate(d_keys + place * size, cosine + t * size, sine + t * size, 1.0f, -1.0f, size, d_k + t * stride + head * size);
            memcpy(d_v + t * stride + head * size, d_values + place * size, size * sizeof(bf16));
        }
}

/* (T, H, D) to the layout of queries, or back. */
void pack_heads(bf16 *flat, bf16 *packed, const int64_t *start, const int64_t *length, int64_t tokens, int64_t heads, int64_t kv,
                int64_t size, int64_t back) {
    int64_t group = heads / kv;
    PARALLEL(tokens * heads * size > MANY)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t head = 0; head < kv; head++) {
            bf16 *one = flat + (t * heads + head * group) * size;
            bf16 *other = packed + (start[t] + head * length[t]) * group * size;
            memcpy(back ? one : other, back ? other : one, group * size * sizeof(bf16));
        }
}

/* The keys low <= key < high of a query: row i is that of query first + i / G, and key 0 is the first of the block. */
static inline void range(int64_t i, int64_t first, int64_t group, int64_t window, int64_t columns, int64_t *low, int64_t *high) {
    int64_t query = first + i / group;
    *high = query + 1 < columns ? query + 1 : columns;
    *low = window > 0 && query + 1 > window ? query + 1 - window : 0;
}

/* Softmax of scores (batch, rows, columns) in place; 0 for keys that a query may not attend to. */
void softmax(bf16 *scores, int64_t batch, int64_t rows, int64_t columns, int64_t first, int64_t group, int64_t window) {
    PARALLEL(batch * rows * columns > MANY)
    for (int64_t line = 0; line < batch * rows; line++) {
        bf16 *p = scores + line * columns;
        int64_t low, high;
        range(line % rows, first, group, window, columns, &low, &high);
        float top = -INFINITY, sum = 0.0f, above[columns];
#pragma omp simd reduction(max : top)
        for (int64_t i = low; i < high; i++) top = widen(p[i]) > top ? widen(p[i]) : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = low; i < high; i++) sum += above[i] = exponential(widen(p[i]) - top);
        float factor = 1.0f / sum;
#pragma omp simd
        for (int64_t i = low; i < high; i++) p[i] = narrow(above[i] * factor);
        memset(p, 0, low * sizeof(bf16));
        memset(p + high, 0, (columns - high) * sizeof(bf16));
    }
}

/* The gradient of the scores, in the memory of that of the probabilities p. */
void softmax_backward(bf16 *grad, const bf16 *p, int64_t batch, int64_t rows, int64_t columns, int64_t first, int64_t group,
                      int64_t window) {
    PARALLEL(batch * rows * columns > MANY)
    for (int64_t line = 0; line < batch * rows; line++) {
        bf16 *d = grad + line * columns;
        const bf16 *q = p + line * columns;
        int64_t low, high;
        range(line % rows, first, group, window, columns, &low, &high);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = low; i < high; i++) sum += widen(d[i]) * widen(q[i]);
#pragma omp simd
        for (int64_t i = low; i < high; i++) d[i] = narrow(widen(q[i]) * (widen(d[i]) - sum));
        memset(d, 0, low * sizeof(bf16));
        memset(d + high, 0, (columns - high) * sizeof(bf16));
    }
}

/* ---- cross entropy: the losses of logits (rows, V), and in their memory the gradient of their sum times `factor`, unless that is 0 */

void cross_entropy(bf16 *logits, const int64_t *labels, int64_t rows, int64_t width, float factor, float *losses) {
    PARALLEL(rows * width > MANY)
    for (int64_t row = 0; row < rows; row++) {
        bf16 *l = logits + row * width;
        float top = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < width; i++) top = widen(l[i]) > top ? widen(l[i]) : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += exponential(widen(l[i]) - top);
        float picked = widen(l[labels[row]]);
        losses[row] = logf(sum) + top - picked;
        if (factor == 0.0f) continue;
        float scale = factor / sum;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) l[i] = narrow(exponential(widen(l[i]) - top) * scale);
        l[labels[row]] = narrow((exponential(picked - top) / sum - 1.0f) * factor);
    }
}

/* ---- AdamW (arXiv:1711.05101) of float32 values with moments m and v in bfloat16, which are rounded up or down at random: noise is added
below their last bit. It is a hash of the element's index and `seed`, see `train.optim`. */

static inline uint32_t hash(uint32_t x) {
    x = (x ^ x >> 16) * 0x85ebca6b;
    x = (x ^ x >> 13) * 0xc2b2ae35;
    return x ^ x >> 16;
}

static inline bf16 narrow_at_random(float value, uint32_t noise) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bf16)((bits + noise) >> 16);
}

void adamw(float *values, const float *grad, bf16 *m, bf16 *v, int64_t count, float decay, float share1, float share2, float step_size,
           float scale, float eps, int64_t seed) {
    PARALLEL(count > MANY)
    for (int64_t begin = 0; begin < count; begin += MANY) {
        int64_t end = begin + MANY < count ? begin + MANY : count;
#pragma omp simd
        for (int64_t i = begin; i < end; i++) {
            float g = grad[i], first = widen(m[i]), second = widen(v[i]);
            first += (g - first) * share1;
            second += (g * g - second) * share2;
            uint32_t noise = hash((uint32_t)i ^ (uint32_t)seed);
            m[i] = narrow_at_random(first, noise & 0xffff);
            v[i] = narrow_at_random(second, noise >> 16);
            values[i] = values[i] * decay - step_size * (first / (sqrtf(second) / scale + eps));
        }
    }
}

/* ---- causal attention as one function, for processors that multiply bfloat16 in vectors of 512 bits. Others compute it with torch's
products and the functions above. Blocks of queries and keys stay in the cache (arXiv:2205.14135). The G queries of a key-value head and a
token are G lines. Scores are held transposed, keys by lines, so that sums over keys need no shuffles. */

#ifdef __AVX512BF16__
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>

#define LINES 64 /* in a block */
#define KEYS 128 /* in a block */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* Memory for one call. Without it the process ends, with words by which the cause is recognized: no thread can give an error back. */
static void *reserve(int64_t bytes) {
    void *found = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (found != NULL) return found;
    fprintf(stderr, "unisono, kernels.c: [Errno 12] Cannot allocate memory: %lld bytes\n", (long long)bytes);
    abort();
}

typedef uint32_t __attribute__((may_alias)) pair; /* two bfloat16 that are multiplied and added up in one step */

typedef struct {
    const bf16 *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    const float *cosine, *sine;
    float scale;
    const int64_t *begins;
    int64_t rows, heads, kv, size, window;
} Attention;

INLINE void product_tile(const pair *a, int64_t a_row, const pair *b, int64_t b_row, float *c, int64_t c_row, int64_t steps, int adds,
                         const int rows, const int vectors) {
    __m512 sum[8][4];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = adds ? _mm512_loadu_ps(c + i * c_row + 16 * j) : _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; step++) {
        __m512bh right[4];
        UNROLL for (int j = 0; j < vectors; j++) right[j] = (__m512bh)_mm512_loadu_si512(b + step * b_row + 16 * j);
        UNROLL for (int i = 0; i < rows; i++) {
            __m512bh left = (__m512bh)_mm512_set1_epi32(a[i * a_row + step]);
            UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], left, right[j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j++) _mm512_storeu_ps(c + i * c_row + 16 * j, sum[i][j]);
}

/* c (rows, columns) = a (rows, steps) b (steps, columns), or adds it; rows are a multiple of 8, columns of 16. */
static void product(const pair *a, int64_t a_row, const pair *b, int64_t b_row, float *c, int64_t c_row, int64_t rows, int64_t columns,
                    int64_t steps, int adds) {
#define TILES(height, vectors) \
    for (int64_t i = 0; i < rows; i += height) \
    product_tile(a + i * a_row, a_row, b + j, b_row, c + i * c_row + j, c_row, steps, adds, height, vectors)
    for (int64_t j = 0; j < columns; j += 64) switch (columns - j) {
            case 16: TILES(8, 1); break;
            case 32: TILES(8, 2); break;
            case 48: TILES(8, 3); break;
            default: TILES(4, 4);
        }
}

/* 16 by 16. */
static void transpose(const void *from, int64_t from_row, void *to, int64_t to_row) {
    __m512i r[16], m[16];
    UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512((const int32_t *)from + i * from_row);
    UNROLL for (int i = 0; i < 16; i += 4) {
        __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
        m[i] = _mm512_unpacklo_epi64(a, c), m[i + 1] = _mm512_unpackhi_epi64(a, c);
        m[i + 2] = _mm512_unpacklo_epi64(b, d), m[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(m[i], m[i + 4], 0x88), b = _mm512_shuffle_i32x4(m[i], m[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(m[i + 8], m[i + 12], 0x88), d = _mm512_shuffle_i32x4(m[i + 8], m[i + 12], 0xdd);
        int32_t *column = (int32_t *)to + i * to_row;
        _mm512_storeu_si512(column, _mm512_shuffle_i32x4(a, c, 0x88));
        _mm512_storeu_si512(column + 4 * to_row, _mm512_shuffle_i32x4(b, d, 0x88));
        _mm512_storeu_si512(column + 8 * to_row, _mm512_shuffle_i32x4(a, c, 0xdd));
        _mm512_storeu_si512(column + 12 * to_row, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
}

/* (rows, size / 2) pairs to (size / 2, rows); rows are a multiple of 16. */
static void transpose_pairs(const bf16 *from, int64_t rows, int64_t size, pair *to, int64_t to_row) {
    for (int64_t i = 0; i < rows; i += 16)
        for (int64_t j = 0; j < size / 2; j += 16) transpose(from + i * size + 2 * j, size / 2, to + j * to_row + i, to_row);
}

/* (rows, size) to (rows / 2, size) pairs of two rows each. */
static void interleave(const bf16 *from, int64_t from_row, int64_t rows, int64_t size, pair *to, int64_t to_row) {
    for (int64_t i = 0; i < rows; i += 2)
        for (int64_t j = 0; j < size; j += 16) {
            const bf16 *place = from + i * from_row + j;
            __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)place));
            __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(place + from_row)));
            _mm512_storeu_si512(to + i / 2 * to_row + j, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
}

/* (rows, size) to (size, rows / 2) pairs of two rows each; rows are a multiple of 32. */
static void interleave_transposed(const bf16 *from, int64_t rows, int64_t size, pair *to) {
    pair block[16 * 16];
    for (int64_t i = 0; i < rows; i += 32)
        for (int64_t j = 0; j < size; j += 16) {
            interleave(from + i * size + j, size, 32, 16, block, 16);
            transpose(block, 16, to + j * (rows / 2) + i / 2, rows / 2);
        }
}

/* e^x for x <= 0, to 3e-6 of it; e^-100 below. */
INLINE __m512 vector_exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-100.0f), x); /* NaN stays NaN in this order */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147181f), x);
    __m512 p = _mm512_set1_ps(8.33333333e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.16666667e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.66666667e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* 16 bfloat16 of a, then 16 of b. */
INLINE __m512i narrow_two(__m512 a, __m512 b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }

/* For permutations: elements from `first` on, each with the one that is `distance` further on. */
INLINE __m512i pair_places(int first, int distance) {
    const __m512i lanes = _mm512_set_epi32(0xf000f, 0xe000e, 0xd000d, 0xc000c, 0xb000b, 0xa000a, 0x90009, 0x80008, 0x70007, 0x60006, 0x50005,
                                           0x40004, 0x30003, 0x20002, 0x10001, 0);
    return _mm512_add_epi32(lanes, _mm512_set1_epi32(first | (first + distance) << 16));
}

/* The same as pairs of an element of a and one of b. */
INLINE __m512i paired(__m512i two) { return _mm512_permutexvar_epi16(pair_places(0, 16), two); }

/* Whether each line of a vector may attend to a key. */
INLINE __mmask16 allowed(int64_t key, __m512i query, int64_t window) {
    __m512i place = _mm512_set1_epi32((int32_t)key);
    __mmask16 found = _mm512_cmple_epi32_mask(place, query);
    return window ? _mm512_mask_cmplt_epi32_mask(found, _mm512_sub_epi32(query, _mm512_set1_epi32((int32_t)window)), place) : found;
}

INLINE __m512 widen_16(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE void store_16(bf16 *to, __m512 values) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values)); }

/* 1 / (1 + e^-x) */
INLINE __m512 vector_sigmoid(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_sub_ps(_mm512_setzero_ps(), x);
    __m512 below = _mm512_add_ps(one, vector_exponential(_mm512_min_ps(_mm512_set1_ps(88.0f), minus)));
    __m512 found = _mm512_rcp14_ps(below); /* and one step of Newton's method */
    return _mm512_fmadd_ps(found, _mm512_fnmadd_ps(below, found, one), found);
}

/* 16 values rounded to bfloat16. */
INLINE __m512 rounded(__m512 values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)), 16));
}

static int64_t gate_vectors(const bf16 *g, const bf16 *u, int64_t width, bf16 *to) {
    int64_t i = 0;
    for (; i + 32 <= width; i += 32) {
        __m512 found[2];
        UNROLL for (int n = 0; n < 2; n++) {
            __m512 value = widen_16(g + i + 16 * n);
            found[n] = _mm512_mul_ps(rounded(_mm512_mul_ps(value, vector_sigmoid(value))), widen_16(u + i + 16 * n));
        }
        _mm512_storeu_si512(to + i, narrow_two(found[0], found[1]));
    }
    return i;
}

static int64_t gate_vectors_back(const bf16 *d, const bf16 *g, const bf16 *u, int64_t width, bf16 *to_gate, bf16 *to_up, bf16 *to) {
    int64_t i = 0;
    for (; i + 32 <= width; i += 32) {
        __m512 out[2], of_up[2], of_gate[2];
        UNROLL for (int n = 0; n < 2; n++) {
            int64_t place = i + 16 * n;
            __m512 value = widen_16(g + place), above = widen_16(u + place), given = widen_16(d + place), s = vector_sigmoid(value);
            __m512 activated = rounded(_mm512_mul_ps(value, s));
            /* s (1 + x (1 - s)) */
            __m512 slope = _mm512_fmadd_ps(_mm512_mul_ps(value, s), _mm512_sub_ps(_mm512_set1_ps(1.0f), s), s);
            out[n] = _mm512_mul_ps(activated, above), of_up[n] = _mm512_mul_ps(given, activated);
            of_gate[n] = _mm512_mul_ps(_mm512_mul_ps(given, above), slope);
        }
        _mm512_storeu_si512(to + i, narrow_two(out[0], out[1]));
        _mm512_storeu_si512(to_up + i, narrow_two(of_up[0], of_up[1]));
        _mm512_storeu_si512(to_gate + i, narrow_two(of_gate[0], of_gate[1]));
    }
    return i;
}

/* A head of a token, rotated and scaled. */
INLINE void rotate_head(const Attention *of, const bf16 *from, int64_t token, float scale, bf16 *to) {
    int64_t half = of->size / 2;
    __m512 factor = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < half; i += 16) {
        const float *cosine = of->cosine + token * of->size + i, *sine = of->sine + token * of->size + i;
        __m512 a = _mm512_mul_ps(widen_16(from + i), factor), b = _mm512_mul_ps(widen_16(from + half + i), factor);
        store_16(to + i, _mm512_fnmadd_ps(b, _mm512_loadu_ps(sine), _mm512_mul_ps(a, _mm512_loadu_ps(cosine))));
        store_16(to + half + i, _mm512_fmadd_ps(a, _mm512_loadu_ps(sine + half), _mm512_mul_ps(b, _mm512_loadu_ps(cosine + half))));
    }
}

/* The gradient of what was rotated and scaled, from that of the result. */
INLINE void rotate_back(const Attention *of, const float *from, int64_t token, float scale, bf16 *to) {
    int64_t half = of->size / 2;
    __m512 factor = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < half; i += 16) {
        const float *cosine = of->cosine + token * of->size + i, *sine = of->sine + token * of->size + i;
        __m512 a = _mm512_mul_ps(_mm512_loadu_ps(from + i), factor), b = _mm512_mul_ps(_mm512_loadu_ps(from + half + i), factor);
        store_16(to + i, _mm512_fmadd_ps(b, _mm512_loadu_ps(sine + half), _mm512_mul_ps(a, _mm512_loadu_ps(cosine))));
        store_16(to + half + i, _mm512_fnmadd_ps(a, _mm512_loadu_ps(sine), _mm512_mul_ps(b, _mm512_loadu_ps(cosine + half))));
    }
}

/* What one thread computes with; the longest row decides. */
typedef struct {
    bf16 *k, *v, *lines, *d_lines, *p, *d_s; /* (keys, D) twice, (LINES, D) twice, (KEYS, LINES) twice */
    pair *flipped, *lines_t, *d_lines_t, *lines_i, *d_lines_i, *paired; /* (D, keys / 2), (D / 2, LINES) twice, (LINES / 2, D) twice, (KEYS / 2, LINES) */
    float *s, *d_p, *out, *d_k, *d_v; /* (KEYS, LINES) twice, (D, LINES), (keys, D) twice */
    int32_t query[LINES];
    float top[LINES], share[LINES], delta[LINES];
} Space;

static void *part(char **memory, int64_t bytes) {
    void *found = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return found;
}

static Space *make_space(const Attention *of, int backward) {
    int64_t longest = 0, size = of->size;
    for (int64_t row = 0; row < of->rows; row++) {
        int64_t length = of->begins[row + 1] - of->begins[row];
        longest = length > longest ? length : longest;
    }
    int64_t keys = (longest + 31) / 32 * 32, squares = KEYS * LINES, lines = LINES * size;
    int64_t bytes = (int64_t)sizeof(Space) + keys * size * (backward ? 14 : 6) + squares * 14 + lines * 16 + 18 * 64;
    char *memory = reserve(bytes);
    Space *s = part(&memory, sizeof(Space));
    s->k = part(&memory, keys * size * 2), s->v = part(&memory, keys * size * 2), s->flipped = part(&memory, keys * size * 2);
    s->lines = part(&memory, lines * 2), s->lines_t = part(&memory, lines * 2);
    s->d_lines = part(&memory, lines * 2), s->d_lines_t = part(&memory, lines * 2);
    s->lines_i = part(&memory, lines * 2), s->d_lines_i = part(&memory, lines * 2);
    s->out = part(&memory, lines * 4), s->s = part(&memory, squares * 4), s->d_p = part(&memory, squares * 4);
    s->p = part(&memory, squares * 2), s->d_s = part(&memory, squares * 2), s->paired = part(&memory, squares * 2);
    if (backward) s->d_k = part(&memory, keys * size * 4), s->d_v = part(&memory, keys * size * 4);
    return s;
}

/* The keys of a head, rotated, and its values, with zeros up to a multiple of 32. */
static void take_keys(const Attention *of, int64_t row, int64_t head, Space *s) {
    int64_t begin = of->begins[row], length = of->begins[row + 1] - begin, size = of->size, keys = (length + 31) / 32 * 32;
    for (int64_t key = 0; key < length; key++) {
        rotate_head(of, of->k + (begin + key) * of->k_stride + head * size, begin + key, 1.0f, s->k + key * size);
        memcpy(s->v + key * size, of->v + (begin + key) * of->v_stride + head * size, size * sizeof(bf16));
    }
    memset(s->k + length * size, 0, (keys - length) * size * sizeof(bf16));
    memset(s->v + length * size, 0, (keys - length) * size * sizeof(bf16));
}

/* A block of lines: the queries, rotated and scaled, with zeros up to `width`, and the place of each in its row. */
static void take_lines(const Attention *of, int64_t begin, int64_t head, int64_t first, int64_t count, int64_t width, Space *s) {
    int64_t group = of->heads / of->kv, size = of->size, query = first / group, g = first % group;
    for (int64_t line = 0; line < width; line++) {
        s->query[line] = (int32_t)query;
        if (line < count)
            rotate_head(of, of->q + (begin + query) * of->q_stride + (head * group + g) * size, begin + query, of->scale,
                           s->lines + line * size);
        else
            memset(s->lines + line * size, 0, size * sizeof(bf16));
        if (++g == group) g = 0, query++;
    }
    transpose_pairs(s->lines, width, size, s->lines_t, LINES);
}

/* Probabilities of a block in `paired`, not divided by their sums; what was computed of earlier keys is scaled to the new maxima. */
static void online_softmax(int64_t key, int64_t keys, int64_t width, int64_t window, int is_first, int64_t size, Space *s) {
    for (int64_t j = 0; j < width; j += 16) {
        __m512i query = _mm512_loadu_si512(s->query + j);
        __m512 before = is_first ? _mm512_set1_ps(-1e30f) : _mm512_loadu_ps(s->top + j), top = before;
        for (int64_t i = 0; i < keys; i++) {
            __m512 score = _mm512_loadu_ps(s->s + i * LINES + j);
            top = _mm512_mask_max_ps(top, allowed(key + i, query, window), score, top);
        }
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < keys; i += 2) {
            __m512 e[2];
            for (int64_t n = 0; n < 2; n++) {
                __m512 score = _mm512_loadu_ps(s->s + (i + n) * LINES + j);
                e[n] = _mm512_maskz_mov_ps(allowed(key + i + n, query, window), vector_exponential(_mm512_sub_ps(score, top)));
                sum = _mm512_add_ps(sum, e[n]);
            }
            _mm512_storeu_si512(s->paired + i / 2 * LINES + j, paired(narrow_two(e[0], e[1])));
        }
        if (!is_first) {
            __m512 factor = vector_exponential(_mm512_sub_ps(before, top));
            sum = _mm512_fmadd_ps(_mm512_loadu_ps(s->share + j), factor, sum);
            for (int64_t i = 0; i < size; i++)
                _mm512_storeu_ps(s->out + i * LINES + j, _mm512_mul_ps(_mm512_loadu_ps(s->out + i * LINES + j), factor));
        }
        _mm512_storeu_ps(s->top + j, top);
        _mm512_storeu_ps(s->share + j, sum);
    }
}

static int64_t first_key(int64_t query, int64_t window) { return window && query >= window ? (query + 1 - window) / 8 * 8 : 0; }

/* The output (T, H, D), and for each line its maximum and what its probabilities are multiplied by. */
static void attend_head(const Attention *of, int64_t row, int64_t head, bf16 *out, float *tops, float *shares, Space *s) {
    int64_t begin = of->begins[row], length = of->begins[row + 1] - begin, size = of->size, group = of->heads / of->kv;
    int64_t half = (length + 31) / 32 * 16, lines = length * group, place = begin * of->heads + head * lines;
    take_keys(of, row, head, s);
    interleave_transposed(s->v, 2 * half, size, s->flipped);
    for (int64_t first = 0; first < lines; first += LINES) {
        int64_t count = lines - first < LINES ? lines - first : LINES, width = (count + 15) / 16 * 16;
        int64_t low = first_key(first / group, of->window), high = (first + count - 1) / group + 1;
        take_lines(of, begin, head, first, count, width, s);
        for (int64_t key = low; key < high; key += KEYS) {
            int64_t keys = high - key < KEYS ? (high - key + 7) / 8 * 8 : KEYS;
            product((pair *)(s->k + key * size), size / 2, s->lines_t, LINES, s->s, LINES, keys, width, size / 2, 0);
            online_softmax(key, keys, width, of->window, key == low, size, s);
            product(s->flipped + key / 2, half, s->paired, LINES, s->out, LINES, size, width, keys / 2, key > low);
        }
        float turned[16 * 16];
        for (int64_t j = 0; j < width; j += 16) {
            __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_loadu_ps(s->share + j));
            _mm512_storeu_ps(s->share + j, share);
            for (int64_t i = 0; i < size; i += 16) {
                for (int64_t n = 0; n < 16; n++) {
                    float *values = s->out + (i + n) * LINES + j;
                    _mm512_storeu_ps(values, _mm512_mul_ps(_mm512_loadu_ps(values), share));
                }
                transpose(s->out + i * LINES + j, LINES, turned, 16);
                for (int64_t n = 0; n < 16 && j + n < count; n++) {
                    int64_t token = begin + s->query[j + n], g = (first + j + n) % group;
                    bf16 *to = out + (token * of->heads + head * group + g) * size + i;
                    store_16(to, _mm512_loadu_ps(turned + 16 * n));
                }
            }
        }
        memcpy(tops + place + first, s->top, count * sizeof(float));
        memcpy(shares + place + first, s->share, count * sizeof(float));
    }
}

/* The gradients of a block's output as lines, and of each line its product with the output. */
static void take_gradients(const Attention *of, int64_t begin, int64_t head, int64_t first, int64_t count, int64_t width, const bf16 *grad,
                           const bf16 *out, Space *s) {
    int64_t group = of->heads / of->kv, size = of->size;
    for (int64_t line = 0; line < count; line++) {
        int64_t place = ((begin + s->query[line]) * of->heads + head * group + (first + line) % group) * size;
        memcpy(s->d_lines + line * size, grad + place, size * sizeof(bf16));
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += 32)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(grad + place + i), (__m512bh)_mm512_loadu_si512(out + place + i));
        s->delta[line] = _mm512_reduce_add_ps(sum);
    }
    memset(s->d_lines + count * size, 0, (width - count) * size * sizeof(bf16));
    memset(s->delta + count, 0, (LINES - count) * sizeof(float));
    transpose_pairs(s->d_lines, width, size, s->d_lines_t, LINES);
}

/* Probabilities and the gradients of scores of a block: as rows of keys, the latter also in `paired`. */
static void softmax_gradient(int64_t key, int64_t keys, int64_t width, int64_t window, Space *s) {
    for (int64_t j = 0; j < width; j += 16) {
        __m512i query = _mm512_loadu_si512(s->query + j);
        __m512 top = _mm512_loadu_ps(s->top + j), share = _mm512_loadu_ps(s->share + j), delta = _mm512_loadu_ps(s->delta + j);
        for (int64_t i = 0; i < keys; i += 2) {
            __m512 p[2], d[2];
            for (int64_t n = 0; n < 2; n++) {
                int64_t place = (i + n) * LINES + j;
                __m512 e = vector_exponential(_mm512_sub_ps(_mm512_loadu_ps(s->s + place), top));
                p[n] = _mm512_maskz_mul_ps(allowed(key + i + n, query, window), e, share);
                d[n] = _mm512_mul_ps(p[n], _mm512_sub_ps(_mm512_loadu_ps(s->d_p + place), delta));
            }
            __m512i both = narrow_two(p[0], p[1]), of_scores = narrow_two(d[0], d[1]);
            int64_t place = i * LINES + j;
            _mm256_storeu_si256((__m256i *)(s->p + place), _mm512_castsi512_si256(both));
            _mm256_storeu_si256((__m256i *)(s->p + place + LINES), _mm512_extracti64x4_epi64(both, 1));
            _mm256_storeu_si256((__m256i *)(s->d_s + place), _mm512_castsi512_si256(of_scores));
            _mm256_storeu_si256((__m256i *)(s->d_s + place + LINES), _mm512_extracti64x4_epi64(of_scores, 1));
            _mm512_storeu_si512(s->paired + i / 2 * LINES + j, paired(of_scores));
        }
    }
}

static void attend_head_backward(const Attention *of, int64_t row, int64_t head, const bf16 *grad, const bf16 *out, const float *tops,
                                 const float *shares, bf16 *d_q, bf16 *d_k, bf16 *d_v, int64_t stride, Space *s) {
    int64_t begin = of->begins[row], length = of->begins[row + 1] - begin, size = of->size, group = of->heads / of->kv;
    int64_t half = (length + 31) / 32 * 16, lines = length * group, place = begin * of->heads + head * lines;
    take_keys(of, row, head, s);
    interleave_transposed(s->k, 2 * half, size, s->flipped);
    memset(s->d_k, 0, 2 * half * size * sizeof(float));
    memset(s->d_v, 0, 2 * half * size * sizeof(float));
    for (int64_t first = 0; first < lines; first += LINES) {
        int64_t count = lines - first < LINES ? lines - first : LINES, width = (count + 15) / 16 * 16;
        int64_t low = first_key(first / group, of->window), high = (first + count - 1) / group + 1;
        take_lines(of, begin, head, first, count, width, s);
        take_gradients(of, begin, head, first, count, width, grad, out, s);
        interleave(s->lines, size, width, size, s->lines_i, size);
        interleave(s->d_lines, size, width, size, s->d_lines_i, size);
        memset(s->top, 0, sizeof(s->top)), memset(s->share, 0, sizeof(s->share));
        memcpy(s->top, tops + place + first, count * sizeof(float));
        memcpy(s->share, shares + place + first, count * sizeof(float));
        for (int64_t key = low; key < high; key += KEYS) {
            int64_t keys = high - key < KEYS ? (high - key + 7) / 8 * 8 : KEYS;
            product((pair *)(s->k + key * size), size / 2, s->lines_t, LINES, s->s, LINES, keys, width, size / 2, 0);
            product((pair *)(s->v + key * size), size / 2, s->d_lines_t, LINES, s->d_p, LINES, keys, width, size / 2, 0);
            softmax_gradient(key, keys, width, of->window, s);
            product((pair *)s->p, LINES / 2, s->d_lines_i, size, s->d_v + key * size, size, keys, size, width / 2, 1);
            product((pair *)s->d_s, LINES / 2, s->lines_i, size, s->d_k + key * size, size, keys, size, width / 2, 1);
            product(s->flipped + key / 2, half, s->paired, LINES, s->out, LINES, size, width, keys / 2, key > low);
        }
        float turned[16 * size];
        for (int64_t j = 0; j < width; j += 16) {
            for (int64_t i = 0; i < size; i += 16) transpose(s->out + i * LINES + j, LINES, turned + i, size);
            for (int64_t n = 0; n < 16 && j + n < count; n++) {
                int64_t token = begin + s->query[j + n], g = (first + j + n) % group;
                rotate_back(of, turned + n * size, token, of->scale, d_q + token * stride + (head * group + g) * size);
            }
        }
    }
    for (int64_t key = 0; key < length; key++) {
        rotate_back(of, s->d_k + key * size, begin + key, 1.0f, d_k + (begin + key) * stride + head * size);
        bf16 *to = d_v + (begin + key) * stride + head * size;
        for (int64_t i = 0; i < size; i += 16) store_16(to + i, _mm512_loadu_ps(s->d_v + key * size + i));
    }
}

void attention(const bf16 *q, const bf16 *k, const bf16 *v, int64_t q_stride, int64_t k_stride, int64_t v_stride, const float *cosine,
               const float *sine, float scale, const int64_t *begins, int64_t rows, int64_t heads, int64_t kv, int64_t size, int64_t window,
               bf16 *out, float *tops, float *shares) {
    Attention of = {q, k, v, q_stride, k_stride, v_stride, cosine, sine, scale, begins, rows, heads, kv, size, window};
#pragma omp parallel if (begins[rows] * heads * size > MANY)
    {
        Space *space = make_space(&of, 0);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < rows * kv; task++) attend_head(&of, task / kv, task % kv, out, tops, shares, space);
        free(space);
    }
}

void attention_backward(const bf16 *grad, const bf16 *q, const bf16 *k, const bf16 *v, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                        const float *cosine, const float *sine, float scale, const int64_t *begins, int64_t rows, int64_t heads, int64_t kv,
                        int64_t size, int64_t window, const bf16 *out, const float *tops, const float *shares, bf16 *d_q, bf16 *d_k,
                        bf16 *d_v, int64_t stride) {
    Attention of = {q, k, v, q_stride, k_stride, v_stride, cosine, sine, scale, begins, rows, heads, kv, size, window};
#pragma omp parallel if (begins[rows] * heads * size > MANY)
    {
        Space *space = make_space(&of, 1);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < rows * kv; task++)
            attend_head_backward(&of, task / kv, task % kv, grad, out, tops, shares, d_q, d_k, d_v, stride, space);
        free(space);
    }
}

/* ---- adapters: the products with a rank r, a multiple of 8, beside a width that is a multiple of 32. B (width, r) is float32. */

INLINE void add_tile(const bf16 *low, int64_t low_stride, const pair *right, int64_t width, int64_t rank, bf16 *y, int64_t stride,
                     const int rows) {
    __m512 sum[8][2];
    UNROLL for (int i = 0; i < rows; i++) sum[i][0] = widen_16(y + i * stride), sum[i][1] = widen_16(y + i * stride + 16);
    for (int64_t step = 0; step < rank / 2; step++) {
        __m512bh a = (__m512bh)_mm512_loadu_si512(right + step * width), b = (__m512bh)_mm512_loadu_si512(right + step * width + 16);
        UNROLL for (int i = 0; i < rows; i++) {
            __m512bh left = (__m512bh)_mm512_set1_epi32(((const pair *)(low + i * low_stride))[step]);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], left, a), sum[i][1] = _mm512_dpbf16_ps(sum[i][1], left, b);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) _mm512_storeu_si512(y + i * stride, narrow_two(sum[i][0], sum[i][1]));
}

/* An adapter of those with the same input. Their outputs are columns one after the other, and so are their products with A. */
typedef struct {
    const float *b; /* (width, r) */
    int64_t width, rank;
    const bf16 *weight; /* (width, in), and below s A is (r, in); for products of whole layers */
    const float *a;
    float scale;
} Adapter;

/* 16 values of B at one rank, rounded as `narrow` does, each in the lower half of a lane. */
INLINE __m512i narrow_column(const float *b, int64_t rank) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i bits = _mm512_i32gather_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32((int32_t)rank)), b, 4);
    __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1)));
    return _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
}

static int64_t widest(const Adapter *of, int64_t count) {
    int64_t found = 0;
    for (int64_t n = 0; n < count; n++) found = of[n].rank * of[n].width > found ? of[n].rank * of[n].width : found;
    return found;
}

static int64_t total_width(const Adapter *of, int64_t count) {
    int64_t found = 0;
    for (int64_t n = 0; n < count; n++) found += of[n].width;
    return found;
}

/* `count` rows of B (width, r), as pairs of two ranks: (r / 2, count) */
static void pack_up(const float *b, int64_t rank, int64_t count, pair *to, int64_t to_row) {
    for (int64_t j = 0; j < rank / 2; j++)
        for (int64_t i = 0; i < count; i += 16) {
            const float *from = b + i * rank + 2 * j;
            __m512i second = _mm512_slli_epi32(narrow_column(from + 1, rank), 16);
            _mm512_storeu_si512(to + j * to_row + i, _mm512_or_si512(narrow_column(from, rank), second));
        }
}

/* Adds low (rows, r) Bᵀ of each adapter to its columns of y (rows, widths). Each thread rounds all B for itself: that takes less than a barrier. */
void add_low_rank(const bf16 *low, int64_t low_stride, const Adapter *of, int64_t count, int64_t rows, bf16 *y, int64_t stride) {
#pragma omp parallel if (rows * total_width(of, count) > MANY)
    {
        pair *right = reserve(widest(of, count) / 2 * sizeof(pair)); /* (r / 2, width) */
        const bf16 *left = low;
        bf16 *to = y;
        for (int64_t n = 0; n < count; n++) {
            int64_t width = of[n].width, rank = of[n].rank;
            pack_up(of[n].b, rank, width, right, width);
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < rows; row += 8)
                for (int64_t i = 0; i < width; i += 32) {
                    if (row + 8 <= rows)
                        add_tile(left + row * low_stride, low_stride, right + i, width, rank, to + row * stride + i, stride, 8);
                    else
                        for (int64_t m = row; m < rows; m++)
                            add_tile(left + m * low_stride, low_stride, right + i, width, rank, to + m * stride + i, stride, 1);
                }
            left += rank, to += width;
        }
        free(right);
    }
}

#define AHEAD 4 /* rows, far apart in memory, that are fetched before they are needed */

INLINE void project_tile(const bf16 *y, int64_t stride, const bf16 *right, int64_t width, bf16 *low, int64_t low_stride, const int rows) {
    __m512 sum[2][8];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < 8; j++) sum[i][j] = _mm512_setzero_ps();
    for (int64_t place = 0; place < width; place += 32) {
        __m512bh left[2];
        UNROLL for (int i = 0; i < rows; i++) {
            _mm_prefetch(y + (i + AHEAD) * stride + place, _MM_HINT_T0);
            left[i] = (__m512bh)_mm512_loadu_si512(y + i * stride + place);
        }
        UNROLL for (int j = 0; j < 8; j++) {
            __m512bh other = (__m512bh)_mm512_loadu_si512(right + j * width + place);
            UNROLL for (int i = 0; i < rows; i++) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], left[i], other);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < 8; j++) low[i * low_stride + j] = narrow(_mm512_reduce_add_ps(sum[i][j]));
}

/* low (rows, r) = y (rows, width) rightᵀ, from (r, width), the rows divided among the threads of a region */
static void project(const bf16 *y, int64_t stride, const bf16 *right, int64_t width, int64_t rank, int64_t rows, bf16 *low,
                    int64_t low_stride) {
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < rows; row += 2)
        for (int64_t j = 0; j < rank; j += 8) {
            if (row + 2 <= rows)
                project_tile(y + row * stride, stride, right + j * width, width, low + row * low_stride + j, low_stride, 2);
            else
                project_tile(y + row * stride, stride, right + j * width, width, low + row * low_stride + j, low_stride, 1);
        }
}

/* low (rows, ranks) = y (rows, widths) B of each adapter, with memory for one Bᵀ */
static void project_all(const bf16 *y, int64_t stride, const Adapter *of, int64_t count, int64_t rows, bf16 *low, int64_t low_stride,
                        bf16 *right) {
    for (int64_t n = 0; n < count; y += of[n].width, low += of[n++].rank) {
        int64_t width = of[n].width, rank = of[n].rank;
        for (int64_t j = 0; j < rank; j++)
            for (int64_t i = 0; i < width; i += 16) {
                __m512i column = narrow_column(of[n].b + i * rank + j, rank);
                _mm256_storeu_si256((__m256i *)(right + j * width + i), _mm512_cvtepi32_epi16(column));
            }
        project(y, stride, right, width, rank, rows, low, low_stride);
    }
}

void project_low_rank(const bf16 *y, int64_t stride, const Adapter *of, int64_t count, int64_t rows, bf16 *low, int64_t low_stride) {
#pragma omp parallel if (rows * total_width(of, count) > MANY)
    {
        bf16 *right = reserve(widest(of, count) * sizeof(bf16)); /* (r, width) */
        project_all(y, stride, of, count, rows, low, low_stride, right);
        free(right);
    }
}

#define GRADIENT_ROWS 64 /* at a time */
#define GRADIENT_WIDTH 128

/* low (rows, r) as pairs of two rows: (rows / 2, r) */
static void pair_rows(const bf16 *low, int64_t stride, int64_t rows, int64_t rank, pair *to) {
    for (int64_t row = 0; row < rows; row += 2) {
        const bf16 *even = low + row * stride, *odd = even + stride;
        pair *of = to + row / 2 * rank;
        if (row + 1 < rows) {
#pragma omp simd
            for (int64_t j = 0; j < rank; j++) of[j] = even[j] | (pair)odd[j] << 16;
        } else
            for (int64_t j = 0; j < rank; j++) of[j] = even[j];
    }
}

/* lowᵀ y of up to GRADIENT_WIDTH columns of y, from low as pairs whose rows are `step` apart: (r, GRADIENT_WIDTH) */
static void gradient_block(const pair *low, int64_t step, const bf16 *y, int64_t stride, int64_t rows, int64_t columns, int64_t rank,
                           float *sums) {
    __m512i first = pair_places(0, 32), second = pair_places(16, 32);
    memset(sums, 0, rank * GRADIENT_WIDTH * sizeof(float));
    for (int64_t row = 0; row < rows; row += GRADIENT_ROWS)
        for (int64_t i = 0; i < columns; i += 32)
            for (int64_t j = 0; j < rank; j += 8) {
                __m512 sum[8][2];
                float *to = sums + j * GRADIENT_WIDTH + i;
                UNROLL for (int n = 0; n < 8; n++) {
                    sum[n][0] = _mm512_loadu_ps(to + n * GRADIENT_WIDTH), sum[n][1] = _mm512_loadu_ps(to + n * GRADIENT_WIDTH + 16);
                }
                for (int64_t n = row; n < rows && n < row + GRADIENT_ROWS; n += 2) {
                    _mm_prefetch(y + (n + 4 * AHEAD) * stride + i, _MM_HINT_T0), _mm_prefetch(y + (n + 4 * AHEAD + 1) * stride + i, _MM_HINT_T0);
                    __m512i even = _mm512_loadu_si512(y + n * stride + i);
                    __m512i odd = n + 1 < rows ? _mm512_loadu_si512(y + (n + 1) * stride + i) : _mm512_setzero_si512();
                    __m512bh a = (__m512bh)_mm512_permutex2var_epi16(even, first, odd), b = (__m512bh)_mm512_permutex2var_epi16(even, second, odd);
                    UNROLL for (int m = 0; m < 8; m++) {
                        __m512bh one = (__m512bh)_mm512_set1_epi32(low[n / 2 * step + j + m]);
                        sum[m][0] = _mm512_dpbf16_ps(sum[m][0], one, a), sum[m][1] = _mm512_dpbf16_ps(sum[m][1], one, b);
                    }
                }
                UNROLL for (int n = 0; n < 8; n++) {
                    _mm512_storeu_ps(to + n * GRADIENT_WIDTH, sum[n][0]), _mm512_storeu_ps(to + n * GRADIENT_WIDTH + 16, sum[n][1]);
                }
            }
}

/* The gradients of A and B of adapters with the input x (rows, in): d_a = scale · d_lowᵀ x, (r, in) of all one below the other, and
d_b = d_outᵀ low, (width, r) one after the other. A block of columns is computed by one thread, so sums do not depend on their number. */
void low_rank_gradients(const bf16 *d_low, int64_t d_low_stride, const bf16 *x, int64_t x_stride, int64_t in, const bf16 *low,
                        int64_t low_stride, const bf16 *d_out, int64_t d_out_stride, const Adapter *of, int64_t count,
                        const float *scales, int64_t rows, float *d_a, float *d_b) {
    int64_t ranks = 0, blocks = (in + GRADIENT_WIDTH - 1) / GRADIENT_WIDTH, tasks = blocks;
    for (int64_t n = 0; n < count; n++) ranks += of[n].rank, tasks += (of[n].width + GRADIENT_WIDTH - 1) / GRADIENT_WIDTH;
#pragma omp parallel if (rows * total_width(of, count) > MANY)
    {
        int64_t half = (rows + 1) / 2 * ranks;
        pair *of_a = reserve((2 * half + ranks * GRADIENT_WIDTH) * sizeof(pair)), *of_b = of_a + half;
        float *sums = (float *)(of_b + half);
        pair_rows(d_low, d_low_stride, rows, ranks, of_a);
        pair_rows(low, low_stride, rows, ranks, of_b);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            int64_t begin = task * GRADIENT_WIDTH, before = 0, place = 0, n = 0;
            if (task < blocks) {
                int64_t columns = in - begin < GRADIENT_WIDTH ? in - begin : GRADIENT_WIDTH;
                gradient_block(of_a, ranks, x + begin, x_stride, rows, columns, ranks, sums);
                for (; n < count; before += of[n++].rank)
                    for (int64_t j = before; j < before + of[n].rank; j++)
                        for (int64_t i = 0; i < columns; i++) d_a[j * in + begin + i] = sums[j * GRADIENT_WIDTH + i] * scales[n];
                continue;
            }
            int64_t block = task - blocks, column = 0; /* of adapter n; `before` ranks, `place` values and `column` columns are of earlier ones */
            for (; block >= (of[n].width + GRADIENT_WIDTH - 1) / GRADIENT_WIDTH; n++) {
                block -= (of[n].width + GRADIENT_WIDTH - 1) / GRADIENT_WIDTH;
                before += of[n].rank, place += of[n].rank * of[n].width, column += of[n].width;
            }
            int64_t rank = of[n].rank, columns = of[n].width - block * GRADIENT_WIDTH;
            begin = block * GRADIENT_WIDTH, columns = columns < GRADIENT_WIDTH ? columns : GRADIENT_WIDTH;
            gradient_block(of_b + before, ranks, d_out + column + begin, d_out_stride, rows, columns, rank, sums);
            for (int64_t i = 0; i < columns; i++)
                for (int64_t j = 0; j < rank; j++) d_b[place + (begin + i) * rank + j] = sums[j * GRADIENT_WIDTH + i];
        }
        free(of_a);
    }
}

/* ---- layers with the same input: weights (width, in) with an adapter each, or without one, r = 0. A weight is packed in panels of 64 columns of
the result, as pairs of two steps of the sum, and what comes from the adapters is part of the same sums. The order of a sum depends on
neither the number of rows nor that of threads. */

#define TALL 6   /* rows of a tile */
#define PANEL 64 /* columns of a panel */
#define STRIP 510 /* rows of a task */

/* Two factors, (rows, steps) and (rows, rank), that follow each other in the sum. */
typedef struct {
    const bf16 *x, *low;
    int64_t stride, low_stride, steps, rank;
} Left;

INLINE void panel_tile(const Left *of, int64_t row, const pair *panel, bf16 *y, int64_t stride, const int rows, const int vectors) {
    __m512 sum[TALL][4];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = _mm512_setzero_ps();
    for (int part = 0; part < 2; part++) {
        int64_t next = part ? of->low_stride : of->stride, steps = (part ? of->rank : of->steps) / 2;
        const bf16 *from = (part ? of->low : of->x) + row * next;
        for (int64_t step = 0; step < steps; step++, panel += PANEL) {
            __m512bh right[4];
            UNROLL for (int j = 0; j < vectors; j++) right[j] = (__m512bh)_mm512_loadu_si512(panel + 16 * j);
            UNROLL for (int i = 0; i < rows; i++) {
                __m512bh left = (__m512bh)_mm512_set1_epi32(((const pair *)(from + i * next))[step]);
                UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], left, right[j]);
            }
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j += 2)
            _mm512_storeu_si512(y + i * stride + 16 * j, narrow_two(sum[i][j], sum[i][j + 1]));
}

/* Rows of a product with a panel of 64 or 32 columns. */
static void panel_product(const Left *of, const pair *panel, int64_t begin, int64_t end, int64_t columns, bf16 *y, int64_t stride) {
#define CASE(height) \
    case height: \
        if (columns == PANEL) panel_tile(of, row, panel, y + row * stride, stride, height, 4); \
        else panel_tile(of, row, panel, y + row * stride, stride, height, 2); \
        break
    for (int64_t row = begin; row < end; row += TALL)
        switch (end - row < TALL ? end - row : TALL) {
            CASE(1);
            CASE(2);
            CASE(3);
            CASE(4);
            CASE(5);
            CASE(TALL);
        }
}

/* `count` columns of s A, (r, in), as pairs of two ranks: (r / 2, PANEL) */
static void pack_down(const float *a, float scale, int64_t in, int64_t rank, int64_t count, pair *to) {
    for (int64_t j = 0; j < rank; j += 2)
        for (int64_t i = 0; i < count; i++)
            to[j / 2 * PANEL + i] = narrow(a[j * in + i] * scale) | (pair)narrow(a[(j + 1) * in + i] * scale) << 16;
}

static int64_t panels(int64_t width) { return (width + PANEL - 1) / PANEL; }

static int64_t total_rank(const Adapter *of, int64_t count) {
    int64_t found = 0;
    for (int64_t n = 0; n < count; n++) found += of[n].rank;
    return found;
}

/* y (rows, widths) = x Wᵀ + low Bᵀ of each layer, with low (rows, ranks) = x s Aᵀ, which is a result, too. */
void multiply(const bf16 *x, int64_t x_stride, int64_t in, const Adapter *of, int64_t count, int64_t rows, bf16 *y, int64_t stride, bf16 *low,
              int64_t low_stride) {
    int64_t strips = (rows + STRIP - 1) / STRIP, ranks = total_rank(of, count), tasks = 0;
    for (int64_t n = 0; n < count; n++) tasks += panels(of[n].width) * strips;
#pragma omp parallel if (rows * in > MANY)
    {
        bf16 *down = reserve(ranks * in * sizeof(bf16) + 64), *to = down;
        for (int64_t n = 0; n < count; n++)
            for (int64_t i = 0; i < of[n].rank * in; i++) *to++ = narrow(of[n].a[i] * of[n].scale);
        project(x, x_stride, down, in, ranks, rows, low, low_stride);
        free(down);
        pair *panel = reserve((in + ranks) / 2 * PANEL * sizeof(pair));
        int64_t packed = -1;
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; task++) {
            int64_t column = task / strips * PANEL, begin = task % strips * STRIP, before = 0, n = 0;
            Left left = {x, low, x_stride, low_stride, in, 0};
            for (; column >= panels(of[n].width) * PANEL; n++) {
                column -= panels(of[n].width) * PANEL;
                before += of[n].width, left.low += of[n].rank;
            }
            int64_t columns = of[n].width - column < PANEL ? of[n].width - column : PANEL;
            left.rank = of[n].rank;
            if (task / strips != packed) {
                transpose_pairs(of[n].weight + column * in, columns, in, panel, PANEL);
                pack_up(of[n].b + column * left.rank, left.rank, columns, panel + in / 2 * PANEL, PANEL);
                packed = task / strips;
            }
            panel_product(&left, panel, begin, begin + STRIP < rows ? begin + STRIP : rows, columns, y + before + column, stride);
        }
        free(panel);
    }
}

/* d_x (rows, in) = d_y W + d_low s A, summed over the layers, with d_low (rows, ranks) = d_y B, which is a result, too. */
void multiply_back(const bf16 *d_y, int64_t stride, int64_t in, const Adapter *of, int64_t count, int64_t rows, bf16 *d_low,
                   int64_t low_stride, bf16 *d_x, int64_t x_stride) {
    int64_t strips = (rows + STRIP - 1) / STRIP, ranks = total_rank(of, count), width = total_width(of, count);
#pragma omp parallel if (rows * in > MANY)
    {
        bf16 *right = reserve(widest(of, count) * sizeof(bf16) + 64);
        project_all(d_y, stride, of, count, rows, d_low, low_stride, right);
        free(right);
        pair *panel = reserve((width + ranks) / 2 * PANEL * sizeof(pair));
        Left left = {d_y, d_low, stride, low_stride, width, ranks};
        int64_t packed = -1;
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t task = 0; task < panels(in) * strips; task++) {
            int64_t column = task / strips * PANEL, begin = task % strips * STRIP, columns = in - column < PANEL ? in - column : PANEL;
            pair *to = panel;
            for (int64_t n = 0; n < count && task / strips != packed; to += of[n++].width / 2 * PANEL)
                interleave(of[n].weight + column, in, of[n].width, columns, to, PANEL);
            for (int64_t n = 0; n < count && task / strips != packed; to += of[n++].rank / 2 * PANEL)
                pack_down(of[n].a + column, of[n].scale, in, of[n].rank, columns, to);
            packed = task / strips;
            panel_product(&left, panel, begin, begin + STRIP < rows ? begin + STRIP : rows, columns, d_x + column, x_stride);
        }
        free(panel);
    }
}
#endif
