// The entry points of the library: choosing an instruction set, running programs.

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "pool.h"
#include "program.h"
#include "ranks.h"
#include "team.h"
#include "fused_step.h"

#define API extern "C" __attribute__((visibility("default")))

namespace weft {

using Kernel = void (*)(const void* args, const StepArgs& step, Team& team);

struct InstructionSet {
  const char* name;
  const Kernel* kernels;  // [kNumOps]
};

// WEFT_SETS lists the instruction sets in this library, the best first: SET(avx512_bf16) SET(avx2)
// ...
#define SET(name) extern const Kernel kernels_##name[kNumOps];
WEFT_SETS
#undef SET

namespace {

std::atomic<int> out_of_memory{0};

#if defined(__x86_64__)
// Not all compilers that know the instructions know whether a processor has them.
bool has_avx_vnni() {
  unsigned found[4] = {};
  if (!__get_cpuid_count(7, 1, &found[0], &found[1], &found[2], &found[3]))
    return false;
  return found[0] & 1u << 4;
}
#endif

bool supported(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (!strcmp(name, "avx512_bf16") || !strcmp(name, "avx512_bf16_kv"))
    return vnni && __builtin_cpu_supports("avx512bf16");
  if (!strcmp(name, "avx512_vnni") || !strcmp(name, "emulated_bf16"))
    return vnni;
  if (!strcmp(name, "avx512"))
    return avx512;
  if (!strcmp(name, "avx2_vnni"))
    return avx2 && has_avx_vnni();
  if (!strcmp(name, "avx2"))
    return avx2;
#endif
  return !strcmp(name, "portable");
}

// The same rule as `slow_on` in build.py: products of pairs of bfloat16 have half the rate of
// floats there.
bool slow(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return !strcmp(name, "avx512_bf16") && __builtin_cpu_is("intel");
#else
  return false;
#endif
}

#define SET(name) {#name, kernels_##name},
const InstructionSet all_sets[] = {WEFT_SETS};
#undef SET

constexpr int kNumSets = sizeof all_sets / sizeof *all_sets;

struct ProgramRun : Work {
  const Kernel* kernels;
  const Op* ops;
  const StepArgs* step;
  // Operations over all tokens of the step; those after run over the narrowed step.
  int64_t num_wide;

  void run(int64_t operation, Team& team) override {
    const StepArgs& here = operation < num_wide ? *step : *step->narrowed;
    kernels[ops[operation].kind](ops[operation].args, here, team);
  }
};

// Notes when each operation begins. One ends where the next begins: its barrier belongs to it.
struct TimedRun : ProgramRun {
  int64_t* began;  // [number of operations]

  void run(int64_t operation, Team& team) override {
    if (team.index == 0)
      began[operation] = now_ns();
    ProgramRun::run(operation, team);
  }
};

struct Memory {
  char* data = nullptr;
  int64_t size = 0;

  void* at_least(int64_t bytes) {
    if (bytes > size) {
      free(data);
      size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      data = static_cast<char*>(aligned_alloc(64, size));
      if (!data) {
        size = 0;
        out_of_memory.store(1);
      }
    }
    return data;
  }
};

// The number of operations before the first kNarrow.
int64_t first_narrowing(const Op* ops, int64_t num_ops) {
  int64_t i = 0;
  while (i < num_ops && ops[i].kind != kNarrow)
    i++;
  return i;
}

void run(ProgramRun& program, int set, const Op* ops, int64_t num_ops, const StepArgs& step,
         int num_threads) {
  program.kernels = all_sets[set].kernels;
  program.ops = ops;
  program.step = &step;
  program.num_wide = step.narrowed ? first_narrowing(ops, num_ops) : num_ops;
  run_together(program, num_ops, num_threads);
}

// `times` [num_ops + 1]: when each operation began, and the last one ended; null: not recorded.
// Returns 0, -1 if memory ran out, or -3 if a rank was lost.
int run(int set, const Op* ops, int64_t num_ops, const StepArgs& step, int num_threads,
        int64_t* times) {
  if (times) {
    TimedRun program;
    program.began = times;
    run(program, set, ops, num_ops, step, num_threads);
    times[num_ops] = now_ns();
  } else {
    ProgramRun program;
    run(program, set, ops, num_ops, step, num_threads);
  }
  const bool is_lost = take_lost();
  if (out_of_memory.exchange(0))
    return -1;
  return is_lost ? -3 : 0;
}

}  // namespace

bool has_matrix_unit() {
#if defined(__x86_64__) && defined(__linux__)
  static std::atomic<int> known{-1};
  int has = known.load(std::memory_order_relaxed);
  if (has < 0) {
    constexpr unsigned kBf16 = 1u << 22;
    constexpr unsigned kTile = 1u << 24;
    constexpr int kAsk = 0x1023;
    constexpr int kTileState = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    const bool is_there = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) && (d & kTile);
    has = is_there && !syscall(SYS_arch_prctl, kAsk, kTileState);
    known.store(has, std::memory_order_relaxed);
  }
  return has;
#else
  return false;
#endif
}

