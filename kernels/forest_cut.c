/* The second half of the cut: tiles, pieces, merge lists. The result has the same items as numpy's, bit for bit
 * (tests/kernels/test_native_cut.py). `cut` owns all memory until `drop` frees it.
 */

static int height_index(i64 height) {
    int h = 0;
    while (TILE_ROWS[h] < height && h < HEIGHTS - 1) h++;
    return h;
}

static void cut_rows(Cut *c) {
    i64 group = c->in->group_size, work[HEIGHTS] = {0}, most = 0;
    int joined[HEIGHTS] = {0, 1, 2, 3};
    for (i64 i = 0; i < c->num_segments; i++) {
        const Segment *s = &c->segments[i];
        work[height_index((s->row1 - s->row0) * group)] += s->end - s->begin;
    }
    if (work[1] && (double)work[1] >= JOIN_SHARE * (double)(work[0] + work[1])) joined[0] = 1;
    if (work[2] && work[3] >= work[2]) joined[2] = 3;
    for (i64 i = 0; i < c->num_segments; i++) {
        const Segment *s = &c->segments[i];
        i64 rows = s->row1 - s->row0;
        most += ceil_div(rows, TILE_ROWS[joined[height_index(rows * group)]] / group);
    }
    c->tiles = reserve(c, most, sizeof(Tile));
    for (i64 i = 0; i < c->num_segments; i++) {
        const Segment *s = &c->segments[i];
        i64 height = TILE_ROWS[joined[height_index((s->row1 - s->row0) * group)]];
        for (i64 row0 = s->row0; row0 < s->row1; row0 += height / group) {
            i64 row1 = min64(row0 + height / group, s->row1), end = s->leaf ? c->limits[row1 - 1] : s->end;
            if (end > s->begin)
                c->tiles[c->num_tiles++] = (Tile){(i32)height, (i32)row0, (i32)(row1 - row0), (i32)s->begin, (i32)end,
                                                  (i32)s->table, (i32)s->leaf};
        }
    }
}

/* Write the points where tokens, laid end to end, are cut for `programs` equal shares: whole tiles, or inside them. */
static void cut_points(const i64 *length, i64 n, i64 programs, int whole, i64 *points) {
    i64 total = 0, ends = length[0] + ITEM_OVERHEAD_TOKENS, tokens_before = 0, tile = 0;
    for (i64 i = 0; i < n; i++) total += length[i] + ITEM_OVERHEAD_TOKENS;
    double share = (double)total / (double)programs;
    for (i64 i = 1; i < programs; i++) {
        double cut = (double)i * share;
        while (tile < n - 1 && (double)ends <= cut) {
            tokens_before += length[tile++];
            ends += length[tile] + ITEM_OVERHEAD_TOKENS;
        }
        double inside = cut - (double)(ends - length[tile]);
        i64 offset = (i64)rint(inside / CUT_TOKENS) * CUT_TOKENS;
        if (offset < MIN_PIECE_TOKENS) offset = 0;
        if (offset > length[tile] - MIN_PIECE_TOKENS) offset = length[tile];
        if (whole) offset = inside * 2 < (double)length[tile] ? 0 : length[tile];
        points[i - 1] = tokens_before + offset;
    }
}

static i64 even_piece(const i64 *length, i64 n, i64 total, i64 programs) {
    i64 longest = 0;
    if (n > programs) return 0;
    for (i64 i = 0; i < n; i++) longest = max64(longest, length[i]);
    i64 share = ceil_div(longest, programs / n), each = ceil_div(share, CUT_TOKENS) * CUT_TOKENS;
    double balanced = (double)(total + n * ITEM_OVERHEAD_TOKENS) / (double)programs + ITEM_OVERHEAD_TOKENS;
    return (double)(each + ITEM_OVERHEAD_TOKENS) <= balanced ? each : 0;
}

/* Choose the cut points of tiles of the given lengths; return them, and in `programs` how many programs run. */
static i64 *cut_tokens(Cut *c, const i64 *length, i64 n, i64 *programs, int merging) {
    i64 total = 0, count = 0;
    for (i64 i = 0; i < n; i++) total += length[i];
    *programs = max64(1, min64(*programs, ceil_div(total, MIN_PIECE_TOKENS)));
    i64 each = even_piece(length, n, total, *programs), *points;
    if (each) {
        for (i64 i = 0; i < n; i++) count += ceil_div(length[i], each);
        points = reserve(c, count, sizeof(i64));
        *programs = count, count = 0;
        for (i64 i = 0, before = 0; i < n; before += length[i++])
            for (i64 at = 0; at < length[i]; at += each)
                if (before + at > 0) points[count++] = before + at;
    } else {
        points = reserve(c, *programs, sizeof(i64));
        cut_points(length, n, *programs, 0, points);
    }
    if (merging) return points;
    i64 *rounded = reserve(c, *programs, sizeof(i64)), longest = 0;
    cut_points(length, n, *programs, 1, rounded);
    for (i64 i = 0; i < *programs; i++)
        longest = max64(longest, (i + 1 < *programs ? rounded[i] : total) - (i ? rounded[i - 1] : 0));
    double limit = WHOLE_TILE_SLACK * (double)total / (double)*programs + ITEM_OVERHEAD_TOKENS;
    return (double)longest <= limit ? rounded : points;
}

