/* From one step's batch to the next of the same sequences: plan_step.py is the definition, this the same in C. */

/* What a watch knows of the last step, moved to the new one; mirrored by plan_step.Watch. */
typedef struct {
    i32 *tables, *lens;
    const i32 *planned; /* lengths that the cut was made for */
    i64 num_seqs, width, stride, room, block_size, max_growth, most;
} Watch;

/* A message is lengths, then rows, columns and blocks of the entries that changed, with room for `most` of each. */
static i32 *changes_of(const Watch *w, i32 *message) { return message + ceil_div(w->num_seqs, ALIGN) * ALIGN; }

/* Return whether the cut fits these lengths and tables so wide; new columns then hold -1, which no table names. */
static int make_room(const Watch *w, const i32 *lens, i64 width) {
    int fits = width <= w->room;
    for (i64 i = 0; i < w->num_seqs; i++) {
        i64 grown = (i64)lens[i] - w->planned[i];
        fits &= grown >= 0 && grown <= w->max_growth && lens[i] <= width * w->block_size;
    }
    if (fits && width > w->width)
        for (i64 i = 0; i < w->num_seqs; i++)
            memset(w->tables + i * w->stride + w->width, -1, (size_t)(width - w->width) * sizeof(i32));
    return fits;
}

/* Move the watch to new lengths, width and the `count` changes of the message, and complete that. */
static i64 move_to(Watch *w, const i32 *lens, i64 width, i64 count, i32 *message) {
    i32 *rows = changes_of(w, message), *columns = rows + w->most, *blocks = columns + w->most;
    for (i64 i = 0; i < count; i++) w->tables[rows[i] * w->stride + columns[i]] = blocks[i];
    for (i64 i = 0; i < count; i++) blocks[i] = w->tables[rows[i] * w->stride + columns[i]]; /* of doubles the last */
    memcpy(w->lens, lens, (size_t)w->num_seqs * sizeof(i32));
    memcpy(message, lens, (size_t)w->num_seqs * sizeof(i32));
    w->width = width;
    return count;
}

/* Move to given lengths and tables `[num_seqs, width]` (NULL: unchanged) and write the message. Return how many entries
 * changed, or -1 where the batch must be cut anew. */
i64 radixpool_compare(Watch *w, const i32 *lens, const i32 *tables, i64 width, i32 *message) {
    i32 *rows = changes_of(w, message), *columns = rows + w->most, *blocks = columns + w->most;
    i64 count = 0;
    if (!make_room(w, lens, width)) return -1;
    for (i64 i = 0; tables && i < w->num_seqs; i++) {
        const i32 *old = w->tables + i * w->stride, *table = tables + i * width;
        i64 used = ceil_div(w->lens[i], w->block_size);
        if (used > width || memcmp(old, table, (size_t)used * sizeof(i32))) return -1;
        for (i64 at = used; (at = first_difference(old, table, at, width)) < width; at++) {
            if (count == w->most) return -1;
            rows[count] = (i32)i, columns[count] = (i32)at, blocks[count++] = table[at];
        }
    }
    return move_to(w, lens, width, count, message);
}

/* Do the same where the caller names the `count` entries that changed; -1 also where they can't be those of a step. */
i64 radixpool_advance(Watch *w, const i32 *lens, const i32 *rows, const i32 *columns, const i32 *blocks, i64 count,
                      i32 *message) {
    i32 *changes = changes_of(w, message);
    i64 width = w->width;
    if (count > w->most) return -1;
    for (i64 i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= w->num_seqs || columns[i] < 0) return -1;
        if (columns[i] * w->block_size < w->lens[rows[i]]) return -1;
        width = max64(width, (i64)columns[i] + 1);
    }
    if (!make_room(w, lens, width)) return -1;
    memcpy(changes, rows, (size_t)count * sizeof(i32));
    memcpy(changes + w->most, columns, (size_t)count * sizeof(i32));
    memcpy(changes + 2 * w->most, blocks, (size_t)count * sizeof(i32));
    return move_to(w, lens, width, count, message);
}

/* cuLaunchKernel with what stays from step to step; mirrored by plan_send.Bound. The kernel is device_step.py's. */
typedef struct {
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                  void **);
    void *function, *lens, *tables;
    i64 threads, shared_bytes, num_seqs, stride;
} Bound;

/* Launch the kernel that applies a message; return CUDA's error, 0 for none. */
i64 radixpool_send(const Bound *b, void *stream, void *message, i64 num_changes, i64 ticket) {
    i32 changes = (i32)num_changes, number = (i32)ticket, num_seqs = (i32)b->num_seqs, stride = (i32)b->stride;
    void *lens = b->lens, *tables = b->tables, *scratch = NULL; /* Triton adds two pointers, unused here */
    void *arguments[] = {&message, &changes, &number, &lens, &tables, &num_seqs, &stride, &scratch, &scratch};
    return b->launch(b->function, 1, 1, 1, (unsigned)b->threads, 1, 1, (unsigned)b->shared_bytes, stream,
                     arguments, NULL);
}
