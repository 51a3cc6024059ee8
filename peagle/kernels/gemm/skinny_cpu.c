/* Few rows in fp32 on a CPU: a GEMM with the norm before it and SwiGLU, bias and residual after it, and attention.

The caller passes the function that runs work on several threads, so this file depends on no threading library.

A GEMM of one row is bound by reading the weights; a BLAS library's GEMM of 2 to 16 rows costs several times that. Here a
few rows of w meet up to ROWS rows of x in registers, so that every loaded vector is used several times and arithmetic is
the limit; w is read once, in torch's layout, and prefetched.

Every output is the same sum in the same order: LANES partial sums over k, k + LANES, .., added pairwise at the end, then
the remainder of K one by one. So a row's bits depend neither on T, nor on its index, nor on the number of threads.

Shapes: T rows, K input width, N weight rows; H heads, G key/value heads, d head width. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* Sums, weights and one vector of x fit into the registers: 24 + 3 + 1 of 32, or 12 + 3 + 1 of 16. */
#if defined(__aarch64__) || defined(__AVX512F__)
#define ROWS 8
#else
#define ROWS 4
#endif

#define AHEAD 4096           /* floats: prefetch distance of w */
#define STEPS 4              /* vectors of each weight row between two prefetches */
#define RESIDENT (64 * 1024) /* bytes of w that stay in the cache for a second tile of rows */
#define SHARE 12             /* threads take weight rows in multiples of this, which every COUNT divides */
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int Ints __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias)); /* unaligned */
typedef void Parallel(void (*)(void *), void *, unsigned threads, unsigned flags);   /* GOMP_parallel */

typedef struct {
    const float *x, *w, *bias, *residual; /* residual: dense, like y; null: none */
    const float *norm;                    /* weight of the norm of x; null: no norm */
    float *y, *gated;                     /* gated: [T, N / 2], silu of y's first half times its second; null: no gate */
    long T, N, K, x_stride, w_stride, y_stride, threads;
    float eps;
    long next; /* the first weight row that no thread has taken */
} Gemm;

INLINE float total(Vector v) {
    float part[LANES];
    memcpy(part, &v, sizeof part);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* Loads `count` floats, padded with zeros. */
INLINE Vector load(const float *from, long count) {
    if (count >= LANES) return *(const Loose *)from;
    float part[LANES] = {0};
    for (long i = 0; i < count; i++) part[i] = from[i];
    return *(const Loose *)part;
}

INLINE void store(float *to, Vector v, long count) {
    if (count >= LANES)
        *(Loose *)to = v;
    else
        for (long i = 0; i < count; i++) to[i] = v[i];
}

INLINE Vector all(float value) { return value - (Vector){0}; }

/* exp(x) to two units in the last place: range reduction by ln 2, a polynomial, and the exponent bits. */
INLINE Vector exponential(Vector x) {
    const Vector low = all(-87.0f), high = all(88.0f), shift = all(12582912.0f);
    Ints keep = x > low;
    x = (Vector)(((Ints)x & keep) | ((Ints)low & ~keep));
    keep = x < high;
    x = (Vector)(((Ints)x & keep) | ((Ints)high & ~keep));
    const Vector shifted = x * 1.44269504f + shift, whole = shifted - shift;
    const Vector r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return y * (Vector)((((Ints)shifted - (Ints)shift) + 127) << 23);
}

INLINE void step(Vector sums[4][8], const float *w, long stride, const Vector *x, const int rows, const int COUNT) {
    Vector weights[4];
#pragma GCC unroll 4
    for (int c = 0; c < COUNT; c++) weights[c] = *(const Loose *)(w + c * stride);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < COUNT; c++) sums[c][r] += weights[c] * x[r];
}

INLINE void finish(
    const Gemm *p, const float *found, const Vector *x, long row, long n, const int rows, const int count) {
    const long K = p->K, whole = K / LANES;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < count; c++) {
            const long at = (row + r) * p->y_stride + n + c;
            float sum = found[c * rows + r];
            for (long k = whole * LANES; k < K; k++)
                sum += p->w[(n + c) * p->w_stride + k] * ((const float *)(x + whole * rows + r))[k - whole * LANES];
            if (p->bias) sum += p->bias[n + c];
            if (p->residual) sum += p->residual[at];
            p->y[at] = sum;
        }
}

