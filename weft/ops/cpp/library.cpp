// The entry points of the library: choosing an instruction set, joining torch's threads, running programs.
//
// The library is not linked with an OpenMP runtime. It is handed the functions of the one that torch has loaded, so that
// both use one pool of threads: two pools on the same cores would wait for each other.

#include <cstdlib>
#include <cstring>
#if defined(__linux__)
#include <sched.h>
#endif

#include "program.h"
#include "team.h"

#define API extern "C" __attribute__((visibility("default")))

namespace weft {

using Kernel = void (*)(const void* args, const Step& step, Team& team);

struct InstructionSet {
  const char* name;
  const Kernel* kernels;  // [kNumOps]
};

// WEFT_SETS lists the instruction sets in this library, the best first: SET(avx512_bf16) SET(avx2) ...
#define SET(name) extern const Kernel kernels_##name[kNumOps];
WEFT_SETS
#undef SET

namespace {

struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
} openmp;

const Kernel* kernels = nullptr;
const char* chosen = "";
std::atomic<int> out_of_memory{0};
int spins = 20000;  // looks at the barrier before a thread offers its core to others

bool supported(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (!strcmp(name, "avx512_bf16")) return vnni && __builtin_cpu_supports("avx512bf16");
  if (!strcmp(name, "avx512_vnni") || !strcmp(name, "emulated_bf16")) return vnni;
  if (!strcmp(name, "avx512")) return avx512;
  if (!strcmp(name, "avx2")) return avx2;
#endif
  return !strcmp(name, "portable");
}

#define SET(name) {#name, kernels_##name},
const InstructionSet all_sets[] = {WEFT_SETS};
#undef SET

struct Run {
  const Op* ops;
  int64_t num_ops;
  const Step* step;
  Meeting meeting;
};

void work(void* data) {
  Run& run = *static_cast<Run*>(data);
  const bool alone = openmp.parallel == nullptr;
  Team team(run.meeting, alone ? 0 : openmp.thread_num(), alone ? 1 : openmp.num_threads());
  for (int64_t i = 0; i < run.num_ops; i++) {
    kernels[run.ops[i].kind](run.ops[i].args, *run.step, team);
    team.barrier();
  }
}

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

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void Team::barrier() {
  if (size == 1) {
    meeting_.next.store(0, std::memory_order_relaxed);
    return;
  }
  const int32_t round = meeting_.round.load(std::memory_order_acquire);
  if (meeting_.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
    meeting_.arrived.store(0, std::memory_order_relaxed);
    meeting_.next.store(0, std::memory_order_relaxed);
    meeting_.round.store(round + 1, std::memory_order_release);
    return;
  }
  for (int64_t looks = 0; meeting_.round.load(std::memory_order_acquire) == round; looks++) {
    if (looks < spins) {
      pause();
    } else {
#if defined(__linux__)
      sched_yield();  // fewer cores than threads: the one we wait for may want this one
#endif
    }
  }
}

void* own_memory(int64_t bytes) {
  static thread_local Memory memory;
  return memory.at_least(bytes);
}

void* shared_memory(int64_t bytes) {
  static Memory memory;
  return memory.at_least(bytes);
}

// Use the threads behind these functions of an OpenMP runtime (the GNU names); without this call there is one thread.
API void weft_use_openmp(void* parallel, void* thread_num, void* num_threads) {
  memcpy(&openmp.parallel, &parallel, sizeof parallel);
  memcpy(&openmp.thread_num, &thread_num, sizeof thread_num);
  memcpy(&openmp.num_threads, &num_threads, sizeof num_threads);
}

API void weft_set_spins(int value) { spins = value; }

// Choose an instruction set by name, or the best for "". Returns 0, or -1 if this processor or the library lacks it.
API int weft_choose(const char* name) {
  for (const InstructionSet& set : all_sets) {
    if ((*name && strcmp(name, set.name)) || !supported(set.name)) continue;
    kernels = set.kernels;
    chosen = set.name;
    return 0;
  }
  return -1;
}

API const char* weft_chosen() { return chosen; }

// Sizes of the structures that both sides declare, in the order of program.h; a test compares them with abi.py's.
API int64_t weft_sizeof(int64_t index) {
  const int64_t sizes[] = {sizeof(Step),         sizeof(Op),       sizeof(Weight),          sizeof(PackArgs),
                           sizeof(EmbedArgs),    sizeof(NormArgs), sizeof(LinearArgs),      sizeof(KvCache),
                           sizeof(RotaryStoreArgs), sizeof(AttentionArgs), sizeof(ArgmaxArgs), sizeof(MaskArgs),
                           sizeof(DrawArgs)};
  return index < int64_t(sizeof sizes / sizeof *sizes) ? sizes[index] : -1;
}

// Run the operations in order over `step`, on at most `num_threads` threads (0: as many as OpenMP gives). One program at
// a time. Returns 0, or -1 if memory ran out: what the program should have written is then undefined.
API int weft_run(const Op* ops, int64_t num_ops, const Step* step, int num_threads) {
  Run run{ops, num_ops, step, {}};
  out_of_memory.store(0);
  if (openmp.parallel) {
    openmp.parallel(work, &run, num_threads, 0);
  } else {
    work(&run);
  }
  return out_of_memory.load() ? -1 : 0;
}

}  // namespace weft
