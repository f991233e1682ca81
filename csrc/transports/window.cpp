// The slow side of the Window: long waits, and what goes wrong in them.
#include "transports/window.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <thread>

#include "transports/pace.h"
#include "transports/peer_memory.h"
#include "transports/watch.h"

namespace pycomm {
namespace {

/// Read at once, before we look whether the group still lives.
constexpr size_t kReadAtMost = size_t{4} << 20;
/// How long a wait sleeps between two moves of what else is on its way.
constexpr std::chrono::microseconds kDriveEach{50};
/// A process that dies gives up its memory before its lock, by which the Watch knows that it lives.
constexpr Milliseconds kDying(500);

}  // namespace

Window::Window(const Segment& segment, Watch& watch, int rank, int spin)
    : segment_(segment),
      watch_(watch),
      board_(&segment.board(rank)),
      rank_(rank),
      size_(segment.ranks()),
      spin_(spin),
      heaps_(segment.has_heaps()) {}

int Window::member(int rank) const { return watch_.member(rank); }

std::string Window::name(int rank) const { return "rank " + std::to_string(member(rank)); }

void Window::wait_long(int rank, uint32_t stage) {
  const uint64_t since = ticks();
  const auto ready = [&] { return arrived(rank, stage); };
  bool driven = false;
  const auto patrol = [&] {
    driven = drive_ && drive_();
    compare_tags(stage);
    watch_.check();
    if (watch_.left(rank) && !ready()) watch_.throw_left(rank);
    if (deadline_.expired()) throw_timeout(stage);
  };
  const auto sleep = [&](std::chrono::microseconds limit) {
    const auto news = [&] { return ready() || watch_.aborted() || watch_.left(rank); };
    segment_.board(rank).posted.sleep(news, driven ? kDriveEach : limit);
  };
  wait_until(spin_, ready, patrol, sleep);
  if (spent_) spent_->wait_ended(since, member(rank));
}

void Window::compare_tags(uint32_t stage) const {
  if (stage != first_stage_) return;
  for (int r = 0; r < size_; r++) {
    const Board& board = segment_.board(r);
    const uint64_t seen = board.flags[stage % 2].value.load(std::memory_order_acquire);
    if (seen == (hash_ | stage)) continue;  // by now it may be in its next call
    OpTag theirs;
    // A tag that is written right now is compared at the next look.
    if (!board.standing.call.load(theirs) || theirs.hash() == tag_.hash()) continue;
    if (static_cast<uint32_t>(seen) != stage && theirs.seq != tag_.seq) continue;
    throw WireMismatch(name(rank_) + " calls " + describe_fully(tag_) + ", " + name(r) + " calls " +
                           describe_fully(theirs),
                       member(r), theirs);
  }
}

uint64_t Window::private_place(const void* data, size_t bytes) const {
  // A forked child is not the process that peers would read.
  if (!all_read() || board_->process[0] != static_cast<uint64_t>(::getpid())) return 0;
  return peer_memory::showable(data, bytes) ? kPrivate | reinterpret_cast<uint64_t>(data) : 0;
}

bool Window::all_read() const {
  for (int r = 0; r < size_; r++) {
    if (segment_.board(r).reads.load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

void Window::read_private(int rank, uint64_t address, void* to, size_t bytes) {
  const auto process = static_cast<pid_t>(segment_.board(rank).process[0]);
  for (size_t done = 0; done < bytes;) {
    watch_.check();
    const size_t size = std::min(kReadAtMost, bytes - done);
    const auto* from = reinterpret_cast<const uint8_t*>(address) + done;
    const int error = peer_memory::read(process, from, static_cast<uint8_t*>(to) + done, size);
    if (error != 0) throw_unreadable(rank, error);
    done += size;
  }
}

void Window::throw_unreadable(int rank, int error) {
  const Deadline patience = Deadline::after(kDying);
  do {
    watch_.check_now();
    if (watch_.left(rank)) watch_.throw_left(rank);
    std::this_thread::sleep_for(Milliseconds(1));
  } while (!patience.expired());
  throw Error(name(rank_) + " cannot read the memory of " + name(rank) + " for " +
              pycomm::describe(tag_) + ": " + std::generic_category().message(error) +
              "; a collective's buffers must stay mapped and readable until it ends");
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
