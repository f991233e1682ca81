// The slow side of the Window: long waits, and what goes wrong in them.
#include "transports/window.h"

#include "transports/pace.h"
#include "transports/watch.h"

namespace pycomm {
namespace {

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

Window::Window(const Segment& segment, Watch& watch, int rank, int spin)
    : segment_(segment),
      watch_(watch),
      board_(&segment.board(rank)),
      rank_(rank),
      size_(segment.ranks()),
      spin_(spin) {}

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
    const uint64_t seen = segment_.board(r).flags[stage % 2].value.load(std::memory_order_acquire);
    if (static_cast<uint32_t>(seen) != stage || seen == (hash_ | stage)) continue;
    throw WireMismatch(rank_text(rank_) + " calls " + pycomm::describe(board_->tag.load()) +
                       " while " + rank_text(r) + " calls " +
                       pycomm::describe(segment_.board(r).tag.load()) +
                       ": all ranks must make the same calls in the same order");
  }
}

void Window::throw_timeout(uint32_t stage) const {
  const OpTag ours = board_->tag.load();
  std::string text = rank_text(rank_) + ": " + pycomm::describe(ours) + " did not end within " +
                     std::to_string(deadline_.limit().count()) + " ms";
  for (int i = 1; i < size_; i++) {
    if (arrived(peer(i), stage)) continue;
    const OpTag theirs = segment_.board(peer(i)).tag.load();
    text += "; " + rank_text(peer(i));
    if (theirs.hash() == ours.hash()) {
      text += " is in it and does not go on";
    } else if (theirs.op == Op::none) {
      text += " did not come, nor to any collective before";
    } else {
      text += " did not come, it was last in " + pycomm::describe(theirs);
    }
  }
  throw Timeout(text);
}

void Window::throw_broken() const {
  throw Error(rank_text(rank_) + ": an earlier collective of this group failed in its middle (" +
              pycomm::describe(board_->tag.load()) + "); make a new group");
}

}  // namespace pycomm
