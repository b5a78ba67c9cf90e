// The layers of a forward pass in one parallel region. model/block.py says what a layer computes; this is the same,
// operation by operation, with the same roundings. The structures have the fields of layers.py.
//
// Threads meet at barriers, where one needs what others have computed. To prepare a single row takes less time than a
// barrier. So each thread prepares it for itself, in its own memory.
#include "shares.h"

#include <omp.h>
#include <stdlib.h>

enum { CACHE_LINE_BYTES = 64, ROWS_ALONE = 1 };

typedef struct {
    const Matrix *pieces;
    int64_t count, outputs;
} Linear;

typedef struct {
    Linear qkv, output, gate_up, down;
    const bf16 *before_attention, *after_attention, *before_mlp, *after_mlp; // weights of norms, or NULL
    const bf16 *bias, *q_norm, *k_norm;                                      // or NULL
    int64_t norms_whole; // whether the norms of Q and of K span all heads
    int64_t rope; // the kind of rotation
    double scale, cap; // see AttentionForm; 0 is no cap
} Layer;

typedef struct {
    const Layer *layers;
    int64_t count, hidden, inter, heads, kv_heads, head_dim, gelu;
    double eps, residual_scale;
} Layers;

// What layers see that share a group in the cache and a window; 0 is none.
typedef struct {
    int64_t group, window;
} View;

// A layer's part of the cache.
typedef struct {
    void *keys, *values;
    float *key_scales, *value_scales;
    int64_t view;
} Cells;

// Some sequences of a step in a group of layers; see paged_attention.
typedef struct {
    int64_t group, count;
    const int64_t *lengths;
    const int32_t *tables;
    int64_t table_stride;
} Sequences;

typedef struct {
    int64_t rows;
    bf16 *residual; // [rows, hidden]: the embedding, then the residual after the last layer
    bf16 *added;    // [rows, hidden]: receives what is still to be added
    const float *const *angles; // for each kind of rotation cosines and sines, [rows, head_dim / 2]
    const bf16 *query_growth;   // [rows], or NULL
    const int64_t *const *slots; // for each group of layers, [rows]
    const Cells *cells;          // of each layer
    const View *views;
    int64_t view_count, kv_form, block_size;
    const Sequences *sequences;
    int64_t sequence_count;
} Step;

// What all threads share. Parts of the memory that each thread has to itself begin `..._size` numbers apart.
typedef struct {
    const Layers *model;
    const Step *step;
    int threads;
    int alone;                      // whether each thread prepares all rows for itself
    bf16 *qkv, *attended, *gate_up; // gate_up takes the memory of the others
    bf16 *inputs, *residuals;       // for products, and unless the step's own serves all
    uint8_t *rounded;
    int64_t inputs_size, residuals_size, rounded_size;
    float *partials; // of each of the step's sequences
    int64_t partials_size;
    struct plan *plans; // [views][sequences]
} Pass;

typedef struct {
    const Pass *pass;
    int number, threads;
    int64_t first, end; // rows to prepare
    bf16 *residual, *input;
    uint8_t *rounded;
} Thread;

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

static void add_row(bf16 *to, const bf16 *from, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) {
        const floats sum = load_some_bf16(to + i, width - i) + load_some_bf16(from + i, width - i);
        store_some_bf16(to + i, sum, width - i);
    }
}

static void scale_row(const bf16 *from, bf16 *to, float by, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES)
        store_some_bf16(to + i, load_some_bf16(from + i, width - i) * splat(by), width - i);
}

// Branch.leave: what is added to the residual, in `to` unless it is `from` itself. Both may be the same.
static const bf16 *leave(const Layers *model, const bf16 *from, const bf16 *after, bf16 *to) {
    if (after) {
        KERNEL(norm_row)(from, after, to, model->hidden, (float)model->eps);
        from = to;
    }
    if (model->residual_scale == 1.0) return from;
    scale_row(from, to, (float)model->residual_scale, model->hidden);
    return to;
}

