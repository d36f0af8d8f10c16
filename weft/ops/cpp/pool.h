// Running operations on the threads of team.cpp.
#pragma once

#include <cstdint>

#include "team.h"

namespace weft {

struct Work {
  virtual void run(int64_t operation, Team& team) = 0;  // called by every thread that comes
};

// Run operations 0, 1, .. in order on at most `num_threads` threads, this one among them. One call
// at a time: others wait.
void run_together(Work& work, int64_t num_operations, int num_threads);

}  // namespace weft