/* Cut the tiles of one height into pieces, appended to c->pieces. */
static void cut_height(Cut *c, int h, i64 programs, int merging, i64 *keys, i64 *other, i64 *length) {
    i64 n = 0;
    for (i64 i = 0; i < c->num_tiles; i++) {
        const Tile *t = &c->tiles[i];
        if (t->height == TILE_ROWS[h]) keys[n++] = i - (merging ? (i64)(t->end - t->begin) * ((i64)1 << 32) : 0);
    }
    if (!n) return;
    if (merging) sort_keys(keys, other, n, 32);
    for (i64 i = 0; i < n; i++) {
        const Tile *t = &c->tiles[keys[i] & UINT32_MAX];
        length[i] = t->end - t->begin;
    }
    i64 *points = cut_tokens(c, length, n, &programs, merging);
    i64 *starts = c->starts[h] = reserve(c, programs + 1, sizeof(i64));
    Piece *pieces = c->pieces + c->num_pieces;
    i64 count = 0, point = 0, program = 0, before = 0;
    for (i64 i = 0; i < n; before += length[i++]) {
        const Tile *t = &c->tiles[keys[i] & UINT32_MAX];
        const i32 *limits = c->limits + t->row0;
        i32 after = c->backs[t->row0 + t->rows - 1], seen = INT32_MAX, rows = t->rows;
        for (i32 r = 0; r < rows; r++) seen = limits[r] < seen ? limits[r] : seen;
        for (i64 at = 0, stop; at < length[i]; at = stop) {
            while (program < programs && (program ? points[program - 1] : 0) <= before + at) starts[program++] = count;
            while (point < programs - 1 && points[point] <= before + at) point++;
            stop = point < programs - 1 ? min64(points[point] - before, length[i]) : length[i];
            i32 end = t->leaf && t->begin + stop == t->end ? TO_THE_END : (i32)(t->begin + stop);
            pieces[count++] = (Piece){t->row0, rows, t->table, (i32)(t->begin + at), end, -1, after, seen};
        }
    }
    while (program <= programs) starts[program++] = count;
    c->sizes->programs[h] = programs;
    c->sizes->items[h] = count;
    c->num_pieces += count;
}

static double later_end(i64 tall, i64 narrow, i64 tall_sms, i64 narrow_sms) {
    double a = (double)tall / (double)tall_sms, b = (double)narrow / (double)narrow_sms;
    return a > b ? a : b;
}

static i64 split_sms(const Cut *c) {
    i64 tall = 0, narrow = 0, num_sms = c->in->num_sms, step = c->in->sm_step;
    for (i64 i = 0; i < c->num_tiles; i++) {
        const Tile *t = &c->tiles[i];
        *(t->height == TILE_ROWS[HEIGHTS - 1] ? &tall : &narrow) += t->end - t->begin;
    }
    tall *= TALL_COST_APART, narrow *= NARROW_COST_APART;
    if (!tall || !narrow) return num_sms;
    i64 few = max64(step, num_sms * narrow / (tall + narrow) / step * step), many = few + step;
    if (many < num_sms
        && later_end(tall, narrow, num_sms - many, many) < later_end(tall, narrow, num_sms - few, few)) few = many;
    return max64(1, num_sms - few);
}

/* Give tall tiles of one height fewer programs where less is in them than beside them, and narrow tiles the rest. */
static void share_out(const Cut *c, const i64 *tokens, i64 *programs) {
    const Batch *in = c->in;
    i64 narrow = 0;
    int tall = -1, used = 0;
    for (int h = 0; h < HEIGHTS; h++) {
        if (TILE_ROWS[h] < TALL_ROWS) narrow += tokens[h];
        else if (tokens[h]) tall = h, used++;
    }
    if (used != 1 || !narrow) return;
    i64 few = max64(1, programs[tall] * TALL_SHARE * tokens[tall] / (NARROW_SHARE * narrow));
    if (few >= programs[tall]) return;
    i64 taken = min64(in->num_sms, ceil_div(few * in->num_kv_heads, in->with_tall[tall]));
    for (int h = 0; h < HEIGHTS; h++) {
        i64 room = (in->num_sms - taken) * in->with_tall[h] + taken * in->beside_tall[h];
        programs[h] = h == tall ? few : max64(1, room / in->num_kv_heads);
    }
}