// Branch.enter: the input of attention or MLP, after the branch before, whose norm is `after`. The first has none.
static void enter(const Thread *t, int first, const bf16 *after, const bf16 *before) {
    const Layers *model = t->pass->model;
    const int64_t hidden = model->hidden;
    for (int64_t row = t->first; row < t->end; row++) {
        bf16 *residual = t->residual + row * hidden, *input = t->input + row * hidden;
        const bf16 *added = t->pass->step->added + row * hidden;
        if (!first) added = leave(model, added, after, input);
        if (before && first) {
            KERNEL(norm_row)(residual, before, input, hidden, (float)model->eps);
        } else if (before) {
            KERNEL(add_norm_row)(added, residual, before, input, hidden, (float)model->eps);
        } else {
            if (!first) add_row(residual, added, hidden);
            memcpy(input, residual, hidden * sizeof(bf16));
        }
    }
}

static void gate(const Thread *t) {
    const int64_t inter = t->pass->model->inter;
    for (int64_t row = t->first; row < t->end; row++) {
        const bf16 *gate_up = t->pass->gate_up + row * 2 * inter;
        if (t->pass->model->gelu) {
            KERNEL(gelu_row)(gate_up, t->input + row * inter, inter);
        } else {
            KERNEL(silu_row)(gate_up, t->input + row * inter, inter);
        }
    }
}

static int64_t whole_lines(int64_t bytes) {
    return (bytes + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES * CACHE_LINE_BYTES;
}

// Of a piece's rounded activations.
static int64_t rounded_bytes(const Matrix *piece, int64_t rows, int threads) {
    if (piece->bits == BF16_BITS) return 0;
    const int bits = (int)piece->bits;
    return whole_lines(KERNEL(quantised_work_bytes)(rows, piece->columns, bits, piece->group, threads));
}

// y = x times the transpose of a matrix. The threads have x's rows ready, each its own or the rows of `first` to `end`.
static void multiply(const Thread *t, const Linear *linear, const bf16 *x, bf16 *y) {
    const int64_t rows = t->pass->step->rows;
    const int alone = t->pass->alone, share = alone ? 0 : t->number, shares = alone ? 1 : t->threads;
    if (!alone) {
#pragma omp barrier
    }
    uint8_t *rounded = t->rounded;
    for (int64_t i = 0; i < linear->count; i++) {
        const Matrix *piece = &linear->pieces[i];
        if (piece->bits == BF16_BITS) continue;
        KERNEL(round_activations)(piece, x, rounded, rows, share, shares);
        rounded += rounded_bytes(piece, rows, t->pass->threads);
    }
    if (!alone && rounded != t->rounded) {
#pragma omp barrier
    }
    rounded = t->rounded;
    for (int64_t i = 0; i < linear->count; i++) {
        const Matrix *piece = &linear->pieces[i];
        if (piece->bits == BF16_BITS) {
            KERNEL(multiply_bf16)(piece, x, y, linear->outputs, 0, rows, t->threads);
        } else {
            KERNEL(multiply_rounded)(piece, rounded, y, linear->outputs, 0, rows, t->threads);
            rounded += rounded_bytes(piece, rows, t->pass->threads);
        }
        y += piece->outputs;
    }
#pragma omp barrier
}

// What happens to Q, K and V between their product and attention.
static void finish_qkv(const Pass *pass, const Layer *layer, const Cells *cells, int64_t row) {
    const Layers *model = pass->model;
    const Step *step = pass->step;
    const int64_t heads = model->heads, kv_heads = model->kv_heads, dim = model->head_dim;
    const float eps = (float)model->eps;
    bf16 *here = pass->qkv + row * layer->qkv.outputs;
    if (layer->bias) add_row(here, layer->bias, layer->qkv.outputs);
    if (layer->q_norm && layer->norms_whole) {
        KERNEL(norm_row)(here, layer->q_norm, here, heads * dim, eps);
        KERNEL(norm_row)(here + heads * dim, layer->k_norm, here + heads * dim, kv_heads * dim, eps);
    } else if (layer->q_norm) {
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            const bf16 *weight = head < heads ? layer->q_norm : layer->k_norm;
            KERNEL(norm_row)(here + head * dim, weight, here + head * dim, dim, eps);
        }
    }
    if (step->query_growth) {
        float growth;
        store_some(&growth, load_some_bf16(step->query_growth + row, 1), 1);
        scale_row(here, here, growth, heads * dim);
    }
    const int64_t at = row * dim / 2;
    const float *const *angles = step->angles + 2 * layer->rope;
    KERNEL(rope_and_write_row)(here, angles[0] + at, angles[1] + at, step->slots[step->views[cells->view].group][row],
                               cells->keys, cells->values, cells->key_scales, cells->value_scales,
                               (int)step->kv_form, heads, kv_heads, dim);
}

