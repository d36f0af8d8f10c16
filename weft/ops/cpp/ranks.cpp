// RanksArgs of one machine meet in memory that they share. A rank that waits looks out for a while,
// then it sleeps.

#include "ranks.h"

#include <time.h>

#include <atomic>
#include <cstddef>

#include "team.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace weft {
namespace {

constexpr int64_t kSpinNs = 100'000;      // before a rank sleeps
constexpr int64_t kSleepNs = 20'000'000;  // until it looks whether the others are still there

// Of one rank; each has lines of its own.
struct alignas(128) Seat {
  std::atomic<uint32_t> meetings;  // to which it has come
  std::atomic<uint32_t> sleepers;  // that wait for it
};

struct Head {
  Seat seats[kMaxRanks];
  alignas(128) std::atomic<uint32_t> is_lost;  // a rank has given up
};
static_assert(sizeof(Head) <= kRanksHeadBytes, "the buffers begin after the head");
static_assert(offsetof(Head, is_lost) == kRanksLostAt, "Python reads it there");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

std::atomic<int> lost{0};

Head& head_of(const RanksArgs& ranks) { return *static_cast<Head*>(ranks.shared); }

float* buffer(const RanksArgs& ranks, int64_t meeting, int64_t rank) {
  float* const buffers =
      reinterpret_cast<float*>(static_cast<char*>(ranks.shared) + kRanksHeadBytes);
  return buffers + ((meeting & 1) * ranks.size + rank) * ranks.chunk;
}

bool has_come(const Seat& seat, uint32_t meeting) {
  return int32_t(seat.meetings.load(std::memory_order_acquire) - meeting) >= 0;
}

void wake(Seat& seat) {
#if defined(__linux__)
  if (seat.sleepers.load(std::memory_order_seq_cst)) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&seat.meetings), FUTEX_WAKE, 1 << 30, nullptr,
            nullptr, 0);
  }
#else
  (void)seat;
#endif
}

void sleep_at(Seat& seat, uint32_t meeting) {
  const timespec until = {0, kSleepNs};
#if defined(__linux__)
  seat.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = seat.meetings.load(std::memory_order_seq_cst);
  if (int32_t(seen - meeting) < 0) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&seat.meetings), FUTEX_WAIT, seen, &until,
            nullptr, 0);
  }
  seat.sleepers.fetch_sub(1, std::memory_order_seq_cst);
#else
  (void)seat;
  (void)meeting;
  nanosleep(&until, nullptr);
#endif
}

bool give_up(const RanksArgs& ranks) {
  lost.store(1);
  if (ranks.shared)
    head_of(ranks).is_lost.store(1);
  return false;
}

}  // namespace

float* shown_next(const RanksArgs& ranks) { return buffer(ranks, *ranks.meetings + 1, ranks.rank); }

const float* shown_by(const RanksArgs& ranks, int64_t rank) {
  return buffer(ranks, *ranks.meetings, rank);
}

bool meet(const RanksArgs& ranks) {
  Head& head = head_of(ranks);
  const uint32_t meeting = uint32_t(++*ranks.meetings);
  Seat& mine = head.seats[ranks.rank];
  mine.meetings.store(meeting, std::memory_order_seq_cst);
  wake(mine);
  const int64_t began = now_ns();
  for (int64_t rank = 0; rank < ranks.size; rank++) {
    Seat& seat = head.seats[rank];
    while (!has_come(seat, meeting)) {
      if (head.is_lost.load(std::memory_order_relaxed))
        return give_up(ranks);
      const int64_t waited = now_ns() - began;
      if (waited > ranks.timeout_ns)
        return give_up(ranks);
      if (waited > kSpinNs) {
        sleep_at(seat, meeting);
        continue;
      }
#if defined(__x86_64__)
      for (int i = 0; i < 20; i++)
        __builtin_ia32_pause();
#endif
    }
  }
  return true;
}

bool call(const RanksArgs& ranks, RankAction what, const float* data, int64_t num, float* out) {
  if (ranks.call(what, data, num, out) == 0)
    return true;
  return give_up(ranks);
}

bool take_lost() { return lost.exchange(0) != 0; }

}  // namespace weft
