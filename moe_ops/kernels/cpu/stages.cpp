// The stages of a layer that are no products, each by itself: pairs sorted by expert, the activation, the sum of each
// token's outputs. Compiled in one unit after experts.cpp.

namespace {

// The expert here of a pair that names one by its id, through the map if there is one; -1: it is not here.
template <typename Id, typename Local>
int32_t local_id(const Pairs& p, const Id* ids, const Local* map, int64_t pair) {
  int64_t id = ids[pair];
  if (map) id = id >= 0 && id < p.global_experts ? int64_t(map[id]) : -1;
  return id >= 0 && id < p.E ? int32_t(id) : -1;
}

template <typename Id>
void find_local_ids(const Pairs& p, const Id* ids, const void* map, int32_t* local) {
  for (int64_t r = 0; r < p.T * p.K; ++r)
    local[r] = p.map_is_int64 ? local_id(p, ids, static_cast<const int64_t*>(map), r)
                              : local_id(p, ids, static_cast<const int32_t*>(map), r);
}

template <typename T>
void activate_rows(const Activation& a, const T* y, int64_t y_stride, int64_t R, int64_t I, T* h, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(R * I, threads))
  for (int64_t r = 0; r < R; ++r) activate_row(a, y + r * y_stride, I, h + r * I);
}

template <typename T>
void combine(const Combined& p, const T* y, const void* weights, const int32_t* rows, T* out) {
  const int64_t R = p.T * p.K;
  std::vector<int32_t> row_of_pair(R, -1);
  for (int64_t r = 0; r < R; ++r)
    if (rows[r] >= 0 && rows[r] < R) row_of_pair[rows[r]] = int32_t(r);
#pragma omp parallel for schedule(static) num_threads(threads_for(R * p.D, p.threads))
  for (int64_t t = 0; t < p.T; ++t) {
    const auto row = [&](int64_t k) {
      const int32_t r = row_of_pair[t * p.K + k];
      return r < 0 ? nullptr : y + r * p.y_stride;
    };
    combine_rows(p.K, p.D, row, weights, t * p.K, p.weights_are_float32, out + t * p.D);
  }
}

}  // namespace

// local[r] = the expert here of pair r, or -1; `map` may be null.
extern "C" void moe_local_ids(const Pairs* pairs, const void* ids, const void* map, int32_t* local) {
  if (pairs->ids_are_int64) find_local_ids(*pairs, static_cast<const int64_t*>(ids), map, local);
  else find_local_ids(*pairs, static_cast<const int32_t*>(ids), map, local);
}

// Rows of tokens sorted by the experts that `local` names, and the pair of each; unused rows of `to` stay as they are.
extern "C" void moe_dispatch(const Pairs* pairs, const char* x, const int32_t* local, char* to, int32_t* rows,
                             int32_t* ends) {
  const Pairs& p = *pairs;
  const int64_t R = p.T * p.K;
  sort_pairs(local, R, p.E, rows, ends);
  const int32_t used = ends[p.E - 1];
#pragma omp parallel for schedule(static) num_threads(threads_for(used * p.row_bytes, p.threads))
  for (int32_t r = 0; r < used; ++r)
    std::memcpy(to + r * p.row_bytes, x + rows[r] / p.K * p.x_stride_bytes, p.row_bytes);
  std::fill(rows + used, rows + R, -1);
}

#define MOE_STAGES(name, T)                                                                                   \
  extern "C" void moe_activate_##name(const Activation* a, const T* y, int64_t y_stride, int64_t R, int64_t I, \
                                      T* h, int threads) {                                                    \
    activate_rows(*a, y, y_stride, R, I, h, threads);                                                         \
  }                                                                                                           \
  extern "C" void moe_combine_##name(const Combined* p, const T* y, const void* weights, const int32_t* rows, \
                                     T* out) {                                                                \
    combine(*p, y, weights, rows, out);                                                                       \
  }
MOE_STAGES(bfloat16, bf16)
MOE_STAGES(float32, float)