/* Multiplies COUNT weight rows from n on with `rows` rows of x from `row` on; x is packed by `pack`. */
INLINE void block(const Gemm *p, const Vector *x, long row, long n, const int rows, const int COUNT) {
    const long stride = p->w_stride, whole = p->K / LANES;
    const float *w = p->w + n * stride;
    Vector sums[4][8];
#pragma GCC unroll 4
    for (int c = 0; c < COUNT; c++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[c][r] = (Vector){0};
    long k = 0;
    for (; k + STEPS <= whole; k += STEPS) {
        /* Weight rows are contiguous, and so are the next ones: prefetch in order of address. */
#pragma GCC unroll 16
        for (int line = 0; line < COUNT * STEPS * LANES; line += 16)
            __builtin_prefetch(w + AHEAD + k * LANES * COUNT + line);
#pragma GCC unroll 4
        for (int s = 0; s < STEPS; s++) step(sums, w + (k + s) * LANES, stride, x + (k + s) * rows, rows, COUNT);
    }
    for (; k < whole; k++) step(sums, w + k * LANES, stride, x + k * rows, rows, COUNT);
    float found[4 * 8];
#pragma GCC unroll 4
    for (int c = 0; c < COUNT; c++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) found[c * rows + r] = total(sums[c][r]);
    finish(p, found, x, row, n, rows, COUNT);
}

#define TILE(rows, COUNT) \
    static void tile_##rows(const Gemm *p, const Vector *x, long row, long n, long end) { \
        for (; n + COUNT <= end; n += COUNT) block(p, x, row, n, rows, COUNT); \
        for (; n < end; n++) block(p, x, row, n, rows, 1); \
    }
TILE(1, 1)
TILE(2, 2)
TILE(3, 3)
TILE(4, 3)
#if ROWS == 8
TILE(5, 3)
TILE(6, 3)
TILE(7, 3)
TILE(8, 3)
#endif

typedef void Tile(const Gemm *, const Vector *, long, long, long);
static Tile *const tiles[] = {
    tile_1, tile_2, tile_3, tile_4,
#if ROWS == 8
    tile_5, tile_6, tile_7, tile_8,
#endif
};

static long vectors(long count) { return (count + LANES - 1) / LANES; }
static long tile_count(long T) { return (T + ROWS - 1) / ROWS; }
/* Tile t has rows first_row(T, t) to first_row(T, t + 1); tile sizes differ by at highest one. */
static long first_row(long T, long t) { return T * t / tile_count(T); }

static void all_tiles(const Gemm *p, const Vector *packed, long n, long end) {
    for (long t = 0; t < tile_count(p->T); t++) {
        const long first = first_row(p->T, t), rows = first_row(p->T, t + 1) - first;
        tiles[rows - 1](p, packed + first * vectors(p->K), first, n, end);
    }
}

/* Packs x, or its norm, tile by tile, with the vectors of all rows for one k together. */
static void pack(const Gemm *p, Vector *packed) {
    const long K = p->K, count = vectors(K);
    for (long t = 0; t < tile_count(p->T); t++) {
        const long first = first_row(p->T, t), rows = first_row(p->T, t + 1) - first;
        for (long r = 0; r < rows; r++) {
            const float *x = p->x + (first + r) * p->x_stride;
            Vector *to = packed + first * count + r, squares = {0};
            for (long k = 0; k < count; k++) {
                const Vector v = load(x + k * LANES, K - k * LANES);
                squares += v * v;
                to[k * rows] = v;
            }
            if (!p->norm) continue;
            const float scale = 1.0f / sqrtf(total(squares) / K + p->eps);
            for (long k = 0; k < count; k++) to[k * rows] *= scale * load(p->norm + k * LANES, K - k * LANES);
        }
    }
}