// Without what layers differ in.
static struct problem problem_of(const Pass *pass, int64_t s) {
    const Layers *model = pass->model;
    const Step *step = pass->step;
    const Sequences *sequences = &step->sequences[s];
    return (struct problem){
        .qkv = pass->qkv,
        .form = (enum kv_form)step->kv_form,
        .out = pass->attended,
        .first_rows = sequences->lengths,
        .query_lengths = sequences->lengths + sequences->count,
        .context_lengths = sequences->lengths + 2 * sequences->count,
        .tables = sequences->tables,
        .table_stride = sequences->table_stride,
        .block_size = step->block_size,
        .heads = model->heads,
        .kv_heads = model->kv_heads,
        .head_dim = model->head_dim,
        .group = model->heads / model->kv_heads,
        .partials = pass->partials + s * pass->partials_size,
    };
}

static void attend(const Pass *pass, const Layer *layer, const Cells *cells) {
    const Step *step = pass->step;
    const View *view = &step->views[cells->view];
    for (int64_t s = 0; s < step->sequence_count; s++) {
        if (step->sequences[s].group != view->group) continue;
        struct problem p = problem_of(pass, s);
        p.keys = cells->keys, p.values = cells->values;
        p.key_scales = cells->key_scales, p.value_scales = cells->value_scales;
        set_form(&p, (float)layer->scale, view->window, (float)layer->cap);
        KERNEL(attend_planned)(&p, &pass->plans[cells->view * step->sequence_count + s]);
    }
}

static void run_layer(const Thread *t, int64_t l) {
    const Pass *pass = t->pass;
    const Layer *layer = &pass->model->layers[l];
    const Cells *cells = &pass->step->cells[l];
    enter(t, l == 0, l == 0 ? NULL : layer[-1].after_mlp, layer->before_attention);
    multiply(t, &layer->qkv, t->input, pass->qkv);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < pass->step->rows; row++) finish_qkv(pass, layer, cells, row);
    attend(pass, layer, cells);
    multiply(t, &layer->output, pass->attended, pass->step->added);
    enter(t, 0, layer->after_attention, layer->before_mlp);
    multiply(t, &layer->gate_up, t->input, pass->gate_up);
    gate(t);
    multiply(t, &layer->down, t->input, pass->step->added);
}

// The most that the pieces of any matrix take.
static int64_t most_rounded_bytes(const Layers *model, int64_t rows, int threads) {
    int64_t most = 0;
    for (int64_t l = 0; l < model->count; l++) {
        const Linear *linears = &model->layers[l].qkv;
        for (int i = 0; i < 4; i++) {
            int64_t bytes = 0;
            for (int64_t piece = 0; piece < linears[i].count; piece++)
                bytes += rounded_bytes(&linears[i].pieces[piece], rows, threads);
            most = larger_of(most, bytes);
        }
    }
    return most;
}

// Returns whether there was memory.
static int plan_all(const Pass *pass) {
    const Step *step = pass->step;
    for (int64_t v = 0; v < step->view_count; v++)
        for (int64_t s = 0; s < step->sequence_count; s++) {
            if (step->sequences[s].group != step->views[v].group) continue;
            struct problem p = problem_of(pass, s);
            set_form(&p, 1.0f, step->views[v].window, 0.0f);
            struct plan *made = &pass->plans[v * step->sequence_count + s];
            if (KERNEL(plan_attention)(&p, step->sequences[s].count, pass->threads, made)) return 0;
        }
    return 1;
}

