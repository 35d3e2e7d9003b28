// Whole layers in one call, the drafts of a round, and what Python calls of both.

#include "kernels.h"

#include <cstring>
#include <numeric>

namespace truespec {

namespace {

void rotate_head(float* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 lanes = first_lanes(half - i);
        const __m512 c = _mm512_maskz_loadu_ps(lanes, cosines + i), s = _mm512_maskz_loadu_ps(lanes, sines + i);
        const __m512 x = _mm512_maskz_loadu_ps(lanes, head + i), y = _mm512_maskz_loadu_ps(lanes, head + half + i);
        _mm512_mask_storeu_ps(head + i, lanes, _mm512_fnmadd_ps(y, s, _mm512_mul_ps(x, c)));
        _mm512_mask_storeu_ps(head + half + i, lanes, _mm512_fmadd_ps(x, s, _mm512_mul_ps(y, c)));
    }
}

// The angles of each row: of its position in the table, or (without a table) row after row as `rotate` of layers.py
// takes them, [num_rows, head_dim] each.
struct Angles {
    const float* table;
    const float* cosines;
    const float* signed_sines;
};

// Norms (where the model has head norms) and rotates the query and key heads of one thread's rows, in place.
void rotate_rows(const Shape& shape, const float* head_norm, const Angles& angles, const Step& step, float* qkv,
                 int64_t stride, int thread, int threads) {
    const Range rows = share(step.num_rows, thread, threads);
    const int64_t size = shape.head_dim, half = size / 2;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float* cosines = angles.table ? angles.table + step.positions[r] * size : angles.cosines + r * size;
        const float* sines = angles.table ? cosines + half : angles.signed_sines + r * size + half;
        for (int64_t h = 0; h < shape.num_heads + shape.num_kv_heads; ++h) {
            float* head = qkv + r * stride + h * size;
            if (head_norm) norm_row(head, head_norm + h * size, static_cast<float>(shape.eps), size, head);
            rotate_head(head, cosines, sines, half);
        }
    }
}

struct Sizes {
    int64_t query, kv, qkv;
    explicit Sizes(const Shape& shape)
        : query(shape.num_heads * shape.head_dim), kv(shape.num_kv_heads * shape.head_dim), qkv(query + 2 * kv) {}
};

// The buffers of a pass over some rows.
struct Pass {
    const Shape& shape;
    const Step& step;
    Sizes sizes;
    float eps;
    Prepared prepared;
    int64_t scratch_each;
    float *scratch, *qkv, *attended, *gate_up;

    Pass(const Shape& shape, const Step& step, int64_t num_threads, int64_t most_inputs = 0)
        : shape(shape),
          step(step),
          sizes(shape),
          eps(static_cast<float>(shape.eps)),
          prepared(workspace(), step.num_rows,
                   std::max({shape.hidden_size, shape.intermediate_size, sizes.query, most_inputs}),
                   static_cast<int>(std::max<int64_t>(1, num_threads))),
          scratch_each(scratch_size(shape)) {
        Workspace& space = workspace();
        scratch = space.scores.at_least(std::max<int64_t>(1, num_threads) * scratch_each);
        qkv = space.qkv.at_least(step.num_rows * sizes.qkv);
        attended = space.attended.at_least(step.num_rows * sizes.query);
        gate_up = space.gate_up.at_least(step.num_rows * 2 * shape.intermediate_size);
    }
};

// One thread's part of a pass. Every part ends with all threads done.
struct Worker {
    const Pass& pass;
    int thread, threads;

    void wait() const {
        if (threads > 1) {
#pragma omp barrier
        }
    }

    void product(const Source& source, const Linear& linear, const Target& target) const {
        const int64_t num_rows = pass.step.num_rows;
        const Rows ready = prepare(source, linear, num_rows, pass.prepared, thread, threads);
        multiply(ready, num_rows, linear, target, thread, threads);
        wait();
    }

    void attention(const Source& source, const Layer& layer, const Angles& angles, const Cache& cache,
                   const Target& target) const {
        const Sizes& sizes = pass.sizes;
        product(source, layer.qkv, {pass.qkv, sizes.qkv, false});
        rotate_rows(pass.shape, layer.head_norm, angles, pass.step, pass.qkv, sizes.qkv, thread, threads);
        const float* key = pass.qkv + sizes.query;
        const Heads heads{pass.qkv, key, key + sizes.kv, sizes.qkv, sizes.qkv, sizes.qkv};
        write_rows(cache, heads, pass.step, thread, threads);
        wait();
        attend_spans(pass.shape, layer.scores, cache, heads, pass.step, pass.scratch + thread * pass.scratch_each,
                     pass.attended, thread, threads);
        wait();
        product({Input::kPlain, pass.attended, sizes.query, nullptr, 0}, layer.output, target);
    }

