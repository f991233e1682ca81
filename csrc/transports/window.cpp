// The slow side of the Window: long waits, and what goes wrong in them.
#include "transports/window.h"

#include "transports/pace.h"
#include "transports/watch.h"

namespace pycomm {

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
  const auto ready = [&] { return arrived(rank, stage); };
  const auto patrol = [&] {
    compare_tags(stage);
    watch_.check();
    if (watch_.left(rank) && !ready()) watch_.throw_left(rank);
    if (deadline_.expired()) throw_timeout(stage);
  };
  const auto sleep = [&](std::chrono::microseconds limit) {
    const auto news = [&] { return ready() || watch_.aborted() || watch_.left(rank); };
    segment_.board(rank).posted.sleep(news, limit);
  };
  wait_until(spin_, ready, patrol, sleep);
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
    throw WireMismatch(name(rank_) + " calls " + pycomm::describe(tag_) + ", " + name(r) +
                       " calls " + pycomm::describe(theirs));
  }
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
