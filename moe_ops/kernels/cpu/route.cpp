// The router on the CPU: one pass over a token's logits. Compiled in one unit after experts.cpp and records.h.

#include <algorithm>
#include <limits>
#include <utility>

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

struct Ranked {
  float value;
  int32_t index;
};

// The `k` largest of `n` values, largest first. Which of equal values are taken is torch.topk's choice: its CPU
// kernel calls the same functions of the standard library in the same two cases. A model whose scores tie, as those
// of experts masked with one number do, then takes the experts that it takes without us.
void top_k(const float* values, int64_t n, int64_t k, std::vector<Ranked>& ranked, int32_t* chosen) {
  for (int64_t i = 0; i < n; ++i) ranked[i] = {values[i], int32_t(i)};
  const auto first = ranked.begin();
  const auto before = [](const Ranked& a, const Ranked& b) { return larger(a.value, b.value); };
  if (k * 64 <= n) {
    std::partial_sort(first, first + k, first + n, before);
  } else {
    std::nth_element(first, first + k - 1, first + n, before);
    std::sort(first, first + k - 1, before);
  }
  for (int64_t j = 0; j < k; ++j) chosen[j] = ranked[j].index;
}

struct Scratch {
  std::vector<float> scores, choice, worth;
  std::vector<char> kept;
  std::vector<Ranked> ranked;
  std::vector<int32_t> groups;
  explicit Scratch(const Router& p)
      : scores(p.E), choice(p.E), worth(p.n_group), kept(p.n_group), ranked(p.E), groups(p.topk_group) {}
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
  top_k(s.worth.data(), p.n_group, p.topk_group, s.ranked, s.groups.data());
  std::fill(s.kept.begin(), s.kept.end(), 0);
  for (int32_t g : s.groups) s.kept[g] = 1;
  const float fill = p.fill ? 0.0f : -std::numeric_limits<float>::infinity();
  for (int64_t e = 0; e < p.E; ++e) {
    if (s.kept[e / size]) continue;
    s.choice[e] = fill;
    if (p.fill == 2) s.scores[e] = 0.0f;
  }
}

// The weights of the experts that a token has, of its scores.
void weigh_token(const Router& p, const Scratch& s, const float* per_expert_scale, const int32_t* ids, float* weights) {
  for (int64_t k = 0; k < p.K; ++k) weights[k] = s.scores[ids[k]];
  if (p.softmax_selected) softmax(weights, p.K, weights);
  if (p.renormalize) {
    float total = 0.0f;
    for (int64_t k = 0; k < p.K; ++k) total += weights[k];
    total = std::max(total + p.eps, p.min_sum);
    for (int64_t k = 0; k < p.K; ++k) weights[k] /= total;
  }
  for (int64_t k = 0; k < p.K; ++k) weights[k] *= p.scale * (per_expert_scale ? per_expert_scale[ids[k]] : 1.0f);
}

// `given` are the experts that the token has in any case, or null.
void route_token(const Router& p, Scratch& s, const float* logits, const float* bias, const float* per_expert_scale,
                 const int16_t* given, float* weights, int32_t* ids) {
  score_token(p, logits, s.scores.data());
  if (given) {
    std::copy_n(given, p.K, ids);
    return weigh_token(p, s, per_expert_scale, ids, weights);
  }
  for (int64_t e = 0; e < p.E; ++e)
    s.choice[e] = (p.select_on_logit ? logits[e] : s.scores[e]) + (bias ? bias[e] : 0.0f);
  if (p.n_group > 1) limit_groups(p, s);
  top_k(s.choice.data(), p.E, p.K, s.ranked, ids);
  weigh_token(p, s, per_expert_scale, ids, weights);
}

void route_all(const Router& p, const float* logits, const float* bias, const float* per_expert_scale,
               const int16_t* given, float* weights, int32_t* ids) {
#pragma omp parallel num_threads(p.T * p.E < kParallelLogits ? 1 : p.threads)
  {
    Scratch scratch(p);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.T; ++t) {
      const int16_t* const of_token = given && given[t * p.K] >= 0 ? given + t * p.K : nullptr;
      route_token(p, scratch, logits + t * p.E, bias, per_expert_scale, of_token, weights + t * p.K, ids + t * p.K);
    }
  }
}

}  // namespace

extern "C" void moe_route(const Router* router, const float* logits, const float* bias, const float* per_expert_scale,
                          float* weights, int32_t* ids) {
  route_all(*router, logits, bias, per_expert_scale, nullptr, weights, ids);
}

// The same with the experts of `given`, but for its rows that begin with a negative number. False, and nothing is
// written, where a row of these has an id that is no expert's.
extern "C" bool moe_route_given(const Router* router, const float* logits, const float* bias,
                                const float* per_expert_scale, const int16_t* given, float* weights, int32_t* ids) {
  const Router& p = *router;
  for (int64_t i = 0; i < p.T * p.K; ++i)
    if (given[i / p.K * p.K] >= 0 && (given[i] < 0 || given[i] >= p.E)) return false;
  route_all(p, logits, bias, per_expert_scale, given, weights, ids);
  return true;
}