/* Takes a share of the `size` items: from the result to *end; returns size or more if none are left. */
static long take(long *next, long size, long share, long threads, long *end) {
    long n = __atomic_load_n(next, __ATOMIC_RELAXED);
    do {
        /* Large shares first, for long contiguous reads; small ones last, so that all threads end together. */
        const long part = (size - n) / (2 * threads) / share * share;
        *end = n + (part > share ? part : share);
        if (*end > size) *end = size;
    } while (n < size && !__atomic_compare_exchange_n(next, &n, *end, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return n;
}

/* Returns this thread's buffer, reused by later calls. */
static Vector *thread_buffer(long count) {
    static _Thread_local Vector *buffer;
    static _Thread_local long size;
    if (count > size) {
        free(buffer);
        size = posix_memalign((void **)&buffer, 64, count * sizeof(Vector)) ? 0 : count;
        if (!size) buffer = NULL;
    }
    return buffer;
}

static void gate(const Gemm *p, long begin, long end) {
    const long half = p->N / 2;
    for (long t = 0; t < p->T; t++)
        for (long n = begin; n < end; n += LANES) {
            const float *y = p->y + t * p->y_stride + n;
            const Vector x = load(y, end - n), up = load(y + half, end - n);
            store(p->gated + t * half + n, x / (1.0f + exponential(-x)) * up, end - n);
        }
}

static void multiply(void *given) {
    Gemm *p = given;
    Vector *packed = thread_buffer(p->T * vectors(p->K));
    if (!packed) return; /* other threads do the work; if none can, the caller sees that nothing was taken */
    pack(p, packed);
    const long size = p->gated ? p->N / 2 : p->N;
    long resident = p->T <= ROWS ? size : RESIDENT / 4 / p->K / SHARE * SHARE;
    if (resident < SHARE) resident = SHARE;
    for (long n, end; (n = take(&p->next, size, SHARE, p->threads, &end)) < size;)
        for (long stop; n < end; n = stop) {
            stop = n + resident < end ? n + resident : end;
            all_tiles(p, packed, n, stop);
            if (!p->gated) continue;
            all_tiles(p, packed, size + n, size + stop);
            gate(p, n, stop);
        }
}

static void launch(Parallel *parallel, void (*work)(void *), void *given, long threads) {
    if (parallel && threads > 1)
        parallel(work, given, threads, 0);
    else
        work(given);
}

/* Returns 0 if y, and `gated`, have been written. */
int peagle_gemm(const float *x, long x_stride, const float *w, const float *bias, const float *residual,
                   const float *norm, float eps, float *y, float *gated, long T, long N, long K, long threads,
                   Parallel *parallel) {
    Gemm p = {x, w, bias, residual, norm, y, gated, T, N, K, x_stride, K, N, threads, eps, 0};
    launch(parallel, multiply, &p, threads);
    return p.next < (gated ? N / 2 : N);
}

typedef struct {
    const float *qkv; /* [T, H + 2 G, d] */
    const float *cos, *sin; /* [T, d]; the first half of the sines is negated */
    float *keys, *values; /* of the whole sequence, [start + T, G, d]; the last T positions are the new rows' */
    float *out; /* [T, H, d] */
    long T, H, G, d, start, threads;
    long next; /* the first head that no thread has taken */
} Attention;

INLINE void rotate(const Attention *p, long row, const float *from, float *to) {
    const long d = p->d, half = d / 2;
    const float *cos = p->cos + row * d, *sin = p->sin + row * d;
    for (long i = 0; i < d; i++) to[i] = from[i] * cos[i] + from[i < half ? i + half : i - half] * sin[i];
}

/* Softmax over the scores of the first `seen` keys; the others become 0. */
static void softmax(float *scores, long seen, long count, float scale) {
    float highest = scores[0];
    long j = 0;
    if (seen >= LANES) {
        Vector largest = load(scores, LANES);
        for (; j + LANES <= seen; j += LANES) {
            const Vector next = load(scores + j, LANES);
            const Ints keep = largest > next;
            largest = (Vector)(((Ints)largest & keep) | ((Ints)next & ~keep));
        }
        for (int i = 0; i < LANES; i++) highest = largest[i] > highest ? largest[i] : highest;
    }
    for (; j < seen; j++) highest = scores[j] > highest ? scores[j] : highest;
    Vector sum = {0};
    for (j = 0; j < seen; j += LANES) {
        store(scores + j, exponential((load(scores + j, seen - j) - highest) * scale), seen - j);
        sum += load(scores + j, seen - j);
    }
    const float share = 1.0f / total(sum);
    for (j = 0; j < seen; j++) scores[j] *= share;
    for (; j < count; j++) scores[j] = 0.0f;
}

/* Computes `rows` rows of out[:, COUNT vectors] = weights[:, count] @ values[count, the same vectors]. */
INLINE void mix(const float *weights, long weights_stride, const float *values, long values_stride, long count,
                float *out, long out_stride, const int rows, const int COUNT) {
    Vector sums[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < COUNT; c++) sums[r][c] = (Vector){0};
    for (long j = 0; j < count; j++) {
#pragma GCC unroll 4
        for (int c = 0; c < COUNT; c++) {
            const Vector value = *(const Loose *)(values + j * values_stride + c * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][c] += weights[r * weights_stride + j] * value;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < COUNT; c++) *(Loose *)(out + r * out_stride + c * LANES) = sums[r][c];
}

static void attend(void *given) {
    Attention *p = given;
    const long T = p->T, d = p->d, end = p->start + T, row_width = (p->H + 2 * p->G) * d, key_width = p->G * d;
    const long width = vectors(d), stride = vectors(end) * LANES;
    Vector *packed = thread_buffer(T * (2 * width + vectors(end)));
    if (!packed) return;
    float *q = (float *)(packed + T * width), *scores = (float *)(packed + 2 * T * width);
    for (long h, last; (h = take(&p->next, p->H, 1, p->threads, &last)) < p->H;)
        for (; h < last; h++) {
            const long g = h / (p->H / p->G);
            for (long t = 0; t < T; t++) rotate(p, t, p->qkv + t * row_width + h * d, q + t * d);
            const Gemm against = {.x = q, .w = p->keys + g * d, .y = scores, .T = T, .N = end, .K = d,
                                     .x_stride = d, .w_stride = key_width, .y_stride = stride};
            pack(&against, packed);
            all_tiles(&against, packed, 0, end);
            for (long t = 0; t < T; t++) softmax(scores + t * stride, p->start + t + 1, end, 1.0f / sqrtf(d));
            const float *values = p->values + g * d;
            float *out = p->out + h * d;
            for (long i = 0; i < d; i += i + 4 * LANES <= d ? 4 * LANES : LANES)
                for (long t = 0; t < T; t += t + 4 <= T ? 4 : 1) {
                    const float *weights = scores + t * stride;
                    float *to = out + t * p->H * d + i;
                    if (t + 4 <= T && i + 4 * LANES <= d)
                        mix(weights, stride, values + i, key_width, end, to, p->H * d, 4, 4);
                    else if (t + 4 <= T)
                        mix(weights, stride, values + i, key_width, end, to, p->H * d, 4, 1);
                    else if (i + 4 * LANES <= d)
                        mix(weights, stride, values + i, key_width, end, to, p->H * d, 1, 4);
                    else
                        mix(weights, stride, values + i, key_width, end, to, p->H * d, 1, 1);
                }
        }
}

/* Returns 0 if `out` has been written. Appends the rows' keys and values to the sequence's; LANES divides d. */
int peagle_attention(const float *qkv, const float *cos, const float *sin, float *keys, float *values, float *out,
                     long T, long H, long G, long d, long start, long threads, Parallel *parallel) {
    Attention p = {qkv, cos, sin, keys, values, out, T, H, G, d, start, threads, 0};
    for (long t = 0; t < T; t++)
        for (long g = 0; g < G; g++) {
            const float *k = qkv + (t * (H + 2 * G) + H + g) * d;
            const long at = ((start + t) * G + g) * d;
            rotate(&p, t, k, keys + at);
            memcpy(values + at, k + G * d, d * sizeof(float));
        }
    launch(parallel, attend, &p, threads);
    return p.next < H;
}

int peagle_lanes(void) { return LANES; }
