// The threads that run a program together: who am I, what is next, wait for the others.
#pragma once

#include <atomic>
#include <cstdint>

namespace weft {

// Shared by the threads of one run.
struct alignas(64) Meeting {
  std::atomic<int64_t> next{0};  // work items taken since the last barrier
  alignas(64) std::atomic<int32_t> arrived{0};
  alignas(64) std::atomic<int32_t> round{0};
};

class Team {
 public:
  Team(Meeting& meeting, int index, int size) : index(index), size(size), meeting_(meeting) {}

  const int index;  // of this thread, 0..size - 1
  const int size;

  // The first of the next `count` work items that nobody has taken since the last barrier; items are numbered from 0,
  // and it is for the caller to stop at the last.
  int64_t take(int64_t count = 1) {
    return size == 1 ? take_alone(count) : meeting_.next.fetch_add(count, std::memory_order_relaxed);
  }

  // Wait until all threads have come here. What they wrote before is seen by all after.
  void barrier();

 private:
  int64_t take_alone(int64_t count) {
    int64_t first = meeting_.next.load(std::memory_order_relaxed);
    meeting_.next.store(first + count, std::memory_order_relaxed);
    return first;
  }

  Meeting& meeting_;
};

// Memory for the operation that runs, at least `bytes`, aligned to 64. Its content is gone at the next call by the same
// thread (own_memory), or by any (shared_memory, which may only be called by thread 0; give others the pointer through
// a barrier). Returns null if there is none; the operation then must do nothing, and `run` reports it.
void* own_memory(int64_t bytes);
void* shared_memory(int64_t bytes);

}  // namespace weft
