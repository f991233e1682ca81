#include "core/interrupt.h"

#include <algorithm>
#include <atomic>

namespace pycomm {
namespace {

std::atomic<void (*)()> the_check{nullptr};
// A check may wait for the interpreter's lock, and a thread that waits for other ranks makes no
// other progress meanwhile: checks take one part of five.
constexpr int kShare = 4;

}  // namespace

void set_interrupt_check(void (*check)()) { the_check = check; }

void check_interrupt() {
  if (auto* const check = the_check.load()) check();
}

void InterruptPoll::check_now() {
  const auto start = Clock::now();
  check_interrupt();
  const auto end = Clock::now();
  next_ = end + std::max<Clock::duration>(kEach, kShare * (end - start));
}

}  // namespace pycomm
