/* The first half of the cut of forest.py in C: order the tables, find the paths that sequences share.
 *
 * Compiled as one with forest_cut.c, forest_pack.c and forest_step.c, which follow. forest.py, forest_paths.py and
 * token_cuts.py are the definition and explain every step; functions here carry their names. Their constants come in
 * as -D options (see native_cut.py). The only global is a spare chunk of memory, which whoever frees one leaves and
 * whoever needs one takes, as fresh pages cost time.
 */
#include <math.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t i32;
typedef int64_t i64;

enum { HEIGHTS = 4, TO_THE_END = INT32_MAX, CHUNK = 1 << 18, FEW_KEYS = 48 };
static const i32 TILE_ROWS[HEIGHTS] = {16, 32, 64, 128};

/* What `cut` needs beside the batch; mirrored by native_cut.Batch. */
typedef struct {
    const i32 *tables, *lens, *query_lens, *query_starts;
    i64 num_seqs, width, stride, block_size, group_size, kv_bytes_per_token, v_head_dim, item_overhead_bytes;
    double min_gain_bytes;
    i64 programs[HEIGHTS][2][2]; /* by height, presence of tall tiles, whether they run beside */
    i64 persistent, num_sms, num_kv_heads, sm_step, per_sm[HEIGHTS]; /* for tall and narrow tiles on SMs of their own */
    i64 with_tall[HEIGHTS], beside_tall[HEIGHTS]; /* programs of an SM beside tall tiles: alone on it, with one */
} Batch;

/* Facts of the cut: how much `pack` will write; mirrored by forest_pack.CutFacts. */
typedef struct {
    i64 num_rows, num_merge_rows, num_parts, unique_tokens, growable, tall, tall_sms;
    i64 items[HEIGHTS], programs[HEIGHTS];
} Sizes;

typedef struct Chunk {
    struct Chunk *next;
    size_t used, size;
} Chunk;

typedef struct { i64 row0, row1, begin, end, table, leaf; } Segment;
typedef struct { i32 height, row0, rows, begin, end, table, leaf; } Tile;
typedef struct { i32 row0, rows, table, begin, end, part, after, seen; } Piece;
typedef struct { const i32 *table; i64 blocks, seq; } Path;

typedef struct {
    const Batch *in;
    Sizes *sizes;
    Chunk *memory;
    jmp_buf failed;
    i64 num_active, num_rows, num_segments, num_leaves, num_tiles, num_pieces;
    Path *order;                 /* active sequences, equal prefixes side by side */
    i64 *lcp;                    /* common blocks of neighbours */
    i32 *rows, *limits, *backs;  /* by sorted row: row of q, tokens seen, query tokens after it */
    Segment *segments;
    Tile *tiles;
    Piece *pieces;
    i64 *starts[HEIGHTS];        /* first piece of each program, within its height */
    i32 *merge_rows, *merge_starts, *merge_parts;
} Cut;

static _Atomic(Chunk *) spare;

static void *reserve(Cut *c, i64 count, size_t width) {
    size_t bytes = ((size_t)count * width + 15) & ~(size_t)15;
    if (!c->memory || c->memory->size - c->memory->used < bytes) {
        size_t size = bytes > CHUNK ? bytes : CHUNK;
        Chunk *chunk = size == CHUNK ? atomic_exchange(&spare, NULL) : NULL;
        if (!chunk) chunk = malloc(sizeof(Chunk) + 16 + size);
        if (!chunk) longjmp(c->failed, 1);
        *chunk = (Chunk){c->memory, 0, size};
        c->memory = chunk;
    }
    char *base = (char *)(((uintptr_t)(c->memory + 1) + 15) & ~(uintptr_t)15);
    void *place = base + c->memory->used;
    c->memory->used += bytes;
    return place;
}

static void release(Cut *c) {
    for (Chunk *chunk = c->memory, *next; chunk; chunk = next) {
        next = chunk->next;
        if (chunk->size == CHUNK) chunk = atomic_exchange(&spare, chunk);
        free(chunk);
    }
    free(c);
}

static i64 ceil_div(i64 a, i64 b) { /* a short division where it does, which most processors do much faster */
    uint64_t sum = (uint64_t)(a + b - 1), by = (uint64_t)b;
    return (sum | by) >> 32 ? (i64)(sum / by) : (i64)((uint32_t)sum / (uint32_t)by);
}

static i64 min64(i64 a, i64 b) { return a < b ? a : b; }
static i64 max64(i64 a, i64 b) { return a > b ? a : b; }

static void insert_keys(i64 *keys, i64 n) {
    for (i64 i = 1, at; i < n; i++) {
        i64 key = keys[i];
        for (at = i; at && keys[at - 1] > key; at--) keys[at] = keys[at - 1];
        keys[at] = key;
    }
}