static void *taken(uint8_t **next, int64_t bytes) {
    uint8_t *part = *next;
    *next += whole_lines(bytes);
    return part;
}

// Divides the memory of a pass, and returns its end. From NULL, that is the bytes it needs.
static uint8_t *lay_out(Pass *pass, uint8_t *next) {
    const Layers *model = pass->model;
    const Step *step = pass->step;
    const int64_t rows = step->rows, row = rows * sizeof(bf16), dim = model->head_dim;
    const int64_t owners = pass->alone ? pass->threads : 1;
    uint8_t *same = next;
    pass->qkv = taken(&next, row * (model->heads + 2 * model->kv_heads) * dim);
    pass->attended = taken(&next, row * model->heads * dim);
    pass->gate_up = taken(&same, row * 2 * model->inter);
    if (same > next) next = same;
    pass->inputs_size = rows * larger_of(model->hidden, model->inter);
    pass->inputs = taken(&next, owners * pass->inputs_size * sizeof(bf16));
    pass->residuals_size = pass->alone ? rows * model->hidden : 0;
    pass->residuals = taken(&next, owners * pass->residuals_size * sizeof(bf16));
    pass->rounded_size = most_rounded_bytes(model, rows, pass->threads);
    pass->rounded = taken(&next, owners * pass->rounded_size);
    pass->partials_size = 0;
    for (int64_t s = 0; s < step->sequence_count; s++) {
        const Sequences *sequences = &step->sequences[s];
        const int64_t count = KERNEL(paged_attention_partials)(sequences->lengths, sequences->count);
        pass->partials_size = larger_of(pass->partials_size, count * model->heads * (dim + 2));
    }
    pass->partials = taken(&next, step->sequence_count * pass->partials_size * sizeof(float));
    pass->plans = taken(&next, step->view_count * step->sequence_count * sizeof(struct plan));
    return next;
}

// The calling thread's part of a pass.
static void run_share(const Pass *pass) {
    const Layers *model = pass->model;
    const Step *step = pass->step;
    const int number = omp_get_thread_num(), threads = omp_get_num_threads(), alone = pass->alone;
    const int64_t rows = step->rows, owner = alone ? number : 0, row_bytes = model->hidden * sizeof(bf16);
    const Thread t = {
        .pass = pass,
        .number = number,
        .threads = threads,
        .first = alone ? 0 : rows * number / threads,
        .end = alone ? rows : rows * (number + 1) / threads,
        .residual = alone ? pass->residuals + owner * pass->residuals_size : step->residual,
        .input = pass->inputs + owner * pass->inputs_size,
        .rounded = pass->rounded + owner * pass->rounded_size,
    };
    if (alone) memcpy(t.residual, step->residual, rows * row_bytes);
    for (int64_t l = 0; l < model->count; l++) run_layer(&t, l);
    const bf16 *after = model->layers[model->count - 1].after_mlp;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = row * model->hidden;
        leave(model, step->added + at, after, step->added + at);
        if (alone) memcpy(step->residual + at, t.residual + at, row_bytes);
    }
}

// Returns -1 if there is no memory for it.
int KERNEL(run_layers)(const Layers *model, const Step *step, int threads) {
    Pass pass = {.model = model, .step = step, .threads = threads, .alone = step->rows <= ROWS_ALONE};
    uint8_t *memory = aligned_alloc(CACHE_LINE_BYTES, (size_t)lay_out(&pass, NULL));
    if (memory == NULL) return -1;
    lay_out(&pass, memory);
    const int64_t plans = step->view_count * step->sequence_count;
    memset(pass.plans, 0, plans * sizeof(struct plan));
    const int planned = plan_all(&pass);
    if (planned) {
#pragma omp parallel num_threads(threads)
        run_share(&pass);
    }
    for (int64_t i = 0; i < plans; i++) free(pass.plans[i].units);
    free(memory);
    return planned ? 0 : -1;
}
