/* Writes a cut as the device reads it: forest_pack.py is the definition, this the same entry for entry. */

/* Where each section begins in one buffer of int32, and the programs launched; mirrored by forest_pack.Layout. */
typedef struct {
    i64 counts, marks, lens, rows, merge_rows, merge_starts, merge_parts, items[HEIGHTS], tables;
    i64 table_stride, grids[HEIGHTS];
} Layout;

static void write_record(i32 *record, const Piece *p) {
    memset(record, 0, RECORD * sizeof(i32));
    record[0] = p->row0, record[1] = p->rows, record[2] = p->table, record[3] = p->begin, record[4] = p->end;
    record[5] = p->part, record[8] = p->after, record[9] = p->seen;
}

/* Write the items of one height: the first of each program, empty ones for the other programs of the grid, the rest. */
static void write_items(const Cut *c, int h, const Piece *pieces, i64 grid, i32 *out) {
    i64 programs = c->sizes->programs[h], next = grid;
    memset(out, 0, (size_t)grid * RECORD * sizeof(i32));
    for (i64 p = 0; p < programs; p++) {
        i64 first = c->starts[h][p], last = c->starts[h][p + 1];
        if (last > first) write_record(out + p * RECORD, &pieces[first]);
        out[p * RECORD + 6] = (i32)max64(last - first - 1, 0);
        out[p * RECORD + 7] = (i32)next;
        for (i64 i = first + 1; i < last; i++) write_record(out + next++ * RECORD, &pieces[i]);
    }
}

static void write_rows(const Cut *c, i32 *out) {
    for (i64 i = 0, at = 0; i < c->num_active; i++) {
        i32 seq = (i32)c->order[i].seq, new = c->in->query_lens[seq];
        for (i32 j = 0; j < new; j++, at++, out += ROW_RECORD) {
            out[0] = c->rows[at], out[1] = seq, out[2] = c->backs[at], out[3] = new;
        }
    }
}

/* Write every section of a cut batch. */
void radixpool_pack(const void *handle, const Layout *to, i32 *out) {
    const Cut *c = handle;
    const Batch *in = c->in;
    const Piece *pieces = c->pieces;
    i64 merged = c->sizes->num_merge_rows;
    memset(out + to->counts, 0, (size_t)(to->lens - to->counts) * sizeof(i32)); /* the marks too */
    out[to->counts] = (i32)merged;
    memcpy(out + to->lens, in->lens, (size_t)in->num_seqs * sizeof(i32));
    write_rows(c, out + to->rows);
    memcpy(out + to->merge_rows, c->merge_rows, (size_t)merged * sizeof(i32));
    memcpy(out + to->merge_starts, c->merge_starts, (size_t)(merged + 1) * sizeof(i32));
    memcpy(out + to->merge_parts, c->merge_parts, (size_t)c->sizes->num_parts * sizeof(i32));
    for (int h = 0; h < HEIGHTS; h++) {
        write_items(c, h, pieces, to->grids[h], out + to->items[h]);
        if (c->sizes->programs[h]) pieces += c->starts[h][c->sizes->programs[h]];
    }
    for (i64 i = 0; i < in->num_seqs; i++)
        memcpy(out + to->tables + i * to->table_stride, in->tables + i * in->stride, (size_t)in->width * sizeof(i32));
}
