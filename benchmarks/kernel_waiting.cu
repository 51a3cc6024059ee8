// How a small kernel waits for the one ahead: the hardware's way, and words that say themselves whether they are there.
//
//     nvcc -std=c++17 -O3 -arch=sm_90 benchmarks/kernel_waiting.cu -o waiting && ./waiting
//
// The products of SmolLM2's 30 layers for 8 rows, weights and all, in one CUDA graph of dependent launches; two kernels
// that only copy stand for attention and its combination, and there are no norms. Each product holds its weights in
// shared memory before it waits, as kernels/linear_held.py does. What follows the wait is timed four ways:
//
//   wait             griddepcontrol.wait, then the rows are read: as kernels here do
//   launches alone   no wait, and rubbish for results: how fast launches can follow each other
//   D after, D check no wait either. A row's words begin as EMPTY, and a program reads until none is: then they are there.
//                    "check" looks at all of them before it multiplies, "after" multiplies meanwhile and does it again if
//                    one was missing. A kernel lets its successor start when the one D before it has its rows ("free":
//                    at once), so that not all of the graph polls at the same time. There are two sets of words, taken in
//                    turns: who writes one empties the other's.
//
// Prints one JSON line a turn: milliseconds of a graph, and for the last how many results differ from wait's.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <vector>

#define CK(x)                                                                        \
    do {                                                                             \
        cudaError_t failed = (x);                                                    \
        if (failed != cudaSuccess) {                                                 \
            printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(failed));    \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)
#define EMPTY 0xffffffffu  // two bf16 that no arithmetic makes

constexpr int ROWS = 8, LAYERS = 30, KERNELS = 6, WORDS = ROWS * 1536;  // of each kernel's results