    void mlp(const Source& source, const Layer& layer, const Target& target) const {
        const int64_t inner = pass.shape.intermediate_size;
        product(source, layer.gate_up, {pass.gate_up, 2 * inner, false});
        product({Input::kSwiGLU, pass.gate_up, 2 * inner, nullptr, 0}, layer.down, target);
    }
};

void embed_row(const DraftHead& head, int64_t token, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        const int64_t at = token * size + i;
        const __m512 x = head.embedding_is_bfloat16
                             ? expand(_mm256_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(head.embedding) + at))
                             : _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(head.embedding) + at);
        _mm512_mask_storeu_ps(out + i, lanes, x);
    }
}

}  // namespace

extern "C" {

// rows [num_rows, inputs] -> out [num_rows, outputs]; normed first where there is a norm.
void truespec_linear(const Linear* linear, int64_t num_rows, const float* rows, int64_t stride, const float* norm,
                     double eps, float* out, int64_t num_threads) {
    const int num_parts = static_cast<int>(std::max<int64_t>(1, num_threads));
    const Prepared prepared(workspace(), num_rows, linear->num_inputs, num_parts);
    in_threads(num_threads, [&](int thread, int threads) {
        const Source source{norm ? Input::kNormed : Input::kPlain, rows, stride, norm, static_cast<float>(eps)};
        const Rows ready = prepare(source, *linear, num_rows, prepared, thread, threads);
        multiply(ready, num_rows, *linear, {out, linear->num_outputs, false}, thread, threads);
    });
}

// Stores keys and values of one layer, then attends: query, key and value -> attended [num_rows, num_heads, head_dim].
void truespec_attend(const Shape* shape, const Step* step, void* cache_data, int64_t layer, const float* query,
                     int64_t query_stride, const float* key, int64_t key_stride, const float* value,
                     int64_t value_stride, int64_t window, double scale, double cap, float* attended,
                     int64_t num_threads) {
    const Cache cache = layer_cache(*shape, cache_data, layer);
    const Heads heads{query, key, value, query_stride, key_stride, value_stride};
    const int64_t each = scratch_size(*shape);
    float* scratch = workspace().scores.at_least(std::max<int64_t>(1, num_threads) * each);
    in_threads(num_threads, [&](int thread, int threads) {
        write_rows(cache, heads, *step, thread, threads);
        if (threads > 1) {
#pragma omp barrier
        }
        attend_spans(*shape, {window, scale, cap}, cache, heads, *step, scratch + thread * each, attended, thread,
                     threads);
    });
}

// rows [num_rows, size], normed.
void truespec_norm(int64_t num_rows, int64_t size, const float* rows, int64_t stride, const float* weight, double eps,
                   float* out) {
    for (int64_t r = 0; r < num_rows; ++r) {
        norm_row(rows + r * stride, weight, static_cast<float>(eps), size, out + r * size);
    }
}

// All layers of a decoder, in place on hidden [num_rows, hidden_size]. What enters the layers of `captures`, ascending,
// goes to features [num_rows, num_captures, hidden_size].
void truespec_layers(const Layer* layers, int64_t num_layers, const Shape* shape, const Step* step, void* cache_data,
                     float* hidden, const int64_t* captures, int64_t num_captures, float* features,
                     int64_t num_threads) {
    Pass pass(*shape, *step, num_threads);
    const int64_t size = shape->hidden_size;
    in_threads(num_threads, [&](int thread, int threads) {
        const Worker worker{pass, thread, threads};
        const Range own = share(step->num_rows, thread, threads);
        int64_t captured = 0;
        for (int64_t index = 0; index < num_layers; ++index) {
            if (captured < num_captures && captures[captured] == index) {  // nobody writes before all have read
                for (int64_t r = own.begin; r < own.end; ++r) {
                    float* out = features + (r * num_captures + captured) * size;
                    std::memcpy(out, hidden + r * size, size * sizeof(float));
                }
                ++captured;
            }
            const Layer& layer = layers[index];
            const Cache cache = layer_cache(*shape, cache_data, index);
            const Angles angles{shape->rotary, nullptr, nullptr};
            worker.attention({Input::kNormed, hidden, size, layer.input_norm, pass.eps}, layer, angles, cache,
                             {hidden, size, true});
            worker.mlp({Input::kNormed, hidden, size, layer.mlp_norm, pass.eps}, layer, {hidden, size, true});
        }
    });
}

// One layer of a draft head: token_ids [num_rows] and hidden [num_rows, hidden_size] -> out, of the same size. It lies
// first in its cache.
void truespec_draft_layer(const DraftHead* head, const Shape* shape, const Step* step, void* cache_data,
                          const int64_t* token_ids, const float* hidden, int64_t stride, float* out,
                          int64_t num_threads) {
    const int64_t size = shape->hidden_size, num_rows = step->num_rows;
    Pass pass(*shape, *step, num_threads, 2 * size);
    float* rows = workspace().pairs.at_least(num_rows * 2 * size);
    for (int64_t r = 0; r < num_rows; ++r) {
        float *token = rows + r * 2 * size, *own = token + size, *residual = out + r * size;
        embed_row(*head, token_ids[r], size, residual);  // as scratch
        norm_row(residual, head->token_norm, pass.eps, size, token);
        norm_row(hidden + r * stride, head->hidden_norm, pass.eps, size, own);
        std::memcpy(residual, head->residual_is_normed ? own : hidden + r * stride, size * sizeof(float));
    }
    in_threads(num_threads, [&](int thread, int threads) {
        const Worker worker{pass, thread, threads};
        const Angles angles{shape->rotary, nullptr, nullptr};
        worker.attention({Input::kPlain, rows, 2 * size, nullptr, 0}, head->layer, angles,
                         layer_cache(*shape, cache_data, 0), {out, size, true});
        worker.mlp({Input::kNormed, out, size, head->layer.mlp_norm, pass.eps}, head->layer, {out, size, true});
    });
}

// All drafts of a round: draws from the head's distribution, runs the head on what was drawn, and draws again. hidden
// [num_entries, hidden_size] is what the first drafts are drawn from. -> tokens and columns of the drafts, entry after
// entry, and the distributions [drafts, outputs] they were drawn from; there is room for `counts`.
void truespec_draft_round(const DraftHead* head, const Shape* shape, void* cache_data, const DraftRound* round,
                          const float* hidden, int64_t stride, int64_t* tokens, int64_t* columns, float* distributions,
                          int64_t num_threads) {
    const int64_t size = shape->hidden_size, width = head->lm_head.num_outputs, num_entries = round->num_entries;
    float* logits = workspace().logits.at_least(num_entries * width);
    float* states = workspace().states.at_least(2 * num_entries * size);
    float *now = states, *next = states + num_entries * size;
    for (int64_t e = 0; e < num_entries; ++e) std::memcpy(now + e * size, hidden + e * stride, size * sizeof(float));
    std::vector<int64_t> active(num_entries), filters(num_entries, -1), firsts(num_entries, 0);
    std::iota(active.begin(), active.end(), 0);
    for (int64_t f = 0; f < round->num_filters; ++f) filters[round->filtered[f]] = f;
    std::partial_sum(round->counts, round->counts + num_entries - 1, firsts.begin() + 1);
    std::vector<double> runs;
    std::vector<int64_t> drawn, positions, slots, row_starts, context, context_starts;
    for (int64_t offset = 0; !active.empty(); ++offset) {
        truespec_linear(&head->lm_head, active.size(), now, size, head->norm, shape->eps, logits, num_threads);
        for (size_t row = 0; row < active.size(); ++row) {
            const int64_t e = active[row], f = filters[e], place = firsts[e] + offset;
            float *own = logits + row * width, *distribution = distributions + place * width;
            divide_row(own, width, round->temperature[e]);
            if (f >= 0) {
                float* scratch = workspace().scores.at_least(2 * width);
                filter_row(own, width, round->log_min_p[f], round->top_k[f], round->top_p[f], scratch);
            }
            truespec_distributions(1, width, own, round->greedy + e, distribution);
            const double uniform = uniform_of(round->seeds[e], static_cast<uint32_t>(round->lengths[e]),
                                              static_cast<uint32_t>(offset), static_cast<uint32_t>(round->purpose));
            columns[place] = draw_row(distribution, width, uniform, runs);
            tokens[place] = head->ids[columns[place]];
        }
        drawn.clear(), positions.clear(), slots.clear(), row_starts.assign(1, 0), context.clear(), context_starts.assign(1, 0);
        size_t going_on = 0;
        for (size_t row = 0; row < active.size(); ++row) {
            const int64_t e = active[row];
            if (round->counts[e] <= offset + 1) continue;
            const int64_t* begin = round->context + round->context_starts[e];
            const int64_t* end = round->context + round->context_starts[e + 1] - (round->counts[e] - 2 - offset);
            context.insert(context.end(), begin, end);
            context_starts.push_back(context.size());
            positions.push_back(end - begin - 1);
            slots.push_back(end[-1]);
            drawn.push_back(tokens[firsts[e] + offset]);
            std::memmove(now + going_on * size, now + row * size, size * sizeof(float));
            active[going_on++] = e;
            row_starts.push_back(going_on);
        }
        active.resize(going_on);
        if (active.empty()) break;
        const int64_t count = going_on;
        const Step step{count, count, positions.data(), slots.data(), row_starts.data(), context.data(),
                        context_starts.data()};
        truespec_draft_layer(head, shape, &step, cache_data, drawn.data(), now, size, next, num_threads);
        std::swap(now, next);
    }
}

// Attention of one layer, projections and rotation included: rows [num_rows, inputs] -> out [num_rows, hidden_size].
// cosines and signed_sines are [num_rows, head_dim], as `rotate` of layers.py takes them.
void truespec_attention(const Layer* layer, int64_t index, const Shape* shape, const Step* step, void* cache_data,
                        const float* rows, int64_t stride, const float* cosines, const float* signed_sines, float* out,
                        int64_t num_threads) {
    Pass pass(*shape, *step, num_threads, layer->qkv.num_inputs);
    in_threads(num_threads, [&](int thread, int threads) {
        const Worker worker{pass, thread, threads};
        worker.attention({Input::kPlain, rows, stride, nullptr, 0}, *layer, {nullptr, cosines, signed_sines},
                         layer_cache(*shape, cache_data, index), {out, shape->hidden_size, false});
    });
}

// The MLP of one layer: rows [num_rows, hidden_size] -> out [num_rows, hidden_size].
void truespec_mlp(const Layer* layer, int64_t num_rows, const float* rows, int64_t stride, float* out,
                  int64_t num_threads) {
    const Linear &gate_up = layer->gate_up, &down = layer->down;
    Shape shape{};
    shape.hidden_size = gate_up.num_inputs;
    shape.intermediate_size = down.num_inputs;
    shape.num_heads = shape.num_kv_heads = 1;
    Step step{};
    step.num_rows = num_rows;
    Pass pass(shape, step, num_threads);
    in_threads(num_threads, [&](int thread, int threads) {
        const Worker worker{pass, thread, threads};
        worker.mlp({Input::kPlain, rows, stride, nullptr, 0}, *layer, {out, down.num_outputs, false});
    });
}

const Place kPlaces[] = {
    SIZE(Linear),
    AT(Linear, weight), AT(Linear, bias), AT(Linear, num_inputs), AT(Linear, num_outputs), AT(Linear, kind),
    SIZE(Layer),
    AT(Layer, input_norm), AT(Layer, mlp_norm), AT(Layer, head_norm), AT(Layer, qkv), AT(Layer, output),
    AT(Layer, gate_up), AT(Layer, down), AT(Layer, scores),
    SIZE(Scores),
    AT(Scores, window), AT(Scores, scale), AT(Scores, cap),
    SIZE(DraftHead),
    AT(DraftHead, embedding), AT(DraftHead, embedding_is_bfloat16), AT(DraftHead, residual_is_normed),
    AT(DraftHead, token_norm), AT(DraftHead, hidden_norm), AT(DraftHead, layer), AT(DraftHead, norm),
    AT(DraftHead, lm_head), AT(DraftHead, ids),
    SIZE(Shape),
    AT(Shape, hidden_size), AT(Shape, intermediate_size), AT(Shape, num_heads), AT(Shape, num_kv_heads),
    AT(Shape, head_dim), AT(Shape, num_slots), AT(Shape, cache_is_bfloat16), AT(Shape, rotary), AT(Shape, eps),
    SIZE(Step),
    AT(Step, num_rows), AT(Step, num_spans), AT(Step, positions), AT(Step, slots), AT(Step, row_starts),
    AT(Step, context), AT(Step, context_starts),
    SIZE(DraftRound),
    AT(DraftRound, num_entries), AT(DraftRound, counts), AT(DraftRound, context), AT(DraftRound, context_starts),
    AT(DraftRound, seeds), AT(DraftRound, lengths), AT(DraftRound, purpose), AT(DraftRound, temperature),
    AT(DraftRound, greedy), AT(DraftRound, num_filters), AT(DraftRound, filtered), AT(DraftRound, log_min_p),
    AT(DraftRound, top_k), AT(DraftRound, top_p),
    {nullptr, 0},
};

// The table above; its last entry has no name.
const Place* truespec_places() { return kPlaces; }

}  // extern "C"

}  // namespace truespec
