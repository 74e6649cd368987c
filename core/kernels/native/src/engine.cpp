#include "engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string_view>
#include <vector>

#include "team.h"
#if defined(HR_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

const Dialect* choose(const char* wanted);

// Items of an operation, `size` of which go together, in parts of `total`.
struct Items {
  int total, size, parts;
  int together() const { return (total + size - 1) / size; }
  int count() const { return together() * parts; }
  int first(int i) const { return i / together() * total + i % together() * size; }
  int end(int i) const { return std::min(first(i) + size, (i / together() + 1) * total); }
};

struct Engine {
  HrProgram program;
  const Dialect* dialect;
  Team team;
  std::vector<std::vector<float>> scratch;
  std::vector<Unit> units;
  std::vector<int32_t> rows, row_seq, counts;
  std::vector<Items> items;
  std::vector<uint8_t> sampled;
  std::vector<Share> shares;
  std::vector<int32_t> blocks;
  std::vector<std::vector<float>> divisors;  // of each matrix
  std::vector<const float*> divisors_of;
  int heads_together = 1;
  bool windows = false;  // in any layer

  Engine(const HrProgram& p, const Dialect* d, int threads, int spin) : program(p), dialect(d), team(threads, spin) {
    int floats = p.scratch_floats;
    for (int i = 0; i < p.num_ops; i++)
      if (p.ops[i].kind == HR_ATTEND) floats = std::max(floats, HR_MAX_QUERIES * 2 * (p.ops[i].inner + HR_KEYS));
    for (int i = 0; i < p.num_matrices; i++) {
      const HrMatrix& m = p.matrices[i];
      floats = std::max(floats, d->scratch(m));
      divisors.emplace_back((size_t)(m.n + 15) / 16);
      d->divisors(m, divisors.back().data());
    }
    for (const auto& each : divisors) divisors_of.push_back(each.data());
    for (int i = 0; i < p.num_ops; i++) windows |= p.ops[i].kind == HR_ATTEND && p.ops[i].window;
    divide_cache();
    scratch.assign((size_t)threads, std::vector<float>((size_t)floats + 16));
  }

  // Products share what they have fetched for the next attention, each as much as it has work.
  void divide_cache() {
    shares.assign((size_t)program.num_ops, Share{});
    auto work = [&](int i) {
      const HrOp& op = program.ops[i];
      const HrMatrix* m = op.kind == HR_MATMUL && op.domain == HR_TOKENS ? &program.matrices[op.matrix] : nullptr;
      return m ? (double)m->n * m->k : 0.0;
    };
    for (int first = 0, i = 0; i < program.num_ops; i++) {
      if (program.ops[i].kind != HR_ATTEND) continue;
      double all = 0, before = 0;
      for (int j = first; j < i; j++) all += work(j);
      for (int j = first; j < i; j++) {
        // A window leaves most of the blocks out.
        if (work(j) > 0 && !program.ops[i].window)
          shares[(size_t)j] = {program.ops[i].layer, (float)(before / all), (float)((before + work(j)) / all)};
        before += work(j);
      }
      first = i + 1;
    }
  }
};

// Keys, in whole tiles, that two sequences with a row each read from the same blocks.
int in_common(const Engine& e, const HrStep& step, int a, int b) {
  const int32_t *x = step.tables + step.cu_blocks[a], *y = step.tables + step.cu_blocks[b];
  const int n = std::min(step.cu_blocks[a + 1] - step.cu_blocks[a], step.cu_blocks[b + 1] - step.cu_blocks[b]);
  int same = 0;
  while (same < n && x[same] == y[same]) same++;
  const int seen = std::min(step.positions[step.cu_tokens[a]], step.positions[step.cu_tokens[b]]) + 1;
  return std::min(same * e.program.cache.block_size, seen) / HR_KEYS * HR_KEYS;
}

