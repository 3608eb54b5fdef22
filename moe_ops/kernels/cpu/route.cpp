// The router on the CPU: one pass over a token's logits. Compiled in one unit after experts.cpp.

#include <limits>
#include <utility>

// Shared with Python by position: see kernels/cpu/__init__.py.
struct Router {
  int64_t T, E, K, n_group, topk_group;
  int32_t score;  // 0 softmax, 1 sigmoid, 2 sqrtsoftplus, 3 logit
  int32_t select_on_logit, group_top2sum, fill_zero, softmax_selected, renormalize, threads;
  float eps, min_sum, scale;
};

namespace {

// Routers of fewer logits than this stay on one thread.
constexpr int64_t kParallelLogits = 1 << 14;

void softmax(const float* in, int64_t n, float* out) {
  float top = in[0];
  for (int64_t i = 1; i < n; ++i) top = std::max(top, in[i]);
  float total = 0.0f;
  for (int64_t i = 0; i < n; ++i) total += out[i] = std::exp(in[i] - top);
  for (int64_t i = 0; i < n; ++i) out[i] /= total;
}

void score_token(const Router& p, const float* logits, float* scores) {
  if (p.score == 0) return softmax(logits, p.E, scores);
  for (int64_t e = 0; e < p.E; ++e) {
    const float l = logits[e];
    if (p.score == 1) scores[e] = 1.0f / (1.0f + std::exp(-l));
    else if (p.score == 2) scores[e] = std::sqrt(l > 20.0f ? l : std::log1p(std::exp(l)));
    else scores[e] = l;
  }
}

// Whether a is larger than b, NaN larger than every number, as torch.topk has it.
inline bool larger(float a, float b) { return !(a <= b) && b == b; }

// The `k` largest of `n` values, largest first, the lower index first among equals; always k different indices.
template <typename Index>
void top_k(const float* values, int64_t n, int64_t k, char* taken, Index* chosen) {
  std::fill(taken, taken + n, 0);
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i)
      if (!taken[i] && (best < 0 || larger(values[i], values[best]))) best = i;
    taken[best] = 1;
    chosen[j] = Index(best);
  }
}

struct Scratch {
  std::vector<float> scores, choice, worth;
  std::vector<char> taken, kept;
  std::vector<int32_t> groups;
  explicit Scratch(const Router& p)
      : scores(p.E), choice(p.E), worth(p.n_group), taken(p.E), kept(p.n_group), groups(p.topk_group) {}
};

void limit_groups(const Router& p, Scratch& s) {
  const int64_t size = p.E / p.n_group;
  for (int64_t g = 0; g < p.n_group; ++g) {
    const float* c = s.choice.data() + g * size;
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int64_t i = 0; i < size; ++i) {
      if (larger(c[i], first)) second = std::exchange(first, c[i]);
      else if (larger(c[i], second)) second = c[i];
    }
    s.worth[g] = p.group_top2sum ? first + second : first;
  }
  top_k(s.worth.data(), p.n_group, p.topk_group, s.kept.data(), s.groups.data());
  const float fill = p.fill_zero ? 0.0f : -std::numeric_limits<float>::infinity();
  for (int64_t e = 0; e < p.E; ++e)
    if (!s.kept[e / size]) s.choice[e] = fill;
}

void route_token(const Router& p, Scratch& s, const float* logits, const float* bias, const float* expert_scale,
                 float* weights, int32_t* experts) {
  score_token(p, logits, s.scores.data());
  for (int64_t e = 0; e < p.E; ++e)
    s.choice[e] = (p.select_on_logit ? logits[e] : s.scores[e]) + (bias ? bias[e] : 0.0f);
  if (p.n_group > 1) limit_groups(p, s);
  top_k(s.choice.data(), p.E, p.K, s.taken.data(), experts);
  for (int64_t k = 0; k < p.K; ++k) weights[k] = s.scores[experts[k]];
  if (p.softmax_selected) softmax(weights, p.K, weights);
  if (p.renormalize) {
    float total = 0.0f;
    for (int64_t k = 0; k < p.K; ++k) total += weights[k];
    total = std::max(total + p.eps, p.min_sum);
    for (int64_t k = 0; k < p.K; ++k) weights[k] /= total;
  }
  for (int64_t k = 0; k < p.K; ++k) weights[k] *= p.scale * (expert_scale ? expert_scale[experts[k]] : 1.0f);
}

}  // namespace

extern "C" void moe_route(const Router* router, const float* logits, const float* bias, const float* expert_scale,
                          float* weights, int32_t* experts) {
  const Router& p = *router;
#pragma omp parallel num_threads(p.T * p.E < kParallelLogits ? 1 : p.threads)
  {
    Scratch scratch(p);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.T; ++t)
      route_token(p, scratch, logits + t * p.E, bias, expert_scale, weights + t * p.K, experts + t * p.K);
  }
}