void* own_memory(int64_t bytes) {
  static thread_local Memory memory;
  return memory.at_least(bytes);
}

void* shared_memory(int64_t bytes) {
  static Memory memory;
  return memory.at_least(bytes);
}

// The number of an instruction set by its name, or of the best for "". -1 if this processor or the
// library lacks it.
API int weft_find(const char* name) {
  for (int i = 0; i < kNumSets; i++) {
    const char* const here = all_sets[i].name;
    const bool wanted = *name ? !strcmp(name, here) : !slow(here);
    if (wanted && supported(here))
      return i;
  }
  return -1;
}

API const char* weft_name(int set) { return all_sets[set].name; }

// Run the operations in order over `step` with the kernels of a set, on at most `num_threads`
// threads. Returns 0, -1 if memory ran out, or -3 if a rank was lost: what the program should have
// written is then undefined. `times` [num_ops + 1], or null: when each operation began and the last
// one ended, in nanoseconds of the monotonic clock.
API int weft_run(int set, const Op* ops, int64_t num_ops, const StepArgs* step, int num_threads,
                 int64_t* times) {
  return run(set, ops, num_ops, *step, num_threads, times);
}

namespace {

int run_fused(int set, FusedStep& fused, int num_threads, int64_t* times) {
  if (!is_sound(fused))
    return -2;
  StepArgs step = lay_out(fused);
  StepArgs narrowed;
  int64_t num_body = fused.num_body;
  const int64_t num_wide = first_narrowing(fused.body, num_body);
  const bool narrows =
      num_wide < num_body && fused.num_sampling < fused.num_tokens && !fused.computes_all;
  if (narrows) {
    narrowed = narrowed_step(fused, step);
    step.narrowed = &narrowed;
    if (!fused.num_sampling)
      num_body = num_wide;
  }
  if (const int failed = run(set, fused.body, num_body, step, num_threads, times))
    return failed;
  fused.num_invalid = 0;
  if (!fused.num_sampling)
    return 0;
  if (narrows) {
    memcpy(fused.last, fused.hidden,
           size_t(fused.num_sampling * fused.hidden_size) * sizeof(float));
  } else {
    gather_last(fused);
  }
  StepArgs of_head = {};
  of_head.num_tokens = fused.num_sampling;
  of_head.adapters = fused.head_adapters;
  of_head.num_lora_blocks = fused.head_num_lora_blocks;
  of_head.lora_blocks = fused.head_lora_blocks;
  of_head.lora_rows = fused.head_lora_rows;
  int64_t* const head_times = times ? times + fused.num_body + 1 : nullptr;
  if (const int failed = run(set, fused.head, fused.num_head, of_head, num_threads, head_times))
    return failed;
  keep_tokens(fused);
  return 0;
}

}  // namespace

// Run a fused step. Returns 0, -1 if memory ran out, -3 if a rank was lost, or -2 if the plan is
// unsound: then nothing has been done. `times` [num_body + 1 + num_head + 1], or null: those of
// both programs; of `head` nothing where no request samples.
API int weft_run_fused(int set, FusedStep* fused, int num_threads, int64_t* times) {
  return run_fused(set, *fused, num_threads, times);
}

// Run a chain of fused steps, which begins with `first`; it has no windows, states, rotations or
// adapters. Returns the same. `times` has those of each step.
API int weft_run_guesses(int set, FusedStep* first, const Guesses* guesses, int num_threads,
                         int64_t* times) {
  const int64_t num = num_steps(*first, *guesses);
  for (int64_t i = 0; i < num; i++) {
    FusedStep step = i ? later_step(*first, *guesses, i) : *first;
    choose_draws(*first, *guesses, i);
    int64_t* const of_step = times ? times + i * (first->num_body + first->num_head + 2) : nullptr;
    if (const int failed = run_fused(set, step, num_threads, of_step))
      return failed;
    carry(step, *guesses);
    keep_guesses(*first, *guesses, i);
  }
  return 0;
}

}  // namespace weft
