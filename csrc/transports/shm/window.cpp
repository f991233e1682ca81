// Window: long waits, and the errors in them.
#include "transports/shm/window.h"

#include <unistd.h>

#include <thread>

#include "core/interrupt.h"
#include "transports/fd.h"
#include "transports/shm/cma.h"
#include "transports/shm/failure_detector.h"

namespace pycomm {
namespace {

/// The most bytes that are read between two checks that the group still lives.
constexpr size_t kReadAtMost = size_t{4} << 20;
/// The time that a wait sleeps between two calls of `drive`.
constexpr std::chrono::microseconds kDriveEach{50};
/// A process that dies gives up its memory before the kernel reports its end to the
/// FailureDetector.
constexpr Milliseconds kExitDelay(500);

}  // namespace

Window::Window(const SharedRegion& region, FailureDetector& detector, int rank, SpinPace pace)
    : region_(region),
      detector_(detector),
      own_slot_(&region.rank_slot(rank)),
      rank_(rank),
      size_(region.ranks()),
      pace_(pace),
      heaps_(region.has_heaps()) {
  for (int r = 0; heaps_ && r < size_; r++) heap_of_.push_back(region.heap(r));
}

int Window::member(int rank) const { return detector_.member(rank); }

std::string Window::name(int rank) const { return "rank " + std::to_string(member(rank)); }

void Window::wait_long(int rank, uint32_t stage) {
  const uint64_t since = ticks();
  const auto ready = [&] { return arrived(rank, stage); };
  bool driven = false;
  InterruptPoll interrupts;
  const auto check = [&] {
    driven = drive_ && drive_();
    compare_tags(stage);
    if (!detector_.aborted() || aborted_here()) detector_.check();
    if (detector_.left(rank) && !ready()) {
      compare_tags(stage);  // it may have left because of a mismatch, since the comparison above
      detector_.throw_left(rank);
    }
    if (deadline_.expired()) throw_timeout(stage);
    interrupts.check();
  };
  const auto sleep = [&](std::chrono::microseconds limit) {
    const auto done = [&] { return ready() || detector_.aborted() || detector_.left(rank); };
    region_.rank_slot(rank).posted.sleep(done, driven ? kDriveEach : limit);
  };
  wait_until(pace_, ready, check, sleep);
  if (timing_) timing_->waited += ticks() - since;
}

bool Window::has_completed(int rank) const {
  std::atomic_thread_fence(std::memory_order_acquire);  // a rank completes a call before it aborts
  const RankState theirs = region_.rank_slot(rank).rank_state.load();
  return tag_.seq != 0 && theirs.completed >= tag_.seq;
}

void Window::compare_tags(uint32_t stage) const {
  if (stage != first_stage_) return;
  for (int r = 0; r < size_; r++) {
    const RankSlot& rank_slot = region_.rank_slot(r);
    const uint64_t seen = rank_slot.flags[stage % 2].value.load(std::memory_order_acquire);
    if (seen == (hash_ | stage)) continue;  // by now it may be in its next call
    OpTag theirs;
    // A tag that is being written is compared at the next poll.
    if (!rank_slot.rank_state.call.load(theirs) || theirs.hash() == tag_.hash()) continue;
    if (static_cast<uint32_t>(seen) != stage && theirs.seq != tag_.seq) continue;
    throw WireMismatch(name(rank_) + " calls " + describe_fully(tag_) + ", " + name(r) + " calls " +
                       describe_fully(theirs));
  }
}

uint64_t Window::private_place(const void* data, size_t bytes) const {
  // A forked child is not the process that peers would read.
  if (!all_read() || own_slot_->process[0] != static_cast<uint64_t>(::getpid())) return 0;
  return cma::showable(data, bytes) ? kPrivate | reinterpret_cast<uint64_t>(data) : 0;
}

bool Window::all_read() const {
  for (int r = 0; r < size_; r++) {
    if (region_.rank_slot(r).reads.load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

void Window::read_private(int rank, uint64_t address, void* to, size_t bytes) {
  const auto process = static_cast<pid_t>(region_.rank_slot(rank).process[0]);
  for (size_t done = 0; done < bytes;) {
    detector_.check();
    const size_t size = std::min(kReadAtMost, bytes - done);
    const auto* from = reinterpret_cast<const uint8_t*>(address) + done;
    const int error = cma::read(process, from, static_cast<uint8_t*>(to) + done, size);
    if (error != 0) throw_unreadable(rank, error);
    done += size;
  }
}

void Window::throw_unreadable(int rank, int error) {
  const Deadline exit_deadline = Deadline::after(kExitDelay);
  do {
    detector_.check_now();
    if (detector_.left(rank)) detector_.throw_left(rank);
    std::this_thread::sleep_for(Milliseconds(1));
  } while (!exit_deadline.expired());
  throw Error(name(rank_) + " cannot read the memory of " + name(rank) + " for " +
              pycomm::describe(tag_) + ": " + error_text(error) +
              "; a collective's buffers must stay mapped and readable until it ends");
}

void Window::throw_aborted() const {
  detector_.check_now();
  throw_broken();  // not reached: the rank that has aborted has
}

void Window::throw_timeout(uint32_t stage) const {
  std::vector<int> silent;
  for (int r = 0; r < size_; r++) {
    if (r != rank_ && !arrived(r, stage)) silent.push_back(member(r));
  }
  throw Timeout(name(rank_) + ": " + pycomm::describe(tag_) +
                    " did not end within the timeout of " +
                    std::to_string(deadline_.limit().count()) + " ms",
                silent);
}

void Window::throw_broken() const {
  throw Error(name(rank_) + ": an earlier collective of this group failed in its middle (" +
              pycomm::describe(tag_) + "); make a new group");
}

}  // namespace pycomm
