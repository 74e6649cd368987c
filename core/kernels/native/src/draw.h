// The draw of one row. The vocabulary is never sorted: the largest logits of blocks of 64 tell from where on logits count,
// and only those are looked at.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "abi.h"
#include "vec.h"

namespace HR_ISA {

constexpr int BLOCK = 64;
constexpr int FEW = 256;  // candidates that are enough for almost every row without a top-k
// Sums of float probabilities come out a little under or over what they should reach.
constexpr double ROUNDING = 1e-6;

struct Candidate {
  float logit;
  int32_t id;
};

struct Workspace {
  std::vector<float> tops, ranked, weights;
  std::vector<double> sums;
  std::vector<Candidate> kept, before;  // before: what logits were that a penalty changed
  std::vector<int32_t> counts;          // [vocab_size], zeros between two uses
};

// The tokens from `first` on that are new to `counts`, with their logits, into `before`; how often each came into `counts`.
static void count(const HrDraw& d, int first, int n, Workspace& w) {
  if ((int)w.counts.size() < n) w.counts.resize((size_t)n);
  for (int i = first; i < d.num_tokens; i++) {
    const int32_t id = d.tokens[i];
    if (id < 0 || id >= n) continue;
    if (w.counts[(size_t)id]++ == 0) w.before.push_back({d.logits[id], id});
  }
}

// Makes tokens that were there before less likely: as Keskar et al. 2019 (arXiv:1909.05858) with negative logits multiplied, then
// as OpenAI's API has presence and frequency.
static void penalize(const HrDraw& d, int n, Workspace& w) {
  w.before.clear();
  if (d.repetition != 1) {
    count(d, 0, n, w);
    for (const Candidate& c : w.before) {
      d.logits[c.id] = c.logit < 0 ? c.logit * d.repetition : c.logit / d.repetition;
      w.counts[(size_t)c.id] = 0;
    }
  }
  if (d.presence == 0 && d.frequency == 0) return;
  const size_t changed = w.before.size();
  count(d, d.num_prompt, n, w);
  for (size_t i = changed; i < w.before.size(); i++) {
    int32_t& times = w.counts[(size_t)w.before[i].id];
    d.logits[w.before[i].id] -= (float)times * d.frequency + d.presence;
    times = 0;
  }
}
// The last change first, for a token can be there twice.
static void put_back(const HrDraw& d, Workspace& w) {
  for (auto c = w.before.rbegin(); c != w.before.rend(); ++c) d.logits[c->id] = c->logit;
}

// The largest logit of each block. NaN where any is.
static float block_tops(const float* x, int n, std::vector<float>& tops) {
  tops.clear();
  Bad bad;
  for (int start = 0; start < n; start += BLOCK) {
    V m = set1(-INFINITY);
    for (int i = start; i < std::min(n, start + BLOCK); i += 16) {
      V v = n - i >= 16 ? load(x + i) : keep(load_n(x + i, n - i), 0, n - i, -INFINITY);
      watch(bad, v);
      m = max(m, v);
    }
    tops.push_back(largest(m));
  }
  if (any(bad)) return NAN;
  return *std::max_element(tops.begin(), tops.end());
}

// exp((x - top) / temperature) of a block, and the sum.
static double block_weights(const float* x, int n, float top, float by, float* out) {
  double total = 0;
  for (int i = 0; i < n; i += 16) {
    V v = n - i >= 16 ? load(x + i) : keep(load_n(x + i, n - i), 0, n - i, -INFINITY);
    v = exp(mul(sub(v, set1(top)), set1(by)));
    store(out + i, v);
    total += sum(v);
  }
  return total;
}

// The first whose running sum is over `goal`; the last with any weight where rounding left none.
template <class Weight>
static int pick(int n, double goal, Weight weight) {
  double running = 0;
  int last = 0;
  for (int i = 0; i < n; i++) {
    double w = weight(i);
    if (w <= 0) continue;
    running += w;
    last = i;
    if (running > goal) return i;
  }
  return last;
}

static int draw_from_all(const HrDraw& d, int n, float top, float by, Workspace& w) {
  float block[BLOCK];
  w.sums.clear();
  double total = 0;
  for (int start = 0; start < n; start += BLOCK) {
    w.sums.push_back(block_weights(d.logits + start, std::min(BLOCK, n - start), top, by, block));
    total += w.sums.back();
  }
  double goal = d.uniform * total, before = 0;
  size_t hit = 0, last = 0;
  for (; hit < w.sums.size(); before += w.sums[hit++]) {
    if (w.sums[hit] <= 0) continue;
    last = hit;
    if (before + w.sums[hit] > goal) break;
  }
  if (hit == w.sums.size()) {
    hit = last;
    before = total - w.sums[last];
  }
  int start = (int)hit * BLOCK;
  block_weights(d.logits + start, std::min(BLOCK, n - start), top, by, block);
  return start + pick(std::min(BLOCK, n - start), goal - before, [&](int i) { return (double)block[i]; });
}

// All logits from `bound` on, the likeliest first.
static void gather(const HrDraw& d, int n, float bound, Workspace& w) {
  w.kept.clear();
  for (size_t b = 0; b < w.tops.size(); b++) {
    if (w.tops[b] < bound || w.tops[b] == -INFINITY) continue;
    for (int i = (int)b * BLOCK; i < std::min(n, ((int)b + 1) * BLOCK); i++)
      if (d.logits[i] >= bound && d.logits[i] > -INFINITY) w.kept.push_back({d.logits[i], i});
  }
  std::sort(w.kept.begin(), w.kept.end(), [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  });
}

// From where on at least `count` logits are: as many blocks have one that large.
static float bound_for(int count, Workspace& w) {
  if (count >= (int)w.tops.size()) return -std::numeric_limits<float>::max();
  w.ranked = w.tops;
  std::nth_element(w.ranked.begin(), w.ranked.begin() + count - 1, w.ranked.end(), std::greater<float>());
  return std::max(w.ranked[(size_t)count - 1], -std::numeric_limits<float>::max());
}

static double total_weight(const HrDraw& d, int n, float top, float by) {
  float block[BLOCK];
  double total = 0;
  for (int start = 0; start < n; start += BLOCK)
    total += block_weights(d.logits + start, std::min(BLOCK, n - start), top, by, block);
  return total;
}

static void weigh(Workspace& w, size_t count, float top, float by) {
  w.weights.resize((count + 15) / 16 * 16);
  for (size_t i = 0; i < count; i++) w.weights[i] = (w.kept[i].logit - top) * by;
  for (size_t i = 0; i < count; i += 16) store(&w.weights[i], exp(load(&w.weights[i])));
}

// How many of the candidates, likeliest first, reach the share `p` of `total`; 0 where all together do not.
static size_t reach(const Workspace& w, size_t count, double p, double total) {
  double before = 0;
  for (size_t i = 0; i < count; i++) {
    before += w.weights[i];
    if (before >= (p - ROUNDING) * total) return i + 1;
  }
  return 0;
}

static int draw_truncated(const HrDraw& d, int n, float top, float by, Workspace& w) {
  const bool by_count = d.top_k > 0 && d.top_k < n, by_share = d.top_p < 1;
  size_t count = 0;
  if (by_count || !by_share) {
    // Without a top-k only min-p is left, which is a bound by itself.
    gather(d, n, by_count ? bound_for(d.top_k, w) : top + std::log(d.min_p) / by, w);
    count = by_count ? std::min(w.kept.size(), (size_t)d.top_k) : w.kept.size();
    weigh(w, count, top, by);
    if (by_share) {
      double total = 0;
      for (size_t i = 0; i < count; i++) total += w.weights[i];
      if (size_t share = reach(w, count, d.top_p, total)) count = share;
    }
  } else {
    double total = total_weight(d, n, top, by);
    for (int few = FEW;; few = few < n / 8 ? few * 8 : n) {
      gather(d, n, few >= n ? -std::numeric_limits<float>::max() : bound_for(few, w), w);
      weigh(w, w.kept.size(), top, by);
      count = reach(w, w.kept.size(), d.top_p, total);
      if (count == 0 && few >= n) count = w.kept.size();
      if (count) break;
    }
  }
  if (d.min_p > 0) {
    float least = std::log(d.min_p);
    size_t likely = 1;
    while (likely < count && (w.kept[likely].logit - top) * by >= least) likely++;
    count = std::min(count, likely);
  }
  // In the order of ids, as without truncation.
  std::sort(w.kept.begin(), w.kept.begin() + (long)count, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  weigh(w, count, top, by);
  double total = 0;
  for (size_t i = 0; i < count; i++) total += w.weights[i];
  return w.kept[(size_t)pick((int)count, d.uniform * total, [&](int i) { return (double)w.weights[(size_t)i]; })].id;
}

// A number in [0, 1), a pure function of the three. Philox4x32-10 of Salmon et al. 2011, Parallel Random Numbers.
static double uniform_of(uint64_t seed, uint64_t position, uint32_t choice) {
  uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), choice, 0};
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)c[0] * 0xD2511F53u, p1 = (uint64_t)c[2] * 0xCD9E8D57u;
    uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ k1, (uint32_t)p0};
    std::copy(next, next + 4, c);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (double)(((uint64_t)c[0] << 32 | c[1]) >> 11) * 0x1p-53;
}

static void draw_token(HrDraw& d, int n, Workspace& w) {
  const float top = d.top = block_tops(d.logits, n, w.tops);
  d.token = -1;
  if (!std::isfinite(top) || d.temperature < 0) return;
  if (d.temperature == 0) {
    int block = (int)(std::find(w.tops.begin(), w.tops.end(), top) - w.tops.begin());
    d.token = (int32_t)(std::find(d.logits + block * BLOCK, d.logits + n, top) - d.logits);
    return;
  }
  if (d.uniform < 0) d.uniform = uniform_of(d.seed, d.position, d.choice);
  const float by = 1.0f / d.temperature;
  const bool all = (d.top_k <= 0 || d.top_k >= n) && d.top_p >= 1 && d.min_p <= 0;
  d.token = all ? draw_from_all(d, n, top, by, w) : draw_truncated(d, n, top, by, w);
}

static void draw(HrDraw& d, int n) {
  thread_local Workspace w;
  penalize(d, n, w);
  draw_token(d, n, w);
  put_back(d, w);
}

}  // namespace HR_ISA
