// How a KV cache keeps numbers; paged_attention.py has them in the same order.
#pragma once

#include <stdint.h>

enum kv_form {
    KV_BF16,
    KV_FP8,  // e4m3 without infinities
    KV_INT8, // codes of -127 to 127, with one float32 scale a token and KV head
};

static inline int64_t bytes_of(enum kv_form form) { return form == KV_BF16 ? 2 : 1; }
