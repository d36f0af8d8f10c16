// The threads of the library: they sleep between runs, look out for work for a while after one, and
// join what is open.

#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "pool.h"

namespace weft {
namespace {

constexpr int kMostThreads = 120;
// How long a thread looks out for the next run before it sleeps.
constexpr int64_t kSpinNs = 200'000;
constexpr uint64_t kOperation = uint64_t(1) << 16, kClosed = uint64_t(1) << 15,
                   kCame = uint64_t(1) << 8;

uint64_t run_of(uint64_t state) { return state >> 36; }
int64_t operation_of(uint64_t state) { return int64_t(state >> 16 & 0xfffff); }
int came(uint64_t state) { return int(state >> 8 & 0x7f); }
int there(uint64_t state) { return int(state & 0xff); }

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// While it lives, this thread takes numbers too small for a normal float for 0: they would cost a
// hundred cycles each.
class TinyIsZero {
 public:
#if defined(__x86_64__)
  TinyIsZero() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
  ~TinyIsZero() { __builtin_ia32_ldmxcsr(before_); }

 private:
  const unsigned before_;
#endif
};

Meeting meeting;

// What is run. Read by threads that may be late: what they read counts only if they can then join
// the operation.
struct {
  std::atomic<Work*> work{nullptr};
  std::atomic<int64_t> num_operations{0};
  std::atomic<int> num_threads{1};
} current;

pthread_mutex_t one_run = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t sleeping = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
std::atomic<int> num_sleeping{0};
std::atomic<int> num_workers{0};

// Looking at memory until something changes: short at first, then letting others have the core.
class SpinWait {
 public:
  void again() {
    if (++looks_ < 2'000) {
      pause();
    } else {
      sched_yield();
    }
  }

 private:
  int looks_ = 0;
};

// Take part in run `run` until it is over. `thread` is 0 for the one that began it.
void take_part(uint64_t run, int thread) {
  SpinWait spin;
  for (;;) {
    uint64_t state = meeting.state.load(std::memory_order_acquire);
    if (run_of(state) != run)
      return;
    const int64_t operation = operation_of(state);
    const int64_t num_operations = current.num_operations.load(std::memory_order_relaxed);
    const int size = current.num_threads.load(std::memory_order_relaxed);
    Work* const work = current.work.load(std::memory_order_relaxed);
    if (state & kClosed) {
      if (operation >= num_operations && !there(state))
        return;
      spin.again();
      continue;
    }
    if (thread >= size)
      return;
    if (!meeting.state.compare_exchange_weak(state, state + kCame + 1, std::memory_order_acq_rel))
      continue;
    // No other run can begin before this thread leaves: what was read above is right.
    Team team(meeting, came(state), size);
    work->run(operation, team);
    state = meeting.state.load(std::memory_order_relaxed);
    while (!meeting.state.compare_exchange_weak(state, (state | kClosed) - 1,
                                                std::memory_order_acq_rel)) {
    }
    if (there(state) == 1) {  // the last to leave opens the next
      meeting.next.store(0, std::memory_order_relaxed);
      const uint64_t next = (state & ~(kOperation - 1)) + kOperation;
      meeting.state.store(next | (operation + 1 < num_operations ? 0 : kClosed),
                          std::memory_order_release);
    }
    spin = SpinWait();
  }
}

void* worker(void* number) {
  const int thread = int(reinterpret_cast<intptr_t>(number));
  const TinyIsZero tiny_is_zero;
  uint64_t seen = run_of(meeting.state.load(std::memory_order_acquire)) - 1;
  for (;;) {
    const int64_t until = now_ns() + kSpinNs;
    while (run_of(meeting.state.load(std::memory_order_acquire)) == seen) {
      for (int i = 0; i < 50; i++)
        pause();
      if (now_ns() < until)
        continue;
      pthread_mutex_lock(&sleeping);
      num_sleeping.fetch_add(1, std::memory_order_seq_cst);
      while (run_of(meeting.state.load(std::memory_order_seq_cst)) == seen)
        pthread_cond_wait(&wake, &sleeping);
      num_sleeping.fetch_sub(1, std::memory_order_relaxed);
      pthread_mutex_unlock(&sleeping);
    }
    seen = run_of(meeting.state.load(std::memory_order_acquire));
    take_part(seen, thread);
  }
  return nullptr;
}

// Have `wanted` threads besides the caller's; with fewer the work is done as well.
void start_workers(int wanted) {
  for (int n = num_workers.load(std::memory_order_relaxed); n < wanted && n < kMostThreads - 1;
       n++) {
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    const int failed =
        pthread_create(&thread, &attributes, worker, reinterpret_cast<void*>(intptr_t(n + 1)));
    pthread_attr_destroy(&attributes);
    if (failed)
      return;
    num_workers.store(n + 1, std::memory_order_relaxed);
  }
}

// After a fork the child has none of the threads.
void forget_workers() {
  num_workers.store(0, std::memory_order_relaxed);
  num_sleeping.store(0, std::memory_order_relaxed);
  one_run = PTHREAD_MUTEX_INITIALIZER;
  sleeping = PTHREAD_MUTEX_INITIALIZER;
  wake = PTHREAD_COND_INITIALIZER;
}

}  // namespace

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t(1'000'000'000) + t.tv_nsec;
}

void run_together(Work& work, int64_t num_operations, int num_threads) {
  if (num_operations <= 0)
    return;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_workers);
  (void)registered;
  num_threads = num_threads < 1 ? 1 : num_threads > kMostThreads ? kMostThreads : num_threads;
  const TinyIsZero tiny_is_zero;
  pthread_mutex_lock(&one_run);
  start_workers(num_threads - 1);
  current.work.store(&work, std::memory_order_relaxed);
  current.num_operations.store(num_operations, std::memory_order_relaxed);
  current.num_threads.store(num_threads, std::memory_order_relaxed);
  const uint64_t run = (run_of(meeting.state.load(std::memory_order_relaxed)) + 1) & 0xfffffff;
  meeting.next.store(0, std::memory_order_relaxed);
  meeting.state.store(run << 36, std::memory_order_seq_cst);
  if (num_threads > 1 && num_sleeping.load(std::memory_order_seq_cst)) {
    pthread_mutex_lock(&sleeping);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleeping);
  }
  take_part(run, 0);
  pthread_mutex_unlock(&one_run);
}

void Team::barrier() {
  const uint64_t state = meeting_.state.fetch_or(kClosed, std::memory_order_acq_rel);
  const int members = came(state);
  if (members == 1) {
    meeting_.next.store(0, std::memory_order_relaxed);
    return;
  }
  const int32_t round = meeting_.round.load(std::memory_order_acquire);
  if (meeting_.arrived.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
    meeting_.arrived.store(0, std::memory_order_relaxed);
    meeting_.next.store(0, std::memory_order_relaxed);
    meeting_.round.store(round + 1, std::memory_order_release);
    return;
  }
  SpinWait spin;
  while (meeting_.round.load(std::memory_order_acquire) == round)
    spin.again();
}

}  // namespace weft