static void cut_all_heights(Cut *c) {
    i64 tokens[HEIGHTS] = {0}, narrow = 0, tall = 0, n = c->num_tiles;
    int merging = 0;
    for (i64 i = 0; i < n; i++) {
        const Tile *t = &c->tiles[i];
        tokens[height_index(t->height)] += t->end - t->begin;
        merging |= !t->leaf;
    }
    for (int h = 0; h < HEIGHTS; h++) *(TILE_ROWS[h] >= TALL_ROWS ? &tall : &narrow) += tokens[h];
    c->sizes->tall = tall > 0;
    int beside = c->sizes->tall && (double)narrow <= BESIDE_SHARE * TALL_COST * (double)tall;
    c->sizes->tall_sms = c->in->persistent ? split_sms(c) : c->in->num_sms;
    int apart = c->sizes->tall_sms < c->in->num_sms;
    i64 *keys = reserve(c, n, sizeof(i64)), *other = reserve(c, n, sizeof(i64)), *length = reserve(c, n, sizeof(i64));
    i64 programs[HEIGHTS], most = n; /* a program begins at most one piece more than the tiles do */
    for (int h = 0; h < HEIGHTS; h++) {
        i64 sms = h == HEIGHTS - 1 ? c->sizes->tall_sms : c->in->num_sms - c->sizes->tall_sms;
        programs[h] = apart ? max64(1, sms * c->in->per_sm[h] / c->in->num_kv_heads)
                            : c->in->programs[h][c->sizes->tall][beside];
    }
    if (beside && !apart) share_out(c, tokens, programs);
    for (int h = 0; h < HEIGHTS; h++) most += programs[h];
    c->pieces = reserve(c, most, sizeof(Piece));
    for (int h = 0; h < HEIGHTS; h++) cut_height(c, h, programs[h], merging, keys, other, length);
    if (apart) c->sizes->tall = 0;
}

static void add_one(i32 *counts, i32 n) {
    for (i32 i = 0; i < n; i++) counts[i]++;
}

static void merge_lists(Cut *c) {
    i64 parts = 0, listed = 0, rows = c->num_rows;
    i32 *count = memset(reserve(c, rows, sizeof(i32)), 0, (size_t)rows * sizeof(i32));
    i32 *left = memset(reserve(c, rows, sizeof(i32)), 0, (size_t)rows * sizeof(i32));
    i32 *next = reserve(c, rows, sizeof(i32));
    for (i64 i = 0; i < c->num_pieces; i++) add_one(count + c->pieces[i].row0, c->pieces[i].rows);
    for (i64 i = 0; i < c->num_pieces; i++) {
        Piece *p = &c->pieces[i];
        i32 at = p->row0, end = p->row0 + p->rows;
        while (at < end && count[at] == 1) at++;
        if (at == end) continue;
        p->part = (i32)parts;
        parts += p->rows;
        add_one(left + p->row0, p->rows);
    }
    c->merge_rows = reserve(c, rows, sizeof(i32));
    c->merge_starts = reserve(c, rows + 1, sizeof(i32));
    c->merge_parts = reserve(c, parts, sizeof(i32));
    c->merge_starts[0] = 0;
    for (i64 r = 0; r < rows; r++) {
        if (count[r] == 1 && left[r] == 0) continue;
        next[r] = c->merge_starts[listed];
        c->merge_rows[listed++] = c->rows[r];
        c->merge_starts[listed] = next[r] + left[r];
    }
    for (i64 i = 0; i < c->num_pieces; i++) {
        const Piece p = c->pieces[i];
        for (i32 r = 0; p.part >= 0 && r < p.rows; r++) c->merge_parts[next[p.row0 + r]++] = p.part + r;
    }
    c->sizes->num_rows = rows;
    c->sizes->num_merge_rows = listed;
    c->sizes->num_parts = parts;
}

/* Run all steps; return 0 where memory ran out. */
static int run(Cut *c) {
    if (setjmp(c->failed)) return 0;
    sort_batch(c);
    find_segments(c);
    cut_rows(c);
    cut_all_heights(c);
    merge_lists(c);
    return 1;
}

/* Cut a batch and fill `sizes`; return a handle for `pack` and `drop`, or NULL where memory ran out. */
void *radixpool_cut(const Batch *in, Sizes *sizes) {
    Cut *c = calloc(1, sizeof(Cut));
    if (!c) return NULL;
    memset(sizes, 0, sizeof(Sizes));
    c->in = in, c->sizes = sizes;
    if (!run(c)) {
        release(c);
        return NULL;
    }
    sizes->growable = c->num_leaves == c->num_active;
    for (int h = 0; h < HEIGHTS; h++) { /* programs without work have an empty first item */
        i64 busy = 0;
        for (i64 p = 0; p < sizes->programs[h]; p++) busy += c->starts[h][p + 1] > c->starts[h][p];
        sizes->items[h] += sizes->programs[h] - busy;
    }
    return c;
}

void radixpool_drop(void *handle) { release(handle); }