__device__ __forceinline__ void trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ uint32_t now(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ void say(uint32_t* p, uint32_t v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void fetch(void* shared, const void* global) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global));
}
__device__ __forceinline__ void fetched() { asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void multiply(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t most(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

// Rows lie as a product's lanes want them: for each 16 columns what a lane multiplies is one piece; or for each 32.
__device__ __forceinline__ int spot16(int n, int m) {
    int kk = n % 16;
    return ((n / 16 * 8 + m) * 4 + (kk % 8) / 2) * 4 + kk % 2 + 2 * (kk / 8);
}
__host__ __device__ __forceinline__ int spot32(int n, int m) {
    int kk = n % 16;
    return ((n / 32 * 8 + m) * 4 + (kk % 8) / 2) * 8 + (n / 16 % 2) * 4 + kk % 2 + 2 * (kk / 8);
}

// 16 columns of a product; with PARTS of 2 they are gates, and as many ups.
template <bool WAITS, int K, int PARTS, bool RES>
__global__ void __launch_bounds__(32)
    product(const __nv_bfloat16* __restrict__ w, const uint32_t* x, uint32_t* y, const uint32_t* res) {
    extern __shared__ __align__(16) uint8_t smem[];
    uint4* sw = (uint4*)smem;
    const int lane = threadIdx.x, tile = blockIdx.x;
    trigger();
    const uint4* gw = (const uint4*)w + (size_t)tile * (K / 16) * PARTS * 32;
#pragma unroll 4
    for (int i = 0; i < K / 16 * PARTS; i++) fetch(&sw[i * 32 + lane], &gw[i * 32 + lane]);
    fetched();
    __syncwarp();
    if (WAITS) wait_ahead();
    float early[4] = {};
    if (RES) {
        for (int j = 0; j < 4; j++) {
            int n = tile * 16 + lane / 4 + (j / 2) * 8, m = (lane % 4) * 2 + j % 2;
            early[j] = __bfloat162float(((const __nv_bfloat16*)res)[spot16(n, m)]);
        }
    }
    float acc[6][4] = {}, up[6][4] = {};
    uint8_t* sx = smem + K / 16 * PARTS * 512;
    const uint8_t* gx = (const uint8_t*)x;
#pragma unroll 8
    for (int i = lane; i < K; i += 32) fetch(sx + i * 16, gx + i * 16);
    fetched();
    __syncwarp();
#pragma unroll 6
    for (int i = 0; i < K / 16; i++) {
        uint2 b = ((uint2*)sx)[i * 32 + lane];
        uint4 a = sw[(i * PARTS) * 32 + lane];
        multiply(acc[i % 6], (uint32_t*)&a, b.x, b.y);
        if (PARTS == 2) {
            uint4 u = sw[(i * PARTS + 1) * 32 + lane];
            multiply(up[i % 6], (uint32_t*)&u, b.x, b.y);
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float s = ((acc[0][j] + acc[1][j]) + (acc[2][j] + acc[3][j])) + (acc[4][j] + acc[5][j]);
        if (PARTS == 2) {
            float u = ((up[0][j] + up[1][j]) + (up[2][j] + up[3][j])) + (up[4][j] + up[5][j]);
            s = s / (1.f + __expf(-s)) * u;
        }
        int n = tile * 16 + lane / 4 + (j / 2) * 8, m = (lane % 4) * 2 + j % 2;
        if (RES) s += early[j];
        ((__nv_bfloat16*)y)[spot16(n, m)] = __float2bfloat16(s);
    }
}

template <bool WAITS>
__global__ void __launch_bounds__(128) copy(const uint32_t* x, uint32_t* y, int words) {
    trigger();
    if (WAITS) wait_ahead();
    int at = blockIdx.x * words;
    for (int i = threadIdx.x; i < words; i += 128) y[at + i] = x[at + i];
}

// The same without a wait. `turn` counts graphs, `number` kernels within one.
template <int D, bool CHECK, int K, int PARTS, bool RES>
__global__ void __launch_bounds__(32) polled_product(const __nv_bfloat16* __restrict__ w, const uint32_t* xs, uint32_t* ys,
                                                     const uint32_t* ress, uint32_t* progress, const uint32_t* turns,
                                                     int number, int half) {
    extern __shared__ __align__(16) uint8_t smem[];
    uint4* sw = (uint4*)smem;
    const int lane = threadIdx.x, tile = blockIdx.x;
    if (D == 0) trigger();
    uint32_t turn = now(turns);
    const uint4* gw = (const uint4*)w + (size_t)tile * (K / 16) * PARTS * 32;
#pragma unroll 4
    for (int i = 0; i < K / 16 * PARTS; i++) fetch(&sw[i * 32 + lane], &gw[i * 32 + lane]);
    uint32_t mine = turn * 256 + number;
    if (D > 0) {
        if (lane == 0)
            while ((int)(now(progress) - (mine - D)) < 0) {}
        __syncwarp();
        trigger();
    }
    const uint32_t *x = xs + (turn & 1) * half, *res = ress + (turn & 1) * half;
    uint32_t *y = ys + (turn & 1) * half, *gone = ys + (~turn & 1) * half;
    fetched();
    __syncwarp();
    float acc[6][4] = {}, up[6][4] = {};
    uint32_t early[2] = {0, 0};
    uint4* sx = sw + K / 16 * PARTS * 32;
    bool there;
    do {
#pragma unroll 8
        for (int i = 0; i < K / 32; i++) fetch(&sx[i * 32 + lane], x + (i * 32 + lane) * 4);
        uint32_t worst = 0;
        if (RES) {
            for (int h = 0; h < 2; h++) {
                int n = tile * 16 + (lane / 4 & ~1) + h * 8, m = (lane % 4) * 2 + (lane / 4 & 1);
                early[h] = now(res + spot32(n, m) / 2);
            }
            worst = max(early[0], early[1]);
        }
        fetched();
        if (CHECK) {
#pragma unroll
            for (int i = 0; i < K / 32; i++) worst = max(worst, most(sx[i * 32 + lane]));
            there = __all_sync(~0u, worst != EMPTY);
            if (!there) continue;
        }
#pragma unroll
        for (int j = 0; j < 24; j++) {
            acc[j / 4][j % 4] = 0.f;
            up[j / 4][j % 4] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < K / 16; i++) {
            uint4 v = sx[i / 2 * 32 + lane];
            if (!CHECK && i % 2 == 0) worst = max(worst, most(v));
            uint32_t b0 = i % 2 ? v.z : v.x, b1 = i % 2 ? v.w : v.y;
            uint4 a = sw[(i * PARTS) * 32 + lane];
            multiply(acc[i % 6], (uint32_t*)&a, b0, b1);
            if (PARTS == 2) {
                uint4 u = sw[(i * PARTS + 1) * 32 + lane];
                multiply(up[i % 6], (uint32_t*)&u, b0, b1);
            }
        }
        if (!CHECK) there = __all_sync(~0u, worst != EMPTY);
    } while (!there);
    if (tile == 0 && lane == 0) say(progress, mine);
    float s[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        s[j] = ((acc[0][j] + acc[1][j]) + (acc[2][j] + acc[3][j])) + (acc[4][j] + acc[5][j]);
        if (PARTS == 2) {
            float u = ((up[0][j] + up[1][j]) + (up[2][j] + up[3][j])) + (up[4][j] + up[5][j]);
            s[j] = s[j] / (1.f + __expf(-s[j])) * u;
        }
    }
// Two columns to a word: lanes of even and odd ones exchange what the other stores.
#pragma unroll
    for (int h = 0; h < 2; h++) {
        bool odd = (lane / 4) & 1;
        float give = odd ? s[h * 2] : s[h * 2 + 1], keep = odd ? s[h * 2 + 1] : s[h * 2];
        float got = __shfl_xor_sync(~0u, give, 4);
        float low = odd ? got : keep, high = odd ? keep : got;
        int n = tile * 16 + (lane / 4 & ~1) + h * 8, m = (lane % 4) * 2 + odd;
        int spot = spot32(n, m) / 2;
        if (RES) {
            uint32_t r = early[h];
            low += __uint_as_float(r << 16);
            high += __uint_as_float(r & 0xffff0000u);
        }
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        say(y + spot, *(uint32_t*)&pair);
        say(gone + spot, EMPTY);
    }
}

template <int D>
__global__ void __launch_bounds__(128) polled_copy(const uint32_t* xs, uint32_t* ys, int words, uint32_t* progress,
                                                   const uint32_t* turns, int number, int half) {
    if (D == 0) trigger();
    uint32_t turn = now(turns), mine = turn * 256 + number;
    if (D > 0) {
        if (threadIdx.x % 32 == 0)
            while ((int)(now(progress) - (mine - D)) < 0) {}
        __syncwarp();
        trigger();
    }
    const uint32_t* x = xs + (turn & 1) * half;
    uint32_t *y = ys + (turn & 1) * half, *gone = ys + (~turn & 1) * half;
    int at = blockIdx.x * words, i = threadIdx.x;
    bool more = i + 128 < words;
    if (i < words) {
        uint32_t a, b = 0;
        do {
            a = now(x + at + i);
            if (more) b = now(x + at + i + 128);
        } while (a == EMPTY || b == EMPTY);
        if (i == 0 && blockIdx.x == 0) say(progress, mine);
        say(y + at + i, a);
        say(gone + at + i, EMPTY);
        if (more) {
            say(y + at + i + 128, b);
            say(gone + at + i + 128, EMPTY);
        }
    }
}

__global__ void next_turn(uint32_t* turns) {
    if (threadIdx.x == 0) *turns = (*turns + 1) & 0xffff;
}
// The rows that a graph begins with; `pairs`: as words of 32 columns, the other set emptied.
__global__ void first_rows(const uint32_t* turns, uint32_t* xs, uint32_t* progress, int half, bool pairs) {
    uint32_t turn = *(volatile uint32_t*)turns;
    uint16_t* x = (uint16_t*)(xs + (turn & 1) * (pairs ? half : 0));
    if (pairs)
        for (int i = threadIdx.x; i < ROWS * 288; i += blockDim.x) (xs + (~turn & 1) * half)[i] = EMPTY;
    for (int i = threadIdx.x; i < ROWS * 576; i += blockDim.x) {
        int k = i / 128 * 16 + (i / 4 % 4) * 2 + i % 2 + (i / 2 % 2) * 8, m = i / 16 % 8;
        x[pairs ? spot32(k, m) : i] = __bfloat16_as_ushort(__float2bfloat16(((i * 37) % 17 - 8) * 0.1f));
    }
    if (threadIdx.x == 0) say(progress, turn * 256);
}
__global__ void fill(__nv_bfloat16* w, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        w[i] = __float2bfloat16(((int)((i * 2654435761u) >> 20 & 255) - 128) * 0.0004f);
}

template <typename... A, typename... B>
void launch(void (*kernel)(A...), int grid, int block, int smem, cudaStream_t s, B... args) {
    cudaLaunchConfig_t how = {};
    how.gridDim = grid, how.blockDim = block, how.dynamicSmemBytes = smem, how.stream = s;
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    how.attrs = &early, how.numAttrs = 1;
    CK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    CK(cudaLaunchKernelEx(&how, kernel, (A)args...));
}

struct Timed {
    float ms;
    std::vector<uint16_t> rows;  // that the graph ends with, in the order of 16 columns
};

constexpr int HALF = (LAYERS * KERNELS + 1) * WORDS;

// `record` launches everything behind the first rows.
template <typename Record> Timed timed(bool pairs, Record record) {
    cudaStream_t s;
    CK(cudaStreamCreate(&s));
    uint32_t *pool, *progress, *turns;
    CK(cudaMalloc(&pool, (size_t)HALF * 2 * 4));
    CK(cudaMemset(pool, 0xff, (size_t)HALF * 2 * 4));
    CK(cudaMalloc(&progress, 256));
    CK(cudaMalloc(&turns, 256));
    CK(cudaMemset(progress, 0, 4));
    CK(cudaMemset(turns, 0, 4));
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    CK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    next_turn<<<1, 32, 0, s>>>(turns);
    first_rows<<<1, 1024, 0, s>>>(turns, pool, progress, HALF, pairs);
    record(s, pool, progress, turns);
    CK(cudaStreamEndCapture(s, &graph));
    CK(cudaGraphInstantiate(&ready, graph, 0));
    for (int i = 0; i < 20; i++) CK(cudaGraphLaunch(ready, s));
    CK(cudaStreamSynchronize(s));
    cudaEvent_t begin, end;
    CK(cudaEventCreate(&begin));
    CK(cudaEventCreate(&end));
    float times[7];
    for (float& each : times) {
        CK(cudaEventRecord(begin, s));
        for (int i = 0; i < 100; i++) CK(cudaGraphLaunch(ready, s));
        CK(cudaEventRecord(end, s));
        CK(cudaEventSynchronize(end));
        CK(cudaEventElapsedTime(&each, begin, end));
    }
    std::sort(times, times + 7);
    uint32_t turn;
    std::vector<uint16_t> found(ROWS * 576), rows(ROWS * 576);
    CK(cudaMemcpy(&turn, turns, 4, cudaMemcpyDeviceToHost));
    const uint32_t* last = pool + (pairs ? (size_t)(turn & 1) * HALF : 0) + (size_t)(LAYERS * KERNELS) * WORDS;
    CK(cudaMemcpy(found.data(), last, ROWS * 576 * 2, cudaMemcpyDeviceToHost));
    for (int i = 0; i < ROWS * 576; i++) {
        int k = i / 128 * 16 + (i / 4 % 4) * 2 + i % 2 + (i / 2 % 2) * 8, m = i / 16 % 8;
        rows[i] = found[pairs ? spot32(k, m) : i];
    }
    CK(cudaFree(pool));
    CK(cudaFree(progress));
    CK(cudaFree(turns));
    return {times[3] / 100, rows};
}

template <bool WAITS> Timed waited(const __nv_bfloat16* w) {
    return timed(false, [&](cudaStream_t s, uint32_t* pool, uint32_t*, uint32_t*) {
        const __nv_bfloat16* at = w;
        for (int l = 0; l < LAYERS; l++) {
            auto rows = [&](int i) { return pool + (size_t)(l * KERNELS + i) * WORDS; };
            launch(product<WAITS, 576, 1, false>, 60, 32, 36 * 512 + 576 * 16, s, at, rows(0), rows(1), rows(0));
            at += 960 * 576;
            launch(copy<WAITS>, 24, 128, 0, s, rows(1), rows(2), 8 * 20);
            launch(copy<WAITS>, 24, 128, 0, s, rows(2), rows(3), 8 * 12);
            launch(product<WAITS, 576, 1, true>, 36, 32, 36 * 512 + 576 * 16, s, at, rows(3), rows(4), rows(0));
            at += 576 * 576;
            launch(product<WAITS, 576, 2, false>, 96, 32, 36 * 1024 + 576 * 16, s, at, rows(4), rows(5), rows(0));
            at += 3072 * 576;
            launch(product<WAITS, 1536, 1, true>, 36, 32, 96 * 512 + 1536 * 16, s, at, rows(5), rows(6), rows(4));
            at += 1536 * 576;
        }
    });
}

template <int D, bool CHECK> Timed polled(const __nv_bfloat16* w) {
    return timed(true, [&](cudaStream_t s, uint32_t* pool, uint32_t* progress, uint32_t* turns) {
        const __nv_bfloat16* at = w;
        int n = 0;
        for (int l = 0; l < LAYERS; l++) {
            auto rows = [&](int i) { return pool + (size_t)(l * KERNELS + i) * WORDS; };
            launch(polled_product<D, CHECK, 576, 1, false>, 60, 32, 36 * 512 + 576 * 16, s, at, rows(0), rows(1), rows(0),
                   progress, turns, ++n, HALF);
            at += 960 * 576;
            launch(polled_copy<D>, 24, 128, 0, s, rows(1), rows(2), 8 * 20, progress, turns, ++n, HALF);
            launch(polled_copy<D>, 24, 128, 0, s, rows(2), rows(3), 8 * 12, progress, turns, ++n, HALF);
            launch(polled_product<D, CHECK, 576, 1, true>, 36, 32, 36 * 512 + 576 * 16, s, at, rows(3), rows(4), rows(0),
                   progress, turns, ++n, HALF);
            at += 576 * 576;
            launch(polled_product<D, CHECK, 576, 2, false>, 96, 32, 36 * 1024 + 576 * 16, s, at, rows(4), rows(5),
                   rows(0), progress, turns, ++n, HALF);
            at += 3072 * 576;
            launch(polled_product<D, CHECK, 1536, 1, true>, 36, 32, 96 * 512 + 1536 * 16, s, at, rows(5), rows(6),
                   rows(4), progress, turns, ++n, HALF);
            at += 1536 * 576;
        }
    });
}

int main() {
    size_t n = (size_t)LAYERS * (960 + 576 + 3072 + 1536) * 576;
    __nv_bfloat16* w;
    CK(cudaMalloc(&w, n * 2));
    fill<<<1024, 256>>>(w, n);
    CK(cudaDeviceSynchronize());
    for (int turn = 0; turn < 2; turn++) {
        Timed usual = waited<true>(w);
        printf("{\"wait\": %.4f, \"launches alone\": %.4f", usual.ms, waited<false>(w).ms);
        auto told = [&](const char* name, Timed t) {
            int differ = 0;
            for (int i = 0; i < ROWS * 576; i++) differ += t.rows[i] != usual.rows[i];
            printf(", \"%s\": [%.4f, %d]", name, t.ms, differ);
            fflush(stdout);
        };
        told("free after", polled<0, false>(w)), told("free check", polled<0, true>(w));
        told("1 after", polled<1, false>(w)), told("2 after", polled<2, false>(w)), told("3 after", polled<3, false>(w));
        told("1 check", polled<1, true>(w)), told("2 check", polled<2, true>(w)), told("3 check", polled<3, true>(w));
        printf("}\n");
    }
}
