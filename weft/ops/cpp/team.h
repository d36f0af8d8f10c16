// The threads that run an operation together: the index of a thread, its next work, barriers.
//
// Cores are shared with other threads and other processes, so any thread may be delayed at any
// moment for longer than a whole step takes. Therefore no thread ever waits for one that is not at
// work: an operation is done by those threads that come while it is open, one of them at least, and
// it is over when they are through. A thread that comes late goes on with the operation that is
// then under way.
#pragma once

#include <atomic>
#include <cstdint>

namespace weft {

// Where a run stands, for all threads. One for the library: runs follow one another.
struct Meeting {
  // The operation that is under way and which threads are at it:  run:28 | operation:20 | closed:1
  // | came:7 | there:8 Closed: no thread may join any more, because its first barrier has been
  // passed, or its work has been taken.
  std::atomic<uint64_t> state{uint64_t(1) << 15};
  alignas(64) std::atomic<int64_t> next{0};  // work items taken since the last barrier
  alignas(64) std::atomic<int32_t> arrived{0};
  alignas(64) std::atomic<int32_t> round{0};
};

class Team {
 public:
  Team(Meeting& meeting, int index, int size) : index(index), size(size), meeting_(meeting) {}

  // Of this thread among those that have come to this operation; there is always one with 0.
  const int index;
  const int size;  // how many may come at most

  // How many have come. Only after the operation's first barrier: then it is final.
  int present() const { return int(meeting_.state.load(std::memory_order_relaxed) >> 8 & 0x7f); }

  // The first of the next `count` work items that no thread has taken since the last barrier; items
  // are numbered from 0, and it is for the caller to stop at the last.
  int64_t take(int64_t count = 1) {
    return meeting_.next.fetch_add(count, std::memory_order_relaxed);
  }

  // Wait until all that have come to this operation have come here. What they wrote before is seen
  // by all after.
  void barrier();

 private:
  Meeting& meeting_;
};

// Whether this processor multiplies matrices of bf16 by a unit of their own (AMX), and lets this
// process use it.
bool has_matrix_unit();

// Nanoseconds of the monotonic clock.
int64_t now_ns();

// Memory for the operation that runs, at least `bytes`, aligned to 64. Its content is gone at the
// next call by the same thread (own_memory), or by any (shared_memory, which may only be called by
// index 0; give others the pointer through a barrier). Returns null if there is none; the operation
// then must do nothing, and `run` reports it.
void* own_memory(int64_t bytes);
void* shared_memory(int64_t bytes);

}  // namespace weft
