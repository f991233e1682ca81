#include "transports/shm/failure_detector.h"

#include <poll.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <thread>

#include "core/deadline.h"
#include "core/error.h"
#include "transports/shm/cma.h"

namespace pycomm {
namespace {

constexpr int64_t kCheckEvery = 1000000;  // ns
/// The interval of the checks that read /proc.
constexpr int64_t kProcCheckEvery = 50000000;  // ns
/// The time that a rank may take from the start of an abort to its reason.
constexpr Milliseconds kReasonLimit(200);

int64_t now_ns() {
  using std::chrono::duration_cast;
  return duration_cast<std::chrono::nanoseconds>(Deadline::Clock::now().time_since_epoch()).count();
}

}  // namespace

FailureDetector::FailureDetector(const SharedRegion& region, std::vector<int> members, int self)
    : region_(region), members_(std::move(members)), self_(self) {
  const RankSlot& ours = region_.rank_slot(self_);
  for (int r = 0; r < region_.ranks(); r++) {
    const RankSlot& theirs = region_.rank_slot(r);
    if (!region_.present(r) || theirs.process[0] == ours.process[0]) continue;
    // Where /proc is not mounted, it may be the number of another process.
    if (theirs.process[1] == 0 && !cma::proves(theirs)) continue;
    watched_.push_back(r);
    processes_.push_back(std::make_unique<PeerProcess>(theirs));
  }
}

void FailureDetector::sign(RankSlot& rank_slot) {
  struct stat space = {};
  ::stat("/proc/self/ns/pid", &space);
  rank_slot.process[0] = static_cast<uint64_t>(::getpid());
  rank_slot.process[1] = space.st_ino;
  rank_slot.birth = process_birth();
  rank_slot.address = reinterpret_cast<uint64_t>(&rank_slot);
  ::sched_getaffinity(0, sizeof rank_slot.cpus, &rank_slot.cpus);
}

void FailureDetector::check() {
  if (!aborted()) {
    const int64_t now = now_ns();
    if (now < next_check_.load(std::memory_order_relaxed)) return;
    next_check_.store(now + kCheckEvery, std::memory_order_relaxed);
  }
  check_now();
}

void FailureDetector::check_now() {
  check_deaths();
  if (aborted()) throw_aborted();
}

void FailureDetector::throw_aborted() const {
  const Header& header = region_.header();
  uint32_t state = header.abort.load(std::memory_order_acquire);
  for (const Deadline reason_deadline = Deadline::after(kReasonLimit);
       state % Header::kStep != Header::kAborted && !reason_deadline.expired();
       state = header.abort.load(std::memory_order_acquire)) {
    std::this_thread::sleep_for(Milliseconds(1));
  }
  const int who = member(static_cast<int>(state / Header::kStep));
  if (state % Header::kStep == Header::kAborted) {
    Notice notice = Notice::decode({header.notice, sizeof header.notice});
    notice.from = who;
    throw Aborted(std::move(notice));
  }
  throw Error("rank " + std::to_string(who) +
              " aborted the group, but its reason did not arrive: it was stopped or died "
              "meanwhile; look at its own log");
}

bool FailureDetector::died(int rank) const {
  const auto found = std::lower_bound(watched_.begin(), watched_.end(), rank);
  if (found == watched_.end() || *found != rank) return false;
  return processes_[static_cast<size_t>(found - watched_.begin())]->ended() && !left(rank);
}

bool FailureDetector::stopped(int rank) const {
  return is_stopped(static_cast<pid_t>(region_.rank_slot(rank).process[0]));
}

void FailureDetector::check_deaths() {
  pollfd wanted[kMaxRanks];
  const size_t count = watched_.size();
  bool any = false;
  for (size_t i = 0; i < count; i++) {
    wanted[i] = {processes_[i]->fd(), POLLIN, 0};
    any = any || wanted[i].fd >= 0;
  }
  if (any && ::poll(wanted, count, 0) < 0) any = false;
  for (size_t i = 0; i < count; i++) {
    PeerProcess& process = *processes_[i];
    const bool asked = any && wanted[i].fd >= 0;
    throw_if_dead(i, asked ? process.ended(wanted[i].revents) : process.ended());
  }
  const int64_t now = now_ns();
  if (count == 0 || now < next_proc_check_.load(std::memory_order_relaxed)) return;
  next_proc_check_.store(now + kProcCheckEvery, std::memory_order_relaxed);
  // Each call checks one rank, and each rank begins with another: a rank that finds a death tells
  // all.
  const size_t i = (static_cast<size_t>(self_) + proc_checks_.fetch_add(1)) % count;
  throw_if_dead(i, processes_[i]->check_proc());
}

void FailureDetector::throw_if_dead(size_t i, bool dead) const {
  if (!dead || left(watched_[i])) return;
  throw_error(lost(member(watched_[i]), std::string("died: ") + processes_[i]->how() +
                                            " (seen by rank " + std::to_string(member(self_)) +
                                            "); look at its own log"));
}

void FailureDetector::throw_left(int rank) {
  check_now();
  throw_error(lost(member(rank), "left the group while rank " + std::to_string(member(self_)) +
                                     " still waits for it; let all ranks make the same calls"));
}

void FailureDetector::abort(const Notice& notice) noexcept {
  Header& header = region_.header();
  uint32_t none = Header::kNone;
  const uint32_t who = static_cast<uint32_t>(self_) * Header::kStep;
  const bool first = header.abort.compare_exchange_strong(none, who | Header::kWriting);
  // Our caller may reuse its buffers now: a peer that reads such bytes must see the abort too.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!first) return;  // only the first notice counts
  notice.encode(header.notice, sizeof header.notice);
  header.abort.store(who | Header::kAborted, std::memory_order_release);
  wake_all();
}

void FailureDetector::leave() noexcept {
  // A forked child that runs our destructors is not this rank.
  if (region_.rank_slot(self_).process[0] != static_cast<uint64_t>(::getpid())) return;
  region_.rank_slot(self_).left.store(1, std::memory_order_release);
  wake_all();
}

void FailureDetector::wake_all() const noexcept {
  for (int r = 0; r < region_.ranks(); r++) {
    RankSlot& rank_slot = region_.rank_slot(r);
    rank_slot.posted.ring_now();
    for (Doorbell& doorbell : rank_slot.moved) doorbell.ring_now();
  }
}

}  // namespace pycomm
