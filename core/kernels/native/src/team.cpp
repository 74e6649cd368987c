#include "team.h"

#include <sched.h>

#include <chrono>

static inline void pause_a_bit() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Something that counts up, looked at before each claim: the processor's own counter where it has one, for a call of the
// system's clock takes as long as a claim. Some 2 to 4 of its steps are a nanosecond.
static inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return (uint64_t)std::chrono::steady_clock::now().time_since_epoch().count();
#endif
}
// Between two offers of the processor to whoever waits for it, about 100 microseconds: where that is nobody, an offer takes less
// than a microsecond.
#if defined(__x86_64__)
constexpr uint64_t OFFER = 300000;
#else
constexpr uint64_t OFFER = 100 * std::chrono::steady_clock::period::den / 1000000;
#endif

Team::Team(int threads, int spin) : size_(threads), spin_(spin) {
  for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { idle(i); });
}

Team::~Team() {
  stop_.store(true);
  give_way(false);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& w : workers_) w.join();
}

void Team::run(int num_operations, const int32_t* counts, const Work& work) {
  int first = 0;
  while (first < num_operations && counts[first] == 0) first++;
  if (first == num_operations) return;
  // A worker that still looks at the last run sees an operation before base_ and leaves it alone.
  uint32_t base = end_.load(std::memory_order_relaxed) + 1;
  if (base > 0xe00000u) base = 2;  // 24 bits of it are kept. Nobody has slept since it was 2 last.
  counts_.store(counts, std::memory_order_relaxed);
  work_.store(&work, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  base_.store(base, std::memory_order_relaxed);
  end_.store(base + (uint32_t)num_operations, std::memory_order_relaxed);
  next_.store(Word{base + (uint32_t)first, 0, (uint32_t)counts[first]}.packed(), std::memory_order_release);
  if (!workers_.empty()) {
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
  }
  take_part(0, true);
}

void Team::give_way(bool wanted) {
  way_wanted_.store(wanted, std::memory_order_release);
  if (!wanted) way_wanted_.notify_all();
}

void Team::take_part(int thread, bool until_end) {
  const bool last = thread > 0 && thread == size() - 1;
  int looks = 0;
  uint64_t offered = ticks();
  while (true) {
    // Better here than inside an item, where the system would take it a moment later and the others would have to wait.
    if (ticks() - offered > OFFER) {
      sched_yield();
      offered = ticks();
    }
    if (last && way_wanted_.load(std::memory_order_relaxed)) way_wanted_.wait(1, std::memory_order_acquire);
    uint64_t seen = next_.load(std::memory_order_acquire);
    const Word word = Word::of(seen);
    const bool backwards = thread % 2;
    uint32_t base = base_.load(std::memory_order_relaxed), end = end_.load(std::memory_order_relaxed);
    if (word.operation < base || word.operation >= end) {
      if (until_end || ++looks > spin_) return;
      pause_a_bit();
      continue;
    }
    if (word.item >= word.end) {
      // Others are busy with the last items. After a while the core is theirs.
      if (++looks > 4096) sched_yield();
      else pause_a_bit();
      continue;
    }
    const uint32_t mine = share(word.left());
    const Word rest = backwards ? Word{word.operation, word.item, word.end - mine} : Word{word.operation, word.item + mine, word.end};
    if (!next_.compare_exchange_weak(seen, rest.packed(), std::memory_order_acq_rel, std::memory_order_relaxed)) continue;
    // Now they are ours, and the run cannot end without them: what it points to is there.
    looks = 0;
    base = base_.load(std::memory_order_relaxed);
    end = end_.load(std::memory_order_relaxed);
    const int32_t* counts = counts_.load(std::memory_order_relaxed);
    const int32_t all = counts[word.operation - base];  // Once this one is done there may be no more counts.
    const auto& work = *work_.load(std::memory_order_relaxed);
    const int first = (int)(backwards ? rest.end : word.item);
    const int next = !rest.left() ? -1 : (int)(backwards ? rest.end - share(rest.left()) : rest.item);
    work((int)(word.operation - base), first, first + (int)mine, next, thread);
    if (done_.fetch_add((int32_t)mine, std::memory_order_acq_rel) + (int32_t)mine < all) continue;
    uint32_t following = word.operation + 1;
    // What is one item is done before anybody could come for it.
    for (; following < end && counts[following - base] <= 1; following++)
      if (counts[following - base]) work((int)(following - base), 0, 1, -1, thread);
    const uint32_t count = following < end ? (uint32_t)counts[following - base] : 0;
    done_.store(0, std::memory_order_relaxed);
    next_.store(Word{following, 0, count}.packed(), std::memory_order_release);
  }
}

void Team::idle(int thread) {
  while (!stop_.load()) {
    uint32_t epoch = epoch_.load(std::memory_order_acquire);
    take_part(thread, false);
    if (stop_.load()) return;
    epoch_.wait(epoch, std::memory_order_acquire);
  }
}
