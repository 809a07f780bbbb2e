/* Elementwise work of a decoder layer in bfloat16 on CPUs, one pass over memory each. Built and called by kernels.py.

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

void gate_forward(const bf16 *gate, const bf16 *up, int64_t stride, int64_t rows, int64_t width, bf16 *out) {
    PARALLEL(rows * width > MANY)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *g = gate + row * stride, *u = up + row * stride;
        bf16 *to = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
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
        for (int64_t i = 0; i < width; i++) {
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