// Which rows attention takes together: as many queries as fit a tile. Sequences that begin with the same block come one after
// the other; where each has one row, they look at what they share together, in groups enough for all threads.
void plan_units(Engine& e, const HrStep& step, int heads_per_kv) {
  e.units.clear();
  e.rows.clear();
  e.row_seq.resize((size_t)step.num_tokens);
  std::vector<int32_t> order((size_t)step.num_seqs);
  for (int i = 0; i < step.num_seqs; i++) order[(size_t)i] = i;
  auto first_block = [&](int32_t i) { return step.cu_blocks[i] < step.cu_blocks[i + 1] ? step.tables[step.cu_blocks[i]] : 0; };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return first_block(a) < first_block(b); });
  const int most = std::max(1, HR_MAX_QUERIES / std::max(1, heads_per_kv));
  auto is_alone = [&](int32_t seq) { return step.cu_tokens[seq + 1] - step.cu_tokens[seq] == 1; };
  auto push = [&](int first_row, int end_row) {
    const int first = (int)e.rows.size();
    for (int row = first_row; row < end_row; row++) e.rows.push_back(row);
    e.units.push_back({first, (int32_t)e.rows.size(), Unit::ALL, 0});
  };
  int alike = 0;  // sequences from here on that begin alike and have one row each
  for (size_t i = 0; i < order.size(); i++) {
    const int32_t seq = order[i], first = step.cu_tokens[seq];
    for (int row = first; row < step.cu_tokens[seq + 1]; row++) e.row_seq[(size_t)row] = seq;
    if (!is_alone(seq) || e.windows) {
      // The longest come last, where the other threads begin.
      for (int row = first; row < step.cu_tokens[seq + 1]; row += most) push(row, std::min(row + most, step.cu_tokens[seq + 1]));
      continue;
    }
    if (i == 0 || !is_alone(order[i - 1]) || first_block(order[i - 1]) != first_block(seq)) {
      for (alike = 0; i + alike < order.size() && is_alone(order[i + alike]) && first_block(order[i + alike]) == first_block(seq);) alike++;
    } else {
      Unit& unit = e.units.back();
      const int head = e.row_seq[(size_t)e.rows[(size_t)unit.first]];
      const int group = std::min(most, (alike + e.team.size() - 1) / e.team.size()), shared = in_common(e, step, head, seq);
      if (unit.end - unit.first < group && shared >= HR_KEYS && (unit.shared == Unit::ALL || 2 * shared > unit.shared)) {
        unit.shared = std::min(unit.shared, shared);
        e.rows.push_back(first);
        unit.end++;
        continue;
      }
    }
    push(first, first + 1);
  }
  e.sampled.assign((size_t)step.num_tokens, 0);
  for (int i = 0; i < step.num_samples; i++) e.sampled[(size_t)step.sample_rows[i]] = 1;
  for (Unit& unit : e.units)
    for (int i = unit.first; i < unit.end; i++) unit.sampled |= e.sampled[(size_t)e.rows[(size_t)i]];
}

// The blocks that attention will read, in the order of its units, as many of one layer as processors' caches may keep until
// then. What sequences share counts once.
void plan_cache(Engine& e, const HrStep& step) {
  constexpr int64_t MOST_BYTES = 8 << 20;
  const HrCache& c = e.program.cache;
  e.blocks.clear();
  const size_t most = c.block_stride ? (size_t)(MOST_BYTES / c.block_stride) : 0;
  const int32_t *table = nullptr, *before = nullptr;
  int num_blocks = 0, num_before = 0;
  for (int32_t row : e.rows) {
    const int32_t seq = e.row_seq[(size_t)row];
    if (table == step.tables + step.cu_blocks[seq]) continue;  // Of the same sequence.
    before = table;
    num_before = num_blocks;
    table = step.tables + step.cu_blocks[seq];
    num_blocks = step.positions[step.cu_tokens[seq + 1] - 1] / c.block_size + 1;
    for (int i = 0; i < num_blocks && e.blocks.size() < most; i++)
      if (i >= num_before || before[i] != table[i]) e.blocks.push_back(table[i]);
  }
}

// Heads of a block lie together, so one thread had better read them all; where there are few rows, threads share them.
int together(const Engine& e, const HrOp& op) {
  int most = 0;
  for (const Unit& unit : e.units) most = std::max(most, unit.end - unit.first);
  bool fits = most * op.heads <= HR_MAX_QUERIES;
  return fits && (int)e.units.size() >= 4 * e.team.size() ? op.kv_heads : 1;
}