/* Sort keys ascending; the lowest `ordered` bits do so already among equals. `other` is room for as many.
 * Few keys by insertion, others by their bytes, the last one first, without those that all have in common. */
static void sort_keys(i64 *keys, i64 *other, i64 n, int ordered) {
    if (n <= FEW_KEYS) {
        insert_keys(keys, n);
        return;
    }
    const uint64_t sign = (uint64_t)1 << 63;
    uint64_t differ = 0;
    for (i64 i = 1; i < n; i++) differ |= (uint64_t)(keys[i] ^ keys[0]);
    i64 *from = keys, *to = other;
    for (int shift = ordered; shift < 64; shift += 8) {
        uint32_t next[257] = {0};
        if (!(differ >> shift & 255)) continue;
        for (i64 i = 0; i < n; i++) next[(((uint64_t)from[i] ^ sign) >> shift & 255) + 1]++;
        for (int digit = 0; digit < 255; digit++) next[digit + 1] += next[digit];
        for (i64 i = 0; i < n; i++) to[next[((uint64_t)from[i] ^ sign) >> shift & 255]++] = from[i];
        i64 *swap = from;
        from = to;
        to = swap;
    }
    if (from != keys) memcpy(keys, from, (size_t)n * sizeof(i64));
}

/* Return the first index from `i` on where two tables differ, or `end`. */
static i64 first_difference(const i32 *a, const i32 *b, i64 i, i64 end) {
    while (i + 64 <= end && memcmp(a + i, b + i, 64 * sizeof(i32)) == 0) i += 64;
    for (i64 x, y; i + 2 <= end; i += 2) {
        memcpy(&x, a + i, sizeof(x)), memcpy(&y, b + i, sizeof(y));
        if (x != y) break;
    }
    while (i < end && a[i] == b[i]) i++;
    return i;
}

/* Where a path sorts among those that share its first `at` blocks: by the bytes of the next one, ended paths last. */
static i64 sort_value(const Path *path, i64 at) {
    const unsigned char *next = (const unsigned char *)(path->table + at);
    if (at == path->blocks) return (i64)1 << 32;
    return (i64)next[0] << 24 | (i64)next[1] << 16 | (i64)next[2] << 8 | next[3];
}

/* Sort paths [lo, hi) that share their first block: by the first one that not all share, then each class again. */
static void sort_group(Cut *c, i64 lo, i64 hi, i64 *keys, i64 *other, Path *held, i64 *work) {
    enum { POSITION_BITS = 30 };
    i64 top = 0;
    work[top++] = lo, work[top++] = hi, work[top++] = 1;
    while (top) {
        i64 same, depth = work[--top];
        hi = work[--top], lo = work[--top];
        same = c->order[lo].blocks;
        for (i64 i = lo + 1; i < hi; i++) {
            i64 most = min64(same, c->order[i].blocks);
            same = first_difference(c->order[lo].table, c->order[i].table, min64(depth, most), most);
        }
        for (i64 i = lo; i < hi; i++) {
            keys[i - lo] = sort_value(&c->order[i], same) << POSITION_BITS | (i - lo);
            held[i - lo] = c->order[i];
        }
        sort_keys(keys, other, hi - lo, POSITION_BITS);
        for (i64 i = lo, first = lo; i < hi; i++) {
            i64 value = keys[i - lo] >> POSITION_BITS, next = i + 1 < hi ? keys[i + 1 - lo] >> POSITION_BITS : -1;
            c->order[i] = held[keys[i - lo] & (((i64)1 << POSITION_BITS) - 1)];
            if (i + 1 < hi) c->lcp[i] = same;
            if (value == next) continue;
            if (i > first && value >> 32 == 0) work[top++] = first, work[top++] = i + 1, work[top++] = same + 1;
            first = i + 1;
        }
    }
}

static void sort_tables(Cut *c) {
    const Batch *in = c->in;
    i64 n = c->num_active;
    i64 *keys = reserve(c, n, sizeof(i64)), *other = reserve(c, n, sizeof(i64));
    i64 *work = reserve(c, 3 * n + 3, sizeof(i64));
    Path *held = reserve(c, n, sizeof(Path));
    if (n < 2 || in->width == 0) return;
    for (i64 i = 0; i < n; i++) {
        i64 first = c->order[i].blocks > 0 ? c->order[i].table[0] : -1 - i;
        keys[i] = first * ((i64)1 << 32) + i;
        held[i] = c->order[i];
    }
    sort_keys(keys, other, n, 32);
    for (i64 i = 0; i < n; i++) c->order[i] = held[keys[i] & UINT32_MAX];
    i64 *first = reserve(c, n, sizeof(i64));
    for (i64 i = 0; i < n; i++) first[i] = keys[i] >> 32;
    for (i64 lo = 0, hi; lo < n; lo = hi) {
        for (hi = lo + 1; hi < n && first[hi] == first[lo];) hi++;
        if (hi - lo > 1) sort_group(c, lo, hi, keys, other, held, work);
    }
}

