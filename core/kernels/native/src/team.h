// A few threads that claim the items of one operation after another: every other thread from the first on, the rest from the
// last on, and each a share of what is left, so the first claims are long and the last ones short. So a thread meets the same rows
// and outputs in operation after operation, where its own caches have them, and none is left alone with more than an item's
// work.
//
// Nobody waits for a thread to arrive: an operation is over when its items are done, whoever did them. So a thread that the
// system has put aside holds nothing up unless it was put aside inside an item. Where there is no processor left for the rest
// of the program, the last thread gives way between items while that is at work, instead of being put aside inside one; and now
// and then, between items, each offers its processor to whatever else waits for it.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

class Team {
 public:
  // threads: in all, the caller's included. spin: looks at the counter before an idle thread sleeps.
  Team(int threads, int spin);
  ~Team();

  // Items [first, end) of an operation, for a thread that is likely to go on with item `next`; below 0: with none.
  using Work = std::function<void(int operation, int first, int end, int next, int thread)>;
  // Runs `work` for all items of each operation; operations follow one another. counts: items each, at most 2^20 - 1.
  void run(int num_operations, const int32_t* counts, const Work& work);
  int size() const { return size_; }
  // From any thread: the last one takes no item while `wanted`.
  void give_way(bool wanted);

 private:
  // Of so many items that are left what a thread takes at once: two thirds of its part.
  uint32_t share(uint32_t left) const { return (2 * left + 3 * (uint32_t)size_ - 1) / (3 * (uint32_t)size_); }
  void take_part(int thread, bool until_end);
  void idle(int thread);

  // The number of an operation and which of its items nobody has claimed, in one word: a thread that comes late to an operation
  // that is over must not need to look anywhere else to see that.
  struct Word {
    uint32_t operation, item, end;
    uint32_t left() const { return end - item; }
    uint64_t packed() const { return (uint64_t)operation << 40 | (uint64_t)end << 20 | item; }
    static Word of(uint64_t w) { return {(uint32_t)(w >> 40), (uint32_t)w & 0xfffff, (uint32_t)(w >> 20) & 0xfffff}; }
  };
  alignas(64) std::atomic<uint64_t> next_{Word{1, 0, 0}.packed()};
  alignas(64) std::atomic<int32_t> done_{0};
  alignas(64) std::atomic<uint32_t> base_{2}, end_{2};
  std::atomic<const int32_t*> counts_{nullptr};
  std::atomic<const Work*> work_{nullptr};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int32_t> way_wanted_{0};
  const int size_, spin_;
  std::vector<std::thread> workers_;
};
