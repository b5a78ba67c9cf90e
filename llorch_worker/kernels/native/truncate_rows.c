// Truncates rows of probabilities by min_p, top_k and top_p: keeps the tokens at or above a threshold.
//
// No row is sorted. The threshold is found digit by digit in the bits of the floats, by counting tokens
// or adding up their mass, so it is exact. engine/sampling/truncation.py does the same in NumPy.
#include <math.h>
#include <omp.h>
#include <string.h>

#include "bfloat16.h"

enum { MOST_BINS = 2048 };
static const int SHIFTS[] = {21, 10, 0}, BINS[] = {2048, 2048, 1024};

// Lowers a bound on float32 weights, whose exponentials have rounding errors.
static const double SLACK = 0.99;

// Keys sort as the values do: the bits of negative floats sort in reverse.
static inline uint32_t key_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return (uint32_t)bits ^ ((uint32_t)(bits >> 31) | 0x80000000u);
}

static inline float value_of(uint32_t key) {
    const uint32_t bits = key & 0x80000000u ? key ^ 0x80000000u : ~key;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Keeps the keys, and the masses if given, whose digit is `digit`; returns how many.
static long members(uint32_t *keys, float *masses, long count, int shift, int bins, uint32_t digit) {
    long kept = 0;
    for (long i = 0; i < count; i++) {
        const uint32_t key = keys[i];
        keys[kept] = key;
        if (masses) masses[kept] = masses[i];
        kept += ((key >> shift) & (uint32_t)(bins - 1)) == digit;
    }
    return kept;
}

// The k-th largest of `count` keys, 1 <= k <= count; the keys are overwritten.
static float kth_largest(uint32_t *keys, long count, long k) {
    uint32_t found = 0, counts[MOST_BINS];
    for (int d = 0; d < 3; d++) {
        memset(counts, 0, sizeof counts);
        for (long i = 0; i < count; i++) counts[(keys[i] >> SHIFTS[d]) & (uint32_t)(BINS[d] - 1)]++;
        int bin = BINS[d] - 1;
        while (k > counts[bin]) k -= counts[bin--];
        found |= (uint32_t)bin << SHIFTS[d];
        count = members(keys, 0, count, SHIFTS[d], BINS[d], (uint32_t)bin);
    }
    return value_of(found);
}

// The largest value such that the masses at and above it reach `target`, or the smallest value if
// rounding keeps the sum below it; both arrays are overwritten.
static float floor_reaching(uint32_t *keys, float *masses, long count, double target) {
    uint32_t found = 0;
    double sums[MOST_BINS];
    for (int d = 0; d < 3; d++) {
        memset(sums, 0, sizeof sums);
        for (long i = 0; i < count; i++) {
            sums[(keys[i] >> SHIFTS[d]) & (uint32_t)(BINS[d] - 1)] += masses[i];
        }
        int bin = BINS[d] - 1, last = -1;
        double above = 0;
        for (; bin >= 0; bin--) {
            if (sums[bin] == 0) continue;
            last = bin;
            if (above + sums[bin] >= target) break;
            above += sums[bin];
        }
        if (bin < 0) above -= sums[last];
        target -= above;
        found |= (uint32_t)last << SHIFTS[d];
        count = members(keys, masses, count, SHIFTS[d], BINS[d], (uint32_t)last);
    }
    return value_of(found);
}

// Sixteen values from place i on; beyond the row's end values are -inf and weights 0.
static inline __m512 values_at(const float *values, long i, long vocab) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    return _mm512_mask_loadu_ps(nothing, first_lanes(vocab - i), values + i);
}

static inline __m512 weights_at(const float *weights, long i, long vocab) {
    return _mm512_maskz_loadu_ps(first_lanes(vocab - i), weights + i);
}

// The keys of the values at or above `bound`; returns how many.
static long keys_from(const float *values, long vocab, float bound, uint32_t *keys) {
    long count = 0;
    for (long i = 0; i < vocab; i += LANES) {
        const __m512 some = values_at(values, i, vocab);
        const __mmask16 high = _mm512_cmp_ps_mask(some, _mm512_set1_ps(bound), _CMP_GE_OQ);
        float chosen[LANES];
        const int found = __builtin_popcount(high & first_lanes(vocab - i));
        _mm512_storeu_ps(chosen, _mm512_maskz_compress_ps(high & first_lanes(vocab - i), some));
        for (int j = 0; j < found; j++) keys[count++] = key_of(chosen[j]);
    }
    return count;
}