// How an operation's items go together: a few microseconds' worth, and enough for all threads.
Items divide(Engine& e, const HrStep& step, const HrOp& op) {
  const int rows = op.domain == HR_SAMPLES ? step.num_samples : step.num_tokens, threads = e.team.size();
  switch (op.kind) {
    case HR_MATMUL: {
      const HrMatrix& m = e.program.matrices[op.matrix];
      const int blocks = (m.n + 15) / 16, total = rows ? (m.gated ? blocks / 4 : blocks) : 0;
      const int per_thread = rows >= 16 ? e.dialect->many_items : e.dialect->few_items, parts = e.dialect->own_rows.parts(rows, threads).parts;
      int size = std::clamp(total * parts / (threads * per_thread), m.gated ? 1 : 2, 64);
      if (!m.gated) size &= ~1;  // Kernels take pairs.
      return {total, size, parts};
    }
    case HR_ATTEND: {
      const int total = (int)e.units.size() * (op.kv_heads / e.heads_together);
      // Short ones in a row: a thread that knows its next has it fetched.
      return {total, e.heads_together == op.kv_heads ? std::clamp(total / (threads * 4), 1, 8) : 1, 1};
    }
    default: return {rows, std::clamp(rows / (threads * 4), 1, 16), 1};
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int32_t hr_abi() { return HR_ABI; }

// Bytes of each struct, so that Python can see that it means the same.
void hr_sizes(int32_t* out, int32_t count) {
  const size_t sizes[] = {sizeof(HrRef),  sizeof(HrOp),    sizeof(HrMatrix),  sizeof(HrBuffer), sizeof(HrInts),
                          sizeof(HrTurn), sizeof(HrCache), sizeof(HrProgram), sizeof(HrStep), sizeof(HrDraw)};
  for (int32_t i = 0; i < count && i < (int32_t)(sizeof sizes / sizeof *sizes); i++) out[i] = (int32_t)sizes[i];
}

// The best dialect this processor speaks, or `wanted`; null where it does not speak that.
const char* hr_dialect(const char* wanted) {
  const Dialect* d = choose(wanted);
  return d ? d->name : nullptr;
}

// The program's arrays must outlive the engine.
void* hr_create(const HrProgram* program, const char* dialect, int32_t threads, int32_t spin) {
  const Dialect* d = choose(dialect);
  return d ? new Engine(*program, d, std::max(1, (int)threads), spin) : nullptr;
}

void hr_destroy(void* engine) { delete static_cast<Engine*>(engine); }

// Operations [first, end) of the program for one step. Buffers must have room for the step's rows.
void hr_run(void* engine, const HrStep* step, int32_t first, int32_t end) {
  Engine& e = *static_cast<Engine*>(engine);
  const HrOp* ops = e.program.ops;
  const HrOp* attend = std::find_if(ops + first, ops + end, [](const HrOp& op) { return op.kind == HR_ATTEND; });
  const HrOp* store = std::find_if(ops + first, ops + end, [](const HrOp& op) { return op.kind == HR_STORE; });
  if (attend != ops + end || store != ops + end) plan_units(e, *step, attend != ops + end ? attend->heads / attend->kv_heads : 1);
  if (attend != ops + end) plan_cache(e, *step);
  e.heads_together = attend != ops + end ? together(e, *attend) : 1;
  int n = end - first;
  e.counts.resize((size_t)n);
  e.items.resize((size_t)n);
  for (int i = 0; i < n; i++) {
    e.items[(size_t)i] = divide(e, *step, ops[first + i]);
    e.counts[(size_t)i] = e.items[(size_t)i].count();
  }
  Run run{&e.program,       step,
          e.units.data(),   e.rows.data(),
          e.row_seq.data(), e.heads_together,
          e.shares.data(),  e.blocks.data(),
          (int32_t)e.blocks.size(), e.team.size(),
          e.divisors_of.data()};
  e.team.run(n, e.counts.data(), [&](int i, int item, int last, int next, int thread) {
    const Items& items = e.items[(size_t)i];
    while (item < last) {  // A part at a time.
      const int then = std::min(last, (item / items.together() + 1) * items.together()), after = then < last ? then : next;
      e.dialect->tile(run, ops[first + i], items.first(item), items.end(then - 1), after < 0 ? -1 : items.first(after),
                      e.scratch[(size_t)thread].data());
      item = then;
    }
  });
}

// The last thread takes no item while `wanted`; from any thread.
void hr_give_way(void* engine, int32_t wanted) { static_cast<Engine*>(engine)->team.give_way(wanted != 0); }

// Draws a token for each row, all at once.
void hr_draw(void* engine, HrDraw* rows, int32_t num_rows, int32_t vocab_size) {
  Engine& e = *static_cast<Engine*>(engine);
  e.team.run(1, &num_rows, [&](int, int first, int end, int, int) {
    for (int i = first; i < end; i++) e.dialect->draw(rows[i], vocab_size);
  });
}

// The same for rows of which `slots` names the parameters among `all`, and `positions` where they are. What is drawn goes into
// `tokens`, as HrDraw's does.
void hr_draw_slots(void* engine, const HrDraw* all, const int32_t* slots, const int32_t* positions, float* logits,
                   int64_t stride, int32_t num_rows, int32_t vocab_size, int32_t* tokens) {
  Engine& e = *static_cast<Engine*>(engine);
  e.team.run(1, &num_rows, [&](int, int first, int end, int, int) {
    for (int i = first; i < end; i++) {
      HrDraw row = all[slots[i]];
      row.position = (uint64_t)positions[i];
      row.logits = logits + i * stride;
      e.dialect->draw(row, vocab_size);
      tokens[i] = row.token;
    }
  });
}

// What the machine can do with the engine's threads: bytes read a second from `bytes` of memory, and products of an 8-bit
// and a 4- or 8-bit integer a second, with everything in registers. Best of `rounds`.
void hr_limits(void* engine, int64_t bytes, int32_t rounds, double* read_per_s, double* products_per_s) {
  Engine& e = *static_cast<Engine*>(engine);
  using clock = std::chrono::steady_clock;
  constexpr int64_t CHUNK = 1 << 18, ROUNDS = 1 << 16;
  std::vector<float> memory((size_t)(bytes / 4));
  std::vector<double> sums((size_t)e.team.size());
  int32_t chunks = (int32_t)(bytes / 4 / CHUNK), pieces = 64;
  *read_per_s = *products_per_s = 0;
  for (int i = 0; i < rounds; i++) {
    auto start = clock::now();
    e.team.run(1, &chunks, [&](int, int first, int end, int, int thread) {
      for (int j = first; j < end; j++) sums[(size_t)thread] += e.dialect->read(&memory[(size_t)(j * CHUNK)], CHUNK);
    });
    double seconds = std::chrono::duration<double>(clock::now() - start).count();
    *read_per_s = std::max(*read_per_s, (double)chunks * CHUNK * 4 / seconds);
    std::atomic<int64_t> products{0};
    start = clock::now();
    e.team.run(1, &pieces, [&](int, int first, int end, int, int) {
      for (int j = first; j < end; j++) products += e.dialect->multiply(ROUNDS);
    });
    seconds = std::chrono::duration<double>(clock::now() - start).count();
    *products_per_s = std::max(*products_per_s, (double)products / seconds);
  }
}

}  // extern "C"
#pragma GCC visibility pop

namespace {

#if defined(HR_HAS_AMX)
// Whether the processor has tiles of bfloat16, the system keeps them for this process, and there is what goes with them.
bool has_tiles() {
  uint32_t a, b, c, d, wanted = 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;  // AMX-BF16, AVX512-FP16, AMX-TILE, -INT8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & wanted) != wanted || !(c & 1u << 1)) return false;  // AVX512-VBMI
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return false;  // AVX512-BF16
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
#endif

bool speaks(const Dialect* d) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(HR_HAS_AMX)
  if (d == &hr_amx) {
    static const bool has = has_tiles();
    return has && speaks(&hr_avx512);
  }
#endif
  if (d == &hr_avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  if (d == &hr_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return true;
}

const Dialect* choose(const char* wanted) {
#if defined(HR_HAS_AMX)
  const Dialect* all[] = {&hr_amx, &hr_avx512, &hr_avx2, &hr_portable};
#elif defined(__x86_64__)
  const Dialect* all[] = {&hr_avx512, &hr_avx2, &hr_portable};
#else
  const Dialect* all[] = {&hr_portable};
#endif
  for (const Dialect* d : all)
    if (d && speaks(d) && (!wanted || !*wanted || std::string_view(wanted) == d->name)) return d;
  return nullptr;
}

}  // namespace
