// cache.cuh - what every kernel of phase 12 begins with: a few queries per sequence, and the cache that they look at.
//
//   q and o [batch, heads, queries, HEAD_DIM], lse [batch, heads, queries]; k and v [pages, kv_heads, page, HEAD_DIM].
// Key j of sequence b is row j % page of page table[b, j / page]. Without a table the cache is contiguous: sequence b
// is page b. Query i of a sequence stands beside its key length - queries + i, and sees the keys up to that one.
// `group` query heads read one key head; they and their queries are the rows that a key is read for, group * queries.
#pragma once
#include "simt/names.h"
#include "problem.cuh"

struct Cache {
    const void *q, *k, *v;
    void* o;
    float* lse;
    const int *table, *lengths;                                // [batch, width] or null; [batch]
    float *part_o, *part_lse;                                  // of parts of a sequence's keys; lse in units of log 2
    int* counters;                                             // how many parts have arrived: 0 before and after
    Strides q_stride, k_stride, v_stride, o_stride;            // in elements; `batch` of k and v is from page to page
    int64_t table_stride;
    int batch, kv_heads, group, queries;
    int page, width;                                           // keys of a page; pages that a sequence has room for
    int page_shift;                                            // page is 2^page_shift; -1 where it is no such number
    int more;                                                  // keys of each sequence beyond its length: new ones
    float scale;                                               // softmax(scale * q k^T), of any sign
    int splits, sms;                                           // parts of a sequence; multiprocessors of the device
    int pages;                                                 // of the cache
};

// Of a sequence, never more than it has room for: the next row of the table is another sequence's.
__device__ __forceinline__ int clamped(const Cache& c, int length) {
    return max(0, min(length + c.more, c.page * c.width));
}
__device__ __forceinline__ int length_of(const Cache& c, int b) { return clamped(c, c.lengths[b]); }
// The page of a key, its place there, and in 64 bits where its row begins: page * stride passes 2^31.
__device__ __forceinline__ int column_of(const Cache& c, int key) {    // of the table; a division is 20 instructions
    return c.page_shift < 0 ? (int)((unsigned)key / (unsigned)c.page) : key >> c.page_shift;
}
__device__ __forceinline__ int page_of(const Cache& c, int b, int key) {
    return c.table ? c.table[b * c.table_stride + column_of(c, key)] : b;
}
__device__ __forceinline__ int slot_of(const Cache& c, int key) { return key - column_of(c, key) * c.page; }
__device__ __forceinline__ const T* key_row(const void* cache, const Strides& stride, int page, int head, int slot) {
    return rows_of(cache, stride, page, head, slot);
}
// Row r of a key head's: query r % queries of head r / queries of the group. Most often there is one query.
__device__ __forceinline__ int head_of(const Cache& c, int r) {
    return c.queries == 1 ? r : (int)((unsigned)r / (unsigned)c.queries);
}
__device__ __forceinline__ int query_of(const Cache& c, int r) { return r - head_of(c, r) * c.queries; }
__device__ __forceinline__ const T* q_row(const Cache& c, int b, int kv_head, int r) {
    return rows_of(c.q, c.q_stride, b, kv_head * c.group + head_of(c, r), query_of(c, r));
}
__device__ __forceinline__ T* o_row(const Cache& c, int b, int kv_head, int r) {
    return rows_of(c.o, c.o_stride, b, kv_head * c.group + head_of(c, r), query_of(c, r));
}
// Where a row's lse stands: rows of a key head lie one behind the other.
__device__ __forceinline__ int64_t lse_row(const Cache& c, int b, int kv_head, int r) {
    return ((int64_t)b * c.kv_heads + kv_head) * c.group * c.queries + r;
}
#include "simt/names_end.h"