/* Order the active sequences and list their query rows in that order. */
static void sort_batch(Cut *c) {
    const Batch *in = c->in;
    c->order = reserve(c, in->num_seqs, sizeof(Path));
    for (i64 i = 0; i < in->num_seqs; i++)
        if (in->query_lens[i] > 0)
            c->order[c->num_active++] = (Path){in->tables + i * in->stride, ceil_div(in->lens[i], in->block_size), i};
    c->lcp = memset(reserve(c, c->num_active, sizeof(i64)), 0, (size_t)c->num_active * sizeof(i64));
    sort_tables(c);
    c->num_rows = in->query_starts[in->num_seqs];
    c->rows = reserve(c, c->num_rows, sizeof(i32));
    c->limits = reserve(c, c->num_rows, sizeof(i32));
    c->backs = reserve(c, c->num_rows, sizeof(i32));
    for (i64 i = 0, at = 0; i < c->num_active; i++) {
        i64 seq = c->order[i].seq;
        for (i32 row = in->query_starts[seq]; row < in->query_starts[seq + 1]; row++, at++) {
            c->rows[at] = row;
            c->backs[at] = in->query_starts[seq + 1] - 1 - row;
            c->limits[at] = (i32)max64(in->lens[seq] - c->backs[at], 0);
        }
    }
}

/* Keep an interval (lo, hi, depth) of neighbours [lo, hi) that share `depth` blocks as a segment if it pays. */
static void keep_interval(Cut *c, const i64 *interval, const i64 *rows_before, const i64 *tiles_before, i64 *done) {
    const Batch *in = c->in;
    i64 lo = interval[0], hi = interval[1], depth = interval[2];
    i64 longest = 0;
    for (i64 i = lo; i < hi; i++) longest = max64(longest, in->lens[c->order[i].seq]);
    i64 begin = done[lo], end = min64(depth * in->block_size, longest), rows = rows_before[hi] - rows_before[lo];
    i64 saved = tiles_before[hi] - tiles_before[lo] - ceil_div(rows * in->group_size, TILE_ROWS[HEIGHTS - 1]);
    i64 state_bytes = 8 * in->group_size * in->v_head_dim;
    i64 gain = saved * (end - begin) * in->kv_bytes_per_token - rows * state_bytes - in->item_overhead_bytes;
    if (!((double)gain >= in->min_gain_bytes)) return;
    c->segments[c->num_segments++] = (Segment){rows_before[lo], rows_before[hi], begin, end, c->order[lo].seq, 0};
    for (i64 i = lo; i < hi; i++) done[i] = end;
}

static void find_segments(Cut *c) {
    const Batch *in = c->in;
    i64 n = c->num_active, found = 0, top = 0;
    i64 *rows_before = reserve(c, n + 1, sizeof(i64)), *tiles_before = reserve(c, n + 1, sizeof(i64));
    i64 *done = reserve(c, n, sizeof(i64)), *stack = reserve(c, 2 * n + 2, sizeof(i64));
    i64(*intervals)[3] = reserve(c, n, sizeof(*intervals));
    c->segments = reserve(c, 2 * n, sizeof(Segment));
    rows_before[0] = tiles_before[0] = 0;
    for (i64 i = 0; i < n; i++) {
        i64 rows = in->query_lens[c->order[i].seq];
        rows_before[i + 1] = rows_before[i] + rows;
        tiles_before[i + 1] = tiles_before[i] + ceil_div(rows * in->group_size, TILE_ROWS[HEIGHTS - 1]);
        done[i] = 0;
    }
    stack[top++] = 0, stack[top++] = 0;
    for (i64 i = 0; i < n; i++) {
        i64 depth = i + 1 < n ? c->lcp[i] : 0, lo = i;
        while (stack[top - 1] > depth) {
            lo = stack[top - 2];
            intervals[found][0] = lo, intervals[found][1] = i + 1, intervals[found++][2] = stack[top - 1];
            top -= 2;
        }
        if (stack[top - 1] < depth) stack[top++] = lo, stack[top++] = depth;
    }
    while (found--) keep_interval(c, intervals[found], rows_before, tiles_before, done);
    c->sizes->unique_tokens = 0;
    for (i64 i = 0; i < n; i++) {
        i64 seq = c->order[i].seq;
        if (in->lens[seq] <= done[i]) continue;
        c->segments[c->num_segments++] = (Segment){rows_before[i], rows_before[i + 1], done[i], in->lens[seq], seq, 1};
        c->num_leaves++;
    }
    for (i64 i = 0; i < c->num_segments; i++) c->sizes->unique_tokens += c->segments[i].end - c->segments[i].begin;
}
