// Truncates rows of probabilities by min_p, top_k and top_p: keeps the tokens at or above a threshold.
//
// No row is sorted. The threshold is found digit by digit in the bits of the floats, by counting tokens
// or adding up their mass, so it is exact. kernels/torch_ops.py does the same by sorting.
#include <math.h>
#include <omp.h>

#include "vector.h"

enum { MOST_BINS = 2048 };
static const int SHIFTS[] = {21, 10, 0}, BINS[] = {2048, 2048, 1024};

// Lowers a bound on float32 weights, whose exponentials have rounding errors.
static const double SLACK = 0.99;

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

// A vector of values from place i on, -inf beyond the row's end.
static inline floats values_at(const float *values, long i, long vocab) {
    return load_some(values + i, vocab - i, splat(-INFINITY));
}

// Keys sort as the values do: the bits of negative floats sort in reverse. As the bits of floats.
static inline floats keys_of(floats values) {
    const ints bits = as_ints(values);
    return as_floats(bits_xor(bits, bits_or(shifted_right(bits, 31), splat_int(INT32_MIN))));
}

// The keys of the values at or above `bound`; returns how many.
static long keys_from(const float *values, long vocab, float bound, uint32_t *keys) {
    long count = 0;
    for (long i = 0; i < vocab; i += LANES) {
        const floats some = values_at(values, i, vocab);
        const mask high = at_least(some, splat(bound)) & first_lanes(vocab - i);
        // Whole vectors are written; the next store overwrites what lies beyond the last.
        store_chosen(keys + count, high, keys_of(some));
        count += __builtin_popcount(high);
    }
    return count;
}

static float kth_largest_of_row(const float *values, long vocab, long k, uint32_t *keys) {
    // At least k values lie at or above the k-th largest of the maxima of blocks, so few values are
    // left to search.
    const long block = 8 * LANES;
    long maxima = 0;
    for (long i = 0; i + block <= vocab; i += block) {
        floats top = load(values + i);
        for (int v = 1; v < 8; v++) top = larger(top, load(values + i + v * LANES));
        store((float *)(keys + maxima), keys_of(top));
        maxima += LANES;
    }
    const float bound = k <= maxima ? kth_largest(keys, maxima, k) : -INFINITY;
    return kth_largest(keys, keys_from(values, vocab, bound, keys), k);
}

// The mass of the tokens at or above `floor`, and how many they are.
static double mass_from(
    const float *weights, const float *values, long vocab, float floor, long *count
) {
    doubles sums = no_doubles();
    *count = 0;
    for (long i = 0; i < vocab; i += LANES) {
        const floats weight = load_some(weights + i, vocab - i, zeros());
        const floats value = values_at(values, i, vocab);
        const mask kept = at_least(value, splat(floor)) & first_lanes(vocab - i);
        sums = add_to_doubles(sums, chosen_or(kept, weight, zeros()));
        *count += __builtin_popcount(kept);
    }
    return sum_of_doubles(sums);
}

// Keys and masses of the tokens at or above `floor` that weigh `bound` or more; returns how many.
static long candidates(
    const float *weights, const float *values, long vocab, float floor, float bound,
    uint32_t *keys, float *masses
) {
    long count = 0;
    for (long i = 0; i < vocab; i += LANES) {
        const floats value = values_at(values, i, vocab);
        const floats weight = load_some(weights + i, vocab - i, zeros());
        const mask chosen = first_lanes(vocab - i) & at_least(value, splat(floor))
            & at_least(weight, splat(bound));
        store_chosen(masses + count, chosen, weight);
        store_chosen(keys + count, chosen, keys_of(value));
        count += __builtin_popcount(chosen);
    }
    return count;
}

static float largest_of_row(const float *values, long vocab) {
    floats top = splat(-INFINITY);
    for (long i = 0; i < vocab; i += LANES) top = larger(top, values_at(values, i, vocab));
    return largest_of(top);
}

static void truncate_row(
    float *weights, const float *values, long vocab, float log_min_p, long top_k, double top_p,
    uint32_t *keys, float *masses
) {
    if (isnan(weights[0])) return;  // a damaged row has no threshold
    float floor = largest_of_row(values, vocab) + log_min_p;
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
long KERNEL(truncate_rows_work_bytes)(long vocab, int threads) { return threads * 2 * (vocab + LANES) * 4; }

// Truncates `count` rows of weights[any][vocab] in place: row i, or rows[i] if rows is given.
void KERNEL(truncate_rows)(
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