static float kth_largest_of_row(const float *values, long vocab, long k, uint32_t *keys) {
    // At least k values lie at or above the k-th largest of the maxima of blocks, so few values are
    // left to search.
    const long block = 8 * LANES;
    long maxima = 0;
    for (long i = 0; i + block <= vocab; i += block) {
        __m512 top = _mm512_loadu_ps(values + i);
        for (int v = 1; v < 8; v++) top = _mm512_max_ps(top, _mm512_loadu_ps(values + i + v * LANES));
        float lanes[LANES];
        _mm512_storeu_ps(lanes, top);
        for (int j = 0; j < LANES; j++) keys[maxima++] = key_of(lanes[j]);
    }
    const float bound = k <= maxima ? kth_largest(keys, maxima, k) : -INFINITY;
    return kth_largest(keys, keys_from(values, vocab, bound, keys), k);
}

// The mass of the tokens at or above `floor`, and how many they are.
static double mass_from(
    const float *weights, const float *values, long vocab, float floor, long *count
) {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    *count = 0;
    for (long i = 0; i < vocab; i += LANES) {
        const __mmask16 kept = first_lanes(vocab - i) & _mm512_cmp_ps_mask(
            values_at(values, i, vocab), _mm512_set1_ps(floor), _CMP_GE_OQ
        );
        const __m512 some = _mm512_maskz_mov_ps(kept, weights_at(weights, i, vocab));
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(some)));
        const __m256d upper = _mm512_extractf64x4_pd(_mm512_castps_pd(some), 1);
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm256_castpd_ps(upper)));
        *count += __builtin_popcount(kept);
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

// Keys and masses of the tokens at or above `floor` that weigh `bound` or more; returns how many.
static long candidates(
    const float *weights, const float *values, long vocab, float floor, float bound,
    uint32_t *keys, float *masses
) {
    long count = 0;
    for (long i = 0; i < vocab; i += LANES) {
        const __m512 value = values_at(values, i, vocab), weight = weights_at(weights, i, vocab);
        const __mmask16 chosen = first_lanes(vocab - i)
            & _mm512_cmp_ps_mask(value, _mm512_set1_ps(floor), _CMP_GE_OQ)
            & _mm512_cmp_ps_mask(weight, _mm512_set1_ps(bound), _CMP_GE_OQ);
        // Whole vectors are written; the next store overwrites what lies beyond the last.
        _mm512_storeu_ps(masses + count, _mm512_maskz_compress_ps(chosen, weight));
        const __m512i bits = _mm512_castps_si512(_mm512_maskz_compress_ps(chosen, value));
        const __m512i flips = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(INT32_MIN));
        _mm512_storeu_si512(keys + count, _mm512_xor_si512(bits, flips));
        count += __builtin_popcount(chosen);
    }
    return count;
}

static float largest_of(const float *values, long vocab) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (long i = 0; i < vocab; i += LANES) top = _mm512_max_ps(top, values_at(values, i, vocab));
    return _mm512_reduce_max_ps(top);
}

static void truncate_row(
    float *weights, const float *values, long vocab, float log_min_p, long top_k, double top_p,
    uint32_t *keys, float *masses
) {
    if (isnan(weights[0])) return;  // a damaged row has no threshold
    float floor = largest_of(values, vocab) + log_min_p;
    if (top_k < vocab) floor = fmaxf(floor, kth_largest_of_row(values, vocab, top_k, keys));
    if (top_p < 1) {
        long count;
        double mass = mass_from(weights, values, vocab, floor, &count);
        if (count > top_k) {
            // top_p is a share of exactly top_k tokens: ties beyond them, at the floor, do not count.
            long tie = 0;
            while (values[tie] != floor) tie++;
            mass -= (double)(count - top_k) * weights[tie];
        }
        // The tokens below this bound together weigh less than what top_p leaves out.
        const float bound = (float)(SLACK * (1 - top_p) * mass / (double)count);
        const long heavy = candidates(weights, values, vocab, floor, bound, keys, masses);
        floor = fmaxf(floor, floor_reaching(keys, masses, heavy, top_p * mass));
    }
    for (long i = 0; i < vocab; i++) weights[i] = values[i] >= floor ? weights[i] : 0.0f;
}

// The bytes of `work` for one call: keys and masses for each thread, and a vector behind each.
long llorch_truncate_rows_work_bytes(long vocab, int threads) { return threads * 2 * (vocab + LANES) * 4; }

// Truncates `count` rows of weights[any][vocab] in place: row i, or rows[i] if rows is given.
void llorch_truncate_rows(
    float *weights, const float *values, const int64_t *rows, const float *log_min_p,
    const int64_t *top_k, const double *top_p, uint32_t *work, long count, long vocab, int threads
) {
#pragma omp parallel num_threads(threads)
    {
        uint32_t *keys = work + omp_get_thread_num() * 2 * (vocab + LANES);
        float *masses = (float *)(keys + vocab + LANES);
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < count; i++) {
            const long row = rows ? rows[i] : i;
            truncate_row(
                weights + row * vocab, values + row * vocab, vocab, log_min_p[i], top_k[i], top_p[i],
                keys, masses
            );
        }
    }
}
